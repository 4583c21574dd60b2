"""Hangs over NCCL as they were read on one NVIDIA H100 (torch 2.11.0, NCCL 2.28.9): the right rank is named.

Four ranks of DDP, loss.item() in each step, rank 2 at fault from step 20 on; what torch's worker servers and the kernel
said of each rank, twice, 5 s apart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remote_agent.base.clocks import Clock
from remote_agent.diagnose.evidence import JobContext
from remote_agent.diagnose.hang.stalls import Stall, find_stall, stall_incident
from remote_agent.diagnose.hang.stragglers import find_straggler
from remote_agent.engine.inspect.pulse import read_flight, read_stack
from remote_agent.engine.inspect.stacks import merged_records, tidy
from tests.fast.test_stalls import IDLE

RECORDED: Any = json.loads((Path(__file__).parent / "data" / "nccl_h100.json").read_text())
NODES = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
# A record is read while it is unfinished, an hour later at most.
NOW_NS = 1795691700_000_000_000


def pulses(scenario: str) -> list[dict[int, Any]]:
    """Return both rounds of pulses, as the engine makes them of what the ranks answered."""
    rounds: list[dict[int, Any]] = [{}, {}]
    for rank, seen in RECORDED[scenario].items():
        for number, reading in enumerate(seen["readings"]):
            groups = read_flight(merged_records([json.dumps(seen["record"]).encode()]), NOW_NS)
            kernel = {"state": reading["state"], "cpu_s": reading["ticks"] / 100, "sleeps": reading["sleeps"]}
            pulse = {**IDLE, **kernel, **read_stack(tidy(reading["stack"].encode())), "t": 5.0 * number}
            rounds[number][int(rank)] = {**pulse, "groups": groups, "clock": Clock(0, 0)}
    return rounds


def judged(scenario: str) -> tuple[Stall, Any]:
    left = frozenset({2}) if scenario == "early" else frozenset()
    before, now = pulses(scenario)
    found = find_stall(before, now, left)
    assert found is not None
    context = JobContext(world_size=4, ranks_per_node={"n1": (0, 1), "n2": (2, 3)})
    return found, stall_incident(found, context).to_json()


@pytest.mark.parametrize(
    ("scenario", "culprits", "summary"),
    [
        ("sleep", [2], "rank 2 (n2): idle at train.py:26 in load_batch; ranks 0-1,3 waiting in all_reduce 26"),
        ("early", [2], "rank 2 (n2): exited with code 0; ranks 0-1,3 waiting in all_reduce 26"),
        (
            "desync",
            [2],
            "rank 2 (n2): called broadcast 26 where ranks 0-1,3 called all_reduce",
        ),
        ("shape", [2], "called all_reduce 26 with 4096 elements [4096], ranks 0-1,3 with 64 [64]"),
        ("spin", [], "all 4 ranks reached all_reduce 26, and none finished it"),
    ],
)
def test_the_rank_at_fault_is_named(scenario: str, culprits: list[int], summary: str) -> None:
    _, incident = judged(scenario)
    assert incident["culprit_ranks"] == culprits
    assert summary in incident["summary"]


def test_ranks_that_all_wait_are_shown_with_what_they_finished_last() -> None:
    evidence = [(one["rank"], one["text"]) for one in judged("spin")[1]["evidence"]]
    assert evidence == [(rank, "in all_reduce 26; the last one that it finished is all_reduce 25") for rank in range(4)]


def test_who_is_slow_is_named() -> None:
    found = find_straggler(pulses("slow")[1], NODES)
    assert found is not None
    assert (found.node, found.rank) == ("n2", 2)
    assert found.text.startswith("slow: the other ranks wait for it 2")


def test_nobody_is_slow_where_the_ranks_are_alike() -> None:
    """The same collectives as if rank 2 had called each when rank 3 did."""
    now = pulses("slow")[1]
    assert find_straggler({**now, 2: now[3]}, NODES) is None
