"""Rows of many files, merged by time of arrival: the last before a time, or the first from a time on.

In: files, a time, a count. Out: rows by time; whether there are more.

**A record is one unit: the lines of a traceback have the time of its first line and are never separated.** All rows
with the time of the outermost row are included, so that the next page is what lies beyond it. If rows are rare, an
answer contains those found within a time limit, and states how far the search got.
"""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING, Protocol, TypeVar, Union

from remote_agent.logs.index import MARK_GAP_NS
from remote_agent.logs.records import Backwards, Forwards, Record
from remote_agent.logs.selection import BODY_LIMIT
from remote_agent.logs.slices import TimeSlice, index_until
from remote_agent.text.levels import LETTERS
from remote_agent.wire import Answer
from remote_agent.wire.answers import MAX_ROWS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from remote_agent.logs.logfile import LogFile
    from remote_agent.logs.selection import Wanted
    from remote_agent.text.rows import Row
    from remote_agent.wire.answers import LogEntry, LogPage

_INDEX_WAIT_S = 0.5
# A search for rare rows takes at most this long from its first step on.
_LOOK_S = 0.5
_LATEST_NS = 2**63 - 1

_Source = Union[Backwards, Forwards]


class Timed(Protocol):
    """What has a place in time: a record, or a piece."""

    @property
    def t_ns(self) -> int:
        """Return the time it is sorted by."""
        ...


Item = TypeVar("Item", bound=Timed, covariant=True)


class Source(Protocol[Item]):
    """What gives the items of one file by time."""

    file: LogFile

    def bound_ns(self) -> int | None:
        """Return a lower bound of the next item's time; None: there is none."""
        ...

    def next(self) -> Item | None:
        """Return the next item, or None."""
        ...


class _Heap:
    """Records of all files, the next one on top. A file whose next record is not needed yet has only a bound."""

    def __init__(self, files: list[LogFile], before_ns: int | None, after_ns: int | None, wanted: Wanted) -> None:
        self._files = files
        self._before_ns, self._after_ns, self._wanted = before_ns, after_ns, wanted
        self._heap: list[tuple[int, int, _Source | None, Record | None]] = []
        self.complete = True

    async def fill(self) -> None:
        """Add the bound of each file, without reading it."""
        time_slice = TimeSlice()
        for number, file in enumerate(self._files):
            await index_until(file, 0.0)
            if file.behind:
                # Bytes that are not indexed may come next.
                edge = self._after_ns if self._after_ns is not None else self._before_ns or _LATEST_NS
                self._put(number, None, None, edge)
            else:
                source = self._source(file)
                self._put(number, source, None, source.bound_ns())
            await time_slice.pause_if_over()

    def top_ns(self) -> int | None:
        """Return a lower bound of the times of all records left (backwards: an upper bound)."""
        return abs(self._heap[0][0]) if self._heap else None

    async def pop(self) -> tuple[LogFile, Record] | None:
        """Remove and return the record on top; None if there was only a bound."""
        _, order, source, record = heapq.heappop(self._heap)
        file = self._files[abs(order)]
        if source is None:
            self.complete = await index_until(file, _INDEX_WAIT_S) and self.complete
            source = self._source(file)
        following = source.next()
        if following is not None:
            self._put(abs(order), source, following, following.t_ns)
        return (file, record) if record is not None else None

    def _source(self, file: LogFile) -> _Source:
        if self._after_ns is not None:
            return Forwards(file, self._after_ns, self._wanted)
        return Backwards(file, self._before_ns, self._wanted)

    def _put(self, number: int, source: _Source | None, record: Record | None, t_ns: int | None) -> None:
        if t_ns is not None:
            sign = 1 if self._after_ns is not None else -1
            heapq.heappush(self._heap, (sign * t_ns, sign * number, source, record))


async def in_order(sources: Sequence[Source[Item]]) -> AsyncGenerator[tuple[LogFile, Item], None]:
    """Yield the items of all sources by time; some records have no rows."""
    time_slice = TimeSlice()
    heap: list[tuple[int, int, Item | None]] = []
    for number, source in enumerate(sources):
        bound_ns = source.bound_ns()
        if bound_ns is not None:
            heap.append((bound_ns, number, None))
    heapq.heapify(heap)
    while heap:
        _, number, item = heap[0]
        if item is not None:
            yield sources[number].file, item
        following = sources[number].next()
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (following.t_ns, number, following))
        if time_slice.is_over():
            await time_slice.pause_if_over()


