"""The lines of a log that may matter, with their numbers, in bounded memory.

In: a path. Out: all lines of a short file; of a long one those around anything that sounds like trouble, and its end.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from remote_agent.diagnose.ranks import Line, clean

# Above this only what may matter is kept.
WHOLE_BYTES = 8 << 20
BLOCK = 1 << 20
LINE_MAX = 8192
# What is kept around a line that sounds like trouble; a traceback may be long.
BEFORE, AFTER = 4, 60
KEPT_MAX = 20_000
END_LINES = 400
# Every signature of the diagnosis holds one of these; a block without any is only counted.
HOT = (
    *(b"rror", b"ERROR", b"xception", b"CCL", b"FATAL", b"SIG", b"kill", b"Kill", b"bort", b"imed out", b"imeout"),
    *(b"exitcode", b"return code", b"denied", b"refused", b"No space", b"nan", b"NaN", b"is inf", b"OVERFLOW"),
    *(b"CANCELLED", b"closed", b"ailed", b"tion fault", b"ree()"),
)
_HOT = re.compile(b"|".join(re.escape(word) for word in HOT))


def read_lines(path: Path, progress: Callable[[int], None] = lambda _bytes: None) -> list[Line]:
    """Return the lines that may matter; raises OSError. `progress` gets the bytes read since the last time."""
    if path.stat().st_size > WHOLE_BYTES:
        return _Chosen(path, progress).lines()
    return [
        Line(first + offset, _text(raw))
        for first, block in _blocks(path, progress)
        for offset, raw in enumerate(_split(block))
    ]


class _Chosen:
    """Reads a long file: most blocks are only counted."""

    def __init__(self, path: Path, progress: Callable[[int], None]) -> None:
        self._blocks = _blocks(path, progress)
        self._first: list[Line] = []
        self._last: deque[Line] = deque(maxlen=KEPT_MAX)
        self._newest = 0
        self._after = 0

    def lines(self) -> list[Line]:
        """Return the lines that may matter, and the end."""
        before: list[tuple[int, bytes]] = []
        end: list[tuple[int, bytes]] = []
        for first, block in self._blocks:
            if self._after or any(word in block for word in HOT):
                recent = list(enumerate(_split(block), first))
                self._look(before, recent)
            else:
                recent = _ending(first, block)
            before = recent[-BEFORE:]
            end = [*end[-END_LINES:], *recent[-END_LINES:]][-END_LINES:]
        for number, raw in end:
            self._keep(number, raw)
        return [*self._first, *self._last]

    def _look(self, before: list[tuple[int, bytes]], recent: list[tuple[int, bytes]]) -> None:
        known = [*before, *recent]
        for at in range(len(before), len(known)):
            if _HOT.search(known[at][1]):
                for earlier in known[max(0, at - BEFORE) : at]:
                    self._keep(*earlier)
                self._after = AFTER + 1
            if self._after:
                self._keep(*known[at])
                self._after -= 1

    def _keep(self, number: int, raw: bytes) -> None:
        if number > self._newest:
            self._newest = number
            (self._first if len(self._first) < KEPT_MAX else self._last).append(Line(number, _text(raw)))


def _blocks(path: Path, progress: Callable[[int], None]) -> Iterator[tuple[int, bytes]]:
    """Yield whole lines and the first one's number; a line of any length takes no more memory than a block."""
    number, rest, skipping = 1, b"", False
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            progress(len(block))
            if skipping:
                _, newline, block = block.partition(b"\n")
                if not newline:
                    continue
                block, skipping = rest + b"\n" + block, False
            else:
                block = rest + block
            whole, newline, rest = block.rpartition(b"\n")
            if newline:
                yield number, whole
                number += whole.count(b"\n") + 1
            if len(rest) > LINE_MAX:
                rest, skipping = rest[:LINE_MAX], True
    if rest:
        yield number, rest


def _ending(first: int, block: bytes) -> list[tuple[int, bytes]]:
    """Return the last lines of a block with their numbers."""
    last = block.rsplit(b"\n", END_LINES)[-END_LINES:]
    begin = first + block.count(b"\n") + 1 - len(last)
    return [(begin + offset, raw[:LINE_MAX]) for offset, raw in enumerate(last)]


def _split(block: bytes) -> list[bytes]:
    return [raw[:LINE_MAX] for raw in block.split(b"\n")]


def _text(raw: bytes) -> str:
    return clean(raw.decode("utf-8", "replace"))
