"""`supervisor stacks`: where every rank and its child processes are, equal stacks together.

In: argv. Out: text or JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from supervisor.cli.options import add_json, load_target, make_parser, parse, read_ranks
from supervisor.cli.output import write_json, write_lines, write_ranks
from supervisor.plain_stacks import stacks_lines

if TYPE_CHECKING:
    from supervisor.session.session import Session


def run(verb: str, argv: Sequence[str]) -> int:
    """Show the stacks; returns the exit status."""
    parser = make_parser(verb)
    parser.add_argument("--rank", type=read_ranks, metavar="R[,R…]", help="only these ranks: 0,2-4")
    parser.add_argument("--save", action="store_true", help="save them, and flight records, beside the ranks' logs")
    add_json(parser)
    options = parse(parser, argv)
    inventory, job = load_target(options)
    from supervisor.session.session import open_session

    async def once() -> int:
        async with open_session(inventory, job, live_only=True) as session:
            await session.ready()
            await session.settle()
            if options.save:
                return await _save(session, options.rank, options.json)
            found = await session.stacks(options.rank)
        if options.json:
            write_json(found)
        else:
            write_lines(stacks_lines(**found))
        return 0

    return asyncio.run(once())


async def _save(session: Session, ranks: list[int] | None, as_json: bool) -> int:
    """Let the nodes save; returns the exit status: 1 where there is nothing of a rank."""
    status = await session.call("status")
    known = [rank["rank"] for node in status.get("nodes", ()) for rank in node.get("ranks", ())]
    answer = await session.request("keep", ranks=known if ranks is None else ranks)
    return write_ranks({"job": session.job, "request": "stacks", **answer}, as_json=as_json)
