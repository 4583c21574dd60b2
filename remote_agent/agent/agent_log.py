"""The agent's own log: whatever happens outside, it stays small and keeps its beginning and its newest lines.

In: records of `logging`, and what the engine writes to the same file. Out: `agent.log`, at most LIMIT bytes for long.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from pathlib import Path

log = logging.getLogger(__name__)

LIMIT = 768 * 1024
FIRST = 128 * 1024
NEWEST = 384 * 1024
LOOK_S = 2.0
# Strangers can make one place in the code log, over and over: the event loop's handler of exceptions, for example.
BURST = 20
PERIOD_S = 60.0


class Sparing(logging.Filter):
    """Lets each place in the code log BURST records in PERIOD_S, then reports how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[str, int], tuple[float, int]] = {}
        """The time when the period of a place began, and its number of records."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        place, now = (record.pathname, record.lineno), time.monotonic()
        since, count = self._places.get(place, (now, 0))
        if now - since >= PERIOD_S:
            if count > BURST:
                record.msg = f"{record.getMessage()} (and {count - BURST} like it left out)"
                record.args = ()
            since, count = now, 0
        self._places[place] = since, count + 1
        return count < BURST


def begin() -> None:
    """Log to stderr, which is the job's agent.log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Sparing())
    logging.basicConfig(handlers=[handler], level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


async def keep_small(path: Path) -> None:
    """Cut the middle out of the log whenever it is too long; returns never."""
    while True:
        try:
            cut(path)
        except OSError as error:
            log.warning("agent.log cannot be shortened: %s", error)
        await asyncio.sleep(LOOK_S)


def cut(path: Path) -> None:
    """Leave the first and the newest lines of a log that is too long; raises OSError.

    The file stays the same: agent and engine append to it. A line that is written at this very moment may be lost.
    """
    if not path.exists() or path.stat().st_size <= LIMIT:
        return
    with open(path, "r+b") as file:
        first = file.read(FIRST)
        first = first[: first.rfind(b"\n") + 1]
        size = file.seek(-NEWEST, os.SEEK_END) + NEWEST
        newest = file.read(NEWEST)
        newest = newest[newest.find(b"\n") + 1 :]
        file.seek(len(first))
        file.write(b"[%d bytes are left out here]\n%b" % (size - len(first) - len(newest), newest))
        file.truncate()
