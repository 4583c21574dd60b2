"""The other agents of the job: where they are, and connections to them by mutual TLS.

In: the job's key material, addresses. Out: channels to nodes of this job, as their certificates prove; answers to
single questions; `members.json`, read after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from remote_agent.base.files import atomic_write, read_json
from remote_agent.wire import CallFailed, Channel, Handler, Items, ProtocolError, WireError, split_endpoint
from remote_agent.wire.agents import read_answer
from remote_agent.wire.channel import refuse
from remote_agent.wire.gate import Misfit

if TYPE_CHECKING:
    from remote_agent.base.paths import JobFiles
    from remote_agent.base.tasks import Tasks
    from remote_agent.wire import Args

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 5.0
# This many other nodes are asked at once: a handshake takes a millisecond or two of this node's processor.
MAX_ASKED = 64
# Of so many nodes addresses are known, and of no more: who may announce names could invent them.
MOST_MEMBERS = 16384
# The bits of a certificate's serial number below the time at which it was issued.
SERIAL_BITS = 64


class PeerRefused(Exception):
    """Nothing listens there: the agent is dead."""


class PeerUnreachable(Exception):
    """No answer, or not from the node we meant."""


class Peers:
    """The agents of one job, as this node knows them."""

    def __init__(
        self,
        files: JobFiles,
        node: str,
        endpoint: str,
        tasks: Tasks,
        is_revoked: Callable[[str, int], bool] = lambda _name, _issued_ns: False,
    ) -> None:
        """Begin with the addresses on the disk; `is_revoked` says whether a node's certificate of a time is void."""
        self._tls = Tls(files)
        self.is_revoked = is_revoked
        self._asked = asyncio.Semaphore(MAX_ASKED)
        self._files = files
        self._node = node
        self.endpoint = endpoint
        self._tasks = tasks
        self.members: dict[str, Args] = read_json(files.members)
        """Address and port of each agent, by node."""
        self._own: dict[str, Args] = {}
        self._certain: dict[str, Args] = {}
        """Where nodes listen according to themselves, to an operator or to their certificate."""
        self._written = dict(self.members)
        self._writing = False

    @property
    def port(self) -> int:
        """The port at which this node's agent listens for the others; 0 before it does."""
        return int(self.members.get(self._node, {}).get("port", 0))

    def listen_at(self, address: str, port: int) -> None:
        """Note where this node's agent listens for the others."""
        self._own = {self._node: {"address": address, "port": port}}
        self.learn(self._own)

    def learn(self, members: Mapping[str, Mapping[str, Any]], *, certain: bool = False) -> None:
        """Note where agents are, and write it to the disk soon; `certain`: according to themselves or an operator.

        Anything else is hearsay: good for dialling, as the certificate decides who is there, and no proof of a death.
        """
        if certain:
            self._certain.update({name: dict(where) for name, where in members.items()})
        is_full = len(self.members) >= MOST_MEMBERS
        known = {name: dict(where) for name, where in members.items() if not is_full or name in self.members}
        # Others may have stale facts about this node's own agent, from before its last start.
        self.members.update({**known, **self._own})
        if not self._writing and self.members != self._written:
            self._writing = True
            self._tasks.spawn(self._write(), "write the members")

    async def _write(self) -> None:
        """Write the members until the file is up to date; no promise depends on it, so nothing waits for it."""
        try:
            while self.members != self._written:
                members = dict(self.members)
                self._written = members
                await asyncio.to_thread(atomic_write, self._files.members, json.dumps(members).encode())
        except OSError as error:
            log.warning("the members cannot be written: %s", error)
        finally:
            self._writing = False

    async def connect(self, node: str, handler: Handler) -> Channel:
        """Return a channel to a node of which the address is known; raises PeerRefused, PeerUnreachable."""
        where = self.members[node]
        try:
            channel = await self._dial(node, where["address"], int(where["port"]), handler)
        except PeerRefused as error:
            if self._certain.get(node) != where:
                raise PeerUnreachable(f"{error}, at the address that other nodes reported") from error
            raise
        self._certain[node] = where
        return channel

    def open(self, node: str, timeout_s: float) -> ssl.SSLSocket:
        """Return a socket to a node, for a thread that may block; raises PeerUnreachable, KeyError.

        `timeout_s`: how long each wait on it may take, once it is connected.
        """
        where = self.members[node]
        there = f"{node} ({where['address']}:{where['port']})"
        try:
            # Host names are not checked, because names of nodes are not host names.
            context = self._tls.context()
            plain = socket.create_connection((where["address"], int(where["port"])), CONNECT_TIMEOUT_S)
            sock = context.wrap_socket(plain)
        except OSError as error:
            raise PeerUnreachable(f"{there}: {error}") from error
        if self._certified(sock.getpeercert()).name != node:
            sock.close()
            raise PeerUnreachable(f"{there}: another node answers")
        sock.settimeout(timeout_s)
        return sock

    async def is_dead(self, node: str) -> bool:
        """Return whether a node's machine answers and nothing listens where its agent is known to have listened."""
        where = self._certain.get(node)
        return where is not None and await is_dead(where["address"], int(where["port"]))

    async def ask(self, node: str, op: str, args: Args) -> Args | None:
        """Return another node's answer to one question, None where there is none."""
        where = self.members.get(node)
        if where is None or node == self._node:
            return None
        try:
            async with self._asked:
                return await self._ask_at(node, where["address"], int(where["port"]), op, args)
        except (PeerRefused, PeerUnreachable):
            return None

    def is_endpoint(self, nodes: Container[str]) -> bool:
        """Return whether one of these nodes listens at the job's endpoint; also true where the job has no endpoint."""
        port = split_endpoint(self.endpoint, 0)[1]
        return not port or any(name in nodes and where["port"] == port for name, where in self.members.items())

    async def ask_endpoint(self, op: str, args: Args) -> tuple[Args | None, str]:
        """Return the answer of the agent at the job's endpoint, or None and the reason."""
        try:
            return await self._ask_at("", *split_endpoint(self.endpoint, 0), op, args), ""
        except (PeerRefused, PeerUnreachable) as error:
            foreign = isinstance(error.__cause__, ssl.SSLCertVerificationError)
            return None, f"{error} (another key or another --rdzv-id there)" if foreign else str(error)

    async def _ask_at(self, node: str, address: str, port: int, op: str, args: Args) -> Args | None:
        channel = await self._dial(node, address, port, refuse)
        running = asyncio.ensure_future(channel.run())
        try:
            answer = await asyncio.wait_for(_join_pieces(channel.stream(op, args)), ASK_TIMEOUT_S)
            return read_answer(op, answer)
        except (WireError, CallFailed, Misfit, asyncio.TimeoutError) as error:
            log.info("%s to %s: %s", op, node or "the endpoint", error)
            return None
        finally:
            # close() would wait for a host without power.
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _dial(self, node: str, address: str, port: int, handler: Handler) -> Channel:
        """Return a channel to a node ("": any node of this job); raises PeerRefused, PeerUnreachable."""
        return await connect(self._tls, node, address, port, handler, self._certified)

    def _certified(self, certificate: Mapping[str, Any] | None) -> Certified:
        """Return whom a certificate names; raises PeerUnreachable where it is void."""
        known = certified(certificate)
        if self.is_revoked(*known):
            raise PeerUnreachable(f"{known.name} was removed from the job")
        return known


