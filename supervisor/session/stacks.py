"""Where every rank and its child processes are: each agent's answer for its own ranks, asked at once.

In: a session, ranks. Out: stacks by rank, and why there is none of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from remote_agent.wire import CallFailed, WireError
from supervisor.errors import RequestFailed, why
from supervisor.session.view import ENDED_STATES

if TYPE_CHECKING:
    from supervisor.session.session import Session

# Collecting takes 3.5 s on a node whose ranks do not answer.
DEADLINE = 20.0


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
                    reasons = {str(rank["rank"]): f"{name}: {why(error)}" for rank in node.get("ranks", ())}
                    unreachable.update({rank: text for rank, text in reasons.items() if rank in unreachable})
            return
        stacks.update(answer.data.get("stacks", {}))
        unreachable.update(answer.data.get("unreachable", {}))
        children.update(answer.data.get("children", {}))
        if answer.data.get("note"):
            notes[name] = answer.data["note"]

    await asyncio.gather(*(one(link.view.name) for link in links))
    unreachable = {rank: reason for rank, reason in unreachable.items() if rank not in stacks}
    if not stacks and not unreachable:
        raise RequestFailed(f"job {session.job} has no live rank" + (" of those" if ranks else ""))
    return {"stacks": stacks, "unreachable": unreachable, "children": children, "notes": notes}


def _live(status: Mapping[str, Any], ranks: list[int] | None) -> dict[str, str]:
    """Return the live ones of these ranks (None: all), each with what is said of it until its node answers."""
    return {
        str(rank["rank"]): f"{node['name']} cannot be reached"
        for node in status.get("nodes", ())
        for rank in node.get("ranks", ())
        if rank.get("state") in ("running", "silent", "starting") and (ranks is None or rank["rank"] in ranks)
    }
