"""The task that indexes what the ranks write.

In: directories that changed (by inotify, or by polling at 20 Hz). Out: indexed bytes; the bell rings for readers.

**Nothing is read while nothing is written: the task sleeps until a directory changes.**
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import struct
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.logs.slices import Bell, TimeSlice

if TYPE_CHECKING:
    from remote_agent.logs.catalogue import Catalogue
    from remote_agent.logs.logfile import LogFile

log = logging.getLogger(__name__)

POLL_S = 0.05
# Two looks have at least this pause; during a flood each look reads more bytes instead of looking more often.
TICK_S = 0.02
FLOOD_TICK_S = 0.1
FLOOD_BYTES = 64 * 1024
# The newest files are checked this often anyway: some network file systems send no events.
SWEEP_S = 5.0
# New index entries are written to the disk within this time.
PERSIST_S = 0.5


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
    """Watches directories; `wait` returns those that changed."""

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
        """Stop watching a directory."""
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
            # Ended watches may be among the missed events; setting one again that has not ended changes nothing.
            ended = [*ended, *self._watches]
            self._watches.clear()
        # The watches are set after the last event: a new watch may get an event at once, again and again.
        for path in ended:
            # If this fails, the directory is gone, or the periodic check covers it.
            with contextlib.suppress(OSError):
                self.watch(path)
        return None if missed else changed


class Polling:
    """The same without inotify: after each pause, anything may have changed."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s

    def watch(self, path: Path) -> None:
        """Do nothing."""

    def unwatch(self, path: Path) -> None:
        """Do nothing."""

    async def wait(self, timeout_s: float) -> set[Path] | None:
        """Return None, which means any directory, after the interval."""
        await asyncio.sleep(min(self._interval_s, timeout_s))
        return None

    def close(self) -> None:
        """Do nothing."""


class LogWatch:
    """Runs the indexing task of a live LogStore."""

    def __init__(self, catalogue: Catalogue, bell: Bell, bound: int) -> None:
        self._catalogue = catalogue
        self._bell = bell
        self._bound = bound
        self._watcher: Inotify | Polling = Polling(POLL_S)
        self._task: asyncio.Task[None] | None = None
        self._watched: set[Path] = set()
        self._persisted = 0.0
        self._pause_s = TICK_S

    async def start(self) -> None:
        """Find existing files and begin to index; returns when all files are known, before all are indexed."""
        try:
            self._watcher = Inotify()
        except OSError as error:
            log.info("polling the logs: %s", error)
        self._watch(self._catalogue.root)
        self._catalogue.scan_root()
        for generation in sorted(self._catalogue.folders):
            self._discover(generation)
        await adopt(list(self._catalogue.files.values()))
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """End the task and write the rest of the index."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        for file in self._catalogue.files.values():
            file.persist(is_complete=not file.behind)
        self._watcher.close()

    async def catch_up(self, generation: int) -> None:
        """Index all bytes in the files of this generation and write their index."""
        self._catalogue.scan(generation)
        time_slice = TimeSlice()
        for file in self._catalogue.select([generation], None, None):
            await _drain(file, time_slice)
            file.persist(is_complete=True)

    async def _run(self) -> None:
        # Existing files are indexed first, the newest generation before the others, because people look at that.
        await self._guarded(self._index_all(self._catalogue.select(None, None, None)[::-1]))
        self._catalogue.descriptors.close()
        while True:
            changed = await self._watcher.wait(SWEEP_S)
            await self._guarded(self._look(changed or None))
            await asyncio.sleep(self._pause_s)

    async def _guarded(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Exception:
            # One bad file must not stop the indexing of all others.
            log.exception("indexing the logs failed")
        self._bell.ring()

    async def _index_all(self, files: list[LogFile]) -> None:
        time_slice = TimeSlice()
        for file in files:
            await _drain(file, time_slice)

    async def _look(self, changed: set[Path] | None) -> None:
        """Index what is new in these directories; None: in the newest two generations."""
        catalogue, time_slice = self._catalogue, TimeSlice()
        if changed is None or catalogue.root in changed:
            catalogue.scan_root()
        newest = sorted(catalogue.folders)[-2:]
        # Requests may have found directories before this task: what matters is whether they are watched.
        generations = {each for each in newest if changed is None or catalogue.folders[each] - self._watched}
        folders: set[Path] = set()
        for path in changed or ():
            generation = catalogue.generation_of(path)
            if generation is not None and path.name.startswith("rank_"):
                catalogue.scan_rank(generation, int(path.name[5:]), path)
                folders.add(path)
            elif generation is not None:
                generations.add(generation)
        for generation in sorted(generations):
            self._discover(generation)
            folders |= catalogue.folders[generation]
        read = 0
        for folder in folders:
            for file in catalogue.by_folder.get(folder, ()):
                read += await _drain(file, time_slice)
            self._trim(folder)
        self._pause_s = TICK_S if read < FLOOD_BYTES else FLOOD_TICK_S
        self._persist()

    def _trim(self, folder: Path) -> None:
        """Keep the logs of one rank within the bound: drop the oldest bytes of the largest file."""
        if not self._bound:
            return
        files = [file for file in self._catalogue.by_folder.get(folder, ()) if not file.is_external]
        over = sum(file.size - file.dropped for file in files) - self._bound
        if not files or over <= 0:
            return
        try:
            max(files, key=lambda file: file.size - file.dropped).drop(over + self._bound // 8)
        except OSError as error:
            self._bound = 0
            log.warning("log_bound has no effect on this file system, nothing is dropped: %s", error)

    def _discover(self, generation: int) -> None:
        """Find all files of a generation. Watching begins before scanning, so that no file is missed in between."""
        self._watch_generation(generation)
        self._catalogue.scan(generation)
        if self._watch_generation(generation):
            self._catalogue.scan(generation)

    def _watch_generation(self, generation: int) -> bool:
        """Watch the directories of this generation, if it is one of the newest two; True when there were new ones."""
        folders = self._catalogue.folders
        kept = sorted(folders)[-2:]
        for old in folders.keys() - kept:
            for path in folders[old] & self._watched:
                self._watcher.unwatch(path)
                self._watched.discard(path)
        paths = folders.get(generation, set()) - self._watched if generation in kept else set()
        for path in paths:
            self._watch(path)
        return bool(paths)

    def _watch(self, path: Path) -> None:
        self._watched.add(path)
        try:
            self._watcher.watch(path)
        except OSError as error:
            log.info("polling the logs: %s", error)
            self._watcher.close()
            self._watcher = Polling(POLL_S)

    def _persist(self) -> None:
        if time.monotonic() - self._persisted < PERSIST_S:
            return
        self._persisted = time.monotonic()
        for file in self._catalogue.files.values():
            if file.index.fresh:
                file.persist()


async def adopt(files: list[LogFile]) -> None:
    """Adopt files that existed before this agent."""
    time_slice = TimeSlice()
    for file in files:
        for _ in file.adopt():
            await time_slice.pause_if_over()
        await time_slice.pause_if_over()


async def _drain(file: LogFile, time_slice: TimeSlice) -> int:
    """Index the bytes that are in the file now; returns how many. Bytes written meanwhile wait for the next look."""
    before = file.index.scanned
    more = file.absorb(time.time_ns())
    goal = file.size
    while more and file.index.scanned < goal:
        await time_slice.pause_if_over()
        more = file.absorb(time.time_ns())
    return file.index.scanned - before
