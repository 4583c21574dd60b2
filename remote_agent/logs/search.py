"""Search in whole files on the node: only hits are sent.

In: a file, a pattern, a least level. Out: its hits; batches of rows.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.logs.index import after_newlines
from remote_agent.logs.logfile import SLICE
from remote_agent.logs.merge import entry_of
from remote_agent.logs.records import Record, is_kept
from remote_agent.text.levels import level_of
from remote_agent.text.patterns import LINE_S, TooLong, within
from remote_agent.text.rows import CLIP, Row, visible, without_escapes
from remote_agent.wire import Answer, Problem

if TYPE_CHECKING:
    import re

    from remote_agent.logs.logfile import LogFile
    from remote_agent.logs.selection import Wanted
    from remote_agent.text.patterns import Pattern
    from remote_agent.wire.answers import LogEntry

_BATCH_ROWS = 256
_BATCH_BYTES = 512 * 1024
_BATCH_S = 0.2
# An empty batch is sent this often to show that the search continues.
_ALIVE_S = 10.0
# The event loop gets a turn after this many lines while nothing is found.
_LINES_PER_TURN = 64
# The event loop also gets a turn after this time, if a pattern is slow.
_TURN_S = 0.005
# It also gets a turn after this many lines in skipped blocks, about 2 ms.
_LINES_PASSED = 256 * 1024

PIECE = 256 * 1024
# An escape code that lies across two pieces has at most this length.
_ESCAPE = 256
# `$` matches before a newline at the end of the text: two newlines prevent a match at the end of a piece.
_NO_END = b"\n\n"


class _Window:
    """The part of the text in which a match may still begin."""

    def __init__(self, pattern: Pattern) -> None:
        self.has_match = False
        self._pattern = pattern
        self._text = b""
        self._gone = 0
        """Bytes before this text. Its first byte is kept only as context for lookbehinds."""
        self._doubtful = -1
        """The place where a match begins that may exist only because its piece ended there."""

    def take(self, more: bytes, is_last: bool) -> None:
        """Search the next piece; raises TooLong."""
        if self.has_match:
            return
        self._text += more
        match = self._search(is_last)
        keep = max(0, len(self._text) - CLIP)
        if match is not None:
            at = self._gone + match.start()
            if is_last or match.end() < len(self._text) or at == self._doubtful:
                self.has_match = True
                return
            self._doubtful = at
            keep = min(keep, max(0, match.start() - 1))
        self._gone += keep
        self._text = self._text[keep:]

    def _search(self, is_last: bool) -> re.Match[bytes] | None:
        if self._pattern.where(self._text) is None:
            return None
        text = self._text if is_last else self._text + _NO_END
        return within(LINE_S, partial(self._pattern.regex.search, text, 1 if self._gone else 0))


def is_in_line(file: LogFile, start: int, end: int, pattern: Pattern) -> Generator[None, None, bool]:
    """Return whether a line of any length, in these bytes, has a match; yields between slices of work.

    Raises TooLong.
    """
    tail = file.pread(max(start, end - CLIP), min(end - start, CLIP))
    end -= len(tail) - len(tail.rstrip(b"\r"))
    window, rest = _Window(pattern), b""
    while start < end:
        data = file.pread(start, min(PIECE, end - start))
        if not data:
            break
        start += len(data)
        data = rest + data
        begin = data.rfind(b"\r") + 1
        if begin:
            # A progress bar: a terminal shows only what follows the last carriage return.
            window = _Window(pattern)
        cut = data.rfind(b"\x1b", max(begin, len(data) - _ESCAPE)) if start < end else -1
        cut = len(data) if cut < 0 else cut
        window.take(without_escapes(data[begin:cut]), start >= end)
        rest = data[cut:]
        yield
    return window.has_match


class Query(NamedTuple):
    """What to search for: lines, only in records that pass `shown`."""

    pattern: Pattern
    wanted: Wanted
    shown: Wanted | None = None

    def shows(self, file: LogFile, row: Row) -> bool:
        """Return whether the record of this row passes `shown`."""
        return self.shown is None or is_kept(file, row, self.shown)


class _Run(NamedTuple):
    """Consecutive blocks to search: bytes [offset, end), which begin with line `line`."""

    line: int
    offset: int
    end: int


class Batch:
    """Rows to be sent."""

    def __init__(self) -> None:
        self.rows: list[LogEntry] = []
        self.texts: list[bytes] = []
        self.size = 0
        self._since = time.monotonic()
        self._waited_for = True
        """No row has been sent: the first hit is sent at once."""

    def add(self, file: LogFile, row: Row, t_ns: int) -> None:
        """Add a row with the time that orders it."""
        self.rows.append(entry_of(file, row, t_ns))
        self.texts.append(row.text)
        self.size += len(row.text)

    def is_due(self) -> bool:
        """Return whether the batch is to be sent."""
        full = len(self.rows) >= _BATCH_ROWS or self.size >= _BATCH_BYTES or (self._waited_for and self.rows)
        return bool(full) or time.monotonic() - self._since >= (_BATCH_S if self.rows else _ALIVE_S)

    def take(self, **more: object) -> Answer:
        """Return the batch as an answer, and begin the next one."""
        answer = Answer({"rows": self.rows, **more}, b"\n".join(self.texts))
        self._waited_for = self._waited_for and not self.rows
        self.rows, self.texts, self.size, self._since = [], [], 0, time.monotonic()
        return answer


class Hits:
    """The hits of one file from a line on and before `stop`, each as a record of one line."""

    def __init__(self, file: LogFile, query: Query, first: int, stop: int) -> None:
        self.file = file
        self._query = query
        self._stop = stop
        self._apart = 0
        """Rows that match but belong to a stream that was not asked for, since the last record."""
        self._rows = self._found(first)
        self._t_ns = file.index.time_of(first)

    def bound_ns(self) -> int | None:
        """Return a time that no hit is earlier than."""
        return self._t_ns

    def next(self) -> Record | None:
        """Return the next hit, or a record without rows after a slice of work."""
        try:
            row = next(self._rows)
        except StopIteration:
            return None
        if row is not None and row.line >= self._stop:
            return None
        self._t_ns = self._t_ns if row is None else row.t_ns
        apart, self._apart = self._apart, 0
        return Record(self._t_ns, [] if row is None else [row], apart)

    def _found(self, first: int) -> Iterator[Row | None]:
        """Yield the hits from line `first` on; None between slices of work."""
        file, query, epoch = self.file, self._query, self.file.epoch
        for run in _runs(file, query, first):
            if run is None:
                yield None
                continue
            lost = run.offset < file.dropped
            # The line for dropped bytes is always a hit: what they held is unknown.
            rows: Iterable[Row | None] = file.rows_of(file.index.block(0)) if lost else _hits(file, run, query)
            for row in rows:
                if file.epoch != epoch:
                    return
                if row is None or row.line < first or not query.shows(file, row):
                    yield None
                elif not lost and query.wanted.is_apart(file, row.text):
                    self._apart += 1
                    yield None
                else:
                    yield row


def _runs(file: LogFile, query: Query, line: int) -> Iterator[_Run | None]:
    """Yield the runs from a line on that may hold hits, as the index is now; None between slices of work."""
    index = file.index
    stop = index.total_lines
    run: _Run | None = None
    rest = line + _LINES_PASSED
    while line < stop:
        # The block is found by its line, as blocks may be joined or dropped between two turns.
        number = index.next_of_level(max(0, index.blocks_of(line)), query.wanted.level)
        if number == len(index):
            break
        block = index.block(number)
        line = block.line + block.lines
        if not query.wanted.may_be_in(file, block):
            if run is not None or line >= rest:
                rest = line + _LINES_PASSED
                yield run
            run = None
        elif run is not None and run.offset >= file.dropped and run.end == block.offset < run.offset + SLICE:
            run = run._replace(end=block.end)
        else:
            if run is not None:
                yield run
            run = _Run(block.line, block.offset, block.end)
    if run is not None:
        yield run


def _hits(file: LogFile, run: _Run, query: Query) -> Iterator[Row | None]:
    """Yield the matching rows of one run; None between slices of work."""
    line, offset = run.line, run.offset
    due = time.monotonic() + _TURN_S
    while file.dropped <= offset < run.end:
        data = file.pread(offset, min(run.end - offset, SLICE + CLIP))
        if not data:
            return
        whole = data.rfind(b"\n") + 1
        if not whole and offset + len(data) < run.end:
            # One line is longer than all that was read.
            end = _line_end(file, offset + len(data), run.end)
            while isinstance(end, _Further):
                yield None
                end = _line_end(file, end.offset, run.end)
            yield (yield from _long_row(file, query, line, offset, end))
            line, offset = line + 1, end + 1
            continue
        if offset + len(data) < run.end:
            data = data[:whole]
        for start, end, number in _candidates(data, query.pattern, line):
            if end - start > CLIP:
                row = yield from _long_row(file, query, number, offset + start, offset + end)
            else:
                row = _row(file, query, number, offset + start, data[start:end])
            if row is not None or number % _LINES_PER_TURN == 0 or time.monotonic() > due:
                yield row
                due = time.monotonic() + _TURN_S
        offset += len(data)
        if offset < run.end:
            line += data.count(b"\n")
        yield None


class _Further(NamedTuple):
    offset: int


def _line_end(file: LogFile, offset: int, limit: int) -> int | _Further:
    """Return where the line at this offset ends, or where to continue the search for its end."""
    data = file.pread(offset, min(SLICE * 4, limit - offset))
    newline = data.find(b"\n")
    if newline >= 0:
        return offset + newline
    return _Further(offset + len(data)) if data and offset + len(data) < limit else limit


def _row(file: LogFile, query: Query, line: int, start: int, raw: bytes) -> Row | None:
    """Return the row if it is a hit."""
    text = visible(raw)
    # A plain literal has matched already, unless it stands in a part of the line that is not visible.
    is_sure = query.pattern.plain and len(text) == len(raw) and b"\x1b" not in raw
    try:
        if not is_sure and not query.pattern.matches(text):
            return None
    except TooLong:
        raise _too_long(file, line) from None
    return _timed(file, query, line, start, start + len(raw), text)


def _long_row(file: LogFile, query: Query, line: int, start: int, end: int) -> Generator[None, None, Row | None]:
    """Return the row of a long line if it is a hit; yields between slices of work."""
    text = file.visible(start, end)
    try:
        is_hit = yield from is_in_line(file, start, end, query.pattern)
    except TooLong:
        raise _too_long(file, line) from None
    return _timed(file, query, line, start, end, text) if is_hit else None


def _timed(file: LogFile, query: Query, line: int, start: int, end: int, text: bytes) -> Row | None:
    """Return the row if it has the level asked for."""
    level = level_of(text)
    if level < query.wanted.level:
        return None
    block = file.index.block(max(0, file.index.blocks_of(line)))
    return Row(line, start, end, block.t_ns + line - block.line, text, level)


def _too_long(file: LogFile, line: int) -> Problem:
    where = f"line {line + 1:,} of rank {file.key.rank}'s {file.key.stream}"
    hint = "use fewer * and + in it, or put words between them"
    return Problem("pattern", f"the pattern takes more than {LINE_S:g} s on {where}", hint)


def _candidates(data: bytes, pattern: Pattern, line: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and number of the lines that may match."""
    seen = without_escapes(data)
    counted = start = 0
    for place in _places(seen, pattern):
        begin = seen.rfind(b"\n", 0, place) + 1
        lines = seen.count(b"\n", counted, begin)
        counted, line = begin, line + lines
        start = begin if seen is data else after_newlines(data, start, lines, max(1, len(data) // (lines + 1)))[0]
        end = data.find(b"\n", place if seen is data else start)
        yield start, len(data) if end < 0 else end, line


def _places(data: bytes, pattern: Pattern) -> Iterator[int]:
    """Yield one position in each line that may match, in order."""
    where = pattern.where(data)
    if where is None:
        return
    position = 0
    if pattern.choices:
        choices = pattern.choices
        # The rarest set gives the fewest lines to try.
        best = choices[0] if len(choices) == 1 else min(choices, key=lambda c: sum(map(where.count, c)))
        nexts = [(where.find(literal), literal) for literal in best]
        while nexts := [(at, literal) for at, literal in nexts if at >= 0]:
            place = min(at for at, _ in nexts)
            yield place
            position = data.find(b"\n", place) + 1 or len(data)
            nexts = [(at if at >= position else where.find(literal, position), literal) for at, literal in nexts]
        return
    lines = data.split(b"\n")
    for first in range(0, len(lines), _LINES_PER_TURN):
        some = lines[first : first + _LINES_PER_TURN]
        # An empty pattern matches each line: only their levels are searched.
        for line, may_match in zip(some, [True] * len(some) if pattern.plain else pattern.tried(some)):
            if may_match and position < len(data):
                yield position
            position += len(line) + 1
