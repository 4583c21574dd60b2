"""Pipes and Unix sockets as asyncio streams.

In: paths, descriptors. Out: streams, a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO

from remote_agent.base.files import short_name

# Frames may have 8 MiB; asyncio's limit only bounds readline, readuntil and how much is read ahead.
READ_AHEAD = 1024 * 1024


async def open_unix(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a Unix socket whose path may be of any length; raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        with short_name(path) as name:
            await asyncio.get_running_loop().sock_connect(sock, name)
        return await asyncio.open_unix_connection(sock=sock, limit=READ_AHEAD)
    except BaseException:
        sock.close()
        raise


async def open_pipes(source: IO[bytes], sink: IO[bytes]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a pipe to read from and a pipe to write to as streams."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=READ_AHEAD)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    # The write pipe uses StreamReaderProtocol too, because only that can wait until the last byte is written.
    unread = asyncio.StreamReader()
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.StreamReaderProtocol(unread), sink)
    return reader, asyncio.StreamWriter(transport, protocol, None, loop)


async def serve_unix(
    path: Path, callback: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> asyncio.AbstractServer:
    """Listen on a Unix socket of mode 0600, replacing a stale one; the caller closes the server and unlinks the path.

    Call it only while holding the lock that protects the socket. Raises OSError.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        with short_name(path) as name:
            # The directory is 0700, so nobody else can connect before the chmod.
            sock.bind(name)
        os.chmod(path, 0o600)
        return await asyncio.start_unix_server(callback, sock=sock, limit=READ_AHEAD)
    except BaseException:
        sock.close()
        raise
