"""The lines of a log that may matter, with their numbers, in bounded memory.

In: a path. Out: all lines of a short file; of a long one those around anything that sounds like trouble, and its end.
"""

from __future__ import annotations

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
    *(b"rror", b"ERROR", b"Traceback", b"xception", b"NCCL", b"RCCL", b"atal", b"FATAL", b"ignal", b"SIG"),
    *(b"ill", b"abort", b"Abort", b"imeout", b"imed out", b"memory", b"Memory", b"exit", b"denied", b"refused"),
    *(b"No space", b"corrupt", b"nan", b"NaN", b"OVERFLOW", b"CANCELLED", b"PREEMPT", b"atchdog", b"mismatch"),
    *(b"match", b"closed", b"failed", b"fault", b"GPU Hang", b"free()", b"Bus", b"ECC", b"inf", b"pickle", b"socket"),
)


def read_lines(path: Path, progress: Callable[[int], None] = lambda _bytes: None) -> list[Line]:
    """Return the lines that may matter; raises OSError. `progress` gets the bytes read since the last time."""
    whole = path.stat().st_size <= WHOLE_BYTES
    if whole:
        return [Line(number, _text(raw)) for number, raw in _raw_lines(path, progress)]
    return _chosen(path, progress)


def _chosen(path: Path, progress: Callable[[int], None]) -> list[Line]:
    first: list[Line] = []
    last: deque[Line] = deque(maxlen=KEPT_MAX)
    before: deque[tuple[int, bytes]] = deque(maxlen=BEFORE)
    end: deque[tuple[int, bytes]] = deque(maxlen=END_LINES)
    after = 0
    newest = 0

    def keep(number: int, raw: bytes) -> None:
        nonlocal newest
        newest = number
        (first if len(first) < KEPT_MAX else last).append(Line(number, _text(raw)))

    for number, raw in _raw_lines(path, progress):
        if any(word in raw for word in HOT):
            for earlier in before:
                keep(*earlier)
            before.clear()
            keep(number, raw)
            after = AFTER
        elif after:
            keep(number, raw)
            after -= 1
        else:
            before.append((number, raw))
        end.append((number, raw))
    for number, raw in end:
        if number > newest:
            keep(number, raw)
    return [*first, *last]


def _raw_lines(path: Path, progress: Callable[[int], None]) -> Iterator[tuple[int, bytes]]:
    """Yield numbered lines, each clipped; a line of any length takes no more memory than a block."""
    number, rest, skipping = 1, b"", False
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            progress(len(block))
            *lines, tail = block.split(b"\n")
            for line in lines:
                if not skipping:
                    yield number, (rest + line)[:LINE_MAX]
                number, rest, skipping = number + 1, b"", False
            if not skipping:
                rest += tail
            if len(rest) > LINE_MAX:
                yield number, rest[:LINE_MAX]
                rest, skipping = b"", True
    if rest:
        yield number, rest


def _text(raw: bytes) -> str:
    return clean(raw.decode("utf-8", "replace"))
