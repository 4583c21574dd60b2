"""torchrun's options under their own names: supported ones, ones without effect (reported), and refused ones.

In: argparse, PET_* variables. Out: values for UpOptions, the rendezvous (the job's own coordinator, or one of torch's
backends), what the console shows of each rank, notices for the user, refusals.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from remote_agent.wire import PORTS, Rendezvous, read_conf, split_endpoint
from supervisor.cli.options import read_seconds, source_words
from supervisor.errors import UsageError

if TYPE_CHECKING:
    from supervisor.cli.options import Parser

OptionRow = tuple[tuple[str, ...], "str | None", str]
"""The spellings of an option, its metavar (None: a switch), its help or the reason."""

# Supported options.
ACTING: tuple[OptionRow, ...] = (
    (("--nnodes",), "N|MIN:MAX", "nodes to run on (default: min_nodes and max_nodes of HOSTS)"),
    (("--nproc-per-node",), "N|auto|gpu|cpu|xpu", "ranks on each node (default: nproc_per_node of HOSTS)"),
    (
        ("--max-restarts",),
        "N",
        "maximum number of restarts after failures; the same failure twice without a step ends the job",
    ),
    (("--rdzv-id",), "ID", "the job's id, like --job"),
    (
        ("--rdzv-backend",),
        "NAME",
        "c10d, etcd-v2, etcd or static: torch's own agents form the group (default: supervisor)",
    ),
    (("--rdzv-endpoint",), "HOST:PORT", "where torch's agents meet (default: a free port of the first node)"),
    (
        ("--rdzv-conf",),
        "K=V,…",
        "join_timeout and last_call_timeout in seconds; with one of torch's backends: whatever that backend reads",
    ),
    (("--role",), "NAME", "the workers' ROLE_NAME"),
    (("--shutdown-timeout",), "S", "seconds from SIGTERM to SIGKILL, at every stop (default: stop_grace of HOSTS)"),
    (("-m", "--module"), None, "SCRIPT is a module, like python -m"),
    (("--no-python",), None, "SCRIPT is a program, started without python"),
    (("--run-path",), None, "SCRIPT is run by runpy.run_path inside the interpreter"),
    (("--standalone",), None, "this machine only, like `up` without HOSTS"),
    (("--local-addr",), "HOST", "without HOSTS: this machine's address; with HOSTS, each host's `address` is used"),
    (("--log-dir",), "DIR", "on each node, also link the logs as DIR/<job>_<node>/attempt_<generation>/<local rank>"),
    (("-r", "--redirects"), "SPEC", "streams to keep off the console: 3, 0:1,1:3 by local rank, rank5:3 by rank"),
    (("-t", "--tee"), "SPEC", "redirected streams to show on the console anyway"),
    (("--local-ranks-filter",), "RANKS", "show only these local ranks on the console"),
    (("--event-log-handler",), "NAME", "console: events as JSON lines on stderr; null: as text"),
    (("--numa-binding",), "MODE", "node, socket, exclusive or core-complex: bind each worker near its GPU (numactl)"),
    (("--signals-to-handle",), "NAMES", "the value of TORCHELASTIC_SIGNALS_TO_HANDLE in workers"),
    (("--virtual-local-rank",), None, "LOCAL_RANK is 0 everywhere, and each worker sees one GPU"),
)
# Options without effect. The reason completes the sentence "… has no effect here because …".
SILENT: tuple[OptionRow, ...] = (
    (("--monitor-interval",), "S", "the exit of a worker is noticed at once, without polling"),
    (("--start-method",), "NAME", "every worker is a fresh process"),
    (("--node-rank",), "N", "ranks follow the order of the hosts in HOSTS"),
    (("--master-addr",), "HOST", "it is the `address` of the generation's first node"),
    (("--master-port",), "PORT", "each generation gets a fresh store on a free port"),
)
# These options are refused: a run without their effect would differ from what the user asked for.
REFUSED: tuple[OptionRow, ...] = (
    (("--logs-specs",), "NAME", "`supervisor logs` needs its own layout of logs; --log-dir adds torchrun's layout"),
    (("--duplicate-stdout-filters",), "WORDS", "`supervisor logs --grep` selects lines when reading"),
    (("--duplicate-stderr-filters",), "WORDS", "`supervisor logs --grep` selects lines when reading"),
)
# torchrun reads no PET_ variable for these.
WITHOUT_VARIABLE = frozenset({"--logs-specs", "--numa-binding"})
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
START_METHODS = ("spawn", "fork", "forkserver")
TRUE_WORDS = frozenset({"true", "yes", "on"})
FALSE_WORDS = frozenset({"", "false", "no", "off"})


def _dest(flags: tuple[str, ...]) -> str:
    return flags[-1].removeprefix("--").replace("-", "_")


def _spellings(flags: tuple[str, ...]) -> list[str]:
    long = flags[-1]
    both = dict.fromkeys([*flags, "--" + long[2:].replace("-", "_")])
    return list(both)


def add_torchrun(parser: Parser) -> None:
    """Add every option of torchrun, in both spellings."""
    acting = parser.add_argument_group("torchrun's options")
    silent = parser.add_argument_group("torchrun's options without effect here (a notice says why)")
    refused = parser.add_argument_group("torchrun's options that are refused (with what to use instead)")
    for group, table in ((acting, ACTING), (silent, SILENT), (refused, REFUSED)):
        for flags, metavar, text in table:
            if metavar is None:
                group.add_argument(*_spellings(flags), dest=_dest(flags), action="store_true", default=None, help=text)
            else:
                group.add_argument(*_spellings(flags), dest=_dest(flags), metavar=metavar, help=text)


def apply_environment(options: argparse.Namespace) -> None:
    """Take PET_<OPTION>, or torch's own variable, for every option that is not on the command line."""
    for table in (ACTING, SILENT, REFUSED):
        for flags, metavar, _ in table:
            value = os.environ.get(f"PET_{_dest(flags).upper()}")
            if value is None or flags[-1] in WITHOUT_VARIABLE or getattr(options, _dest(flags)) is not None:
                continue
            if metavar is not None:
                setattr(options, _dest(flags), value)
            elif _is_on(f"PET_{_dest(flags).upper()}", value):
                setattr(options, _dest(flags), True)
    if options.shutdown_timeout is None:
        options.shutdown_timeout = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")


