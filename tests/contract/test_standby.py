"""Restarts from waiting processes with real torch: gloo groups on two nodes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.agents.engine_process import alive
from tests.agents.nodes import WAIT_S, Nodes

# Its text does not say what it imports: the first start is cold.
SCRIPT = """
import importlib, json, os, sys, time
was_there = "torch" in sys.modules
torch = importlib.import_module("torch")
dist = torch.distributed
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 100000):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    print(f"step={step}", flush=True)
    if step == 1:
        generation, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        note = {"was_there": was_there, "modules": sorted(sys.modules), "seed": torch.initial_seed(), "at": time.time()}
        with open(f"step_{generation}_{rank}.part", "w") as file:
            json.dump(note, file)
        os.rename(f"step_{generation}_{rank}.part", f"step_{generation}_{rank}")
    time.sleep(0.05)
"""


async def steps(nodes: Nodes, generation: int) -> list[dict[str, Any]]:
    """Return what the ranks noted after their first step."""
    paths = [nodes.work / f"step_{generation}_{rank}" for rank in range(2)]
    for _ in range(int(2 * WAIT_S / 0.05)):
        if all(path.exists() for path in paths):
            return [json.loads(path.read_text()) for path in paths]
        await asyncio.sleep(0.05)
    raise AssertionError(f"no step in generation {generation}")


async def standby(nodes: Nodes) -> list[dict[str, Any]]:
    """Return what the nodes say of their waiting processes, once these have loaded their modules or failed."""
    found: list[dict[str, Any]] = []
    for _ in range(int(2 * WAIT_S / 0.2)):
        found = [node["standby"] or {} for node in (await nodes.call("n1", "status"))["nodes"]]
        if all(one.get("state") in ("ready", "failed") for one in found):
            return found
        await asyncio.sleep(0.2)
    raise AssertionError(found)


async def ended(pids: list[int]) -> None:
    """Return when these processes are gone: their agents were killed, and their engines end what they have."""
    for _ in range(int(WAIT_S / 0.05)):
        if not any(alive(pid) for pid in pids):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"a waiting process outlives its agent: {pids}")


async def test_a_killed_worker_s_group_comes_back_warm(tmp_path: Path) -> None:
    async with Nodes(tmp_path, 2, SCRIPT, stop_grace=0.0, standby="auto") as nodes:
        await nodes.launch()
        running = await nodes.until("generation_running")
        assert {start["why"] for start in running["detail"]["starts"].values()} == {"nothing was loaded before"}
        cold = await steps(nodes, 0)
        waiting = await standby(nodes)
        assert [(one["state"], one["why"]) for one in waiting] == [("ready", "")] * 2
        for generation in (1, 2):
            os.kill(running["detail"]["pids"]["1"], signal.SIGKILL)
            running = await nodes.until("generation_running", generation=generation)
            assert all(start["warm"] for start in running["detail"]["starts"].values()), running
            warm = await steps(nodes, generation)
            assert [one["was_there"] for one in (*cold, *warm)] == [False, False, True, True]
            for one, before in zip(warm, cold, strict=True):
                assert set(before["modules"]) <= set(one["modules"])
            seeds = [one["seed"] for one in (*cold, *warm)]
            assert len(set(seeds)) == (1 if cold[0]["seed"] == cold[1]["seed"] else 4)
        status = await nodes.call("n1", "status")
        assert [node["start"] for node in status["nodes"]] == [{"warm": True, "why": ""}] * 2
        await nodes.call("n1", "stop")
    await ended([one["pid"] for one in waiting])
