"""A port of this machine that leads to a port of a node, until it is closed.

In: a function that connects to the node's port. Out: a port of 127.0.0.1; what connects to it is passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any, Protocol

from remote_agent.wire import WireError
from supervisor.errors import RequestFailed, SupervisorError
from supervisor.ssh_library import asyncssh

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

HERE = "127.0.0.1"
CHUNK = 65_536
# A connection that is not ended for so long has reached a program, seconds.
REFUSAL_S = 1.0


class Reader(Protocol):
    """One direction of a connection: asyncio's or asyncssh's."""

    async def read(self, n: int = -1, /) -> bytes:
        """Return up to that many bytes; empty at the end."""


class Writer(Protocol):
    """The other direction."""

    def write(self, data: bytes, /) -> Any:
        """Queue bytes."""

    async def drain(self) -> None:
        """Wait until the queue is short."""

    def write_eof(self) -> None:
        """End this direction."""

    def close(self) -> None:
        """End the connection."""


class Forward:
    """One forwarded port; the connection to the node may be another one for each connection that it passes on."""

    def __init__(self, node: str, port: int, connect: Callable[[], Awaitable[tuple[Reader, Writer]]]) -> None:
        self.node = node
        self.port = port
        """The port of the node."""
        self.local = 0
        """The port of this machine."""
        self.is_answered = False
        """A program listened on the node's port when the forward began."""
        self.is_open = False
        self._connect = connect
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        return f"http://{HERE}:{self.local}"

    async def open(self, local: int | None) -> None:
        """Try the node's port, then listen on this one; None: on one of the same number, otherwise on any free one.

        Raises RequestFailed, HostError, Unreachable.
        """
        with contextlib.suppress(ConnectionRefusedError):
            self.is_answered = await self._is_answered()
        try:
            self._server = await self._listen(self.port if local is None else local)
        except OSError as error:
            if local is not None:
                reason = os.strerror(error.errno or 0).lower()
                raise RequestFailed(f"port {local} of this machine: {reason}", "choose another one") from error
            self._server = await self._listen(0)
        self.is_open = True
        self.local = self._server.sockets[0].getsockname()[1]

    async def _is_answered(self) -> bool:
        """Connect once; a connection through the ssh program is refused by its end."""
        reader, writer = await self._connect()
        try:
            return bool(await asyncio.wait_for(reader.read(1), REFUSAL_S))
        except asyncio.TimeoutError:
            return True
        except (asyncssh.Error, OSError):
            return False
        finally:
            writer.close()

    async def _listen(self, port: int) -> asyncio.Server:
        return await asyncio.start_server(self._serve, HERE, port)

    async def close(self) -> None:
        """Listen no longer, and end what is passed on."""
        self.is_open = False
        if self._server is not None:
            self._server.close()
        serving = [*self._serving]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on; one that cannot be is closed, which its program shows."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            if not self.is_open:
                # The connection was accepted just before `close`.
                return
            far_reader, far_writer = await self._connect()
            try:
                await _copy_both(reader, writer, far_reader, far_writer)
            finally:
                far_writer.close()
        except (SupervisorError, WireError, asyncssh.Error, OSError):
            return
        except asyncio.CancelledError:
            # `close` cancels this task; asyncio would report that as an error of the callback.
            return
        finally:
            self._serving.discard(task)
            writer.close()


async def _copy_both(reader: Reader, writer: Writer, far_reader: Reader, far_writer: Writer) -> None:
    ways = [asyncio.ensure_future(_copy(reader, far_writer)), asyncio.ensure_future(_copy(far_reader, writer))]
    try:
        await asyncio.gather(*ways)
    finally:
        for way in ways:
            way.cancel()


async def _copy(reader: Reader, writer: Writer) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
