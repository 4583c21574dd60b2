"""The history of a job as one picture: the series of all nodes, bucket by bucket.

In: the answers of the nodes' agents. Out: `Series`.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.history.pyramid import BUCKETS, WIDTHS_S, Name, Span, unpack
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
    """The newest ones of the level, at most so many."""
    nodes: Sequence[str] | None = None
    """The nodes that are asked; None: all."""


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
    kinds: Sequence[str], ids: Sequence[int] | None, seconds: float, points: int, nodes: Sequence[str] | None = None
) -> SeriesQuery:
    """Return what answers the newest seconds with at most this many buckets, as finely as there are."""
    # The finest level that covers the span.
    most = max(1, min(points, BUCKETS))
    level = next((level for level, width in enumerate(WIDTHS_S) if seconds <= width * most), len(WIDTHS_S) - 1)
    buckets = max(1, min(points, BUCKETS, math.ceil(seconds / WIDTHS_S[level]) + 1))
    return SeriesQuery(kinds, ids, level, buckets, nodes)


def merge(wanted: SeriesQuery, nodes: Mapping[str, Mapping[Name, Span]]) -> Series:
    """Return the spans of all nodes as one, from the first value of any to the newest bucket of any."""
    width_s = WIDTHS_S[wanted.level]
    found = [span for spans in nodes.values() for span in spans.values()]
    end = max((span.first + len(span.mean) for span in found), default=0)
    first = max(end - wanted.buckets, min((end - 1, *map(_begin, found))))
    count = end - first
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


def _begin(span: Span) -> int:
    """Return the number of the first bucket that has a value, or of the one after the last."""
    numbered = enumerate(span.mean, span.first)
    return next((number for number, value in numbered if not math.isnan(value)), span.first + len(span.mean))


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


async def read(session: Hub, wanted: SeriesQuery) -> Series:
    """Ask the nodes; one that does not answer, or whose agent keeps no history, is left out. Raises Unreachable."""

    async def one(link: HostLink) -> tuple[str, Mapping[Name, Span]]:
        args = {"kinds": list(wanted.kinds), "ids": wanted.ids, "level": wanted.level, "count": wanted.buckets}
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

    nodes = None if wanted.nodes is None else list(wanted.nodes)
    return merge(wanted, dict(await asyncio.gather(*(one(link) for link in sources(session, nodes)))))
