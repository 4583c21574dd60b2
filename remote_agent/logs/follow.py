"""Following: every byte of the chosen files from a start on, once, in order, while they grow.

In: files of the follower, rings of its bell. Out: pieces of whole lines, each with its offset and time.

**A piece begins where the one before it ended. A slow reader slows nobody: bytes wait in the file.**
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.logs.rows import dropped_text
from remote_agent.logs.slices import Bell, Breather
from remote_agent.wire import Answer

if TYPE_CHECKING:
    from remote_agent.logs.logfile import Key, LogFile

PIECE = 64 * 1024
# A piece goes at most this much beyond the oldest bytes that other files have to send, so that ranks stay in order.
PIECE_SPAN_NS = 100_000_000
# A half line that has rested this long is sent.
REST_S = 1.0
# Longest wait without a ring.
_WAIT_S = 5.0


class _Cursor:
    """How far one file has been sent."""

    __slots__ = ("epoch", "file", "offset", "replaced")

    def __init__(self, file: LogFile, at_end: bool) -> None:
        self.file = file
        self.epoch = file.epoch
        # At the end means: the line that is being written now is given whole.
        self.offset = file.index.line_start if at_end else 0
        self.replaced = False

    def check_epoch(self) -> None:
        """Start again in a file that was truncated or replaced."""
        if self.epoch != self.file.epoch:
            self.epoch, self.offset, self.replaced = self.file.epoch, 0, True

    def rest_s(self) -> float:
        """Return how many seconds ago the last bytes came."""
        return (time.time_ns() - (self.file.last_ns or 0)) / 1e9


class _Piece(NamedTuple):
    t_ns: int
    offset: int
    end: int


class View(NamedTuple):
    """What `follow` sees of the store."""

    files: Callable[[], list[LogFile]]
    is_final: Callable[[Key], bool]
    """True when a file's rank is over and all of its bytes are indexed."""
    is_over: Callable[[], bool]
    """True when no file will come or grow any more."""
    bell: Bell


def _next_piece(cursor: _Cursor, final: bool) -> _Piece | None:
    """Return what can be sent now of one file."""
    cursor.check_epoch()
    index, offset = cursor.file.index, cursor.offset
    if offset >= index.scanned:
        return None
    whole = offset < index.line_start
    end = index.line_start if whole else index.scanned
    if not whole and not final and end - offset < PIECE and cursor.rest_s() < REST_S:
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
        # A line over 64 KiB is sent in pieces, all others whole.
        body = body[: newline + 1]
    cursor.offset += len(body)
    if cursor.replaced:
        data["replaced"] = True
        cursor.replaced = False
    return Answer(data, body)


async def follow(view: View, at_end: bool) -> AsyncGenerator[Answer, None]:
    """Yield pieces until all is over and sent; at_end: of the files that are there now, only what comes."""
    cursors = {file.key: _Cursor(file, at_end) for file in view.files()}
    breather = Breather()
    while True:
        seen = view.bell.count
        # Asked before the files are read: what comes between the two would be missed the other way round.
        over = view.is_over()
        for file in view.files():
            cursors.setdefault(file.key, _Cursor(file, at_end=False))
            if over and file.behind:
                file.absorb(time.time_ns())
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
                # Files may have come: they take part in the order.
                break
        if over and not sent and not any(_has_more(cursor) for cursor in cursors.values()):
            return
        if not over and not sent:
            await view.bell.wait(seen, _wait_s(cursors))
        await breather.breathe()


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
    """Pass over bytes that were there and are gone: the file was truncated or removed under us."""
    cursor.file.absorb(time.time_ns())
    if cursor.epoch == cursor.file.epoch:
        cursor.offset = cursor.file.index.scanned


def _has_more(cursor: _Cursor) -> bool:
    if not cursor.file.behind:
        return cursor.offset < cursor.file.index.scanned
    # A file that is gone has nothing more to give.
    return cursor.file.path.exists()


def _wait_s(cursors: dict[Key, _Cursor]) -> float:
    """Return how long to wait for a ring: until the next half line has rested."""
    waits = [
        max(0.0, REST_S - cursor.rest_s()) + 0.01
        for cursor in cursors.values()
        if cursor.offset < cursor.file.index.scanned
    ]
    return min(waits, default=_WAIT_S)
