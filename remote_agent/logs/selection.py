"""What a log request asks for, checked.

In: arguments from the wire. Out: numbers, streams, levels; Problem (kind "usage") for nonsense.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

from remote_agent.logs.levels import minimum_level
from remote_agent.logs.logfile import STREAMS, Key, LogFile
from remote_agent.wire import Problem

if TYPE_CHECKING:
    from remote_agent.logs.catalogue import Catalogue

# A generation by number, "all", or None: the newest.
Generations = Union[int, str, None]
# Bytes of text in one answer; a frame holds 8 MiB.
BODY_LIMIT = 4 * 1024 * 1024


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


def check_level(level: str | None) -> int:
    """Return the bit of the lowest level wanted, 0 for all; raises Problem (usage)."""
    try:
        return minimum_level(level)
    except ValueError as bad:
        raise Problem("usage", str(bad)) from None


def select(
    catalogue: Catalogue, generation: Generations, ranks: Sequence[int] | None, streams: Sequence[str] | None
) -> list[LogFile]:
    """Return the files asked for; generation None: the newest, "all": every one; raises Problem (usage)."""
    chosen = check_streams(streams)
    if generation == "all":
        return catalogue.select(None, ranks, chosen)
    if generation is None:
        newest = catalogue.newest
        return [] if newest is None else catalogue.select([newest], ranks, chosen)
    if not isinstance(generation, int):
        raise Problem("usage", f"no such generation: {generation}", 'a number, "all" or null')
    return catalogue.select([generation], ranks, chosen)
