"""What a session knows, as plain state that screens and printers read.

In: nothing; the session's tasks write these objects. Out: one view per host, notices for the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# A job in one of these states never changes again.
ENDED_STATES = frozenset({"succeeded", "failed", "stopped"})
ENDED_EVENTS = frozenset({"job_succeeded", "job_failed", "job_stopped"})


@dataclass
class HostView:
    """One host as the operator sees it from here: the link to it, not the node's state in the job."""

    name: str
    state: str = "connecting"
    """connecting (first time, or being launched), up, lost (was up; we try again), failed (never came up)."""
    step: str = ""
    """What is being done: resolve, connect, auth, push, sync, start, agent, engine, ready; or what failed."""
    text: str = ""
    """One line for people about that step."""
    error: str | None = None
    """Why the last step failed, without the host's name."""
    hint: str = ""
    """What the operator can do about `error`."""
    live: bool | None = None
    """True: an agent answers; False: only files are left; None: unknown, or this job never was there."""
    identity: dict[str, Any] = field(default_factory=dict)
    """The agent's last answer to `identity`."""
    hello: dict[str, Any] = field(default_factory=dict)
    """The host's answer to `hello`: python, cpu_count, disk_free …, and `clock_offset_ms` with `clock_error_ms`."""
    engine: dict[str, Any] = field(default_factory=dict)
    """What torch there says of itself, where this session brought the host up."""
    script: str | None = None
    """A hash of the script there, where this session brought the host up and nothing is synced."""


@dataclass(frozen=True)
class Notice:
    """Something that this supervisor did or saw, beside the job's journal."""

    time_ns: int
    text: str
    level: str = "info"
    """info, warning or error."""
    node: str | None = None


def local_rank_of(events: Sequence[dict[str, Any]], generation: int, rank: int) -> int | None:
    """Return the local rank that a rank had in a generation, None where the journal does not tell (yet)."""
    for event in reversed(events):
        if event["type"] == "ranks_assigned" and event["generation"] == generation:
            found = [local for number, local, _ in event["detail"]["ranks"] if number == rank]
            if found:
                return int(found[0])
        if event["type"] == "generation_started" and event["generation"] == generation:
            for member in event["detail"]["members"]:
                if 0 <= rank - member["base_rank"] < member["nproc"]:
                    return int(rank - member["base_rank"])
    return None
