"""Log files of ranks, as tests write them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from remote_agent.logs import LogStore

TRACEBACK = (
    b"Traceback (most recent call last):\n"
    b'  File "/w/train.py", line 9, in <module>\n'
    b"    main()\n"
    b"ValueError: bad batch\n"
)


def log(root: Path, rank: int = 0, stream: str = "stdout", generation: int = 0) -> Path:
    path = root / f"generation_{generation}" / f"rank_{rank}" / f"{stream}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@contextlib.asynccontextmanager
async def opened(root: Path, *, live: bool) -> AsyncIterator[LogStore]:
    """Start a store over the logs in a directory, and stop it at the end."""
    store = LogStore(root, live=live)
    await store.start()
    try:
        yield store
    finally:
        await store.stop()


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Wait until check says True; fails after a minute."""
    deadline = time.monotonic() + 60
    while not await check():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.005)
