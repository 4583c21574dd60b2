"""`supervisor snapshots`: the snapshots that the nodes keep, and where; bring one here.

In: argv. Out: a table, oldest first, or one JSON document; with --pull a file or directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from supervisor.cli.entry import say
from supervisor.cli.options import add_json, in_session, make_parser, parse
from supervisor.cli.output import is_rich, write_json, write_table
from supervisor.errors import UsageError
from supervisor.snapshots import pull
from supervisor.wording.status import snapshot_rows
from supervisor.wording.values import size as size_text

if TYPE_CHECKING:
    from supervisor.session import Session


def run(verb: str, argv: Sequence[str]) -> int:
    """Show the snapshots; returns the exit status."""
    parser = make_parser(verb)
    parser.add_argument("--pull", default="", metavar="ID", help="bring this snapshot to this machine")
    words = "with --pull: the new file or directory (default: the snapshot's own name, in this directory)"
    parser.add_argument("-o", "--output", metavar="PATH", type=Path, help=words)
    add_json(parser)
    options = parse(parser, argv)
    if options.output is not None and not options.pull:
        raise UsageError("--output needs --pull ID", "`supervisor snapshots` lists the ids")

    async def show(session: Session) -> None:
        kept = (await session.call("status")).get("snapshots") or []
        if options.json:
            write_json({"job": session.job, "snapshots": kept})
        elif kept:
            write_table(snapshot_rows(kept), rich=is_rich())
        else:
            say(
                "no node keeps a snapshot of this job yet: what `snapshots` in [job] or up --snapshots names is kept "
                "once ranks have saved it; `supervisor events` has a warning where they save something else"
            )

    async def bring(session: Session) -> None:
        await session.settle()
        place, size, node = await pull(session, options.pull, options.output)
        if options.json:
            write_json({"job": session.job, "id": options.pull, "path": str(place), "bytes": size, "node": node})
        else:
            say(f"{place}: {size_text(size)} from {node}")

    return in_session(options, bring if options.pull else show)
