"""The coordinator's state and its commands: plain frozen data.

In: nothing. Out: `State`, and the `Command` types that the shell carries out in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from remote_agent.diagnose.hang.stragglers import NOBODY, Stragglers
from remote_agent.snapshots.choice import NOTHING_SKIPPED, Skipped

if TYPE_CHECKING:
    from remote_agent.coordinator.quorum import Groups, Votes
    from remote_agent.diagnose.hang.loops import Loop
    from remote_agent.diagnose.hang.pulses import Pulse
    from remote_agent.diagnose.slow import Shares, Slowness
    from remote_agent.wire import JobSpec, NodeSpec
    from remote_agent.wire.documents import (
        IncidentDocument,
        JournalEvent,
        OfferedSnapshot,
        PlacedAnswer,
        RankExit,
        SlowStatus,
        SnapshotEntry,
    )
    from remote_agent.wire.events import EventType

FORMING = "forming"
PREPARING = "preparing"
STARTING = "starting"
RUNNING = "running"
STOPPING = "stopping"
ENDED = "ended"
# Each node sends heartbeats at most this often.
HEARTBEAT_S = 1.0


@dataclasses.dataclass(frozen=True)
class Node:
    """One node of the job as the coordinator sees it; times are seconds of the caller's monotonic clock."""

    spec: NodeSpec
    nproc: int = 0
    status: str = "connecting"
    """A node state of the contract."""
    reason: str | None = None
    connected: bool = False
    ready: bool = False
    """Its engine is up: it can start workers."""
    running: int | None = None
    """The generation whose workers it has; None: it has none."""
    incarnation: str = ""
    seen: float = 0.0
    joined: float = 0.0
    held: float = 0.0
    """The time when this node last confirmed that it follows this coordinator: the basis of quorum."""
    losses: tuple[float, ...] = ()
    trees: tuple[str, ...] = ()
    """Digests of the work trees that its workers can start from."""
    lacks: bool = False
    """The tree of the next group is not among them, so the node is not ready until it has that tree."""
    notice: Mapping[str, str] | None = None
    """What its agent has said about the newest group's network: kind and message."""
    cold: str | None = None
    """Why its newest ranks were started like any process; empty: they were forked; None: unknown."""
    disk: str = ""
    """The disk of its agent: with another disk, its votes are lost."""
    leaves: bool = False
    """It was removed, and stays only until a group without it has formed."""
    removed_ns: int = 0
    """The time of day when it was removed last."""
    revoked_ns: int = 0
    """The time of day when a group without it was started for the first time since; certificates from before are void.
    """
    cordoned: bool = False
    """An operator has cordoned it: it is not admitted to a group, but stays in its current one across restarts."""
    snapshots: tuple[SnapshotEntry, ...] = ()
    """The snapshots that it keeps: id, path, step, time_ns and bytes of each."""
    said: tuple[tuple[int, str], ...] = ()
    """The last line of each rank of its newest group, as far as they have printed any."""

    @property
    def name(self) -> str:
        """The node's name in the inventory."""
        return self.spec.name


@dataclasses.dataclass(frozen=True)
class Rank:
    """One rank of the newest generation."""

    rank: int
    node: str
    local_rank: int
    pid: int | None = None
    state: str = "starting"
    code: int | None = None
    signal: str | None = None


@dataclasses.dataclass(frozen=True)
class SlowWatch:
    """What is known of what the time of the running group's ranks goes to; windows by their number."""

    began: int = 0
    """The window in which the process group came up; 0: it has not."""
    until: int = 0
    """Windows before this one have been ordered."""
    suspected: int = 0
    """The window in which something was suspected last."""
    pending: Mapping[int, Mapping[str, Mapping[int, Shares | None]]] = dataclasses.field(default_factory=dict)
    """What has been reported of windows that are not judged yet, by node and rank."""
    judged: tuple[Mapping[int, Shares], ...] = ()
    """Of the newest windows that were judged: what describes it."""
    found: Slowness | None = None
    """What the newest one shows, as have the `rounds` - 1 before it; None: nothing."""
    rounds: int = 0
    status: SlowStatus | None = None
    """What the journal says now."""
    since_ns: int = 0
    last: Stragglers = NOBODY
    """The ranks that arrived last at most collectives of the newest round of pulses."""
    off: str = ""
    """Why ranks cannot be sampled."""
    gpus_since: float = 0.0
    """When the present time began in which the use of GPUs is counted; 0: no GPU is known."""
    gpus_used: float = 0.0
    """The sum of all shares that were reported in it."""
    gpus_seen: int = 0
    gpus_idle: float = 0.0
    """The share of the last such time in which GPUs were idle, if it was too much."""


