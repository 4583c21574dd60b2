"""Who makes the others wait all the time, on made-up arrivals; who does so now and then is not told."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from remote_agent.base.clocks import Clock, Offset
from remote_agent.coordinator import inputs
from remote_agent.diagnose.hang.stragglers import find_straggler
from remote_agent.engine.inspect.pulse import read_flight
from tests.fast.test_stalls import IDLE, Watched

NODES = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
SECOND_NS = 10**9
# What a rank does before each collective, in seconds.
EVEN = dict.fromkeys(NODES, 0.1)
SLOW_NODE = {**EVEN, 2: 0.5, 3: 0.45}
SLOW_RANK = {**EVEN, 3: 0.5}


def arrivals(own: dict[int, float], count: int = 40, *, buckets: int = 1, jitter: float = 0.05) -> list[dict[int, int]]:
    """Play ranks that need so long before each step's collectives; all go on together after the last one."""
    dice, found, now = random.Random(1), [], 0.0
    for _ in range(count):
        needs = {rank: seconds * dice.uniform(1 - jitter, 1 + jitter) for rank, seconds in own.items()}
        found += [
            {rank: int((now + need * bucket / buckets) * SECOND_NS) for rank, need in needs.items()}
            for bucket in range(1, buckets + 1)
        ]
        now += max(needs.values())
    return found


def pulses(
    came: list[dict[int, int]], first: int = 1, clocks: dict[str, Clock] | None = None
) -> dict[int, dict[str, Any]]:
    """Return the pulses that tell of these collectives, by nodes with these clocks."""
    found = {}
    for rank, node in NODES.items():
        clock = (clocks or {}).get(node, Clock(0, 0))
        own = [(times[rank] - clock.offset_ns) // 1000 for times in came]
        reported = {"first": first, "t_us": own[0], "later_us": [each - own[0] for each in own]}
        groups = {"0": {"ranks": None, "last": first + len(came) - 1, "came": reported}}
        found[rank] = {**IDLE, "groups": groups, "clock": clock}
    return found


WAITED = r"of the time, 0\.\d\d s each \(\d+ collectives in 20 s\)"


@pytest.mark.parametrize(
    ("own", "buckets", "node", "rank", "text"),
    [
        (SLOW_NODE, 1, "n2", None, f"slow: the other ranks wait for its ranks 2-3 68% {WAITED}"),
        (SLOW_NODE, 3, "n2", None, f"slow: the other ranks wait for its ranks 2-3 81% {WAITED}"),
        (SLOW_RANK, 1, "n2", 3, f"slow: the other ranks wait for it 79% {WAITED}"),
    ],
)
def test_a_straggler_is_named(own: dict[int, float], buckets: int, node: str, rank: int | None, text: str) -> None:
    found = find_straggler(pulses(arrivals(own, buckets=buckets)), NODES)
    assert found is not None
    assert (found.node, found.rank) == (node, rank)
    assert re.fullmatch(text, found.text)


@pytest.mark.parametrize("shift_s", [5, -5])
def test_wrong_clocks_change_nothing_and_delays_below_their_error_do_not_count(shift_s: int) -> None:
    wrong = {"n2": Clock(shift_s * SECOND_NS, SECOND_NS // 1000)}
    found = find_straggler(pulses(arrivals(SLOW_NODE), clocks=wrong), NODES)
    assert found is not None
    assert (found.node, found.rank) == ("n2", None)
    rough = {"n2": Clock(shift_s * SECOND_NS, SECOND_NS // 2)}
    assert find_straggler(pulses(arrivals(SLOW_NODE), clocks=rough), NODES) is None
    # Nobody has measured it yet, or it was set meanwhile; the coordinator's own needs no measure.
    assert (
        find_straggler(pulses(arrivals(SLOW_NODE), clocks={"n2": Clock.from_report(Offset().report())}), NODES) is None
    )
    own = {"n1": Clock.from_report(Offset(ours=True).report())}
    assert find_straggler(pulses(arrivals(SLOW_NODE), clocks=own), NODES) is not None


@pytest.mark.parametrize("jitter", [0.05, 0.9])
def test_an_occasional_delay_makes_no_straggler(jitter: float) -> None:
    assert find_straggler(pulses(arrivals(EVEN, jitter=jitter)), NODES) is None
    # An evaluation on rank 0, and a checkpoint.
    came = arrivals(EVEN, 100)
    for at in (40, 80):
        came = came[:at] + [
            {rank: t + 30 * SECOND_NS * (rank == 0 or later > 0) for rank, t in times.items()}
            for later, times in enumerate(came[at:])
        ]
    assert find_straggler(pulses(came), NODES) is None


def test_without_the_times_of_all_ranks_there_is_no_straggler() -> None:
    reported = pulses(arrivals(SLOW_NODE))
    assert find_straggler({**reported, 1: {**IDLE, "clock": Clock(0, 0)}}, NODES) is None
    assert find_straggler({0: reported[0]}, NODES) is None
    assert find_straggler(pulses(arrivals(SLOW_NODE, 5)), NODES) is None
    apart = pulses(arrivals(SLOW_NODE), first=100)
    assert find_straggler({**reported, 2: apart[2], 3: apart[3]}, NODES) is None
    # Those who have come further are asked for what the others know too.
    late = pulses(arrivals(SLOW_NODE, 50)[10:], first=11)
    found = find_straggler({**reported, 0: late[0], 1: late[1]}, NODES)
    assert found is not None
    assert found.newest == 40


def test_what_went_between_all_ranks_is_read_from_a_flight_record_by_backend() -> None:
    calls = [("0", "gloo", 1, 900), ("0", "gloo", 3, 1000), ("0", "gloo", 4, 3000), ("7", "gloo", 4, 3500)]
    calls += [("0", "gloo", 5, 6000), ("0", "nccl", 6, 7000)]
    entries = [
        {
            "process_group": [name, ""], "collective_seq_id": number, "time_created_ns": t_us * 1000, "retired": True,
            "profiling_name": f"{backend}:all_reduce",
        }
        for name, backend, number, t_us in calls
    ]  # fmt: skip
    groups = read_flight({"entries": entries}, 0)
    assert groups["0"]["came"] == {"first": 3, "t_us": 1000, "later_us": [0, 2000, 5000]}
    assert groups["0/nccl"]["came"] == {"first": 6, "t_us": 7000, "later_us": [0]}
    assert "came" not in groups["7"]


class Slow(Watched):
    """Four ranks on two nodes that make steps; the collectives of each answer are those since the last one."""

    def __init__(self, own: dict[int, float]) -> None:
        super().__init__(nproc=2)
        self.own = own
        self.began = 1

    def answer(self, name: str) -> dict[int, dict[str, Any]]:
        self.began += name == "n1"
        reported = pulses(arrivals(self.own), first=40 * self.began)
        return {
            rank: {**reported[rank], "t": self.now, "cpu_s": self.now} for rank, node in NODES.items() if node == name
        }

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            for name in self.machines:
                self.feed(inputs.Heartbeat(name, stepped=True, moved=True))
            self.live(1)


def test_a_node_that_stays_slow_is_warned_of_once_within_a_minute() -> None:
    world = Slow(EVEN)
    world.run(60)
    world.own = SLOW_NODE
    world.run(20)
    world.own = EVEN
    world.run(60)
    assert world.reported("warning") == []
    world.own = SLOW_NODE
    world.run(60)
    (event,) = [event for event in world.events if event.type == "warning"]
    assert (event.node, event.rank, event.detail["kind"]) == ("n2", None, "slow")
    world.run(300)
    assert len(world.reported("warning")) == 1
    assert world.reported("incident") == []