async def _join_pieces(pieces: Items) -> Args:
    """Return the pieces of an answer as one; each piece has some of its records."""
    whole: Args = {}
    records: list[Args] = []
    try:
        async for piece in pieces:
            whole.update(piece.data)
            more = piece.data.get("records", [])
            if not isinstance(more, list):
                raise ProtocolError("no list of records")
            records += more
    finally:
        await pieces.aclose()
    return {**whole, "records": records}


class Tls:
    """A TLS context with this node's certificate and key and the authorities that it trusts."""

    def __init__(self, files: JobFiles, side: ssl.Purpose = ssl.Purpose.SERVER_AUTH) -> None:
        self._files, self._side = files, side
        self._context: ssl.SSLContext | None = None
        self._read_at = (0, 0)

    def context(self) -> ssl.SSLContext:
        """Return the context, read anew where operators have added authorities meanwhile; raises OSError."""
        files = self._files
        now = files.ca.stat()
        if self._context is None or (now.st_ino, now.st_mtime_ns) != self._read_at:
            context = ssl.create_default_context(self._side, cafile=str(files.ca))
            context.load_cert_chain(str(files.cert), str(files.key))
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            # Names of nodes are not host names (10.0.0.7 is one): we compare them ourselves.
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            self._context, self._read_at = context, (now.st_ino, now.st_mtime_ns)
        return self._context


class Certified(NamedTuple):
    """Whom a certificate names, and since when."""

    name: str
    """"" where there is no certificate."""
    issued_ns: int


def certified(certificate: Mapping[str, Any] | None) -> Certified:
    """Return whom a certificate names, as `ssl` describes it; its serial number begins with the time of its issue."""
    known = certificate or {}
    names = [value for kind, value in known.get("subjectAltName", ()) if kind == "DNS"]
    return Certified(names[0] if names else "", int(known.get("serialNumber", "0"), 16) >> SERIAL_BITS)


async def connect(
    tls: Tls,
    node: str,
    address: str,
    port: int,
    handler: Handler,
    read: Callable[[Mapping[str, Any] | None], Certified] = certified,
) -> Channel:
    """Return a channel to a node ("": any node of this job); the caller runs it.

    Raises PeerRefused, PeerUnreachable, and what `read` raises for the certificate there.
    """
    there = f"{node} ({address}:{port})" if node else f"{address}:{port}"
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(address, port, ssl=tls.context(), server_hostname=""), CONNECT_TIMEOUT_S
        )
    except ConnectionRefusedError as error:
        raise PeerRefused(f"{there}: {error}") from error
    except (OSError, ssl.SSLError, asyncio.TimeoutError) as error:
        raise PeerUnreachable(f"{there}: {str(error) or 'no answer'}") from error
    try:
        name = read(writer.get_extra_info("peercert")).name
        if node and name != node:
            raise PeerUnreachable(f"{address}:{port} is {name or 'no agent of this job'}, not {node}")
    except PeerUnreachable:
        writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(writer.wait_closed(), 1.0)
        raise
    return Channel(reader, writer, handler)


async def is_dead(address: str, port: int) -> bool:
    """Return whether the machine answers that nothing listens there."""
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
