"""torchrun's options under their own names: those that act, those that have no effect here (said, never ignored).

In: argparse, PET_* variables. Out: values for UpOptions, notices for the user, refusals.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from supervisor.errors import UsageError

if TYPE_CHECKING:
    from supervisor.cli.options import Parser

# Options that act. The flag's words, the metavar (None: a switch), the help.
ACTING: tuple[tuple[tuple[str, ...], str | None, str], ...] = (
    (("--nnodes",), "N|MIN:MAX", "nodes to run on (default: min_nodes and max_nodes of HOSTS)"),
    (("--nproc-per-node",), "N|auto|gpu|cpu", "ranks on each node (default: nproc_per_node of HOSTS)"),
    (("--max-restarts",), "N", "failures after which the group is started again"),
    (("--rdzv-id",), "ID", "the job's id, as --job"),
    (("--role",), "NAME", "the workers' ROLE_NAME"),
    (("--shutdown-timeout",), "S", "seconds from SIGTERM to SIGKILL (default: stop_grace of HOSTS)"),
    (("-m", "--module"), None, "SCRIPT is a module, as in python -m"),
    (("--no-python",), None, "SCRIPT is a program, started without python"),
    (("--standalone",), None, "this machine alone: what `up` without HOSTS does"),
)
# Options that need nothing from us. The reason ends the sentence "… has no effect here because …".
SILENT: tuple[tuple[tuple[str, ...], str | None, str], ...] = (
    (("--rdzv-backend",), "NAME", "the job's own coordinator forms the group"),
    (("--rdzv-endpoint",), "HOST:PORT", "each generation gets a fresh store on a free port of its first node"),
    (("--rdzv-conf",), "K=V,…", "the job's own coordinator forms the group"),
    (("--monitor-interval",), "S", "the end of a worker is seen at once, without polling"),
    (("--start-method",), "NAME", "every worker is a fresh process"),
    (("--event-log-handler",), "NAME", "events go to the job's journal: supervisor events"),
    (("--run-path",), None, "a script always runs by path in its bootstrap's interpreter"),
    (("--log-dir",), "DIR", "logs stay on the nodes, under ~/.supervisor/jobs: supervisor logs"),
    (("-r", "--redirects"), "SPEC", "both streams of every rank always go to files"),
    (("-t", "--tee"), "SPEC", "both streams of every rank always go to files, and are shown here too"),
    (("--local-ranks-filter",), "RANKS", "ranks are chosen when reading: supervisor logs --rank"),
    (("--duplicate-stdout-filters",), "WORDS", "lines are chosen when reading: supervisor logs --grep"),
    (("--duplicate-stderr-filters",), "WORDS", "lines are chosen when reading: supervisor logs --grep"),
    (("--node-rank",), "N", "ranks follow the order of the hosts in HOSTS"),
    (("--master-addr",), "HOST", "it is the `address` of the generation's first node"),
    (("--master-port",), "PORT", "each generation gets a fresh store on a free port"),
    (("--local-addr",), "HOST", "it is the `address` of the host in HOSTS"),
    (("--logs-specs",), "NAME", "logs are laid out as `supervisor logs` reads them"),
    (("--signals-to-handle",), "NAMES", "no signal to the supervisor reaches the workers: supervisor stop ends them"),
)
# Options that change what the script sees: to start without them would be another run.
REFUSED: tuple[tuple[tuple[str, ...], str | None, str], ...] = (
    (("--numa-binding",), "MODE", "workers are not bound to CPUs in this release; numactl in SCRIPT can do it"),
    (("--virtual-local-rank",), None, "every worker sees all GPUs of its node, and its true LOCAL_RANK"),
)
TRUE_WORDS = frozenset({"1", "true", "yes", "on"})


def _dest(flags: tuple[str, ...]) -> str:
    return flags[-1].removeprefix("--").replace("-", "_")


def _spellings(flags: tuple[str, ...]) -> list[str]:
    long = flags[-1]
    both = dict.fromkeys([*flags, "--" + long[2:].replace("-", "_")])
    return list(both)


def add_torchrun(parser: Parser) -> None:
    """Add every option of torchrun, in both spellings."""
    acting = parser.add_argument_group("torchrun's options")
    other = parser.add_argument_group("torchrun's options without effect here (a notice says why)")
    for group, table in ((acting, ACTING), (other, SILENT), (other, REFUSED)):
        for flags, metavar, text in table:
            if metavar is None:
                group.add_argument(*_spellings(flags), dest=_dest(flags), action="store_true", default=None, help=text)
            else:
                group.add_argument(*_spellings(flags), dest=_dest(flags), metavar=metavar, help=text)


def apply_environment(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> None:
    """Take PET_<OPTION> for every option that the command line did not give, as torchrun does."""
    for table in (ACTING, SILENT, REFUSED):
        for flags, metavar, _ in table:
            value = environ.get(f"PET_{_dest(flags).upper()}")
            if value is None or getattr(options, _dest(flags)) is not None:
                continue
            if metavar is not None:
                setattr(options, _dest(flags), value)
            elif value.strip().lower() in TRUE_WORDS:
                setattr(options, _dest(flags), True)


def notices(options: argparse.Namespace) -> list[str]:
    """Return one line per option that is accepted without effect; raises UsageError for the refused ones."""
    for flags, _, reason in REFUSED:
        if getattr(options, _dest(flags)):
            raise UsageError(f"{flags[-1]} is not supported: {reason}", "leave it out")
    return [
        f"{flags[-1]} has no effect here because {reason}"
        for flags, _, reason in SILENT
        if getattr(options, _dest(flags)) is not None
    ]


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
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise UsageError(f"--{name.replace('_', '-')} {value!r}: must be seconds, 0 or more")
    return seconds
