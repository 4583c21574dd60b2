"""A forwarded port: bytes both ways, nobody listening, a lost connection, servers and hosts that cannot."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import asyncssh
import pytest

from supervisor.cli import demo
from supervisor.errors import HostError, RequestFailed
from supervisor.inventory import local
from supervisor.ssh import AgentFile, connect
from supervisor.ssh.forward import HERE, Forward
from supervisor.ssh.srun import SrunWire
from tests.agents.servers import serving

pytestmark = pytest.mark.usefixtures("ssh_home")


async def _reverse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with what came, backwards, once the other side has ended."""
    data = await reader.read()
    writer.write(data[::-1])
    writer.close()


@contextlib.asynccontextmanager
async def program(bound: socket.socket) -> AsyncIterator[None]:
    """A program on the node, which is this machine, listens on a socket."""
    async with await asyncio.start_server(_reverse, sock=bound):
        yield


async def ask(port: int, data: bytes) -> bytes:
    """Send bytes to a port of this machine, and return the answer."""
    reader, writer = await asyncio.open_connection(HERE, port)
    writer.write(data)
    writer.write_eof()
    try:
        return await reader.read()
    finally:
        writer.close()


def taken_port() -> tuple[socket.socket, int]:
    """A port on which nobody listens, and which nobody else gets."""
    bound = socket.socket()
    bound.bind((HERE, 0))
    return bound, bound.getsockname()[1]


async def test_bytes_go_both_ways_also_over_the_next_connection(tmp_path: Path, agent: AgentFile) -> None:
    async with serving(tmp_path) as served:
        (host,) = served.hosts
        links = [await connect(host, agent=agent)]
        bound, port = taken_port()
        async with program(bound):
            forward = Forward("n1", port, lambda: links[-1].open_port(port))
            # This machine has the same number in use already.
            await forward.open(None)
            assert forward.is_answered
            assert forward.local != port
            assert forward.url == f"http://127.0.0.1:{forward.local}"
            data = bytes(range(256)) * 4096
            assert await ask(forward.local, data) == data[::-1]
            await links[-1].close()
            assert await ask(forward.local, b"abc") == b""
            links.append(await connect(host, agent=agent))
            assert await ask(forward.local, b"abc") == b"cba"
            with pytest.raises(RequestFailed, match=f"port {forward.local} of this machine: address already in use"):
                await Forward("n1", port, lambda: links[-1].open_port(port)).open(forward.local)
            # What is connected ends with it.
            reader, writer = await asyncio.open_connection(HERE, forward.local)
            await forward.close()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
            with pytest.raises(OSError, match="refused|Connect call failed"):
                await ask(forward.local, b"")
        await links[-1].close()


async def test_a_forward_waits_for_a_program_that_is_started_later(tmp_path: Path, agent: AgentFile) -> None:
    async with serving(tmp_path) as served:
        link = await connect(served.hosts[0], agent=agent)
        bound, port = taken_port()
        forward = Forward("n1", port, functools.partial(link.open_port, port))
        await forward.open(None)
        assert not forward.is_answered
        assert await ask(forward.local, b"abc") == b""
        async with program(bound):
            assert await ask(forward.local, b"abc") == b"cba"
        await forward.close()
        await link.close()


async def test_who_cannot_forward_says_why(tmp_path: Path, agent: AgentFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_args: object) -> bool:
        # As sshd does with AllowTcpForwarding no.
        raise asyncssh.ChannelOpenError(asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED, "open failed")

    async with serving(tmp_path) as served:
        link = await connect(served.hosts[0], agent=agent)
        monkeypatch.setattr(demo._Login, "connection_requested", forbid)
        with pytest.raises(RequestFailed, match="the SSH server of n1 does not forward ports: open failed") as failed:
            await Forward("n1", 6006, lambda: link.open_port(6006)).open(None)
        assert "AllowTcpForwarding" in failed.value.hint
        await link.close()
        with pytest.raises((HostError, ConnectionRefusedError)):
            await link.open_port(6006)
        with monkeypatch.context() as patch:
            patch.setattr(link, "_wire", SrunWire.__new__(SrunWire))
            with pytest.raises(RequestFailed, match="n1 is reached through srun, which cannot forward ports"):
                await link.open_port(6006)
        here = await connect(local().hosts[0], agent=agent)
        with pytest.raises(RequestFailed, match="is this machine: open http://localhost:6006"):
            await here.open_port(6006)
        await here.close()
