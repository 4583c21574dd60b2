"""What the coordinator knows, what can happen to it, and what it may order: plain frozen data.

In: nothing. Out: State, Event and (from commands.py) Command types that coordinator.py, restore.py and status.py share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from remote_agent.commands import Drop as Drop
from remote_agent.commands import Emit as Emit
from remote_agent.commands import HandOver as HandOver
from remote_agent.commands import Reply as Reply
from remote_agent.commands import Send as Send

if TYPE_CHECKING:
    from remote_agent.commands import Command as Command
    from remote_agent.wire import JobSpec, NodeSpec

FORMING = "forming"
PREPARING = "preparing"
STARTING = "starting"
RUNNING = "running"
STOPPING = "stopping"
ENDED = "ended"


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
    """When this node last knew that it is ours: the basis of quorum."""
    losses: tuple[float, ...] = ()
    trees: tuple[str, ...] = ()
    """Digests of the work trees that its workers can start from."""
    lacks: bool = False
    """The tree of the next group is not among them: it is not ready before it has come."""
    cordoned: bool = False
    """An operator wants no new group to take it in; the one that it is in keeps it."""

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
class Watch:
    """What is known of the running group's progress; times are those of the coordinator's clock."""

    moved_at: float = 0.0
    """When a step, or where none is printed an output, was last seen."""
    asked_at: float = 0.0
    asked: frozenset[str] = frozenset()
    """Nodes whose pulses are still to come."""
    before: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """By rank: the pulses of the last round."""
    now: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    suspect: bool = False
    """They gave reason to look at their stacks too."""
    key: str = ""
    """What holds the group up, since `since`; empty: nothing."""
    since: float = 0.0
    told: Mapping[str, Any] | None = None
    """summary, missing, group, seq and gives_up of the hang that the journal tells of, while it lasts."""
    told_at: float = 0.0
    longest_s: float = 0.0
    """The longest wait that looked like a hang and was none."""


class Version(NamedTuple):
    """A work tree that groups start from."""

    digest: str
    since_ns: int
    """When it was first asked for."""


@dataclasses.dataclass(frozen=True)
class State:
    """All that the coordinator decides upon."""

    spec: JobSpec
    me: str
    term: int
    nodes: Mapping[str, Node]
    phase: str = FORMING
    generation: int = -1
    members: tuple[str, ...] = ()
    """The nodes of the newest generation, in group rank order."""
    ranks: Mapping[int, Rank] = dataclasses.field(default_factory=dict)
    restarts: int = 0
    """Failures charged to max_restarts."""
    deadline: float | None = None
    waiting: frozenset[str] = frozenset()
    """Nodes that still have to answer in this phase."""
    mains: frozenset[int] = frozenset()
    cause: str | None = None
    """Why the group is being stopped: failure, node_lost, restart, removed, added, returned, stop, quorum, paused."""
    leaving: frozenset[str] = frozenset()
    marks: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rendezvous: Mapping[str, Any] | None = None
    """How torch's agents of this group find each other; None where the coordinator forms it."""
    world_size: int | None = None
    """Where torch formed the group: ranks in all, those of nodes that are not ours included."""
    exits: Mapping[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    lost: Mapping[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    """Nodes lost in this generation: wall clock ns of the last sign of life, and reason."""
    troubles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Nodes that could not carry out an order of this generation, with what they said."""
    watch: Watch = Watch()
    warnings: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """By rank: what the journal warns of; each rank once, and not of all in a large job."""
    stepped: bool = False
    fingerprint: str | None = None
    """Of the last failure that came before the first step; None after any other outcome."""
    incidents: int = 0
    incident: dict[str, Any] | None = None
    ended: str | None = None
    failure: str | None = None
    """Why the job failed, in words."""
    started_at: str | None = None
    ticked: float | None = None
    """When time last passed here; a gap means that this very process stood still."""
    alone_since: float | None = None
    """Since when fewer nodes than needed are there."""
    enough_since: float | None = None
    """Since when min_nodes have been ready for generation 0."""
    preempted: str = ""
    """What is ending the allocation that the job runs in."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What operators have set for the workers of all groups from `env_from` on, over what the launch says."""
    env_from: int = 0
    trees: tuple[Version, ...] = ()
    """The work tree before, and that of the next group; empty: that of the launch."""
    tree_new_since: int | None = None
    """The generation that ran when it was asked for, until a later one has made a step; None: it is not new."""
    given_up: frozenset[str] = frozenset()
    """Nodes of the last group that an operator called dead: they do not count for its quorum."""
    blames: tuple[tuple[float, str], ...] = ()
    """When a failure that a machine can cause by itself was found on which node."""

    def ranks_per_node(self) -> dict[str, list[int]]:
        """Return the numbers of the ranks that each node has."""
        found: dict[str, list[int]] = {}
        for rank in self.ranks.values():
            found.setdefault(rank.node, []).append(rank.rank)
        return found

    def with_killed(self, node: str | None = None) -> State:
        """Return the state once the ranks that still lived, of one node or of all, are dead."""
        ranks = {
            number: dataclasses.replace(rank, state="killed")
            if rank.state in ("starting", "running") and node in (None, rank.node)
            else rank
            for number, rank in self.ranks.items()
        }
        return dataclasses.replace(self, ranks=ranks)


# Events: what a node or an operator says, and time. `node` is the one that speaks.


@dataclasses.dataclass(frozen=True)
class Joined:
    """A node's agent is connected; `running` is the generation whose workers it has."""

    node: str
    incarnation: str
    running: int | None = None
    reason: str = "its agent was restarted"
    """Why it comes without the workers it had."""
    nproc: int | None = None
    """How many ranks it runs, where its engine is up already."""
    trees: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Ready:
    """A node's engine is up; `versions`: of Python and torch there, `trees`: what its workers can start from."""

    node: str
    nproc: int
    versions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trees: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Unfit:
    """A node cannot take part: its engine does not start, or it never came up."""

    node: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Beat:
    """A heartbeat; `heard_age`: seconds since the node last heard from us."""

    node: str
    heard_age: float = 0.0
    stepped: bool = False
    moved: bool = False
    """Its ranks have made steps, or printed something, since the last one."""
    warnings: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """By rank: what its output shows that is no failure."""


@dataclasses.dataclass(frozen=True)
class Pulses:
    """What a node's live ranks are doing: a pulse by rank."""

    node: str
    generation: int
    ranks: Mapping[int, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Gone:
    """A node's agent is certainly dead: nothing listens at its address any more."""

    node: str
    reason: str


@dataclasses.dataclass(frozen=True)
class GivenUp:
    """An operator says that a node is dead and its workers with it."""

    node: str
    operator: str = ""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The first member has opened the generation's store."""

    node: str
    generation: int
    port: int


@dataclasses.dataclass(frozen=True)
class Started:
    """A node has started its workers: (rank, local rank, pid) each."""

    node: str
    generation: int
    ranks: tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True)
class Assigned:
    """torch's agent on a node has got ranks and started them: (rank, local rank, pid) each; `world_size`: in all."""

    node: str
    generation: int
    ranks: tuple[tuple[int, int, int], ...]
    world_size: int


@dataclasses.dataclass(frozen=True)
class OrderFailed:
    """A node could not carry out prepare or go."""

    node: str
    generation: int
    message: str


@dataclasses.dataclass(frozen=True)
class Main:
    """A rank is in the user's main."""

    node: str
    generation: int
    rank: int


@dataclasses.dataclass(frozen=True)
class Exited:
    """A worker ended; `age`: seconds since, `exit`: the engine's Exit with t_ns in our clock."""

    node: str
    generation: int
    exit: dict[str, Any]
    age: float = 0.0


@dataclasses.dataclass(frozen=True)
class Idle:
    """A node has no workers of that generation left; `exits`: the engine's Exits."""

    node: str
    generation: int
    exits: tuple[dict[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Restart:
    """An operator wants a new generation, now or `later`: whenever there is one, `env` is set for it.

    `tree`: the digest of the work tree that it starts from, and what operators read of it; `without`: nodes that need
    not have it.
    """

    operator: str = ""
    env: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    later: bool = False
    tree: str = ""
    told: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    without: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Remove:
    """An operator wants the job to go on without a node."""

    node: str
    operator: str = ""


@dataclasses.dataclass(frozen=True)
class Add:
    """An operator wants a node in the group; it must be connected and ready."""

    spec: NodeSpec
    operator: str = ""


@dataclasses.dataclass(frozen=True)
class Cordon:
    """An operator wants a node not to be taken in any more, or (`on` false) again."""

    node: str
    on: bool = True
    operator: str = ""


@dataclasses.dataclass(frozen=True)
class Stop:
    """An operator, or a scheduler, wants the job to end; `kill`: without grace."""

    kill: bool = False
    operator: str = ""
    preempted: str = ""
    """What ended the allocation that the job runs in; empty: an operator ends it."""


@dataclasses.dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Union[
    Joined,
    Ready,
    Unfit,
    Beat,
    Pulses,
    Gone,
    GivenUp,
    Prepared,
    Started,
    Assigned,
    OrderFailed,
    Main,
    Exited,
    Idle,
    Restart,
    Remove,
    Add,
    Cordon,
    Stop,
    Tick,
]

Turned = tuple[State, "tuple[Command, ...]"]
