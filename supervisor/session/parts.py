"""What the nodes give to one page of merged logs, put in order as far as it is whole.

In: log_merged answers. Out: rows by time, whether there may be more beyond them, and the times between which they are
all. Rows of one time stay together.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from remote_agent.wire import Answer
    from supervisor.errors import Unreachable
    from supervisor.session.logs import Clocks, Row


File = tuple[int, int, str]
"""Generation, rank, stream."""
Ends = dict[File, "int | None"]
"""How many lines each file of a node has; None: what was there before its agent is not counted yet."""


class Part(NamedTuple):
    """What one node gives to a page: all rows from since_ns on and before until_ns (None: not known)."""

    rows: list[Row]
    more: bool
    apart: int
    since_ns: int
    until_ns: int | None
    counted: int
    ends: Ends | None
    """None: not asked for, or not told by an agent of an older version."""
    before: int = 0
    behind: int = 0


Joined = tuple["list[Row]", bool, int, int | None]


def part_of(clocks: Clocks, name: str, answer: Answer) -> Part:
    """Return a node's part, its times by the coordinator's clock."""
    data = answer.data
    ahead_ns, more = clocks.ahead_ns(name), bool(data.get("more"))
    since_ns, until_ns = int(data["since_ns"]) - ahead_ns, int(data["until_ns"]) - ahead_ns
    # What is not indexed yet, of a file that was there before its agent, has an early time.
    known = more or bool(data.get("complete", True))
    apart, counted = int(data.get("apart") or 0), int(data.get("counted") or 0)
    ends = data.get("ends")
    told = None if ends is None else {(generation, rank, stream): end for generation, rank, stream, end in ends}
    beyond = int(data.get("before") or 0), int(data.get("behind") or 0)
    return Part(clocks.rows(name, answer), more, apart, since_ns, until_ns if known else None, counted, told, *beyond)


def ends_of(parts: Mapping[str, Part | Unreachable]) -> dict[str, Ends]:
    """Return what the nodes that tell it have, by node."""
    return {name: part.ends for name, part in parts.items() if isinstance(part, Part) and part.ends is not None}


def forth(parts: list[Part], count: int, after_ns: int) -> Joined:
    """Return about the first `count` rows from a time on, and all that the parts have of before it."""
    edge_ns = min((part.until_ns for part in parts if part.more and part.until_ns is not None), default=None)
    whole = [row for row in _by_time(parts) if edge_ns is None or row.t_ns < edge_ns]
    begin = bisect_left(whole, after_ns, key=lambda row: row.t_ns)
    end = min(begin + count, len(whole))
    while begin < end < len(whole) and whole[end - 1].t_ns == whole[end].t_ns:
        end += 1
    if end < len(whole):
        return whole[:end], True, after_ns, whole[end].t_ns
    return whole, edge_ns is not None, after_ns, _newest(parts)


def back(parts: list[Part], count: int) -> Joined:
    """Return about the last `count` rows."""
    edge_ns = max((part.since_ns for part in parts if part.more), default=0)
    whole = [row for row in _by_time(parts) if row.t_ns >= edge_ns]
    start = max(0, len(whole) - count)
    while 0 < start < len(whole) and whole[start - 1].t_ns == whole[start].t_ns:
        start -= 1
    since_ns = whole[start].t_ns if start else edge_ns
    return whole[start:], bool(edge_ns) or start > 0, since_ns, _newest(parts)


def _by_time(parts: list[Part]) -> list[Row]:
    return sorted(chain.from_iterable(part.rows for part in parts), key=lambda row: row.t_ns)


def _newest(parts: list[Part]) -> int | None:
    known = [part.until_ns for part in parts if part.until_ns is not None]
    return min(known) if len(known) == len(parts) else None
