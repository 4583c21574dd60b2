"""For whom the others wait, and why, on made-up windows; who is not slow is not named.

The rule, in words: a rank is slow if it waits less than the others do, by 15 % of the time or more, in three windows in
a row; by 25 % if it just computes longer. What it does meanwhile is the phase that takes more of its time than of
theirs. Nothing is said of a pause of all, of a start, of a pipeline, or if two witnesses contradict each other.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from remote_agent.base.clocks import Clock
from remote_agent.coordinator import inputs
from remote_agent.coordinator import state as s
from remote_agent.coordinator.status import document
from remote_agent.diagnose import slow
from remote_agent.diagnose.hang.stragglers import Stragglers
from remote_agent.diagnose.slow import Shares, find_slowness, is_pause, shares_of
from remote_agent.wire.documents import WINDOW_S, RankWindow
from supervisor.wording.events import event_text
from supervisor.wording.slow import Times, slow_line
from supervisor.wording.status import status_tail
from tests.fast.test_stalls import IDLE
from tests.fast.waiting import some
from tests.fast.world import World, spec

NODES = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
TWO = {0: "n1", 1: "n2"}
STEP = {"forward": 0.3, "backward": 0.4, "optimizer": 0.05, "input": 0.1}
LINES = {"input": ("data.py", "read", 20), "script": ("train.py", "tokenize", 52),
         "checkpoint": ("train.py", "save", 81),
         "logging": ("train.py", "emit", 9), "eval": ("train.py", "evaluate", 40)}  # fmt: skip


def window(more: dict[str, float] | None = None, busy: float = 1.0, **facts: Any) -> Any:
    """Return a window of 10 s: these shares, and the rest of the time in waiting; busy: of what is not waiting."""
    shares = {**STEP, **(more or {})}
    shares = {**shares, "wait": shares.get("wait", max(0.0, 1 - sum(shares.values())))}
    phases = {
        name: (WINDOW_S * each, WINDOW_S * each * (0.0 if name == "wait" else busy)) for name, each in shares.items()
    }
    sites = [(name, *LINES[name], WINDOW_S * shares[name]) for name in shares if name in LINES]
    found: dict[str, Any] = {"looks": 190, "phases": phases, "disk_s": 0.0, "delay_s": 0.0, "throttled_s": 0.0,
                  "faults": 0, "cuda": False, "taken": None, "sites": sites, "links": []}  # fmt: skip
    return {**found, **facts}


def shares(windows: dict[int, RankWindow]) -> dict[int, Shares]:
    return {rank: some(shares_of(one, WINDOW_S)) for rank, one in windows.items()}


FAST = window({"forward": 0.1, "backward": 0.15, "input": 0.03})
BUSIER: Any = {"name": "stress-ng", "pid": 4711, "share": 0.9}


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (window({"input": 0.5, "forward": 0.1, "backward": 0.15}), "loading data, data.py:20 in read"),
        (window({"input": 0.5, "forward": 0.1, "backward": 0.15}, busy=0.1),
         "loading data, data.py:20 in read, where it sleeps"),
        (window({"script": 0.4, "forward": 0.1, "backward": 0.15}),
         "train.py:52 in tokenize; it computes more, the host shows no fault"),
        (window({"checkpoint": 0.4, "forward": 0.1, "backward": 0.15}), "saving a checkpoint, train.py:81 in save"),
        (window({"checkpoint": 0.4, "forward": 0.1, "backward": 0.15}, busy=0.9, disk_s=3.0),
         "saving a checkpoint, train.py:81 in save; it waits for the disk 30% of the time"),
        (window({"logging": 0.4, "forward": 0.1, "backward": 0.15}), "logging, train.py:9 in emit"),
        (window({"eval": 0.4, "forward": 0.1, "backward": 0.15}), "evaluating, train.py:40 in evaluate"),
        (window({"forward": 0.35, "backward": 0.45}),
         "forward and backward take longer; it computes more, the host shows no fault"),
        (window({"forward": 0.35, "backward": 0.45}, busy=0.5, delay_s=4.0, taken=BUSIER),
         "computing; its processors are taken by stress-ng (pid 4711)"),
        (window({"forward": 0.35, "backward": 0.45}, busy=0.5, delay_s=4.0), "computing; it waits for a processor"),
        (window({"forward": 0.35, "backward": 0.45}, busy=0.5, throttled_s=6.0, delay_s=6.0),
         "computing; its cgroup throttles it 60% of the time"),
        (window({"forward": 0.14, "backward": 0.2, "input": 0.18, "optimizer": 0.07, "script": 0.16}, busy=0.5),
         "all its work takes longer"),
        (window({"forward": 0.35, "backward": 0.45}, busy=0.5, faults=900),
         "computing; its memory is read back from swap or disk"),
    ],
)  # fmt: skip
def test_a_slow_rank_is_named_with_what_it_does_and_why(own: RankWindow, text: str) -> None:
    found = some(find_slowness(shares({0: FAST, 1: own}), TWO))
    assert (found.ranks, found.node) == ((1,), "n2")
    assert found.text().partition(": ")[2] == text


def test_a_whole_node_is_named_as_one() -> None:
    late = window({"script": 0.4, "forward": 0.1, "backward": 0.15})
    found = some(find_slowness(shares({0: FAST, 1: FAST, 2: late, 3: late}), NODES))
    assert (found.ranks, found.node) == ((2, 3), "n2")
    line = slow_line(found.to_json("2026-11-29T12:00:00.000Z"))
    assert line.startswith("slow: n2: the others wait ")
    assert "for its ranks 2-3: train.py:52 in tokenize" in line
    alone = some(find_slowness(shares({0: FAST, 1: FAST, 2: FAST, 3: late}), NODES))
    assert (alone.ranks, alone.node) == ((3,), "n2")


def test_small_differences_are_not_named() -> None:
    a_little = window({"forward": 0.16, "backward": 0.2, "input": 0.03})
    assert find_slowness(shares({0: FAST, 1: a_little}), TWO) is None
    # 20 %: enough for a place in the script, not for computing.
    more = {"forward": 0.15, "backward": 0.3, "input": 0.03}
    assert find_slowness(shares({0: FAST, 1: window(more, busy=0.5)}), TWO) is None
    assert (
        find_slowness(shares({0: FAST, 1: window({"forward": 0.1, "backward": 0.15, "input": 0.23})}), TWO) is not None
    )
    # A rank that was slow before stays so until half of the difference is gone.
    known = find_slowness(shares({0: FAST, 1: window(more, busy=0.5)}), TWO, known=(1,))
    assert some(known).ranks == (1,)


def test_a_jitter_of_a_third_names_nobody() -> None:
    dice = random.Random(5)
    for _ in range(200):
        ranks = {}
        for rank in NODES:
            own = {name: share * dice.uniform(0.7, 1.3) / 2 for name, share in STEP.items()}
            ranks[rank] = window({**STEP, **own})
        assert find_slowness(shares(ranks), NODES) is None


def test_what_starts_is_suspended_or_was_hardly_seen_is_not_compared() -> None:
    late: Any = window({"script": 0.4, "forward": 0.1, "backward": 0.15})
    assert find_slowness(shares({0: FAST, 1: late}), TWO) is not None
    assert find_slowness(shares({0: FAST, 1: window({"compile": 0.2, "forward": 0.1, "backward": 0.15})}), TWO) is None
    assert find_slowness(shares({0: FAST, 1: window({"start": 0.2, "forward": 0.1, "backward": 0.15})}), TWO) is None
    assert (
        find_slowness(shares({0: FAST, 1: window({"script": 0.4, "forward": 0.1, "backward": 0.15}, looks=10)}), TWO)
        is None
    )
    half: Any = {**late, "phases": {name: (0.4 * wall, cpu) for name, (wall, cpu) in late["phases"].items()}}
    assert shares_of(half, WINDOW_S) is None
    # One rank saves a checkpoint, and nobody does anything else.
    none = dict.fromkeys(STEP, 0.0)
    saves = window({"checkpoint": 1.0, **none})
    assert is_pause(shares({0: window(none), 1: saves}))
    assert not is_pause(shares({0: FAST, 1: late}))
    assert not is_pause(shares({0: window({**none, "forward": 0.005}), 1: saves}))
    # All wait: what they send takes so long.
    assert not is_pause(shares(dict.fromkeys(TWO, window(none))))


def test_of_a_pipeline_only_ranks_of_one_stage_are_compared() -> None:
    first, second = window({"p2p": 0.5, "forward": 0.1, "backward": 0.2, "input": 0.0}), window({"p2p": 0.06})
    stages = {0: first, 1: first, 2: second, 3: second}
    assert find_slowness(shares(stages), NODES) is None
    late = window({"p2p": 0.06, "script": 0.3, "forward": 0.2, "backward": 0.3})
    waits = window({"p2p": 0.06, "forward": 0.2, "backward": 0.3})
    assert find_slowness(shares({**stages, 2: waits, 3: late}), NODES) is None
    found = some(find_slowness(shares({**stages, 2: waits, 3: late}), NODES, stages=[(0, 1), (2, 3)]))
    assert found.ranks == (3,)


def test_two_witnesses_that_contradict_each_other_name_nobody() -> None:
    late = shares({0: FAST, 1: window({"script": 0.4, "forward": 0.1, "backward": 0.15})})
    assert find_slowness(late, TWO, last=Stragglers((0,), 0.6)) is None
    assert find_slowness(late, TWO, last=Stragglers((1,), 0.6)) is not None


def test_with_gpus_the_order_of_arrival_names_the_rank_and_its_host_the_phase() -> None:
    fast = window({"forward": 0.1, "backward": 0.15, "input": 0.03}, cuda=True)
    late = window({"input": 0.5, "forward": 0.1, "backward": 0.15}, cuda=True)
    both = shares({0: fast, 1: late})
    assert find_slowness(both, TWO) is None
    found = some(find_slowness(both, TWO, last=Stragglers((1,), 0.4)))
    assert (found.ranks, found.phase, found.share) == ((1,), "input", 0.4)
    alike = shares({0: fast, 1: fast})
    assert some(find_slowness(alike, TWO, last=Stragglers((1,), 0.4))).text().endswith("its GPU takes longer")


THREE = {0: "n1", 1: "n2", 2: "n3"}
WAITING = {"forward": 0.05, "backward": 0.05, "optimizer": 0.02, "input": 0.0}


def linked(speeds: dict[tuple[int, int], float], wait: float = 0.88, waits: float = 1.0, **facts: Any) -> Any:
    """Return windows of ranks that wait so long and send at these Gbit/s, from host to host."""
    own = {**WAITING, "script": 1 - wait - sum(WAITING.values())}
    return shares(
        {
            rank: window(own, links=[(f"10.0.0.{rank}", f"10.0.0.{to}", speed, waits if 2 in (rank, to) else 0.0)
                                     for (at, to), speed in speeds.items() if at == rank], **facts)
            for rank in THREE
        }
    )  # fmt: skip


RING = {(0, 1): 6.0, (1, 2): 0.18, (2, 0): 0.16}


def test_the_network_of_one_host_is_named_if_only_its_connections_are_slow() -> None:
    found = some(find_slowness(linked(RING), THREE))
    assert (found.ranks, found.node, found.phase) == ((), "n3", "network")
    line = slow_line(found.to_json("2026-11-29T12:00:00.000Z"))
    carried = "connections from and to it carry 0.18 Gbit/s, others 6"
    assert line == f"slow: n3: its network: {carried}; every rank waits 88% of the time"


@pytest.mark.parametrize(
    ("case", "found"),
    [
        ("they hardly wait", linked(RING, wait=0.6)),
        ("all are alike", linked({**RING, (0, 1): 0.2})),
        ("nothing waits to be sent", linked(RING, waits=0.2)),
        ("only one connection of it is known", linked({(0, 1): 6.0, (1, 2): 0.18})),
        ("one of its connections is fast", linked({**RING, (2, 0): 6.0})),
        ("no others are known", linked({(1, 2): 0.18, (2, 0): 0.16})),
        ("a GPU is used, whose waits the main thread does not show", linked(RING, cuda=True)),
    ],
)
def test_otherwise_no_network_is_named(case: str, found: dict[int, Shares]) -> None:
    assert find_slowness(found, THREE) is None, case


def test_what_limits_all_is_named_without_a_rank() -> None:
    hungry = window({"input": 0.7, "forward": 0.1, "backward": 0.1, "optimizer": 0.02})
    found = some(find_slowness(shares(dict.fromkeys(NODES, hungry)), NODES))
    assert (found.ranks, found.phase) == ((), "input")
    assert found.text() == "every rank spends 70% of its time in the data loader (data.py:20 in read)"
    # An evaluation of all, and a script that computes without modules, are no fault.
    assert (
        find_slowness(shares(dict.fromkeys(NODES, window({"eval": 0.8, **dict.fromkeys(STEP, 0.04)}))), NODES) is None
    )
    assert (
        find_slowness(shares(dict.fromkeys(NODES, window({"script": 0.9, **dict.fromkeys(STEP, 0.02)}))), NODES) is None
    )
    assert find_slowness(shares(dict.fromkeys((0, 1, 2), hungry)), NODES) is None


# The coordinator: when ranks are sampled, and what follows from their windows.


class Sampled(World):
    """Two nodes with a rank each, whose windows arrive right after their end."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(spec(2, nproc=1, **changes))
        self.ranks: dict[int, RankWindow] = {0: window(), 1: window()}
        self.gpu_use: float | None = None
        # No window is number 0.
        self.wall_ns = 10**13
        self.sampled: list[tuple[int, int, bool]] = []
        """When bouts were ordered (window), until when, whether as a routine."""
        for number in range(2):
            self.feed(inputs.Grouping(f"n{number + 1}", 0, number))
            self.feed(inputs.Grouped(f"n{number + 1}", 0, number, 0.1, 0.0))

    def said(self, kind: str) -> list[s.Emit]:
        return [event for event in self.events if event.type == kind]

    def run(self, windows: int) -> None:
        """Let so many windows pass."""
        for _ in range(windows):
            number = int(self.wall_ns / 1e9 / WINDOW_S)
            for _ in range(int(WINDOW_S)):
                self.now += 1
                self.wall_ns += 10**9
                for name in self.machines:
                    self.feed(inputs.Heartbeat(name, 0.0, stepped=True, moved=True, gpu_use=self.gpu_use))
                self.feed(inputs.Tick())
                for name, orders in self.orders.items():
                    for order in orders:
                        if order.op == "sample" and name == "n1":
                            at = int(self.wall_ns / 1e9 / WINDOW_S)
                            self.sampled.append((at, order.args["until"], order.args["routine"]))
                    orders.clear()
            if any(at <= number < until for at, until, _ in self.sampled):
                for rank, one in self.ranks.items():
                    self.feed(inputs.Windows(f"n{rank + 1}", 0, number, {rank: one}))
            self.feed(inputs.Tick())


