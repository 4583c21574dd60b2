"""The records of one file, read backwards or forwards from a time.

In: a file, a time. Out: records, each a line with the lines that continue it, and a bound of the next one's time.

A record ends before a line that does not continue it or that arrived RECORD_GAP_NS after the line before, and after
RECORD_LIMIT lines. **So the RECORD_LIMIT lines before a line decide whether a record begins there, and pages in both
directions group the lines alike.**
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.logs.slices import BUDGET_S
from remote_agent.text.rows import BLANK_LIMIT, RECORD_LIMIT, RecordReader, Row

if TYPE_CHECKING:
    from remote_agent.logs.logfile import LogFile
    from remote_agent.logs.selection import Wanted

# At most this many lines, the first ones loaded, leave it open whether a line continues a record.
_CONTEXT = BLANK_LIMIT + 2
_KEPT_BEHIND = 1024
# Often only a few lines at the end of a file are wanted: each step reads twice as many as the one before.
_FIRST_LINES = 32


class Record(NamedTuple):
    """A line and the lines that continue it, as far as they are wanted; no rows if the record is filtered out."""

    t_ns: int
    rows: list[Row]
    apart: int = 0
    """How many of its lines are left out because they belong to another stream."""
    line: int = 0
    """The number of its first line."""
    is_last: bool = False
    """No line follows it yet, so more lines may continue it."""


class _Lines:
    """Consecutive lines of a file, and which of them begin a record."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.begins: list[bool] = []
        self.sure = 0
        """Whether a record begins is known from this line on; before it there is too little context."""

    def prepend(self, rows: list[Row], is_first: bool) -> None:
        """Add the lines in front of these; is_first: the file begins with them."""
        rows, self.rows, self.begins = rows + self.rows, [], []
        self._reader = RecordReader()
        self.sure = 0 if is_first else min(len(rows), RECORD_LIMIT + _CONTEXT)
        self.append(rows)

    def append(self, rows: list[Row]) -> None:
        """Add the lines behind these."""
        for row in rows:
            number = len(self.rows)
            self.rows.append(row)
            self.begins.append(self._reader.begins(row.text, row.t_ns))
            if 0 < number < self.sure and not self._reader.age and self._reader.is_sure:
                self.sure = number

    def last_begin(self) -> int | None:
        """Return where the last record begins; None when more context is needed."""
        return next((at for at in range(len(self.rows) - 1, self.sure - 1, -1) if self.begins[at]), None)

    def next_begin(self, start: int) -> int | None:
        """Return where the first record from `start` on begins, or None."""
        try:
            return self.begins.index(True, start)
        except ValueError:
            return None

    def cut(self, number: int) -> list[Row]:
        """Remove and return the lines from this one on."""
        rows, self.rows, self.begins = self.rows[number:], self.rows[:number], self.begins[:number]
        return rows

    def forget(self, number: int) -> None:
        """Drop this many lines at the beginning."""
        del self.rows[:number], self.begins[:number]
        self.sure = 0


class Records:
    """Records of one file; the base of both directions."""

    def __init__(self, file: LogFile, wanted: Wanted) -> None:
        self.file = file
        self._wanted = wanted
        self._epoch = file.epoch
        self._lines = _Lines()

    def _record(self, rows: list[Row], is_last: bool = False) -> Record:
        wanted, t_ns, line = self._wanted, rows[0].t_ns, rows[0].line
        if wanted.level and max(row.level for row in rows) < wanted.level:
            return Record(t_ns, [], 0, line, is_last)
        kept = wanted.of_streams(self.file, rows)
        if not wanted.keeps(self.file, kept):
            return Record(t_ns, [], 0, line, is_last)
        return Record(t_ns, kept, len(rows) - len(kept), line, is_last)

    def _holds_any(self, rows: list[Row]) -> bool:
        return any(self._wanted.may_be(self.file, row) for row in rows)

    def _block(self, line: int, first: int = 0, stop: int | None = None) -> list[Row]:
        """Return the rows of the block that holds this line; none if the file was replaced."""
        index = self.file.index
        if self.file.epoch != self._epoch or not index.first_line <= line < index.total_lines:
            return []
        return self.file.rows_of(index.block(index.blocks_of(line)), first, stop)

    def _time_of(self, line: int) -> int:
        return self.file.index.time_of(line)


def is_kept(file: LogFile, row: Row, wanted: Wanted) -> bool:
    """Return whether the record of this row passes the filter; raises Problem (pattern)."""
    record = Backwards(file, row.t_ns + 1, wanted).next()
    return record is not None and any(each.line == row.line for each in record.rows)


