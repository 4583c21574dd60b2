"""`supervisor stacks`: where every rank is, equal stacks together.

In: argv, each agent's answer for its own ranks. Out: text or JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from remote_agent.wire import CallFailed, WireError
from supervisor import plain
from supervisor.cli.options import add_json, load_inventory, make_parser, parse, read_ranks, split_target
from supervisor.cli.output import write_json, write_lines
from supervisor.errors import RequestFailed
from supervisor.session.view import ENDED_STATES

if TYPE_CHECKING:
    from supervisor.session.session import Session

# Collecting takes 1.5 s on a node whose ranks do not answer.
DEADLINE = 20.0


def run(verb: str, argv: Sequence[str]) -> int:
    """Show the stacks; returns the exit status."""
    parser = make_parser(verb, "[HOSTS] [JOB] [--rank R[,R…]] [--save] [--json]")
    parser.add_argument("--rank", type=read_ranks, metavar="R", help="only these ranks: 0,2-4")
    parser.add_argument("--save", action="store_true", help="save them, and flight records, beside the ranks' logs")
    add_json(parser)
    options = parse(parser, argv)
    hosts, job = split_target(options.target)
    inventory = load_inventory(hosts, options)
    from supervisor.session.session import open_session

    async def once() -> int:
        async with open_session(inventory, job, live_only=True) as session:
            await session.ready()
            await session.settle()
            if options.save:
                return await _save(session, options.rank, options.json)
            stacks, unreachable = await collect(session, options.rank)
        if not stacks and not unreachable:
            raise RequestFailed(f"job {session.job} has no live rank" + (" of those" if options.rank else ""))
        if options.json:
            write_json({"stacks": stacks, "unreachable": unreachable})
        else:
            write_lines(plain.stacks_lines(stacks, unreachable))
        return 0

    return asyncio.run(once())


async def _save(session: Session, ranks: list[int] | None, as_json: bool) -> int:
    """Let the nodes save; returns the exit status: 1 where there is nothing of a rank."""
    status = await session.call("status")
    known = [rank["rank"] for node in status.get("nodes", ()) for rank in node.get("ranks", ())]
    answer = await session.request("keep", ranks=known if ranks is None else ranks)
    told = answer["ranks"]
    if as_json:
        write_json({"job": session.job, "request": "stacks", **answer})
    else:
        write_lines([f"rank {rank}: {one['message']}" for rank, one in told.items()])
    return 0 if all(one["accepted"] for one in told.values()) else 1


async def collect(session: Session, ranks: list[int] | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return (stacks, reasons of those without) by rank, from all nodes at once; raises Unreachable, RequestFailed."""
    status = await session.call("status")
    if status["state"] in ENDED_STATES:
        raise RequestFailed(f"job {session.job} is over: {status['state']}", kind="ended")
    links = session.opened_links(live=True)
    if not links:
        raise session.unreachable("no agent is alive there")
    stacks: dict[str, str] = {}
    unreachable: dict[str, str] = {}
    for node in status.get("nodes", ()):
        for rank in node.get("ranks", ()):
            if rank.get("state") in ("running", "silent", "starting") and (ranks is None or rank["rank"] in ranks):
                unreachable[str(rank["rank"])] = f"{node['name']} cannot be reached"

    async def one(name: str) -> None:
        try:
            answer = await session.links[name].call("stacks", {"ranks": ranks}, timeout_s=DEADLINE)
        except (CallFailed, WireError, asyncio.TimeoutError) as error:
            for node in status.get("nodes", ()):
                if node["name"] == name:
                    reasons = {str(rank["rank"]): str(error) or "no answer in time" for rank in node.get("ranks", ())}
                    unreachable.update({rank: text for rank, text in reasons.items() if rank in unreachable})
            return
        found = answer.data.get("stacks", {})
        stacks.update(found)
        unreachable.update(answer.data.get("unreachable", {}))

    await asyncio.gather(*(one(link.view.name) for link in links))
    return stacks, {rank: reason for rank, reason in unreachable.items() if rank not in stacks}
