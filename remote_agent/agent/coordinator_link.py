"""A node's connection to its coordinator: heartbeats, the comparison of clocks, the search for another coordinator.

In: the coordinator that the ballot names. Out: a channel while it answers; the lease, renewed by its answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

from remote_agent.base import clocks
from remote_agent.base.tasks import within
from remote_agent.coordinator.state import HEARTBEAT_S
from remote_agent.election import peers
from remote_agent.wire import Answer, Args, CallFailed, Channel, Handler, Items, Problem, WireError, leases
from remote_agent.wire.status_pieces import joined

if TYPE_CHECKING:
    from remote_agent.agent.context import Context
    from remote_agent.agent.coordinator_shell import CoordinatorRole
    from remote_agent.election.election import Election
    from remote_agent.wire.documents import Status

log = logging.getLogger(__name__)

RETRY_S = (0.1, 0.2, 0.5, 1.0)
CALL_TIMEOUT_S = 10.0


class Joining(Protocol):
    """The node that joins: `MemberLoop`."""

    def introduction(self) -> dict[str, Any]: ...
    def heartbeat(self) -> dict[str, Any]: ...
    def handler(self, node: str, channel: Channel | None = None) -> Handler: ...


async def _all(items: Items) -> list[Answer]:
    return [item async for item in items]


class CoordinatorLink:
    """The connection to whichever node is the coordinator."""

    def __init__(self, context: Context, node: Joining, role: CoordinatorRole, election: Election) -> None:
        self._context = context
        self._ballot = context.ballot
        self._node = node
        self._role = role
        self._election = election
        self.offset = clocks.Offset()
        self.channel: Channel | None = None
        """The connection; None while there is none, or while this node is the coordinator."""
        self.look_again = asyncio.Event()
        """Set to connect anew: the coordinator is another one, or this node has missed something."""
        self._echo = clocks.Echo()
        """The last answer on the connection."""
        self._ended: str | None = None
        """The coordinator whose side has ended our last connection: dead, if nothing listens there any more."""
        context.ballot.on_change(self._follow_another)

    def _follow_another(self, coordinator: str) -> None:
        """Compare the clock with the new coordinator's, and look for a connection to it."""
        self.offset = clocks.Offset(ours=coordinator == self._context.node)
        self.look_again.set()

    async def keep(self) -> None:
        """Stay connected to the coordinator, whichever it is; a new one ends whatever waits for the old one."""
        tries = 0
        while True:
            self.look_again.clear()
            another = asyncio.ensure_future(self.look_again.wait())
            seeking = asyncio.ensure_future(self._seek())
            try:
                await asyncio.wait((another, seeking), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (another, seeking):
                    task.cancel()
                outcome, *_ = await asyncio.gather(seeking, another, return_exceptions=True)
            if isinstance(outcome, Exception):
                log.error("the link to the coordinator failed", exc_info=outcome)
            tries = 0 if outcome is True or self.look_again.is_set() else tries + 1
            await within(self.look_again, RETRY_S[min(tries, len(RETRY_S) - 1)])

    async def _seek(self) -> bool:
        """Serve a connection to the coordinator, then ask the others for a newer one; returns whether there was one."""
        was_there = False
        name, coordinator, election = self._ballot.view.coordinator, self._role.coordinator, self._election
        if coordinator is None:
            try:
                if name not in (None, self._context.node) and name in self._context.peers.members:
                    await self._serve(str(name))
                    was_there = True
            except peers.PeerRefused as error:
                election.note_trouble(str(error))
                log.info("coordinator: %s", error)
                if self._ended == name:
                    self._ballot.note_refused()
            except (peers.PeerUnreachable, WireError, Problem, asyncio.TimeoutError) as error:
                if isinstance(error, Problem) and error.kind == "removed":
                    # The coordinator may order this anyway, and the operator may be waiting to add the node again.
                    self._context.life.finish("it was removed from the job", linger=False)
                election.note_trouble(str(error) or "no answer in time")
                log.info("coordinator %s: %s", name, election.trouble)
            await election.ask_around()
        elif coordinator.is_short() or coordinator.misses_nodes() or self._context.spec.endpoint:
            await election.ask_around()
        return was_there

    async def _serve(self, name: str) -> None:
        """Join, and send heartbeats until the connection ends; raises PeerRefused, PeerUnreachable, WireError …"""
        channel = await self._context.peers.connect(name, self._node.handler(name))
        running = asyncio.ensure_future(channel.run())
        self._ended, self._echo = None, clocks.Echo()
        try:
            await self._timed(channel, "time", {}, CALL_TIMEOUT_S)
            # The channel is set first because orders may overtake the answer, and reports on them count.
            self.channel = channel
            sent = clocks.now()
            await channel.call("join", {**self._node.introduction(), **self._echo.facts()}, timeout=CALL_TIMEOUT_S)
            # The lease begins again too: the end of the old one would stop the workers that are started now.
            self._ballot.renew_lease(sent)
            log.info("joined %s", name)
            self._election.note_trouble("")
            await self._send_heartbeats(channel)
        finally:
            if self.channel is channel:
                self.channel = None
            # close() would wait for a host without power.
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            self._ended = name if channel.ended else None

    async def _send_heartbeats(self, channel: Channel) -> None:
        """Send heartbeats until the wire ends or this node must look again: `wait_for` may swallow a cancellation."""
        timeout_s = self._context.spec.node_timeout
        interval = min(HEARTBEAT_S, leases.HEARTBEAT * timeout_s)
        name = self._ballot.view.coordinator
        while self._ballot.view.coordinator == name and not (channel.closed.is_set() or self.look_again.is_set()):
            sent = clocks.now()
            await self._timed(channel, "beat", self._node.heartbeat(), timeout_s)
            self._ballot.renew_lease(sent)
            await within(channel.closed, interval)

    async def _timed(self, channel: Channel, op: str, args: Args, timeout_s: float) -> None:
        """Call the coordinator, and compare the clocks by its answer: later reports are corrected by the result."""
        offset, sent_ns = self.offset, time.time_ns()
        answer = await channel.call(op, {**args, **self._echo.facts()}, timeout=timeout_s)
        offset.sample(sent_ns, int(answer.data["received_ns"]), int(answer.data["answered_ns"]))
        self._echo = clocks.Echo(answer.data.get("now"))
        if "said" in answer.data:
            self._role.note_said(answer.data)

    async def ask_for_lease(self) -> None:
        """Send a heartbeat now: an idle node is in the next group, and starts nothing there without a lease."""
        channel, sent = self.channel, clocks.now()
        if channel is None:
            return
        with contextlib.suppress(CallFailed, WireError, asyncio.TimeoutError):
            await self._timed(channel, "beat", self._node.heartbeat(), CALL_TIMEOUT_S)
            if self.channel is channel:
                self._ballot.renew_lease(sent)

    async def rejoin(self) -> None:
        """Introduce this node again, after something about it has changed."""
        if self._role.coordinator is not None:
            self._role.coordinator.hear_join(self._context.node, self._node.introduction())
        elif self.channel is not None:
            await self.channel.close()

    async def send(self, op: str, args: Args) -> None:
        """Send a report, if there is a connection; one that is lost with it is told again where that matters."""
        if self.channel is not None:
            with contextlib.suppress(WireError):
                await self.channel.notify("report", {"op": op, "args": args})

    async def ask(self, op: str, args: Args) -> Any:
        """Return the coordinator's answer, wherever it is; raises Problem when there is none."""
        if self._role.coordinator is not None:
            return self._role.coordinator.request(self._context.node, op, args)
        if self.channel is None:
            raise self._unreachable()
        try:
            return (await self.channel.call("request", {"op": op, "args": args}, timeout=CALL_TIMEOUT_S)).data
        except (WireError, asyncio.TimeoutError) as error:
            raise Problem("no_coordinator", f"the coordinator did not answer: {error}") from error

    async def status(self) -> Status:
        """Return the coordinator's status document, wherever it is; raises Problem when there is none."""
        if self._role.coordinator is not None:
            return self._role.coordinator.status()
        if self.channel is None:
            raise self._unreachable()
        items = self.channel.stream("status", {})
        try:
            return joined(part.data for part in await asyncio.wait_for(_all(items), CALL_TIMEOUT_S))
        except (WireError, KeyError, ValueError, asyncio.TimeoutError) as error:
            raise Problem("no_coordinator", f"the coordinator did not answer: {error}") from error
        finally:
            await items.aclose()

    def _unreachable(self) -> Problem:
        """Say why there is no connection to a coordinator."""
        view, endpoint, me = self._ballot.view, self._context.spec.endpoint, self._context.node
        name = view.coordinator
        if endpoint and not view.term:
            message = f"{me} has not found the job yet: waiting for {self._election.trouble or endpoint}"
            return Problem("no_coordinator", message, "start torchrun there; `supervisor stop` ends the one here")
        if not view.term:
            return Problem("no_coordinator", "the launch is not complete: no coordinator has been named yet")
        message = f"the coordinator{f' ({name})' if name else ''} cannot be reached from {me}"
        hint = f"if {name or 'it'} is dead: `supervisor promote` lets the others continue, `stop` ends the job"
        return Problem("no_coordinator", message, hint)
