"""What the engine leaves to other processes because it needs torch: its facts, and the stores of the groups.

In: addresses and listening sockets. Out: torch's facts; stores that are served. The ranks start meanwhile: whoever
connects before a store is served waits in the socket's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from remote_agent.base.proc import own_command
from remote_agent.engine import installed
from remote_agent.engine.store_process import MESSAGE_BYTES

if TYPE_CHECKING:
    from remote_agent.engine.processes import Orphans
    from remote_agent.wire.answers import TorchFacts

log = logging.getLogger(__name__)

STORE_S = 30.0


class Torch(Protocol):
    """What the engine needs torch for."""

    async def ask(self) -> TorchFacts:
        """Return torch's facts, or only why it cannot be imported."""
        ...

    async def serve(self, host: str, listening: socket.socket) -> None:
        """Serve a fresh store on a socket, which is taken over; raises OSError, RuntimeError, asyncio.TimeoutError."""
        ...

    async def drop(self) -> None:
        """End the store, and free its port; raises OSError, asyncio.TimeoutError."""
        ...

    async def close(self) -> None:
        """End all that was started."""
        ...


class TorchProcesses:
    """Processes that import torch: one for the facts, which ends, and one for all stores, started with the first."""

    def __init__(
        self,
        job: str,
        in_thread: Callable[..., Awaitable[Any]],
        orphans: Orphans,
        failed: Callable[[str], None],
    ) -> None:
        """`failed` is called when a store that was to be served later cannot be, or ends by itself."""
        self._job = job
        self._in_thread = in_thread
        self._orphans = orphans
        self._failed = failed
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: socket.socket | None = None
        self._listener: asyncio.Task[None] | None = None
        self._late: asyncio.Task[None] | None = None
        self._is_ready = False
        """Whether the process has imported torch."""
        self._pending: tuple[str, socket.socket] | None = None
        self._answers: dict[int, asyncio.Future[str]] = {}
        """What is awaited, by the number of the request."""
        self._requests = 0

    async def ask(self) -> TorchFacts:
        return await installed.ask()

    async def serve(self, host: str, listening: socket.socket) -> None:
        """Serve a fresh store: on return where torch is imported already, else as soon as it is."""
        if self._is_ready:
            await self._request(host, listening)
            return
        self._pending = (host, listening)
        if self._process is None:
            await self._start()

    async def drop(self) -> None:
        if self._pending is not None:
            self._pending[1].close()
            self._pending = None
        elif self._is_ready:
            await self._request("", None)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            self._process = await self._in_thread(_popen, self._job, theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._wire = ours
        self._orphans.spared.add(self._process.pid)
        self._listener = asyncio.ensure_future(self._listen(ours))

    async def _listen(self, wire: socket.socket) -> None:
        why = "the process that serves the store has died"
        with contextlib.suppress(OSError, ValueError):
            while data := await asyncio.get_running_loop().sock_recv(wire, MESSAGE_BYTES):
                message = json.loads(data)
                if "ready" in message:
                    self._is_ready = True
                    # Its answer comes here, too.
                    self._late = asyncio.ensure_future(self._serve_pending())
                elif "broken" in message:
                    why = str(message["broken"])
                elif (answer := self._answers.get(message["number"])) is not None and not answer.done():
                    answer.set_result(str(message["error"]))
        await self._end()
        log.warning("no store: %s", why)
        self._failed(why)

    async def _serve_pending(self) -> None:
        """Serve the store that has waited for the import."""
        if self._pending is None:
            return
        (host, listening), self._pending = self._pending, None
        try:
            await self._request(host, listening)
        except (OSError, RuntimeError, asyncio.TimeoutError) as error:
            self._failed(str(error) or "no answer")

    async def _request(self, host: str, listening: socket.socket | None) -> None:
        """Have one store served, or none without a socket, and the one before ended."""
        descriptors = [] if listening is None else [listening.fileno()]
        self._requests += 1
        # The store that has waited for the import may still be opened when the next group asks.
        number, answer = self._requests, asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            assert self._wire is not None
            socket.send_fds(self._wire, [json.dumps({"host": host, "number": number}).encode()], descriptors)
            error = await asyncio.wait_for(answer, STORE_S)
        finally:
            del self._answers[number]
            if listening is not None:
                listening.close()
        if error:
            raise RuntimeError(error)

    async def _end(self) -> None:
        process, self._process = self._process, None
        self._is_ready = False
        if self._pending is not None:
            self._pending[1].close()
            self._pending = None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(OSError("the process that serves the store has died"))
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        if process is not None:
            await self._orphans.end_spared(process, "the process that serves the store")

    async def close(self) -> None:
        """End the stores and their process."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait({self._listener})
        await self._end()


def _popen(job: str, wire: socket.socket) -> subprocess.Popen[bytes]:
    """Start the process, in the thread that lives as long as the engine."""
    command = own_command("store", "--job", job, "--engine", str(os.getpid()))
    return subprocess.Popen(command, stdin=wire.fileno(), stdout=subprocess.DEVNULL, start_new_session=True)
