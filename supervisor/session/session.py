"""One job seen from here: links to every host, the newest state, the journal, requests. It holds nothing that matters.

In: an inventory, a job's name (or none: it is chosen), frames from agents.
Out: `hosts`, `status`, `events`, `incidents`, `notices` for screens and printers; requests to the cluster.

Use: `session = open_session(inventory, job, attach="control")`, `async with session: await session.ready()`.
"""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from remote_agent.wire import Answer, CallFailed, JobSpec, WireError
from supervisor.errors import LaunchFailed, RequestFailed, SupervisorError, Unreachable, why
from supervisor.session import heal, logs, opening, requests, resync, stacks
from supervisor.session.feed import Feed
from supervisor.session.follow import Chunk, Seen, follow
from supervisor.session.link import Link
from supervisor.session.nccl import NcclReader, joined
from supervisor.session.search import search
from supervisor.session.tasks import cancel_all, each, wait_event
from supervisor.session.view import HostView, Notice
from supervisor.ssh import AgentFile

if TYPE_CHECKING:
    from types import TracebackType

    from supervisor.inventory import Inventory
    from supervisor.session.fabric import Fabric

log = logging.getLogger(__name__)

# How long hosts that do not answer are waited for where all of them matter, seconds.
SETTLE_DEADLINE = 15.0
# How long the first news of a job are waited for, seconds.
HEARD_DEADLINE = 10.0
# How long an agent may take for the next record of its journal, seconds.
RECORD_DEADLINE = 30.0
# Undoing a launch has deadlines of its own, which end before this one, seconds.
CANCEL_LAUNCH = 60.0

T = TypeVar("T")
LaunchTask = Callable[["Session"], Coroutine[Any, Any, None]]


