"""Lines as `supervisor logs` prints them: whole, whatever their length and however the chunks are cut; or folded.

In: chunks in the order in which they arrive (a line longer than LINE_LIMIT is read from its node again); rows.
Out: bytes, in the form of `wording.log_lines`.

**No more than LINE_LIMIT of a line is held in memory**: of a longer line only its beginning and its place are kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from remote_agent.text.rows import CLIP, last_state
from remote_agent.wire import Answer, Args
from supervisor.errors import RequestFailed, Unreachable
from supervisor.link.tasks import cancel_all
from supervisor.logs import files as log_files
from supervisor.logs.files import READ_DEADLINE, Asking
from supervisor.logs.fold import Fold, Folder
from supervisor.logs.rows import LogLine
from supervisor.wording.log_lines import begin_of, lines_of, prefix_of

if TYPE_CHECKING:
    from supervisor.logs.reader import Chunk
    from supervisor.logs.selection import StreamFilter
    from supervisor.session import Session

LINE_LIMIT = 1024 * 1024
# The output waits this long for a node whose link is lost while a long line is read, seconds.
PATIENCE = 10.0

# The key has the node, generation, rank and stream.
NodeLog = tuple[str, int, int, str]


class LongLine:
    """A line over the limit: where it lies on its node, and how it begins."""

    def __init__(self, whose: NodeLog, begin: int, data: bytes) -> None:
        self.whose = whose
        self.end = begin + len(data)
        self.head = data[:CLIP]
        self._begin = begin

    def lost(self) -> bytes:
        """Return what is known of the line after its file was truncated."""
        return self.head + _missing(self.end - self._begin - len(self.head)) + b"\n"

    def row(self) -> LogLine:
        """Return it as a row whose text is cut."""
        return LogLine(*self.whose, 0, self._begin, 0, None, self.head, self.end - self._begin - len(self.head))


Piece = LongLine | tuple[NodeLog, bytes]


class WholeLines:
    """Turns chunks of many ranks into whole lines; an unfinished line is held until its end arrives.

    `overwrites`: of a line that overwrites itself by carriage returns, only the last state.
    """

    def __init__(self, stream_filter: StreamFilter | None = None, *, overwrites: bool = False) -> None:
        self._filter = stream_filter
        self._overwrites = overwrites
        self._held: dict[NodeLog, bytes | LongLine] = {}
        self._newest: dict[str, int] = {}

    def feed(self, chunk: Chunk) -> list[Piece]:
        """Return the lines that are complete now."""
        ready: list[Piece] = []
        if chunk.generation > self._newest.get(chunk.node, -1):
            # The ranks of older generations have ended: their unfinished lines stay as they are.
            ready = self._flush(chunk.node)
            self._newest[chunk.node] = chunk.generation
        key = (chunk.node, chunk.generation, chunk.rank, chunk.stream)
        held, data = self._held.pop(key, b""), chunk.data
        if isinstance(held, LongLine) and held.end != chunk.offset:
            ready.append((key, held.lost()))
            held = b""
        elif isinstance(held, LongLine):
            more, newline, data = data.partition(b"\n")
            held.end += len(more)
            if not newline:
                self._held[key] = held
                return self._filtered(ready)
            ready.append(held)
            held = b""
        lines, newline, rest = (held + data).rpartition(b"\n")
        if newline:
            ready.append((key, self._finally(lines) + newline))
        rest = _without_overwritten(rest) if self._overwrites else rest
        if len(rest) > LINE_LIMIT:
            self._held[key] = LongLine(key, chunk.offset + len(chunk.data) - len(rest), rest)
        elif rest:
            self._held[key] = rest
        return self._filtered(ready)

    def _finally(self, lines: bytes) -> bytes:
        if not self._overwrites or b"\r" not in lines:
            return lines
        return b"\n".join(map(last_state, lines.split(b"\n")))

    def rest(self) -> list[Piece]:
        """Return the unfinished lines at the end of the log."""
        return self._filtered([piece for node in list(self._newest) for piece in self._flush(node)])

    def _filtered(self, pieces: list[Piece]) -> list[Piece]:
        if self._filter is None:
            return pieces
        kept: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, LongLine):
                if self._filter.holds(piece.whose[3], piece.head):
                    kept.append(piece)
            elif lines := self._filter.lines(piece[0][3], piece[1]):
                kept.append((piece[0], lines))
        return kept

    def _flush(self, node: str) -> list[Piece]:
        halves = [(key, self._held.pop(key)) for key in list(self._held) if key[0] == node]
        return [half if isinstance(half, LongLine) else (key, self._finally(half) + b"\n") for key, half in halves]


def _without_overwritten(half: bytes) -> bytes:
    """Return the part of an unfinished line that its last state is made of."""
    return half[half.rstrip(b"\r").rfind(b"\r") + 1 :]


async def printed(session: Session, pieces: list[Piece]) -> AsyncGenerator[bytes, None]:
    """Yield lines as they are printed, `node:rank| text`; a line over the limit is read from its node again."""
    for piece in pieces:
        if not isinstance(piece, LongLine):
            yield prefixed(*piece)
            continue
        async with aclosing(whole_line(patiently(session), piece.row())) as parts:
            async for data in parts:
                yield data


def prefixed(whose: NodeLog, lines: bytes) -> bytes:
    """Return whole lines as they are printed."""
    prefix = prefix_of(whose[0], whose[2])
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


async def whole_line(asking: Asking, row: LogLine) -> AsyncGenerator[bytes, None]:
    """Yield the whole line of a row whose text is cut; at its end the number of bytes that cannot be read."""
    missing = row.cut
    yield begin_of(row)
    async with aclosing(log_files.read_rest(asking, row)) as rest:
        async for data in rest:
            missing -= len(data)
            yield data
    yield _missing(missing) + b"\n"


def _missing(size: int) -> bytes:
    return f" … {size} bytes of this line could not be read".encode() if size else b""


def patiently(session: Session) -> Asking:
    """Return a function that makes log requests, and waits for lost links, up to PATIENCE in all.

    After that it returns empty answers, as for dropped bytes, and the log continues without them.
    """
    left = PATIENCE

    async def asking(node: str, op: str, args: Args) -> Answer:
        nonlocal left
        while True:
            asked_at = time.monotonic()
            try:
                return await log_files.ask(session, node, op, args, READ_DEADLINE)
            except RequestFailed:
                return Answer({})
            except Unreachable:
                if left <= 0.0:
                    return Answer({})
                await session.wait_change(min(0.5, left))
                left -= time.monotonic() - asked_at

    return asking


# --- --fold

# Without new rows, folds whose window has ended are checked this often, seconds.
LOOK = 0.25


async def write_folded(
    batches: AsyncGenerator[list[LogLine], None], put: Callable[[bytes], Awaitable[None]], now_ns: Callable[[], int]
) -> None:
    """Write folds of rows; each once its window has ended by `now_ns`, or when no more rows come."""
    folder: Folder[LogLine] = Folder()
    coming = asyncio.ensure_future(_next(batches))
    try:
        while True:
            await asyncio.wait((coming,), timeout=LOOK)
            folds: list[Fold[LogLine]] = []
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


async def _next(batches: AsyncGenerator[list[LogLine], None]) -> list[LogLine] | None:
    return await anext(batches, None)
