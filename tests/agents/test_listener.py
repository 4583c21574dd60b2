"""Strangers at an agent's port: what they take is bounded, and nodes of the job always get in."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from remote_agent.agent import agent_log
from remote_agent.base.paths import JobFiles
from remote_agent.base.ports import bind
from remote_agent.election import authorities, peers
from remote_agent.election import listener as listening
from remote_agent.election.listener import PER_NODE, STRANGERS, listen
from remote_agent.wire import Channel, Problem, WireError
from supervisor.launch.certificates import make_authority
from tests.agents.nodes import WAIT_S, Nodes
from tests.agents.test_peers import files_for, who

pytestmark = pytest.mark.usefixtures("drop_half_open")

NODES = 2
ROOM = NODES + STRANGERS


class Port:
    """n1's listener, and what reaches it; n2 is the other node of the job."""

    def __init__(self, root: Path) -> None:
        authority = make_authority("job")
        self.n2 = files_for(root / "n2", "n2", authority)
        self.ended = 0
        self.n1 = files_for(root / "n1", "n1", authority)
        self.listener = listen(self.n1, 0, self._serve, lambda: NODES, ["127.0.0.1"])
        self._writers: list[asyncio.StreamWriter] = []
        self._running: list[asyncio.Task[None]] = []

    async def _serve(self, _peer: peers.Certified, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Channel(reader, writer, who).run()
        self.ended += 1

    async def come(self, source: str = "127.0.0.1", text: bytes = b"") -> asyncio.StreamReader:
        """Connect as a stranger, who says nothing, or nothing that is TLS."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.listener.port, local_addr=(source, 0))
        writer.write(text)
        self._writers.append(writer)
        return reader

    async def join(self, files: JobFiles | None = None) -> Channel:
        """Connect as n2, or as the node of these files, and ask once."""
        channel = await peers.connect(peers.Tls(files or self.n2), "n1", "127.0.0.1", self.listener.port, who)
        self._running.append(asyncio.ensure_future(channel.run()))
        assert (await channel.call("hello", timeout=WAIT_S)).data == {"op": "hello"}
        return channel

    async def close(self) -> None:
        self.listener.close()
        for writer in self._writers:
            writer.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


@contextlib.asynccontextmanager
async def at_port(root: Path) -> AsyncIterator[Port]:
    port = Port(root)
    try:
        yield port
    finally:
        await port.close()


async def is_dropped(stranger: asyncio.StreamReader) -> bool:
    """Wait until the other side has ended this connection."""
    with contextlib.suppress(ConnectionError):
        return await stranger.read() == b""
    return True


@pytest.mark.parametrize("text", [b"", b"\x16"], ids=["silent", "half a hello"])
async def test_strangers_have_little_room_and_nodes_get_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    monkeypatch.setattr(listening, "HANDSHAKE_S", 10 * WAIT_S)

    async with at_port(tmp_path) as port:
        before = await port.join()
        strangers = [await port.come(text=text) for _ in range(3 * ROOM)]
        assert all([await is_dropped(one) for one in strangers[: 2 * ROOM]])
        assert not any(one.at_eof() for one in strangers[2 * ROOM :])
        await port.join()
        await before.call("hello", timeout=WAIT_S)


async def test_an_address_with_many_strangers_loses_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HANDSHAKE_S", 10 * WAIT_S)

    async with at_port(tmp_path) as port:
        other = await port.come("127.0.0.3")
        strangers = [await port.come("127.0.0.2") for _ in range(3 * ROOM)]
        assert all([await is_dropped(one) for one in strangers[: 2 * ROOM]])
        assert not other.at_eof()


async def test_a_stranger_who_says_nothing_is_gone_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HANDSHAKE_S", 0.2)

    async with at_port(tmp_path) as port:
        assert await is_dropped(await port.come())
        assert await is_dropped(await port.come(text=b"\x16"))


async def test_a_node_has_few_connections_and_the_most_silent_one_goes_first(tmp_path: Path) -> None:
    async with at_port(tmp_path) as port:
        channels = [await port.join() for _ in range(PER_NODE)]
        await channels[0].call("hello", timeout=WAIT_S)
        await port.join()
        await channels[1].closed.wait()
        await channels[0].call("hello", timeout=WAIT_S)
        assert not any(one.closed.is_set() for one in channels[2:])


async def test_an_authority_counts_from_the_next_connection_on(tmp_path: Path) -> None:
    async with at_port(tmp_path) as port:
        added = make_authority("job")
        stranger = files_for(tmp_path / "n3", "n3", added)
        stranger.ca.write_text(stranger.ca.read_text() + port.n2.ca.read_text())
        with pytest.raises((peers.PeerUnreachable, WireError)):
            await port.join(stranger)
        authorities.add(port.n1.ca, added.ca)
        await port.join(stranger)
        await port.join()


def test_what_is_no_certificate_changes_nothing(tmp_path: Path) -> None:
    files = files_for(tmp_path, "n1", make_authority("job"))
    before = files.ca.read_bytes()
    with pytest.raises(Problem, match="not a certificate"):
        authorities.add(files.ca, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    authorities.add(files.ca, before.decode())
    assert files.ca.read_bytes() == before


async def test_no_descriptor_for_a_connection_is_no_busy_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept = socket.socket.accept
    left: Iterator[None] = iter([None] * 2)

    def fail_at_first(self: socket.socket) -> tuple[socket.socket, object]:
        for _ in left:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(self)

    monkeypatch.setattr(listening, "EXHAUSTED_S", 0.1)

    async with at_port(tmp_path) as port:
        monkeypatch.setattr(socket.socket, "accept", fail_at_first)
        await port.join()
        texts = [record.getMessage() for record in caplog.records if record.name == listening.__name__]
        assert texts == ["no connection can be accepted: [Errno 24] Too many open files"] * 2


@pytest.mark.parametrize(
    ("addresses", "host"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["127.0.0.1", "localhost"], "127.0.0.1"),
        (["127.0.0.1", "127.0.1.1"], ""),
        (["::1"], "::1"),
        (["192.0.2.7"], ""),
        ([socket.gethostname()], ""),
        (["192.0.2.7", "127.0.0.1"], ""),
        ([], ""),
    ],
)
def test_only_a_job_of_this_machine_listens_on_the_loopback_alone(addresses: list[str], host: str) -> None:
    assert listening.loopback(addresses) == host
    with bind(host, 0) as sock:
        assert sock.getsockname()[0] == (host or "::")


PRINTS_ITS_LIMIT = """
import resource, time
from pathlib import Path
print("step=1", flush=True)
Path("limit").write_text(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
while not Path("stop").exists():
    time.sleep(0.02)
"""
USERS_LIMIT = 64


def _resident_mb(pid: int) -> float:
    fields = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) / 1024


async def test_idle_connections_harm_neither_the_agent_nor_its_job(tmp_path: Path) -> None:
    """More of them than the agent may have open files by the user's limit, which its workers keep."""
    limit = f'ulimit -S -n {USERS_LIMIT}; exec "$@"'

    async def check(nodes: Nodes) -> None:
        await nodes.launch()
        await nodes.until("generation_running")
        port = (await nodes.call("n1", "identity"))["peer_port"]
        job = nodes.journal("n1").parent
        pid = int((job / "agent.pid").read_text().split()[0])
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
        assert await is_dropped(strangers[200][0])
        assert len(os.listdir(f"/proc/{pid}/fd")) > STRANGERS
        assert _resident_mb(pid) < 60
        assert (job / "agent.log").stat().st_size < 100_000
        assert (await nodes.call("n1", "status"))["state"] == "running"
        for _, writer in strangers:
            writer.close()
        with open(job / "agent.log", "ab") as as_the_engine:
            as_the_engine.write(b"what torch prints\n" * 100_000)
        end = time.monotonic() + WAIT_S
        while (job / "agent.log").stat().st_size > agent_log.LIMIT:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        (nodes.work / "stop").touch()
        await nodes.until("job_succeeded")
        assert int((nodes.work / "limit").read_text()) == USERS_LIMIT

    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] > USERS_LIMIT
    async with Nodes(tmp_path, 1, PRINTS_ITS_LIMIT, prefix=("sh", "-c", limit, "sh")) as nodes:
        await check(nodes)
