"""Agents talk to agents of their own job only, and only to the one they mean."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from pathlib import Path
from typing import Any

import pytest

from remote_agent.base import clocks
from remote_agent.base.paths import Home, JobFiles
from remote_agent.base.tasks import Tasks
from remote_agent.election import peers
from remote_agent.election.listener import listen
from remote_agent.wire import Answer, Channel
from supervisor.launch.certificates import Authority, make_authority, sign_with
from tests.agents.nodes import WAIT_S, Nodes
from tests.ports import reserved_port

pytestmark = pytest.mark.usefixtures("drop_half_open")


def files_for(root: Path, name: str, authority: Authority) -> JobFiles:
    """Write the key material of one node."""
    files = Home(root).job("job")
    files.make()
    leaf = sign_with(authority.ca, authority.ca_key, name)
    for path, text in ((files.ca, authority.ca), (files.cert, leaf.cert), (files.key, leaf.key)):
        path.write_text(text)
    return files


async def who(op: str, args: dict[str, object], body: bytes) -> Answer:
    """Answer anything."""
    return Answer({"op": op})


async def exchange(server_files: JobFiles, client_files: JobFiles, name: str) -> str:
    """Connect, ask once, and return whom the server saw."""
    seen: list[str] = []
    served = asyncio.Event()

    async def accepted(peer: peers.Certified, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(peer.name)
        await Channel(reader, writer, who).run()
        served.set()

    server = listen(server_files, 0, accepted, lambda: 2)
    try:
        channel = await peers.connect(peers.Tls(client_files), name, "127.0.0.1", server.port, who)
        running = asyncio.ensure_future(channel.run())
        assert (await channel.call("hello", timeout=60)).data == {"op": "hello"}
        await channel.close()
        await asyncio.gather(running)
        await asyncio.wait_for(served.wait(), 60)
    finally:
        server.close()
    return seen[0]


@pytest.mark.parametrize("name", ["n1", "gpu_01", "10.9.8.7", "node-3.cluster.example"])
def test_nodes_know_each_other_by_name_whatever_it_looks_like(tmp_path: Path, name: str) -> None:
    authority = make_authority("job")
    server, client = files_for(tmp_path / "a", name, authority), files_for(tmp_path / "b", "10.1.1.1", authority)
    assert asyncio.run(exchange(server, client, name)) == "10.1.1.1"


def test_another_node_of_the_job_is_not_the_one_we_mean(tmp_path: Path) -> None:
    authority = make_authority("job")
    server, client = files_for(tmp_path / "a", "n2", authority), files_for(tmp_path / "b", "n1", authority)
    with pytest.raises(peers.PeerUnreachable, match="is n2, not n3"):
        asyncio.run(exchange(server, client, "n3"))


async def test_a_threads_own_connection_leads_to_that_node_of_that_job_or_nowhere(tmp_path: Path) -> None:
    authority = make_authority("job")
    server = files_for(tmp_path / "a", "n2", authority)
    own = files_for(tmp_path / "b", "n1", authority)
    foreign = files_for(tmp_path / "c", "n1", make_authority("other"))

    async def accepted(peer: peers.Certified, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Channel(reader, writer, who).run()

    listener = listen(server, 0, accepted, lambda: 2)
    where = {"address": "127.0.0.1", "port": listener.port}

    def reach(files: JobFiles, name: str) -> None:
        known = peers.Peers(files, "n1", "", Tasks())
        known.members.update({"n2": where, "n3": where})
        known.open(name, 5.0).close()

    try:
        await asyncio.to_thread(reach, own, "n2")
        for files, name in ((own, "n3"), (foreign, "n2")):
            with pytest.raises(peers.PeerUnreachable):
                await asyncio.to_thread(reach, files, name)
    finally:
        listener.close()


def test_another_job_is_refused(tmp_path: Path) -> None:
    server = files_for(tmp_path / "a", "n2", make_authority("job"))
    client = files_for(tmp_path / "b", "n1", make_authority("other"))
    with pytest.raises(peers.PeerUnreachable):
        asyncio.run(exchange(server, client, "n2"))


async def test_without_a_certificate_nothing_is_answered(tmp_path: Path) -> None:
    files = files_for(tmp_path / "a", "n2", make_authority("job"))

    async def accepted(peer: peers.Certified, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise AssertionError(f"{peer!r} was let in")

    server = listen(files, 0, accepted, lambda: 2)
    context = ssl.create_default_context(cafile=str(files.ca))
    context.check_hostname = False
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
        try:
            # TLS 1.3 lets the client finish first; the refusal comes with the first read.
            assert await asyncio.wait_for(reader.read(), 60) == b""
        except (ssl.SSLError, ConnectionError):
            pass
        writer.close()
        await asyncio.wait_for(writer.wait_closed(), 60)
    finally:
        server.close()


async def test_a_dead_agent_is_distinguished_from_a_silent_one() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert not await peers.is_dead("127.0.0.1", port)
    server.close()
    await server.wait_closed()
    with reserved_port(port):
        assert await peers.is_dead("127.0.0.1", port)


async def test_an_address_from_hearsay_is_dialled_and_proves_no_death(tmp_path: Path) -> None:
    """n2 lives, and another node says that it is where nothing listens."""
    authority = make_authority("job")
    server_files, files = files_for(tmp_path / "a", "n2", authority), files_for(tmp_path / "b", "n1", authority)

    async def accepted(peer: peers.Certified, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Channel(reader, writer, who).run()

    with contextlib.ExitStack() as held:
        wrong = {"address": "127.0.0.1", "port": held.enter_context(reserved_port())}
        tasks = Tasks()
        server = listen(server_files, 0, accepted, lambda: 2)
        known = peers.Peers(files, "n1", "", tasks)
        try:
            known.learn({"n2": wrong})
            with pytest.raises(peers.PeerUnreachable, match="at the address that other nodes reported"):
                await known.connect("n2", who)
            assert not await known.is_dead("n2"), "nobody knows where it was"
            port = server.port
            right = {"address": "127.0.0.1", "port": port}
            known.learn({"n2": right})
            channel = await known.connect("n2", who)
            known.learn({"n2": wrong})
            assert not await known.is_dead("n2"), "its certificate was seen elsewhere, and somebody listens there"
            with pytest.raises(peers.PeerUnreachable):
                await known.connect("n2", who)
            await channel.close()
        finally:
            server.close()
        held.enter_context(reserved_port(port))
        known.learn({"n2": right})
        assert await known.is_dead("n2")
        with pytest.raises(peers.PeerRefused):
            await known.connect("n2", who)
        known.learn({"n3": wrong}, certain=True)
        assert await known.is_dead("n3"), "by its own word it listened there"
        await tasks.close()


def test_the_offset_is_that_of_the_quietest_moment() -> None:
    offset = clocks.Offset()
    hour_ns = 3_600 * 10**9
    for delay_ns in (50_000_000, 1_000_000, 80_000_000):
        now_ns = time.time_ns()
        there_ns = now_ns + hour_ns
        offset.sample(now_ns - delay_ns, there_ns - delay_ns // 4, there_ns - delay_ns // 4)
    assert abs(offset.ns - hour_ns) < 2_000_000
    assert offset.error_ns is not None
    assert 500_000 <= offset.error_ns < 2_000_000


def test_a_clock_that_was_set_back_makes_what_was_measured_worthless() -> None:
    offset = clocks.Offset()
    now_ns = time.time_ns()
    offset.sample(now_ns, now_ns + 10**9, now_ns + 10**9)
    assert offset.ns > 9 * 10**8
    offset.sample(time.time_ns() + 10**12, 0, 0)
    assert offset.ns == 0


def test_key_material_that_cannot_be_read_is_no_crash(tmp_path: Path) -> None:
    files = files_for(tmp_path, "n1", make_authority("job"))
    files.cert.unlink()
    with pytest.raises(peers.PeerUnreachable, match="No such file"):
        asyncio.run(peers.connect(peers.Tls(files), "n2", "127.0.0.1", 1, who))


async def test_an_order_that_overtakes_the_answer_to_join_is_reported_too(tmp_path: Path) -> None:
    """Else a coordinator waits for a node that has stopped long ago."""

    async def check(nodes: Nodes) -> None:
        idle = asyncio.Event()

        async def accepted(_peer: peers.Certified, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async def coordinate(op: str, args: dict[str, Any], body: bytes) -> Answer:
                if op == "join":
                    stop = {"generation": 0, "grace_s": 1.0, "collect": False}
                    await channel.notify("order", {"op": "stop", "args": stop, "term": 1})
                    await asyncio.wait_for(idle.wait(), WAIT_S)
                elif op == "report" and args["op"] == "idle":
                    idle.set()
                return Answer({"received_ns": 0, "answered_ns": 0})

            channel = Channel(reader, writer, coordinate)
            await channel.run()

        server = listen(files_for(tmp_path / "n1_played", "n1", nodes.authority), 0, accepted, lambda: 2)
        try:
            await nodes.start("n2")
            head = {"node": "n1", "address": "127.0.0.1", "port": server.port}
            await nodes.call("n2", "assign", {"term": 1, "coordinator": head, "members": {}})
            await asyncio.wait_for(idle.wait(), 60)
        finally:
            server.close()

    async with Nodes(tmp_path, 2, "") as nodes:
        await check(nodes)
