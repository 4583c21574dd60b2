"""The link to one host: reconnected whenever the connection is lost, until the hub closes.

In: a host, the hub's job, work to do on the host (sync, start) before the job is opened.
Out: calls and streams to the job's agent (or to the reader of its files if no agent is alive); the host's view.

The state of a link is its connection and the job on it. Without both, what changes nothing is asked through another
host, if the agent is connected to the job.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from remote_agent.wire import Answer, Args, CallFailed, ChannelClosed, WireError
from supervisor.errors import why
from supervisor.link.tasks import each, wait_event
from supervisor.link.view import HostView
from supervisor.ssh import AgentFile, HostError, MalformedAnswer, NodeLink, connect, read_refusal
from supervisor.ssh.answers import PASSED_ON, RelayedChannel
from supervisor.ssh.questions import questions
from supervisor.ssh.reasons import NeedsAnswer

if TYPE_CHECKING:
    from remote_agent.wire.answers import ListedJob
    from supervisor.inventory import Host
    from supervisor.ssh.answers import EngineFacts, HostChannel, Identity

log = logging.getLogger(__name__)

# Back-off between attempts to connect, seconds.
FIRST_DELAY = 0.25
LONGEST_DELAY = 15.0
CONNECT_DEADLINE = 20.0
OPEN_DEADLINE = 15.0
# Others wait this long for the first answer of a host, from when it is first connected to, seconds.
FIRST_ANSWER = 15.0
# A host that owes an answer for this long is asked whether it is still there, seconds.
SILENCE = 3.0
# It may then send nothing for this long before its connection counts as lost, seconds.
SIGN_OF_LIFE = 5.0
SILENT = f"no answer for {SILENCE + SIGN_OF_LIFE:g} s"

# A host is connected to itself if this often another one did not reach it.
TURNS = 3
# The job on a connection: work is done before it is opened, it has been opened, or the host does not know it.
BUSY, OPEN, MISSING = "busy", "open", "missing"

Prepare = Callable[[NodeLink], Awaitable[None]]


class Owner(Protocol):
    """What a link needs from the hub that holds it."""

    job: str
    job_known: asyncio.Event
    attach: str | None
    operator: str
    agent: AgentFile
    follows: bool

    @property
    def is_over(self) -> bool:
        """The job has ended, so that its agents end."""

    def way_to(self, name: str) -> tuple[HostLink, str] | None:
        """Return a link whose agent passes requests on to this host's, and the node there; None: there is none."""

    def touch(self) -> None:
        """Report a change of the link's view."""

    def notice(self, text: str, level: str = "info", node: str | None = None) -> None:
        """Show the operator something about a host."""

    def own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a task until it ends or the hub closes."""

    def leave_out(self, name: str, reason: str) -> None:
        """Report that a host that had answered does not answer any more."""

    def note_srun(self, reason: str) -> None:
        """Report that srun is used instead of SSH."""

    async def wait_change(self, timeout_s: float) -> int:
        """Wait for a change of any link."""

    async def wait_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `done` returns True."""


