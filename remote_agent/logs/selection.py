"""The arguments of log requests, validated.

In: arguments from the wire. Out: files, and which of their lines; Problem (kind "usage") for invalid ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Union

from remote_agent.text.levels import NCCL_MARK, minimum_level
from remote_agent.text.patterns import Filter, make_filter
from remote_agent.text.rows import stream_of
from remote_agent.wire import Problem
from remote_agent.wire.answers import LogKey
from remote_agent.wire.documents import STREAMS

if TYPE_CHECKING:
    from remote_agent.logs.catalogue import Catalogue
    from remote_agent.logs.index import Block
    from remote_agent.logs.logfile import LogFile
    from remote_agent.text.rows import Row

# A generation has a number, or is "all"; None is the newest one.
Generations = Union[int, str, None]
# One answer has at most this many bytes of text; a frame holds 8 MiB.
BODY_LIMIT = 4 * 1024 * 1024


class Wanted(NamedTuple):
    """The wanted lines of files: streams (None: all), lowest level by its bit (0: all), filter.

    A record is wanted as a whole: if one of its lines has the level, and if the filter keeps it.
    """

    level: int = 0
    streams: frozenset[str] | None = None
    filter: Filter = Filter()

    @property
    def is_rare(self) -> bool:
        """True when wanted lines may be far apart."""
        return bool(self.level or self.filter.include or self.filter.exclude)

    def may_be_in(self, file: LogFile, block: Block) -> bool:
        """Return False when the block has no wanted line."""
        # The two are not combined: a record may have the level in one block and the included pattern in another.
        if self.filter.include:
            data = file.bytes_of(block) if block.offset >= file.dropped else b""
            if len(data) == block.end - block.offset and not self.filter.may_keep(data):
                return False
        elif block.bits < self.level:
            return False
        return block.nccl or self.streams is None or file.key.stream in self.streams

    def is_apart(self, file: LogFile, text: bytes) -> bool:
        """Return True for a line of a stream that is not wanted, such as a line of NCCL in stdout."""
        return self.streams is not None and stream_of(file.key.stream, text) not in self.streams

    def of_streams(self, file: LogFile, rows: list[Row]) -> list[Row]:
        """Return the rows of the wanted streams."""
        if self.streams is None:
            return rows
        is_own = file.key.stream in self.streams
        return [row for row in rows if (not self.is_apart(file, row.text) if NCCL_MARK in row.text else is_own)]

    def may_be(self, file: LogFile, row: Row) -> bool:
        """Return False when this row cannot be the reason why its record is wanted."""
        rare = self.filter.may_keep(row.text) if self.filter.include else row.level >= self.level
        return rare and not self.is_apart(file, row.text)

    def keeps(self, file: LogFile, rows: list[Row]) -> bool:
        """Return whether the filter keeps the record of these rows; raises Problem (pattern)."""
        if not (self.filter.include or self.filter.exclude):
            return True
        # The line for dropped bytes is always kept: what they held is unknown.
        return not rows or rows[0].offset < file.dropped or self.filter.keeps(row.text for row in rows)


def find(catalogue: Catalogue, generation: int, rank: int, stream: str) -> LogFile:
    """Return one file; raises Problem (no_log)."""
    file = catalogue.files.get(LogKey(generation, rank, stream))
    if file is None and isinstance(generation, int):
        # The indexing task may not have found it yet.
        catalogue.scan(generation)
        file = catalogue.files.get(LogKey(generation, rank, stream))
    if file is None:
        known = sorted({key.rank for key in catalogue.files if key.generation == generation})
        message = f"no {stream} of rank {rank} in generation {generation}"
        raise Problem("no_log", message, f"ranks here: {known or 'none'}")
    return file


def check_streams(streams: Sequence[str] | None) -> list[str]:
    """Return the streams, stdout and stderr for None; raises Problem (usage)."""
    chosen = list(streams) if streams is not None else ["stdout", "stderr"]
    for stream in chosen:
        if stream not in STREAMS:
            raise Problem("usage", f"no such stream: {stream}", f"use one of {', '.join(STREAMS)}")
    return chosen


def streams_to_read(streams: Sequence[str] | None) -> list[str]:
    """Return the files that may hold lines of these streams; raises Problem (usage)."""
    chosen = check_streams(streams)
    # Without a file of its own, NCCL writes into the script's.
    return list(STREAMS) if "nccl" in chosen else chosen


class Shown(TypedDict, total=False):
    """Which records a view shows, as a request names them."""

    level: str | None
    include: Sequence[str]
    exclude: Sequence[str]


def check_lines(
    streams: Sequence[str] | None,
    level: str | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
) -> Wanted:
    """Return which lines of the files are wanted; raises Problem (usage, pattern)."""
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
    chosen = streams_to_read(streams)
    if generation == "all":
        return catalogue.select(None, ranks, chosen)
    if generation is None:
        newest = catalogue.newest
        return [] if newest is None else catalogue.select([newest], ranks, chosen)
    if not isinstance(generation, int):
        raise Problem("usage", f"no such generation: {generation}", 'a number, "all" or null')
    return catalogue.select([generation], ranks, chosen)
