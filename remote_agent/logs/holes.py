"""Holes at the front of a log: bytes that are given back to the disk while all others keep their place.

In: an open file, a number of bytes. Out: OSError where the file system cannot do it; where the hole of a file ends.
"""

from __future__ import annotations

import ctypes
import os

from remote_agent.logs.index import BYTES_PER_BLOCK

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_STEP = 64 * 1024


def punch(fd: int, end: int) -> None:
    """Give the bytes before `end` back to the disk; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fallocate = libc.fallocate64 if hasattr(libc, "fallocate64") else libc.fallocate
    except AttributeError:
        raise OSError("this system has no fallocate") from None
    if fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_longlong(0), ctypes.c_longlong(end)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def hole_end(fd: int) -> int:
    """Return where the first byte stands that has not been given back: 0 where the file begins with its first one."""
    try:
        start = os.lseek(fd, 0, os.SEEK_DATA)
    except (OSError, AttributeError):
        return 0
    if not start:
        return 0
    # A part of the file system's block may have been wiped, too.
    while data := os.pread(fd, _STEP, start):
        text = data.lstrip(b"\0")
        if text:
            end = start + len(data) - len(text)
            return end if end >= BYTES_PER_BLOCK else 0
        start += len(data)
    return 0