class _Work:
    """Work to do once on a host before the job is opened, and its outcome."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, node: NodeLink) -> None:
        try:
            await self.prepare(node)
        except (HostError, CallFailed, WireError, asyncio.TimeoutError) as error:
            self.fail(error)
        except Exception as error:
            # The waiting caller needs an end too; the link's task reports the error itself.
            self.fail(HostError(node.host.name, "bring-up", f"internal error: {error!r}"))
            raise
        else:
            if not self.done.done():
                self.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class HostLink:
    """One host of a hub. `keep` runs until the hub closes and connects; all other methods use its connection."""

    def __init__(
        self, host: Host, owner: Owner, *, active: bool = True, direct: bool = True, held: bool = False
    ) -> None:
        self.host = host
        self.active = active
        """False: a host of the inventory outside the job; `bring_up` and `activate` make it one of the job."""
        self.direct = active and direct
        """It gets a connection of its own; otherwise only when it is asked for what no other host passes on."""
        self.view = HostView(host.name)
        self.jobs: list[ListedJob] | None = None
        """The host's answer to `jobs`, if no job has been chosen yet."""
        self.opened_at = 0.0
        """time.monotonic() when the job was last opened, 0 before the first time."""
        self.asked_at = 0.0
        """time.monotonic() when the host was last asked for the job; 0: never, infinite: it is not asked again."""
        self.is_malformed = False
        """The host gave an unreadable answer since the job was last opened: logs are read from the others."""
        self.held = held
        """The job does not exist yet: it is opened only after `carry_out`."""
        self.turns = 0
        """How often another host could not pass a request on to this one: each time the next one is asked."""
        self._owner = owner
        self._direct = direct
        self._node: NodeLink | None = None
        self._job = ""
        """BUSY, OPEN, MISSING, or empty while it is none of these."""
        self._work: _Work | None = None
        self._tried = asyncio.Event()
        self._wake = asyncio.Event()
        self._again = False
        self._called = False
        """The user has called for the questions of this host."""
        self._delay = FIRST_DELAY
        self._attempts = self._failed_attempt = 0
        """Connections that were begun, and the number of the one that the shown error is of."""
        self._began_at: float | None = None
        self._owed = 0
        self._checked: NodeLink | None = None
        self._given_up: NodeLink | None = None
        if not active:
            self._tried.set()

    # --- use

    @property
    def opened(self) -> bool:
        """The job is open on the host's own connection: calls reach its agent or its files."""
        return self._job == OPEN

    @property
    def missing(self) -> bool:
        """The host answers but does not know the job."""
        return self._job == MISSING

    @property
    def tried(self) -> bool:
        """At least one attempt to open the job has ended, with success or an error."""
        return self._tried.is_set()

    @property
    def is_awaited(self) -> bool:
        """True while others wait for this host: its first attempt goes on, and FIRST_ANSWER has not passed."""
        if self.tried or not self.direct:
            return False
        return self._began_at is None or questions().clock() - self._began_at < FIRST_ANSWER

    @property
    def through(self) -> HostLink | None:
        """The link through which this host is asked while it has no connection of its own."""
        way = None if self.opened else self._owner.way_to(self.view.name)
        return None if way is None else way[0]

    @property
    def reached_at(self) -> float | None:
        """time.monotonic() when the connection that leads to this host was opened, its own or another's; None: none."""
        way = self if self.opened else self.through
        return None if way is None else way.opened_at

    @property
    def can_be_asked(self) -> bool:
        """The host answers, or it is connected to once it is asked."""
        return self.reached_at is not None or (self.active and not self.direct)

    async def call(self, op: str, args: Args | None = None, body: bytes = b"", *, timeout_s: float = 30.0) -> Answer:
        """Ask the job on this host; raises CallFailed, WireError, asyncio.TimeoutError.

        The connection is lost, with ChannelClosed, as soon as the host is found to be silent.
        """
        link = await self._way(op)
        try:
            with self._judging(op, link), link._owing():
                return await self._channel(link).call(op, args, body, timeout=timeout_s)
        except asyncio.TimeoutError:
            link.check()
            raise

    async def _way(self, op: str) -> HostLink:
        """Return the link over which this host is asked: this one, which is connected first, or another one."""
        if self.opened:
            return self
        link = self.through if op in PASSED_ON and not self._owner.is_over else None
        if link is None and self.active and not self.direct:
            self.connect()
            await wait_event(self._tried, CONNECT_DEADLINE + OPEN_DEADLINE)
        return link or self

    def _channel(self, link: HostLink) -> HostChannel | RelayedChannel:
        """Return the channel to this host over a link; raises ChannelClosed."""
        if link is self:
            return self.node.channel
        way = self._owner.way_to(self.view.name)
        node = self.host.name if way is None else way[1]
        return RelayedChannel(self.host.name, node, link.view.name, link.node.channel)

    async def try_call(self, op: str, args: Args | None = None, *, timeout_s: float) -> Any:
        """Ask the job on this host; returns None if it refuses or cannot be reached."""
        try:
            return (await self.call(op, args, timeout_s=timeout_s)).data
        except (CallFailed, WireError, asyncio.TimeoutError) as error:
            log.info("%s on %s: %s", op, self.view.name, error)
            return None

    async def stream(self, op: str, args: Args | None = None) -> AsyncGenerator[Answer, None]:
        """Ask the job on this host for a stream that may rest; raises CallFailed, WireError."""
        async with aclosing(self._items(await self._way(op), op, args)) as items:
            async for item in items:
                yield item

    async def _items(self, link: HostLink, op: str, args: Args | None) -> AsyncGenerator[Answer, None]:
        with self._judging(op, link):
            async with aclosing(self._channel(link).stream(op, args)) as items:
                async for item in items:
                    yield item

    async def whole_stream(
        self, op: str, args: Args | None = None, *, timeout_s: float
    ) -> AsyncGenerator[Answer, None]:
        """Yield all items of a stream that has an end; raises CallFailed, WireError, asyncio.TimeoutError.

        `timeout_s`: for one item; of a host that is found to be silent the connection is lost sooner, as in `call`.
        """
        link = await self._way(op)
        async with aclosing(each(self._items(link, op, args), timeout_s)) as items:
            while True:
                with link._owing():
                    item = await anext(items, None)
                if item is None:
                    return
                yield item

    @contextmanager
    def _owing(self) -> Iterator[NodeLink]:
        """Hold while the host owes an answer on the connection: it is checked once that takes long."""
        node = self.node
        self._owed += 1
        timer = asyncio.get_running_loop().call_later(SILENCE, self.check)
        try:
            yield node
        except ChannelClosed as closed:
            raise (ChannelClosed(SILENT) if self._given_up is node else closed) from None
        finally:
            timer.cancel()
            self._owed -= 1

    def check(self) -> None:
        """Probe the host repeatedly while it owes an answer; drop the connection once it is silent."""
        if self.opened and self._node is not None and self._checked is not self._node:
            self._checked = self._node
            self._owner.own(self._check(self._node), f"check {self.view.name}")

    async def _check(self, node: NodeLink) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._node is node:
                asked_at = loop.time()
                try:
                    await node.channel.call("identity", timeout=SIGN_OF_LIFE)
                except asyncio.TimeoutError:
                    # A large answer may be on its way.
                    if node.channel.heard_at <= asked_at and self._node is node:
                        self._give_up()
                        return
                except (CallFailed, MalformedAnswer):
                    log.debug("%s refuses to say who it is, so it is there", self.view.name)
                except WireError:
                    return
                if not self._owed:
                    return
                await asyncio.sleep(SILENCE)
        finally:
            self._checked = None

    def _give_up(self) -> None:
        self._given_up = self._node
        self._down("link", SILENT)
        if not self._owner.follows:
            self._owner.leave_out(self.view.name, SILENT)
        self.reopen()

    @contextmanager
    def _judging(self, op: str, link: HostLink) -> Iterator[None]:
        """Raise the error that a request over this link has failed with as what it means for this host."""
        try:
            yield
        except (CallFailed, MalformedAnswer) as failed:
            raise self._judge(op, failed) from None
        except ChannelClosed:
            if link is not self and link.opened:
                # The other host answers, and does not reach this one.
                self.turns += 1
                if self.turns >= TURNS:
                    self.connect()
            raise

    def _judge(self, op: str, failed: CallFailed | MalformedAnswer) -> CallFailed | MalformedAnswer:
        """Return the error to raise; of one that is the host's own, show it, and prefer all others as sources."""
        if isinstance(failed, CallFailed):
            failed = self._foreign(failed) or read_refusal(self.host.name, op, failed)
        if isinstance(failed, MalformedAnswer):
            if not self.is_malformed:
                self._owner.notice(f"{self.view.name}: {failed.reason}", "warning", self.view.name)
            self.is_malformed = True
            self.fail(failed.step, failed.reason, failed.hint)
            self.connect()
        return failed

    def _foreign(self, failed: CallFailed) -> CallFailed | None:
        """Return a clearer error if a request fails because another version of the supervisor started the agent."""
        if self.view.live and not self.is_ours and failed.kind in ("internal", "unknown_op"):
            version = self.view.identity.get("version") or "an earlier version"
            message = f"job {self._owner.job} was started by another supervisor ({version}): {failed.message}"
            return CallFailed("version", message, "use the one that started it")
        return None

    @property
    def is_ours(self) -> bool:
        """True if this supervisor could have started the agent: each knows all requests of the other."""
        return self.view.identity.get("build") in ("", self._owner.agent.sha256)

    @property
    def passes_on(self) -> bool:
        """True if the agent can be asked about other nodes."""
        return self.opened and bool(self.view.live) and self.is_ours and not self.is_malformed

    @property
    def connected(self) -> bool:
        """True while there is a connection, whether or not the host knows the job."""
        return self._node is not None

    async def bring_up(self, prepare: Prepare) -> None:
        """Run `prepare`, then wait until the job is open; raises HostError, CallFailed, WireError."""
        await self.carry_out(prepare)
        await self.until_open()

    async def until_open(self) -> None:
        """Wait until the job is open; raises HostError.

        The end of a connection that is there already is no error yet: it may end with the agent that a new one
        replaces, and is followed by another connection.
        """
        before = self._attempts
        clock = questions().clock
        end = clock() + CONNECT_DEADLINE + OPEN_DEADLINE
        while not self.opened:
            if self.view.error is not None and self._failed_attempt > before:
                raise HostError(self.host.name, self.view.step, self.view.error, self.view.hint)
            if self.missing:
                raise HostError(self.host.name, "open", self.view.text, "")
            if clock() > end:
                raise HostError(self.host.name, self.view.step, "the host does not open the job", "")
            await self._owner.wait_change(0.1)

    async def carry_out(self, prepare: Prepare) -> None:
        """Run `prepare` once, on a connection on which no job is open; raises HostError, CallFailed, WireError."""
        work = _Work(prepare)
        if self._work is not None:
            self._work.fail(ChannelClosed("another request to bring the host up replaced it"))
        self._work = work
        self.connect()
        self._wake.set()
        await work.done

    async def idle(self, timeout_s: float) -> None:
        """Wait until no work is in progress, and the job has been opened if it exists."""
        await self._owner.wait_until(lambda: self._work is None and self._job != BUSY, timeout_s)

    def activate(self) -> None:
        """Take the host as one of the job; begin to connect, unless others are asked about it."""
        self.active = True
        if self._direct:
            self.connect()

    def set_aside(self) -> None:
        """Take the host as one outside the job, unless it is connected to."""
        self.active = self.direct

    def connect(self) -> None:
        """Begin to connect to the host itself, if that was not wanted so far."""
        if not self.direct:
            self.active = self.direct = True
            self._wake.set()

    def reopen(self) -> None:
        """Drop the connection and connect again at once."""
        self._again = True
        self._wake.set()

    def ask_user(self) -> None:
        """Connect again at once, and ask the user what ssh asks."""
        self._called = True
        self._wake.set()

    def ask_again(self) -> None:
        """Ask a host that did not know the job again, on the existing connection."""
        if self.missing:
            self._wake.set()

    def progress(self, step: str, text: str) -> None:
        """Show which step runs on the host; attempts to connect to one that is asked through another are not shown."""
        if self.through is None or self._node is not None:
            self.view.enter(step, text)
            self._owner.touch()

    def show_way(self) -> None:
        """Show through which other host this one is asked, or that it is not any more."""
        link = self.through if self._node is None else None
        if link is not None:
            self._show("up", self.view.step, f"through {link.view.name}", link.view.name)
        elif self.view.through and self._node is None:
            state = "lost" if self.opened_at else "failed" if self.view.error else "connecting"
            self._show(state, self.view.step, self.view.error or "")

    def fail(self, step: str, reason: str, hint: str = "") -> None:
        """Show that the host cannot take part, and why."""
        self._set("failed", step, reason)
        self._note_error(reason, hint)
        self._owner.touch()

    def learn(self, identity: Identity) -> None:
        """Update the identity from a newer answer, or from the same keys of a status document."""
        self.view.identity = {**self.view.identity, **identity}
        if "live" in identity:
            self.view.live = bool(identity["live"])

    def learn_engine(self, facts: EngineFacts) -> None:
        """Set the engine's facts: torch's version, the number of ranks."""
        self.view.engine = facts

    def learn_script(self, digest: str | None) -> None:
        """Set the hash of the script on the host."""
        self.view.script = digest

    def rank_as_source(self) -> tuple[bool, bool, int, bool, bool, bool, int]:
        """Return the sort key of sources: answers are well-formed, live or has the job's end, newest term in the
        journal, coordinator, reaches it, has the end, longest journal.

        The term of a vote does not count: a candidate that nobody elects is in ever newer ones. An agent that was cut
        off when the job ended stays for an hour, and knows less than files with the end.
        """
        known = self.view.identity
        ended = bool(known.get("ended"))
        return (
            not self.is_malformed,
            bool(self.view.live) or ended,
            int(known.get("journal_term") or 0),
            known.get("role") == "coordinator",
            bool(known.get("coordinator_reachable", True)),
            ended,
            int(known.get("last_seq") or 0),
        )

    @property
    def node(self) -> NodeLink:
        """The connection on which the job is open; raises ChannelClosed if there is none."""
        if self._node is None or self._job != OPEN:
            raise ChannelClosed(f"{self.host.name} is not connected")
        return self._node

    # --- keep

    async def keep(self) -> None:
        """Connect, open the job, wait until the connection ends, and repeat until cancelled.

        Unless the hub follows the job, a host that falls silent is not connected to again.
        """
        while True:
            while not self.direct:
                await self._wait(None)
            self._began_at = self._began_at or questions().clock()
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
                self._node = None
                self._job = MISSING if self.missing else ""
                await node.close()
            self._owner.touch()
            if self._given_up is node and not self._owner.follows and self._work is None:
                # A command that only asks has said that this host is left out.
                return
            if not self._again and self._work is None:
                await self._pause()
            self._again = False

    async def _connect(self) -> NodeLink | None:
        self._attempts += 1
        # Whoever is called while this attempt runs is asked by the next one.
        called, self._called = self._called, False
        try:
            node = await connect(
                self.host,
                agent=self._owner.agent,
                progress=self.progress,
                deadline_s=CONNECT_DEADLINE,
                # A question without an answer is not asked again.
                may_ask=called or not (self.view.asks or (self.opened_at and questions().on_demand)),
            )
            self.view.asks = self._called = False
        except HostError as error:
            if isinstance(error, NeedsAnswer) and not self.view.asks and questions().on_demand:
                self._owner.notice(f"{self.host.name} {error.reason} (press A)", "warning", self.host.name)
            self.view.asks = isinstance(error, NeedsAnswer)
            self._down(error.step, error.reason, error.hint)
            if self._work is not None:
                self._work.fail(error)
                self._work = None
            return None
        if node.opened.refused is not None:
            self._owner.note_srun(node.opened.refused.message)
            self.host = node.host
        return node

    async def _serve(self, node: NodeLink) -> None:
        self._node = node
        self.view.hello = node.hello
        self._owner.touch()
        while not node.closed.is_set():
            work, self._work = self._work, None
            if work is not None:
                if self.opened:
                    # After `open` the connection belongs to the job: the work needs another one.
                    self._work, self._again = work, True
                    return
                self._job, self.held, self.view.error = BUSY, False, None
                await work.run(node)
            if not self.opened and not self.held:
                await self._open(node)
            await self._wait(node)
            if self._again:
                return
        if self.opened:
            self._down("link", "the connection was lost")

    async def _open(self, node: NodeLink) -> None:
        channel = node.channel
        owner = self._owner
        if not owner.job:
            self.jobs = (await channel.call("jobs", timeout=OPEN_DEADLINE)).data["jobs"]
            self.progress("jobs", f"knows {len(self.jobs)} jobs")
            await owner.job_known.wait()
        self.asked_at = time.monotonic()
        try:
            known = (await channel.call("open", {"job": owner.job}, timeout=OPEN_DEADLINE)).data
        except CallFailed as error:
            if error.kind != "no_such_job":
                raise
            self._note_missing(error.message)
            return
        # A node that joined by itself, through torchrun, has a name of its own.
        if known.get("node") not in (None, self.host.name) and not self.host.local:
            self.asked_at = math.inf
            self._note_missing(f"shares its home with {known['node']}, and has no files of its own")
            return
        identity = (await channel.call("identity", timeout=OPEN_DEADLINE)).data
        if owner.attach and identity.get("live"):
            await channel.call("attach", {"operator": owner.operator, "mode": owner.attach}, timeout=OPEN_DEADLINE)
        self.learn(identity)
        self._job = OPEN
        self._tried.set()
        self.is_malformed = False
        self.opened_at = time.monotonic()
        self._delay = FIRST_DELAY
        self.view.error, self.view.hint = None, ""
        self._set("up", "agent", "agent answers" if self.view.live else "no agent; reading its files")

    def _note_missing(self, text: str) -> None:
        self._job = MISSING
        self._tried.set()
        self.view.live = None
        if self.view.state != "failed":
            self._set("up", "open", text)
        self._owner.touch()

    def _show(self, state: str, step: str, text: str, through: str = "") -> None:
        self.view.state, self.view.through = state, through
        self.view.enter(step, text)

    def _set(self, state: str, step: str, text: str) -> None:
        self._show(state, step, text)
        self._owner.touch()

    def _down(self, step: str, reason: str, hint: str = "") -> None:
        self._job = ""
        self._tried.set()
        self._note_error(reason, hint)
        self._set("lost" if self.opened_at else "failed", step, reason)
        self.show_way()

    def _note_error(self, reason: str, hint: str) -> None:
        self.view.error, self.view.hint = reason, hint
        self._failed_attempt = self._attempts

    async def _pause(self) -> None:
        """Wait before the next attempt: longer each time, with jitter; a wake-up ends the wait."""
        delay = self._delay * random.uniform(0.8, 1.2)
        self._delay = min(self._delay * 2, LONGEST_DELAY)
        await wait_event(self._wake, delay)
        self._wake.clear()

    async def _wait(self, node: NodeLink | None) -> None:
        """Wait until the connection ends or another method wakes this link."""
        waits = [asyncio.ensure_future(self._wake.wait())]
        if node is not None:
            waits.append(asyncio.ensure_future(node.closed.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._wake.clear()
