"""Followers of log files while they grow: all bytes, or the rows that a filter keeps.

In: files, where to begin in each, the bell that rings after new bytes.
Out: pieces of whole lines, each with its offset and time; or rows by time, a record as a whole.

**A piece begins where the one before it ended, and no row is given twice. A slow reader slows nobody: the files keep
what it has not read.**
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Union

from remote_agent.logs.merge import in_order
from remote_agent.logs.records import Forwards
from remote_agent.logs.search import Batch, Hits
from remote_agent.logs.slices import Bell, Breather
from remote_agent.logs.window import index_until
from remote_agent.text.rows import RECORD_GAP_NS, dropped_text
from remote_agent.wire import Answer

if TYPE_CHECKING:
    from remote_agent.logs.logfile import Key, LogFile
    from remote_agent.logs.records import Record

PIECE = 64 * 1024
# A piece ends at most this long after the oldest unsent bytes of other files, so that ranks stay in order.
PIECE_SPAN_NS = 100_000_000
# Longest wait without a ring.
_WAIT_S = 5.0
# Least pause between two looks for new rows: each look reads the block at the end of a file again.
LOOK_S = 0.1
# A record may continue this long after its last line: the gap, and what the times of lines are inexact by.
_HOLD_NS = RECORD_GAP_NS + 100_000_000
# Longest wait for the index of a file that existed before this agent.
_INDEX_WAIT_S = 60.0

Positions = dict["Key", int]
"""Up to which byte, or line, each file has been given."""
Source = Union[Forwards, Hits]


class _Cursor:
    """How far one file has been sent."""

    __slots__ = ("epoch", "file", "offset", "replaced")

    def __init__(self, file: LogFile, offset: int) -> None:
        self.file = file
        self.epoch = file.epoch
        # The file may have been truncated since the reader was here.
        self.replaced = offset > file.size
        self.offset = 0 if self.replaced else offset

    def check_epoch(self) -> None:
        """Start again in a file that was truncated or replaced."""
        if self.epoch != self.file.epoch:
            self.epoch, self.offset, self.replaced = self.file.epoch, 0, True


class _Piece(NamedTuple):
    t_ns: int
    offset: int
    end: int


class View(NamedTuple):
    """What a follower sees of the store."""

    files: Callable[[], list[LogFile]]
    is_final: Callable[[Key], bool]
    """True when the rank of a file has ended and all its bytes are indexed."""
    is_over: Callable[[], bool]
    """True when no file will be added or grow any more."""
    bell: Bell


def _next_piece(cursor: _Cursor, final: bool) -> _Piece | None:
    """Return what can be sent now of one file: whole lines, of an unfinished one only what fills a piece."""
    cursor.check_epoch()
    index, offset = cursor.file.index, cursor.offset
    if offset >= index.scanned:
        return None
    whole = offset < index.line_start
    end = index.line_start if whole else index.scanned
    if not whole and not final and end - offset < PIECE:
        return None
    t_ns = index.block(index.block_at(offset)).t_ns
    return _Piece(t_ns, offset, min(end, offset + PIECE))


def _take(cursor: _Cursor, piece: _Piece) -> Answer | None:
    """Read a piece and move on; None when the file shrank meanwhile."""
    file = cursor.file
    generation, rank, stream = file.key
    data = {"generation": generation, "rank": rank, "stream": stream, "offset": piece.offset, "t_ns": piece.t_ns}
    if piece.offset < file.dropped:
        cursor.offset = file.dropped
        return Answer({**data, "dropped": file.dropped}, dropped_text(file.dropped - piece.offset) + b"\n")
    body = file.pread(piece.offset, piece.end - piece.offset)
    if len(body) < piece.end - piece.offset or file.epoch != cursor.epoch:
        return None
    newline = body.rfind(b"\n")
    if newline >= 0:
        # Only a line over 64 KiB is sent in several pieces.
        body = body[: newline + 1]
    cursor.offset += len(body)
    if cursor.replaced:
        data["replaced"] = True
        cursor.replaced = False
    return Answer(data, body)


def ends_of(files: Sequence[LogFile]) -> Positions:
    """Return where the unfinished last line of each file begins: a reader that begins at the end gets it as a whole."""
    return {file.key: file.index.line_start for file in files}


async def follow(view: View, begin: Positions) -> AsyncGenerator[Answer, None]:
    """Yield pieces until all is over and sent; `begin`: at which byte, 0 for files that are not named."""
    cursors: dict[Key, _Cursor] = {}
    breather = Breather()
    while True:
        seen = view.bell.count
        # Read before the files: in the other order, bytes written in between would be missed.
        over = view.is_over()
        _update(cursors, view, begin, over=over)
        sent = False
        while True:
            ready = _first_ready(cursors, view, over)
            if ready is None:
                break
            sent = True
            answer = _take(*ready)
            if answer is None:
                _give_up(ready[0])
                continue
            yield answer
            await breather.breathe()
            if view.bell.count != seen:
                # New files take part in the order.
                break
        if over and not sent and not any(_has_more(cursor) for cursor in cursors.values()):
            return
        if not over and not sent:
            await view.bell.wait(seen, _WAIT_S)
        await breather.breathe()


def _update(cursors: dict[Key, _Cursor], view: View, begin: Positions, *, over: bool) -> None:
    """Add cursors for new files; where nothing will be written any more, index what is left."""
    for file in view.files():
        if file.key not in cursors:
            cursors[file.key] = _Cursor(file, begin.get(file.key, 0))
        if over and file.behind:
            file.absorb(time.time_ns())


def _first_ready(cursors: dict[Key, _Cursor], view: View, over: bool) -> tuple[_Cursor, _Piece] | None:
    """Return the oldest piece of all files."""
    best: tuple[_Cursor, _Piece] | None = None
    others_ns: int | None = None
    for key, cursor in cursors.items():
        if cursor.offset >= cursor.file.index.scanned and cursor.epoch == cursor.file.epoch:
            continue
        piece = _next_piece(cursor, (over or view.is_final(key)) and not cursor.file.behind)
        if piece is None:
            continue
        if best is None or piece.t_ns < best[1].t_ns:
            others_ns = best[1].t_ns if best is not None else others_ns
            best = cursor, piece
        elif others_ns is None or piece.t_ns < others_ns:
            others_ns = piece.t_ns
    if best is None or others_ns is None:
        return best
    cursor, piece = best
    later = cursor.file.index.offset_after(others_ns + PIECE_SPAN_NS, piece.offset)
    return cursor, piece if later is None else piece._replace(end=min(piece.end, later))


def _give_up(cursor: _Cursor) -> None:
    """Skip bytes that are gone: the file was truncated or removed meanwhile."""
    cursor.file.absorb(time.time_ns())
    if cursor.epoch == cursor.file.epoch:
        cursor.offset = cursor.file.index.scanned


def _has_more(cursor: _Cursor) -> bool:
    if not cursor.file.behind:
        return cursor.offset < cursor.file.index.scanned
    return _is_behind(cursor.file)


class _Place:
    """Up to which line one file has been given, and up to which line the present look goes."""

    __slots__ = ("_epoch", "file", "is_final", "line", "stop")

    def __init__(self, file: LogFile, line: int) -> None:
        self.file = file
        self.line = self.stop = line if line <= file.index.total_lines else 0
        self.is_final = False
        """Nothing will be written behind `stop`."""
        self._epoch = file.epoch

    def look(self, is_final: bool) -> bool:
        """Set how far to look now; True when there are new lines."""
        if self._epoch != self.file.epoch:
            # The file was truncated or replaced.
            self._epoch, self.line = self.file.epoch, 0
        index = self.file.index
        self.line = max(self.line, index.first_line)
        self.is_final = is_final and not self.file.behind
        self.stop = index.total_lines if self.is_final else max(self.line, index.newlines)
        return self.line < self.stop

    def holds_back(self, record: Record) -> bool:
        """True for a record that the next line may continue: the next look begins with it, so that it stays whole."""
        if not record.is_last or self.is_final:
            return False
        if time.time_ns() - self.file.index.time_of(self.stop - 1) >= _HOLD_NS:
            return False
        self.stop = record.line
        return True


async def follow_rows(
    view: View,
    begin: Callable[[LogFile], int],
    open_source: Callable[[LogFile, int, int], Source],
    *,
    is_past: bool,
    is_whole: bool,
) -> AsyncGenerator[Answer, None]:
    """Yield rows by time until all is over and given. The last answer of each look names the positions reached.

    `begin` returns the first line to look at; `open_source` reads a file from one line on and before another.
    `is_past`: end after the first look; then `is_whole` decides whether unfinished lines and records are left out.
    """
    places: dict[Key, _Place] = {}
    while True:
        seen = view.bell.count
        over = view.is_over() or (is_past and not is_whole)
        opened = []
        for file in view.files():
            await index_until(file, None, _INDEX_WAIT_S if over or not file.is_counted else 0.0)
            place = places.get(file.key) or places.setdefault(file.key, _Place(file, begin(file)))
            if place.look(over or view.is_final(file.key)):
                opened.append(open_source(file, place.line, place.stop))
        if opened or is_past:
            async for answer in _look(opened, places):
                yield answer
        if is_past or (over and not opened and not any(_is_behind(place.file) for place in places.values())):
            return
        if not over:
            is_held = any(place.line < place.file.index.newlines for place in places.values())
            await view.bell.wait(seen, _HOLD_NS / 1e9 if is_held else _WAIT_S)
        await asyncio.sleep(LOOK_S)


async def _look(opened: list[Source], places: dict[Key, _Place]) -> AsyncGenerator[Answer, None]:
    """Yield the rows of these files, then the positions reached."""
    batch, apart = Batch(), 0
    async for file, record in in_order(opened):
        place = places[file.key]
        if place.holds_back(record):
            continue
        apart += record.apart
        for row in record.rows:
            if row.line >= place.line:
                batch.add(file, row, record.t_ns)
        if batch.is_due():
            yield batch.take(apart=apart)
            apart = 0
    for place in places.values():
        place.line = place.stop
    yield batch.take(apart=apart, after=[[*key, place.line] for key, place in places.items()])


def _is_behind(file: LogFile) -> bool:
    """True when bytes of a file have yet to be read; a file that is gone has nothing more to give."""
    return file.behind and file.path.exists()
