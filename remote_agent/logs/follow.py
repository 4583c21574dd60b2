"""A follower of log files while they grow: all bytes, or the rows that a filter keeps.

In: files, where to begin in each, the bell that rings after new bytes.
Out: by time, pieces of whole lines, each with its offset; or rows, a record as a whole.

**A piece begins where the one before it ended, and no row is given twice. A slow reader slows nobody: the files keep
what it has not read.**
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.logs.merge import in_order
from remote_agent.logs.search import Batch
from remote_agent.logs.slices import index_until
from remote_agent.text.rows import RECORD_GAP_NS, dropped_text
from remote_agent.wire import Answer
from remote_agent.wire.answers import MAX_LARGE

if TYPE_CHECKING:
    from remote_agent.logs.logfile import LogFile
    from remote_agent.logs.merge import Item, Source
    from remote_agent.logs.records import Record
    from remote_agent.logs.slices import Bell
    from remote_agent.wire.answers import LogKey

PIECE = 64 * 1024
# A piece has lines of at most this time, so that ranks stay in order.
PIECE_SPAN_NS = 100_000_000
# Without a ring, the wait ends after this time.
_WAIT_S = 5.0
# Looks for new rows have at least this pause: each look reads the block at the end of a file again.
LOOK_S = 0.1
# A record may continue this long after its last line: the gap, and what the times of lines are inexact by.
_HOLD_NS = RECORD_GAP_NS + 100_000_000
# The index of a file that existed before this agent is awaited at most this long.
_INDEX_WAIT_S = 60.0

Positions = dict["LogKey", int]
"""The byte, or line, up to which each file has been given."""


class Piece(NamedTuple):
    """Consecutive bytes of one file."""

    t_ns: int
    offset: int
    body: bytes
    dropped: int = 0
    """The place from which bytes are still on the disk, if the body stands for those before them."""


class Pieces:
    """The bytes of a file from one on and before `stop`: whole lines, but a line over PIECE is in several pieces."""

    def __init__(self, file: LogFile, start: int, stop: int) -> None:
        self.file = file
        self._offset = start
        self._stop = stop
        self._epoch = file.epoch

    def bound_ns(self) -> int | None:
        """Return the time of the next piece."""
        return self.file.index.block(self.file.index.block_at(self._offset)).t_ns

    def next(self) -> Piece | None:
        """Return the next piece; None at the end, or when the file shrank meanwhile."""
        file, index, offset = self.file, self.file.index, self._offset
        if offset >= self._stop or file.epoch != self._epoch:
            return None
        t_ns = index.block(index.block_at(offset)).t_ns
        if offset < file.dropped:
            self._offset = file.dropped
            return Piece(t_ns, offset, dropped_text(file.dropped - offset) + b"\n", file.dropped)
        end = min(self._stop, offset + PIECE, index.offset_after(t_ns + PIECE_SPAN_NS, offset) or self._stop)
        body = file.pread(offset, end - offset)
        if len(body) < end - offset or file.epoch != self._epoch:
            return None
        body = body[: body.rfind(b"\n") + 1] or body
        self._offset += len(body)
        return Piece(t_ns, offset, body)


class View(NamedTuple):
    """What a follower sees of the store."""

    files: Callable[[], list[LogFile]]
    is_final: Callable[[LogKey], bool]
    """True when the rank of a file has ended and all its bytes are indexed."""
    is_over: Callable[[], bool]
    """True when no file will be added or grow any more."""
    bell: Bell


async def ends_of(files: Sequence[LogFile]) -> Positions:
    """Return where the unfinished last line of each file begins: a reader that begins at the end gets it as a whole.

    Waits for the indexes of files that existed before this agent.
    """
    for file in files:
        await index_until(file, _INDEX_WAIT_S)
    return {file.key: file.index.line_start for file in files}


class _Place:
    """The line, or byte, up to which one file has been given, and up to which the present look goes."""

    __slots__ = ("_epoch", "at", "by_bytes", "file", "is_final", "replaced", "stop")

    def __init__(self, file: LogFile, at: int, *, by_bytes: bool) -> None:
        self.file = file
        self.by_bytes = by_bytes
        # The file may have been truncated since the reader was here.
        self.replaced = at > (file.size if by_bytes else file.index.total_lines)
        self.at = self.stop = 0 if self.replaced else at
        self.is_final = False
        """Nothing will be written behind `stop`."""
        self._epoch = file.epoch

    def look(self, is_final: bool) -> bool:
        """Set how far to look now; True when there is something new."""
        if self._epoch != self.file.epoch:
            # The file was truncated or replaced.
            self._epoch, self.at, self.replaced = self.file.epoch, 0, True
        index = self.file.index
        self.is_final = is_final and not self.file.behind
        if self.by_bytes:
            end = index.scanned if self.is_final else index.line_start
        else:
            self.at = max(self.at, index.first_line)
            end = index.total_lines if self.is_final else index.newlines
        self.stop = max(self.at, end)
        return self.at < self.stop

    @property
    def is_held(self) -> bool:
        """True when a record waits for the lines that may continue it."""
        return not self.by_bytes and self.at < self.file.index.newlines

    def holds_back(self, record: Record) -> bool:
        """Return whether the next line may continue this record: the next look begins with it, so it stays whole."""
        if not record.is_last or self.is_final:
            return False
        if time.time_ns() - self.file.index.time_of(self.stop - 1) >= _HOLD_NS:
            return False
        self.stop = record.line
        return True


Places = dict["LogKey", _Place]


def follow(view: View, begin: Positions) -> AsyncGenerator[Answer, None]:
    """Yield pieces until all is over and sent; `begin`: at which byte, 0 for files that are not named."""
    return _follow(view, lambda file: begin.get(file.key, 0), Pieces, _pieces, by_bytes=True)


def follow_rows(
    view: View,
    begin: Callable[[LogFile], int],
    open_source: Callable[[LogFile, int, int], Source[Record]],
    *,
    is_past: bool,
    is_whole: bool,
    is_exact: bool,
    count: int | None,
) -> AsyncGenerator[Answer, None]:
    """Yield rows by time until all is over and given. The last answer of each look names the positions reached.

    `begin` returns the first line to look at; `open_source` reads a file from one line on and before another.
    `is_past`: end after the first look; then `is_whole` decides whether unfinished lines and records are left out.
    `is_exact`: all bytes of each line, not what a terminal shows of it. `count`: a look gives only so many rows, and
    names no positions if there are more.
    """
    give = partial(_rows, is_exact=is_exact, count=count)
    return _follow(view, begin, open_source, give, is_past=is_past, is_whole=is_whole)


async def _follow(
    view: View,
    begin: Callable[[LogFile], int],
    open_source: Callable[[LogFile, int, int], Source[Item]],
    give: Callable[[list[Source[Item]], Places], AsyncGenerator[Answer, None]],
    *,
    by_bytes: bool = False,
    is_past: bool = False,
    is_whole: bool = False,
) -> AsyncGenerator[Answer, None]:
    places: Places = {}
    while True:
        seen = view.bell.count
        # The end is read before the files; otherwise what is written in between would be missed.
        over = view.is_over() or (is_past and not is_whole)
        opened = []
        for file in view.files():
            if over or not by_bytes:
                # Bytes are sent as far as they are indexed; rows are in order only if all earlier bytes are indexed.
                is_waited_for = not by_bytes and (over or not file.has_caught_up)
                await index_until(file, _INDEX_WAIT_S if is_waited_for else 0.0)
            place = places.get(file.key) or places.setdefault(file.key, _Place(file, begin(file), by_bytes=by_bytes))
            if place.look(over or view.is_final(file.key)):
                opened.append(open_source(file, place.at, place.stop))
        if opened or is_past:
            async for answer in give(opened, places):
                yield answer
            for place in places.values():
                place.at = place.stop
        if is_past or (over and not opened and not any(_is_behind(place.file) for place in places.values())):
            return
        if not over:
            is_held = any(place.is_held for place in places.values())
            await view.bell.wait(seen, _HOLD_NS / 1e9 if is_held else _WAIT_S)
        await asyncio.sleep(0 if by_bytes else LOOK_S)


async def _pieces(opened: list[Source[Piece]], places: Places) -> AsyncGenerator[Answer, None]:
    """Yield the pieces of these files."""
    async for file, piece in in_order(opened):
        place = places[file.key]
        data = {**file.key._asdict(), "offset": piece.offset, "t_ns": piece.t_ns}
        if piece.dropped:
            data["dropped"] = piece.dropped
            place.stop = max(place.stop, piece.dropped)
        if place.replaced:
            data["replaced"], place.replaced = True, False
        yield Answer(data, piece.body)


async def _rows(
    opened: list[Source[Record]], places: Places, *, is_exact: bool, count: int | None
) -> AsyncGenerator[Answer, None]:
    """Yield the rows of these files, then the positions reached."""
    batch, apart, left = Batch(), 0, MAX_LARGE if count is None else count
    async for file, record in in_order(opened):
        place = places[file.key]
        if place.holds_back(record):
            continue
        apart += record.apart
        rows = [row for row in record.rows if row.line >= place.at][:left]
        for row in rows:
            batch.add(file, file.exact(row) if is_exact else row, record.t_ns)
        left -= len(rows)
        if not left:
            yield batch.take(apart=apart)
            return
        if batch.is_due():
            yield batch.take(apart=apart)
            apart = 0
    yield batch.take(apart=apart, after=[[*key, place.stop] for key, place in places.items()])


def _is_behind(file: LogFile) -> bool:
    """Return whether bytes of a file have yet to be read; a file that is gone has nothing more to give."""
    return file.behind and file.path.exists()
