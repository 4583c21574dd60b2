"""A search in one line of any length, a piece at a time.

In: a file, the bytes of a line, a pattern. Out: the column of the first match in what is seen of the line.

**Pieces overlap: a match of up to 64 KiB is found wherever it lies.** What ends where a piece ends is looked at again
with the next piece behind it, so that an end of line or word is one of the line's own.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING

from remote_agent.logs.pattern import LINE_S, within
from remote_agent.logs.rows import CLIP, without_escapes

if TYPE_CHECKING:
    import re

    from remote_agent.logs.logfile import LogFile
    from remote_agent.logs.pattern import Pattern

PIECE = 256 * 1024
# Longest escape code that may lie across two pieces.
_ESCAPE = 256
# Nothing but a text's last byte may stand before its last newline: so no `$` matches in front of these.
_NO_END = b"\n\n"
# Of a character in UTF-8, all bytes but the first.
_REST_OF_CHARACTER = bytes(range(0x80, 0xC0))


class _Seen:
    """The text seen so far, as much of it as a match may still begin in."""

    def __init__(self, pattern: Pattern) -> None:
        self.column: int | None = None
        """How many characters stand before the first match."""
        self._pattern = pattern
        self._text = b""
        self._gone = 0
        """Bytes, and characters, before this text. Its first byte is there only to tell what follows it."""
        self._gone_characters = 0
        self._doubtful = -1
        """Where a match began that may have been one only because its piece ended."""

    def take(self, more: bytes, is_last: bool) -> None:
        """Look at the next piece; raises TooLong."""
        if self.column is not None:
            return
        self._text += more
        match = self._search(is_last)
        keep = max(0, len(self._text) - CLIP)
        if match is not None:
            at = self._gone + match.start()
            if is_last or match.end() < len(self._text) or at == self._doubtful:
                self.column = self._gone_characters + _characters(self._text[: match.start()])
                return
            self._doubtful = at
            keep = min(keep, max(0, match.start() - 1))
        self._gone_characters += _characters(self._text[:keep])
        self._gone += keep
        self._text = self._text[keep:]

    def _search(self, is_last: bool) -> re.Match[bytes] | None:
        if self._pattern.where(self._text) is None:
            return None
        text = self._text if is_last else self._text + _NO_END
        return within(LINE_S, partial(self._pattern.regex.search, text, 1 if self._gone else 0))


def column_of(file: LogFile, start: int, end: int, pattern: Pattern) -> Generator[None, None, int | None]:
    """Return the column of the first match in the line in these bytes; yields between slices of work.

    Raises TooLong.
    """
    tail = file.pread(max(start, end - CLIP), min(end - start, CLIP))
    end -= len(tail) - len(tail.rstrip(b"\r"))
    seen, rest = _Seen(pattern), b""
    while start < end:
        data = file.pread(start, min(PIECE, end - start))
        if not data:
            break
        start += len(data)
        data = rest + data
        begin = data.rfind(b"\r") + 1
        if begin:
            # A progress bar: all before is written over.
            seen = _Seen(pattern)
        cut = data.rfind(b"\x1b", max(begin, len(data) - _ESCAPE)) if start < end else -1
        cut = len(data) if cut < 0 else cut
        seen.take(without_escapes(data[begin:cut]), start >= end)
        rest = data[cut:]
        yield
    return seen.column


def _characters(text: bytes) -> int:
    return len(text.translate(None, _REST_OF_CHARACTER))