async def merged(
    files: list[LogFile],
    before_ns: int | None,
    after_ns: int | None,
    count: int,
    wanted: Wanted,
) -> Answer:
    """Return whole records next to a time, oldest first: at least `count` rows if they exist and time allows.

    The answer contains all wanted rows from its since_ns on and before its until_ns.
    """
    count = max(1, min(count, MAX_ROWS))
    time_slice = TimeSlice()
    after_ns = None if after_ns is None else max(0, after_ns)
    # Bytes that are read later have no earlier time than this.
    newest_ns = time.time_ns() - MARK_GAP_NS
    heap = _Heap(files, before_ns, after_ns, wanted)
    await heap.fill()
    patience = _Patience(heap.top_ns(), after_ns) if wanted.is_rare else None
    taken: list[tuple[LogFile, Record]] = []
    lines = size = apart = 0
    while (next_ns := heap.top_ns()) is not None:
        if (lines >= count or size >= BODY_LIMIT // 2) and next_ns != taken[-1][1].t_ns:
            break
        if patience is not None and patience.is_over(next_ns):
            break
        item = await heap.pop()
        if item is not None:
            file, record = item[0], _bounded(item[1])
            apart += record.apart
            size += sum(len(row.text) + 1 for row in record.rows)
            if record.rows:
                taken.append((file, record))
                lines += len(record.rows) if record.t_ns >= (after_ns or 0) else 0
        await time_slice.pause_if_over()
    data: LogPage = {"complete": heap.complete, "more": next_ns is not None, "apart": apart}
    if len(files) == 1 and not files[0].behind:
        data["lines"] = files[0].index.total_lines
    if after_ns is not None:
        # The record of each file that was being written at that time comes first, and began earlier.
        taken.sort(key=lambda item: item[1].t_ns)
        data["since_ns"], data["until_ns"] = after_ns, newest_ns if next_ns is None else next_ns
        return _answer(taken, data)
    data["since_ns"] = 0 if next_ns is None else next_ns + 1
    data["until_ns"] = newest_ns if before_ns is None else before_ns
    return _answer(taken[::-1], data)


def entry_of(file: LogFile, row: Row, t_ns: int) -> LogEntry:
    """Return the wire form of a row, without its text; t_ns: the time that orders it."""
    generation, rank, stream = file.key
    entry: LogEntry = {
        "generation": generation,
        "rank": rank,
        "stream": stream,
        "line": row.line,
        "offset": row.offset,
        "t_ns": t_ns,
        "level": LETTERS[row.level],
    }
    if row.cut:
        entry["cut"] = row.cut
    return entry


class _Patience:
    """The time limit of one answer; it begins with the first step, so that each answer gets further."""

    def __init__(self, top_ns: int | None, after_ns: int | None) -> None:
        self._forwards = after_ns is not None
        self._begun_ns = max(top_ns or 0, after_ns or 0)
        self._until: float | None = None

    def is_over(self, top_ns: int) -> bool:
        """Return whether the time is up; top_ns: where the next record may be."""
        if self._until is None and (top_ns > self._begun_ns if self._forwards else top_ns < self._begun_ns):
            self._until = time.monotonic() + _LOOK_S
        return self._until is not None and time.monotonic() > self._until


def _bounded(record: Record) -> Record:
    """Clip the rows of a record that is too large for an answer."""
    if sum(len(row.text) for row in record.rows) <= BODY_LIMIT // 2:
        return record
    clip = BODY_LIMIT // 2 // len(record.rows)
    return Record(record.t_ns, [row._replace(text=row.text[:clip]) for row in record.rows])


def _answer(taken: list[tuple[LogFile, Record]], data: LogPage) -> Answer:
    rows = data["rows"] = []
    texts: list[bytes] = []
    for file, record in taken:
        for row in record.rows:
            rows.append(entry_of(file, row, record.t_ns))
            if row.offset >= file.index.line_start:
                rows[-1]["half"] = True
            texts.append(row.text)
    return Answer(data, b"\n".join(texts))
