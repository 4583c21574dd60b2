"""A watchdog on event loops: which callback has held one for so long that what waits for an answer notices.

In: SUPERVISOR_HELD, a file. Out: a line in it for each such callback, of any process of a test.

PYTHONWARNINGS names a category that is defined here, so each Python imports this module when it starts, with -S too.
What counts is the processor time of the thread: a machine that is busy otherwise fails nothing.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LIMIT_S = 0.1
# Processes that share a core, and its caches, with others need more of it for the same work.
LIMIT_BUSY_S = 0.3


class Held(Warning):
    """The category that PYTHONWARNINGS names; nothing warns of it."""


def watch(events: Any) -> None:
    """Note from now on which callbacks of asyncio hold their loop."""
    run = events.Handle._run
    if run.__module__.endswith("held"):
        return

    def _run(self: Any) -> None:
        begun = time.thread_time()
        run(self)
        held_s = time.thread_time() - begun
        if held_s > LIMIT_S:
            _note(self, held_s)

    events.Handle._run = _run


def _note(handle: Any, held_s: float) -> None:
    if held_s < LIMIT_BUSY_S and os.getloadavg()[0] > (os.cpu_count() or 1):
        return
    task = getattr(handle._callback, "__self__", handle)
    # What a test does itself, it may do as long as it likes.
    if " coro=<test_" in repr(task):
        return
    file = os.open(os.environ["SUPERVISOR_HELD"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, f"{held_s:.2f} s of {' '.join(sys.argv[:3])}: {task!r}\n".encode())
    os.close(file)


class _Finder:
    """Watches the loops of a process once it imports asyncio, which is too early for this module."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != "asyncio.events":
            return None
        sys.meta_path.remove(_Finder)
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            watch(module)

        spec.loader.exec_module = exec_module
        return spec


# An engine has what it needs. What it starts are ranks, whose PYTHONPATH is their own.
if "engine" in getattr(sys, "argv", ())[:3]:
    os.environ.pop("PYTHONWARNINGS", None)
if "SUPERVISOR_HELD" in os.environ:
    if "asyncio.events" in sys.modules:
        watch(sys.modules["asyncio.events"])
    else:
        sys.meta_path.insert(0, _Finder)
