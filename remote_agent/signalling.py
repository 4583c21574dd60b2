"""What an operator asks of single ranks of this node: a signal, or their stacks and flight records in files.

In: the request: ranks, with the pids that the operator saw. Out: the engine's answer; a fact in the journal.
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
    refused = (await ask_engine(agent, "signal", {"pids": pids, "signal": name})).data["refused"]
    sent = sorted(int(rank) for rank in pids if rank not in refused)
    told = {"node": agent.node, "ranks": sent, "signal": name, "operator": args.get("operator")}
    if sent and agent.role is not None:
        agent.role.request("signalled", told)
    elif sent:
        # It is sent: a coordinator out of reach makes it no less so.
        with contextlib.suppress(Problem):
            await agent.follower.forward("signalled", told)
    return Answer({"refused": refused})


async def ask_engine(agent: Agent, op: str, args: dict[str, Any]) -> Answer:
    """Return the engine's answer; raises Problem when it does not answer."""
    try:
        return Answer(await agent.follower.engine.call(op, args))
    except (WireError, asyncio.TimeoutError) as error:
        raise Problem("engine", f"the engine on {agent.node} did not answer: {error}") from error
