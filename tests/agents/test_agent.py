"""Real agents, engines and workers on this machine: generations, failures, membership, succession."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.agent.requests import LOOKS, AgentRequests
from remote_agent.base.proc import stat_fields
from remote_agent.coordinator.operator_requests import VERBS
from remote_agent.wire import Answer, CallFailed
from tests.agents.engine_process import alive, await_death, children_of
from tests.agents.nodes import WAIT_S, Nodes

LIGHT = """
import os, signal, sys, time
from pathlib import Path
flag = Path("stop")
generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
Path(f"ran_{generation}_{os.environ['RANK']}").write_text(os.environ["WORLD_SIZE"])
print("step=1", flush=True)
while not flag.exists():
    if Path(f"fail_{generation}_{os.environ['RANK']}").exists():
        raise ValueError("told to fail")
    time.sleep(0.02)
"""


async def refuses_who_only_looks(nodes: Nodes) -> None:
    """An operator who is attached read-only changes nothing, whatever his own program lets him ask."""
    channel = await nodes.nodes["n2"].open(nodes.spec.job)
    await channel.call("attach", {"operator": "guest", "mode": "watch"}, timeout=WAIT_S)
    agent: Any = SimpleNamespace(
        logs=None, history=SimpleNamespace(answer=None), files=SimpleNamespace(home=None), spec=nodes.spec
    )
    known = {*VERBS, *AgentRequests(agent, agent).ops}
    assert known > LOOKS
    for op in sorted(known - LOOKS):
        with pytest.raises(CallFailed, match=f"{op} refused: this operator is attached read-only"):
            await channel.call(op, {"node": "n1", "ranks": [0], "signal": "SIGKILL"}, timeout=WAIT_S)
    assert (await channel.call("status", {}, timeout=WAIT_S)).data["state"] == "running"


async def test_a_job_on_two_nodes_from_launch_to_end(tmp_path: Path) -> None:
    """A rank fails, an engine hangs; then it succeeds, and its agents end."""
    async with Nodes(tmp_path, 2, LIGHT, nproc=2, stop_grace=0.0) as nodes:
        await nodes.launch()
        running = await nodes.until("generation_running")
        assert running["detail"]["world_size"] == 4
        await refuses_who_only_looks(nodes)
        await signals_only_its_rank(nodes, running["detail"]["pids"])
        await a_failing_rank_is_named_and_all_restart(nodes)
        await an_engine_that_hangs_is_killed_before_the_next_group(nodes)
        (nodes.work / "stop").touch()
        await nodes.until("job_succeeded", "n2")
        first, second = [nodes.journal(name).read_text() for name in nodes.nodes]
        assert first == second
        agents = [node["agent_pid"] for node in (await nodes.call("n1", "status"))["nodes"]]
        # Whoever reads the end holds the agents, but not their engines.
        await wait_gone([pid for agent in agents for pid in children_of(agent)])
        assert all(map(alive, agents))
        for one in nodes.nodes.values():
            await one.close()
        await wait_gone(agents)
        status = await nodes.call("n2", "status")
        assert status["state"] == "succeeded"
        assert [rank["state"] for node in status["nodes"] for rank in node["ranks"]] == ["succeeded"] * 4


async def signals_only_its_rank(nodes: Nodes, pids: dict[str, int]) -> None:
    """The rank has another process by now: it is left alone."""
    pid = pids["3"]
    answer = await nodes.call("n2", "signal", {"pids": {"3": pid + 1, "2": pid}, "signal": "SIGKILL"})
    assert sorted(answer["refused"]) == ["2", "3"]
    assert (await nodes.call("n2", "signal", {"pids": {"3": pid}, "signal": "SIGCONT"}))["refused"] == {}
    assert (await nodes.until("signal_sent"))["detail"]["ranks"] == [3]


async def a_failing_rank_is_named_and_all_restart(nodes: Nodes) -> None:
    (nodes.work / "fail_0_3").touch()
    incident = (await nodes.until("incident"))["detail"]
    assert incident["culprit_ranks"] == [3]
    assert incident["culprit_node"] == "n2"
    assert "told to fail" in incident["summary"]
    await nodes.until("generation_running", generation=1)
    end = time.monotonic() + WAIT_S
    while len(ran := list(nodes.work.glob("ran_1_*"))) < 4:
        assert time.monotonic() < end, ran
        await asyncio.sleep(0.01)


async def an_engine_that_hangs_is_killed_before_the_next_group(nodes: Nodes) -> None:
    worker = (await nodes.until("generation_running", generation=1))["detail"]["pids"]["2"]
    os.kill(int(stat_fields(worker)[1]), signal.SIGSTOP)
    await nodes.call("n1", "restart")
    started = await nodes.until("generation_started", generation=2)
    assert not alive(worker)
    assert [one["node"] for one in started["detail"]["members"]] == ["n1", "n2"]
    await nodes.until("generation_running", generation=2)


async def test_workers_of_an_agent_that_stands_still_end_before_the_others_go_on(tmp_path: Path) -> None:
    async with Nodes(tmp_path, 2, LIGHT, min_nodes=1, node_timeout=4.0) as nodes:
        await nodes.launch()
        whole = await group_of(nodes, 2)
        worker = whole["detail"]["pids"]["1"]
        engine = int(stat_fields(worker)[1])
        agent = int(stat_fields(engine)[1])
        os.kill(agent, signal.SIGSTOP)
        await nodes.until("generation_started", since=whole["seq"])
        assert not alive(worker)
        assert not alive(engine)
        alone = await group_of(nodes, 1, since=whole["seq"])
        os.kill(agent, signal.SIGCONT)
        await group_of(nodes, 2, since=alone["seq"])
        (nodes.work / "stop").touch()
        await nodes.until("job_succeeded")


LEAVES = """
import os, subprocess
sleep = ["sleep", "600"]
left = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
open(f"left_{os.environ['RANK']}", "a").write(f"{left[0]} {left[1]} ")
"""


async def test_what_dies_on_a_node_leaves_nothing_there_and_the_node_returns(tmp_path: Path) -> None:
    async with Nodes(tmp_path, 2, LEAVES + LIGHT, min_nodes=1) as nodes:
        await nodes.launch()
        lost = await a_killed_engine_is_replaced(nodes)
        await a_killed_agent_takes_its_workers_along_and_the_rest_go_on(nodes, lost)
        await an_agent_ends_what_the_one_before_left(nodes)
        assert (await nodes.call("n1", "status"))["restarts"] == 0
        (nodes.work / "stop").touch()
        await nodes.until("job_succeeded")


async def a_killed_engine_is_replaced(nodes: Nodes) -> int:
    """Return the number of the event that says so."""
    whole = await group_of(nodes, 2)
    worker = whole["detail"]["pids"]["1"]
    while not (nodes.work / f"ran_{whole['generation']}_1").exists():
        await asyncio.sleep(0.01)
    left = [int(pid) for pid in (nodes.work / "left_1").read_text().split()]
    agent = int(stat_fields(int(stat_fields(worker)[1]))[1])
    os.kill(int(stat_fields(worker)[1]), signal.SIGKILL)
    await wait_gone([worker, *left])
    end = time.monotonic() + WAIT_S
    while any(stat_fields(pid)[:1] == ["Z"] for pid in children_of(agent)):
        assert time.monotonic() < end, "nobody reaps what the engine left"
        await asyncio.sleep(0.02)
    lost = await nodes.until("node_lost", since=whole["seq"])
    assert "engine died" in lost["detail"]["reason"]
    incident = (await nodes.until("incident", since=whole["seq"]))["detail"]
    assert (incident["category"], incident["culprit_node"]) == ("node_lost", "n2")
    return int(lost["seq"])


async def group_of(nodes: Nodes, size: int, since: int = 0) -> Any:
    """Return the first group of that many ranks after an event: a loaded machine may lose and find a node meanwhile."""
    while True:
        event = await nodes.until("generation_running", since=since)
        if event["detail"]["world_size"] == size:
            return event
        since = event["seq"]


async def a_killed_agent_takes_its_workers_along_and_the_rest_go_on(nodes: Nodes, lost: int) -> None:
    running = await group_of(nodes, 2, since=lost)
    agent = (await nodes.call("n1", "status"))["nodes"][1]["agent_pid"]
    os.kill(agent, signal.SIGKILL)
    await wait_gone([running["detail"]["pids"]["1"]])
    # `agent_lost` at once, if the kernel ends its connection as that of a process that has read everything.
    gone = await nodes.until("node_lost", since=running["seq"])
    assert gone["node"] == "n2"
    alone = await group_of(nodes, 1, since=gone["seq"])
    await nodes.start("n2")
    await rejoin(nodes, "n2")
    await group_of(nodes, 2, since=alone["seq"])


async def an_agent_ends_what_the_one_before_left(nodes: Nodes) -> None:
    """Agent and engine are killed at once: no process is left that knows what the worker has started."""
    status = await nodes.call("n1", "status")
    while not (nodes.work / f"ran_{status['generation']}_1").exists():
        await asyncio.sleep(0.01)
    left = [int(pid) for pid in (nodes.work / "left_1").read_text().split()[-2:]]
    worker = status["nodes"][1]["ranks"][0]["pid"]
    engine = int(stat_fields(worker)[1])
    owners = (status["nodes"][1]["agent_pid"], engine)
    for pid in owners:
        os.kill(pid, signal.SIGSTOP)
    while any(stat_fields(pid)[0] != "T" for pid in owners):
        await asyncio.sleep(0.01)
    for pid in owners:
        os.kill(pid, signal.SIGKILL)
    for pid in owners:
        await asyncio.to_thread(await_death, pid)
    await wait_gone([worker])
    assert all(alive(pid) for pid in left)
    await nodes.start("n2")
    await wait_gone(left)
    await rejoin(nodes, "n2")


async def test_the_job_survives_its_coordinators(tmp_path: Path) -> None:
    async with Nodes(tmp_path, 3, LIGHT, min_nodes=1) as nodes:
        await nodes.launch()
        await nodes.until("generation_running")
        os.kill((await nodes.call("n1", "status"))["nodes"][0]["agent_pid"], signal.SIGKILL)
        assert (await nodes.until("generation_running", "n2", generation=1))["detail"]["world_size"] == 2
        status = await nodes.call("n3", "status")
        # Where nobody can hand the role on, who asks first has the others' votes.
        assert status["coordinator"] in ("n2", "n3")
        assert status["restarts"] == 0
        last = {"n2": "n3", "n3": "n2"}[status["coordinator"]]
        await nodes.call(last, "remove", {"node": status["coordinator"]})
        assert (await nodes.until("generation_running", last, generation=2))["detail"]["world_size"] == 1
        status = await nodes.call(last, "status")
        assert (status["coordinator"], status["restarts"]) == (last, 0)
        (nodes.work / "stop").touch()
        await nodes.until("job_succeeded", last)


async def test_operators_who_promote_a_node_at_once_make_one_coordinator(tmp_path: Path) -> None:
    async with Nodes(tmp_path, 2, LIGHT, min_nodes=1, node_timeout=4.0) as nodes:
        await nodes.launch()
        await nodes.until("generation_running", "n2")
        os.kill((await nodes.call("n1", "status"))["nodes"][0]["agent_pid"], signal.SIGKILL)
        end = time.monotonic() + WAIT_S
        # As long as the coordinator may live, it is in charge.
        while isinstance(answers := await promote(nodes, 8), str):
            assert "n1 is in charge" in answers
            assert time.monotonic() < end, answers
        assert {answer["coordinator"] for answer in answers} == {"n2"}
        await nodes.until("generation_running", "n2", generation=1)
        (nodes.work / "stop").touch()
        await nodes.until("job_succeeded", "n2")
        events = [json.loads(line) for line in nodes.journal("n2").read_text().splitlines()]
        assert [event["type"] for event in events].count("coordinator_changed") == 1


async def promote(nodes: Nodes, times: int) -> list[dict[str, Any]] | str:
    """Ask n2 to go on without n1 so many times at once; returns the answers, or the reason of a refusal."""
    channels = [await nodes.nodes["n2"].open(nodes.spec.job) for _ in range(times)]
    calls = (channel.call("promote", {"force": True, "given_up": ["n1"]}, timeout=WAIT_S) for channel in channels)
    found = await asyncio.gather(*calls, return_exceptions=True)
    refused = [one for one in found if isinstance(one, BaseException)]
    return str(refused[0]) if refused else [one.data for one in found if isinstance(one, Answer)]


async def rejoin(nodes: Nodes, name: str) -> None:
    """Tell a restarted agent where the coordinator is."""
    found = await nodes.call("n1", "identity")
    members = found["members"]
    coordinator = {"node": found["coordinator"], **members[found["coordinator"]]}
    await nodes.call(name, "assign", {"term": found["term"], "coordinator": coordinator, "members": members})


async def wait_gone(pids: list[int]) -> None:
    """Wait until none of these processes lives."""
    end = time.monotonic() + WAIT_S
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end, "processes outlived their agent"
        await asyncio.sleep(0.05)


async def test_agents_and_stores_listen_in_the_range_that_the_job_names(tmp_path: Path) -> None:
    async with Nodes(tmp_path, 2, LIGHT, ports="21700-21799") as nodes:
        await nodes.launch()
        started = await nodes.until("generation_started")
        listens = [(await nodes.call(name, "identity"))["peer_port"] for name in nodes.nodes]
        listens.append(int(started["detail"]["master"].rpartition(":")[2]))
        assert len(set(listens)) == 3
        assert all(21700 <= port <= 21799 for port in listens), listens
        (nodes.work / "stop").touch()
        await nodes.until("job_succeeded")


CHATTY = """
import time
while True:
    print("x" * 200_000, "step=1", flush=True)
    time.sleep(0.1)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small file system")