class Backwards(Records):
    """The records of one file that began before a time, last to first."""

    def __init__(self, file: LogFile, before_ns: int | None, wanted: Wanted) -> None:
        super().__init__(file, wanted)
        self._before = before_ns
        self._left = file.index.total_lines if before_ns is None else file.index.lines_before(before_ns)
        """Lines [0, left) are not loaded yet."""
        # The time asked for may lie inside a record: its rest is loaded once it is known where the record begins.
        self._extend = before_ns is not None
        # The line for which that record is wanted may lie behind that time.
        self._inside = self._extend and self._left < file.index.total_lines
        self._at_once = _FIRST_LINES

    def bound_ns(self) -> int | None:
        """Return an upper bound of the next record's time without reading the file; None: no record is left."""
        if not self._inside:
            self._skip()
        return self._time_of(self._left - 1) if self._left > self.file.index.first_line else None

    def next(self) -> Record | None:
        """Return the next earlier record, or None."""
        while True:
            begin = None if self._extend else self._lines.last_begin()
            if begin is None:
                if not self._load():
                    return None
                continue
            record = self._record(self._lines.cut(begin))
            if self._before is None or record.t_ns < self._before:
                return record

    def _load(self) -> bool:
        """Load lines in front of the loaded ones; returns False at the start of the file."""
        lines = self._lines
        may_skip = not (self._extend or self._holds_any(lines.rows)) if lines.rows else not self._inside
        if may_skip and self._skip():
            # The loaded lines belong to no wanted record, and blocks were skipped.
            lines = self._lines = _Lines()
        rows = self._block(self._left - 1, self._left - self._at_once, self._left)
        if not rows:
            return False
        self._left = rows[0].line
        self._at_once *= 2
        self._inside = False
        lines.prepend(rows, self._left == self.file.index.first_line)
        if self._extend and lines.sure < len(lines.rows):
            self._extend = False
            self._load_rest()
        return True

    def _skip(self) -> bool:
        """Skip blocks without wanted lines, for a slice of time; returns True when some were skipped."""
        index, start = self.file.index, self._left
        due = time.monotonic() + BUDGET_S
        while self._left > index.first_line and self.file.epoch == self._epoch and time.monotonic() < due:
            block = index.block(index.blocks_of(self._left - 1))
            if self._wanted.may_be_in(self.file, block):
                break
            self._left = block.line
            self._extend = True
        return self._left < start

    def _load_rest(self) -> None:
        """Load the lines behind the loaded ones that continue their last record."""
        lines = self._lines
        while rows := self._block(lines.rows[-1].line + 1, lines.rows[-1].line + 1):
            for row in rows:
                lines.append([row])
                if lines.begins[-1]:
                    lines.cut(len(lines.rows) - 1)
                    return


class Forwards(Records):
    """The records of one file that began at a time or later, first to last; lines from `stop` on are not read."""

    def __init__(self, file: LogFile, after_ns: int, wanted: Wanted, stop: int | None = None) -> None:
        super().__init__(file, wanted)
        self._stop = stop
        self._first = self._next = file.index.lines_before(after_ns)
        """The first line that a record may begin with."""
        if wanted.is_rare and after_ns <= (file.last_ns or 0) and self._next > file.index.first_line:
            # The record before may have grown since then, and be wanted now.
            self._next -= 1
            self._first = file.index.first_line
        self._at: int | None = None
        """The position of the next record in the loaded lines."""

    def bound_ns(self) -> int | None:
        """Return a lower bound of the next record's time without reading the file; None: no record is left."""
        return self._time_of(self._next) if self._next < self.file.index.total_lines else None

    def _block(self, line: int, first: int = 0, stop: int | None = None) -> list[Row]:
        if self._stop is not None and line >= self._stop:
            return []
        return super()._block(line, first, self._stop if stop is None else stop)

    def next(self) -> Record | None:
        """Return the next record, or None."""
        lines = self._lines
        if self._at is None and not self._begin():
            return None
        while True:
            begin = lines.next_begin(self._at or 0)
            end = lines.next_begin(begin + 1) if begin is not None else None
            is_last = end is None
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
            record = self._record(lines.rows[begin:end], is_last)
            self._at = end
            if end > _KEPT_BEHIND:
                lines.forget(end)
                self._at = 0
            return record

    def _begin(self) -> bool:
        """Load enough lines to know where the first record begins; returns False if there are none."""
        lines = self._lines
        rows = self._block(self._next)
        while rows:
            first = rows[0].line
            lines.prepend(rows, first == self.file.index.first_line)
            at = self._next - first
            if lines.sure <= at:
                while at > max(lines.sure, self._first - first) and not lines.begins[at]:
                    # Blocks were skipped: the record that continues here has not been returned.
                    at -= 1
                self._at = at
                return True
            rows = self._block(first - 1)
        return False

    def _skip(self) -> bool:
        """Skip such blocks for a slice of time, unless wanted lines are loaded; returns True when some were skipped."""
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
        if not self._lines.rows:
            return False
        line = self._lines.rows[-1].line + 1
        # Reading starts at this line, not at the block's first one, because the block may have grown meanwhile.
        rows = self._block(line, line)
        self._lines.append(rows)
        return bool(rows)
