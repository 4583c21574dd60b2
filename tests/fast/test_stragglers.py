"""Who makes the others wait all the time, on made-up arrivals; who does so now and then is not told."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remote_agent.base.clocks import Clock, Offset
from remote_agent.coordinator import inputs
from remote_agent.coordinator.output_watch import MAX_OPEN, PROOF_STEPS, Losses
from remote_agent.diagnose.evidence import JobContext
from remote_agent.diagnose.hang.stalls import find_stall, stall_incident
from remote_agent.diagnose.hang.stragglers import NOBODY, find_stragglers
from remote_agent.engine.inspect.pulse import MAX_CAME, read_flight, read_stack
from remote_agent.engine.inspect.stacks import merged_records, tidy
from tests.fast.test_stalls import IDLE, Watched, but, group
from tests.fast.waiting import some

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


def pulses(came: list[dict[int, int]], first: int = 1, clocks: dict[str, Clock] | None = None) -> dict[int, Any]:
    """Return the pulses that tell of these collectives, by nodes with these clocks."""
    found = {}
    for rank, node in NODES.items():
        clock = (clocks or {}).get(node, Clock(0, 0))
        own = [(times[rank] - clock.offset_ns) // 1000 for times in came]
        reported = {"first": first, "t_us": own[0], "later_us": [each - own[0] for each in own]}
        groups = {"0": {"ranks": None, "last": first + len(came) - 1, "came": reported}}
        found[rank] = {**IDLE, "groups": groups, "clock": clock}
    return found


@pytest.mark.parametrize(
    ("own", "buckets", "ranks", "share"),
    [(SLOW_NODE, 1, (2, 3), 0.68), (SLOW_NODE, 3, (2, 3), 0.81), (SLOW_RANK, 1, (3,), 0.79)],
)
def test_a_straggler_is_named(own: dict[int, float], buckets: int, ranks: tuple[int, ...], share: float) -> None:
    found = find_stragglers(pulses(arrivals(own, buckets=buckets)), NODES)
    assert (found.ranks, round(found.share, 2)) == (ranks, share)


def test_a_smaller_share_is_only_suspicious() -> None:
    found = find_stragglers(pulses(arrivals({**EVEN, 3: 0.15})), NODES)
    assert (found.ranks, found.is_certain) == ((3,), False)
    assert find_stragglers(pulses(arrivals(SLOW_RANK)), NODES).is_certain


@pytest.mark.parametrize("shift_s", [5, -5])
def test_wrong_clocks_change_nothing(shift_s: int) -> None:
    wrong = {"n2": Clock(shift_s * SECOND_NS, SECOND_NS // 1000)}
    assert find_stragglers(pulses(arrivals(SLOW_NODE), clocks=wrong), NODES).ranks == (2, 3)
    rough = {"n2": Clock(shift_s * SECOND_NS, SECOND_NS // 2)}
    assert find_stragglers(pulses(arrivals(SLOW_NODE), clocks=rough), NODES) == NOBODY
    # Nobody has measured it yet, or it was set meanwhile; the coordinator's own needs no measure.
    assert (
        find_stragglers(pulses(arrivals(SLOW_NODE), clocks={"n2": Clock.from_report(Offset().report())}), NODES)
        == NOBODY
    )
    own = {"n1": Clock.from_report(Offset(ours=True).report())}
    assert find_stragglers(pulses(arrivals(SLOW_NODE), clocks=own), NODES) != NOBODY


@pytest.mark.parametrize("jitter", [0.05, 0.9])
def test_an_occasional_delay_makes_no_straggler(jitter: float) -> None:
    assert find_stragglers(pulses(arrivals(EVEN, jitter=jitter)), NODES) == NOBODY
    # An evaluation on rank 0, and a checkpoint.
    came = arrivals(EVEN, 100)
    for at in (40, 80):
        came = came[:at] + [
            {rank: t + 30 * SECOND_NS * (rank == 0 or later > 0) for rank, t in times.items()}
            for later, times in enumerate(came[at:])
        ]
    assert find_stragglers(pulses(came), NODES) == NOBODY


def test_without_the_times_of_all_ranks_there_is_no_straggler() -> None:
    reported = pulses(arrivals(SLOW_NODE))
    assert find_stragglers({**reported, 1: but(IDLE, clock=Clock(0, 0))}, NODES) == NOBODY
    assert find_stragglers({0: reported[0]}, NODES) == NOBODY
    assert find_stragglers(pulses(arrivals(SLOW_NODE, 5)), NODES) == NOBODY
    apart = pulses(arrivals(SLOW_NODE), first=100)
    assert find_stragglers({**reported, 2: apart[2], 3: apart[3]}, NODES) == NOBODY
    # Those who have come further are asked for what the others know too.
    late = pulses(arrivals(SLOW_NODE, 50)[10:], first=11)
    assert find_stragglers({**reported, 0: late[0], 1: late[1]}, NODES).ranks == (2, 3)


# An hour of a healthy run: no alarm, no warning; and a hang after it is told all the same.


WORK, SAVE, SEND, READ, MOVE, WAIT, SLEEP, STEP = "work", "save", "send", "read", "move", "wait", "sleep", "step"
# Short steps that nothing is printed of: one sleeps in each, and the others wait for it.
NAP, MEET = "nap", "meet"
ALL = range(4)
# An hour of a healthy run: seconds, what the ranks named do, what the others do.
HOUR: list[tuple[int, dict[int, str], str]] = [
    (60, {}, READ),  # imports from a slow file system
    (300, {}, WORK),  # first step: warm-up and compilation, everywhere
    (240, {1: WORK}, WAIT),  # one rank compiles for longer
    (400, {}, STEP),
    *[(25, {2: WORK}, WAIT), (5, {}, STEP)] * 10,  # uneven ranks
    (300, {0: WORK}, WAIT),  # evaluation on rank 0
    (300, {}, STEP),
    (300, {0: SAVE}, WAIT),  # checkpoint of rank 0: the kernel writes for it
    (100, {0: SEND}, WAIT),  # and its upload
    (100, {}, READ),  # sharded checkpoint
    (200, {}, STEP),
    (240, {}, SLEEP),  # nothing is done between two epochs, and nobody waits for anybody
    (300, {}, STEP),
    (180, {3: READ}, WAIT),  # one rank fetches data
    (120, {0: MOVE}, WAIT),  # and one looks for something in small steps
    (100, {1: NAP}, MEET),
    (60, {}, STEP),
]


class Training(Watched):
    """Four ranks on two nodes; with and without torch's flight recorder."""

    def __init__(self, recorder: bool) -> None:
        super().__init__(nproc=2)
        self.recorder = recorder
        self.newest = dict.fromkeys(ALL, 0)
        self.held = 0.0
        self.ranks = {rank: {**IDLE, "stack": "step"} for rank in ALL}
        self.came: dict[int, list[int]] = {rank: [] for rank in ALL}
        """When each came to each collective, in us."""
        self.losses, self.dice = Losses(), random.Random(1)

    def go_on(self, seconds: int, some: dict[int, str], others: str) -> None:
        """Do this for so long; who waited has what it waited for afterwards."""
        doing = {rank: some.get(rank, others) for rank in ALL}
        newest = max(self.newest.values())
        self.newest = {rank: newest + (doing[rank] == WAIT) for rank in ALL}
        self.held = self.now
        for _ in range(seconds):
            for rank, what in doing.items():
                self._second(rank, what)
                self.came[rank] += [int(self.now * 1e6)] * (self.newest[rank] - len(self.came[rank]))
            if STEP in doing.values():
                for name in self.machines:
                    self.feed(inputs.Heartbeat(name, stepped=True, moved=True, warnings=self._losses(name)))
            self.live(1)

    def _second(self, rank: int, what: str) -> None:
        pulse = self.ranks[rank]
        pulse.update(stack=what, inside=None, state="D" if what == SAVE else "S", groups={})
        pulse["cpu_s"] += {WORK: 1.0, STEP: 0.9}.get(what, 0.01)
        pulse["io"] += 500_000 if what == READ else 500
        pulse["net"] = None if what == WAIT else (pulse["net"] or 0) + 1_000_000 * (what == SEND)
        if what == MOVE:
            pulse["stack"] += str(self.now)
        pulse["sleeps"] += 20 * (what in (NAP, MEET))
        self.newest[rank] += {STEP: 5, NAP: 20, MEET: 20}.get(what, 0)
        if not self.recorder:
            pulse["inside"] = "all_reduce" if what in (WAIT, MEET) else None
        elif self.newest[rank]:
            age_s = self.now - self.held
            pulse["groups"] = {"0": group(self.newest[rank], waits=what in (WAIT, MEET), age_s=age_s)}

    def _losses(self, name: str) -> dict[tuple[int, str], str]:
        """Each rank has a batch of its own."""
        ranks = self.machines[name].ranks
        reported = {str(rank): {"losses": [(self.newest[rank], f"{self.dice.gauss(2, 0.01):.2f}")]} for rank in ranks}
        return self.losses.read(0, reported)

    def answer(self, name: str) -> dict[int, dict[str, Any]]:
        return {rank: self._pulse(rank) for rank in self.machines[name].ranks}

    def _pulse(self, rank: int) -> dict[str, Any]:
        pulse = {**self.ranks[rank], "t": self.now, "clock": Clock(0, 0)}
        own = self.came[rank]
        if own and pulse["groups"]:
            first = max(0, len(own) - MAX_CAME)
            came = {"first": first + 1, "t_us": own[first], "later_us": [t_us - own[first] for t_us in own[first:]]}
            pulse["groups"] = {"0": {**pulse["groups"]["0"], "came": came}}
        return pulse


