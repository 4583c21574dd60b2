"""What the home screen uses of the command line, which is below this package.

In: `supervisor.cli.home`. Out: a protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remote_agent.wire.answers import JobRow
    from remote_agent.wire.documents import IncidentDocument, Status


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
