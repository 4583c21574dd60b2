"""What an agent does for other nodes without slowing down training: threads of idle priority, and who is next.

In: work, names of nodes. Out: results of the work; the other nodes in order; connections to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from remote_agent.wire.channel import refuse

if TYPE_CHECKING:
    from remote_agent.election.peers import Peers
    from remote_agent.wire import Channel

T = TypeVar("T")

# Hashing or receiving a snapshot of gigabytes takes a thread many seconds; short work does not wait for it.
THREADS = 4
# This is the number of ioprio_set by machine. Class 3 is idle: the thread reads and writes when nobody else does.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_IDLE = 3 << 13


def be_idle() -> None:
    """Let the calling thread have what others leave of processor and disk."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_IDLE)


class Background:
    """Idle threads of one agent, and its connections to the other agents of the job."""

    def __init__(self, node: str, peers: Peers) -> None:
        self._node = node
        self._peers = peers
        self._threads = ThreadPoolExecutor(THREADS, "idle", initializer=be_idle)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Return the result of work that was done in an idle thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def close(self) -> None:
        """Wait for the work that was begun, and end the threads."""
        self._threads.shutdown(wait=True)

    def others(self) -> list[str]:
        """Return the other nodes, those that follow this one in the order of names first."""
        names = sorted(self._peers.members)
        own = names.index(self._node) if self._node in names else 0
        return [name for name in (*names[own:], *names[:own]) if name != self._node]

    @contextlib.asynccontextmanager
    async def connected(self, node: str) -> AsyncIterator[Channel]:
        """Yield a connection to another node's agent; raises PeerRefused, PeerUnreachable, KeyError."""
        channel = await self._peers.connect(node, refuse)
        running = asyncio.ensure_future(channel.run())
        try:
            yield channel
        finally:
            # close() would wait for a host without power.
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
