"""Long work in time slices on the event loop, such as indexing, and waiting for new bytes.

In: a time budget; a file; rings of the bell. Out: pauses.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remote_agent.logs.logfile import LogFile

# The longest time for which one request may hold the event loop.
BUDGET_S = 0.01


class TimeSlice:
    """A share of time on the event loop, after which other tasks get a turn."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.monotonic() + BUDGET_S

    def is_over(self) -> bool:
        """Return whether the time is used up."""
        return time.monotonic() >= self._until

    async def pause_if_over(self) -> None:
        """Let other tasks run if the time is used up, and begin a new slice."""
        if self.is_over():
            await asyncio.sleep(0)
            self._until = time.monotonic() + BUDGET_S


async def index_until(file: LogFile, wait_s: float) -> bool:
    """Index a file to its end, at most wait_s seconds; True when all of it is indexed."""
    until = time.monotonic() + wait_s
    time_slice = TimeSlice()
    # A live file may be ahead of its index; one slice catches up unless it is flooded.
    while file.absorb(time.time_ns()) and time.monotonic() < until:
        await time_slice.pause_if_over()
    return not file.behind


class Bell:
    """Wakes all waiting tasks; a ring between reading `count` and waiting for it is not lost."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """Wake all waiting tasks."""
        self.count += 1
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Return at the first ring after the count was `seen`, or after timeout_s seconds."""
        if self.count != seen:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait([future], timeout=timeout_s)
        finally:
            self._waiting.discard(future)
            future.cancel()
