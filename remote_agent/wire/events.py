"""Journal events: their types and plain words, the phases of a start, why a group stops, what a job is doing.

In: nothing. Out: `EventType`, `JournalEvent`, `label`, `PHASES`, `StopCause`, `Condition`, `RankState`, `NodeState`,
the ended states. The texts with an event's details are in supervisor/wording/events.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Word(str, Enum):
    """A word of the wire."""

    def __str__(self) -> str:
        """Return the value: the same text under every version of Python."""
        return str(self.value)


class EventType(Word):
    """The type of a journal event, exactly as on the wire and in `events --json`."""

    JOB_STARTED = "job_started"
    JOB_DEGRADED = "job_degraded"
    JOB_SUCCEEDED = "job_succeeded"
    JOB_FAILED = "job_failed"
    JOB_STOPPED = "job_stopped"
    NODE_JOINED = "node_joined"
    NODE_READY = "node_ready"
    NODE_ADDED = "node_added"
    NODE_LOST = "node_lost"
    NODE_FAILED = "node_failed"
    NODE_REMOVED = "node_removed"
    NODE_CORDONED = "node_cordoned"
    NODE_UNCORDONED = "node_uncordoned"
    AGENT_LOST = "agent_lost"
    COORDINATOR_CHANGED = "coordinator_changed"
    COORDINATOR_PAUSED = "coordinator_paused"
    QUORUM_LOST = "quorum_lost"
    GENERATION_PROPOSED = "generation_proposed"
    GENERATION_STARTED = "generation_started"
    RANKS_ASSIGNED = "ranks_assigned"
    GENERATION_RUNNING = "generation_running"
    PROCESS_GROUP_UP = "process_group_up"
    FIRST_STEP = "first_step"
    GENERATION_STOPPED = "generation_stopped"
    RANK_FAILED = "rank_failed"
    INCIDENT = "incident"
    INCIDENT_HEALED = "incident_healed"
    HANG_OVER = "hang_over"
    WARNING = "warning"
    SLOW = "slow"
    SLOW_OVER = "slow_over"
    RESTART_REQUESTED = "restart_requested"
    REMOVE_REQUESTED = "remove_requested"
    STOP_REQUESTED = "stop_requested"
    ENVIRONMENT_SET = "environment_set"
    TREE_CHANGED = "tree_changed"
    SNAPSHOTS_CHOSEN = "snapshots_chosen"
    SIGNAL_SENT = "signal_sent"
    OPERATOR_ATTACHED = "operator_attached"
    OPERATOR_DETACHED = "operator_detached"
    HOOK_DELIVERED = "hook_delivered"
    HOOK_FAILED = "hook_failed"
    METRICS_FAILED = "metrics_failed"


# The words of these types are not just the type with spaces.
_LABELS: Mapping[str, str] = {
    EventType.HANG_OVER: "hang ended",
    EventType.SLOW_OVER: "no longer slow",
    EventType.TREE_CHANGED: "work tree changed",
}


class Condition(Word):
    """What a job is doing: finer than the `state` of the contract, and for people."""

    LAUNCHING = "launching"
    IMPORTING = "importing"
    """The ranks have started; none has printed anything or reached a collective."""
    RUNNING = "running"
    DEGRADED = "degraded"
    """The group runs with fewer nodes than wanted, or waits for nodes."""
    SLOW = "slow"
    """The others wait for one of its ranks, or something limits all of them."""
    HUNG = "hung"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    """No group follows."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class RankState(Word):
    """The state of a rank in the status document."""

    STARTING = "starting"
    RUNNING = "running"
    SILENT = "silent"
    """It runs, and has printed nothing for long."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    KILLED = "killed"
    """We stopped it."""


class NodeState(Word):
    """The state of a node in the status document."""

    CONNECTING = "connecting"
    READY = "ready"
    RUNNING = "running"
    DRAINING = "draining"
    """It leaves when a group without it has formed."""
    REMOVED = "removed"
    LOST = "lost"
    FAILED = "failed"
    SPARE = "spare"


# A rank in one of these states has a process.
LIVE_RANKS = frozenset({RankState.STARTING, RankState.RUNNING, RankState.SILENT})
# A node in one of these states is admitted to no group.
OUT_OF_GROUPS = frozenset({NodeState.REMOVED, NodeState.FAILED, NodeState.DRAINING})


class StopCause(Word):
    """Why a group is stopped: `cause` of the event generation_stopped."""

    FAILURE = "failure"
    NODE_LOST = "node_lost"
    RESTART = "restart"
    REMOVED = "removed"
    ADDED = "added"
    RETURNED = "returned"
    JOINED = "joined"
    QUORUM = "quorum"
    PAUSED = "paused"
    STOP = "stop"


# A group goes through these phases until it trains, in this order, from the cause of a restart on.
PHASES = ("detect", "stop", "rendezvous", "spawn", "main", "imports", "process_group", "first_step")
# The events whose details have phases of their generation, in milliseconds.
PHASE_EVENTS = (EventType.GENERATION_RUNNING, EventType.PROCESS_GROUP_UP, EventType.FIRST_STEP)


def phases_of(detail: Mapping[str, object]) -> dict[str, float]:
    """Return the phases that a document has, in milliseconds, in order."""
    return {name: float(ms) for name in PHASES if isinstance(ms := detail.get(name), (int, float))}


# Kinds of warnings about a node's network: supervisor has set the workers' interface; other nodes cannot reach them.
INTERFACE, HOST_NAME = "interface", "host_name"

# The reason for the loss of a node whose host answers.
AGENT_DIED = "its agent died"

# Kinds of warnings about snapshots: ranks write one that the job does not name; one is not kept, or is left out.
SNAPSHOT_UNNAMED, SNAPSHOT_NOT_KEPT, SNAPSHOT_LEFT_OUT = "snapshot_unnamed", "snapshot_not_kept", "snapshot_left_out"
SNAPSHOT_NOTICES = frozenset({SNAPSHOT_UNNAMED, SNAPSHOT_NOT_KEPT, SNAPSHOT_LEFT_OUT})

# A job in one of these states never changes again.
ENDED_STATES = frozenset({"succeeded", "failed", "stopped"})
ENDED_EVENTS = frozenset({EventType.JOB_SUCCEEDED, EventType.JOB_FAILED, EventType.JOB_STOPPED})


def label(kind: object) -> str:
    """Return the plain words of an event type; of an unknown type its name with spaces."""
    return _LABELS.get(str(kind)) or str(kind).replace("_", " ")
