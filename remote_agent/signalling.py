"""A signal from an operator to ranks of this node.

In: the request: pids by rank, as the operator saw them. Out: to which it was not sent, and why; a fact in the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from remote_agent.wire import Answer, Problem, WireError

if TYPE_CHECKING:
    from remote_agent.agent import Agent


async def signal_ranks(agent: Agent, args: dict[str, Any]) -> Answer:
    """Send it through the engine, which holds the processes themselves; raises Problem when that does not answer."""
    pids, name = args["pids"], str(args["signal"])
    try:
        refused = (await agent.follower.engine.call("signal", {"pids": pids, "signal": name}))["refused"]
    except (WireError, asyncio.TimeoutError) as error:
        raise Problem("engine", f"the engine on {agent.node} did not answer: {error}") from error
    sent = sorted(int(rank) for rank in pids if rank not in refused)
    told = {"node": agent.node, "ranks": sent, "signal": name, "operator": args.get("operator")}
    if sent and agent.role is not None:
        agent.role.request("signalled", told)
    elif sent:
        # It is sent: a coordinator out of reach makes it no less so.
        with contextlib.suppress(Problem):
            await agent.follower.forward("signalled", told)
    return Answer({"refused": refused})
