"""One log file: its bytes, its index, its rows.

In: a file that a rank appends to. Out: bytes by offset, rows by line; `absorb` extends the index, a slice at a time.

**Never mmap: a truncated file would kill the agent. A file that shrank, was replaced, or has other bytes than before
where reading stopped is indexed again from the start, and its `epoch` changes.**
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.logs.index import BYTES_PER_BLOCK, Block, Covered, LineIndex, Sidecar
from remote_agent.text.levels import WARN
from remote_agent.text.rows import CLIP, Row, dropped_text, visible, visible_ends

if TYPE_CHECKING:
    from remote_agent.logs.progress import StepReader
    from remote_agent.wire.answers import LogKey

SLICE = 256 * 1024
# This many bytes before the place where reading stopped must be unchanged.
_STAMP = 16
_TAIL_OF_OLD_FILE = 64 * 1024


# This suffices for two generations of 32 ranks with three streams each; the usual limit is 1,024 open files.
OPEN_LIMIT = 192


class Descriptors:
    """Read-only descriptors by path; the least recently used is closed when there are too many."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def get(self, path: Path) -> int:
        """Return a descriptor that is valid until the next call; raises OSError."""
        fd = self._open.get(path)
        if fd is None:
            # O_NONBLOCK: a fifo in place of a log must not block the agent.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self._open[path] = fd
            if len(self._open) > OPEN_LIMIT:
                _, oldest = self._open.popitem(last=False)
                os.close(oldest)
        self._open.move_to_end(path)
        return fd

    def drop(self, path: Path) -> None:
        """Close the descriptor of a path that has been replaced."""
        fd = self._open.pop(path, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close all descriptors; a file that is read later is opened again."""
        while self._open:
            _, fd = self._open.popitem()
            with contextlib.suppress(OSError):
                os.close(fd)


_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_HOLE_STEP = 64 * 1024


def punch(fd: int, end: int) -> None:
    """Free the disk space of the bytes before `end`; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fallocate = libc.fallocate64 if hasattr(libc, "fallocate64") else libc.fallocate
    except AttributeError:
        raise OSError("this system has no fallocate") from None
    if fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_longlong(0), ctypes.c_longlong(end)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def hole_end(fd: int) -> int:
    """Return the offset of the first byte behind the hole, 0 for a file without one."""
    try:
        start = os.lseek(fd, 0, os.SEEK_DATA)
    except (OSError, AttributeError):
        return 0
    if not start:
        return 0
    # Part of the next file system block may have been zeroed, too.
    while data := os.pread(fd, _HOLE_STEP, start):
        text = data.lstrip(b"\0")
        if text:
            end = start + len(data) - len(text)
            return end if end >= BYTES_PER_BLOCK else 0
        start += len(data)
    return 0


class LogFile:
    """The log of one stream of one rank of one generation."""

    def __init__(self, key: LogKey, path: Path, descriptors: Descriptors, steps: StepReader, writable: bool) -> None:
        self.key = key
        self.path = path
        self._descriptors = descriptors
        self._steps = steps
        self._sidecar = Sidecar(path.with_suffix(".idx"), writable)
        self._writable = writable
        self._inode: int | None = None
        self._stamp = b""
        self._preexisting = 0
        """Bytes that existed before this agent: the file's mtime is an upper bound of their arrival."""
        self._mtime_ns = 0
        self._covered = 0
        self.index = LineIndex()
        self.size = 0
        self.epoch = 0
        self.dropped = 0
        """How many bytes at the front have been dropped from the disk."""
        self.last_ns: int | None = None
        """Arrival of the last bytes, or the file's mtime."""

    @property
    def behind(self) -> bool:
        """True while known bytes are not indexed."""
        return self.index.scanned < self.size

    @property
    def has_caught_up(self) -> bool:
        """True when everything that existed before this agent is indexed."""
        return self.index.scanned >= self._preexisting

    @property
    def is_external(self) -> bool:
        """True for a file outside the job's directory, to which the user's NCCL_DEBUG_FILE points: it is only read."""
        return self.key.stream == "nccl" and self.path.is_symlink()

    @property
    def last_read_ns(self) -> int | None:
        """Arrival of the last bytes, None for an empty file."""
        return self.last_ns if self.size else None

    def adopt(self) -> Iterator[None]:
        """Adopt a file that existed before this agent, with its sidecar; yields between slices of work."""
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
            # The remaining bytes may begin with NULs that the rank wrote.
            self.dropped = self.index.block(self.index.block_at(self.dropped)).offset
        if self.dropped:
            self.index.drop(self.dropped, self._mtime_ns)
        self._stamp = self.pread(max(0, self.index.scanned - _STAMP), min(_STAMP, self.index.scanned))
        tail = self.pread(max(0, self.size - _TAIL_OF_OLD_FILE), _TAIL_OF_OLD_FILE)
        self._steps.feed(self.key.stream, tail, self.last_ns)

    def absorb(self, now_ns: int) -> bool:
        """Index the next slice; returns True when there is more."""
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
        """Free about `count` of the oldest bytes on the disk, in whole blocks; raises OSError."""
        end = self.index.block(self.index.block_at(self.dropped + count)).offset
        if end - self.dropped < BYTES_PER_BLOCK:
            return
        fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            punch(fd, end)
        finally:
            os.close(fd)
        self.dropped = end
        self.index.drop(end, 0)

    def persist(self, is_complete: bool = False) -> None:
        """Write new index entries to the sidecar; is_complete: no more bytes are expected for now."""
        covered = None
        if is_complete and self.index.scanned > self._covered and self.last_ns is not None:
            covered = Covered(self.index.scanned, self.last_ns)
            self._covered = self.index.scanned
        self._sidecar.append(self.index.take_fresh(), covered)

    def pread(self, offset: int, length: int) -> bytes:
        """Return up to `length` bytes; fewer, or none, when the file is shorter or gone."""
        try:
            return os.pread(self._descriptors.get(self.path), length, offset)
        except OSError:
            return b""

    def bytes_of(self, block: Block) -> bytes:
        """Return the bytes of one block; if its last line is much longer than a block, only the first ones."""
        return self.pread(block.offset, min(block.end - block.offset, BYTES_PER_BLOCK + SLICE))

    def rows_of(self, block: Block, first: int = 0, stop: int | None = None) -> list[Row]:
        """Return the rows of one block, or those of its lines from `first` to before `stop` (numbers in the file)."""
        if block.offset < self.dropped:
            text = dropped_text(self.dropped)
            row = Row(block.line, 0, self.dropped - 1, block.t_ns, text, WARN)
            return [row] if first <= block.line and (stop is None or block.line < stop) else []
        data = self.bytes_of(block)
        rows: list[Row] = []
        start = 0
        stop = block.line + block.lines if stop is None else min(stop, block.line + block.lines)
        for line in range(block.line, stop):
            last = line == block.line + block.lines - 1
            newline = data.find(b"\n", start)
            if newline < 0 and not last:
                # The file shrank meanwhile: missing bytes have no rows; `absorb` will notice.
                break
            end = block.end - block.offset - block.closed if last else newline
            if line >= first:
                rows.append(self._row(block, line, data[start:end] if end <= len(data) else None, start, end))
            start = end + 1
        return rows

    def _row(self, block: Block, line: int, raw: bytes | None, start: int, end: int) -> Row:
        start, end = block.offset + start, block.offset + end
        text = visible(raw) if raw is not None else self.visible(start, end)
        return Row(line, start, end, block.t_ns + line - block.line, text)

    def visible(self, start: int, end: int) -> bytes:
        """Return the visible text of the line in these bytes."""
        if end - start <= CLIP:
            return visible(self.pread(start, end - start))
        return visible_ends(self.pread(start, CLIP), self.pread(end - CLIP, CLIP))

    def exact(self, row: Row) -> Row:
        """Return a row with the bytes of its line, clipped, where its text is only what a terminal shows of them."""
        size = min(row.end - row.offset, CLIP)
        if len(row.text) == size or row.offset < self.dropped:
            return row
        raw = self.pread(row.offset, size)
        # The file may have been rewritten meanwhile.
        return row if b"\n" in raw else row._replace(text=raw)

    def _take(self, data: bytes, now_ns: int) -> None:
        scanned = self.index.scanned
        mark = self.index.last_mark_ns
        if scanned < self._covered and mark is not None:
            data = data[: self._covered - scanned]
            self.index.feed(data, mark)
        elif scanned < self._preexisting:
            data = data[: self._preexisting - scanned]
            self.index.feed(data, self._mtime_ns)
        else:
            self.index.feed(data, now_ns)
            self.last_ns = now_ns
            self._steps.feed(self.key.stream, data, now_ns)
        self._stamp = (self._stamp + data)[-_STAMP:]
        if not self._writable:
            self.index.take_fresh()

    def _fits(self) -> bool:
        """Check that lines begin where the index says so."""
        count = len(self.index)
        # Bytes in a hole cannot be checked.
        first = self.index.block_at(self.dropped) + 1 if self.dropped else 1
        for number in range(first, count, max(1, count // 16)):
            if self.pread(self.index.block(number).offset - 1, 1) != b"\n":
                return False
        return count <= first or self.pread(self.index.block(count - 1).offset - 1, 1) == b"\n"

    def _find_hole(self) -> int:
        try:
            return hole_end(self._descriptors.get(self.path))
        except OSError:
            return 0

    def _replaced(self) -> None:
        self._descriptors.drop(self.path)
        self._sidecar.reset()
        self.index = LineIndex()
        self._stamp = b""
        self._preexisting = self._covered = self.dropped = 0
        self.epoch += 1
