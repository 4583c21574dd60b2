"""What can happen to the coordinator: what a node or an operator says, and time; plain frozen data.

In: nothing. Out: the types of Input that coordinator.py takes one by one. `node` is the one that speaks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    from remote_agent.wire import NodeSpec


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
    warnings: Mapping[tuple[int, str], str] = dataclasses.field(default_factory=dict)
    """By rank and kind: what its output shows that is no failure."""


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
    alone: bool = False
    """Its machine answers."""


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


Input = Union[
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
