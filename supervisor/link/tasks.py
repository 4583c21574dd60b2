"""Waiting for tasks, events and streams without losing a cancellation.

In: tasks, events, streams. Out: ended tasks; waits that a cancellation always ends.

Before Python 3.12 `asyncio.wait_for` returns normally if it is cancelled in the moment in which its inner wait ends; a
loop around it then never ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

# A cancelled task may run this long before it is cancelled again, seconds.
AGAIN = 0.5


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until all have ended; their errors are not raised."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN)


async def wait_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event, at most `timeout_s`; returns whether it is set."""
    if not event.is_set():
        waiter = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait((waiter,), timeout=timeout_s)
        finally:
            waiter.cancel()
    return event.is_set()


async def within(work: Awaitable[T], timeout_s: float) -> T:
    """Wait like asyncio.wait_for; raises asyncio.TimeoutError. The work has ended when this returns."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task,), timeout=timeout_s)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        await cancel_all((task,))


async def each(stream: AsyncGenerator[T, None], timeout_s: float) -> AsyncGenerator[T, None]:
    """Yield the items of a stream, never None, and close it; raises asyncio.TimeoutError if one takes too long."""
    try:
        while (item := await within(anext(stream, None), timeout_s)) is not None:
            yield item
    finally:
        await stream.aclose()
