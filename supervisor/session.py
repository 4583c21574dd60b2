"""One job as the operator uses it: the hub and all that works on it. Screens, printers and bundles use this class.

In: an inventory, a job's name (or none: it is chosen) or the plan of a launch.
Out: the state of the hub, kept up to date; requests to the job; its logs.

Use: `async with Session(inventory, job, attach="control") as session: await session.ready()`. Without a name, it is the
one live job or the newest; with `live_only`, exactly one job must be live. `follow`: keep the state up to date without
attaching. `plan`: launch that job; `ready` raises if the launch fails.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Collection
from typing import TYPE_CHECKING, Any

from remote_agent.wire.events import EventType
from supervisor import history, known
from supervisor.control import heal, promotion, requests
from supervisor.errors import LaunchFailed, SupervisorError
from supervisor.link import jobs
from supervisor.link.hub import Hub
from supervisor.link.updates import Updates
from supervisor.logs import pages
from supervisor.logs.pages import PATIENCE, Page
from supervisor.logs.reader import Chunk, LogReader, follow
from supervisor.nccl import NcclReader, to_fabric

if TYPE_CHECKING:
    from types import TracebackType

    from remote_agent.wire.answers import JobStacks, JobWindows
    from remote_agent.wire.documents import EditedTree, NcclNode, RequestReply, Status
    from supervisor.history import Series, SeriesQuery
    from supervisor.link.view import LaunchPlan
    from supervisor.logs.rows import Clocks, LineKey
    from supervisor.logs.selection import LogQuery, Selection
    from supervisor.nccl import Fabric
    from supervisor.ssh.forward import Forward
    from supervisor.ssh.wires import Terminal

# Undoing a launch has deadlines of its own, which end before this one, seconds.
CANCEL_LAUNCH = 60.0


class Session(Hub):
    """One job: connected to, followed, and changed. Begin it with `async with`."""

    _launch_task: asyncio.Task[None] | None = None

    @functools.cached_property
    def _forwards(self) -> list[Forward]:
        return []

    @property
    def forwards(self) -> list[Forward]:
        """The forwarded ports that are open."""
        return [forward for forward in self._forwards if forward.is_open]

    @functools.cached_property
    def _nccl(self) -> NcclReader:
        return NcclReader(self)

    # --- life

    async def __aenter__(self) -> Session:
        self.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def begin(self) -> None:
        """Start connecting, and launching if there is a plan; a second call does nothing."""
        if self._tasks:
            return
        super().begin()
        if not self.job:
            self.own(jobs.choose(self), "choose job")
        elif self.plan is not None:
            self._launch_task = self.own(self._launch(self.plan), "launch")
        else:
            self.own(jobs.seek(self), "seek job")
        if self.follows:
            self.own(Updates(self).run(), "updates")
            if self.made_s is None:
                self.own(heal.Healer(self).run(), "heal")

    async def close(self) -> None:
        """Detach: end all links. The job is unaffected; a launch in progress is undone."""
        # After a short session the newest status may be older than the group.
        group = next((event for event in reversed(self.events) if event["type"] == EventType.GENERATION_RUNNING), None)
        if group is not None:
            known.note(self.inventory, [{"job": self.job, "world_size": group["detail"].get("world_size")}])
        await self.cancel_launch()
        for forward in self.forwards:
            await forward.close()
        await super().close()

    async def ready(self) -> None:
        """Wait until the job is launched, or its best agent is connected; raises SupervisorError."""
        while self.failure is None and (self.launching or not jobs.is_reached(self)):
            await self.wait_change(0.1)
            if not self.launching and self.failure is None:
                self.failure = jobs.find_failure(self)
        if self.failure is not None:
            raise self.failure
        known.note(self.inventory, [{"job": self.job}])
        if self.attach is None:
            await promotion.promote_if_orphaned(self)

    async def cancel_launch(self) -> None:
        """Give up a launch in progress; returns once everything that was started has been stopped."""
        if self._launch_task is not None and not self._launch_task.done():
            # The task is cancelled only once: the clean-up that follows must not be cancelled as well.
            self._launch_task.cancel()
            await asyncio.wait([self._launch_task], timeout=CANCEL_LAUNCH)

    async def _launch(self, plan: LaunchPlan) -> None:
        from supervisor.launch.launch import Launch  # few commands need it

        try:
            await Launch(plan).run(self)
        except SupervisorError as error:
            self.failure = error
        except asyncio.CancelledError:
            self.failure = self.failure or LaunchFailed("the launch was interrupted")
            raise
        finally:
            self.launching = False
            self.touch()

    # --- requests

    async def request(self, verb: str, **args: Any) -> RequestReply:
        """Change the job: restart, remove, add, stop, promote … (see actions.py); returns the reply.

        Raises RequestFailed (refused, with the reason), Unreachable. The outcome comes as events.
        """
        return await requests.request(self, verb, args)

    async def edited(self, *, to_restart: bool = False) -> EditedTree:
        """Return what has been edited in the work tree here, and which tree the group runs from.

        `to_restart`: agents that have all died are restarted first.
        """
        return await requests.edited(self, to_restart=to_restart)

    async def shell(self, terminal: Terminal, node: str, rank: int | None) -> None:
        """Run a shell on this terminal, until it ends, where a rank of a node runs (None: its first).

        Raises RequestFailed, Unreachable, HostError.
        """
        await requests.open_shell(self, terminal, node, rank)

    async def forward(self, node: str, port: int, local: int | None) -> Forward:
        """Forward a port of this machine to a port of a node, until it or the session is closed.

        Raises RequestFailed, Unreachable, HostError.
        """
        forward = await requests.forward_port(self, node, port, local)
        self._forwards.append(forward)
        return forward

    async def stacks(self, ranks: list[int] | None) -> JobStacks:
        """Return the Python stacks of these ranks, or of all."""
        return await requests.collect_stacks(self, ranks)

    async def why(self, ranks: Collection[int] | None = None) -> JobWindows:
        """Have all ranks sampled for some 20 s; return what their time went to. Raises if none of `ranks` lives."""
        return await requests.collect_windows(self, ranks)

    async def nccl(self, status: Status | None = None) -> Fabric:
        """Return how NCCL connects the nodes; `status`: needed if the session does not follow the job."""
        status = self.status if status is None else status
        return to_fabric(await self.nccl_documents(status), status)

    async def nccl_documents(self, status: Status) -> dict[str, NcclNode | None]:
        """Return what the agent of each node has read of NCCL's output; None for a node that does not answer."""
        return await self._nccl.read(status)

    async def series(self, wanted: SeriesQuery) -> Series:
        """Return what ranks, nodes and GPUs did (see history.py); raises Unreachable."""
        return await history.read(self, wanted)

    # --- logs

    def follow(self, selection: Selection, start: str = "end", first: int | None = None) -> AsyncGenerator[Chunk, None]:
        """Yield chunks of whole lines of all nodes as they arrive (see logs.reader); needs `follow`."""
        return follow(self, selection, start, first)

    async def merged(self, selection: Selection, count: int, **bounds: Any) -> Page:
        """Return rows of all nodes by time of arrival (see logs.pages), without nodes that do not answer in time."""
        return await pages.merged(self, selection, count, patience_s=PATIENCE, **bounds)

    async def from_line(self, selection: Selection, key: LineKey, count: int) -> Page:
        """Return rows of one file around a line, by its number (see logs.pages)."""
        return await pages.from_line(self, selection, key, count)

    def rows(self, query: LogQuery, clocks: Clocks | None = None) -> LogReader:
        """Return a reader of rows that are looked for (see logs.reader), with times by these clock offsets."""
        return LogReader(self, query, clocks)
