"""The records of one file, read backwards or forwards from a time.

In: a file, a time. Out: records, each a line with the lines that continue it, and a bound of the next one's time.

A record ends before a line that continues nothing or came RECORD_GAP_NS after the one before it, and after RECORD_LIMIT
lines: what would continue it then stands alone. **So the RECORD_LIMIT lines before a line tell whether a record begins
there, and pages in either direction part the lines alike.**
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.logs.rows import RecordReader, Row
from remote_agent.logs.slices import BUDGET_S

if TYPE_CHECKING:
    from remote_agent.logs.logfile import LogFile
    from remote_agent.logs.selection import Wanted

# A file of indented lines only must not be read to its start, nor be one record.
RECORD_LIMIT = 512
# A traceback is written at once: a rank whose usual lines are indented must not wait for one that is not.
RECORD_GAP_NS = 1_000_000_000
# So many lines before a line tell whether it continues a record.
_CONTEXT = 3
_KEPT_BEHIND = 1024
# Of the block at the end of a file few lines may be wanted: twice as many each time.
_FIRST_LINES = 32


class Record(NamedTuple):
    """A line and the lines that continue it, as far as they are wanted: no rows where nothing of it is."""

    t_ns: int
    rows: list[Row]
    apart: int = 0
    """So many of its lines are left out because they are of another stream."""


class _Lines:
    """Neighbouring lines of a file, and which of them begin a record."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.begins: list[bool] = []
        self.sure = 0
        """Before this one too few lines are known to tell."""

    def prepend(self, rows: list[Row], is_first: bool) -> None:
        """Put the lines before these in front of them; is_first: there are none before those."""
        rows, self.rows, self.begins = rows + self.rows, [], []
        self._reader, self._age = RecordReader(), 0
        self.sure = 0 if is_first else min(len(rows), RECORD_LIMIT + _CONTEXT)
        self.append(rows)

    def append(self, rows: list[Row]) -> None:
        """Put the lines behind these there."""
        for row in rows:
            number = len(self.rows)
            continues = self._reader.continues(row.text) and number > 0
            continues = continues and row.t_ns - self.rows[-1].t_ns <= RECORD_GAP_NS
            self._age = self._age + 1 if continues else 0
            self.rows.append(row)
            self.begins.append(not self._age or self._age >= RECORD_LIMIT)
            if _CONTEXT <= number < self.sure and not self._age and row.text.strip():
                self.sure = number

    def last_begin(self) -> int | None:
        """Return where the last record begins; None when the lines before must tell."""
        return next((at for at in range(len(self.rows) - 1, self.sure - 1, -1) if self.begins[at]), None)

    def next_begin(self, start: int) -> int | None:
        """Return where the first record from `start` on begins."""
        return next((at for at in range(start, len(self.rows)) if self.begins[at]), None)

    def cut(self, number: int) -> list[Row]:
        """Take the lines from a number on away."""
        rows, self.rows, self.begins = self.rows[number:], self.rows[:number], self.begins[:number]
        return rows

    def forget(self, number: int) -> None:
        """Drop so many lines at the begin."""
        del self.rows[:number], self.begins[:number]
        self.sure = 0


class Records:
    """What both directions have in common."""

    def __init__(self, file: LogFile, wanted: Wanted) -> None:
        self.file = file
        self._wanted = wanted
        self._epoch = file.epoch
        self._lines = _Lines()

    def _record(self, rows: list[Row]) -> Record:
        wanted, t_ns = self._wanted, rows[0].t_ns
        if wanted.level and max(row.level for row in rows) < wanted.level:
            return Record(t_ns, [])
        kept = [row for row in rows if not wanted.is_apart(self.file, row.text)]
        if not wanted.keeps(self.file, kept):
            return Record(t_ns, [])
        return Record(t_ns, kept, len(rows) - len(kept))

    def _holds_any(self, rows: list[Row]) -> bool:
        return any(self._wanted.may_be(self.file, row) for row in rows)

    def _block(self, line: int, first: int = 0, stop: int | None = None) -> list[Row]:
        """Return the rows of the block that holds this line; none where the file has been replaced."""
        index = self.file.index
        if self.file.epoch != self._epoch or not index.first_line <= line < index.total_lines:
            return []
        return self.file.rows_of(index.block(index.blocks_of(line)), first, stop)

    def _time_of(self, line: int) -> int:
        block = self.file.index.block(self.file.index.blocks_of(line))
        return block.t_ns + line - block.line


def is_kept(file: LogFile, row: Row, wanted: Wanted) -> bool:
    """True when the record that this row is of is shown; raises Problem (pattern)."""
    record = Backwards(file, row.t_ns + 1, wanted).next()
    return record is not None and any(each.line == row.line for each in record.rows)


