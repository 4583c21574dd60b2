"""The port at which an agent listens for the others: strangers take little room there, and none from the nodes.

In: connections from anywhere. Out: those of nodes of this job, as their certificates prove.

A connection is a stranger's until its handshake has ended. There is room for one stranger a node and a few more; if it
is full, the address that has most of it loses its oldest connection. Many nodes may share an address, so an address
alone has no limit. Each node has a few connections of its own, which no stranger can take.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from remote_agent.base.ports import bind, listening
from remote_agent.base.tasks import Tasks
from remote_agent.election.peers import Certified, Tls, certified

if TYPE_CHECKING:
    from remote_agent.base.paths import JobFiles

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
# A stranger that was silent until the end still gets this long for the handshake.
LEAST_S = 1.0
# Each node has slots of its own besides these for strangers, because all nodes may connect at once.
STRANGERS = 16
# A node connects to the coordinator, asks, requests a vote, announces; it takes a snapshot (two), and the last output
# of ranks; it looks for an operator.
PER_NODE = 8
# The pause before accepting again when the machine has no descriptor or memory for a connection.
EXHAUSTED_S = 1.0
Accepted = Callable[[Certified, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class _TimedReader(asyncio.StreamReader):
    """A reader that knows when something last arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.heard_at = time.monotonic()

    def feed_data(self, data: Any) -> None:
        self.heard_at = time.monotonic()
        super().feed_data(data)


class Listener:
    """Accepts the other agents' connections until `close`."""

    def __init__(self, sock: socket.socket, files: JobFiles, nodes: Callable[[], int], accepted: Accepted) -> None:
        """Begin; `nodes`: how many nodes the job may have; `accepted` serves a connection of the named node.

        Raises OSError.
        """
        self._sock = sock
        self._tls = Tls(files, ssl.Purpose.CLIENT_AUTH)
        self._tls.context()
        self._nodes = nodes
        self._accepted = accepted
        self._loop = asyncio.get_running_loop()
        self._tasks = Tasks()
        self._strangers: dict[socket.socket, str] = {}
        """The handshakes in progress, oldest first, with the addresses at the other end."""
        self._links: dict[str, dict[asyncio.StreamWriter, _TimedReader]] = collections.defaultdict(dict)
        """The connections of each node."""
        self._proven: set[str] = set()
        """Addresses from which nodes have come."""
        self._later: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._resume()

    @property
    def port(self) -> int:
        """The port at which it listens."""
        return int(self._sock.getsockname()[1])

    def close(self) -> None:
        """Accept nothing more; connections of nodes stay."""
        if self._later is not None:
            self._later.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for sock in list(self._strangers):
            self._drop(sock)

    def _resume(self) -> None:
        self._later = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        try:
            sock, where = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # The socket stays readable, and the loop would do nothing else.
            log.warning("no connection can be accepted: %s", error)
            self._loop.remove_reader(self._sock)
            self._later = self._loop.call_later(EXHAUSTED_S, self._resume)
            return
        sock.setblocking(False)
        if len(self._strangers) >= self._nodes() + STRANGERS:
            self._drop_stranger()
        self._strangers[sock] = where[0]
        self._tasks.spawn(self._greet(sock, where[0]), "a connection from outside")

    def _drop_stranger(self) -> None:
        """End the oldest handshake of the address that has most; among equals one from which no node has come."""
        counts = collections.Counter(self._strangers.values())

        def excess(sock: socket.socket) -> tuple[int, bool]:
            address = self._strangers[sock]
            return counts[address], address not in self._proven

        self._drop(max(self._strangers, key=excess))

    def _drop(self, sock: socket.socket) -> None:
        """End a handshake as if the other side had: whoever waits for it closes the socket."""
        self._strangers.pop(sock, None)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    async def _greet(self, sock: socket.socket, address: str) -> None:
        """Take a connection through its handshake; serve it if a node of this job is at the other end."""
        try:
            writer, reader = await self._shake_hands(sock)
        except (OSError, asyncio.TimeoutError) as error:
            log.info("a connection from %s does not belong to this job: %s", address, str(error) or "it sent nothing")
            # Its frames hold the buffers in a circle of references, which a garbage collection finds late.
            error.__traceback__ = None
            return
        finally:
            self._strangers.pop(sock, None)
        self._proven.add(address)
        await self._serve(certified(writer.get_extra_info("peercert")), reader, writer)

    async def _shake_hands(self, sock: socket.socket) -> tuple[asyncio.StreamWriter, _TimedReader]:
        """Return a connection whose other side has proved to be of this job; raises OSError, asyncio.TimeoutError."""
        reader = _TimedReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        end = self._loop.time() + HANDSHAKE_S
        try:
            # The buffers of TLS take 300 KB, so they are allocated only once the other side has sent something.
            await asyncio.wait_for(self._await_bytes(sock), HANDSHAKE_S)
            context = self._tls.context()
        except BaseException:
            sock.close()
            raise
        rest_s = max(LEAST_S, end - self._loop.time())
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=context, ssl_handshake_timeout=rest_s
        )
        return asyncio.StreamWriter(transport, protocol, reader, self._loop), reader

    async def _await_bytes(self, sock: socket.socket) -> None:
        """Wait until the other side has sent something; raises ConnectionResetError if it has closed instead."""
        readable = asyncio.Event()
        self._loop.add_reader(sock, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(sock)
        if not sock.recv(1, socket.MSG_PEEK):
            raise ConnectionResetError

    async def _serve(self, peer: Certified, reader: _TimedReader, writer: asyncio.StreamWriter) -> None:
        links = self._links[peer.name]
        if len(links) >= PER_NODE:
            # The other side may have lost it without a trace.
            silent = min(links, key=lambda one: links[one].heard_at)
            silent.transport.abort()
        links[writer] = reader
        try:
            await self._accepted(peer, reader, writer)
        except OSError as error:
            log.info("the connection of %s ended: %s", peer.name, error)
        finally:
            del links[writer]
            writer.close()


def listen(
    files: JobFiles,
    port: int,
    accepted: Accepted,
    nodes: Callable[[], int],
    addresses: Iterable[str] = (),
    ports: str = "",
) -> Listener:
    """Serve the other agents; raises OSError. Port 0, or one that is taken: a free one, of the range `ports` if given.

    `addresses`: at which others reach this node; if that is one of the loopback, nothing else is listened on.
    """
    own = loopback(addresses)
    try:
        sock = bind(own, port) if port else listening(ports, own)
    except OSError as error:
        if port == 0:
            raise
        log.warning("port %d is taken (%s): using a free one", port, error)
        sock = listening(ports, own)
    try:
        return Listener(sock, files, nodes, accepted)
    except OSError:
        sock.close()
        raise


def loopback(addresses: Iterable[str]) -> str:
    """Return the one loopback address that all of these are, or "".

    Names are not resolved: Debian gives a machine's own name an address of the loopback, and others another one.
    """
    plain = {"127.0.0.1" if address == "localhost" else address.strip("[]") for address in addresses}
    try:
        own = all(ipaddress.ip_address(address).is_loopback for address in plain)
    except ValueError:
        return ""
    return plain.pop() if own and len(plain) == 1 else ""
