"""`supervisor stacks`: where every rank and its child processes are, equal stacks together.

In: argv, each agent's answer for its own ranks. Out: text or JSON.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from remote_agent.diagnose.model import name_ranks
from remote_agent.wire import CallFailed, WireError
from supervisor.cli.options import add_json, load_target, make_parser, parse, read_ranks
from supervisor.cli.output import write_json, write_lines, write_ranks
from supervisor.errors import RequestFailed, why
from supervisor.plain import one_line, safe
from supervisor.session.view import ENDED_STATES

if TYPE_CHECKING:
    from supervisor.session.session import Session

Found = TypeVar("Found")
_ADDRESS = re.compile(r"(?m)(?<=^Thread )0x[0-9a-f]+ |(?<=^Current thread )0x[0-9a-f]+ ")
# Where a node keeps its copy of the work tree: its home may lie elsewhere than another's.
_TREE = re.compile(r'(?<=File ")[^"\n]*/trees/[^/"\n]+-[0-9a-f]{8}/')
# Collecting takes 3.5 s on a node whose ranks do not answer.
DEADLINE = 20.0


def run(verb: str, argv: Sequence[str]) -> int:
    """Show the stacks; returns the exit status."""
    parser = make_parser(verb, "[HOSTS] [JOB] [--rank R[,R…]] [--save] [--json]")
    parser.add_argument("--rank", type=read_ranks, metavar="R", help="only these ranks: 0,2-4")
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
            found = await collect(session, options.rank)
        if not found["stacks"] and not found["unreachable"]:
            raise RequestFailed(f"job {session.job} has no live rank" + (" of those" if options.rank else ""))
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


async def collect(session: Session, ranks: list[int] | None) -> dict[str, dict[str, Any]]:
    """Return what the nodes answer, all at once, by rank: stacks, unreachable (why there is none), children; and notes.

    notes, by node: why stacks of child processes are missing. Raises Unreachable, RequestFailed.
    """
    status = await session.call("status")
    if status["state"] in ENDED_STATES:
        raise RequestFailed(f"job {session.job} is over: {status['state']}", kind="ended")
    links = session.opened_links(live=True)
    if not links:
        raise session.unreachable("no agent is alive there")
    stacks: dict[str, str] = {}
    unreachable = _live(status, ranks)
    children: dict[str, list[dict[str, Any]]] = {}
    notes: dict[str, str] = {}

    async def one(name: str) -> None:
        try:
            answer = await session.links[name].call("stacks", {"ranks": ranks}, timeout_s=DEADLINE)
        except (CallFailed, WireError, asyncio.TimeoutError) as error:
            for node in status.get("nodes", ()):
                if node["name"] == name:
                    reasons = {str(rank["rank"]): why(error) for rank in node.get("ranks", ())}
                    unreachable.update({rank: text for rank, text in reasons.items() if rank in unreachable})
            return
        stacks.update(answer.data.get("stacks", {}))
        unreachable.update(answer.data.get("unreachable", {}))
        children.update(answer.data.get("children", {}))
        if answer.data.get("note"):
            notes[name] = answer.data["note"]

    await asyncio.gather(*(one(link.view.name) for link in links))
    return {
        "stacks": stacks,
        "unreachable": {rank: reason for rank, reason in unreachable.items() if rank not in stacks},
        "children": children,
        "notes": notes,
    }


def _live(status: Mapping[str, Any], ranks: list[int] | None) -> dict[str, str]:
    """Return the live ones of these ranks (None: all), each with what is said of it until its node answers."""
    return {
        str(rank["rank"]): f"{node['name']} cannot be reached"
        for node in status.get("nodes", ())
        for rank in node.get("ranks", ())
        if rank.get("state") in ("running", "silent", "starting") and (ranks is None or rank["rank"] in ranks)
    }


def stacks_lines(
    stacks: Mapping[str, str],
    unreachable: Mapping[str, str],
    children: Mapping[str, Sequence[Mapping[str, Any]]],
    notes: Mapping[str, str],
) -> list[str]:
    """Return stacks grouped by equality, the smallest group first: it is the odd one; then those of child processes."""
    lines: list[str] = []
    for text, ranks in _grouped((_common(text), int(rank)) for rank, text in stacks.items()):
        lines += [f"{name_ranks(ranks)}:", *(f"  {line}" for line in safe(text).splitlines()), ""]
    below = (
        ((f"{one_line(child['name'])} {one_line(child['doing'])}", _common(child["stack"])), int(rank))
        for rank, found in children.items()
        for child in found
    )
    for (does, text), ranks in _grouped(below):
        lines += [f"{name_ranks(ranks)}: {len(ranks)} x child process {does}"]
        lines += [*(f"  {line}" for line in safe(text).splitlines()), ""]
    for reason, ranks in _grouped((reason, int(rank)) for rank, reason in unreachable.items()):
        lines.append(f"{name_ranks(ranks)}: no stack: {one_line(reason)}")
    return lines + [f"{one_line(node)}: {one_line(note)}" for node, note in notes.items()]


def _common(stack: str) -> str:
    """Return a stack without what differs between equal ones: threads' addresses, where the work tree lies."""
    return _TREE.sub("", _ADDRESS.sub("", stack.strip()))


def _grouped(found: Iterable[tuple[Found, int]]) -> list[tuple[Found, list[int]]]:
    """Return the ranks of equal things, the smallest group first."""
    groups: dict[Found, list[int]] = {}
    for what, rank in found:
        groups.setdefault(what, []).append(rank)
    return sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
