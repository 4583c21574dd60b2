"""One log file: its bytes, its index, its rows.

In: a file that a worker appends to. Out: bytes by offset, rows by line; the index grows by `absorb`, a slice at a time.

**Never mmap: a truncated file would kill us. A file that shrank, was replaced, or holds other bytes than before at the
place where we stopped reading is indexed again from the start, and `epoch` tells readers so.**
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.logs import holes
from remote_agent.logs.index import BYTES_PER_BLOCK, Block, LineIndex
from remote_agent.logs.levels import WARN
from remote_agent.logs.rows import CLIP, Row, dropped_text, visible, visible_ends
from remote_agent.logs.sidecar import Covered, Sidecar

if TYPE_CHECKING:
    from remote_agent.logs.descriptors import Descriptors
    from remote_agent.logs.progress import StepReader

SLICE = 256 * 1024
STREAMS = ("stdout", "stderr", "nccl")
# So many bytes before the place where we stopped must still be the same ones.
_STAMP = 16
_TAIL_OF_OLD_FILE = 64 * 1024


class Key(NamedTuple):
    """Which stream of which rank of which generation."""

    generation: int
    rank: int
    stream: str


class LogFile:
    """The log of one stream of one rank of one generation."""

    def __init__(self, key: Key, path: Path, descriptors: Descriptors, steps: StepReader, writable: bool) -> None:
        self.key = key
        self.path = path
        self._descriptors = descriptors
        self._steps = steps
        self._sidecar = Sidecar(path.with_suffix(".idx"), writable)
        self._writable = writable
        self._inode: int | None = None
        self._stamp = b""
        self._preexisting = 0
        """Bytes whose arrival nobody saw: the file's mtime is their upper bound."""
        self._mtime_ns = 0
        self._covered = 0
        self.index = LineIndex()
        self.size = 0
        self.epoch = 0
        self.dropped = 0
        """So many bytes at the front are gone from the disk."""
        self.last_ns: int | None = None
        """Arrival of the last bytes, or the file's mtime."""

    @property
    def behind(self) -> bool:
        """True while bytes are known that are not indexed yet."""
        return self.index.scanned < self.size

    @property
    def is_counted(self) -> bool:
        """True when all that was there before us is indexed: from then on its lines are those that came."""
        return self.index.scanned >= self._preexisting

    @property
    def version(self) -> str:
        """Another one when the file is another one, or was written anew."""
        return f"{self._inode}.{self.epoch}"

    @property
    def is_the_users(self) -> bool:
        """True for the file that he lets NCCL write to, which we only read."""
        return self.key.stream == "nccl" and self.path.is_symlink()

    @property
    def last_read_ns(self) -> int | None:
        """Arrival of the last bytes, None for an empty file."""
        return self.last_ns if self.size else None

    def adopt(self) -> Iterator[None]:
        """Take over a file that was there before us, with its sidecar; yields between slices of work."""
        try:
            stat = os.stat(self.path)
        except OSError:
            return
        self._inode, self.size, self._mtime_ns = stat.st_ino, stat.st_size, stat.st_mtime_ns
        self._preexisting = self.size
        self.last_ns = stat.st_mtime_ns
        for count, record in enumerate(self._sidecar.load()):
            if isinstance(record, Covered):
                self._covered = record.offset
                if record.offset == self.size:
                    self.last_ns = record.t_ns
            elif record.offset >= self.size or not self.index.restore(record):
                self._sidecar.reject_last()
                break
            if count % 4096 == 4095:
                yield
        self.dropped = self._find_hole()
        if not self._fits():
            self._sidecar.reset()
            self.index = LineIndex()
            self._covered = 0
        if self.dropped and self.dropped <= self.index.scanned:
            # What is left may begin with NULs of its own.
            self.dropped = self.index.block(self.index.block_at(self.dropped)).offset
        if self.dropped:
            self.index.drop(self.dropped, self._mtime_ns)
        self._stamp = self.pread(max(0, self.index.scanned - _STAMP), min(_STAMP, self.index.scanned))
        tail = self.pread(max(0, self.size - _TAIL_OF_OLD_FILE), _TAIL_OF_OLD_FILE)
        self._steps.feed(self.key.stream, tail, self.last_ns)

    def absorb(self, now_ns: int) -> bool:
        """Index the next slice; True when there is more."""
        try:
            stat = os.stat(self.path)
        except OSError:
            return False
        if self._inode not in (None, stat.st_ino) or stat.st_size < self.index.scanned:
            self._replaced()
        self._inode, self.size = stat.st_ino, stat.st_size
        scanned = self.index.scanned
        if scanned >= self.size:
            return False
        start = scanned - len(self._stamp)
        data = self.pread(start, min(SLICE, self.size - scanned) + len(self._stamp))
        if not data.startswith(self._stamp):
            self._replaced()
            return True
        data = data[len(self._stamp) :]
        if not data:
            return False
        self._take(data, now_ns)
        return self.index.scanned < self.size

    def drop(self, count: int) -> None:
        """Give at least about so many of the oldest bytes back to the disk, in whole blocks; raises OSError."""
        end = self.index.block(self.index.block_at(self.dropped + count)).offset
        if end - self.dropped < BYTES_PER_BLOCK:
            return
        fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            holes.punch(fd, end)
        finally:
            os.close(fd)
        self.dropped = end
        self.index.drop(end, 0)

    def persist(self, last_word: bool = False) -> None:
        """Write new index entries to the sidecar; last_word: nothing more is expected for now."""
        fresh, self.index.fresh = self.index.fresh, []
        covered = None
        if last_word and self.index.scanned > self._covered and self.last_ns is not None:
            covered = Covered(self.index.scanned, self.last_ns)
            self._covered = self.index.scanned
        self._sidecar.append(fresh, covered)

    def pread(self, offset: int, length: int) -> bytes:
        """Return up to length bytes; fewer, also none, when the file is shorter or gone."""
        try:
            return os.pread(self._descriptors.get(self.path), length, offset)
        except OSError:
            return b""

    def bytes_of(self, block: Block) -> bytes:
        """Return the bytes of one block; where its last line is much longer than a block, only the first ones."""
        return self.pread(block.offset, min(block.end - block.offset, BYTES_PER_BLOCK + SLICE))

    def rows_of(self, block: Block, first: int = 0, stop: int | None = None) -> list[Row]:
        """Return the rows of one block, or those of its lines from `first` to before `stop` (numbers in the file)."""
        if block.offset < self.dropped:
            text = dropped_text(self.dropped)
            row = Row(block.line, 0, self.dropped - 1, block.t_ns, block.upper, text, WARN)
            return [row] if first <= block.line and (stop is None or block.line < stop) else []
        data = self.bytes_of(block)
        rows: list[Row] = []
        start = 0
        stop = block.line + block.lines if stop is None else min(stop, block.line + block.lines)
        for line in range(block.line, stop):
            last = line == block.line + block.lines - 1
            newline = data.find(b"\n", start)
            if newline < 0 and not last:
                # The file shrank under us: what is gone has no rows; `absorb` will notice.
                break
            end = block.end - block.offset - block.closed if last else newline
            if line >= first:
                rows.append(self._row(block, line, data[start:end] if end <= len(data) else None, start, end))
            start = end + 1
        return rows

    def _row(self, block: Block, line: int, raw: bytes | None, start: int, end: int) -> Row:
        start, end = block.offset + start, block.offset + end
        text = visible(raw) if raw is not None else self.visible(start, end)
        return Row(line, start, end, block.t_ns + line - block.line, block.upper, text)

    def visible(self, start: int, end: int) -> bytes:
        """Return the visible text of the line in these bytes."""
        if end - start <= CLIP:
            return visible(self.pread(start, end - start))
        return visible_ends(self.pread(start, CLIP), self.pread(end - CLIP, CLIP))

    def last_lines(self, count: int, limit: int) -> list[Row]:
        """Return the last rows without the index, numbered from the end (-1 is the last); limit: bytes read."""
        end = self.size
        data = b""
        while end - len(data) > 0 and len(data) < limit and data.count(b"\n") <= count:
            step = min(CLIP, end - len(data))
            piece = self.pread(end - len(data) - step, step)
            if len(piece) < step:
                break
            data = piece + data
        offset = end - len(data)
        lines = data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        rows: list[Row] = []
        for number, raw in enumerate(lines, -len(lines)):
            text = visible(raw)
            rows.append(Row(number, offset, offset + len(raw), self._mtime_ns, True, text))
            offset += len(raw) + 1
        # The first one may lack its beginning.
        return rows[-count:] if len(rows) > count or end == len(data) else rows[1:] or rows

    def _take(self, data: bytes, now_ns: int) -> None:
        scanned = self.index.scanned
        mark = self.index.last_mark_ns
        if scanned < self._covered and mark is not None:
            data = data[: self._covered - scanned]
            self.index.feed(data, mark)
        elif scanned < self._preexisting:
            data = data[: self._preexisting - scanned]
            self.index.feed(data, self._mtime_ns, upper=True)
        else:
            self.index.feed(data, now_ns)
            self.last_ns = now_ns
            self._steps.feed(self.key.stream, data, now_ns)
        self._stamp = (self._stamp + data)[-_STAMP:]
        if not self._writable:
            self.index.fresh.clear()

    def _fits(self) -> bool:
        """Look whether lines really begin where the index says so."""
        count = len(self.index)
        # What a hole has swallowed cannot be looked at.
        first = self.index.block_at(self.dropped) + 1 if self.dropped else 1
        for number in range(first, count, max(1, count // 16)):
            if self.pread(self.index.block(number).offset - 1, 1) != b"\n":
                return False
        return count <= first or self.pread(self.index.block(count - 1).offset - 1, 1) == b"\n"

    def _find_hole(self) -> int:
        try:
            return holes.hole_end(self._descriptors.get(self.path))
        except OSError:
            return 0

    def _replaced(self) -> None:
        self._descriptors.drop(self.path)
        self._sidecar.reset()
        self.index = LineIndex()
        self._stamp = b""
        self._preexisting = self._covered = self.dropped = 0
        self.epoch += 1
