"""What an operator asks of the job: restart, remove, add, stop, promote.

In: a session and a verb. Out: the coordinator's answer, or RequestFailed with the reason; the outcome comes as events.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Any

from remote_agent.wire import CallFailed, WireError
from supervisor.errors import RequestFailed, why
from supervisor.session import heal
from supervisor.session.view import ENDED_STATES

if TYPE_CHECKING:
    from supervisor.session.session import Session

# How long a node that is up may take to join the coordinator, seconds.
JOIN_DEADLINE = 30.0
# A request to the coordinator may have to wait for a state change in progress, seconds.
REQUEST_DEADLINE = 60.0


async def request(session: Session, verb: str, args: dict[str, Any]) -> dict[str, Any]:
    """Ask the cluster to act; `add` brings the host up first. Raises RequestFailed, Unreachable, HostError."""
    if session.read_only:
        raise RequestFailed(f"{verb} refused: this supervisor is read-only", "leave --read-only out", "read_only")
    if session.fed:
        # What is asked for may be done already.
        await session.heard()
    wish = {**args, "operator": session.operator}
    if args.get("node"):
        wish["node"] = _node_on(session, str(args["node"]))
    if verb == "promote":
        return await heal.promote(session, wish.get("node"))
    if session.state in ENDED_STATES:
        raise _over(session)
    return await (_add(session, wish) if verb == "add" else _steer(session, verb, wish))


async def _add(session: Session, wish: dict[str, Any]) -> dict[str, Any]:
    name = str(wish["node"])
    if _is_open(session):
        # Nodes join by themselves: a torchrun there brings the agent up.
        return await _steer(session, "add", wish)
    # Its agent may be there: nothing is brought up before that is known.
    await session.settle(nodes=[name])
    seq = int(session.events[-1]["seq"]) if session.events else 0
    was_in = any(node["name"] == name and node["state"] == "running" for node in session.status.get("nodes", ()))
    wish["spec"] = await heal.bring_up_again(session, name, full=True)
    end = time.monotonic() + JOIN_DEADLINE
    while True:
        try:
            return await _steer(session, "add", wish)
        except RequestFailed as refused:
            if refused.kind == "done" and not was_in:
                # A lost node: it was admitted as soon as its agent was back.
                return {"accepted": True, "message": refused.message, "generation": 0, "seq": seq}
            # Its agent is up and has yet to reach the coordinator.
            if refused.kind != "not_ready" or time.monotonic() > end:
                raise
        await session.wait_change(0.2)


def _is_open(session: Session) -> bool:
    """Whether nodes join by themselves: they have names of their own, not their hosts'."""
    return any(link.view.identity.get("node", name) != name for name, link in session.links.items())


def _node_on(session: Session, name: str) -> str:
    """Return the one node that joined by itself on the host of that name, else the name; raises RequestFailed."""
    nodes = [str(node["name"]) for node in session.status.get("nodes", ())]
    found = [node for node in nodes if re.fullmatch(re.escape(name) + "-[0-9a-f]{4}", node)]
    if not found or name in nodes or not _is_open(session):
        return name
    if len(found) > 1:
        raise RequestFailed(f"{name} is {len(found)} nodes of this job", f"name one: {' '.join(found)}", "unknown_node")
    return found[0]


async def _steer(session: Session, op: str, args: dict[str, Any]) -> dict[str, Any]:
    generation = _generation(session)
    if op == "restart" and generation >= 0:
        # The group that is meant may be restarting by itself.
        args.setdefault("if_generation", generation)
    if not await heal.promote_if_orphaned(session):
        if op == "remove":
            await heal.promote_without(session, str(args["node"]))
        elif op == "stop":
            await heal.promote_to_stop(session)
    last = ""
    for link in session.opened_links(live=True):
        try:
            return (await link.call(op, args, timeout_s=REQUEST_DEADLINE)).data
        except CallFailed as refused:
            raise RequestFailed(refused.message, refused.hint, refused.kind) from refused
        except (WireError, asyncio.TimeoutError) as broken:
            last = f"{link.view.name}: {why(broken)}"
            # It may have been carried out: the next agent must not do it a second time.
            if generation >= 0:
                args.setdefault("if_generation", generation)
    if session.state in ENDED_STATES:
        raise _over(session)
    raise session.unreachable(last or "no agent is alive there")


def _generation(session: Session) -> int:
    """Return the newest generation that this session has heard of: the journal may be ahead of the status."""
    told = session.events[-1]["generation"] if session.events else -1
    return max(int(session.status.get("generation", -1)), int(told))


def _over(session: Session) -> RequestFailed:
    return RequestFailed(f"job {session.job} is over: {session.state}", kind="ended")
