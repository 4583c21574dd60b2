"""The task that keeps the index up with what the workers write.

In: notice of changes (inotify, else polling at 20 Hz). Out: indexed bytes, a ring of the bell for all who wait.

**Nothing is read while nothing is written: without a change the task sleeps.**
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.logs.inotify import Inotify, Polling
from remote_agent.logs.slices import Bell, Breather

if TYPE_CHECKING:
    from remote_agent.logs.catalogue import Catalogue
    from remote_agent.logs.logfile import LogFile

log = logging.getLogger(__name__)

POLL_S = 0.05
# Least pause between two looks; under a flood more bytes at a time instead of more looks, each of which has its price.
TICK_S = 0.02
FLOOD_TICK_S = 0.1
FLOOD_BYTES = 64 * 1024
# A look at the newest files without notice: some network file systems give none.
SWEEP_S = 5.0
# Longest delay of new index entries on their way to the disk.
PERSIST_S = 0.5


class Follower:
    """Owns the follower task of a live LogStore."""

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
        """Adopt the files that are there, then follow; returns when all are known, not when all are indexed."""
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
        """End the task, write what is left of the index."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        for file in self._catalogue.files.values():
            file.persist(last_word=not file.behind)
        self._watcher.close()

    async def catch_up(self, generation: int) -> None:
        """Index all that this generation's files hold now, then write their index."""
        self._catalogue.scan(generation)
        breather = Breather()
        for file in self._catalogue.select([generation], None, None):
            await _drain(file, breather)
            file.persist(last_word=True)

    async def _run(self) -> None:
        # What was there at the start is indexed first, newest generation first: it is what people look at.
        await self._guarded(self._index_all(self._catalogue.select(None, None, None)[::-1]))
        while True:
            changed = await self._watcher.wait(SWEEP_S)
            await self._guarded(self._look(changed or None))
            await asyncio.sleep(self._pause_s)

    async def _guarded(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Exception:
            # One bad file must not end the following of all others.
            log.exception("following the logs")
        self._bell.ring()

    async def _index_all(self, files: list[LogFile]) -> None:
        breather = Breather()
        for file in files:
            await _drain(file, breather)

    async def _look(self, changed: set[Path] | None) -> None:
        """Find and index what is new in these directories, or in the newest two generations."""
        catalogue, breather = self._catalogue, Breather()
        if changed is None or catalogue.root in changed:
            catalogue.scan_root()
        newest = sorted(catalogue.folders)[-2:]
        # Others may have found directories before us: what counts is whether we watch them.
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
                read += await _drain(file, breather)
            self._trim(folder)
        self._pause_s = TICK_S if read < FLOOD_BYTES else FLOOD_TICK_S
        self._persist()

    def _trim(self, folder: Path) -> None:
        """Keep the logs of one rank within the bound: the oldest bytes of the one that holds the most go."""
        if not self._bound:
            return
        files = [file for file in self._catalogue.by_folder.get(folder, ()) if not file.is_the_users]
        over = sum(file.size - file.dropped for file in files) - self._bound
        if not files or over <= 0:
            return
        try:
            max(files, key=lambda file: file.size - file.dropped).drop(over + self._bound // 8)
        except OSError as error:
            self._bound = 0
            log.warning("log_bound has no effect on this file system, nothing is dropped: %s", error)

    def _discover(self, generation: int) -> None:
        """Find all of a generation. Watched before scanned: what comes in between is seen twice, never missed."""
        self._watch_generation(generation)
        self._catalogue.scan(generation)
        if self._watch_generation(generation):
            self._catalogue.scan(generation)

    def _watch_generation(self, generation: int) -> bool:
        """Watch this generation's directories, and only the newest two; True when there were new ones."""
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
    """Take over files that were there before us."""
    breather = Breather()
    for file in files:
        for _ in file.adopt():
            await breather.breathe()
        await breather.breathe()


async def _drain(file: LogFile, breather: Breather) -> int:
    """Index what the file holds now, return how many bytes; a writer that never pauses does not keep us here."""
    before = file.index.scanned
    more = file.absorb(time.time_ns())
    goal = file.size
    while more and file.index.scanned < goal:
        await breather.breathe()
        more = file.absorb(time.time_ns())
    return file.index.scanned - before
