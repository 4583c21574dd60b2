"""`supervisor signal SIGNAL --rank R`: send a signal to the processes of ranks.

In: argv. Out: one line per rank, or one JSON document.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from supervisor.cli.options import add_json, load_target, make_parser, parse, read_ranks
from supervisor.cli.output import write_ranks
from supervisor.errors import UsageError


def run(verb: str, argv: Sequence[str]) -> int:
    """Send it; returns the exit status: 1 where a rank did not get it."""
    parser = make_parser(verb, "[HOSTS] [JOB] SIGNAL")
    parser.add_argument("--rank", type=read_ranks, required=True, metavar="R[,R…]", help="to these ranks: 0,2-4")
    add_json(parser)
    options = parse(parser, argv)
    if not options.target:
        raise UsageError("SIGNAL is missing", "supervisor signal --rank 3 USR1")
    *options.target, name = options.target
    inventory, job = load_target(options)
    from supervisor.session.session import open_session

    async def send() -> int:
        async with open_session(inventory, job, feed=True, live_only=True) as session:
            await session.ready()
            await session.settle()
            answer = await session.request("signal", ranks=options.rank, signal=name)
        return write_ranks({"job": session.job, "request": verb, **answer}, as_json=options.json)

    return asyncio.run(send())