LATE = window({"script": 0.4, "forward": 0.1, "backward": 0.15})


def test_a_slow_rank_is_said_once_and_so_is_its_end() -> None:
    world = Sampled(hang_after=0.0)
    world.run(2)
    world.ranks = {0: FAST, 1: LATE}
    world.run(2)
    assert world.said("slow") == []
    world.run(1)
    (event,) = world.said("slow")
    assert (event.node, event.rank, event.detail["phase"]) == ("n2", 1, "script")
    assert "train.py:52 in tokenize" in event_text(event.record(1, "2026-11-29T12:00:00.000Z"))
    status = document(world.state, {}, "n1")
    assert [one["ranks"] for one in status["slow"]] == [[1]]
    assert [(one["kind"], one["rank"]) for one in status["warnings"]] == [("slow", 1)]
    assert [line for line in status_tail(status) if "slow" in line] == [slow_line(status["slow"][0])]
    world.run(12)
    assert len(world.said("slow")) == 1
    world.ranks = {0: window(), 1: window()}
    world.run(30)
    assert (len(world.said("slow")), len(world.said("slow_over"))) == (1, 1)
    assert document(world.state, {}, "n1")["slow"] == []


def test_the_worst_rank_is_said_and_one_checkpoint_is_not() -> None:
    none = dict.fromkeys(STEP, 0.0)
    world = Sampled(hang_after=0.0)
    world.run(2)
    world.ranks = {0: window(none), 1: window({**none, "checkpoint": 1.0})}
    world.run(8)
    world.ranks = {0: window(), 1: window()}
    world.run(2)
    assert world.said("slow") == []
    # A step of 10 ms every 4 s.
    world = Sampled(hang_after=0.0)
    world.ranks = {0: window({**none, "forward": 0.005}), 1: window({**none, "forward": 0.005, "script": 0.99})}
    world.run(3)
    (event,) = world.said("slow")
    assert (event.rank, event.detail["phase"], event.detail["share"]) == (1, "script", 0.99)


