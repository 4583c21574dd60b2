"""Against OpenSSH's own sshd, on hosts with a network that can fail."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from supervisor.inventory import load
from supervisor.ssh import AgentFile, HostError, NodeLink, connect, connect_all
from supervisor.ssh.forward import Forward
from tests.cluster import Cluster

pytestmark = pytest.mark.usefixtures("ssh_home")


def _await_quiet(cluster: Cluster, name: str) -> None:
    """A bridge ends with its connection, which the node's sshd has to notice first."""
    end = time.monotonic() + 10
    while cluster.pids(name) and time.monotonic() < end:
        time.sleep(0.02)
    assert cluster.processes(name) == {}


def test_hosts_come_up_and_come_up_again(cluster: Cluster, agent: AgentFile) -> None:
    hosts = load(cluster.inventory()).hosts

    async def body() -> None:
        for attempt in ("first, with the push", "second"):
            begun = time.perf_counter()
            found = await connect_all(hosts, agent=agent, deadline_s=60)
            print(f"{len(hosts)} hosts, {attempt}: {(time.perf_counter() - begun) * 1000:.0f} ms")
            links = [link for link in found.values() if isinstance(link, NodeLink)]
            assert len(links) == len(hosts), found
            assert len({link.hello["home"] for link in links}) == len(hosts)
            await asyncio.gather(*(link.close() for link in links))

    asyncio.run(body())
    for host in hosts:
        _await_quiet(cluster, host.name)


LISTENS = """
import socket
server = socket.create_server(("127.0.0.1", 6006))
print("ready", flush=True)
connection, _ = server.accept()
connection.sendall(connection.recv(64)[::-1])
"""


def test_a_port_of_a_host_is_forwarded(cluster: Cluster, agent: AgentFile) -> None:
    host = load(cluster.inventory()).hosts[0]

    async def body() -> None:
        link = await connect(host, agent=agent, deadline_s=60)
        with pytest.raises(ConnectionRefusedError):
            await link.open_port(6006)
        forward = Forward(host.name, 6006, lambda: link.open_port(6006))
        await forward.open(None)
        with cluster.popen(host.name, [sys.executable, "-c", LISTENS], stdout=subprocess.PIPE) as program:
            assert program.stdout is not None
            try:
                assert await asyncio.to_thread(program.stdout.readline) == b"ready\n"
                reader, writer = await asyncio.open_connection("127.0.0.1", forward.local)
                writer.write(b"abc")
                assert await asyncio.wait_for(reader.read(), 60) == b"cba"
                writer.close()
            finally:
                program.kill()
        await forward.close()
        await link.close()

    asyncio.run(body())
    _await_quiet(cluster, host.name)


async def test_a_dead_link_is_closed_in_bounded_time(cluster: Cluster, agent: AgentFile) -> None:
    host = load(cluster.inventory()).hosts[0]

    link = await connect(host, agent=agent, deadline_s=60)
    await asyncio.to_thread(cluster.cut, host.name)
    with pytest.raises(asyncio.TimeoutError):
        await link.channel.call("jobs", timeout=0.5)
    begun = time.perf_counter()
    await link.close()
    assert time.perf_counter() - begun < 30
    assert link.closed.is_set()
    with pytest.raises(HostError, match="timeout: no answer within 1 s") as failed:
        await connect(host, agent=agent, deadline_s=1)
    assert failed.value.step == "connect"
    await asyncio.to_thread(cluster.heal)
    await (await connect(host, agent=agent, deadline_s=60)).close()


def test_a_host_behind_another(cluster: Cluster, agent: AgentFile) -> None:
    path = cluster.inventory(hosts={"n2": {"proxy_jump": cluster.host("n1").address}})
    host = load(path).hosts[1]

    async def body() -> None:
        link = await connect(host, agent=agent, deadline_s=60)
        assert (await link.channel.call("jobs")).data == {"jobs": []}
        await link.close()

    asyncio.run(body())
    for name in ("n1", "n2"):
        _await_quiet(cluster, name)
