"""What the screens use of a session: this package uses nothing else of it.

In: `supervisor.session.Session`; for the home screen `supervisor.cli.home`. Out: protocols.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from remote_agent.wire import Answer, Args
    from remote_agent.wire.answers import JobRow, JobStacks
    from remote_agent.wire.documents import EditedTree, IncidentDocument, JournalEvent, RequestReply, Status
    from supervisor.history import Series, SeriesQuery
    from supervisor.logs.merge import Page
    from supervisor.logs.rows import Clocks
    from supervisor.nccl import Fabric
    from supervisor.tui.terminal import Lent as Terminal


class HostConnection(Protocol):
    """The connection to one host, and the step that runs there."""

    @property
    def name(self) -> str:
        """Its name in the inventory."""

    @property
    def state(self) -> str:
        """connecting, up, lost or failed."""

    @property
    def step(self) -> str:
        """The present step, or the one that failed."""

    @property
    def text(self) -> str:
        """One line about that step."""

    @property
    def error(self) -> str | None:
        """Why the last step failed."""

    @property
    def hint(self) -> str:
        """What the operator can do about it."""

    @property
    def asks(self) -> bool:
        """ssh asks something to which there is no answer yet."""

    @property
    def began(self) -> Mapping[str, float]:
        """The time when each step began, by time.monotonic()."""


class Forward(Protocol):
    """A port of this machine that leads to a port of a node."""

    @property
    def node(self) -> str:
        """The node."""

    @property
    def port(self) -> int:
        """The node's port."""

    @property
    def local(self) -> int:
        """This machine's port."""

    @property
    def url(self) -> str:
        """The address for a browser on this machine."""

    @property
    def is_answered(self) -> bool:
        """Whether a program listened on the node's port when the forward began."""

    async def close(self) -> None:
        """End it."""


class SessionSource(Protocol):
    """One job."""

    @property
    def job(self) -> str:
        """The id of the job."""

    @property
    def hosts(self) -> Mapping[str, HostConnection]:
        """Hosts by name, in inventory order."""

    @property
    def status(self) -> Status:
        """The newest status document, or {}; a new object whenever it changed."""

    @property
    def status_age_s(self) -> float:
        """Seconds since the newest status came; infinite before the first."""

    @property
    def events(self) -> Sequence[JournalEvent]:
        """The journal so far, in order; an agent of another version may have written it."""

    @property
    def incidents(self) -> list[IncidentDocument]:
        """The incidents so far, in order."""

    @property
    def notices(self) -> Sequence[Any]:
        """Notices of this supervisor: `text`, `level`."""

    @property
    def made_s(self) -> float | None:
        """Unix time when the bundle that is shown was made; None: a job on its hosts."""

    @property
    def version(self) -> int:
        """Grows with every change of the properties above."""

    @property
    def ended(self) -> bool:
        """Whether the job is over."""

    async def request(self, verb: str, **args: Any) -> RequestReply:
        """Request restart, remove, add, stop or promote; raises SupervisorError with a hint if it is refused."""

    async def edited(self) -> EditedTree:
        """Return the local edits of the work tree as `change`, and the `tree` from which the group runs."""

    async def shell(
        self,
        terminal: Terminal,
        node: str,
        rank: int | None,
        line: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Run a shell, or a command line with these variables, on a node where a rank runs, until it ends.

        It has the operator's terminal. Raises as `request`.
        """

    @property
    def forwards(self) -> Sequence[Forward]:
        """The open forwards."""

    async def forward(self, node: str, port: int, local: int | None) -> Forward:
        """Forward a port to a node's; None: one of the same number, otherwise any free one. Raises as `request`."""

    async def stacks(self, ranks: list[int] | None) -> JobStacks:
        """Return the Python stacks of these ranks, or of all, and the reasons for missing ones; raises as `request`."""

    def ask_user(self) -> int:
        """Ask the user now what ssh asks for lost hosts; returns how many hosts wait for an answer."""

    @property
    def launching(self) -> bool:
        """Whether nodes are still being brought up for a new job."""

    @property
    def failure(self) -> Exception | None:
        """Why the launch failed, or why the job cannot be shown: `message`, `hint`, `exit_status`."""

    async def cancel_launch(self) -> None:
        """Cancel a launch, and stop what was started before returning."""

    async def nccl(self) -> Fabric:
        """Return the transports between nodes from NCCL's output; empty without output."""

    async def series(self, wanted: SeriesQuery) -> Series:
        """Return what ranks, nodes and GPUs did (see history.py)."""

    async def log(self, node: str, op: str, args: Args) -> Answer:
        """Send a log request to the agent of a node."""

    def ahead_ns(self, node: str) -> int:
        """Return how far the times of a node's log_window are ahead of those of `merged` and `search`."""

    async def merged(
        self,
        selection: Any,
        count: int,
        *,
        before_ns: int | None = None,
        after_ns: int | None = None,
        clocks: Clocks | None = None,
    ) -> Page:
        """Return the last `count` rows of all nodes before a time, or the first ones from a time on."""

    def search(self, selection: Any, **query: Any) -> AsyncGenerator[Any, None]:
        """Yield the matching rows."""


class HomeJob(NamedTuple):
    """One job of those that this machine knows of."""

    words: str
    """The inventory as on a command line; "" for this machine only."""
    place: str
    """The inventory in short."""
    listed: JobRow
    """The job as its hosts list it."""
    status: Status
    """Its status document, {} before it has come."""
    incident: IncidentDocument | None
    """Its newest incident."""


class HomeSource(Protocol):
    """The jobs of all inventories that this machine knows of."""

    @property
    def jobs(self) -> Sequence[HomeJob]:
        """What is known by now, live jobs first, then the newest."""

    @property
    def troubles(self) -> Sequence[str]:
        """Hosts and inventories that cannot be read, and why."""

    @property
    def asked(self) -> tuple[int, int]:
        """How many hosts have answered or failed, and how many there are."""

    @property
    def version(self) -> int:
        """Grows with every change of the properties above."""

    async def run(self) -> None:
        """Keep them up to date until cancelled."""


SessionContext = AbstractAsyncContextManager[SessionSource]
