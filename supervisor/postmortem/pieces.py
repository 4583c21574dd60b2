"""The lines of a piece of a long file that may matter; several processes take a piece each.

In: path, first and last byte. Out: Picked; lines as bytes, with their numbers in the piece.
"""

from __future__ import annotations

import io
import marshal
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from supervisor.postmortem.scan import Scan

BLOCK = 1 << 20
LINE_MAX = 8192
# So many bytes are kept for each line of a limit: a few thousand long lines would take minutes to judge.
LINE_MEAN = 200
# What is kept around a line that sounds like trouble; a traceback may be long.
BEFORE, AFTER = 4, 60
Numbered = tuple[int, bytes]


class Limit(NamedTuple):
    """How many lines, of usual length, are kept of a file: the first and the last that may matter, and its end."""

    kept: int
    end: int


class Piece(NamedTuple):
    """The lines that begin at these bytes of a file."""

    path: str
    begin: int
    end: int
    limit: Limit


class Picked(NamedTuple):
    """What was found in a piece; numbers count from 0."""

    lines: int
    kept: list[Numbered]
    head: list[bytes]
    """The first lines: they are kept if the piece before ends with trouble."""
    last: list[Numbered]
    first_hot: int | None
    after: int
    """How many lines of the next piece are to be kept."""


class Kept:
    """The first and the last of many lines, each once, in order."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._first: list[Numbered] = []
        self._last: deque[Numbered] = deque()
        self._newest = -1
        self._first_room = self._last_room = limit * LINE_MEAN

    def add(self, line: Numbered) -> None:
        """Take a line in; one that is not behind all others is there already."""
        if line[0] <= self._newest:
            return
        self._newest = line[0]
        size = len(line[1])
        if not self._last and len(self._first) < self._limit and size <= self._first_room:
            self._first.append(line)
            self._first_room -= size
            return
        self._last.append(line)
        self._last_room -= size
        while len(self._last) > self._limit or self._last_room < 0:
            self._last_room += len(self._last.popleft()[1])

    def lines(self) -> list[Numbered]:
        """Return what is kept."""
        return [*self._first, *self._last]


def pick(piece: Piece) -> Picked:
    """Return the lines of a piece that may matter; raises OSError."""
    picker = _Picker(piece.limit)
    with Path(piece.path).open("rb") as file:
        start, stop = _line_start(file, piece.begin), _line_start(file, piece.end)
        for block in _blocks(file, start, stop):
            picker.feed(block)
    return picker.picked()


class _Picker:
    def __init__(self, limit: Limit) -> None:
        self._end = limit.end
        self._scan = Scan()
        self._kept = Kept(limit.kept)
        self._head: list[bytes] = []
        self._last: list[Numbered] = []
        self._lines = 0
        self._first_hot: int | None = None
        self._after = 0

    def feed(self, block: bytes) -> None:
        """Look through the next whole lines."""
        first = self._lines
        hot = self._scan.hot(block)
        if hot or self._after or len(self._head) < AFTER:
            lines = block.split(b"\n")
            self._head += map(shown, lines[: AFTER - len(self._head)])
            self._look(first, lines, hot)
        self._lines = first + block.count(b"\n") + 1
        ending = block.rsplit(b"\n", self._end)[-self._end :]
        recent = list(enumerate(map(shown, ending), self._lines - len(ending)))
        self._last = [*self._last, *recent][-self._end :]

    def picked(self) -> Picked:
        """Return what was found."""
        return Picked(self._lines, self._kept.lines(), self._head, self._last, self._first_hot, self._after)

    def _look(self, first: int, lines: list[bytes], hot: list[int]) -> None:
        self._keep(first, lines, 0, self._after)
        self._after = max(0, self._after - len(lines))
        for index in hot:
            if self._first_hot is None:
                self._first_hot = first + index
            if index < BEFORE:
                for line in self._last[index - BEFORE :]:
                    self._kept.add(line)
            self._keep(first, lines, index - BEFORE, index + AFTER + 1)
            self._after = max(0, index + AFTER + 1 - len(lines))

    def _keep(self, first: int, lines: list[bytes], begin: int, end: int) -> None:
        for index in range(max(0, begin), min(end, len(lines))):
            self._kept.add((first + index, shown(lines[index])))


def shown(raw: bytes) -> bytes:
    """Return a line as a terminal shows it in the end, the last state of a progress bar, of limited length."""
    if b"\r" in raw:
        raw = raw.rstrip(b"\r").rpartition(b"\r")[2]
    return raw[:LINE_MAX]


def _line_start(file: io.BufferedReader, offset: int) -> int:
    """Return where the first line begins that begins there or later."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    while chunk := file.read(LINE_MAX):
        newline = chunk.find(b"\n")
        if newline >= 0:
            return file.tell() - len(chunk) + newline + 1
    return file.tell()


def _blocks(file: io.BufferedReader, start: int, stop: int) -> Iterator[bytes]:
    """Yield whole lines; a line of any length takes no more memory than a block."""
    rest, skipping = b"", False
    file.seek(start)
    while block := file.read(min(BLOCK, stop - file.tell())):
        if skipping:
            _, newline, block = block.partition(b"\n")
            if not newline:
                continue
            block, skipping = rest + b"\n" + block, False
        else:
            block = rest + block
        whole, newline, rest = block.rpartition(b"\n")
        if newline:
            yield whole
        if len(rest) > LINE_MAX:
            # Of a progress bar without a line's end the last state will do.
            state = rest.rpartition(b"\r")[2]
            rest, skipping = state[:LINE_MAX], len(state) > LINE_MAX
    if rest:
        yield rest


class Helper:
    """A process that takes pieces, and ends when we do. Where it cannot run they are taken here."""

    def __init__(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        except OSError:
            self._process = None

    def pick(self, piece: Piece) -> Picked:
        """Return the lines of a piece that may matter; raises OSError."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return pick(piece)
        try:
            marshal.dump((*piece[:3], tuple(piece.limit)), process.stdin)
            process.stdin.flush()
            return Picked(*marshal.load(process.stdout))
        except (OSError, EOFError, ValueError, TypeError):
            if self._process is not process:
                raise  # nobody waits for it any more
            self.close()
            return pick(piece)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def serve() -> None:
    """Answer each piece on stdin with what was found in it, until the other end is gone."""
    # Ctrl-C is for the process that asked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            path, begin, end, limit = marshal.load(sys.stdin.buffer)
            found = pick(Piece(path, begin, end, Limit(*limit)))
            marshal.dump(tuple(found), sys.stdout.buffer)
            sys.stdout.buffer.flush()
        except (EOFError, OSError):
            return


if __name__ == "__main__":
    serve()
