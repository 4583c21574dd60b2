"""The logs of one job on this node: the answers to all log requests.

In: the job's directory, requests. Out: lists, bytes, pages, streams; progress of ranks.

Ranks write directly into the files; this module only reads. **No request blocks the event loop for more than about
20 ms.**
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
from remote_agent.logs.index import BYTES_PER_BLOCK
from remote_agent.logs.merge import merged
from remote_agent.logs.progress import Reports
from remote_agent.logs.records import Forwards
from remote_agent.logs.slices import Bell, TimeSlice, index_until
from remote_agent.logs.watch import LogWatch, adopt
from remote_agent.text.patterns import compile_pattern
from remote_agent.wire import Answer, Problem
from remote_agent.wire.answers import LogKey

if TYPE_CHECKING:
    from remote_agent.logs.logfile import LogFile
    from remote_agent.logs.merge import Source
    from remote_agent.logs.records import Record
    from remote_agent.logs.selection import Generations

MAX_READ = 1024 * 1024
RESCAN_S = 1.0
# A file of gigabytes may take this long to be indexed, seconds.
INDEX_WAIT_S = 60.0


class LogStore:
    """All logs of a job on this node. live: index what the ranks write; else read the files of an ended job.

    bound: how many bytes on the disk the logs of each rank of a generation may take; 0: unlimited.
    """

    def __init__(self, root: Path, live: bool, bound: int = 0) -> None:
        self.live = live
        self._catalogue = Catalogue(root, writable=live)
        self._bell = Bell()
        self._reports = Reports()
        self._watch = LogWatch(self._catalogue, self._bell, bound)
        self._finished: set[int] = set()
        self._ended = not live
        self._rescan_at = 0.0

    @property
    def root(self) -> Path:
        """The job's directory."""
        return self._catalogue.root

    async def start(self) -> None:
        """Find existing files; if live, begin to index. Generations that exist already count as finished."""
        if self.live:
            await self._watch.start()
            self._finished.update(self._catalogue.folders)
        else:
            await self._rescan()

    async def stop(self) -> None:
        """Stop indexing, write the index to the disk, close all files; streams end."""
        self._ended = True
        if self.live:
            await self._watch.stop()
        self._bell.ring()
        self._catalogue.descriptors.close()

    async def finish(self, generation: int) -> None:
        """Note that all ranks of a generation have ended: index all they wrote; unfinished lines are sent."""
        if self.live:
            await self._watch.catch_up(generation)
        self._finished.add(generation)
        self._catalogue.descriptors.close()
        self._bell.ring()

    async def end(self) -> None:
        """Note that the job is over: streams end when everything is sent."""
        self._catalogue.scan_root()
        for generation in sorted(self._catalogue.folders):
            await self.finish(generation)
        self._ended = True
        self._bell.ring()

    def progress(self, generation: int) -> dict[int, dict[str, Any]]:
        """Return per rank what is known of its progress; None: none seen.

        step, total, the times last_output_ns and first_step_ns, said, warning, saved, and the figures (loss, rate …).
        """
        for (number, rank), steps in self._catalogue.steps.items() if self.live else ():
            if number == generation:
                self._reports.read(self.root / f"generation_{generation}" / f"rank_{rank}", steps)
        return {
            rank: {
                "step": steps.step,
                "total": steps.total,
                "last_output_ns": steps.last_output_ns,
                "first_step_ns": steps.first_step_ns,
                "said": steps.said,
                "warning": steps.warning,
                "saved": steps.saved,
                **steps.figures.values(),
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
            await index_until(file, 0.0)
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
        """Answer log_read: raw bytes, at most 1 MiB; eof: no bytes follow now. Raises Problem.

        If bytes were dropped from the disk, the answer begins behind them, as its offset shows.
        """
        file = await self._find(generation, rank, stream)
        if offset < 0 or length < 0:
            raise Problem("usage", "offset and length must not be negative")
        file.absorb(time.time_ns())
        offset = max(offset, file.dropped)
        body = file.pread(offset, min(length, MAX_READ))
        size = max(file.size, offset + len(body) if body else 0)
        return Answer({"offset": offset, "size": size, "eof": offset + len(body) >= size}, body)

    async def end_of(self, path: Path, count: int) -> int:
        """Return where the last `count` bytes of a log begin, at a block of its index; 0 for what is no log here."""
        file = next((one for one in self._catalogue.by_folder.get(path.parent, ()) if one.path == path), None)
        if file is None:
            return 0
        await index_until(file, INDEX_WAIT_S)
        at = file.index.block(file.index.block_at(max(0, file.size - count))).offset if len(file.index) else 0
        # Readers take a smaller hole for bytes that the rank has written.
        return max(file.dropped, at if at >= BYTES_PER_BLOCK else 0)

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
    ) -> Answer:
        """Answer log_merged: the last rows before a time, or the first from a time on, over all chosen files.

        complete: the files read are indexed to their end, else rows may be missing. more: rows exist beyond the
        outermost one, or may exist. apart: how many lines were left out because their stream was not asked for, such
        as NCCL's. since_ns, until_ns: all wanted rows between these times are included. include, exclude: patterns
        that records must match, or must not. Raises Problem.
        """
        wanted = selection.check_lines(streams, level, include, exclude)
        if before_ns is not None and after_ns is not None:
            raise Problem("usage", "either before_ns or after_ns")
        await self._rescan()
        files = selection.select(self._catalogue, generation, ranks, streams)
        return await merged(files, before_ns, after_ns, count, wanted)

    async def follow(
        self,
        generation: Generations = None,
        ranks: Sequence[int] | None = None,
        streams: Sequence[str] | None = None,
        start: str = "end",
        first: int | None = None,
        after: Sequence[Sequence[Any]] | None = None,
        past: bool = False,
    ) -> AsyncGenerator[Answer, None]:
        """Answer log_follow: pieces of whole lines until the job, or the one generation asked for, is over.

        first: the first generation wanted where none is named; None: the newest. after: [generation, rank, stream,
        offset] of files that were read so far; the first answer then has `first`, and as `after` where each file
        begins. past: end with what is there. Raises Problem.
        """
        chosen = selection.check_streams(streams)
        if start not in ("begin", "end"):
            raise Problem("usage", f"no such start: {start}", "begin or end")
        await self._rescan()
        known = _positions(after)
        view, first = self._view(generation, ranks, chosen, first)
        begin = await following.ends_of(view.files()) if start == "end" else {}
        begin.update(known)
        if after is not None:
            yield Answer({"first": first, "after": [[*key, offset] for key, offset in begin.items()]})
        if past:
            view = view._replace(is_over=lambda: True)
        items = following.follow(view, begin)
        try:
            async for item in items:
                yield item
        finally:
            await items.aclose()

    async def rows(
        self,
        generation: Generations = None,
        ranks: Sequence[int] | None = None,
        streams: Sequence[str] | None = None,
        first: int | None = None,
        after: Sequence[Sequence[Any]] = (),
        since_ns: int | None = None,
        pattern: str | None = None,
        ignore_case: bool = False,
        level: str | None = None,
        shown: selection.Shown | None = None,
        past: bool = False,
        whole: bool = False,
        exact: bool = False,
        count: int | None = None,
    ) -> AsyncGenerator[Answer, None]:
        """Answer log_rows: rows by time until the job, or the one generation asked for, is over; raises Problem.

        A row is given if its line matches `pattern` and has the `level` or a worse one, and if its record passes
        `shown` (level, include, exclude). first: as for `follow`. after: [generation, rank, stream, line], the line to
        continue with; an answer names with `after` how far a reader has come when all that was there has been given.
        since_ns: only what came then or later. apart: how many lines were left out because they are of a stream that
        was not asked for. past: end with what is there; whole: without unfinished lines and records.
        exact: all bytes of each line, also those that a terminal overwrites. count: with `past`, only the first rows.
        """
        lines = selection.check_lines(streams, level)
        records = selection.check_lines(streams, **(shown or {}))
        is_by_line = pattern is not None or bool(level) or not (shown or past)
        view_of_hits = records if shown else None
        query = searching.Query(compile_pattern(pattern or "", ignore_case), lines, shown=view_of_hits)
        await self._rescan()
        known = _positions(after)

        def begin(file: LogFile) -> int:
            if file.key in known:
                return known[file.key]
            return 0 if since_ns is None else file.index.lines_before(since_ns)

        def open_source(file: LogFile, line: int, stop: int) -> Source[Record]:
            if is_by_line:
                return searching.Hits(file, query, line, stop)
            return Forwards(file, file.index.time_of(line), records, stop)

        view, _ = self._view(generation, ranks, selection.streams_to_read(streams), first)
        how = {"is_past": past, "is_whole": whole, "is_exact": exact}
        items = following.follow_rows(view, begin, open_source, **how, count=count)
        try:
            async for item in items:
                yield item
        finally:
            await items.aclose()

    def _view(
        self,
        generation: Generations,
        ranks: Sequence[int] | None,
        streams: Sequence[str],
        first: int | None,
    ) -> tuple[following.View, int]:
        """Return what a follower sees of these files, and the first generation of them."""
        if generation is not None:
            first = 0
        elif first is None:
            first = self._catalogue.newest or 0
        begin = first

        def files() -> list[LogFile]:
            chosen = [generation] if isinstance(generation, int) else [g for g in self._catalogue.folders if g >= begin]
            return self._catalogue.select(chosen, ranks, streams)

        def is_over() -> bool:
            return self._ended or (isinstance(generation, int) and generation in self._finished)

        def is_final(key: LogKey) -> bool:
            return self._ended or key.generation in self._finished

        return following.View(files, is_final, is_over, self._bell), first

    async def _find(self, generation: int, rank: int, stream: str) -> LogFile:
        if LogKey(generation, rank, stream) not in self._catalogue.files:
            await self._rescan()
        return selection.find(self._catalogue, generation, rank, stream)

    async def _rescan(self) -> None:
        """Find new files of an ended job, at most once a second; a live store has its indexing task."""
        if self.live or time.monotonic() < self._rescan_at:
            return
        self._rescan_at = time.monotonic() + RESCAN_S
        known = set(self._catalogue.files)
        self._catalogue.scan_root()
        time_slice = TimeSlice()
        for generation in sorted(self._catalogue.folders):
            self._catalogue.scan(generation)
            await time_slice.pause_if_over()
        await adopt([file for key, file in self._catalogue.files.items() if key not in known])


def _positions(after: Sequence[Sequence[Any]] | None) -> following.Positions:
    return {LogKey(int(generation), int(rank), str(stream)): int(at) for generation, rank, stream, at in after or ()}
