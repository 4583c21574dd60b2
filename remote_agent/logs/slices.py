"""Long work in slices on the event loop, and waiting for new bytes.

In: a time budget; rings of the bell. Out: pauses.
"""

from __future__ import annotations

import asyncio
import time

# Longest time that one request may hold the event loop.
BUDGET_S = 0.01


class Breather:
    """Gives the event loop a turn whenever the time budget is used up."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.monotonic() + BUDGET_S

    def is_due(self) -> bool:
        """True when the budget is used up."""
        return time.monotonic() >= self._until

    async def breathe(self) -> None:
        """Pause if the budget is used up."""
        if self.is_due():
            await asyncio.sleep(0)
            self._until = time.monotonic() + BUDGET_S


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
