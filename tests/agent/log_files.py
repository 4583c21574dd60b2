"""Log files of ranks, as tests write them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

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


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Wait until check says True; fails after 10 s."""
    deadline = time.monotonic() + 10
    while not await check():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.005)