@dataclasses.dataclass(frozen=True)
class Watch:
    """What is known of the running group's progress; times are those of the coordinator's clock."""

    moved_at: float = 0.0
    """The time when a step, or where none is printed an output, was last seen."""
    asked_at: float = 0.0
    asked: AbstractSet[str] = frozenset()
    """Nodes whose pulses are outstanding."""
    before: Mapping[int, Pulse] = dataclasses.field(default_factory=dict)
    """By rank: the pulses of the last round."""
    now: Mapping[int, Pulse] = dataclasses.field(default_factory=dict)
    suspect: bool = False
    """The pulses gave reason to read the stacks, too."""
    key: str = ""
    """What delays the group, since `since`; empty: nothing."""
    since: float = 0.0
    hang: Mapping[str, Any] | None = None
    """missing, group and seq of the hang in the journal, while it lasts."""
    hang_at: float = 0.0
    longest_s: float = 0.0
    """The longest wait that looked like a hang but was not."""
    slow: SlowWatch = SlowWatch()
    loops: Mapping[int, Loop] = dataclasses.field(default_factory=dict)
    """The ranks that compute while others wait for them."""


@dataclasses.dataclass(frozen=True)
class Resume:
    """What is known of the snapshots from which the group that is being formed resumes."""

    asked: frozenset[str] = frozenset()
    """Nodes that have yet to say which they have."""
    asked_at: float = 0.0
    chosen: tuple[OfferedSnapshot, ...] | None = None
    """Once all have answered: one of each series, with the nodes that hold it."""
    placing: frozenset[str] = frozenset()
    """Members that have yet to put them in place."""
    placed: Mapping[str, PlacedAnswer] = dataclasses.field(default_factory=dict)
    """By member: what it had to do, and how long that took."""


class Preliminary(NamedTuple):
    """The incident of the group that is being stopped, as it was written last."""

    id: int
    fingerprint: str
    known: int
    """How many failures of ranks and nodes it is based on."""
    is_last: bool
    """Whether the job ends with it."""


class Version(NamedTuple):
    """A work tree that groups start from."""

    digest: str
    since_ns: int
    """The time when it was first asked for."""


