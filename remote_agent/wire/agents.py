"""The types of what agents ask each other, and of the answers: the gate between two nodes of a job.

In: JSON from another node. Out: `read_request` and `read_answer`: the same, whose fields have the types that the
handlers expect; `Misfit`, which names the field, for anything else. What members report of their ranks is read in
agent/reports.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Optional

from remote_agent.wire.answers import Address, Port
from remote_agent.wire.documents import Count, GenerationNumber, RankNumber, TimeNs, read_event
from remote_agent.wire.gate import Misfit, Name, Shape, record, row

# By how far the wall clocks of two machines may differ, as far as numbers go.
_LEASE = {"heard_age": float, "answered": float, "since_answer": float}
_CLOCK = {"offset_ns": TimeNs, "clock_error_ns": Optional[Count]}
_ADDRESSES = dict[str, Address]
_EVENTS = list[Annotated[Any, read_event]]
_TAIL = Annotated[Any, record({"term": Count, "seq": Count, "digest": str})]
_TIMES = record({"received_ns": TimeNs, "answered_ns": TimeNs, "now": float})
_GROUP = record(
    {"generation": GenerationNumber, "term": Count, "members": dict[str, str],
     "author": Annotated[Any, row(str, str)], "formed": bool}
)  # fmt: skip


def _unread(value: object) -> dict[str, Any]:
    """Return an object whose fields are read where its kind is known; raises Misfit for anything else."""
    if not isinstance(value, dict):
        raise Misfit("is not an object")
    return value


OPERATORS = dict[str, str]
"""By operator: watch or control."""
_ARGS = Annotated[Any, _unread]
REPORT = record({"op": str, "args": _ARGS})
SIGNALLED = record({"ranks": list[RankNumber], "signal": str}, {"operator": Optional[str]})

_REQUESTS: dict[str, Shape] = {
    "time": record({}, _LEASE),
    "join": record(
        {"term": Count, "incarnation": Name, "journal": _TAIL, "disk": Name, "reason": str, "address": str,
         "port": Port},
        {"running": Optional[GenerationNumber], "reports": list[Annotated[Any, REPORT]], "operators": OPERATORS,
         **_LEASE, **_CLOCK},
    ),
    # The facts in a heartbeat are read apart: a node whose facts are malformed has its lease all the same.
    "beat": record({}, {**_LEASE, **_CLOCK, "facts": _ARGS, "steps": _ARGS}),
    "report": REPORT,
    "request": REPORT,
    "look": REPORT,
    "vote": record(
        {"term": Count, "candidate": Name, "sounding": bool, "journal": _TAIL}, {"where": Optional[Address]}
    ),
    "who": record({"term": Count}, {"where": Optional[Address]}),
    "announce": record({"term": Count, "coordinator": Name, "members": _ADDRESSES}),
    "take_over": record({"term": Count}),
    "order": record({"op": str, "term": Count, "args": _ARGS}),
    "journal": record({"records": _EVENTS, "reset": bool, "more": bool}),
    "members": record({"members": _ADDRESSES}),
    "moved": record({"successor": Name}),
}  # fmt: skip
_GRANTED = record(
    {"granted": bool, "reason": str, "disk": str, "newest": Annotated[Any, row(Count, Count)],
     "groups": list[Annotated[Any, _GROUP]]},
    {"reset": bool, "records": _EVENTS},
)  # fmt: skip
_REFUSED = record({"granted": bool, "reason": str})


def _vote(value: object) -> dict[str, Any]:
    answer: dict[str, Any] = _REFUSED(value)
    return _GRANTED(value) if answer["granted"] else answer


_ANSWERS: dict[str, Shape] = {
    "time": _TIMES,
    "beat": _TIMES,
    "vote": _vote,
    "who": record({"term": Count, "coordinator": Optional[Name], "members": _ADDRESSES}),
}


def read_request(op: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return what another node asks or notes, as far as its type is listed here; raises Misfit."""
    shape = _REQUESTS.get(op)
    return args if shape is None else shape(args)


def read_answer(op: str, data: object) -> dict[str, Any]:
    """Return what another node answers; raises Misfit."""
    return _ANSWERS.get(op, record({}))(data)  # type: ignore[no-any-return]
