"""What a log request asks for, checked.

In: arguments from the wire. Out: files, and which of their lines; Problem (kind "usage") for nonsense.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Union

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
    """Which lines of the chosen files: of these streams (None: all), of the level with this bit or worse (0: all)."""

    level: int = 0
    streams: frozenset[str] | None = None

    def may_be_in(self, file: LogFile, block: Block) -> bool:
        """False when the block holds no such line."""
        if block.bits < self.level:
            return False
        return block.nccl or self.streams is None or file.key.stream in self.streams

    def is_apart(self, file: LogFile, text: bytes) -> bool:
        """True for a line of another stream: of NCCL where that is not wanted, of the script where only NCCL is."""
        return self.streams is not None and stream_of(file.key.stream, text) not in self.streams

    def is_met(self, file: LogFile, row: Row) -> bool:
        """True when the row is one of them."""
        return row.level >= self.level and not self.is_apart(file, row.text)


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


def check_lines(streams: Sequence[str] | None, level: str | None) -> Wanted:
    """Return which lines of the files to give; raises Problem (usage)."""
    chosen = frozenset(check_streams(streams))
    return Wanted(check_level(level), None if len(chosen) == len(STREAMS) else chosen)


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
