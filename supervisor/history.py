"""The history of a job as one picture: the series of all nodes, bucket by bucket.

In: the answers of the nodes' agents. Out: `Series`.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.history.pyramid import BUCKETS, WIDTHS_S, History, Name, Span, level_for, unpack
from remote_agent.history.samples import RANK_KINDS
from remote_agent.wire import CallFailed, WireError
from supervisor.logs.files import sources

if TYPE_CHECKING:
    from supervisor.link.host_link import HostLink
    from supervisor.link.hub import Hub

ANSWER_S = 5.0


class SeriesQuery(NamedTuple):
    """A request for some buckets of a level."""

    kinds: Sequence[str]
    ids: Sequence[int] | None
    """Ranks or GPUs; None: all."""
    level: int
    buckets: int
    last: int | None = None
    """The number of the last bucket; None: the newest one."""
    node: str | None = None
    """The only node that is asked; None: all."""


class Series(NamedTuple):
    """Some buckets of a job's series, which all begin at the same time."""

    width_s: int
    first: int
    """The number of the first bucket."""
    buckets: int
    ranks: Mapping[Name, Span]
    """The spans of ranks, by kind and rank."""
    nodes: Mapping[tuple[str, str, int], Span]
    """The spans of nodes, by node, kind and GPU; -1: the node itself."""

    @property
    def begin_s(self) -> float:
        """The time when the first bucket begins, in seconds since the epoch, by the coordinator's clock."""
        return float(self.first * self.width_s)

    def of(self, kind: str) -> dict[int, array[float]]:
        """Return the means of one kind by rank."""
        return {rank: span.mean for (one, rank), span in self.ranks.items() if one == kind}


def query(
    kinds: Sequence[str],
    ids: Sequence[int] | None,
    seconds: float,
    points: int,
    *,
    window: tuple[float, float] | None = None,
    node: str | None = None,
) -> SeriesQuery:
    """Return what answers the newest seconds with at most this many buckets, as finely as there are.

    window: only this part of them, from when to when in seconds since the epoch.
    """
    length_s = seconds if window is None else window[1] - window[0]
    # Fine buckets are kept for a shorter time than coarse ones.
    level = max(level_for(length_s, points), level_for(seconds, BUCKETS))
    buckets = max(1, min(points, math.ceil(length_s / WIDTHS_S[level]) + 1))
    return SeriesQuery(kinds, ids, level, buckets, None if window is None else int(window[1] // WIDTHS_S[level]), node)


def merge(wanted: SeriesQuery, nodes: Mapping[str, Mapping[Name, Span]]) -> Series:
    """Return the spans of all nodes as one; they end with the newest bucket of any."""
    width_s, count = WIDTHS_S[wanted.level], wanted.buckets
    ends = [span.first + len(span.mean) for spans in nodes.values() for span in spans.values()]
    first = max(ends, default=count) - count
    ranks: dict[Name, Span] = {}
    others: dict[tuple[str, str, int], Span] = {}
    for node, spans in nodes.items():
        for (kind, number), span in spans.items():
            aligned = _aligned(span, first, count)
            if kind in RANK_KINDS:
                before = ranks.get((kind, number))
                # A rank may have run on several nodes, one after the other.
                ranks[kind, number] = aligned if before is None else _either(before, aligned)
            else:
                others[node, kind, number] = aligned
    return Series(width_s, first, count, ranks, others)


def trimmed(series: Series) -> Series:
    """Return the series without the buckets before the first value of any."""
    spans = [*series.ranks.values(), *series.nodes.values()]
    known = (next((at for at, value in enumerate(span.mean) if not math.isnan(value)), None) for span in spans)
    begin = min((at for at in known if at is not None), default=0)
    ranks = {name: _aligned(span, series.first + begin, series.buckets - begin) for name, span in series.ranks.items()}
    nodes = {name: _aligned(span, series.first + begin, series.buckets - begin) for name, span in series.nodes.items()}
    return Series(series.width_s, series.first + begin, series.buckets - begin, ranks, nodes)


def _aligned(span: Span, first: int, count: int) -> Span:
    late = first - span.first
    if not late and len(span.mean) == count:
        return span
    nothing = array("f", [math.nan])

    def moved(values: array[float]) -> array[float]:
        kept = nothing * -late + values if late < 0 else values[late:]
        return (kept + nothing * count)[:count]

    return Span(span.width_s, first, moved(span.low), moved(span.mean), moved(span.high))


def _either(one: Span, other: Span) -> Span:
    def known(some: Iterable[float], others: Iterable[float]) -> array[float]:
        return array("f", [b if math.isnan(a) else a for a, b in zip(some, others, strict=True)])

    return Span(one.width_s, one.first, known(one.low, other.low), known(one.mean, other.mean),
                known(one.high, other.high))  # fmt: skip


def of_histories(wanted: SeriesQuery, nodes: Mapping[str, History]) -> Series:
    """Return what the agents of these nodes would answer."""
    chosen = {name: one for name, one in nodes.items() if wanted.node in (None, name)}
    args = (wanted.kinds, wanted.ids, wanted.level, wanted.buckets, wanted.last)
    return merge(wanted, {name: one.spans(*args) for name, one in chosen.items()})


async def read(session: Hub, wanted: SeriesQuery) -> Series:
    """Ask the nodes; one that does not answer, or whose agent keeps no history, is left out. Raises Unreachable."""

    async def one(link: HostLink) -> tuple[str, Mapping[Name, Span]]:
        args = {"kinds": list(wanted.kinds), "ids": wanted.ids, "level": wanted.level, "count": wanted.buckets,
                "last": wanted.last}  # fmt: skip
        try:
            answer = await link.call("series", args, timeout_s=ANSWER_S)
        except (CallFailed, WireError, asyncio.TimeoutError):
            return link.view.name, {}
        values = iter(unpack(answer.body, answer.data["count"]))
        first, width_s = answer.data["first"], WIDTHS_S[wanted.level]
        spans = {}
        for kind, number in answer.data["series"]:
            spans[kind, number] = Span(width_s, first, next(values), next(values), next(values))
        return link.view.name, spans

    nodes = None if wanted.node is None else [wanted.node]
    return merge(wanted, dict(await asyncio.gather(*(one(link) for link in sources(session, nodes)))))
