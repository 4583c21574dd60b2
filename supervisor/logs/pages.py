"""Pages: rows of all nodes in the order of their times, next to a time.

In: answers to log_merged, and to log_rows, of the nodes that hold the files. Out: pages.

Rows of one time are never separated: what lies beyond the outermost row is the next page.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from contextlib import aclosing
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.text.rows import RECORD_LIMIT
from supervisor.errors import RequestFailed, Unreachable
from supervisor.logs.files import (
    READ_DEADLINE,
    Failure,
    ask,
    files,
    is_own,
    leave_out,
    lost,
    newest,
    operator_errors,
    sources,
)
from supervisor.logs.rows import Clocks, LineKey, LogLine

if TYPE_CHECKING:
    from remote_agent.wire import Answer, Args
    from remote_agent.wire.answers import LogPage
    from supervisor.link.host_link import HostLink
    from supervisor.link.hub import Hub
    from supervisor.logs.selection import Selection

# One node's rows are awaited at most this long where those of the others are wanted without them, seconds.
PATIENCE = 2.5
# Of many nodes each is asked for its share of a page, a few times over as some print more than others, and for so many
# rows at least.
SHARES, LEAST_ROWS = 4, 32


class Page(NamedTuple):
    """Rows of all nodes by time, oldest first, without gaps between the first and the last one."""

    rows: list[LogLine]
    more: bool
    """There are rows beyond the outermost one."""
    absent: list[str]
    """Nodes whose rows are missing: they are unreachable or did not answer in time."""
    clocks: Clocks
    """The clocks by which the times were converted; the next page is requested with the same ones."""
    apart: int = 0
    """How many lines were left out because they belong to a stream that was not asked for."""
    since_ns: int = 0
    until_ns: int | None = None
    """All wanted rows between these times are here; None: unknown."""
    lines: int | None = None
    """How many lines the file has, of a page of one file; None: unknown."""


class Part(NamedTuple):
    """The answer of one node: all rows from since_ns on and before until_ns (None: unknown)."""

    rows: list[LogLine]
    more: bool
    apart: int
    since_ns: int
    until_ns: int | None
    lines: int | None


Joined = tuple[list[LogLine], bool, int, "int | None"]


def part_of(clocks: Clocks, name: str, answer: Answer) -> Part:
    """Return the part of a page that a node answered, with times of the coordinator's clock; raises KeyError."""
    data: LogPage = answer.data
    more, since_ns, until_ns = data.get("more", False), data["since_ns"], data["until_ns"]
    if since_ns is None or until_ns is None:
        raise KeyError("since_ns")
    since_ns, until_ns = since_ns - clocks.ahead_ns(name), until_ns - clocks.ahead_ns(name)
    # Rows of a file that existed before its agent have early times, and may not be indexed yet.
    known = more or data.get("complete", True)
    bounds = (since_ns, until_ns if known else None)
    return Part(clocks.rows(name, answer), more, data.get("apart", 0), *bounds, data.get("lines"))


def rows_from(parts: list[Part], count: int, after_ns: int) -> Joined:
    """Return about the first `count` rows from a time on, and all rows of the parts before that time."""
    edge_ns = min((part.until_ns for part in parts if part.more and part.until_ns is not None), default=None)
    whole = [row for row in _by_time(parts) if edge_ns is None or row.t_ns < edge_ns]
    begin = bisect_left(whole, after_ns, key=lambda row: row.t_ns)
    end = min(begin + count, len(whole))
    while begin < end < len(whole) and whole[end - 1].t_ns == whole[end].t_ns:
        end += 1
    if end < len(whole):
        return whole[:end], True, after_ns, whole[end].t_ns
    return whole, edge_ns is not None, after_ns, _newest(parts)


def rows_before(parts: list[Part], count: int) -> Joined:
    """Return about the last `count` rows."""
    edge_ns = max((part.since_ns for part in parts if part.more), default=0)
    whole = [row for row in _by_time(parts) if row.t_ns >= edge_ns]
    start = max(0, len(whole) - count)
    while 0 < start < len(whole) and whole[start - 1].t_ns == whole[start].t_ns:
        start -= 1
    since_ns = whole[start].t_ns if start else edge_ns
    return whole[start:], bool(edge_ns) or start > 0, since_ns, _newest(parts)


def _by_time(parts: list[Part]) -> list[LogLine]:
    return sorted(chain.from_iterable(part.rows for part in parts), key=lambda row: row.t_ns)


def _newest(parts: list[Part]) -> int | None:
    known = [part.until_ns for part in parts if part.until_ns is not None]
    return min(known) if len(known) == len(parts) else None


