"""A followed log as it is printed: whole lines of many ranks, each in one piece, whatever its length.

In: chunks in the order in which they arrive; where a line is longer than LINE_LIMIT, its text from its node once more.
Out: bytes, lines `node:rank| text`.

**No more of a line than LINE_LIMIT is held here**: of a longer one its ends and where it lies; the node's file has it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from remote_agent.logs.rows import CLIP, seen, visible_ends, without_escapes
from remote_agent.wire import Answer
from supervisor.errors import RequestFailed, Unreachable
from supervisor.session import logs

if TYPE_CHECKING:
    import re

    from supervisor.session.follow import Chunk
    from supervisor.session.session import Session
    from supervisor.session.streams import Sieve

LINE_LIMIT = 1024 * 1024
# How long the others' lines wait for a node whose link is lost in the midst of a long line, seconds.
PATIENCE = 10.0
# Nothing but a text's last byte may stand before its last newline: so no `$` matches in front of these.
_NO_END = b"\n\n"

# Whose lines: node, generation, rank, stream.
Whose = tuple[str, int, int, str]


def begin_of(row: logs.Row) -> bytes:
    """Return a row as it is printed, without its end."""
    return f"{row.node}:{row.rank}| ".encode() + row.text


class LongLine:
    """A line over the limit: where it lies on its node, and its two ends."""

    def __init__(self, whose: Whose, begin: int, data: bytes) -> None:
        self.whose = whose
        self.end = begin + len(data)
        self.head, self.tail = data[:CLIP], data[-CLIP:]
        self._begin = begin

    def grow(self, data: bytes) -> None:
        """Take what follows."""
        self.end += len(data)
        self.tail = (self.tail + data)[-CLIP:]

    def lost(self) -> bytes:
        """Return what can be told of it once its file has been written anew."""
        return self.head + _missing(self.end - self._begin - len(self.head)) + b"\n"

    def row(self, head: bool = True) -> logs.Row:
        """Return it as a row whose text is cut."""
        text = self.head if head else b""
        return logs.Row(*self.whose, 0, self._begin, 0, None, text, self.end - self._begin - len(text))

    def shown(self, now_ns: int) -> logs.Row:
        """Return it as a row whose text is what a screen shows of it."""
        text, row = visible_ends(self.head, self.tail), self.row()
        return row._replace(t_ns=now_ns, text=text, cut=row.cut if text is self.head else 0)


Piece = LongLine | tuple[Whose, bytes]


class WholeLines:
    """Turns chunks of many ranks into whole lines, as far as the sieve holds them; a half line waits for its end."""

    def __init__(self, sieve: Sieve | None = None) -> None:
        self._sieve = sieve
        self._held: dict[Whose, bytes | LongLine] = {}
        self._newest: dict[str, int] = {}

    def feed(self, chunk: Chunk) -> list[Piece]:
        """Return the lines that are whole now."""
        ready: list[Piece] = []
        if chunk.generation > self._newest.get(chunk.node, -1):
            # The ranks of older generations are gone: nothing will complete their last lines.
            ready = self._flush(chunk.node)
            self._newest[chunk.node] = chunk.generation
        key = (chunk.node, chunk.generation, chunk.rank, chunk.stream)
        held, data = self._held.pop(key, b""), chunk.data
        if isinstance(held, LongLine) and held.end != chunk.offset:
            ready.append((key, held.lost()))
            held = b""
        elif isinstance(held, LongLine):
            more, newline, data = data.partition(b"\n")
            held.grow(more)
            if not newline:
                self._held[key] = held
                return self._sieved(ready)
            ready.append(held)
            held = b""
        data = held + data
        cut = data.rfind(b"\n") + 1
        if cut:
            ready.append((key, data[:cut]))
        if len(data) - cut > LINE_LIMIT:
            self._held[key] = LongLine(key, chunk.offset + len(chunk.data) - len(data) + cut, data[cut:])
        elif cut < len(data):
            self._held[key] = data[cut:]
        return self._sieved(ready)

    def rest(self) -> list[Piece]:
        """Return the half lines at the end of everything."""
        return self._sieved([piece for node in list(self._newest) for piece in self._flush(node)])

    def _sieved(self, pieces: list[Piece]) -> list[Piece]:
        if self._sieve is None:
            return pieces
        kept: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, LongLine):
                if self._sieve.holds(piece.whose[3], piece.head):
                    kept.append(piece)
            elif lines := self._sieve.lines(piece[0][3], piece[1]):
                kept.append((piece[0], lines))
        return kept

    def _flush(self, node: str) -> list[Piece]:
        halves = [(key, self._held.pop(key)) for key in list(self._held) if key[0] == node]
        return [half if isinstance(half, LongLine) else (key, half + b"\n") for key, half in halves]


class Printer:
    """Turns chunks of many ranks into lines `node:rank| text`, of a pattern only those that match."""

    def __init__(self, session: Session, sieve: Sieve | None = None, pattern: re.Pattern[bytes] | None = None) -> None:
        self._session = session
        self._lines = WholeLines(sieve)
        self._pattern = pattern

    def feed(self, chunk: Chunk) -> AsyncGenerator[bytes, None]:
        """Yield the lines that are whole now."""
        return self._printed(self._lines.feed(chunk))

    def rest(self) -> AsyncGenerator[bytes, None]:
        """Yield the half lines at the end of everything."""
        return self._printed(self._lines.rest())

    async def _printed(self, pieces: list[Piece]) -> AsyncGenerator[bytes, None]:
        for piece in pieces:
            if not isinstance(piece, LongLine):
                yield prefixed(*piece, self._pattern)
            elif self._pattern is None or await matches(self._session, piece, self._pattern):
                async with aclosing(whole_line(patiently(self._session), piece.row())) as parts:
                    async for data in parts:
                        yield data


def prefixed(whose: Whose, lines: bytes, pattern: re.Pattern[bytes] | None) -> bytes:
    """Return whole lines as they are printed, of a pattern those in which what is seen matches."""
    prefix = f"{whose[0]}:{whose[2]}| ".encode()
    if pattern is None:
        return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"
    return b"".join(b"%s%s\n" % (prefix, line) for line in lines[:-1].split(b"\n") if pattern.search(seen(line)))


async def whole_line(asking: logs.Asking, row: logs.Row) -> AsyncGenerator[bytes, None]:
    """Yield a row whose text is cut as it is printed: all of its line, and in the place of what is gone how much."""
    missing = row.cut
    yield begin_of(row)
    async with aclosing(logs.read_rest(asking, row)) as rest:
        async for data in rest:
            missing -= len(data)
            yield data
    yield _missing(missing) + b"\n"


def _missing(size: int) -> bytes:
    return f" … {size} bytes of this line could not be read".encode() if size else b""


async def matches(session: Session, line: LongLine, pattern: re.Pattern[bytes]) -> bool:
    """Tell whether what is seen of a long line matches; a match of up to 64 KiB is found wherever it lies."""
    row = line.row(head=False)
    text, found, gone, left = b"", False, False, row.cut
    async with aclosing(logs.read_rest(patiently(session), row)) as rest:
        async for data in rest:
            left -= len(data)
            text += data
            begin = text.rfind(b"\r", 0, len(text.rstrip(b"\r"))) + 1
            if begin:
                # A progress bar: all before is written over.
                text, found, gone = text[begin:], False, False
            shown = without_escapes(text.rstrip(b"\r")) + (_NO_END if left else b"")
            found = found or pattern.search(shown, 1 if gone else 0) is not None
            if len(text) > CLIP:
                text, gone = text[-CLIP - 1 :], True
    return found


def patiently(session: Session) -> logs.Asking:
    """Return what makes log requests, and waits for lost links for PATIENCE in all.

    What does not come then is gone, as what the node has dropped: the log goes on without it.
    """
    left = PATIENCE

    async def asking(node: str, op: str, wish: dict[str, Any]) -> Answer:
        nonlocal left
        while True:
            asked_at = time.monotonic()
            try:
                return await logs.ask(session, node, op, wish, logs.READ_DEADLINE)
            except RequestFailed:
                return Answer({})
            except Unreachable:
                if left <= 0.0:
                    return Answer({})
                await session.wait_change(min(0.5, left))
                left -= time.monotonic() - asked_at

    return asking
