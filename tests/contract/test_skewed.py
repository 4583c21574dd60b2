"""The verdict does not depend on what the nodes' clocks say: n1 lives 5 s ahead, n2 5 s behind.

The ranks that communicate have the real torch; what the nodes do needs none.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.postmortem.diagnosis import diagnose
from tests import skew
from tests.agents.nodes import Nodes
from tests.examples import nightly
from tests.stub import STUB

pytestmark = [
    pytest.mark.skipif(bool(skew.obstacle()), reason=skew.obstacle()),
]
AHEAD_S = {"n1": 5, "n2": -5}
# Rank 0 is on n1, rank 1 on n2; each generation fails in another way.
SCRIPT = """
import atexit, os, signal, sys, time

rank, generation = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)

def interrupted(*_):
    raise RuntimeError("interrupted")

def linger():
    open("raised", "w")
    time.sleep(60)

if generation == 0:
    sys.path.remove(os.environ["STUB"])
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/group", rank=rank, world_size=2)
    for step in range(100):
        if rank == 1 and step == 5:
            sys.exit(0)
        dist.all_reduce(torch.ones(1))
if generation == 1 and rank == 0:
    atexit.register(linger)
    raise ValueError("first, and slow to die")
if generation == 1 and rank == 1:
    wait_for("raised")
    raise KeyError("of what the other broke")
if generation == 2 and rank == 0:
    wait_for("asks")
    raise ValueError("alone")
if generation == 2 and rank == 1:
    signal.signal(signal.SIGTERM, interrupted)
    open("asks", "w")
    time.sleep(60)
"""
RIGHT = [("collective_desync", [1], "n2"), ("user_exception", [0], "n1"), ("user_exception", [0], "n1")]


@nightly
@pytest.mark.usefixtures("light_torch")
async def test_the_first_failure_is_named_though_clocks_differ_by_ten_seconds(tmp_path: Path) -> None:
    library = skew.build(tmp_path)

    async with Nodes(tmp_path, 2, SCRIPT, max_restarts=2, env={"STUB": str(STUB)}) as nodes:
        for name, node in nodes.nodes.items():
            wrong = skew.environment(library, AHEAD_S[name])
            node.prefix = ("env", *(f"{key}={value}" for key, value in wrong.items()))
        await nodes.launch()
        await nodes.until("generation_running")
        ahead_ms = {node["name"]: node["clock_offset_ms"] for node in (await nodes.call("n1", "status"))["nodes"]}
        assert ahead_ms["n2"] == pytest.approx(-10_000, abs=250)
        await nodes.until("job_failed")
        live = [event["detail"] async for event in nodes.events("n1") if event["type"] == "incident"]
        later = diagnose([nodes.journal(name).parent for name in nodes.nodes])["incidents"]
        for incidents in (live, later):
            reported = [(one["category"], one["culprit_ranks"], one["culprit_node"]) for one in incidents]
            assert reported == RIGHT, [one["summary"] for one in incidents]
        assert "left early" in live[0]["summary"]
