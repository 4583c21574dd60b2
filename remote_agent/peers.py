"""Mutual TLS between the agents of one job.

In: the job's key material, addresses. Out: channels whose other end is a node of this job, by certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from remote_agent.wire import Channel, Handler

if TYPE_CHECKING:
    from remote_agent.paths import JobFiles

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


class PeerRefused(Exception):
    """Nothing listens there: the agent is dead."""


class PeerUnreachable(Exception):
    """No answer, or not from the node we meant."""


def _context(files: JobFiles, side: ssl.Purpose) -> ssl.SSLContext:
    context = ssl.create_default_context(side, cafile=str(files.ca))
    context.load_cert_chain(str(files.cert), str(files.key))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def peer_name(writer: asyncio.StreamWriter) -> str:
    """Return the node name in the other side's certificate, "" when there is none."""
    certificate = writer.get_extra_info("peercert") or {}
    names = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
    return names[0] if names else ""


async def listen(
    files: JobFiles, port: int, accepted: Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> tuple[asyncio.AbstractServer, int]:
    """Serve the other agents; port 0: any. A port that is taken is replaced by a free one. Returns server and port."""
    context = _context(files, ssl.Purpose.CLIENT_AUTH)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await accepted(peer_name(writer), reader, writer)
        except (OSError, ssl.SSLError) as error:
            log.info("a peer's connection ended: %s", error)
        finally:
            writer.close()

    try:
        listener = _listener(port)
    except OSError as error:
        if port == 0:
            raise
        log.warning("port %d is taken (%s): using a free one", port, error)
        listener = _listener(0)
    server = await asyncio.start_server(connected, sock=listener, ssl=context)
    return server, int(listener.getsockname()[1])


def _listener(port: int) -> socket.socket:
    """Return one socket for IPv4 and IPv6: two would get two ports."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


async def connect(files: JobFiles, node: str, address: str, port: int, handler: Handler) -> Channel:
    """Return a channel to a node ("": to whoever of this job is there); the caller runs it.

    Raises PeerRefused, PeerUnreachable.
    """
    there = f"{node} ({address}:{port})" if node else f"{address}:{port}"
    try:
        context = _context(files, ssl.Purpose.SERVER_AUTH)
        # Names of nodes are not host names (10.0.0.7 is one): we compare them ourselves.
        context.check_hostname = False
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(address, port, ssl=context, server_hostname=""), CONNECT_TIMEOUT_S
        )
    except ConnectionRefusedError as error:
        raise PeerRefused(f"{there}: {error}") from error
    except (OSError, ssl.SSLError, asyncio.TimeoutError) as error:
        raise PeerUnreachable(f"{there}: {str(error) or 'no answer'}") from error
    if node and peer_name(writer) != node:
        writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(writer.wait_closed(), 1.0)
        raise PeerUnreachable(f"{address}:{port} is {peer_name(writer) or 'nobody of this job'}, not {node}")
    return Channel(reader, writer, handler)


async def is_dead(address: str, port: int) -> bool:
    """Whether the machine answers and says that nothing listens there."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), 2.0)
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), 1.0)
    return False
