"""`supervisor diagnose`: the root cause of a finished run, from the files that it left.

In: paths. Out: the verdicts as text or JSON, a progress bar on a terminal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from supervisor import bundle
from supervisor.cli import colours
from supervisor.cli.entry import say
from supervisor.cli.options import SUFFIX, add_json, make_parser
from supervisor.cli.output import write_json
from supervisor.errors import UsageError
from supervisor.standard_streams import err_is_terminal, progress_bar
from supervisor.wording.incidents import incident_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from remote_agent.wire.documents import Diagnosis, NcclSummary

USAGE = "PATH… [--why] [--json] [--color auto|always|never]"
# Less than this is read before a progress bar is of use.
BAR_BYTES = 64 << 20
NO_FAILURE = (
    "no failure found in these logs; if the job hangs, `supervisor stacks` or py-spy dump --pid show where its "
    "ranks are"
)


def run(verb: str, argv: Sequence[str]) -> int:
    """Diagnose the files; returns the exit code."""
    from supervisor.postmortem.diagnosis import diagnose
    from supervisor.postmortem.files import few

    parser = make_parser(verb, USAGE, target=False)
    parser.add_argument("--why", action="store_true", help="show what was said by whom, and what decided")
    add_json(parser)
    colours.add_color(parser)
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", type=Path, help="logs, torch's flight records, or directories of them"
    )
    options = parser.parse_args(list(argv))
    if not options.paths:
        raise UsageError("PATH is missing", f"supervisor {verb} {USAGE}")
    skipped: list[str] = []
    try:
        with tempfile.TemporaryDirectory(prefix="supervisor-bundle-") as folder:
            paths, names = _unpacked(options.paths, Path(folder))
            with _bar(paths) as progress:
                document = diagnose(paths, progress, skipped.append)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise UsageError(f"{where}{error.strerror or error}") from error
    for proof in (proof for incident in document["incidents"] for proof in incident["evidence"]):
        file = proof["file"] or ""
        place = next((one for one in names if file.startswith(one)), "")
        proof["file"] = names.get(place, "") + file[len(place) :] or None
    if skipped:
        say(f"skipped: {few(skipped)}")
    if options.json:
        write_json(document)
    else:
        colours.write(lines_of(document, why=options.why), options.color)
    return 0


def _unpacked(paths: Sequence[Path], folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the paths with the directory of each bundle in its place, and the names of these bundles."""
    names: dict[str, str] = {}
    found = []
    for path in paths:
        place = folder / str(len(names))
        if path.suffix == SUFFIX and path.is_file():
            place.mkdir()
            bundle.unpack(path, place)
            names[str(place)] = str(path)
        found.append(place if str(place) in names else path)
    return found, names


def lines_of(document: Diagnosis, *, why: bool = False) -> list[str]:
    """Return the verdicts and the facts about NCCL as text; why: with the claims that decided."""
    lines: list[str] = []
    for incident in document["incidents"]:
        lines += [*([""] if lines else []), *incident_text(incident, why=why)]
    return [*(lines or [NO_FAILURE]), *_nccl(document["nccl"])]


def _nccl(facts: NcclSummary | None) -> list[str]:
    """Return the facts about NCCL in one line, and its warnings."""
    if facts is None:
        return []
    words = [
        " ".join(facts["versions"]),
        f"{facts['nranks']} ranks" if facts["nranks"] else "",
        f"{facts['nodes']} nodes" if facts["nodes"] else "",
        f"network {' '.join(facts['networks'])}" if facts["networks"] else "",
        f"on {' '.join(facts['interfaces'])}" if facts["interfaces"] else "",
        f"via {' '.join(facts['transports'])}" if facts["transports"] else "",
    ]
    return [
        "",
        "NCCL: " + ", ".join(word for word in words if word),
        *(f"  warning: {one}" for one in facts["warnings"]),
    ]


def _bar(paths: Sequence[Path]) -> AbstractContextManager[Callable[[int], None]]:
    """Show how much has been read, on a terminal."""
    from supervisor.postmortem.files import find, total_size

    size = total_size(find(paths)) if err_is_terminal() else 0
    return progress_bar("reading", size) if size >= BAR_BYTES else nullcontext(lambda _bytes: None)
