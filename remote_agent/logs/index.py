"""The sparse index of one file: where lines begin and when they came.

In: the file's bytes in order, in pieces of any size, each with its time of arrival.
Out: blocks of at most 256 lines with offset, arrival and level bits; line <-> time <-> offset.

Bytes at the front may have been dropped from the disk (`drop`): one line, in its own block, then stands for them.

**An entry stands at the start of a line. Lines, offsets and times grow strictly from entry to entry, and a block
holds at most 256 lines and, but for its last line, at most 1 MiB.** Within a block line k came k ns after the first
one, so that the times of a file's lines are all different and order them.

`Sidecar` keeps an index on disk next to its log file, so that times of arrival survive the agent: an append-only file
of 32-byte records behind a header of the same size. Each record has a checksum; records from the first one on that is
cut off, damaged or does not fit the log are ignored, and the index is rebuilt from there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from remote_agent.text.levels import DEBUG, ERROR, INFO, NCCL, OVERLAP, WARN, block_bits

LINES_PER_BLOCK = 256
BYTES_PER_BLOCK = 1024 * 1024
# A line that arrives this long after the last entry gets its own entry, so that slow output is merged in order.
MARK_GAP_NS = 10_000_000
# Above this number, entries of the older half are joined; lines and bytes per block stay bounded.
ENTRIES_LIMIT = 32_768
_NEWLINE = b"\n"
# Dropped bytes may have held lines of any level and of NCCL: a reader who asks for those sees the line for them.
DROPPED = DEBUG | INFO | WARN | ERROR | NCCL


# For each level, this matches the bits of a block that may hold a line of that level or a worse one.
_OF_LEVEL = {
    level: re.compile(b"[" + b"".join(b"\\x%02x" % bits for bits in range(256) if bits & (NCCL - 1) >= level) + b"]")
    for level in (0, DEBUG, INFO, WARN, ERROR)
}

log = logging.getLogger(__name__)

_MAGIC = b"supervisor log index 1\n".ljust(32, b"\0")
_RECORD = struct.Struct("<QQqBBH")
_CHECK = struct.Struct("<I")
SIZE = _RECORD.size + _CHECK.size
# This flag marks no entry: all bytes before `offset` are covered by the entries before this record.
_FLAG_COVERED = 2
# The bits include NCCL's; those of older agents do not.
_FLAG_NCCL = 4
_READ_RECORDS = 8192


class Block(NamedTuple):
    """Lines [line, line + lines) in bytes [offset, end); `closed`: the last line ends with a newline at end - 1.

    nccl: lines of NCCL may be among them.
    """

    line: int
    lines: int
    offset: int
    end: int
    t_ns: int
    bits: int
    closed: bool
    nccl: bool


class IndexEntry(NamedTuple):
    """A new index entry, with the level bits of the block before it: what the sidecar keeps."""

    line: int
    offset: int
    t_ns: int
    bits_before: int


def after_newlines(data: bytes, start: int, wanted: int, mean: int) -> tuple[int, int]:
    """Return the position behind the wanted-th newline from `start` on, or -1, and the number of newlines seen.

    mean: expected bytes per line.
    """
    length, left = len(data), wanted
    while left > 8 and start < length:
        end = min(length, start + left * mean)
        seen = data.count(_NEWLINE, start, end)
        if seen > left:
            if mean == 1:
                break
            mean = max(1, mean * left // (seen + 1))
            continue
        left -= seen
        if not left:
            return data.rfind(_NEWLINE, start, end) + 1, wanted
        if end == length:
            return -1, wanted - left
        mean = max(mean, (end - start) // (seen + 1))
        start = end
    while left:
        start = data.find(_NEWLINE, start) + 1
        if not start:
            return -1, wanted - left
        left -= 1
    return start, wanted


class LineIndex:
    """Sparse index of one file, fed with its bytes."""

    __slots__ = (
        "_bits", "_carry", "_limit", "_lines", "_mean", "_offsets", "_times",
        "fresh", "line_start", "newlines", "scanned",
    )  # fmt: skip

    def __init__(self) -> None:
        self._lines = array("Q")
        self._offsets = array("Q")
        self._times = array("q")
        self._bits = array("B")
        self._carry = b""
        self._mean = 100
        self._limit = ENTRIES_LIMIT
        self.scanned = 0
        self.newlines = 0
        self.line_start = 0
        """Offset of the unfinished last line."""
        self.fresh: list[IndexEntry] = []
        """New entries that have not been written to the sidecar."""

    def take_fresh(self) -> list[IndexEntry]:
        """Return the new entries, which then count as written."""
        fresh, self.fresh = self.fresh, []
        return fresh

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def total_lines(self) -> int:
        """Number of lines, the unfinished one included."""
        return self.newlines + (1 if self.scanned > self.line_start else 0)

    @property
    def first_ns(self) -> int | None:
        """Arrival of the first line."""
        return self._times[0] if self._times else None

    @property
    def last_mark_ns(self) -> int | None:
        """Arrival of the first line of the last block."""
        return self._times[-1] if self._times else None

    def feed(self, data: bytes, t_ns: int) -> None:
        """Index the next bytes of the file, which arrived at this time."""
        if not data:
            return
        base, seg, pos = self.scanned, 0, 0
        at_start = self.line_start == base
        if at_start and self._due(t_ns):
            self._close_block(b"", 0)
            self._add(self.newlines, base, t_ns)
        elif t_ns - self._times[-1] >= MARK_GAP_NS:
            pos = data.find(_NEWLINE) + 1
            if 0 < pos < len(data):
                self.newlines += 1
                self._close_block(data[:pos], pos)
                self._add(self.newlines, base + pos, t_ns)
                seg = pos
            else:
                pos = 0
        while True:
            nxt, lines = self._next_entry(data, pos, base)
            self.newlines += lines
            if nxt <= 0 or nxt == len(data):
                break
            self._close_block(data[seg:nxt], nxt - seg)
            self._add(self.newlines, base + nxt, t_ns)
            pos = seg = nxt
        self._bits[-1] = block_bits(self._carry + data[seg:], self._bits[-1])
        self._carry = (self._carry + data)[-OVERLAP:]
        last = data.rfind(_NEWLINE)
        if last >= 0:
            self.line_start = base + last + 1
        self.scanned = base + len(data)

    @property
    def first_line(self) -> int:
        """Number of the first line; the ones before it have been dropped."""
        return self._lines[0] if self._lines else 0

    def drop(self, end: int, t_ns: int) -> None:
        """Let one line stand for all bytes before `end`, the start of a block or the end of bytes not indexed.

        t_ns: the time of that line where none of these bytes was indexed.
        """
        if end > self.scanned:
            line = self.total_lines
            t_ns = max(t_ns, self._times[-1] + 1 if self._times else t_ns)
            if not self._lines:
                self.fresh.append(IndexEntry(0, 0, t_ns, 0))
            kept = len(self._lines)
            self.newlines, self.line_start, self.scanned, self._carry = line + 1, end, end, b""
        else:
            kept = self.block_at(end)
            line = self._lines[kept] - 1
            t_ns = self._times[kept - 1] + line - self._lines[kept - 1]
        for name, value in (("_lines", line), ("_offsets", 0), ("_times", t_ns), ("_bits", DROPPED)):
            old = getattr(self, name)
            setattr(self, name, array(old.typecode, [value]) + old[kept:])

    def restore(self, entry: IndexEntry) -> bool:
        """Add the next entry of a sidecar; returns False when it does not continue the entries before it."""
        if self._lines:
            lines = entry.line - self._lines[-1]
            grows = lines > 0 and entry.offset > self._offsets[-1] and entry.t_ns > self._times[-1]
            if not grows or lines > entry.offset - self._offsets[-1]:
                return False
            self._bits[-1] = entry.bits_before
        elif entry.line or entry.offset:
            return False
        self._push(entry.line, entry.offset, entry.t_ns)
        self.newlines = entry.line
        self.line_start = self.scanned = entry.offset
        return True

    def blocks_of(self, line: int) -> int:
        """Return the number of the block that holds this line."""
        return bisect_right(self._lines, line) - 1

    def block_at(self, offset: int) -> int:
        """Return the number of the block that holds this byte."""
        return bisect_right(self._offsets, offset) - 1

    def block(self, number: int) -> Block:
        """Return one block; number counts from 0 to len - 1."""
        line, offset, bits = self._lines[number], self._offsets[number], self._bits[number]
        if number + 1 < len(self._lines):
            count, end, closed = self._lines[number + 1] - line, self._offsets[number + 1], True
        else:
            count, end, closed = self.total_lines - line, self.scanned, self.line_start == self.scanned
        return Block(line, count, offset, end, self._times[number], bits & (NCCL - 1), closed, bool(bits & NCCL))

    def next_of_level(self, number: int, level: int) -> int:
        """Return the number of the first block from this one on that may hold lines of a level or worse; else len."""
        match = _OF_LEVEL[level].search(self._bits, number)
        return match.start() if match is not None else len(self._bits)

    def time_of(self, line: int) -> int:
        """Return when a line arrived."""
        block = self.block(max(0, self.blocks_of(line)))
        return block.t_ns + max(0, line - block.line)

    def lines_before(self, t_ns: int) -> int:
        """Return how many lines arrived before this time."""
        number = bisect_left(self._times, t_ns) - 1
        if number < 0:
            return self.first_line
        block = self.block(number)
        return block.line + min(block.lines, t_ns - block.t_ns)

    def offset_after(self, t_ns: int, floor: int) -> int | None:
        """Return the offset of the first entry that arrived after t_ns, if it lies behind `floor`."""
        number = bisect_right(self._times, t_ns)
        if number < len(self._offsets) and self._offsets[number] > floor:
            return self._offsets[number]
        return None

    def _due(self, t_ns: int) -> bool:
        if not self._lines:
            return True
        return (
            self.newlines - self._lines[-1] >= LINES_PER_BLOCK
            or self.scanned - self._offsets[-1] >= BYTES_PER_BLOCK
            or (t_ns - self._times[-1] >= MARK_GAP_NS and self.newlines > self._lines[-1])
        )

    def _next_entry(self, data: bytes, pos: int, base: int) -> tuple[int, int]:
        """Return where the block that is open at `pos` must end, and the number of newlines up to there.

        0 or -1: the block need not end in this data, and the newlines are those up to its end.
        """
        wanted = max(1, LINES_PER_BLOCK - (self.newlines - self._lines[-1]))
        by_lines, lines = after_newlines(data, pos, wanted, self._mean)
        if by_lines > 0:
            self._mean = max(1, (by_lines - pos) // wanted)
        full = self._offsets[-1] + BYTES_PER_BLOCK - base
        if full >= len(data) or 0 < by_lines <= full:
            return by_lines, lines
        by_bytes = data.find(_NEWLINE, max(pos, full - 1)) + 1
        if by_bytes <= 0 or by_bytes == by_lines:
            return by_lines, lines
        return by_bytes, data.count(_NEWLINE, pos, by_bytes)

    def _close_block(self, data: bytes, length: int) -> None:
        if self._bits and length:
            self._bits[-1] = block_bits(self._carry + data, self._bits[-1])
        if length:
            self._carry = b""

    def _add(self, line: int, offset: int, t_ns: int) -> None:
        before = self._bits[-1] if self._bits else 0
        if self._lines:
            t_ns = max(t_ns, self._times[-1] + line - self._lines[-1])
        self._push(line, offset, t_ns)
        self.fresh.append(IndexEntry(line, offset, t_ns, before))

    def _push(self, line: int, offset: int, t_ns: int) -> None:
        if len(self._lines) >= self._limit:
            self._thin()
        self._lines.append(line)
        self._offsets.append(offset)
        self._times.append(t_ns)
        self._bits.append(0)

    def _thin(self) -> None:
        """Join neighbouring blocks in the older half where the joined block stays within its bounds."""
        half = len(self._lines) // 2
        kept = [0]
        for number in range(1, half):
            first = kept[-1]
            after = number + 1
            joined = self._lines[after] - self._lines[first] <= LINES_PER_BLOCK
            if joined and self._offsets[after] - self._offsets[first] <= BYTES_PER_BLOCK:
                self._bits[first] |= self._bits[number]
            else:
                kept.append(number)
        for name in ("_lines", "_offsets", "_times", "_bits"):
            old = getattr(self, name)
            new = array(old.typecode, [old[number] for number in kept])
            new.extend(old[half:])
            setattr(self, name, new)
        if len(self._lines) > self._limit * 3 // 4:
            self._limit *= 2


class Covered(NamedTuple):
    """How far the index reached when the agent stopped, and when the last bytes arrived."""

    offset: int
    t_ns: int


def _pack(line: int, offset: int, t_ns: int, bits: int, flags: int) -> bytes:
    record = _RECORD.pack(line, offset, t_ns, bits, flags, 0)
    return record + _CHECK.pack(zlib.crc32(record))


class Sidecar:
    """One index file; a reader (writable=False) never changes it."""

    def __init__(self, path: Path, writable: bool) -> None:
        self.path = path
        self._writable = writable
        self._good_size: int | None = None
        """Bytes of the file that hold whole, valid records; None before load or reset."""

    def load(self) -> Iterator[IndexEntry | Covered]:
        """Yield the valid records in order, up to the first invalid one."""
        self._good_size = 0
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            if file.read(SIZE) != _MAGIC:
                return
            self._good_size = SIZE
            while True:
                block = file.read(SIZE * _READ_RECORDS)
                for start in range(0, len(block) - SIZE + 1, SIZE):
                    record = block[start : start + SIZE]
                    if _CHECK.unpack_from(record, _RECORD.size)[0] != zlib.crc32(record[: _RECORD.size]):
                        return
                    line, offset, t_ns, bits, flags, _ = _RECORD.unpack_from(record)
                    self._good_size += SIZE
                    if flags & _FLAG_COVERED:
                        yield Covered(offset, t_ns)
                    else:
                        bits |= 0 if flags & _FLAG_NCCL else NCCL
                        yield IndexEntry(line, offset, t_ns, bits)
                if len(block) < SIZE * _READ_RECORDS:
                    return

    def reject_last(self) -> None:
        """Drop the record that `load` yielded last, and all that follow it."""
        if self._good_size:
            self._good_size -= SIZE

    def append(self, entries: list[IndexEntry], covered: Covered | None = None) -> None:
        """Write entries. A full disk only loses times of arrival, and only when the agent restarts."""
        if not self._writable or not (entries or covered):
            return
        data = b"".join(_pack(e.line, e.offset, e.t_ns, e.bits_before, _FLAG_NCCL) for e in entries)
        if covered is not None:
            data += _pack(0, covered.offset, covered.t_ns, 0, _FLAG_COVERED)
        try:
            self._write(data)
        except OSError as error:
            # A gap in the records would be worse than no records: the file is left as it is from here on.
            self._writable = False
            log.warning("%s is not kept: %s", self.path, error)

    def reset(self) -> None:
        """Remove all records: the log was truncated or replaced."""
        self._good_size = 0
        if self._writable:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    def _write(self, data: bytes) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            good = self._good_size or 0
            if good < SIZE:
                os.ftruncate(fd, 0)
                data, good = _MAGIC + data, 0
            elif os.fstat(fd).st_size > good:
                os.ftruncate(fd, good)
            if os.pwrite(fd, data, good) != len(data):
                raise OSError("the disk is full")
            self._good_size = good + len(data)
        finally:
            os.close(fd)
