"""The last rows of many files, merged by arrival time.

In: files, an upper time, a count. Out: rows in the order in which they came.

**A record is one unit: the lines of a traceback keep the time of its first line and are never torn.**
Rows with the time of the oldest one are all there, so that the next page is simply what came before it.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, NamedTuple

from remote_agent.logs.rows import RecordReader, Row
from remote_agent.logs.selection import BODY_LIMIT
from remote_agent.logs.slices import Breather
from remote_agent.logs.window import MAX_ROWS, index_until, row_json
from remote_agent.wire import Answer

if TYPE_CHECKING:
    from remote_agent.logs.logfile import LogFile

# A record longer than this is cut: a file of indented lines only must not be read to its start.
RECORD_LIMIT = 512
# So many lines before a line tell whether it continues a record.
_CONTEXT = 3
_INDEX_WAIT_S = 0.5


class Record(NamedTuple):
    """A line and the lines that continue it."""

    t_ns: int
    rows: list[Row]


class _Backwards:
    """The records of one file, from a time back to the start."""

    def __init__(self, file: LogFile, before_ns: int | None, level: int) -> None:
        self.file = file
        self._level = level
        self._epoch = file.epoch
        self._left = file.index.total_lines if before_ns is None else file.index.lines_before(before_ns)
        """Lines [0, left) are not loaded yet."""
        self._rows: list[Row] = []
        self._heads: list[bool] = []
        # The time asked for may lie inside a record.
        self._extend = before_ns is not None

    def next(self) -> Record | None:
        """Return the record before the one given last."""
        while True:
            start = self._last_head()
            if start is None:
                if not self._load():
                    return None
                continue
            rows, self._rows, self._heads = self._rows[start:], self._rows[:start], self._heads[:start]
            if not self._level or max(row.level for row in rows) >= self._level:
                return Record(rows[0].t_ns, rows)

    def _last_head(self) -> int | None:
        """Return where the last record begins; None when more rows are needed to tell."""
        if not self._rows:
            return None
        complete = self._left == 0
        # The first rows have too little before them to be judged.
        first = 0 if complete else _CONTEXT
        for number in range(len(self._rows) - 1, first - 1, -1):
            if self._heads[number]:
                return number
        if complete:
            return 0
        return first if len(self._rows) >= RECORD_LIMIT + _CONTEXT else None

    def _load(self) -> bool:
        """Put the block before in front of the rows at hand; False at the start of the file."""
        index = self.file.index
        if self.file.epoch != self._epoch:
            return False
        if not self._rows:
            self._skip()
        if self._left <= 0:
            return False
        block = index.block(index.blocks_of(self._left - 1))
        rows = self.file.rows_of(block, stop=self._left)
        if not rows:
            return False
        self._left = block.line
        if not self._rows and self._extend:
            rows = self._extended(rows)
        self._extend = False
        self._rows = rows + self._rows
        reader = RecordReader()
        self._heads = [not reader.continues(row.text) for row in self._rows]
        return True

    def _skip(self) -> None:
        """Pass over blocks that hold no line of the level."""
        index = self.file.index
        while self._left > 0:
            block = index.block(index.blocks_of(self._left - 1))
            if block.bits >= self._level:
                return
            self._left = block.line
            self._extend = True

    def _extended(self, rows: list[Row]) -> list[Row]:
        """Add the lines behind these that continue their last record."""
        index = self.file.index
        reader = RecordReader()
        for row in rows[-_CONTEXT:]:
            reader.continues(row.text)
        after: list[Row] = []
        line = rows[-1].line + 1
        while line < index.total_lines:
            block = self.file.rows_of(index.block(index.blocks_of(line)), line)
            for row in block:
                if not reader.continues(row.text):
                    return rows + after
                after.append(row)
                if len(after) >= RECORD_LIMIT:
                    # The rest of a record that was cut: the page after this one has given it.
                    return rows
            if not block:
                break
            line = block[-1].line + 1
        return rows + after


async def merged(files: list[LogFile], before_ns: int | None, count: int, level: int) -> Answer:
    """Return the last whole records before a time, oldest first: at least `count` rows if there are so many."""
    count = max(1, min(count, MAX_ROWS))
    breather = Breather()
    heap: list[tuple[int, int, _Backwards, Record]] = []
    complete = True
    for order, file in enumerate(files):
        complete = await index_until(file, None, _INDEX_WAIT_S) and complete
        _push(heap, -order, _Backwards(file, before_ns, level))
        await breather.breathe()
    taken: list[tuple[LogFile, Record]] = []
    lines = size = 0
    oldest: int | None = None
    while heap:
        _, order, source, record = heapq.heappop(heap)
        if (lines >= count or size >= BODY_LIMIT // 2) and record.t_ns != oldest:
            break
        record = _bounded(record)
        taken.append((source.file, record))
        oldest = record.t_ns
        lines += len(record.rows)
        size += sum(len(row.text) + 1 for row in record.rows)
        _push(heap, order, source)
        await breather.breathe()
    return _answer(taken[::-1], complete)


def _push(heap: list[tuple[int, int, _Backwards, Record]], order: int, source: _Backwards) -> None:
    record = source.next()
    if record is not None:
        heapq.heappush(heap, (-record.t_ns, order, source, record))


def _bounded(record: Record) -> Record:
    """Clip the rows of a record that is too large for one answer."""
    if sum(len(row.text) for row in record.rows) <= BODY_LIMIT // 2:
        return record
    clip = BODY_LIMIT // 2 // len(record.rows)
    return Record(record.t_ns, [row._replace(text=row.text[:clip]) for row in record.rows])


def _answer(taken: list[tuple[LogFile, Record]], complete: bool) -> Answer:
    rows: list[dict[str, Any]] = []
    texts: list[bytes] = []
    for file, record in taken:
        for row in record.rows:
            rows.append({**file.key._asdict(), **row_json(row), "t_ns": record.t_ns})
            texts.append(row.text)
    return Answer({"rows": rows, "complete": complete}, b"\n".join(texts))
