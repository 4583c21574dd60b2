"""The index on disk next to its log file, so that times of arrival survive the agent.

In: new index entries. Out: the valid entries that an earlier agent wrote.

An append-only file of 32-byte records behind a header of the same size. Each record has a checksum; records from the
first one on that is cut off, damaged or does not fit the log are ignored, and the index is rebuilt from there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from remote_agent.logs.index import IndexEntry
from remote_agent.text.levels import NCCL

log = logging.getLogger(__name__)

_MAGIC = b"supervisor log index 1\n".ljust(32, b"\0")
_RECORD = struct.Struct("<QQqBBH")
_CHECK = struct.Struct("<I")
SIZE = _RECORD.size + _CHECK.size
_FLAG_UPPER = 1
# Not an entry: all bytes before `offset` are covered by the entries before this record.
_FLAG_COVERED = 2
# The bits include NCCL's; those of older agents do not.
_FLAG_NCCL = 4
_READ_RECORDS = 8192


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
                        yield IndexEntry(line, offset, t_ns, bits, bool(flags & _FLAG_UPPER))
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
        flags = (_FLAG_NCCL, _FLAG_NCCL | _FLAG_UPPER)
        data = b"".join(_pack(e.line, e.offset, e.t_ns, e.bits_before, flags[e.upper]) for e in entries)
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
