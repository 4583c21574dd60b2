"""`supervisor snapshots`: the snapshots that the nodes keep, and where.

In: argv. Out: a table, oldest first, or one JSON document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from supervisor.cli.entry import say
from supervisor.cli.options import add_json, in_session, make_parser, parse
from supervisor.cli.output import is_rich, write_json, write_table
from supervisor.wording.status import snapshot_rows

if TYPE_CHECKING:
    from supervisor.session import Session


def run(verb: str, argv: Sequence[str]) -> int:
    """Show the snapshots; returns the exit status."""
    parser = make_parser(verb)
    add_json(parser)
    options = parse(parser, argv)

    async def show(session: Session) -> None:
        kept = (await session.call("status")).get("snapshots") or []
        if options.json:
            write_json({"job": session.job, "snapshots": kept})
        elif kept:
            write_table(snapshot_rows(kept), rich=is_rich())
        else:
            say("no node keeps a snapshot of this job: `snapshots` in [job], or up --snapshots, names what to keep")

    return in_session(options, show)
