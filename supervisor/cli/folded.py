"""`supervisor logs --fold`: what many ranks printed alike at one moment, once.

In: rows, chunks of log. Out: lines `[0-3,5]| text`; `[0-3,5]~| text` where the ranks' numbers differ and the first
rank's are shown; `node:rank| text` for what one rank alone printed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from remote_agent.logs.rows import CLIP, seen, visible
from supervisor import plain
from supervisor.cli.whole_lines import LongLine, Piece, WholeLines, begin_of, matches
from supervisor.session.folding import Fold, Folder
from supervisor.session.logs import Row
from supervisor.session.tasks import cancel_all

if TYPE_CHECKING:
    import re

    from supervisor.session.follow import Chunk
    from supervisor.session.session import Session
    from supervisor.session.streams import Sieve

# How often folds are looked at whose window ends while nothing comes, seconds.
LOOK = 0.25


def line_of(row: Row) -> bytes:
    """Return a row as it is printed."""
    return begin_of(row) + _end_of(row)


def _end_of(row: Row) -> bytes:
    return f"{plain.cut_text(row.cut)}\n".encode() if row.cut else b"\n"


def lines_of(folds: Iterable[Fold[Row]]) -> bytes:
    """Return folds as they are printed."""
    return b"".join(_lines(fold) for fold in folds)


def _lines(fold: Fold[Row]) -> bytes:
    if len(fold.records) == 1:
        return b"".join(map(line_of, fold.shown))
    prefix = f"[{plain.ranges(fold.ranks)}]{'~' if fold.differs else ''}| ".encode()
    return b"".join(prefix + row.text + _end_of(row) for row in fold.shown)


async def rows_of(
    session: Session, chunks: AsyncGenerator[Chunk, None], pattern: re.Pattern[bytes] | None, sieve: Sieve
) -> AsyncGenerator[list[Row], None]:
    """Yield the lines that match as rows, with the time at which they arrive here."""
    whole = WholeLines(sieve)
    try:
        async for chunk in chunks:
            yield [row for piece in whole.feed(chunk) for row in await _rows(session, piece, pattern)]
        yield [row for piece in whole.rest() for row in await _rows(session, piece, pattern)]
    finally:
        await chunks.aclose()


async def _rows(session: Session, piece: Piece, pattern: re.Pattern[bytes] | None) -> list[Row]:
    now_ns = time.monotonic_ns()
    if isinstance(piece, LongLine):
        kept = pattern is None or await matches(session, piece, pattern)
        return [piece.shown(now_ns)] if kept else []
    whose, lines = piece
    return [
        Row(*whose, 0, 0, now_ns, None, text, max(0, len(line) - CLIP) if len(text) == CLIP else 0)
        for line in lines[:-1].split(b"\n")
        if pattern is None or pattern.search(seen(line))
        for text in (visible(line),)
    ]


async def fold_all(rows: AsyncGenerator[Row, None], put: Callable[[bytes], Awaitable[None]], batch: int) -> None:
    """Write rows that are all there."""
    folder: Folder[Row] = Folder()
    waiting: list[Row] = []
    try:
        async for row in rows:
            waiting.append(row)
            if len(waiting) == batch:
                await put(lines_of(folder.feed(waiting)))
                waiting.clear()
    finally:
        await rows.aclose()
    await put(lines_of([*folder.feed(waiting), *folder.rest()]))


async def fold_live(
    batches: AsyncGenerator[list[Row], None], put: Callable[[bytes], Awaitable[None]], now_ns: Callable[[], int]
) -> None:
    """Write rows as they come, each fold once its window has ended by `now_ns`, the clock of the rows' times."""
    folder: Folder[Row] = Folder()
    coming = asyncio.ensure_future(_next(batches))
    try:
        while True:
            await asyncio.wait((coming,), timeout=LOOK)
            folds: list[Fold[Row]] = []
            if coming.done():
                batch = coming.result()
                if batch is None:
                    break
                coming = asyncio.ensure_future(_next(batches))
                folds = folder.feed(batch)
            await put(lines_of([*folds, *folder.until(now_ns())]))
    finally:
        await cancel_all((coming,))
        await batches.aclose()
    await put(lines_of(folder.rest()))


async def _next(batches: AsyncGenerator[list[Row], None]) -> list[Row] | None:
    return await anext(batches, None)
