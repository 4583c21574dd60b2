"""Plain state of a hub that screens and printers read.

In: what links and tasks set. Out: one view per host, notices for the operator; the plan of a launch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from remote_agent.wire.events import EventType
from supervisor.ssh.answers import EngineFacts, Hello, Identity

if TYPE_CHECKING:
    from remote_agent.wire import JobSpec
    from remote_agent.wire.documents import JournalEvent


@dataclass
class HostView:
    """The state of the link to one host, as opposed to the node's state in the job."""

    name: str
    state: str = "connecting"
    """connecting (for the first time, or for a launch), up, lost (was up, is retried), failed (was never up)."""
    step: str = ""
    """The step that runs or failed: resolve, connect, auth, push, sync, start, agent, build, image, engine, ready …"""
    text: str = ""
    """One line about that step."""
    error: str | None = None
    """Why the last step failed, without the host's name."""
    hint: str = ""
    """How to correct `error`."""
    through: str = ""
    """The host through which this one is asked because it has no connection of its own; `state` is up then."""
    asks: bool = False
    """ssh asks something to which there is no answer yet, or no right one."""
    live: bool | None = None
    """True: an agent answers; False: only files answer; None: unknown, or the job was never there."""
    identity: Identity = field(default_factory=Identity)
    """The agent's last answer to `identity`."""
    hello: Hello = field(default_factory=Hello)
    """The host's answer to `hello`: python, cpu_count, disk_free …, and `clock_offset_ms` with `clock_error_ms`."""
    engine: EngineFacts = field(default_factory=EngineFacts)
    """Facts of the engine, if this supervisor brought the host up."""
    script: str | None = None
    """The hash of the script on the host, if this supervisor brought the host up without syncing."""
    began: dict[str, float] = field(default_factory=dict)
    """By step: when it began, by time.monotonic()."""

    def enter(self, step: str, text: str) -> None:
        """Note which step runs now, or has failed."""
        if step != self.step:
            self.began[step] = time.monotonic()
        self.step, self.text = step, text


@dataclass(frozen=True)
class Notice:
    """Something that this supervisor did or noticed, which is not in the journal."""

    time_ns: int
    text: str
    level: str = "info"
    """info, warning or error."""
    node: str | None = None


@dataclass(frozen=True)
class LaunchPlan:
    """The launch of a job."""

    spec: JobSpec
    hosts: tuple[str, ...]
    """The hosts to bring up, in inventory order."""
    shares_tree: bool = False
    """Another job may run from the same work tree."""


def local_rank_of(events: Sequence[JournalEvent], generation: int, rank: int) -> int | None:
    """Return the local rank of a rank in a generation, None if the journal does not have it (yet)."""
    for event in reversed(events):
        if event["type"] == EventType.RANKS_ASSIGNED and event["generation"] == generation:
            matches = [local for number, local, _ in event["detail"]["ranks"] if number == rank]
            if matches:
                return int(matches[0])
        if event["type"] == EventType.GENERATION_STARTED and event["generation"] == generation:
            for member in event["detail"]["members"]:
                if 0 <= rank - member["base_rank"] < member["nproc"]:
                    return int(rank - member["base_rank"])
    return None
