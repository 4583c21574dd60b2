"""A job that nodes join by themselves: whoever started torchrun there has the workers, and we only steer them.

In: the wire to this node's torchrun, the job's endpoint. Out: an engine's link; the first coordinator; the outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

from remote_agent import restore
from remote_agent.engine_link import EngineLink, Notice
from remote_agent.formation import FIRST_TERM
from remote_agent.wire import CallFailed, WireError

if TYPE_CHECKING:
    from remote_agent.agent import Agent
    from remote_agent.paths import JobFiles

DISMISS_S = 5.0


class TorchrunLink(EngineLink):
    """The torchrun that started this agent, in an engine's place: it ends by itself, and there is no other."""

    replaceable = False

    def __init__(self, files: JobFiles, notice: Notice, wire: int) -> None:
        super().__init__(files, notice)
        self._wire = wire

    async def dismiss(self, outcome: dict[str, Any]) -> None:
        """Tell torchrun how the job ended for this node, so that it ends likewise."""
        with contextlib.suppress(WireError, CallFailed, asyncio.TimeoutError):
            await self.call("end", outcome, DISMISS_S)

    async def kill(self) -> None:
        """Kill the workers and let go of torchrun: it has started us, and ends by itself as soon as it can."""
        await super().kill()
        if self._channel is not None:
            await self._channel.close()

    async def remark(self, text: str) -> None:
        """Have torchrun say what this node waits for: nobody else may look."""
        if self._channel is not None:
            with contextlib.suppress(WireError):
                await self._channel.notify("remark", {"text": text})

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(sock=socket.socket(fileno=self._wire))

    async def _how_it_ended(self) -> str:
        return "its torchrun ended"


async def claim(agent: Agent) -> None:
    """Coordinate a job that has not begun, where this node has the job's endpoint."""
    port = agent.spec.coordinator_port
    if agent.spec.endpoint and port and agent.port == port and not agent.journal.records:
        own = {"node": agent.node, "address": agent.address, "port": agent.port}
        await agent.assign({"term": FIRST_TERM, "coordinator": own, "members": {}})


def outcome(agent: Agent) -> dict[str, Any]:
    """Return how the job ended for this node: state (succeeded, failed, stopped, removed or lost) and why."""
    state = restore.fold(agent.spec, agent.journal.records, agent.node)
    node = state.nodes.get(agent.node)
    if state.ended:
        return {"state": state.ended, "reason": state.failure or ""}
    if node is not None and node.status == "removed":
        return {"state": "removed", "reason": node.reason or ""}
    return {"state": "lost", "reason": agent.reason}