def test_a_full_disk_costs_its_node_and_not_the_job(tmp_path: Path) -> None:
    """Nothing that its ranks say can be written, nor its journal; it coordinates, and goes on doing so."""
    full = "n1"

    async def check(nodes: Nodes) -> None:
        async with nodes:
            await nodes.launch()
            await nodes.until("generation_running")
            out = await nodes.until("node_failed")
            assert out["node"] == full
            assert "no space is left in" in out["detail"]["reason"]
            assert f"supervisor add --node {full}" in out["detail"]["reason"]
            running = await nodes.until("generation_running", since=out["seq"])
            events = [json.loads(line) for line in nodes.journal("n2").read_text().splitlines()]
            incidents = [event["detail"] for event in events if event["type"] == "incident"]
            assert {(one["category"], one["culprit_node"]) for one in incidents} == {("disk_full", full)}
            assert running["detail"]["world_size"] == 2
            states = {node["name"]: node["state"] for node in (await nodes.call("n2", "status"))["nodes"]}
            assert states == {name: "failed" if name == full else "running" for name in states}

    nodes = Nodes(tmp_path, 3, CHATTY, min_nodes=2)
    disk = nodes.nodes[full].home
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0700,size=4m", "tmpfs", disk], check=True)
    try:
        asyncio.run(check(nodes))
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
