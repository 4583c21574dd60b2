"""A coroutine that waits without taking time: its loop's clock jumps to the next timer once nothing else is due.

In: a coroutine that uses no sockets; what it gives to a thread is done at once. Out: its result; which of two timers
ends first does not depend on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everything waits, and no timer is set"
        self.now += max(0.0, timeout)
        return super().select(0)


class _AtOnce(concurrent.futures.ThreadPoolExecutor):
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            done.set_exception(error)
        return done


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Jumping()
        super().__init__(self._clock)
        self.set_default_executor(_AtOnce())

    def time(self) -> float:
        return self._clock.now


def some(value: T | None) -> T:
    """Return the value, which must be there."""
    assert value is not None
    return value


def run(coroutine: Coroutine[Any, Any, T], within_s: float) -> T:
    """Return the coroutine's result; raises asyncio.TimeoutError after that many seconds of its loop."""

    async def body() -> T:
        try:
            return await asyncio.wait_for(coroutine, within_s)
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    loop = _Loop()
    try:
        return loop.run_until_complete(body())
    finally:
        loop.close()
