"""torchrun's options under their own names: those that act, those that have no effect here (said, never ignored).

In: argparse, PET_* variables. Out: values for UpOptions, notices for the user, refusals.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import TYPE_CHECKING

from supervisor.cli import rendezvous
from supervisor.cli.console import Console, read_local_ranks, read_streams
from supervisor.cli.options import read_seconds, source_words
from supervisor.errors import UsageError

if TYPE_CHECKING:
    from supervisor.cli.options import Parser

Row = tuple[tuple[str, ...], "str | None", str]
"""An option's words, its metavar (None: a switch), its help or its reason."""

# Options that act.
ACTING: tuple[Row, ...] = (
    (("--nnodes",), "N|MIN:MAX", "nodes to run on (default: min_nodes and max_nodes of HOSTS)"),
    (("--nproc-per-node",), "N|auto|gpu|cpu|xpu", "ranks on each node (default: nproc_per_node of HOSTS)"),
    (("--max-restarts",), "N", "failures that start the group again; the same twice before any step ends the job"),
    (("--rdzv-id",), "ID", "the job's id, as --job"),
    (
        ("--rdzv-backend",),
        "NAME",
        "c10d, etcd-v2, etcd or static: torch's own agents form the group (default: supervisor)",
    ),
    (("--rdzv-endpoint",), "HOST:PORT", "where torch's agents meet (default: a free port of the first node)"),
    (
        ("--rdzv-conf",),
        "K=V,…",
        "join_timeout and last_call_timeout in seconds; with a backend of torch's: all that it reads",
    ),
    (("--role",), "NAME", "the workers' ROLE_NAME"),
    (("--shutdown-timeout",), "S", "seconds from SIGTERM to SIGKILL, at every stop (default: stop_grace of HOSTS)"),
    (("-m", "--module"), None, "SCRIPT is a module, as in python -m"),
    (("--no-python",), None, "SCRIPT is a program, started without python"),
    (("--run-path",), None, "SCRIPT is run by runpy.run_path inside the interpreter"),
    (("--standalone",), None, "this machine alone: what `up` without HOSTS does"),
    (("--local-addr",), "HOST", "without HOSTS: this machine's address; with it each host's `address` counts"),
    (("--log-dir",), "DIR", "on each node, also DIR/<job>_<node>/attempt_<generation>/<local rank>: links to the logs"),
    (("-r", "--redirects"), "SPEC", "streams to keep off the console: 3, 0:1,1:3 by local rank, rank5:3 by rank"),
    (("-t", "--tee"), "SPEC", "redirected streams to show on the console all the same"),
    (("--local-ranks-filter",), "RANKS", "show only these local ranks on the console"),
    (("--event-log-handler",), "NAME", "console: events as JSON lines on stderr; null: as text"),
    (("--numa-binding",), "MODE", "node, socket, exclusive or core-complex: bind each worker near its GPU (numactl)"),
    (("--signals-to-handle",), "NAMES", "what workers find in TORCHELASTIC_SIGNALS_TO_HANDLE"),
    (("--virtual-local-rank",), None, "LOCAL_RANK is 0 everywhere, and each worker sees one GPU"),
)
# Options that need nothing from us. The reason ends the sentence "… has no effect here because …".
SILENT: tuple[Row, ...] = (
    (("--monitor-interval",), "S", "the end of a worker is seen at once, without polling"),
    (("--start-method",), "NAME", "every worker is a fresh process"),
    (("--node-rank",), "N", "ranks follow the order of the hosts in HOSTS"),
    (("--master-addr",), "HOST", "it is the `address` of the generation's first node"),
    (("--master-port",), "PORT", "each generation gets a fresh store on a free port"),
)
# Options whose effect a user would miss: to start without it would be another run.
REFUSED: tuple[Row, ...] = (
    (("--logs-specs",), "NAME", "logs are laid out as `supervisor logs` reads them; --log-dir adds torchrun's layout"),
    (("--duplicate-stdout-filters",), "WORDS", "lines are chosen when reading: supervisor logs --grep"),
    (("--duplicate-stderr-filters",), "WORDS", "lines are chosen when reading: supervisor logs --grep"),
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
    refused = parser.add_argument_group("torchrun's options that are refused (what does it instead)")
    for group, table in ((acting, ACTING), (silent, SILENT), (refused, REFUSED)):
        for flags, metavar, text in table:
            if metavar is None:
                group.add_argument(*_spellings(flags), dest=_dest(flags), action="store_true", default=None, help=text)
            else:
                group.add_argument(*_spellings(flags), dest=_dest(flags), metavar=metavar, help=text)


def apply_environment(options: argparse.Namespace) -> None:
    """Take PET_<OPTION>, and torch's own variable, for every option that the command line did not give."""
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
    """Return what a switch's variable says: torchrun takes whole numbers, we take words too; raises UsageError."""
    word = value.strip().lower()
    if word.isdecimal():
        return int(word) != 0
    if word in TRUE_WORDS or word in FALSE_WORDS:
        return word in TRUE_WORDS
    raise UsageError(f"{name}={value}: must be 1 or 0", f"unset {name}, or give the option on the command line")


def notices(options: argparse.Namespace) -> list[str]:
    """Return one line per option that is accepted without effect; raises UsageError for the refused ones."""
    for flags, _, reason in REFUSED:
        if getattr(options, _dest(flags)):
            raise UsageError(f"{flags[-1]} is not supported: {reason}", "leave it out")
    used = rendezvous.used(options)
    silent = [
        (flags[-1], reason)
        for flags, _, reason in SILENT
        if getattr(options, _dest(flags)) is not None and flags[-1] not in used
    ]
    if options.local_addr is not None and source_words(options.hosts, options) is not None:
        silent.append(("--local-addr", "it is the `address` of the host in HOSTS"))
    return rendezvous.notices(options) + [f"{option} has no effect here because {why}" for option, why in silent]


def check(options: argparse.Namespace) -> None:
    """Raise UsageError for a value that torchrun would not take either, also of options without effect here."""
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
            raise UsageError(f"--signals-to-handle: no signal is called {name.strip()!r}", "as in SIGTERM,SIGINT")


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
