"""What several hosts use at once and only one opens: a connection to a jump host, a login of ssh.

In: a key, and how to open and close what it names. Out: leases; the last one that is given back closes it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Lease(Generic[T]):
    """One use of a shared thing."""

    def __init__(self, thing: T, give_back: Callable[[], Awaitable[None]]) -> None:
        self.thing = thing
        self._give_back = give_back
        self._is_back = False

    async def give_back(self) -> None:
        """End this use; the last one closes the thing."""
        if not self._is_back:
            self._is_back = True
            await self._give_back()


@dataclasses.dataclass
class _Entry(Generic[T]):
    task: asyncio.Task[T]
    users: int = 0


class Shared(Generic[T]):
    """Things by key, each open as long as anybody uses it."""

    def __init__(self, is_open: Callable[[T], bool], close: Callable[[T], Awaitable[None]]) -> None:
        self._entries: dict[Hashable, _Entry[T]] = {}
        self._is_open = is_open
        self._close = close

    async def lease(self, key: Hashable, opening: Callable[[], Coroutine[Any, Any, T]]) -> Lease[T]:
        """Return the thing of a key, opened if it is not open; raises what `opening` raises."""
        entry = self._entries.get(key)
        if entry is None or not self._is_usable(entry):
            entry = self._entries[key] = _Entry(asyncio.ensure_future(opening()))
        entry.users += 1
        try:
            # Others wait for the same task: cancelling one must not cancel it.
            thing = await asyncio.shield(entry.task)
        except BaseException:
            await self._release(key, entry)
            raise
        return Lease(thing, lambda: self._release(key, entry))

    def _is_usable(self, entry: _Entry[T]) -> bool:
        task = entry.task
        if not task.done():
            return True
        return not task.cancelled() and task.exception() is None and self._is_open(task.result())

    async def _release(self, key: Hashable, entry: _Entry[T]) -> None:
        entry.users -= 1
        if entry.users:
            return
        if self._entries.get(key) is entry:
            del self._entries[key]
        entry.task.cancel()
        (result,) = await asyncio.gather(entry.task, return_exceptions=True)
        if not isinstance(result, BaseException):
            await self._close(result)
