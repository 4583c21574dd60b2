"""The links to the hosts of a job and the newest state of that job. Everything that works on a job takes a hub.

In: an inventory, a job's name (or none: it is chosen), answers of agents.
Out: `hosts`, `status`, `events`, `incidents`, `notices`; `wait_change`; requests to the best agent.
"""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from remote_agent.diagnose.incidents import incidents_after, incidents_in
from remote_agent.wire import Args, CallFailed, WireError
from remote_agent.wire.events import ENDED_STATES
from remote_agent.wire.status_pieces import joined
from supervisor import known
from supervisor.errors import HostFailure, RequestFailed, SupervisorError, Unreachable, why
from supervisor.link.doors import LARGE, Doors
from supervisor.link.host_link import FIRST_ANSWER, HostLink
from supervisor.link.tasks import cancel_all, wait_event
from supervisor.link.view import HostView, LaunchPlan, Notice
from supervisor.ssh import AgentFile
from supervisor.ssh.questions import questions

if TYPE_CHECKING:
    from remote_agent.wire import JobSpec
    from remote_agent.wire.documents import IncidentDocument, JournalEvent, Status
    from supervisor.inventory import Inventory
    from supervisor.ssh.answers import Identity

log = logging.getLogger(__name__)

# The first news of a job may take this long, seconds.
CURRENT_DEADLINE = 10.0
# An agent may take this long for the next record of its journal, seconds.
RECORD_DEADLINE = 30.0
# An agent may take this long to say who it is, seconds.
IDENTITY_DEADLINE = 5.0

T = TypeVar("T")