def _is_on(name: str, value: str) -> bool:
    """Return the value of a switch's variable: a whole number as in torchrun, or a word; raises UsageError."""
    word = value.strip().lower()
    if word.isdecimal():
        return int(word) != 0
    if word in TRUE_WORDS or word in FALSE_WORDS:
        return word in TRUE_WORDS
    raise UsageError(f"{name}={value}: must be 1 or 0", f"unset {name}, or use the option on the command line")


def notices(options: argparse.Namespace) -> list[str]:
    """Return one line per option that is accepted without effect; raises UsageError for the refused ones."""
    for flags, _, reason in REFUSED:
        if getattr(options, _dest(flags)):
            raise UsageError(f"{flags[-1]} is not supported: {reason}", "remove it")
    used = _endpoint_options(options)
    silent = [
        (flags[-1], reason)
        for flags, _, reason in SILENT
        if getattr(options, _dest(flags)) is not None and flags[-1] not in used
    ]
    if options.local_addr is not None and source_words(options.hosts, options) is not None:
        silent.append(("--local-addr", "it is the `address` of the host in HOSTS"))
    return _rendezvous_notices(options) + [f"{option} has no effect here because {why}" for option, why in silent]


def check(options: argparse.Namespace) -> None:
    """Raise UsageError for a value that torchrun refuses too, also for options without effect here."""
    for name in ("node_rank", "master_port"):
        number(options, name)
    duration(options, "monitor_interval")
    for name, words in (("numa_binding", NUMA_BINDINGS), ("start_method", START_METHODS)):
        value = getattr(options, name)
        if value is not None and value not in words:
            raise UsageError(f"--{name.replace('_', '-')} {value!r}: must be one of {', '.join(words)}")
    if options.event_log_handler not in (None, "null", "console"):
        raise UsageError(
            f"--event-log-handler {options.event_log_handler!r}: must be null or console",
            "`supervisor events --json -f` hands every event to a program",
        )
    for name in (options.signals_to_handle or "").split(","):
        if name.strip() and name.strip() not in signal.Signals.__members__:
            raise UsageError(f"--signals-to-handle: no signal is named {name.strip()!r}", "for example SIGTERM,SIGINT")


