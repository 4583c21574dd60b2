"""The log files of one job directory, found by their paths.

In: generation_<g>/rank_<R>/{stdout,stderr,nccl}.log. Out: LogFile objects, selections of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from remote_agent.logs.logfile import Descriptors, LogFile
from remote_agent.logs.progress import StepReader
from remote_agent.text.names import GENERATION_FOLDER, RANK_FOLDER
from remote_agent.wire.answers import LogKey
from remote_agent.wire.documents import STREAMS


def numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Return the directories whose names match, by number."""
    folders = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                match = pattern.match(entry.name)
                if match is not None and entry.is_dir():
                    folders.append((int(match.group(1)), folder / entry.name))
    except OSError:
        return []
    return sorted(folders)


class Catalogue:
    """All log files of a job on this node; `scan` finds new ones."""

    def __init__(self, root: Path, writable: bool) -> None:
        self.root = root
        self._writable = writable
        self.descriptors = Descriptors()
        self.files: dict[LogKey, LogFile] = {}
        self.by_folder: dict[Path, list[LogFile]] = {}
        self.steps: dict[tuple[int, int], StepReader] = {}
        self.folders: dict[int, set[Path]] = {}
        """The directory of each generation and those of its ranks."""

    @property
    def newest(self) -> int | None:
        """The newest generation that has a directory."""
        return max(self.folders) if self.folders else None

    def scan_root(self) -> None:
        """Find new generations."""
        for generation, path in numbered(self.root, GENERATION_FOLDER):
            self.folders.setdefault(generation, {path})

    def scan(self, generation: int) -> list[LogFile]:
        """Find new ranks and files of one generation; returns the new files."""
        new: list[LogFile] = []
        folder = self.root / f"generation_{generation}"
        if not folder.is_dir():
            return new
        folders = self.folders.setdefault(generation, {folder})
        for rank, path in numbered(folder, RANK_FOLDER):
            folders.add(path)
            new.extend(self.scan_rank(generation, rank, path))
        return new

    def scan_rank(self, generation: int, rank: int, path: Path) -> list[LogFile]:
        """Find new files of one rank; returns them."""
        new: list[LogFile] = []
        for stream in STREAMS:
            key = LogKey(generation, rank, stream)
            if key in self.files:
                continue
            log = path / f"{stream}.log"
            if log.is_file():
                steps = self.steps.setdefault((generation, rank), StepReader())
                file = LogFile(key, log, self.descriptors, steps, self._writable)
                self.files[key] = file
                self.by_folder.setdefault(path, []).append(file)
                new.append(file)
        return new

    def generation_of(self, path: Path) -> int | None:
        """Return the generation to which a directory belongs, or None."""
        for name in (path.name, path.parent.name):
            match = GENERATION_FOLDER.match(name)
            if match is not None:
                return int(match.group(1))
        return None

    def select(
        self, generations: Iterable[int] | None, ranks: Iterable[int] | None, streams: Iterable[str] | None
    ) -> list[LogFile]:
        """Return files ordered by generation, rank and stream; None selects all."""
        wanted_generations = None if generations is None else set(generations)
        wanted_ranks = None if ranks is None else set(ranks)
        wanted_streams = None if streams is None else set(streams)
        return [
            self.files[key]
            for key in sorted(self.files, key=lambda k: (k.generation, k.rank, STREAMS.index(k.stream)))
            if (wanted_generations is None or key.generation in wanted_generations)
            and (wanted_ranks is None or key.rank in wanted_ranks)
            and (wanted_streams is None or key.stream in wanted_streams)
        ]
