"""Tasks with an owner: what is started here ends here, and a crash is never silent.

In: coroutines. Out: their end when the owner closes, their errors in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)

CANCEL_AGAIN_S = 0.5


class Tasks:
    """A set of running tasks; `close` cancels and awaits them all."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a coroutine until it ends or the owner closes; after that, not at all."""
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
        """Cancel all tasks but the one that calls, wait for them, and start no more.

        `asyncio.wait_for` before Python 3.12 can swallow a cancellation, so a task that goes on is cancelled again.
        """
        self._closed = True
        current = asyncio.current_task()
        pending = {task for task in self._tasks if task is not current}
        while pending:
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