async def merged(
    session: Hub,
    selection: Selection,
    count: int,
    *,
    before_ns: int | None = None,
    after_ns: int | None = None,
    clocks: Clocks | None = None,
    patience_s: float | None = None,
) -> Page:
    """Return about the last `count` rows of all nodes before a time, or the first ones from a time on.

    Rows of one time are never separated: what lies beyond the outermost row is the next page. With a filter there may
    be fewer rows than exist, or none, and from a time on also the last ones before it. `patience_s`: nodes that have
    not answered by then are left out. Raises Unreachable, RequestFailed.
    """
    names = [link.view.name for link in sources(session, selection.nodes)]
    share = max(LEAST_ROWS, SHARES * count // max(1, len(names)))
    args = {**selection.args(), **selection.filter.args(), "count": min(count, share)}
    if selection.generation is None:
        args["generation"] = newest(await files(session, selection.nodes))
    clocks = clocks or Clocks(session)

    async def one(name: str) -> Part | Failure:
        times: Args = {"before_ns": clocks.at(name, before_ns), "after_ns": clocks.at(name, after_ns)}
        try:
            answer = await ask(session, name, "log_merged", {**args, **times}, patience_s or READ_DEADLINE)
        except (Unreachable, RequestFailed) as error:
            if is_own(error):
                return error
            raise
        try:
            return part_of(clocks, name, answer)
        except KeyError as missing:
            message = f"{name}: the job was started by another supervisor: its agent does not send {missing}"
            raise RequestFailed(message, "use the one that started it", "version") from missing

    answers = dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))
    failed = {name: answer for name, answer in answers.items() if not isinstance(answer, Part)}
    if patience_s is None or len(failed) == len(answers):
        leave_out(session, failed, len(answers))
    parts = [answer for answer in answers.values() if isinstance(answer, Part)]
    rows, more, since_ns, until_ns = (
        rows_from(parts, count, after_ns) if after_ns is not None else rows_before(parts, count)
    )
    absent = sorted([*failed, *lost(session, selection.nodes)])
    lines = max((part.lines for part in parts if part.lines is not None), default=None)
    return Page(rows, more, absent, clocks, sum(part.apart for part in parts), since_ns, until_ns, lines)


# Other files begin where they end.
_NEVER_NS = 1 << 62


async def from_line(session: Hub, selection: Selection, key: LineKey, count: int) -> Page:
    """Return `count` rows of one file around a line, known by its number: a third of them before it.

    There are none if the file has no such line. Raises Unreachable, RequestFailed.
    """
    generation, rank, stream, line = key
    links, clocks = sources(session, selection.nodes), Clocks(session)
    args = {**selection.args(), "generation": generation, "ranks": [rank], "since_ns": _NEVER_NS, "past": True}

    async def of_node(link: HostLink, first: int, many: int) -> list[LogLine] | Failure:
        # An agent of an earlier version may refuse an argument that it does not know.
        limit = {"count": many} if link.is_ours else {}
        asked = {**args, **limit, "after": [[generation, rank, stream, first]]}
        try:
            return await _first_rows(link, asked, many, clocks)
        except (Unreachable, RequestFailed) as error:
            if is_own(error):
                return error
            raise

    async def after(before: int) -> list[LogLine]:
        first, many = max(0, line - before), before + count - count // 3
        answers = await asyncio.gather(*(of_node(link, first, many) for link in links))
        failed = [answer for answer in answers if not isinstance(answer, list)]
        if len(failed) == len(links):
            raise failed[0]
        found = max((answer for answer in answers if isinstance(answer, list)), key=len)
        # From a place behind its end, a file is read from its beginning.
        return [row for row in found if row.key[:3] == key[:3] and row.line >= first]

    rows = await after(count // 3)
    if not rows or rows[0].line > line:
        # A record that begins before the first row is left out: a long one may have the line.
        rows = await after(count // 3 + RECORD_LIMIT)
    return Page(rows, True, lost(session, selection.nodes), clocks)


async def _first_rows(link: HostLink, args: Args, count: int, clocks: Clocks) -> list[LogLine]:
    """Return the first rows of a node; an agent of an earlier version has to be told when they are enough."""
    name, rows = link.view.name, []
    with operator_errors(name):
        async with aclosing(link.whole_stream("log_rows", args, timeout_s=PATIENCE)) as answers:
            async for answer in answers:
                rows += clocks.rows(name, answer)
                if len(rows) >= count:
                    break
    return rows[:count]