@pytest.mark.parametrize("recorder", [True, False], ids=["recorder", "stacks alone"])
def test_a_healthy_hour_raises_no_alarm(recorder: bool) -> None:
    run = Training(recorder)
    for phase in HOUR:
        run.go_on(*phase)
    assert sum(seconds for seconds, _, _ in HOUR) == 3600
    assert run.asked > 100
    assert (run.reported("incident"), run.reported("warning")) == ([], [])
    run.go_on(60, {2: SLEEP}, WAIT)
    (incident,) = run.reported("incident")
    assert (incident["culprit_ranks"], incident["culprit_node"]) == ([2], "n2")


# Warnings about losses that were equal on all ranks and then differ; losses that always differ are normal.


FOUR = range(4)
PAIRS = ((0, 1), (2, 3))


def tell(losses: Losses, step: int, said: dict[int, str], generation: int = 0) -> dict[tuple[int, str], str]:
    """Let each node tell what its ranks say at a step; returns what is warned of then."""
    found: dict[tuple[int, str], str] = {}
    for node in PAIRS:
        reported: dict[str, Any] = {str(rank): {"losses": [(step, said[rank])]} for rank in node if rank in said}
        found = losses.read(generation, reported)
    return found


def warned(says: Callable[[int, int], str], steps: range) -> dict[tuple[int, str], str]:
    """Return what is warned of when rank and step say this."""
    losses, found = Losses(), {}
    for step in steps:
        found = tell(losses, step, {rank: says(rank, step) for rank in FOUR})
    return found


