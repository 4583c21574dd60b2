"""The relevant lines of logs with their numbers, in bounded time and memory.

In: paths. Out: all lines of a short file; of a long one the relevant lines (long_files.py) and its end.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from supervisor.postmortem.lines import FileLine, clean
from supervisor.postmortem.long_files import BEFORE, FirstAndLast, KeepLimit, Picked, PickProcess, Piece, pick, shown

Progress = Callable[[int], None]
# Up to so many bytes in all, every line is read; beyond that only the relevant lines of long files.
WHOLE_BYTES = 1 << 20
# How many lines are kept of all files together, twice, and of a single file at most and at least.
KEPT_LINES = 40_000
KEPT_MAX, KEPT_MIN = 20_000, 100
END_LINES = 400
PIECE = 16 << 20
# Less than this is read faster than other processes start.
HELP_BYTES = 96 << 20
HELPERS_MAX = 8


def read_all(paths: Sequence[Path], progress: Progress = lambda _bytes: None) -> Generator[list[FileLine], None, None]:
    """Yield the relevant lines of each file, in order; raises OSError. `progress` gets the bytes just read."""
    sizes = [path.stat().st_size for path in paths]
    whole = WHOLE_BYTES // max(1, len(paths))
    kept = max(KEPT_MIN, min(KEPT_MAX, KEPT_LINES // max(1, len(paths))))
    limit = KeepLimit(kept, min(END_LINES, kept))
    cut = [_cut(path, size, limit) if size > whole else [] for path, size in zip(paths, sizes, strict=True)]
    with _picking(sum(sizes)) as pick_all:
        picked = pick_all([piece for pieces in cut for piece in pieces])
        for path, size, pieces in zip(paths, sizes, cut, strict=True):
            if pieces:
                yield _join(_with_progress(pieces, picked, progress), limit)
            else:
                yield _whole(path)
                progress(size)


def _whole(path: Path) -> list[FileLine]:
    with path.open("rb") as file:
        return [FileLine(number, _text(shown(raw.rstrip(b"\n")))) for number, raw in enumerate(file, 1)]


def _cut(path: Path, size: int, limit: KeepLimit) -> list[Piece]:
    """Return the pieces of a long file."""
    return [Piece(str(path), begin, min(begin + PIECE, size), limit) for begin in range(0, size, PIECE)]


def _with_progress(pieces: Sequence[Piece], picked: Iterator[Picked], progress: Progress) -> Iterator[Picked]:
    for piece in pieces:
        yield next(picked)
        progress(piece.end - piece.begin)


def _join(pieces: Iterable[Picked], limit: KeepLimit) -> list[FileLine]:
    """Return the lines of a file from those of its pieces; a relevant line at an edge keeps lines of the next piece."""
    kept = FirstAndLast(limit.kept)
    last: list[tuple[int, bytes]] = []
    before, after = 0, 0
    for piece in pieces:
        if piece.first_hot is not None and piece.first_hot < BEFORE:
            for line in last[piece.first_hot - BEFORE :]:
                kept.add(line)
        known = {**dict(enumerate(piece.head[:after])), **dict(piece.kept)}
        for number in sorted(known):
            kept.add((before + number, known[number]))
        after = max(after - piece.lines, piece.after)
        last = [*last, *((before + number, raw) for number, raw in piece.last)][-limit.end :]
        before += piece.lines
    chosen = {**dict(kept.lines()), **dict(last)}
    return [FileLine(number + 1, _text(chosen[number])) for number in sorted(chosen)]


def _text(raw: bytes) -> str:
    return clean(raw.decode("utf-8", "replace"))


@contextmanager
def _picking(size: int) -> Iterator[Callable[[Sequence[Piece]], Iterator[Picked]]]:
    """Yield a function that picks from pieces, in order; with other processes if there are many bytes and cores."""
    helpers = min(os.cpu_count() or 1, HELPERS_MAX) if size > HELP_BYTES else 1
    if helpers == 1:
        yield lambda pieces: map(pick, pieces)
        return
    idle: SimpleQueue[PickProcess] = SimpleQueue()
    started = [PickProcess() for _ in range(helpers)]
    for helper in started:
        idle.put(helper)

    def one(piece: Piece) -> Picked:
        helper = idle.get()
        try:
            return helper.pick(piece)
        finally:
            idle.put(helper)

    pool = ThreadPoolExecutor(helpers)
    try:
        yield lambda pieces: _ahead(pool, one, pieces, 2 * helpers)
    finally:
        for helper in started:
            helper.close()
        pool.shutdown(cancel_futures=True)


def _ahead(
    pool: ThreadPoolExecutor, work: Callable[[Piece], Picked], pieces: Sequence[Piece], most: int
) -> Iterator[Picked]:
    """Yield the results in order; only `most` of them are in progress or waiting, which bounds the memory."""
    waiting: deque[Future[Picked]] = deque()
    for piece in pieces:
        waiting.append(pool.submit(work, piece))
        if len(waiting) == most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
