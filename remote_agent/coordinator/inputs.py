"""The inputs of the coordinator: reports of nodes, requests of operators, time; plain frozen data.

In: nothing. Out: the types of Input that the state machine takes one by one. A report's `node` is the sender.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remote_agent.diagnose.hang.pulses import Pulse
    from remote_agent.wire import NodeSpec
    from remote_agent.wire.documents import IncidentDocument, PlacedAnswer, RankExit, RankWindow, SnapshotEntry


class Input:
    """What the state machine takes."""


@dataclasses.dataclass(frozen=True)
class Report(Input):
    """What a node's agent reports; one of a node that is not in the job changes nothing."""

    node: str


@dataclasses.dataclass(frozen=True)
class GroupReport(Report):
    """A report about one generation; of any but the newest it changes nothing."""

    generation: int


@dataclasses.dataclass(frozen=True)
class Joined(Report):
    """A node's agent is connected; `running` is the generation whose workers it has."""

    incarnation: str
    running: int | None = None
    reason: str = "its agent was restarted"
    """Why it joins without the workers that it had."""
    nproc: int | None = None
    """How many ranks it runs, where its engine is up already."""
    trees: tuple[str, ...] = ()
    disk: str = ""
    delay: float = 0.0
    """The greatest number of seconds for which this was under way."""


@dataclasses.dataclass(frozen=True)
class Ready(Report):
    """A node's engine is up; `versions`: of Python and torch there, `trees`: what its workers can start from."""

    nproc: int
    versions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trees: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Unfit(Report):
    """A node cannot take part: its engine does not start, or it was never brought up."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Heartbeat(Report):
    """A heartbeat; `heard_age`: seconds since the newest heartbeat of that node which we answered was sent, at most."""

    heard_age: float = 0.0
    stepped: bool = False
    moved: bool = False
    """Whether its ranks have made steps, or printed something, since the last one."""
    warnings: Mapping[tuple[int, str], str] = dataclasses.field(default_factory=dict)
    """Warnings about the output by rank and kind; none of them is a failure."""
    first_step_age: float | None = None
    """Seconds since a rank there printed its first step; None: none has."""
    snapshots: tuple[SnapshotEntry, ...] | None = None
    """The snapshots that it keeps; None: not reported."""
    said: tuple[tuple[int, str], ...] | None = None
    """The last line of each rank that has printed one; None: not reported."""
    gpu_use: float | None = None
    """How busy the GPUs of its ranks are, in percent; None: they have none, or it is not known."""


@dataclasses.dataclass(frozen=True)
class NodeWarning(Report):
    """A warning from a node, for the operator; not a failure."""

    kind: str
    message: str


@dataclasses.dataclass(frozen=True)
class Pulses(GroupReport):
    """What a node's live ranks are doing: a pulse by rank."""

    ranks: Mapping[int, Pulse]


@dataclasses.dataclass(frozen=True)
class Windows(GroupReport):
    """What the time of a node's ranks went to in one window, by rank."""

    window: int
    ranks: Mapping[int, RankWindow]


@dataclasses.dataclass(frozen=True)
class Unsampled(GroupReport):
    """Why a node's ranks cannot be sampled; empty: they can."""

    reason: str


@dataclasses.dataclass(frozen=True)
class AgentDead(Report):
    """A node's agent is certainly dead: nothing listens at its address any more."""

    reason: str
    alone: bool = False
    """Its machine answers."""
    said: tuple[tuple[int, str], ...] = ()
    """The last lines of its ranks, if it was the coordinator; a member's come with its heartbeats."""


@dataclasses.dataclass(frozen=True)
class GivenUp(Report):
    """An operator declares a node dead, and its workers with it."""


@dataclasses.dataclass(frozen=True)
class Recorded(GroupReport):
    """A node has the proposal of that generation and term on disk."""

    term: int