def falling(step: int) -> str:
    return f"{2 + 1 / (step + 1):.4f}"


@pytest.mark.parametrize(
    ("odd", "rank", "text"),
    [
        ({2: 0.5}, 2, ("loss differs from about step 300 on: 2.5033 on rank 2, 2.0033 on ranks 0-1,3; it was the same "
         "on all before")),
        ({1: 0.5, 2: 0.5}, 1, ("2.5033 on ranks 1-2, 2.0033 on ranks 0,3; it was the same on all before, and no "
         "majority shows which is wrong")),
        ({1: 0.1, 2: 0.2, 3: 0.3}, 1, "2.1033 on rank 1, 2.2033 on rank 2, 2.0033 on rank 0 (and 1 more)"),
    ],
)  # fmt: skip
def test_ranks_that_come_apart_are_named(odd: dict[int, float], rank: int, text: str) -> None:
    def says(each: int, step: int) -> str:
        return f"{float(falling(step)) + (odd.get(each, 0) if step >= 300 else 0):.4f}"

    found = warned(says, range(0, 400, 10))
    assert found == {}
    found = warned(says, range(0, 400, 2))
    assert list(found) == [(rank, "loss")]
    assert text in found[rank, "loss"]


DICE = random.Random(1)


@pytest.mark.parametrize(
    "says",
    [
        # Each rank's own batch; of the same loss when it begins, and rounded.
        lambda rank, step: f"{2 + DICE.gauss(0, 0.1):.4f}",
        lambda rank, step: f"{0.6931 if step < 300 else 0.6 + DICE.gauss(0, 0.1):.4f}",
        lambda rank, step: f"{2 + DICE.gauss(0, 0.005):.2f}",
        # One loss, which rounding shows in two ways; one rank that prints something else once.
        lambda rank, step: f"{float(falling(step)) + 0.0001 * (rank == 1 and step > 300):.4f}",
        lambda rank, step: "7.0" if (rank, step % 100) == (3, 99) else falling(step),
        # It differs from the start.
        lambda rank, step: f"{2 + rank + 1 / (step + 1):.4f}",
        lambda rank, step: "1e-3" if step % 2 else "2.5E+01",
    ],
    ids=["own", "own, at first alike", "own, rounded", "last digit", "once", "from the start", "one"],
)
def test_a_healthy_run_is_not_warned_of(says: Callable[[int, int], str]) -> None:
    assert warned(says, range(3600)) == {}


