"""A host to which the operator has no connection is asked through a node to which there is one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from remote_agent.agent import relay as relay_module
from remote_agent.agent import requests
from remote_agent.agent.agent import Agent
from remote_agent.agent.relay import Relay
from remote_agent.base.tasks import Tasks
from remote_agent.election import peers
from remote_agent.wire import Answer, Args, CallFailed, Channel, ChannelClosed, Items
from supervisor import ssh
from supervisor.errors import RequestFailed
from supervisor.link import host_link
from supervisor.logs.pages import merged
from supervisor.logs.reader import LogReader
from supervisor.logs.selection import LogQuery, Selection
from supervisor.session import Session
from supervisor.ssh import HostError, MalformedAnswer
from supervisor.ssh.answers import PASSED_ON, HostChannel, RelayedChannel
from tests.agents.test_agent_parts import agents, running
from tests.agents.test_session import has, planned, until
from tests.agents.test_session_hosts import WAIT_S, hosts

pytestmark = pytest.mark.usefixtures("drop_half_open")


def cut(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return names of hosts to which no connection can be made; a test adds some and takes them out again."""
    away: set[str] = set()
    connect = ssh.connect

    async def only_others(host: Any, **options: Any) -> Any:
        if host.name in away:
            raise HostError(host.name, "connect", "the gateway is closed")
        return await connect(host, **options)

    monkeypatch.setattr(host_link, "connect", only_others)
    return away


# It prints until it is told to end, and NCCL's output is what TALK of the hosts writes.
UNTIL_TOLD = """
import os, sys, time
if "NCCL_DEBUG_FILE" in os.environ:
    with open(os.environ["NCCL_DEBUG_FILE"], "w") as file:
        print("h:1:1 [0] NCCL INFO NCCL version 2.26.2+cuda12.8", file=file)
number = 0
while not os.path.exists(sys.argv[1]):
    print(f"rank {os.environ['RANK']} line {number}", flush=True)
    number += 1
    time.sleep(0.02)
print(f"rank {os.environ['RANK']} over", flush=True)
"""


async def everything_is_there_through_n1(session: Session) -> None:
    assert session.links["n2"].view.text == "through n1"
    assert session.links["n2"].view.state == "up"
    page = await merged(session, Selection(), 4000)
    assert ({row.node for row in page.rows}, page.absent) == ({"n1", "n2"}, [])
    stacks = await session.stacks([1])
    assert "train.py" in stacks["stacks"]["1"] or "talk.py" in stacks["stacks"]["1"]
    documents = await session.nccl_documents(session.status)
    assert documents["n2"] is not None
    assert await session.settle() == []
    with pytest.raises(RequestFailed, match="n2 is not connected"):
        await session.request("signal", ranks=[1], signal="USR1")


async def test_logs_stacks_and_nccl_come_through_another_node_until_the_host_is_connected_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_link, "LONGEST_DELAY", 0.5)
    away = cut(monkeypatch)

    with hosts(tmp_path, 2) as made:
        (made.work / "talk.py").write_text(UNTIL_TOLD)
        async with planned(made.inventory(), made, str(tmp_path / "over")) as session:
            link, seen = session.links["n2"], list[str]()

            async def follow() -> None:
                async for batch in LogReader(session, LogQuery(Selection(streams=("stdout",), nodes=["n2"]))).live(0):
                    seen.extend(row.text.decode() for row in batch.lines)

            await session.ready()
            await until(session, lambda: has(session, "generation_running"))
            following = asyncio.ensure_future(follow())
            await until(session, lambda: bool(seen))
            away.add("n2")
            link.reopen()
            await until(session, lambda: link.through is session.links["n1"] and link.view.error is not None)
            await everything_is_there_through_n1(session)
            count = len(seen)
            await until(session, lambda: len(seen) > count + 10)
            away.clear()
            await until(session, lambda: link.opened)
            assert (link.through, link.view.text) == (None, "agent answers")
            # Now without a connection until the end.
            away.add("n2")
            link.reopen()
            await until(session, lambda: link.through is not None)
            (tmp_path / "over").touch()
            await asyncio.wait_for(following, WAIT_S)
            assert session.state == "succeeded"
            assert seen == [*(f"rank 1 line {number}" for number in range(len(seen) - 1)), "rank 1 over"]


@contextlib.asynccontextmanager
async def through_n1(one: Agent, two: Agent) -> AsyncIterator[tuple[HostChannel, RelayedChannel]]:
    """Yield an operator's channel to n1, and one to n2 through it."""
    tasks = Tasks()
    servers: list[asyncio.AbstractServer] = []
    try:
        for agent in (one, two):
            relay = Relay(agent.context.node, agent.context.peers, tasks)
            servers += [await requests.serve_operators(agent.context, agent.member, relay)]
        reader, writer = await asyncio.open_unix_connection(one.context.files.sock)
        channel = HostChannel("n1", reader, writer)
        async with running(channel.run()):
            yield channel, RelayedChannel("n2", "n2", "n1", channel)
    finally:
        for server in servers:
            server.close()
        await tasks.close()