@dataclasses.dataclass(frozen=True)
class State:
    """Everything on which the coordinator bases its decisions."""

    spec: JobSpec
    me: str
    term: int
    nodes: Mapping[str, Node]
    phase: str = FORMING
    generation: int = -1
    members: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The nodes of the newest generation, in order, each with its group rank."""
    ranks: Mapping[int, Rank] = dataclasses.field(default_factory=dict)
    restarts: int = 0
    """Failures charged to max_restarts."""
    deadline: float | None = None
    waiting: AbstractSet[str] = frozenset()
    """Nodes that still have to answer in this phase."""
    mains: AbstractSet[int] = frozenset()
    grouping: AbstractSet[int] = frozenset()
    """Ranks of the newest generation that have called init_process_group, which has not returned."""
    grouped: AbstractSet[int] = frozenset()
    """Ranks of the newest generation whose init_process_group has returned."""
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The phases of the newest generation's start so far, in milliseconds, as far as its ranks show them."""
    cause: str | None = None
    """Why the group is being stopped: failure, node_lost, restart, removed, added, returned, stop, quorum, paused."""
    leaving: frozenset[str] = frozenset()
    marks: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rendezvous: Mapping[str, Any] | None = None
    """How torch's agents of this group find each other; None if the coordinator forms the group."""
    world_size: int | None = None
    """The number of ranks, including those of foreign nodes, if torch formed the group."""
    exits: Mapping[int, RankExit] = dataclasses.field(default_factory=dict)
    lost: Mapping[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    """Nodes lost in this generation: wall clock ns of the last sign of life, and reason."""
    troubles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Nodes that could not carry out an order of this generation, with their messages."""
    watch: Watch = Watch()
    warnings: Mapping[tuple[str, int | None, str], str] = dataclasses.field(default_factory=dict)
    """The warnings in the journal by node, rank and kind. Without a rank, a warning is about the node."""
    stepped: bool = False
    fingerprint: str | None = None
    """The fingerprint of the last failure if it came before the first step; None after any other outcome."""
    suspects: tuple[str, ...] = ()
    """Nodes that have failed alone since a group last made a step."""
    incidents: int = 0
    incident: IncidentDocument | None = None
    judging: bool | None = None
    """Whether the verdict that is being made is the final one; None: none is being made."""
    preliminary: Preliminary | None = None
    """Set if the group that is being stopped already has an incident; a new coordinator begins another one."""
    ended: str | None = None
    failure: str | None = None
    """Why the job failed, in words."""
    started_at: str | None = None
    ticked: float | None = None
    """The time of the last tick; a gap means that this process was suspended."""
    alone_since: float | None = None
    """The time since which fewer nodes than needed are available."""
    enough_since: float | None = None
    """The time since which min_nodes have been ready for generation 0."""
    preempted: str = ""
    """What is ending the allocation that the job runs in."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables that operators have set for the workers of all groups from `env_from` on, over those of the launch."""
    env_from: int = 0
    trees: tuple[Version, ...] = ()
    """The work tree before, and that of the next group; empty: that of the launch."""
    tree_new_since: int | None = None
    """The generation that ran when the tree was requested, until a later one makes a step; None: it is not new."""
    groups: Groups = ()
    """The groups that may have formed, on which the next one depends."""
    recorded: AbstractSet[str] = frozenset()
    """Nodes that have the newest proposal on disk."""
    port: int | None = None
    """The port of the store of the group that is being prepared, once it is open; 0: the store is not ours."""
    given_up: frozenset[str] = frozenset()
    """Nodes that an operator declared dead: no quorum counts them."""
    resume: Resume = Resume()
    resume_from: str = ""
    """The snapshot that an operator has named for the next group."""
    skipped: Skipped = NOTHING_SKIPPED
    """The snapshots that do not count: an operator has gone back to an earlier one."""
    blames: tuple[tuple[float, str], ...] = ()
    """When, and on which node, there was a failure that a machine can cause by itself."""

    def ranks_per_node(self) -> dict[str, list[int]]:
        """Return the numbers of the ranks that each node has."""
        numbers: dict[str, list[int]] = {}
        for rank in self.ranks.values():
            numbers.setdefault(rank.node, []).append(rank.rank)
        return numbers

    def is_revoked(self, name: str, issued_ns: int) -> bool:
        """Return whether a node's certificate is void: it was issued before the job went on without the node."""
        node = self.nodes.get(name)
        return node is not None and issued_ns <= node.revoked_ns

    def disks(self, names: Collection[str]) -> Votes:
        """Return the disks of those nodes, as votes."""
        return {name: self.nodes[name].disk for name in names if name in self.nodes}

    def with_killed(self, node: str | None = None) -> State:
        """Return the state once the ranks that still lived, of one node or of all, are dead."""
        ranks = {
            number: dataclasses.replace(rank, state="killed")
            if rank.state in ("starting", "running") and node in (None, rank.node)
            else rank
            for number, rank in self.ranks.items()
        }
        return dataclasses.replace(self, ranks=ranks)


def ranked(names: Iterable[str]) -> dict[str, int]:
    """Return the group rank of each of these nodes, which are in that order."""
    return {name: place for place, name in enumerate(names)}


@dataclasses.dataclass(frozen=True)
class Emit:
    """Write a fact to the journal."""

    type: EventType
    generation: int
    node: str | None = None
    rank: int | None = None
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def record(self, seq: int, time: str) -> JournalEvent:
        """Return the record of the journal, which gets its term where it is written."""
        return {
            "seq": seq, "time": time, "type": str(self.type), "generation": self.generation, "node": self.node,
            "rank": self.rank, "detail": dict(self.detail),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Send:
    """Send an order to a node's agent; the shell adds the term."""

    node: str
    op: str
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Drop:
    """Close a node's connection: if its agent is alive, it has to join again."""

    node: str


@dataclasses.dataclass(frozen=True)
class HandOver:
    """Give the role to that node; it forms the next generation."""

    node: str


@dataclasses.dataclass(frozen=True)
class Judge:
    """Make the verdict on the group of this state, and report it as `inputs.Judged`; it may take seconds."""

    state: State
    wall_ns: int
    final: bool


@dataclasses.dataclass(frozen=True)
class Reply:
    """Answer the operator's request: accepted, or refused with kind, message and hint."""

    accepted: bool
    message: str
    generation: int = -1
    kind: str = ""
    hint: str = ""


Command = Union[Emit, Send, Drop, HandOver, Judge, Reply]
Turned = tuple[State, "tuple[Command, ...]"]
