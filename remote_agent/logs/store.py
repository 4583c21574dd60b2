"""The logs of one job on this node: the answers to all log requests.

In: the job's directory, requests. Out: lists, bytes, windows, merged rows, streams; progress of ranks.

Workers write straight into the files; we only read. **No request holds the event loop for more than some 20 ms.**
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_agent.logs import follow as following
from remote_agent.logs import search as searching
from remote_agent.logs import selection
from remote_agent.logs.catalogue import Catalogue
from remote_agent.logs.follower import Follower, adopt
from remote_agent.logs.logfile import Key, LogFile
from remote_agent.logs.merged import merged
from remote_agent.logs.pattern import compile_pattern
from remote_agent.logs.slices import Bell, Breather
from remote_agent.logs.window import index_until, window
from remote_agent.wire import Answer, Problem

if TYPE_CHECKING:
    from remote_agent.logs.selection import Generations

MAX_READ = 1024 * 1024
RESCAN_S = 1.0


class LogStore:
    """All logs of a job on this node. live: follow what workers write; else read what an ended job left.

    bound: bytes that each rank's logs of a generation may take on the disk; 0: any number.
    """

    def __init__(self, root: Path, live: bool, bound: int = 0) -> None:
        self.live = live
        self._catalogue = Catalogue(root, writable=live)
        self._bell = Bell()
        self._follower = Follower(self._catalogue, self._bell, bound)
        self._finished: set[int] = set()
        self._ended = not live
        self._rescan_at = 0.0

    @property
    def root(self) -> Path:
        """The job's directory."""
        return self._catalogue.root

    async def start(self) -> None:
        """Find the files that are there; if live, start to follow. Generations that exist already count as finished."""
        if self.live:
            await self._follower.start()
            self._finished.update(self._catalogue.folders)
        else:
            await self._rescan()

    async def stop(self) -> None:
        """End the follower, keep its index on disk, close all files; streams end."""
        self._ended = True
        if self.live:
            await self._follower.stop()
        self._bell.ring()
        self._catalogue.descriptors.close()

    async def finish(self, generation: int) -> None:
        """Say that all ranks of a generation are over: all they wrote is indexed, half lines are sent."""
        if self.live:
            await self._follower.catch_up(generation)
        self._finished.add(generation)
        self._bell.ring()

    async def end(self) -> None:
        """Say that the job is over: streams end when all is sent."""
        self._catalogue.scan_root()
        for generation in sorted(self._catalogue.folders):
            await self.finish(generation)
        self._ended = True
        self._bell.ring()

    def progress(self, generation: int) -> dict[int, dict[str, Any]]:
        """Return per rank step, last_output_ns, warning, saved, loss, rate with its unit, steps_s; None: none seen."""
        return {
            rank: {
                "step": steps.step,
                "last_output_ns": steps.last_output_ns,
                "warning": steps.warning,
                "saved": steps.saved,
                **steps.figures.told(),
            }
            for (number, rank), steps in self._catalogue.steps.items()
            if number == generation
        }

    def take_losses(self, generation: int) -> dict[int, Sequence[tuple[int, str]]]:
        """Return per rank the losses of some steps since the last call, as they are printed."""
        steps = self._catalogue.steps.items()
        return {rank: one.figures.take_losses() for (number, rank), one in steps if number == generation}

    async def list(self) -> Answer:
        """Answer log_list; lines and first_ns are null while a file is not indexed to its end."""
        await self._rescan()
        files = []
        for file in self._catalogue.select(None, None, None):
            await index_until(file, None, 0.0)
            generation, rank, stream = file.key
            known = not file.behind
            files.append(
                {
                    "generation": generation,
                    "rank": rank,
                    "stream": stream,
                    "size": file.size,
                    "lines": file.index.total_lines if known else None,
                    "first_ns": file.index.first_ns if known else None,
                    "last_ns": file.last_read_ns,
                }
            )
        return Answer({"files": files})

    async def read(self, generation: int, rank: int, stream: str, offset: int, length: int) -> Answer:
        """Answer log_read: raw bytes, at most 1 MiB; eof: nothing is behind them now. Raises Problem.

        Where bytes are gone from the disk, the answer begins behind them, and says so by its offset.
        """
        file = await self._find(generation, rank, stream)
        if offset < 0 or length < 0:
            raise Problem("usage", "offset and length must not be negative")
        file.absorb(time.time_ns())
        offset = max(offset, file.dropped)
        body = file.pread(offset, min(length, MAX_READ))
        size = max(file.size, offset + len(body) if body else 0)
        return Answer({"offset": offset, "size": size, "eof": offset + len(body) >= size}, body)

    async def window(
        self, generation: int, rank: int, stream: str, line: int, count: int, at_ns: int | None = None
    ) -> Answer:
        """Answer log_window: rows from a line on (negative: from the end); complete: the file is indexed to its end.

        at_ns: `line` counts from the first one that came then or later, else the last one, whose number is `at`.

        While it is not, rows asked for from the end carry negative numbers. version: another one when the file was
        replaced or written anew. Raises Problem.
        """
        return await window(await self._find(generation, rank, stream), line, count, at_ns)

    async def merged(
        self,
        generation: Generations = None,
        ranks: Sequence[int] | None = None,
        streams: Sequence[str] | None = None,
        before_ns: int | None = None,
        count: int = 256,
        level: str | None = None,
        after_ns: int | None = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        counted: Sequence[int] | None = None,
    ) -> Answer:
        """Answer log_merged: the last rows before a time, or the first ones from a time on, over all files chosen.

        complete: the files it has read are indexed to their end, else rows may be missing; more: there are rows beyond
        the outermost one, or may be; apart: so many lines among them were left out, of NCCL where its stream was not
        asked for. since_ns, until_ns: all that is wanted from the one time on and before the other is there. include,
        exclude: patterns that records must match, or must not. counted: two times; the answer tells under the same
        name how many lines of all came between them, and as `ends` how many each file has: generation, rank, stream,
        lines, null while what was there before the agent is not indexed. Raises Problem.
        """
        wanted = selection.check_lines(streams, level, include, exclude)
        if before_ns is not None and after_ns is not None:
            raise Problem("usage", "either before_ns or after_ns")
        await self._rescan()
        files = selection.select(self._catalogue, generation, ranks, streams)
        return await merged(files, before_ns, after_ns, count, wanted, counted)

    async def follow(
        self,
        generation: Generations = None,
        ranks: Sequence[int] | None = None,
        streams: Sequence[str] | None = None,
        start: str = "end",
    ) -> AsyncGenerator[Answer, None]:
        """Answer log_follow: pieces of whole lines until the job, or the one generation asked for, is over.

        Raises Problem.
        """
        chosen = selection.check_streams(streams)
        if start not in ("begin", "end"):
            raise Problem("usage", f"no such start: {start}", "begin or end")
        await self._rescan()
        first = (self._catalogue.newest or 0) if generation is None else 0

        def files() -> list[LogFile]:
            if isinstance(generation, int):
                return self._catalogue.select([generation], ranks, chosen)
            generations = [number for number in self._catalogue.folders if number >= first]
            return self._catalogue.select(generations, ranks, chosen)

        def is_over() -> bool:
            return self._ended or (isinstance(generation, int) and generation in self._finished)

        def is_final(key: Key) -> bool:
            return self._ended or key.generation in self._finished

        view = following.View(files, is_final, is_over, self._bell)
        items = following.follow(view, start == "end")
        try:
            async for item in items:
                yield item
        finally:
            await items.aclose()

    async def search(
        self,
        pattern: str,
        generation: Generations = None,
        ranks: Sequence[int] | None = None,
        streams: Sequence[str] | None = None,
        ignore_case: bool = False,
        level: str | None = None,
        since_ns: int | None = None,
        until_ns: int | None = None,
        limit: int | None = None,
        again_ns: int | None = None,
        around: int = 0,
        near_ns: int | None = 0,
        shown: dict[str, Any] | None = None,
        way: int = 0,
    ) -> AsyncGenerator[Answer, None]:
        """Answer log_search: hits file by file, then {done, begun_ns, searched_bytes, hits, apart}; raises Problem.

        again_ns: the begun_ns of an earlier answer, whose rest is meant: what it had not seen, or not whole.
        apart: so many lines would be hits, but are of a stream that was not asked for. around: so many rows from the
        first hit at near_ns or later (else the first of all; None: from the last one) on, and a third as many before
        it, come ahead of the end in two answers of `merged` with {around}: who goes there next need not ask again.
        shown: level, include and exclude of the view that the hits must be in. way: of each file the first hits from
        since_ns on (1), or the last ones before until_ns (-1), and in the end since_ns and until_ns of what is whole.
        """
        wanted = selection.check_lines(streams, level)
        view = selection.check_lines(streams, **shown) if shown else None
        times = (since_ns, until_ns, limit, again_ns)
        query = searching.Query(compile_pattern(pattern, ignore_case), wanted, *times, view, way)
        await self._rescan()
        files = selection.select(self._catalogue, generation, ranks, streams)
        items = searching.search(files, query)
        hits_ns: list[int] = []
        try:
            async for item in items:
                if around:
                    hits_ns += [row["t_ns"] for row in item.data["rows"]]
                    hits_ns = [_nearest(hits_ns, near_ns)] if hits_ns else []
                if item.data.get("done") and hits_ns:
                    every, first_ns = view or selection.check_lines(streams), hits_ns[0]
                    yield _aside(await merged(files, first_ns, None, around // 3 + 1, every))
                    yield _aside(await merged(files, None, first_ns, around - around // 3, every))
                yield item
        finally:
            await items.aclose()

    async def _find(self, generation: int, rank: int, stream: str) -> LogFile:
        if Key(generation, rank, stream) not in self._catalogue.files:
            await self._rescan()
        return selection.find(self._catalogue, generation, rank, stream)

    async def _rescan(self) -> None:
        """A reader looks for new files at a request, at most once a second; a live store has its follower."""
        if self.live or time.monotonic() < self._rescan_at:
            return
        self._rescan_at = time.monotonic() + RESCAN_S
        known = set(self._catalogue.files)
        self._catalogue.scan_root()
        breather = Breather()
        for generation in sorted(self._catalogue.folders):
            self._catalogue.scan(generation)
            await breather.breathe()
        await adopt([file for key, file in self._catalogue.files.items() if key not in known])


def _nearest(times_ns: list[int], near_ns: int | None) -> int:
    return max(times_ns) if near_ns is None else min(times_ns, key=lambda t_ns: (t_ns < near_ns, t_ns))


def _aside(page: Answer) -> Answer:
    """Return an answer of `merged` marked as not of the search."""
    return Answer({**page.data, "around": True}, page.body)