def test_a_slowness_that_lasts_two_windows_is_not_said() -> None:
    world = Sampled(hang_after=0.0)
    for _ in range(3):
        world.ranks = {0: FAST, 1: LATE}
        world.run(2)
        world.ranks = {0: window(), 1: window()}
        world.run(1)
    assert world.said("slow") == []


def test_a_healthy_job_is_sampled_a_sixth_of_its_time() -> None:
    world = Sampled(hang_after=0.0)
    world.run(360)
    first, *later = world.sampled
    assert (first[1] - first[0], first[2]) == (12, True)
    assert all(routine for _, _, routine in world.sampled)
    assert 50 <= sum(until - at for at, until, _ in later) <= 60
    assert (world.said("slow"), world.said("incident")) == ([], [])


def test_what_looks_slow_is_sampled_without_a_break() -> None:
    world = Sampled(hang_after=0.0)
    world.run(30)
    world.ranks = {0: FAST, 1: LATE}
    # A routine bout sees it; by then at most two minutes have passed.
    world.run(18)
    assert len(world.said("slow")) == 1
    assert any(not routine for _, _, routine in world.sampled)


def test_who_arrives_last_gives_reason_to_look_closer() -> None:
    world = Sampled(hang_after=0.0)
    world.run(20)
    last = {0: came(0.1), 1: came(0.2)}
    asked = dataclasses.replace(world.state.watch, asked=frozenset(world.machines))
    world.state = dataclasses.replace(world.state, watch=asked)
    for rank, pulse in last.items():
        world.feed(inputs.Pulses(f"n{rank + 1}", 0, {rank: pulse}))
    world.run(1)
    assert not world.sampled[-1][2]
    assert world.said("slow") == []


