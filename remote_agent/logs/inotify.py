"""Notice of changes in directories: inotify through ctypes.

In: directories to watch. Out: which of them changed; OSError where there is no inotify.

**One event a directory and look**: a watch ends with its first event and is set again when that is read. Else each line
of each rank would make one, which the rank pays for as well as we.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
from pathlib import Path

_IN_MODIFY = 0x2
_IN_MOVED_TO = 0x80
_IN_CREATE = 0x100
_IN_Q_OVERFLOW = 0x4000
_IN_IGNORED = 0x8000
_IN_ONESHOT = 0x80000000
_MASK = _IN_MODIFY | _IN_CREATE | _IN_MOVED_TO | _IN_ONESHOT
_EVENT = struct.Struct("iIII")
_BUFFER = 64 * 1024


class Inotify:
    """Watches directories; `wait` tells which ones changed."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            init, self._add, self._remove = libc.inotify_init1, libc.inotify_add_watch, libc.inotify_rm_watch
        except AttributeError:
            raise OSError("this system has no inotify") from None
        self._fd = init(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1 failed")
        self._paths: dict[int, Path] = {}
        self._watches: dict[Path, int] = {}

    def watch(self, path: Path) -> None:
        """Watch a directory; raises OSError when there are too many watches or it is gone."""
        if path in self._watches:
            return
        watch = self._add(self._fd, os.fsencode(path), ctypes.c_uint32(_MASK))
        if watch < 0:
            raise OSError(ctypes.get_errno(), f"cannot watch {path}")
        self._watches[path] = watch
        self._paths[watch] = path

    def unwatch(self, path: Path) -> None:
        """Watch a directory no longer."""
        watch = self._watches.pop(path, None)
        if watch is not None:
            self._paths.pop(watch, None)
            self._remove(self._fd, watch)

    async def wait(self, timeout_s: float) -> set[Path] | None:
        """Return the changed directories, an empty set after timeout_s seconds, None when some may have been missed."""
        changed = self._read()
        if changed is not None and not changed:
            loop = asyncio.get_running_loop()
            ready: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self._fd, lambda: None if ready.done() else ready.set_result(None))
            try:
                await asyncio.wait([ready], timeout=timeout_s)
            finally:
                loop.remove_reader(self._fd)
                ready.cancel()
            changed = self._read()
        return changed

    def close(self) -> None:
        """End all watches."""
        os.close(self._fd)

    def _read(self) -> set[Path] | None:
        changed: set[Path] = set()
        ended: list[Path] = []
        missed = False
        with contextlib.suppress(BlockingIOError):
            while True:
                data = os.read(self._fd, _BUFFER)
                start = 0
                while start < len(data):
                    watch, mask, _, length = _EVENT.unpack_from(data, start)
                    start += _EVENT.size + length
                    missed = missed or bool(mask & _IN_Q_OVERFLOW)
                    path = self._paths.get(watch)
                    if path is None:
                        continue
                    changed.add(path)
                    if mask & _IN_IGNORED:
                        del self._paths[watch]
                        self._watches.pop(path, None)
                        ended.append(path)
        if missed:
            # A watch that has ended may be among it; one that has not stays as it is.
            ended = [*ended, *self._watches]
            self._watches.clear()
        # After the last one: what is watched again may have news at once, for ever.
        for path in ended:
            # Where this fails, the directory is gone, or is looked at without notice.
            with contextlib.suppress(OSError):
                self.watch(path)
        return None if missed else changed


class Polling:
    """The same without inotify: after a pause anything may have changed."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s

    def watch(self, path: Path) -> None:
        """Nothing to prepare."""

    def unwatch(self, path: Path) -> None:
        """Nothing to end."""

    async def wait(self, timeout_s: float) -> set[Path] | None:
        """Return None, for anything, after the interval."""
        await asyncio.sleep(min(self._interval_s, timeout_s))
        return None

    def close(self) -> None:
        """Nothing to end."""
