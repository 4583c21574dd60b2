"""Asyncio tasks with an owner that cancels them, and whose errors are logged.

In: coroutines. Out: their end when the owner closes, their errors in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

CANCEL_AGAIN_S = 0.5
T = TypeVar("T")


class Tasks:
    """A set of running tasks; `close` cancels and awaits them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a coroutine until it ends or the owner closes; after `close` it is cancelled at once."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        if self._closed:
            task.cancel()
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task %s failed", task.get_name(), exc_info=task.exception())

    async def close(self) -> None:
        """Cancel all tasks but the calling one, wait for them, and start no more.

        Before Python 3.12 `asyncio.wait_for` can swallow a cancellation, so a task that continues is cancelled again.
        """
        self._closed = True
        current = asyncio.current_task()
        pending = {task for task in self._tasks if task is not current}
        while pending:
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


async def to_the_end(work: Awaitable[T], hurry: Callable[[], None] | None = None) -> T:
    """Return the result of work that cannot be undone halfway: a cancelled caller still waits for its end.

    So the work writes nothing any more once its caller has ended. `hurry` is called at a cancellation.
    """
    doing = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        if hurry is not None:
            hurry()
        await asyncio.wait({doing})
        raise


async def within(event: asyncio.Event, seconds: float) -> bool:
    """Return whether the event is set before this time has passed."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
