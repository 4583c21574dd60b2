"""Against OpenSSH's own sshd, on hosts with a network that can fail."""

from __future__ import annotations

import asyncio
import time

import pytest

from supervisor.inventory import load
from supervisor.ssh import AgentFile, HostError, connect
from tests.cluster import Cluster

pytestmark = pytest.mark.usefixtures("ssh_home")


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