def came(needs_s: float) -> Any:
    """Return the pulse of a rank that reaches each of 40 collectives so long after the one before was done."""
    later = [int(1e6 * (0.2 * number + needs_s)) for number in range(40)]
    reached = {"first": 1, "t_us": later[0], "later_us": [each - later[0] for each in later]}
    return {**IDLE, "groups": {"0": {"ranks": None, "last": 40, "came": reached}}, "clock": Clock(0, 0)}


def test_gpus_that_idle_for_ten_minutes_are_said_once_and_so_is_their_end() -> None:
    world = Sampled(hang_after=0.0)
    world.gpu_use = 38.0
    world.run(55)
    assert world.said("slow") == []
    world.run(120)
    (event,) = world.said("slow")
    assert (event.node, event.rank, event.detail["limits"]) == (None, None, "gpus_idle")
    assert event.detail["message"] == "the GPUs are idle 62% of the time"
    world.gpu_use = 80.0
    world.run(125)
    assert (len(world.said("slow")), len(world.said("slow_over"))) == (1, 1)
    # Whom the others wait for says more.
    world.gpu_use = 38.0
    world.run(130)
    world.ranks = {0: FAST, 1: LATE}
    world.run(130)
    assert [event.detail["limits"] for event in world.said("slow")] == ["gpus_idle", "gpus_idle", None]
    assert len(world.said("slow_over")) == 2


