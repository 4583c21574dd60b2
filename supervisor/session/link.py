"""The link to one host of a session: connected again and again, for as long as the session lives.

In: a host, the session's job, bring-up orders (sync and start) to carry out before the job is opened.
Out: calls and streams to the job's agent (or, when none is alive, to the reader of its files); the host's view.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from remote_agent.wire import Answer, CallFailed, ChannelClosed, WireError
from supervisor.errors import why
from supervisor.session.tasks import wait_event
from supervisor.session.view import HostView
from supervisor.ssh import HostError, NodeLink, connect

if TYPE_CHECKING:
    from supervisor.inventory import Host
    from supervisor.session.session import Session

# Back-off between attempts to connect, seconds.
FIRST_DELAY = 0.25
LONGEST_DELAY = 15.0
CONNECT_DEADLINE = 20.0
OPEN_DEADLINE = 15.0

Prepare = Callable[[NodeLink], Awaitable[None]]


class _Order:
    """Work to do on the host before its job is opened: once, with its outcome."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, node: NodeLink) -> None:
        try:
            await self.prepare(node)
        except (HostError, CallFailed, WireError, asyncio.TimeoutError) as error:
            self.fail(error)
        except Exception as error:
            # Who waits for it must not wait for ever; the owner of this link hears of it too.
            self.fail(HostError(node.host.name, "bring-up", f"internal error: {error!r}"))
            raise
        else:
            if not self.done.done():
                self.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Link:
    """One host of a session. `keep` runs for as long as the session; everything else uses what it has connected."""

    def __init__(self, host: Host, session: Session, *, active: bool = True) -> None:
        self.host = host
        self.active = active
        """False: not connected until `bring_up` asks for it (a host of the inventory outside this job)."""
        self.view = HostView(host.name)
        self.jobs: list[dict[str, Any]] | None = None
        """The host's answer to `jobs`, where the session has no job yet."""
        self.tried = not active
        """At least one attempt has ended: with the job opened, or with an error."""
        self.opened = False
        """Calls reach the job."""
        self.opened_at = 0.0
        """time.monotonic() of the last opening, 0 before the first."""
        self.missing = False
        """The host answers, and does not know the job."""
        self.asked_at = 0.0
        """time.monotonic() of when the host was last asked for the job; 0: never, infinite: never again."""
        self.held = False
        """The job is not opened before something has been carried out: it does not exist yet."""
        self._session = session
        self._node: NodeLink | None = None
        self._order: _Order | None = None
        self._working = False
        self._wake = asyncio.Event()
        self._again = False
        self._delay = FIRST_DELAY

    # --- use

    async def call(
        self, op: str, args: dict[str, Any] | None = None, body: bytes = b"", *, timeout_s: float = 30.0
    ) -> Answer:
        """Ask the job on this host; raises CallFailed, WireError, asyncio.TimeoutError."""
        try:
            return await self.node.channel.call(op, args, body, timeout=timeout_s)
        except CallFailed as failed:
            self._refuse_foreign(failed)
            raise

    async def stream(self, op: str, args: dict[str, Any] | None = None) -> AsyncGenerator[Answer, None]:
        """Ask the job on this host for a stream; raises CallFailed, WireError."""
        async with aclosing(self.node.channel.stream(op, args)) as items:
            try:
                async for item in items:
                    yield item
            except CallFailed as failed:
                self._refuse_foreign(failed)
                raise

    def _refuse_foreign(self, failed: CallFailed) -> None:
        """Say so where a request fails because the agent is not of this very code: another supervisor started it."""
        build = self.view.identity.get("build")
        known = build in ("", self._session.agent.sha256)
        if self.view.live and not known and failed.kind in ("internal", "unknown_op"):
            version = self.view.identity.get("version") or "an earlier version"
            message = f"job {self._session.job} was started by another supervisor ({version}): {failed.message}"
            raise CallFailed("version", message, "use the one that started it") from failed

    @property
    def connected(self) -> bool:
        """True while the host answers, whether or not it knows the job."""
        return self._node is not None

    async def bring_up(self, prepare: Prepare) -> None:
        """Carry `prepare` out, then wait until the job is open; raises HostError, CallFailed, WireError."""
        self.view.error = None
        await self.carry_out(prepare)
        while not self.opened:
            if self.view.error is not None:
                raise HostError(self.host.name, self.view.step, self.view.error, self.view.hint)
            if self.missing:
                raise HostError(self.host.name, "open", self.view.text, "")
            await self._session.wait_change(0.1)

    async def carry_out(self, prepare: Prepare) -> None:
        """Run `prepare` once, on a connection on which no job is open; raises HostError, CallFailed, WireError."""
        order = _Order(prepare)
        if self._order is not None:
            self._order.fail(ChannelClosed("another bring-up took over"))
        self._order = order
        self.activate()
        self._wake.set()
        await order.done

    async def idle(self, timeout_s: float) -> None:
        """Wait until what is being carried out has ended, and the job has been opened if it is there."""
        await self._session.wait_until(lambda: self._order is None and not self._working, timeout_s)

    def activate(self) -> None:
        """Begin to connect, where that has not been wanted so far."""
        if not self.active:
            self.active = True
            self._wake.set()

    def reopen(self) -> None:
        """Drop the connection and connect anew at once."""
        self._again = True
        self._wake.set()

    def ask_again(self) -> None:
        """Ask a host that did not know the job once more, on the connection that is there."""
        if self.missing:
            self._wake.set()

    def progress(self, step: str, text: str) -> None:
        """Note what is being done on the host."""
        self.view.step, self.view.text = step, text
        self._session.touch()

    def fail(self, step: str, reason: str, hint: str = "") -> None:
        """Note that the host cannot take part, and why."""
        self._set("failed", step, reason)
        self.view.error, self.view.hint = reason, hint
        self._session.touch()

    def learn(self, identity: dict[str, Any]) -> None:
        """Take a newer answer to `identity`, or the part of a status document that says the same."""
        self.view.identity = {**self.view.identity, **identity}
        if "live" in identity:
            self.view.live = bool(identity["live"])

    def rank_as_source(self) -> tuple[bool, int, bool, bool, bool, int]:
        """Return what orders sources: live or with the job's end, newest term, coordinator, in touch with it, the end,
        longest journal.

        An agent that was cut off when the job ended lives on for an hour, and knows less than files with the end.
        """
        known = self.view.identity
        ended = bool(known.get("ended"))
        return (
            bool(self.view.live) or ended,
            int(known.get("term") or 0),
            known.get("role") == "coordinator",
            bool(known.get("coordinator_reachable", True)),
            ended,
            int(known.get("last_seq") or 0),
        )

    @property
    def node(self) -> NodeLink:
        """The connection, while the job is open on it; raises ChannelClosed."""
        if self._node is None or not self.opened:
            raise ChannelClosed(f"{self.host.name} is not connected")
        return self._node

    # --- keep

    async def keep(self) -> None:
        """Connect, open the job, wait until the connection ends, and so on until cancelled."""
        while True:
            while not self.active:
                await self._wait(None)
            node = await self._connect()
            if node is None:
                await self._pause()
                continue
            try:
                await self._serve(node)
            except CallFailed as error:
                self._down("open", error.message, error.hint)
            except (WireError, asyncio.TimeoutError) as error:
                self._down("open", why(error))
            finally:
                self._node, self.opened, self._working = None, False, False
                await node.close()
            self._session.touch()
            if not self._again and self._order is None:
                await self._pause()
            self._again = False

    async def _connect(self) -> NodeLink | None:
        try:
            node = await connect(
                self.host, agent=self._session.agent, progress=self.progress, deadline_s=CONNECT_DEADLINE
            )
        except HostError as error:
            self._down(error.step, error.reason, error.hint)
            if self._order is not None:
                self._order.fail(error)
                self._order = None
            return None
        if node.refused is not None:
            # Once for all nodes: as a rule none of them lets anybody in.
            if all(link.host.via != "srun" for link in self._session.links.values()):
                self._session.notice(f"srun is used instead of SSH: {node.refused.message}")
            self.host = node.host
        return node

    async def _serve(self, node: NodeLink) -> None:
        self._node = node
        self.view.hello = node.hello
        self._session.touch()
        while not node.closed.is_set():
            order, self._order = self._order, None
            if order is not None:
                if self.opened:
                    # Past `open` only the job listens: the work needs a connection of its own.
                    self._order, self._again = order, True
                    return
                self.missing = self.held = False
                self._working = True
                await order.run(node)
            if not self.opened and not self.held:
                await self._open(node)
            self._working = False
            await self._wait(node)
            if self._again:
                return
        if self.opened:
            self._down("link", "the connection was lost")

    async def _open(self, node: NodeLink) -> None:
        channel = node.channel
        session = self._session
        if not session.job:
            self.jobs = (await channel.call("jobs", timeout=OPEN_DEADLINE)).data["jobs"]
            self.progress("jobs", f"knows {len(self.jobs)} jobs")
            await session.job_known.wait()
        self.asked_at = time.monotonic()
        try:
            known = (await channel.call("open", {"job": session.job}, timeout=OPEN_DEADLINE)).data
        except CallFailed as error:
            if error.kind != "no_such_job":
                raise
            self._note_missing(error.message)
            return
        # A torchrun that joined by itself has given this machine another name.
        if known.get("node") not in (None, self.host.name) and not self.host.local:
            self.asked_at = math.inf
            self._note_missing(f"shares its home with {known['node']}, and has no files of its own")
            return
        identity = (await channel.call("identity", timeout=OPEN_DEADLINE)).data
        if session.attach and identity.get("live"):
            await channel.call("attach", {"operator": session.operator, "mode": session.attach}, timeout=OPEN_DEADLINE)
        self.learn(identity)
        self.opened, self.missing, self.tried = True, False, True
        self.opened_at = time.monotonic()
        self._delay = FIRST_DELAY
        self.view.error, self.view.hint = None, ""
        self._set("up", "agent", "agent answers" if self.view.live else "no agent; reading its files")

    def _note_missing(self, text: str) -> None:
        self.missing, self.tried = True, True
        self.view.live = None
        if self.view.state != "failed":
            self._set("up", "open", text)
        self._session.touch()

    def _set(self, state: str, step: str, text: str) -> None:
        self.view.state, self.view.step, self.view.text = state, step, text
        self._session.touch()

    def _down(self, step: str, reason: str, hint: str = "") -> None:
        self.opened, self.tried = False, True
        self.view.error, self.view.hint = reason, hint
        self._set("lost" if self.opened_at else "failed", step, reason)

    async def _pause(self) -> None:
        """Wait before the next attempt: longer each time, not in step with other hosts; a wake-up ends it."""
        delay = self._delay * random.uniform(0.8, 1.2)
        self._delay = min(self._delay * 2, LONGEST_DELAY)
        await wait_event(self._wake, delay)
        self._wake.clear()

    async def _wait(self, node: NodeLink | None) -> None:
        """Wait until the connection ends or somebody wants something of this link."""
        waits = [asyncio.ensure_future(self._wake.wait())]
        if node is not None:
            waits.append(asyncio.ensure_future(node.closed.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._wake.clear()