def operator_name() -> str:
    """Return `user@host` of the person who runs this supervisor."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class Hub:
    """Links and state of one job. Any attribute may be read at any time; `wait_change` says when to look again."""

    version = 0
    """Grows with every change."""

    def __init__(
        self,
        inventory: Inventory,
        job: str | None = None,
        *,
        attach: str | None = None,
        follow: bool = False,
        live_only: bool = False,
        read_only: bool = False,
        plan: LaunchPlan | None = None,
        note_left_out: Callable[[str, str], object] = lambda _name, _reason: None,
    ) -> None:
        self.inventory = inventory
        self.plan = plan
        """The launch, if this supervisor launches the job."""
        self.job = plan.spec.job if plan is not None else job or ""
        """Empty until a job has been chosen."""
        self.spec: JobSpec | None = plan.spec if plan is not None else None
        """Set if this supervisor launched the job."""
        self.authorities: dict[str, str] = {}
        """The authorities that nodes should trust, as far as this session knows: PEM text by fingerprint."""
        self.attach = attach
        """"watch", "control" (also heals the job), or None (not recorded in the journal)."""
        self.follows = follow or attach is not None
        """`status`, `events` and `incidents` are kept up to date."""
        self.read_only, self.live_only = read_only or inventory.made_s is not None, live_only
        self.operator = operator_name()
        self.agent = AgentFile.build()
        self.launching = plan is not None
        """True until all nodes of a launch have been assigned, or the launch has failed."""
        self.links: dict[str, HostLink] = self._make_links()
        self._doors = Doors(self.links)
        self.status: Status = {}
        """The newest status document, or {}."""
        self.events: list[JournalEvent] = []
        """The journal from its first event, in order of `seq`, without gaps."""
        self.incidents: list[IncidentDocument] = []
        """All incidents, oldest first, each as it stands after the last event."""
        self.notices: list[Notice] = []
        """What this supervisor itself did or noticed."""
        self.failure: SupervisorError | None = None
        """Why the launch failed, or why the job cannot be found."""
        self.late: set[str] = set()
        """Hosts that are still coming up although the job has started."""
        self._left_out: set[str] = set()
        # This is called when a host that had answered first fails to answer, with its name and the reason.
        self._note_left_out = note_left_out
        self.ended = False
        """True once the job is over and `events` has its last event."""
        self.job_known = asyncio.Event()
        self._status_at = 0.0
        self._changed: asyncio.Event = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def _make_links(self) -> dict[str, HostLink]:
        hosts, plan = self.inventory.hosts, self.plan
        if plan is None:
            return {host.name: HostLink(host, self, direct=len(hosts) <= LARGE) for host in hosts}
        wanted = frozenset(plan.hosts)
        return {host.name: HostLink(host, self, active=host.name in wanted, held=host.name in wanted) for host in hosts}

    # --- life

    def begin(self) -> None:
        """Start connecting."""
        if self.job:
            self.job_known.set()
        self._doors.look()
        for name, link in self.links.items():
            self.own(link.keep(), f"link {name}")

    async def close(self) -> None:
        """End all links and all tasks."""
        await cancel_all(self._tasks)
        self._tasks.clear()

    def own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a task until it ends or `close` cancels it; an error in it becomes a notice and the failure."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def own_late(self, admissions: Mapping[str, Coroutine[Any, Any, None]]) -> None:
        """Run tasks that admit hosts to a job that started without them; a host is in `late` until its task ends."""
        self.late.update(admissions)
        for name, work in admissions.items():
            self.own(self._admit(name, work), f"admit {name}")

    async def _admit(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            self.late.discard(name)
            self.touch()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("task %s failed", task.get_name(), exc_info=error)
        text = f"internal error in {task.get_name()}: {error!r}"
        self.failure = self.failure or SupervisorError(text)
        self.notice(text, "error")

    # --- waiting

    async def wait_change(self, timeout_s: float, since: int | None = None) -> int:
        """Wait until `version` has grown (beyond `since`), at most `timeout_s`; returns the version."""
        if since is None or self.version <= since:
            await wait_event(self._changed, timeout_s)
        return self.version

    async def wait_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `done` returns True, at most `timeout_s`."""
        clock = questions().clock
        end = clock() + timeout_s
        while not done() and clock() < end:
            await self.wait_change(0.1)

    async def settle(self, nodes: Iterable[str] | None = None, timeout_s: float = FIRST_ANSWER) -> list[HostView]:
        """Wait until no host (or none of `nodes`) is awaited any more, at most `timeout_s`; returns the absent ones."""
        wanted = self.links if nodes is None else set(nodes)
        links = [link for name, link in self.links.items() if link.active and name in wanted]
        await self.wait_until(lambda: not any(link.is_awaited for link in links), timeout_s)
        return [link.view for link in links if not link.can_be_asked and not link.missing]

    @property
    def spared(self) -> list[HostLink]:
        """The hosts of the job that are not connected to, because others are asked about them."""
        return [link for link in self.links.values() if link.active and not link.direct]

    async def reach(self, nodes: Iterable[str] | None = None) -> None:
        """Connect to spared hosts (or to those of them), and wait for these as `settle` does."""
        wanted = self.links if nodes is None else set(nodes)
        links = [link for link in self.spared if link.view.name in wanted]
        for link in links:
            link.connect()
        if links:
            await self.settle([link.view.name for link in links])

    def way_to(self, name: str) -> tuple[HostLink, str] | None:
        return None if self.launching else self._doors.way_to(name)

    async def until_current(self) -> None:
        """Wait until the status and the journal so far are known, at most CURRENT_DEADLINE."""
        await self.wait_until(self._is_current, CURRENT_DEADLINE)

    def _is_current(self) -> bool:
        known = int(self.events[-1]["seq"]) if self.events else 0
        # After the end the journal still records operators who attach and detach.
        over = self.launching or self.ended
        return over or (bool(self.status) and known >= int(self.status.get("last_seq", 0)))

    # --- state

    @property
    def hosts(self) -> dict[str, HostView]:
        """The hosts that belong to the job as far as is known, in inventory order."""
        return {name: link.view for name, link in self.links.items() if link.active}

    @property
    def made_s(self) -> float | None:
        """Unix time when the bundle that stands for the hosts was made; None: hosts."""
        return self.inventory.made_s

    @property
    def status_age_s(self) -> float:
        """Seconds since the newest status document arrived; infinite before the first."""
        return _now() - self._status_at if self._status_at else float("inf")

    @property
    def state(self) -> str:
        """The job's state in the newest status document, "" before the first."""
        return str(self.status.get("state", ""))

    @property
    def is_over(self) -> bool:
        """True once the job has ended, also before all of its journal has been read."""
        return self.ended or self.state in ENDED_STATES

    def opened_links(self, live: bool | None = None) -> list[HostLink]:
        """Return the links on which the job answers, best first (see HostLink.rank_as_source)."""
        links = [link for link in self.links.values() if link.opened and live in (None, link.view.live)]
        return sorted(links, key=lambda link: link.rank_as_source(), reverse=True)

    def touch(self) -> None:
        """Report a change: `version` grows, and `wait_change` returns."""
        self.version += 1
        if not self.launching:
            self._doors.look()
        self._changed.set()
        self._changed = asyncio.Event()

    def notice(self, text: str, level: str = "info", node: str | None = None) -> None:
        """Show the operator something that is not in the journal."""
        self.notices.append(Notice(time.time_ns(), text, level, node))
        self.touch()

    def leave_out(self, name: str, reason: str) -> None:
        """Note once that what a host has is missing from now on, or that it refuses what others answer, and why."""
        if name not in self._left_out:
            self._note_left_out(name, reason)
        self._left_out.add(name)

    def note_srun(self, reason: str) -> None:
        """Show once that srun is used instead of SSH: usually no node of an allocation accepts SSH."""
        if all(link.host.via != "srun" for link in self.links.values()):
            self.notice(f"srun is used instead of SSH: {reason}")

    def set_job(self, name: str) -> None:
        """Set the job that was chosen because none was named."""
        self.job = name
        self.job_known.set()
        self.touch()

    def set_spec(self, spec: JobSpec) -> None:
        """Set the job's description."""
        self.spec = spec

    def trust(self, authorities: Mapping[str, str]) -> None:
        """Note authorities that the nodes should trust, as PEM text by fingerprint."""
        self.authorities.update(authorities)

    def set_failure(self, error: SupervisorError) -> None:
        """Set why the job cannot be launched or found."""
        self.failure = error
        self.touch()

    def set_status(self, status: Status) -> None:
        """Set the status document, and connect to hosts that have joined the job."""
        if any(status.get(key) != self.status.get(key) for key in ("state", "world_size")):
            known.note(self.inventory, [status])
        self.status = status
        self._status_at = _now()
        self._doors.note(status)
        self.activate(node["name"] for node in status.get("nodes", ()) if node.get("state") != "removed")
        self.touch()

    def confirm_status(self) -> None:
        """Note that the status document is still current: its agent answers and has no newer one."""
        self._status_at = _now()

    def add_event(self, event: JournalEvent) -> bool:
        """Add the next event of the journal, unless it is already there; incidents change with it.

        Another event with a number that is already there replaces that one and those after it: the agents that had
        them are gone, and the job continues without. Returns False, and adds nothing, if events before it are missing.
        """
        at = int(event["seq"]) - 1
        if not 0 <= at <= len(self.events):
            return False
        if at < len(self.events):
            if self.events[at] == event:
                return True
            self.events = self.events[:at]
            self.incidents = incidents_in(self.events)
        self.events.append(event)
        self.incidents = incidents_after(self.incidents, event)
        self.touch()
        return True

    def set_ended(self) -> None:
        """Note that the job is over and the journal is complete."""
        self.ended = True
        self.touch()

    def ask_user(self) -> int:
        """Ask the user now what ssh asks for hosts that cannot be connected without; returns how many there are."""
        waiting = [link for link in self.links.values() if link.view.asks]
        for link in waiting:
            link.ask_user()
        return len(waiting)

    def activate(self, names: Iterable[str]) -> None:
        """Connect to further hosts of the inventory."""
        for name in names:
            link = self.links.get(name)
            if link is not None:
                link.activate()

    # --- requests to agents

    async def call(self, op: str, args: Args | None = None, timeout_s: float = 30.0) -> Any:
        """Send a request that changes nothing to the best agent, or to the next one when a link breaks.

        Raises Unreachable, RequestFailed.
        """
        if op == "status":
            # It may be larger than a frame. An agent that does not know of pieces answers with the whole.
            parts = await self.stream(op, {"pieces": True})
            return joined(parts) if "status" in parts[0] else parts[0]
        return (await self.ask_best(lambda link: link.call(op, args, timeout_s=timeout_s))).data

    async def stream(self, op: str, args: Args | None = None) -> list[Any]:
        """Return all items of a stream from the best agent; raises Unreachable, RequestFailed."""

        async def collect(link: HostLink) -> list[Any]:
            async with aclosing(link.whole_stream(op, args, timeout_s=RECORD_DEADLINE)) as answers:
                return [answer.data async for answer in answers]

        return await self.ask_best(collect)

    async def journal(self) -> list[JournalEvent]:
        """Return all events as the best agent has them; raises Unreachable, RequestFailed."""
        return [item["event"] for item in await self.stream("events")]

    async def ask_best(self, ask: Callable[[HostLink], Awaitable[T]], live: bool | None = None) -> T:
        """Ask the best agent, or the next one when a link breaks; raises Unreachable, RequestFailed."""
        last = "no agent is alive there" if live else ""
        asked: set[str] = set()
        while True:
            links = [link for link in self.opened_links(live) if link.view.name not in asked]
            if not links and asked and any(link.is_awaited for link in self.links.values()):
                # Those that were first have failed: another one may still be connecting.
                await self.settle()
                continue
            if not links:
                raise self.unreachable(last)
            link = links[0]
            asked.add(link.view.name)
            try:
                return await ask(link)
            except CallFailed as refused:
                raise RequestFailed(refused.message, refused.hint, refused.kind) from refused
            except (WireError, asyncio.TimeoutError) as broken:
                last = f"{link.view.name}: {why(broken)}"
                # Hosts that fell silent together are found together, while the next one is asked.
                for other in links[1:]:
                    other.check()

    async def identities(self) -> dict[str, Identity]:
        """Ask every live agent in reach for its identity; returns the answers by host, in inventory order."""
        links = [link for link in self.links.values() if link.opened and link.view.live]

        async def ask(link: HostLink) -> Identity | None:
            answer: Identity | None = await link.try_call("identity", timeout_s=IDENTITY_DEADLINE)
            link.learn(answer or {})
            return answer

        answers = await asyncio.gather(*(ask(link) for link in links))
        return {link.view.name: answer for link, answer in zip(links, answers, strict=True) if answer is not None}

    def unreachable(self, last: str = "", hint: str = "") -> Unreachable:
        """Return the error that names every host and why it does not answer."""
        views = self.hosts.values()
        lines = [str(HostFailure(view.name, view.step, view.error, view.hint)) for view in views if view.error]
        lines += [last] if last else []
        what = f"job {self.job}" if self.job else "any job"
        return Unreachable("\n".join([*lines, f"cannot reach {what}"]), hint)


def _now() -> float:
    """Return seconds of a clock that counts while this machine sleeps: what was current before it is old then."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