def test_busy_gpus_are_not_said() -> None:
    world = Sampled(hang_after=0.0)
    for use in (90.0, 20.0) * 8:
        world.gpu_use = use
        world.run(10)
    assert world.said("slow") == []


def test_with_slow_false_nothing_is_ordered() -> None:
    world = Sampled(hang_after=0.0, slow=False)
    world.run(30)
    assert world.sampled == []
    assert document(world.state, {}, "n1")["sampling"] == {"state": "off", "reason": "--no-slow, or slow = false"}


def test_a_node_says_nothing_of_the_ranks_of_others() -> None:
    world = Sampled(hang_after=0.0)
    world.ranks = {}
    world.run(1)
    for _ in range(7):
        world.feed(inputs.Windows("n1", 0, int(world.wall_ns / 1e9 / WINDOW_S), {0: FAST, 1: LATE}))
        world.run(1)
    assert world.said("slow") == []


def test_why_splits_the_time_of_all_ranks_or_of_one_beside_the_others() -> None:
    both = {"0": {"7": window(), "8": window()}, "1": {"7": window(), "8": window()}}
    healthy = Times({"windows": both, "nodes": {"0": "n1", "1": "n2"}, "unreachable": {}})
    assert healthy.lines(None) == [
        "no rank waits much less than the others",
        "",
        "2 ranks, 20 s                    all ranks",
        "  forward, backward, optimizer         75%",
        "  waiting for other ranks              15%",
        "  loading data                         10%   data.py:20 in read",
    ]
    apart = {"0": {"7": FAST}, "1": {"7": LATE, "8": LATE}}
    slowed = Times({"windows": apart, "nodes": {"0": "n1", "1": "n2"}, "unreachable": {"2": "n3 cannot be reached"}})
    lines = slowed.lines(None)
    assert lines[0].startswith("slow: rank 1 (n2): the others wait ")
    assert lines[2].split() == ["2", "ranks,", "10", "s", "rank", "1", "the", "others"]
    assert lines[-1] == "rank 2: n3 cannot be reached"
    assert slowed.lines([1, 7])[-1] == "rank 7: it does not live"
    assert slowed.to_json([1])["off"] == {}
    assert slowed.to_json(None)["slow"][0]["since"] == "1970-01-01T00:01:10.000Z"  # type: ignore[index]
    assert [*slowed.to_json(None)["ranks"]] == ["0", "1"]  # type: ignore[misc]


def test_the_words_of_every_phase_are_known() -> None:
    assert {*slow.HOST, slow.COMPUTE, slow.WAIT} - {"script"} <= slow.DOING.keys()