@dataclasses.dataclass(frozen=True)
class Prepared(GroupReport):
    """The first member has opened the generation's store."""

    port: int


@dataclasses.dataclass(frozen=True)
class Held(GroupReport):
    """A node has looked which snapshots it has: id, path, step, time_ns and bytes of each."""

    snapshots: tuple[SnapshotEntry, ...]


@dataclasses.dataclass(frozen=True)
class Placed(GroupReport):
    """A member has put the chosen snapshots in place, or reports why it cannot (`problem`)."""

    report: PlacedAnswer


@dataclasses.dataclass(frozen=True)
class Started(GroupReport):
    """A node has started its workers: (rank, local rank, pid) each."""

    ranks: tuple[tuple[int, int, int], ...]
    notice: Mapping[str, str] | None = None
    """Kind and message: the interface that the workers use because the host name does not resolve to the address."""
    cold: str | None = None
    """Why they were started like any process; empty: they were forked from a waiting process; None: unknown."""


@dataclasses.dataclass(frozen=True)
class Assigned(GroupReport):
    """torch's agent on a node has got ranks and started them: (rank, local rank, pid) each; `world_size`: in all."""

    ranks: tuple[tuple[int, int, int], ...]
    world_size: int


@dataclasses.dataclass(frozen=True)
class OrderFailed(GroupReport):
    """A node could not carry out prepare or go."""

    message: str


@dataclasses.dataclass(frozen=True)
class Main(GroupReport):
    """A rank is in the user's main."""

    rank: int


@dataclasses.dataclass(frozen=True)
class Grouping(GroupReport):
    """A rank has called init_process_group."""

    rank: int


@dataclasses.dataclass(frozen=True)
class Grouped(GroupReport):
    """A rank's init_process_group returned `age` seconds ago, `took` seconds after the call."""

    rank: int
    took: float
    age: float = 0.0


@dataclasses.dataclass(frozen=True)
class Exited(GroupReport):
    """A worker ended; `age`: seconds since, `exit`: the engine's Exit with t_ns in our clock."""

    exit: RankExit
    age: float = 0.0


@dataclasses.dataclass(frozen=True)
class Idle(Report):
    """A node has no workers of that generation left; `exits`: the engine's Exits."""

    generation: int
    exits: tuple[RankExit, ...] = ()


@dataclasses.dataclass(frozen=True)
class Judged(Input):
    """The verdict on a group that failed, which `known` failures of ranks and nodes show; final: all have ended."""

    generation: int
    incident: IncidentDocument
    final: bool
    known: int


@dataclasses.dataclass(frozen=True)
class Restart(Input):
    """An operator wants a new generation, now or `later`: whenever there is one, `env` is set for it.

    `tree`: the digest of the work tree that it starts from; `change`: what has changed in it, for people; `without`:
    nodes that need not have it.
    """

    operator: str = ""
    env: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    later: bool = False
    tree: str = ""
    change: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    without: tuple[str, ...] = ()
    snapshot: str = ""
    """The id of the snapshot to resume from; empty: the newest."""


@dataclasses.dataclass(frozen=True)
class Remove(Input):
    """An operator wants the job to continue without a node."""

    node: str
    operator: str = ""


@dataclasses.dataclass(frozen=True)
class Add(Input):
    """An operator wants a node in the group; it must be connected and ready."""

    spec: NodeSpec
    operator: str = ""


@dataclasses.dataclass(frozen=True)
class Cordon(Input):
    """An operator cordons a node, or uncordons it (`on` is false)."""

    node: str
    on: bool = True
    operator: str = ""


@dataclasses.dataclass(frozen=True)
class Stop(Input):
    """An operator, or a scheduler, wants the job to end; `kill`: without grace."""

    kill: bool = False
    operator: str = ""
    preempted: str = ""
    """What ended the allocation that the job runs in; empty: an operator ends it."""


@dataclasses.dataclass(frozen=True)
class Tick(Input):
    """Time has passed."""