def console(options: argparse.Namespace) -> Console:
    """Return what the console shows; raises UsageError."""
    return Console(
        read_streams(options.redirects, "--redirects"),
        read_streams(options.tee, "--tee"),
        read_local_ranks(options.local_ranks_filter),
    )


def number(options: argparse.Namespace, name: str) -> int | None:
    """Return a whole number of 0 or more; raises UsageError."""
    value = getattr(options, name)
    if value is None:
        return None
    if not value.strip().isdecimal():
        raise UsageError(f"--{name.replace('_', '-')} {value!r}: must be a whole number of 0 or more")
    return int(value)


def duration(options: argparse.Namespace, name: str) -> float | None:
    """Return seconds of 0 or more; raises UsageError."""
    value = getattr(options, name)
    if value is None:
        return None
    return read_seconds(f"--{name.replace('_', '-')} {value!r}", value)


# --- rendezvous

OURS = "supervisor"
BACKENDS = ("c10d", "etcd-v2", "etcd", "static")
# The settings of --rdzv-conf that the coordinator uses too, in seconds.
TIMEOUTS = ("join_timeout", "last_call_timeout")


def read_rendezvous(options: argparse.Namespace) -> Rendezvous | None:
    """Return the torch backend that forms the group, None where the coordinator does; raises UsageError."""
    backend = options.rdzv_backend or OURS
    _conf(options)
    if backend == OURS or options.standalone:
        return None
    if backend not in BACKENDS:
        raise UsageError(
            f"--rdzv-backend {backend!r}: must be {OURS}, {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}",
            "leave it out: the job's own coordinator forms the group",
        )
    endpoint = options.rdzv_endpoint or ""
    if backend == "static" and not endpoint and options.master_addr:
        endpoint = f"{options.master_addr}:{options.master_port or PORTS['static']}"
    if endpoint.endswith(":0"):
        endpoint = ""
    if not endpoint and backend.startswith("etcd"):
        raise UsageError(f"--rdzv-backend {backend} needs --rdzv-endpoint: HOST:PORT of the etcd server")
    try:
        split_endpoint(endpoint, PORTS[backend])
    except ValueError as error:
        raise UsageError(f"--rdzv-endpoint {error}") from error
    return Rendezvous(backend, run_id="", endpoint=endpoint, conf=options.rdzv_conf or "")


def _endpoint_options(options: argparse.Namespace) -> frozenset[str]:
    """Return the options that set the endpoint of torch's static backend; other backends ignore them."""
    is_static = options.rdzv_backend == "static" and not options.standalone and not options.rdzv_endpoint
    return frozenset({"--master-addr", "--master-port"}) if is_static else frozenset()


def read_timeouts(options: argparse.Namespace) -> dict[str, float]:
    """Return the timeouts of --rdzv-conf for the coordinator, if it forms the group; raises UsageError."""
    if (options.rdzv_backend or OURS) != OURS:
        return {}
    return {
        key: read_seconds(f"--rdzv-conf {key}={value}", value)
        for key, value in _conf(options).items()
        if key in TIMEOUTS
    }


