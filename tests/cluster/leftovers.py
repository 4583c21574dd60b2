"""Finds processes that outlived the tests which started them.

In: a mark in the environment, which all descendants inherit.
Out: their pids.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster.network import process_state

MARK = "SUPERVISOR_TEST_RUN"


def below(mark: str) -> list[int]:
    """The living processes whose environment carries a mark that was made below this one."""
    return _look(lambda each: each.startswith(f"{MARK}={mark}.".encode()))


def marked(mark: str) -> list[int]:
    """The living processes, other than this one, whose environment carries the mark; waits 30 s for those that end."""
    deadline = time.monotonic() + 30.0
    while found := _look(f"{MARK}={mark}".encode().__eq__):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)  # not our children: nothing tells us when they end
    return found


def _look(is_wanted: Callable[[bytes], bool]) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(map(is_wanted, environment)) and process_state(int(entry)) not in {"Z", "X", ""}:
            found.append(int(entry))
    return found


def describe(pid: int) -> str:
    """A process in one line."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        line = "(gone)"
    return f"{pid}: {line[:200]}"


def end(pids: list[int]) -> None:
    """SIGKILL these processes."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