class Backwards(Records):
    """The records of one file that began before a time, the last one first."""

    def __init__(self, file: LogFile, before_ns: int | None, wanted: Wanted) -> None:
        super().__init__(file, wanted)
        self._before = before_ns
        self._left = file.index.total_lines if before_ns is None else file.index.lines_before(before_ns)
        """Lines [0, left) are not loaded yet."""
        # The time asked for may lie inside a record.
        self._extend = before_ns is not None
        # And what that record is wanted for may lie behind that time.
        self._inside = self._extend and self._left < file.index.total_lines
        self._at_once = _FIRST_LINES

    def bound_ns(self) -> int | None:
        """Return a time that no record is later than, without reading the file; None: there is none."""
        if not self._inside:
            self._skip()
        return self._time_of(self._left - 1) if self._left > self.file.index.first_line else None

    def next(self) -> Record | None:
        """Return the record before the one given last."""
        while True:
            begin = self._lines.last_begin()
            if begin is None:
                if not self._load():
                    return None
                continue
            record = self._record(self._lines.cut(begin))
            if self._before is None or record.t_ns < self._before:
                return record

    def _load(self) -> bool:
        """Put lines of the block before in front of the rows at hand; False at the start of the file."""
        if not self._inside and not self._holds_any(self._lines.rows) and self._skip():
            # Nor does what is at hand belong to a record that is wanted: none of the lines before it is.
            self._lines = _Lines()
        rows = self._block(self._left - 1, self._left - self._at_once, self._left)
        if not rows:
            return False
        self._left = rows[0].line
        self._at_once *= 2
        if not self._lines.rows and self._extend:
            rows = self._extended(rows)
        self._extend = self._inside = False
        self._lines.prepend(rows, self._left == self.file.index.first_line)
        return True

    def _skip(self) -> bool:
        """Pass over blocks that hold nothing that is wanted, for a slice of time; True when there were any."""
        index, start = self.file.index, self._left
        due = time.monotonic() + BUDGET_S
        while self._left > index.first_line and self.file.epoch == self._epoch and time.monotonic() < due:
            block = index.block(index.blocks_of(self._left - 1))
            if self._wanted.may_be_in(self.file, block):
                break
            self._left = block.line
            self._extend = True
        return self._left < start

    def _extended(self, rows: list[Row]) -> list[Row]:
        """Add the lines behind these that continue their last record."""
        reader = RecordReader()
        for row in rows[-_CONTEXT:]:
            reader.continues(row.text)
        known = len(rows)
        while len(rows) - known < RECORD_LIMIT:
            block = self._block(rows[-1].line + 1, rows[-1].line + 1)
            for row in block:
                if not reader.continues(row.text) or row.t_ns - rows[-1].t_ns > RECORD_GAP_NS:
                    return rows
                rows.append(row)
            if not block:
                break
        return rows


class Forwards(Records):
    """The records of one file that began at a time or later, the first one first."""

    def __init__(self, file: LogFile, after_ns: int, wanted: Wanted) -> None:
        super().__init__(file, wanted)
        self._first = self._next = file.index.lines_before(after_ns)
        """Line from which on to look."""
        if wanted.is_rare and after_ns <= (file.last_ns or 0) and self._next > file.index.first_line:
            # The record before may have gone on since, and be wanted now.
            self._next -= 1
            self._first = file.index.first_line
        self._at: int | None = None
        """Where that is in the lines at hand."""

    def bound_ns(self) -> int | None:
        """Return a time that no record is earlier than, without reading the file; None: there is none."""
        return self._time_of(self._next) if self._next < self.file.index.total_lines else None

    def next(self) -> Record | None:
        """Return the record after the one given last."""
        lines = self._lines
        if self._at is None and not self._begin():
            return None
        while True:
            begin = lines.next_begin(self._at or 0)
            end = lines.next_begin(begin + 1) if begin is not None else None
            if end is None:
                if self._skip():
                    lines = self._lines
                    if not self._begin():
                        return None
                    continue
                if self._more():
                    continue
                end = len(lines.rows)
            if begin is None:
                return None
            record = self._record(lines.rows[begin:end])
            self._at = end
            if end > _KEPT_BEHIND:
                lines.forget(end)
                self._at = 0
            return record

    def _begin(self) -> bool:
        """Load what tells where the first record begins."""
        lines = self._lines
        rows = self._block(self._next)
        while rows:
            first = rows[0].line
            lines.prepend(rows, first == self.file.index.first_line)
            at = self._next - first
            if lines.sure <= at:
                while at > max(lines.sure, self._first - first) and not lines.begins[at]:
                    # Blocks were passed over: the record that goes on here has not been given.
                    at -= 1
                self._at = at
                return True
            rows = self._block(first - 1)
        return False

    def _skip(self) -> bool:
        """Pass over such blocks for a slice of time, if what is at hand holds nothing that is wanted either."""
        lines, index = self._lines, self.file.index
        line = start = lines.rows[-1].line + 1 if lines.rows else self._next
        if self.file.epoch != self._epoch or self._holds_any(lines.rows[self._at :]):
            return False
        due = time.monotonic() + BUDGET_S
        while line < index.total_lines and time.monotonic() < due:
            block = index.block(index.blocks_of(line))
            if self._wanted.may_be_in(self.file, block):
                break
            line = block.line + block.lines
        if line == start:
            return False
        self._next, self._at, self._lines = line, None, _Lines()
        return True

    def _more(self) -> bool:
        rows = self._block(self._lines.rows[-1].line + 1) if self._lines.rows else []
        self._lines.append(rows)
        return bool(rows)