def operator_name() -> str:
    """Return `user@host` of whoever runs this supervisor."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class Session:
    """One job seen from here. All attributes may be read at any time; `wait_change` says when to look again."""

    def __init__(
        self,
        inventory: Inventory,
        job: str | None = None,
        *,
        attach: str | None = None,
        feed: bool = False,
        live_only: bool = False,
        read_only: bool = False,
        only: Iterable[str] | None = None,
        spec: JobSpec | None = None,
        launch: LaunchTask | None = None,
    ) -> None:
        self.inventory = inventory
        self.job, self.spec = job or "", spec
        """Empty until a job has been chosen; its description where this session launched it."""
        self.attach = attach
        """None (no trace in the journal), "watch", or "control" (also heals)."""
        self.fed = feed or attach is not None
        """`status`, `events` and `incidents` are kept up to date."""
        self.read_only = read_only
        self.live_only = live_only
        self.operator = operator_name()
        self.agent = AgentFile.build()
        wanted = frozenset(only if only is not None else (host.name for host in inventory.hosts))
        self.links: dict[str, Link] = {
            host.name: Link(host, self, active=host.name in wanted) for host in inventory.hosts
        }
        self.status: dict[str, Any] = {}
        """The newest status document of the contract (with the agents' additions), or {}."""
        self.events: list[dict[str, Any]] = []
        """The journal from its first event, in order of `seq`, without gaps; kept up to date while attached."""
        self.incidents: list[dict[str, Any]] = []
        """The contract's incident objects, oldest first."""
        self.notices: list[Notice] = []
        """What this supervisor did or saw itself."""
        self.launching = launch is not None
        """True until all nodes of a launch have been assigned, or `failure` says why not."""
        self.failure: SupervisorError | None = None
        """Why the launch failed, or the job cannot be found; `ready` raises it."""
        self.late: set[str] = set()  # hosts that still come up though the job has begun
        self.ended = False
        """The job is over, and `events` holds its last event."""
        self.version = 0
        """Grows with every change."""
        self.job_known = asyncio.Event()
        self._status_at = 0.0
        self._launch = launch
        self._launch_task: asyncio.Task[None] | None = None
        self._changed: asyncio.Event = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._feed = Feed(self)
        self._healer = heal.Healer(self)
        self._nccl = NcclReader(self)

    # --- life

    async def __aenter__(self) -> Session:
        self.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def begin(self) -> None:
        """Start connecting (and launching); does nothing when begun."""
        if self._tasks:
            return
        if self.job:
            self.job_known.set()
        for name, link in self.links.items():
            self._own(link.keep(), f"link {name}")
        if not self.job:
            self._own(opening.choose(self), "choose job")
        elif self._launch is None:
            self._own(opening.seek(self), "seek job")
        if self._launch is not None:
            self._launch_task = self._own(self._run_launch(self._launch), "launch")
        if self.fed:
            self._own(self._feed.run(), "feed")
            self._own(self._healer.run(), "heal")

    async def close(self) -> None:
        """Detach: end all links. The job does not notice; a launch in progress is undone."""
        await self.cancel_launch()
        await cancel_all(self._tasks)
        self._tasks.clear()

    async def ready(self) -> None:
        """Wait until the job is launched, or its best agent is connected; raises SupervisorError."""
        while self.failure is None and (self.launching or not opening.is_reached(self)):
            await self.wait_change(0.1)
            if not self.launching and self.failure is None:
                self.failure = opening.find_failure(self)
        if self.failure is not None:
            raise self.failure
        if self.attach is None:
            await heal.promote_if_orphaned(self)

    async def settle(self, nodes: Iterable[str] | None = None, timeout_s: float = SETTLE_DEADLINE) -> list[HostView]:
        """Wait until every host (or those) has answered or failed, at most so long; returns the silent ones."""
        wanted = self.links if nodes is None else set(nodes)
        links = [link for name, link in self.links.items() if link.active and name in wanted]
        await self.wait_until(lambda: all(link.tried for link in links), timeout_s)
        return [link.view for link in links if not link.opened and not link.missing]

    async def heard(self) -> None:
        """Wait until a fed session knows the job's state and its journal so far, at most HEARD_DEADLINE."""
        await self.wait_until(self._has_heard, HEARD_DEADLINE)

    def _has_heard(self) -> bool:
        known = int(self.events[-1]["seq"]) if self.events else 0
        # After the end, operators who come and go are still recorded.
        over = self.launching or self.ended
        return over or (bool(self.status) and known >= int(self.status.get("last_seq", 0)))

    async def wait_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Wait until something is true of this session, at most so long."""
        end = time.monotonic() + timeout_s
        while not done() and time.monotonic() < end:
            await self.wait_change(0.1)

    async def cancel_launch(self) -> None:
        """Give up a launch in progress: what has been started is stopped again before this returns."""
        if self._launch_task is not None and not self._launch_task.done():
            # Once only: what undoes the launch must not be cancelled as well.
            self._launch_task.cancel()
            await asyncio.wait([self._launch_task], timeout=CANCEL_LAUNCH)

    # --- state

    @property
    def hosts(self) -> dict[str, HostView]:
        """The hosts that belong to the job as far as we know, in inventory order."""
        return {name: link.view for name, link in self.links.items() if link.active}

    @property
    def status_age_s(self) -> float:
        """Seconds since the newest status document came; infinite before the first."""
        return time.monotonic() - self._status_at if self._status_at else float("inf")

    @property
    def state(self) -> str:
        """The job's state as last heard, "" before the first status."""
        return str(self.status.get("state", ""))

    async def wait_change(self, timeout_s: float, since: int | None = None) -> int:
        """Wait until `version` has grown (beyond `since`), at most `timeout_s`; returns the version."""
        if since is None or self.version <= since:
            await wait_event(self._changed, timeout_s)
        return self.version

    def touch(self) -> None:
        """Say that something changed."""
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def notice(self, text: str, level: str = "info", node: str | None = None) -> None:
        """Tell the operator something that is not in the journal."""
        self.notices.append(Notice(time.time_ns(), text, level, node))
        self.touch()

    def set_status(self, status: dict[str, Any]) -> None:
        """Take a newer status document."""
        self.status = status
        self._status_at = time.monotonic()
        self.activate(node["name"] for node in status.get("nodes", ()) if node.get("state") != "removed")
        self.touch()

    def confirm_status(self) -> None:
        """Note that the newest status document still holds: its agent is there and has nothing newer."""
        self._status_at = time.monotonic()

    def opened_links(self, live: bool | None = None) -> list[Link]:
        """Return the links on which the job answers, best first (see Link.rank_as_source)."""
        found = [link for link in self.links.values() if link.opened and live in (None, link.view.live)]
        return sorted(found, key=lambda link: link.rank_as_source(), reverse=True)

    # --- requests

    async def call(self, op: str, args: dict[str, Any] | None = None, timeout_s: float = 30.0) -> dict[str, Any]:
        """Ask the best agent something harmless, or the next one when a link breaks.

        Raises Unreachable, RequestFailed.
        """
        return (await self._ask_best(lambda link: link.call(op, args, timeout_s=timeout_s))).data

    async def journal(self) -> list[dict[str, Any]]:
        """Return all events as the best agent has them; raises Unreachable, RequestFailed."""
        return [item["event"] for item in await self.stream("events")]

    async def stream(self, op: str) -> list[dict[str, Any]]:
        """Return all items of a stream that ends, from the best agent; raises Unreachable, RequestFailed."""

        async def collect(link: Link) -> list[dict[str, Any]]:
            return [answer.data async for answer in each(link.stream(op), RECORD_DEADLINE)]

        return await self._ask_best(collect)

    async def _ask_best(self, ask: Callable[[Link], Awaitable[T]]) -> T:
        """Ask the best agent, or the next one when a link breaks; raises Unreachable, RequestFailed."""
        last = ""
        for link in self.opened_links():
            try:
                return await ask(link)
            except CallFailed as refused:
                raise RequestFailed(refused.message, refused.hint, refused.kind) from refused
            except (WireError, asyncio.TimeoutError) as broken:
                last = f"{link.view.name}: {why(broken)}"
        raise self.unreachable(last)

    async def request(self, verb: str, **args: Any) -> dict[str, Any]:
        """Ask the cluster to act: restart, remove, add, stop, promote. `add` brings the host up first.

        Raises RequestFailed (refused, with the reason), Unreachable. The outcome comes as events.
        """
        return await requests.request(self, verb, args)

    async def edited(self) -> dict[str, Any]:
        """Return what is edited in the work tree here, and what the group runs from (see resync.look)."""
        return await resync.look(self)

    async def stacks(self, ranks: list[int] | None) -> dict[str, dict[str, Any]]:
        """Return the Python stacks of these ranks, or of all (see stacks.collect)."""
        return await stacks.collect(self, ranks)

    async def nccl(self, status: dict[str, Any] | None = None) -> Fabric:
        """Return how the nodes reach each other as NCCL tells it there; `status`: where the session is not fed."""
        status = self.status if status is None else status
        return joined(await self.nccl_told(status), status)

    async def nccl_told(self, status: dict[str, Any]) -> dict[str, dict[str, Any] | None]:
        """Return what each node tells of NCCL, as its agent reads it there."""
        return await self._nccl.told(status)

    # --- logs

    async def log(self, node: str, op: str, args: dict[str, Any]) -> Answer:
        """Send one log_* request to the node that holds the files; raises Unreachable, RequestFailed."""
        return await logs.ask(self, node, op, args)

    def ahead_ns(self, node: str) -> int:
        """Return by how much that node's clock, and the times of its log_window, are ahead of the coordinator's."""
        return logs.Clocks(self).ahead_ns(node)

    def follow(
        self, selection: logs.Selection, start: str = "end", seen: Seen | None = None, oldest: int | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Yield chunks of whole lines from all nodes as they come (see follow.follow). Needs a fed session."""
        return follow(self, selection, start, seen, oldest)

    async def merged(self, selection: logs.Selection, count: int, **bounds: Any) -> logs.Page:
        """Return rows of all nodes by time of arrival (see logs.merged), without those of a node that is stuck."""
        return await logs.merged(self, selection, count, patience_s=logs.PATIENCE, **bounds)

    def search(self, selection: logs.Selection, **query: Any) -> AsyncGenerator[logs.Row, None]:
        """Yield the rows that match (see `search` for the query)."""
        return search(self, selection, **query)

    # --- inside

    def unreachable(self, last: str = "") -> Unreachable:
        """Return the error that names every host and why it does not answer."""
        return opening.unreachable(self, last)

    def activate(self, names: Iterable[str]) -> None:
        """Connect to further hosts of the inventory: the job has spread to them."""
        for name in names:
            link = self.links.get(name)
            if link is not None:
                link.activate()

    async def _run_launch(self, launch: LaunchTask) -> None:
        try:
            await launch(self)
        except SupervisorError as error:
            self.failure = error
        except asyncio.CancelledError:
            self.failure = self.failure or LaunchFailed("the launch was interrupted")
            raise
        finally:
            self.launching = False
            self.touch()

    def own_late(self, admissions: Mapping[str, Coroutine[Any, Any, None]]) -> None:
        """Let hosts be admitted to the job that has begun without them; each leaves `late` when that is done."""
        self.late.update(admissions)
        for name, work in admissions.items():
            self._own(work, f"admit {name}")

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("task %s failed", task.get_name(), exc_info=error)
        self.failure = self.failure or SupervisorError(f"internal error in {task.get_name()}: {error!r}")
        self.notice(f"internal error in {task.get_name()}: {error!r}", "error")


def open_session(
    inventory: Inventory,
    job: str | None = None,
    *,
    attach: str | None = None,
    feed: bool = False,
    live_only: bool = False,
    read_only: bool = False,
) -> Session:
    """Return a session on an existing job (none named: the one live job, or the newest); begin it with `async with`.

    `live_only`: without a name, only one live job will do; `feed`: keep it up to date without attaching.
    """
    return Session(inventory, job, attach=attach, feed=feed, live_only=live_only, read_only=read_only)
