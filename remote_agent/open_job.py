"""A job that nodes join by themselves: whoever started torchrun there has the workers, and we only steer them.

In: the wire to this node's torchrun, the job's endpoint. Out: an engine's link; the first coordinator; what this node
waits for, in words; the outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

from remote_agent import clocks, restore
from remote_agent import state as s
from remote_agent.engine_link import EngineLink, Notice
from remote_agent.formation import FIRST_TERM, floor, holds_quorum
from remote_agent.wire import CallFailed, WireError

if TYPE_CHECKING:
    from remote_agent.agent import Agent
    from remote_agent.paths import JobFiles

DISMISS_S = 5.0
LOOK_S = 1.0
# How often the same wait is told again.
AGAIN_S = 60.0


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


class Waiting:
    """What this node waits for, told by torchrun; one that torch's own meeting would have timed out ends it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._said: dict[str, float] = {}
        self._since: float | None = None
        self._folded: tuple[tuple[int, int], str] = ((-1, -1), "")

    async def watch(self) -> None:
        """Look until cancelled, or until the wait is too long."""
        patience = self._agent.spec.join_timeout
        while True:
            await asyncio.sleep(LOOK_S)
            now = clocks.now()
            text, ends = self._look()
            self._said = {each: when for each, when in self._said.items() if text and now - when < AGAIN_S}
            if text and text not in self._said:
                self._said[text] = now
                await self._agent.follower.engine.remark(text)
            self._since = (now if self._since is None else self._since) if ends else None
            if self._since is not None and now - self._since > patience:
                self._agent.finish(f"{patience:g} s (join_timeout) of {text}", linger=False)
                return

    def _look(self) -> tuple[str, bool]:
        """Return what is waited for, "" where nothing, and whether the node's own join_timeout ends that."""
        agent = self._agent
        if agent.finished or agent.follower.running is not None:
            return "", False
        if agent.role is not None:
            state = agent.role.state
            text = short_of(state, agent.node)
            if not text and state.phase == s.FORMING and not holds_quorum(state, clocks.now()):
                text = f"waiting for at least half of the last group ({' '.join(state.members)})"
            # The coordinator ends a job that has too few nodes, for all of them.
            return text, False
        if agent.follower.channel is None:
            return _unled(agent), True
        journal = agent.journal
        if self._folded[0] != (journal.last_term, journal.last_seq):
            state = restore.fold(agent.spec, journal.records, agent.node)
            self._folded = (journal.last_term, journal.last_seq), short_of(state, agent.node)
        return self._folded[1], False


def _unled(agent: Agent) -> str:
    view, trouble = agent.follower.member, agent.follower.trouble
    if not view.term:
        return f"waiting for {trouble or agent.spec.endpoint}"
    who = "a coordinator" if view.coordinator in (None, agent.node) else f"{view.coordinator}, the coordinator"
    return f"waiting for {who}" + (f": {trouble}" if trouble else "")


def short_of(state: s.State, me: str) -> str:
    """Say what keeps a node without workers from having some, as far as that may take long."""
    own = state.nodes.get(me)
    if own is not None and own.status in ("removed", "failed"):
        return f"left out ({own.reason}): waiting for `supervisor add {state.spec.job} --node {me}`"
    if own is not None and own.status == "spare":
        return "the group is full (--nnodes): standing by as a spare"
    if state.phase != s.FORMING:
        return ""
    here = [name for name, node in state.nodes.items() if node.status in ("ready", "running", "spare")]
    if len(here) < floor(state):
        return f"waiting for nodes: {floor(state)} are needed, here: {' '.join(here) or 'none'}"
    return ""


def outcome(agent: Agent) -> dict[str, Any]:
    """Return how the job ended for this node: state (succeeded, failed, stopped, removed or lost) and why."""
    state = restore.fold(agent.spec, agent.journal.records, agent.node)
    node = state.nodes.get(agent.node)
    if state.ended:
        return {"state": state.ended, "reason": state.failure or ""}
    if node is not None and node.status == "removed":
        return {"state": "removed", "reason": node.reason or ""}
    return {"state": "lost", "reason": agent.reason}
