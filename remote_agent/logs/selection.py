"""What a log request asks for, checked.

In: arguments from the wire. Out: files, and which of their lines; Problem (kind "usage") for nonsense.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Union

from remote_agent.logs.filters import Filter, make_filter
from remote_agent.logs.levels import minimum_level
from remote_agent.logs.logfile import STREAMS, Key, LogFile
from remote_agent.logs.rows import stream_of
from remote_agent.wire import Problem

if TYPE_CHECKING:
    from remote_agent.logs.catalogue import Catalogue
    from remote_agent.logs.index import Block
    from remote_agent.logs.rows import Row

# A generation by number, "all", or None: the newest.
Generations = Union[int, str, None]
# Bytes of text in one answer; a frame holds 8 MiB.
BODY_LIMIT = 4 * 1024 * 1024


class Wanted(NamedTuple):
    """Which lines of the chosen files: of these streams (None: all), of the level with this bit or worse (0: all).

    Of a record, one line of the level and what the filter says decide about all of its lines.
    """

    level: int = 0
    streams: frozenset[str] | None = None
    filter: Filter = Filter()

    @property
    def is_rare(self) -> bool:
        """True when it may take long to find the next such line."""
        return bool(self.level or self.filter.include or self.filter.exclude)

    def may_be_in(self, file: LogFile, block: Block) -> bool:
        """False when the block holds no such line."""
        # Never by both: a record may have the level in one block, and what is included in another.
        if self.filter.include:
            data = file.bytes_of(block) if block.offset >= file.dropped else b""
            if len(data) == block.end - block.offset and not self.filter.may_keep(data):
                return False
        elif block.bits < self.level:
            return False
        return block.nccl or self.streams is None or file.key.stream in self.streams

    def is_apart(self, file: LogFile, text: bytes) -> bool:
        """True for a line of another stream: of NCCL where that is not wanted, of the script where only NCCL is."""
        return self.streams is not None and stream_of(file.key.stream, text) not in self.streams

    def may_be(self, file: LogFile, row: Row) -> bool:
        """False when the row is none that its record is shown for."""
        rare = self.filter.may_keep(row.text) if self.filter.include else row.level >= self.level
        return rare and not self.is_apart(file, row.text)

    def keeps(self, file: LogFile, rows: list[Row]) -> bool:
        """True when the filter keeps the record of these rows; raises Problem (pattern)."""
        # What is gone from the disk cannot be looked at any more: its place is told, whatever is wanted.
        return not rows or rows[0].offset < file.dropped or self.filter.keeps(row.text for row in rows)


def find(catalogue: Catalogue, generation: int, rank: int, stream: str) -> LogFile:
    """Return one file; raises Problem (no_log)."""
    file = catalogue.files.get(Key(generation, rank, stream))
    if file is None and isinstance(generation, int):
        # The follower may not have seen it yet.
        catalogue.scan(generation)
        file = catalogue.files.get(Key(generation, rank, stream))
    if file is None:
        known = sorted({key.rank for key in catalogue.files if key.generation == generation})
        message = f"no {stream} of rank {rank} in generation {generation}"
        raise Problem("no_log", message, f"ranks here: {known or 'none'}")
    return file


def check_streams(streams: Sequence[str] | None) -> list[str]:
    """Return the streams to read, stdout and stderr for None; raises Problem (usage)."""
    chosen = list(streams) if streams is not None else ["stdout", "stderr"]
    for stream in chosen:
        if stream not in STREAMS:
            raise Problem("usage", f"no such stream: {stream}", f"use one of {', '.join(STREAMS)}")
    return chosen


def check_lines(
    streams: Sequence[str] | None,
    level: str | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
) -> Wanted:
    """Return which lines of the files to give; raises Problem (usage, pattern)."""
    chosen = frozenset(check_streams(streams))
    which = None if len(chosen) == len(STREAMS) else chosen
    return Wanted(check_level(level), which, make_filter(include, exclude))


def check_level(level: str | None) -> int:
    """Return the bit of the lowest level wanted, 0 for all; raises Problem (usage)."""
    try:
        return minimum_level(level)
    except ValueError as bad:
        raise Problem("usage", str(bad)) from None


def select(
    catalogue: Catalogue, generation: Generations, ranks: Sequence[int] | None, streams: Sequence[str] | None
) -> list[LogFile]:
    """Return the files that may hold what is asked for; generation None: the newest, "all": every one.

    Raises Problem (usage).
    """
    chosen = check_streams(streams)
    if "nccl" in chosen:
        # Where it was told no file, NCCL writes into the script's.
        chosen = list(STREAMS)
    if generation == "all":
        return catalogue.select(None, ranks, chosen)
    if generation is None:
        newest = catalogue.newest
        return [] if newest is None else catalogue.select([newest], ranks, chosen)
    if not isinstance(generation, int):
        raise Problem("usage", f"no such generation: {generation}", 'a number, "all" or null')
    return catalogue.select([generation], ranks, chosen)