def _rendezvous_notices(options: argparse.Namespace) -> list[str]:
    """Return notes for the user about this choice, one line each."""
    backend = options.rdzv_backend or OURS
    if backend != OURS and not options.standalone:
        why = "a restart takes longer than with the job's own coordinator (leave --rdzv-backend out for it)"
        return [f"torch's own {backend} rendezvous forms the group: {why}"]
    notes = []
    if options.rdzv_endpoint is not None:
        notes.append("--rdzv-endpoint has no effect here because each generation gets a fresh store on a free port")
    rest = [key for key in _conf(options) if key not in TIMEOUTS]
    if rest:
        notes.append(
            f"--rdzv-conf {','.join(rest)} has no effect here because the job's own coordinator forms the group"
        )
    return notes


def _conf(options: argparse.Namespace) -> dict[str, str]:
    try:
        return read_conf(options.rdzv_conf or "")
    except ValueError as error:
        raise UsageError(f"--rdzv-conf: {error}", "for example join_timeout=300,last_call_timeout=5") from error


# --- the console output of each rank; files get every byte anyway

# torchrun uses these numbers: `Std` in torch/distributed/elastic/multiprocessing/api.py.
BITS = {"stdout": 1, "stderr": 2}
ALL = 3
_ENTRY = re.compile(r"(?P<rank>rank)?(?P<number>\d+):(?P<value>[0-3])")


@dataclass(frozen=True)
class Streams:
    """Streams by rank, as bits: 0 none, 1 stdout, 2 stderr, 3 both."""

    every: int = 0
    by_local_rank: Mapping[int, int] = field(default_factory=dict)
    by_rank: Mapping[int, int] = field(default_factory=dict)

    def of(self, rank: int, local_rank: int) -> int:
        """Return the bits of one rank; an entry for the rank overrides one for its local rank."""
        return self.by_rank.get(rank, self.by_local_rank.get(local_rank, self.every))


def read_streams(text: str | None, option: str) -> Streams:
    """Parse `3`, `0:1,1:3` (local ranks) or `rank12:3` (ranks of the job); raises UsageError."""
    if text is None:
        return Streams()
    words = text.strip()
    if words in ("0", "1", "2", "3"):
        return Streams(int(words))
    by_local_rank: dict[int, int] = {}
    by_rank: dict[int, int] = {}
    for part in words.split(","):
        entry = _ENTRY.fullmatch(part.strip())
        if entry is None:
            raise UsageError(
                f"{option} {text!r}: {part.strip()!r} is not valid",
                f"write {option} 3, or {option} 0:1,1:3 by local rank, or {option} rank5:3 by rank"
                " (0 none, 1 stdout, 2 stderr, 3 both)",
            )
        (by_rank if entry["rank"] else by_local_rank)[int(entry["number"])] = int(entry["value"])
    return Streams(0, by_local_rank, by_rank)


def read_local_ranks(text: str | None) -> frozenset[int] | None:
    """Return the local ranks of `0,2`, None for all; raises UsageError."""
    if text is None or not text.strip():
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"--local-ranks-filter {text!r}: must be local ranks such as 0,1")
    return frozenset(int(part) for part in parts)


@dataclass(frozen=True)
class Console:
    """The streams that torchrun would show: those not redirected, and those tee'd, of the chosen local ranks."""

    redirects: Streams = Streams()
    tee: Streams = Streams()
    local_ranks: frozenset[int] | None = None

    @property
    def shows_all(self) -> bool:
        """Whether every stream of every rank is shown."""
        return self.redirects == Streams() and self.local_ranks is None

    def shows(self, rank: int, local_rank: int, stream: str) -> bool:
        """Return whether the console shows this stream of this rank."""
        if self.local_ranks is not None and local_rank not in self.local_ranks:
            return False
        bit = BITS.get(stream, ALL)
        return bool(~self.redirects.of(rank, local_rank) & bit) or bool(self.tee.of(rank, local_rank) & bit)