async def test_a_node_answers_another_one_only_what_changes_nothing(tmp_path: Path) -> None:
    assert PASSED_ON < requests.LOOKS
    async with agents(tmp_path, "n1", "n2") as (one, two), through_n1(one, two) as (channel, relayed):
        assert (await relayed.call("identity")).data["node"] == "n2"
        items = [item async for item in relayed.stream("log_rows", {"pattern": "x", "past": True})]
        assert all(not item.body for item in items)
        # A read-only operator may look there as well.
        await channel.call("attach", {"operator": "guest", "mode": "watch"})
        assert (await relayed.call("log_list")).data == {"files": []}
        for op in ("stop", "signal", "describe", "attach", "trust", "relay", "look", "tree_put", "exit", "x" * 99):
            with pytest.raises(CallFailed, match=f"n2 does not answer '{op[:40]}' to n1"):
                await channel.call("relay", {"node": "n2", "op": op, "args": {}})
            # Whoever has the certificate of a node may leave n1's own program out.
            other = await one.context.peers.connect("n2", one.member.handler("n2"))
            async with running(other.run()):
                with pytest.raises(CallFailed, match="n2 does not answer"):
                    await other.call("look", {"op": op, "args": {}})
        with pytest.raises(CallFailed) as own:
            await relayed.call("log_read", {"generation": 0, "rank": 9, "stream": "stdout", "offset": 0, "length": 1})
        assert own.value.kind == "no_log"
        assert len(two.context.peers.members) == 2


async def test_no_node_gets_the_description_of_a_job(tmp_path: Path) -> None:
    """Nor the operator who asks through one; at its own node he gets it."""
    async with agents(tmp_path, "n1", "n2") as (one, two), through_n1(one, two) as (channel, relayed):
        for agent in (one, two):
            agent.context.files.spec.write_text('{"env": {"TOKEN": "secret"}}')

        async def files(where: Channel | RelayedChannel, op: str, args: dict[str, Any]) -> dict[str, bytes]:
            return {item.data["path"]: item.body async for item in where.stream(op, args)}

        assert b"secret" in (await files(channel, "job_files", {}))["spec.json"]
        other = await one.context.peers.connect("n2", one.member.handler("n2"))
        async with running(other.run()):
            for found in (
                await files(other, "look", {"op": "job_files", "args": {}}),
                await files(relayed, "job_files", {}),
            ):
                assert "events.jsonl" in found
                assert not any(b"secret" in body for body in found.values())


async def test_a_malformed_answer_is_the_error_of_the_host_that_was_asked(tmp_path: Path) -> None:
    async def garbage(node: str, channel: Channel | None, args: Args) -> Answer | Items:
        return Answer({"files": [{"generation": "none"}], "node": node}, b"body")

    async with agents(tmp_path, "n1", "n2") as (one, two), through_n1(one, two) as (channel, relayed):
        two.member.serve("look", garbage)
        with pytest.raises(MalformedAnswer) as wrong:
            await relayed.call("log_list")
        assert (wrong.value.host, wrong.value.step) == ("n2", "log_list")
        assert wrong.value.reason.startswith("through n1: its answer to `log_list` is malformed: ")
        assert (await channel.call("log_list")).data == {"files": []}


async def test_a_node_that_does_not_answer_is_an_error_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "LOOK_S", 0.2)
    monkeypatch.setattr(peers, "CONNECT_TIMEOUT_S", 0.2)

    async def never(node: str, channel: Channel | None, args: Args) -> Answer | Items:
        await asyncio.Event().wait()
        raise AssertionError

    with socket.create_server(("127.0.0.1", 0)) as mute:
        async with agents(tmp_path, "n1", "n2") as (one, two), through_n1(one, two) as (channel, relayed):
            assert (await relayed.call("identity")).data["node"] == "n2"
            two.member.serve("look", never)
            with pytest.raises(ChannelClosed, match=r"^through n1: n1 does not reach n2: no answer for 0.2 s$"):
                await asyncio.wait_for(relayed.call("log_list"), WAIT_S)
            one.context.peers.members["n3"] = {"address": "127.0.0.1", "port": mute.getsockname()[1]}
            for node, why in (("n3", "n3 .*: no answer"), ("n4", "its address is unknown")):
                with pytest.raises(ChannelClosed, match=f"^through n1: n1 does not reach {node}: {why}"):
                    await asyncio.wait_for(RelayedChannel(node, node, "n1", channel).call("identity"), WAIT_S)
            assert (await channel.call("identity")).data["node"] == "n1"


async def test_all_requests_to_a_node_share_one_connection_that_is_closed_when_it_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "LOOK_S", 0.2)
    async with agents(tmp_path, "n1", "n2") as (one, two), through_n1(one, two) as (_, relayed):
        await asyncio.gather(*(relayed.call("log_list") for _ in range(30)))
        (link,) = two._peers
        await asyncio.wait_for(link.closed.wait(), WAIT_S)
        assert (await relayed.call("log_list")).data == {"files": []}


async def test_a_node_that_was_removed_sees_nothing(tmp_path: Path) -> None:
    removed: Any = {
        "seq": 1, "time": "2026-01-01T00:00:00.000Z", "generation": -1, "type": "node_removed", "node": "n1",
        "rank": None, "detail": {}, "term": 1,
    }  # fmt: skip
    async with agents(tmp_path, "n1", "n2") as (one, two), through_n1(one, two) as (_, relayed):
        assert two.context.journal.take([json.loads(json.dumps(removed))])
        with pytest.raises(CallFailed, match="n2 does not answer 'log_list' to n1"):
            await relayed.call("log_list")