def test_a_new_group_begins_anew_and_a_silent_one_costs_nothing() -> None:
    losses = Losses()
    for step in range(PROOF_STEPS + 10):
        tell(losses, step, dict.fromkeys(FOUR, falling(step)))
    for step in range(5):
        assert tell(losses, step, {**dict.fromkeys(FOUR, falling(step)), 3: "9.9"}, generation=1) == {}
    sizes = []
    for step in range(3 * MAX_OPEN):
        tell(losses, step, dict.fromkeys(FOUR[:3], falling(step)), generation=1)
        sizes.append(len(pickle.dumps(losses)))
    assert sizes[-1] <= 1.1 * sizes[MAX_OPEN]


def test_a_loss_that_is_no_number_is_warned_of_by_its_rank() -> None:
    assert Losses().read(0, {"3": {"warning": "loss is nan"}, "4": {}}) == {(3, "nan"): "loss is nan"}


# Hangs over NCCL as they were read on one NVIDIA H100 (torch 2.11.0, NCCL 2.28.9): the right rank is named.


RECORDED: Any = json.loads((Path(__file__).parent / "data" / "nccl_h100.json").read_text())
NODE_OF = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
# A record is read while it is unfinished, an hour later at most.
NOW_NS = 1795691700_000_000_000


def recorded_pulses(scenario: str) -> list[dict[int, Any]]:
    """Return both rounds of recorded_pulses, as the engine makes them of what the ranks answered."""
    rounds: list[dict[int, Any]] = [{}, {}]
    for rank, seen in RECORDED[scenario].items():
        for number, reading in enumerate(seen["readings"]):
            groups = read_flight(merged_records([json.dumps(seen["record"]).encode()]), NOW_NS)
            kernel = {"state": reading["state"], "cpu_s": reading["ticks"] / 100, "sleeps": reading["sleeps"]}
            pulse = {**IDLE, **kernel, **read_stack(tidy(reading["stack"].encode())), "t": 5.0 * number}
            rounds[number][int(rank)] = {**pulse, "groups": groups, "clock": Clock(0, 0)}
    return rounds


def judged(scenario: str) -> Any:
    left = frozenset({2}) if scenario == "early" else frozenset()
    before, now = recorded_pulses(scenario)
    found = some(find_stall(before, now, left))
    context = JobContext(world_size=4, ranks_per_node={"n1": (0, 1), "n2": (2, 3)})
    return stall_incident(found, context)


@pytest.mark.parametrize(
    ("scenario", "culprits", "summary"),
    [
        ("sleep", [2], "rank 2 (n2): idle at train.py:26 in load_batch; ranks 0-1,3 waiting in all_reduce 26"),
        ("early", [2], "rank 2 (n2): exited with code 0; ranks 0-1,3 waiting in all_reduce 26"),
        ("desync", [2], "rank 2 (n2): called broadcast 26 where ranks 0-1,3 called all_reduce"),
        ("shape", [2], "called all_reduce 26 with 4096 elements [4096], ranks 0-1,3 with 64 [64]"),
        ("spin", [], "all 4 ranks reached all_reduce 26, and none finished it"),
    ],
)
def test_the_rank_at_fault_is_named(scenario: str, culprits: list[int], summary: str) -> None:
    incident = judged(scenario)
    assert incident["culprit_ranks"] == culprits
    assert summary in incident["summary"]


def test_ranks_that_all_wait_are_shown_with_what_they_finished_last() -> None:
    evidence = [(one["rank"], one["text"]) for one in judged("spin")["evidence"]]
    assert evidence == [(rank, "in all_reduce 26; the last one that it finished is all_reduce 25") for rank in range(4)]


def test_who_is_slow_is_named_and_nobody_where_the_ranks_are_alike() -> None:
    slow = recorded_pulses("slow")[1]
    found = find_stragglers(slow, NODE_OF)
    assert (found.ranks, 0.2 <= found.share < 0.3) == ((2,), True)
    # The same collectives as if rank 2 had called each when rank 3 did.
    assert find_stragglers({**slow, 2: slow[3]}, NODE_OF) == NOBODY
