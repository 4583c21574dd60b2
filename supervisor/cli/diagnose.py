"""`supervisor diagnose`: the root cause of a run that is over, from the files that it left.

In: paths. Out: the verdicts as text or JSON, a progress bar on a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from supervisor.cli.entry import say
from supervisor.cli.options import add_json, make_parser
from supervisor.cli.output import write_json, write_lines
from supervisor.errors import UsageError
from supervisor.plain_incident import incident_lines

if TYPE_CHECKING:
    from collections.abc import Callable

USAGE = "PATH… [--json]"
# Reading less than this is over before a bar could be read.
BAR_BYTES = 64 << 20
NO_FAILURE = (
    "no failure found in these logs; if the job stands still, ask its ranks where they are: `supervisor stacks`, "
    "or py-spy dump --pid"
)


def run(verb: str, argv: Sequence[str]) -> int:
    """Judge the files; returns the exit status."""
    from supervisor.postmortem.diagnosis import diagnose
    from supervisor.postmortem.files import few

    parser = make_parser(verb, USAGE, target=False)
    add_json(parser)
    parser.add_argument("paths", nargs="*", metavar="PATH", type=Path, help="log files, or directories that hold them")
    options = parser.parse_args(list(argv))
    if not options.paths:
        raise UsageError("PATH is missing", f"supervisor {verb} {USAGE}")
    left: list[str] = []
    try:
        with _bar(options.paths) as progress:
            found = diagnose(options.paths, progress, left.append)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise UsageError(f"{where}{error.strerror or error}") from error
    if left:
        say(f"left out: {few(left)}")
    if options.json:
        write_json(found)
    else:
        write_lines(_text(found))
    return 0


def _text(found: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for incident in found["incidents"]:
        lines += [*([""] if lines else []), *incident_lines(incident)]
    return [*(lines or [NO_FAILURE]), *_nccl(found["nccl"])]


def _nccl(facts: dict[str, Any] | None) -> list[str]:
    """Return what the text says of NCCL, one line."""
    if facts is None:
        return []
    told = [
        " ".join(facts["versions"]),
        f"{facts['nranks']} ranks" if facts["nranks"] else "",
        f"{facts['nodes']} nodes" if facts["nodes"] else "",
        f"network {' '.join(facts['networks'])}" if facts["networks"] else "",
        f"on {' '.join(facts['interfaces'])}" if facts["interfaces"] else "",
        f"via {' '.join(facts['transports'])}" if facts["transports"] else "",
    ]
    return [
        "",
        "NCCL: " + ", ".join(word for word in told if word),
        *(f"  warning: {one}" for one in facts["warnings"]),
    ]


@contextmanager
def _bar(paths: Sequence[Path]) -> Iterator[Callable[[int], None]]:
    """Show how much has been read, where somebody may be waiting."""
    from supervisor.postmortem.files import find, total_size

    if not sys.stderr.isatty() or (size := total_size(find(paths))) < BAR_BYTES:
        yield lambda _bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=size)
        yield lambda count: bar.advance(task, count)
