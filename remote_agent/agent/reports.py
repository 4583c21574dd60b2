"""What members report becomes inputs of the coordinator: the gate for reports.

In: a member's report, its clock. Out: an Input whose fields have the types that the state machine expects, with times
in the coordinator's clock; `Misfit`, which names the field, for a report that no agent of ours makes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Optional, cast

from remote_agent.coordinator import inputs
from remote_agent.diagnose.hang.pulses import ReportedPulses
from remote_agent.text.shapes import clip
from remote_agent.wire.answers import NetworkNotice, Port
from remote_agent.wire.documents import (
    Count,
    GenerationNumber,
    RankExit,
    RankNumber,
    RankWindow,
    SnapshotEntry,
    TimeNs,
    by_rank,
    read_placed,
)
from remote_agent.wire.events import HOST_NAME, INTERFACE, SNAPSHOT_LEFT_OUT, SNAPSHOT_NOTICES
from remote_agent.wire.gate import Misfit, reader, record, shape, whole

if TYPE_CHECKING:
    from remote_agent.base.clocks import Clock
    from remote_agent.diagnose.hang.pulses import Pulse, ReportedPulse
    from remote_agent.wire.documents import PlacedAnswer
    from remote_agent.wire.gate import Shape

# No node has more ranks.
MAX_NPROC = 4096
Ranks = tuple[tuple[int, int, int], ...]
_RANKS = list[Annotated[Any, record({"rank": RankNumber, "local_rank": RankNumber, "pid": int})]]
_EXIT = Annotated[RankExit, reader(RankExit, "rank", "local_rank", "pid", "code", "signal", "t_ns")]
_GROUP = {"generation": GenerationNumber}
_OF_RANK = {**_GROUP, "rank": RankNumber}


class _Kind(NamedTuple):
    """One kind of report."""

    read: Shape
    make: Callable[[str, Mapping[str, Any], Clock], inputs.Input]
    """Returns its input: of a node, what it reports, the node's clock."""


def _ranks(args: Mapping[str, Any]) -> Ranks:
    return tuple((rank["rank"], rank["local_rank"], rank["pid"]) for rank in args["ranks"])


def _notice(args: Mapping[str, Any]) -> dict[str, str] | None:
    """Return a node's notice about its network; None for none, or of a kind that we do not know."""
    notice = args.get("notice")
    if notice is None or notice["kind"] not in (INTERFACE, HOST_NAME):
        return None
    return {"kind": notice["kind"], "message": clip(notice["message"])}


def _age_s(t_ns: int) -> float:
    """Return how long ago a corrected time was."""
    return max(0.0, (time.time_ns() - t_ns) / 1e9)


def _started(node: str, args: Mapping[str, Any], _: Clock) -> inputs.Started:
    cold = args.get("cold")
    return inputs.Started(node, args["generation"], _ranks(args), _notice(args), None if cold is None else clip(cold))


def _pulses(node: str, args: Mapping[str, Any], clock: Clock) -> inputs.Pulses:
    # By its clock the times of a pulse are corrected.
    pulses: Mapping[str, ReportedPulse] = args["ranks"]
    ranks: dict[int, Pulse] = {int(rank): {**pulse, "clock": clock} for rank, pulse in pulses.items()}
    return inputs.Pulses(node, args["generation"], ranks)


def _exited(node: str, args: Mapping[str, Any], clock: Clock) -> inputs.Exited:
    ended = clock.corrected(args["exit"])
    return inputs.Exited(node, args["generation"], ended, _age_s(int(ended["t_ns"] or 0)))


def _grouped(node: str, args: Mapping[str, Any], clock: Clock) -> inputs.Grouped:
    age_s = _age_s(args["t_ns"] + clock.offset_ns)
    return inputs.Grouped(node, args["generation"], args["rank"], args["took_s"], age_s)


def _warning(node: str, args: Mapping[str, Any], _: Clock) -> inputs.NodeWarning:
    kind = args["kind"]
    return inputs.NodeWarning(node, kind if kind in SNAPSHOT_NOTICES else SNAPSHOT_LEFT_OUT, clip(args["message"]))


def _plain(kind: Callable[..., inputs.Input], **fields: Any) -> _Kind:
    """Return the kind of report whose fields, in this order, are those of its input after the node."""
    return _Kind(record(fields), lambda node, args, _: kind(node, *(args[name] for name in fields)))


_REPORTS: dict[str, _Kind] = {
    "ready": _Kind(
        record({"nproc": Annotated[int, whole(0, MAX_NPROC)]}, {"versions": dict[str, str], "trees": list[str]}),
        lambda node, args, _: inputs.Ready(node, args["nproc"], args.get("versions", {}), tuple(args.get("trees", ()))),
    ),
    "unfit": _plain(inputs.Unfit, reason=str),
    "notice": _Kind(record({"kind": str, "message": str}), _warning),
    "held": _Kind(
        record({**_GROUP, "snapshots": list[SnapshotEntry]}),
        lambda node, args, _: inputs.Held(node, args["generation"], tuple(args["snapshots"])),
    ),
    "placed": _Kind(
        read_placed,
        lambda node, args, _: inputs.Placed(
            node, shape(GenerationNumber)(args.get("generation")), cast("PlacedAnswer", args)
        ),
    ),
    "gone": _plain(inputs.AgentDead, reason=str),
    "recorded": _plain(inputs.Recorded, **_GROUP, term=Count),
    "prepared": _plain(inputs.Prepared, **_GROUP, port=Port),
    "order_failed": _plain(inputs.OrderFailed, **_GROUP, message=str),
    "started": _Kind(
        record({**_GROUP, "ranks": _RANKS}, {"notice": Optional[NetworkNotice], "cold": Optional[str]}), _started
    ),
    "grouping": _plain(inputs.Grouping, **_OF_RANK),
    "grouped": _Kind(record({**_OF_RANK, "t_ns": TimeNs, "took_s": float}), _grouped),
    "assigned": _Kind(
        record({**_GROUP, "ranks": _RANKS, "world_size": Count}),
        lambda node, args, _: inputs.Assigned(node, args["generation"], _ranks(args), args["world_size"]),
    ),
    "main": _plain(inputs.Main, **_OF_RANK),
    "pulse": _Kind(record({**_GROUP, "ranks": ReportedPulses}), _pulses),
    "windows": _Kind(
        record({**_GROUP, "window": Count, "ranks": Annotated[Any, by_rank(RankWindow)]}),
        lambda node, args, _: inputs.Windows(
            node, args["generation"], args["window"], {int(rank): one for rank, one in args["ranks"].items()}
        ),
    ),
    "unsampled": _plain(inputs.Unsampled, **_GROUP, reason=str),
    "exited": _Kind(record({**_GROUP, "exit": _EXIT}), _exited),
    "idle": _Kind(
        record({**_GROUP, "exits": list[_EXIT]}),
        lambda node, args, clock: inputs.Idle(
            node, args["generation"], tuple(clock.corrected(ended) for ended in args["exits"])
        ),
    ),
}


def read_report(node: str, op: str, args: object, clock: Clock) -> inputs.Input | None:
    """Return what a member reports as an input, None for a kind that only a newer version knows; raises Misfit."""
    kind = _REPORTS.get(op)
    try:
        return None if kind is None else kind.make(node, kind.read(args), clock)
    except Misfit as misfit:
        raise misfit.inside(op) from misfit
