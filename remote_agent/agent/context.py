"""What all parts of one agent share.

In: the job's directory. Out: a frozen `Context`, and the agent's `Life`, which ends once for all parts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from typing import TYPE_CHECKING

from remote_agent.base.tasks import within

if TYPE_CHECKING:
    from remote_agent.agent.snapshot_keeper import SnapshotKeeper
    from remote_agent.agent.tree_requests import JobTree
    from remote_agent.base.paths import JobFiles
    from remote_agent.coordinator.journal import Journal
    from remote_agent.coordinator.replay import Fold
    from remote_agent.election.ballot import Ballot
    from remote_agent.election.peers import Peers
    from remote_agent.history.keeper import HistoryKeeper
    from remote_agent.logs import LogStore
    from remote_agent.runtime.runtime import Runtime
    from remote_agent.vitals.host import Vitals
    from remote_agent.wire import Channel, JobSpec

log = logging.getLogger(__name__)


class Life:
    """How long an agent lives, and who is connected to it as an operator."""

    def __init__(self) -> None:
        self.reason = ""
        """Why it ends."""
        self.operators: set[Channel] = set()
        self.was_attended = False
        """Whether any operator has been connected."""
        self.finished = asyncio.Event()
        self.at_once = asyncio.Event()
        """Set when the end must not wait for anybody."""
        self._changed = asyncio.Event()
        self._is_wanted = True
        """Whether operators may hold the agent of a job that is over."""

    def leave_operators(self) -> None:
        """Let no operator hold the agent any longer: they read the job's files instead."""
        self._is_wanted = False
        self._changed.set()

    def finish(self, reason: str, *, linger: bool = True) -> None:
        """End the agent; `linger`: not before operators have read the end."""
        if not linger:
            self.at_once.set()
            self._changed.set()
        if not self.finished.is_set():
            log.info("ending: %s", reason)
            self.reason = reason
            self.finished.set()

    def attach(self, channel: Channel) -> None:
        """Note an operator's connection."""
        self.operators.add(channel)
        self.was_attended = True
        self._changed.set()

    def detach(self, channel: Channel) -> None:
        """Forget an operator's connection."""
        self.operators.discard(channel)
        self._changed.set()

    async def until_unwatched(self, seconds: float) -> None:
        """Return once no operator has been connected for that long, or at once where nothing may wait for them."""
        quiet_since = time.monotonic()
        while self._is_wanted and not self.at_once.is_set() and time.monotonic() - quiet_since < seconds:
            self._changed.clear()
            await within(self._changed, seconds)
            if self.operators:
                quiet_since = time.monotonic()


@dataclasses.dataclass(frozen=True)
class Context:
    """What all parts of one agent share: the fields are fixed, but the objects in them may change."""

    files: JobFiles
    spec: JobSpec
    node: str
    life: Life
    journal: Journal
    fold: Fold
    """What the journal shows."""
    logs: LogStore
    history: HistoryKeeper
    tree: JobTree
    runtime: Runtime
    """Where the ranks run."""
    vitals: Vitals
    peers: Peers
    ballot: Ballot
    snapshots: SnapshotKeeper

    @property
    def address(self) -> str:
        """What the other nodes connect to."""
        own = self.spec.node(self.node)
        return own.address if own is not None else ""

    @property
    def workdir(self) -> str:
        """The directory in which the workers and the hooks run on this node."""
        return working_directory(self.files, self.spec)


def working_directory(files: JobFiles, spec: JobSpec) -> str:
    """Return where the workers of a job run on this node."""
    base = str(files.home.trees / spec.tree) if spec.tree else "/"
    return os.path.normpath(os.path.join(base, spec.workdir))
