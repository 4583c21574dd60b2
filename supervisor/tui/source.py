"""All that the screens take from a session: nothing else may be used in this package.

In: `supervisor.session.Session`, or a recorded one. Out: the types that the screens are written against.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from remote_agent.wire import Answer
    from supervisor.session.fabric import Fabric
    from supervisor.session.logs import Clocks, Page

Json = dict[str, Any]


class Host(Protocol):
    """How far one host has come, seen from here."""

    @property
    def name(self) -> str:
        """Its name in the inventory."""

    @property
    def state(self) -> str:
        """connecting, up, lost or failed."""

    @property
    def step(self) -> str:
        """The step that runs, or that failed."""

    @property
    def text(self) -> str:
        """One line on that step."""

    @property
    def error(self) -> str | None:
        """Why the last step failed."""

    @property
    def hint(self) -> str:
        """What the operator can do about it."""


class Source(Protocol):
    """One job seen from here."""

    @property
    def job(self) -> str:
        """The id of the job."""

    @property
    def hosts(self) -> Mapping[str, Host]:
        """Hosts by name, in inventory order."""

    @property
    def status(self) -> Json:
        """The newest status document, or {}; a new object whenever it changed."""

    @property
    def status_age_s(self) -> float:
        """Seconds since the newest status came; infinite before the first."""

    @property
    def events(self) -> list[Json]:
        """The journal so far, in order."""

    @property
    def incidents(self) -> list[Json]:
        """The incidents so far, in order."""

    @property
    def notices(self) -> Sequence[Any]:
        """What this supervisor did or saw itself: `text`, `level`."""

    @property
    def version(self) -> int:
        """Grows with every change of what stands above."""

    @property
    def ended(self) -> bool:
        """The job is over."""

    async def request(self, verb: str, **args: Any) -> Json:
        """Ask for restart, remove, add, stop or promote; raises with a message (and hint) when it is refused."""

    async def edited(self) -> Json:
        """What is edited in the work tree here, as `change`, and the `tree` that the group runs from."""

    async def stacks(self, ranks: list[int] | None) -> Json:
        """Python stacks of these ranks, or of all, by rank, and why there is none of others; raises as `request`."""

    @property
    def launching(self) -> bool:
        """Nodes are still being brought up for a new job."""

    @property
    def failure(self) -> Exception | None:
        """Why the launch failed, or why there is no job to look at: `message`, `hint`, `exit_status`."""

    async def cancel_launch(self) -> None:
        """Give up a launch: what has been started is stopped again before this returns."""

    async def nccl(self) -> Fabric:
        """How the nodes reach each other as NCCL told it there; empty where it told nothing."""

    async def log(self, node: str, op: str, args: Json) -> Answer:
        """One log request to the agent of a node."""

    def ahead_ns(self, node: str) -> int:
        """By how much the times of a node's log_window are ahead of those of `merged` and `search`."""

    async def merged(
        self,
        selection: Any,
        count: int,
        *,
        before_ns: int | None = None,
        after_ns: int | None = None,
        counted: tuple[int, int] | None = None,
        clocks: Clocks | None = None,
    ) -> Page:
        """The last `count` rows of all nodes by time of arrival before a time, or the first ones from a time on."""

    def search(self, selection: Any, **query: Any) -> AsyncGenerator[Any, None]:
        """The rows that match."""


SessionContext = AbstractAsyncContextManager[Source]
