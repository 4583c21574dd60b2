"""Turns on the event loop: long work in slices, and waiting for news.

In: a budget of time; rings of the follower. Out: pauses at the right moments.
"""

from __future__ import annotations

import asyncio
import time

# Longest time that one request may hold the event loop.
BUDGET_S = 0.01


class Breather:
    """Gives the event loop a turn whenever the budget of time is used up."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.monotonic() + BUDGET_S

    async def breathe(self) -> None:
        """Pause if it is time to."""
        if time.monotonic() >= self._until:
            await asyncio.sleep(0)
            self._until = time.monotonic() + BUDGET_S


class Bell:
    """Wakes all who wait; a ring between reading `count` and waiting for it is not lost."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """Wake all who wait now."""
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
