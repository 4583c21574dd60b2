"""What the start of a group is spent on: from the reports of its ranks to the journal, the status and the texts."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest

from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator.status import document
from remote_agent.history.pyramid import Span
from remote_agent.logs.progress import StepReader
from supervisor.cli.status import contract
from supervisor.history import Series
from supervisor.wording.events import phases_by_generation, start_text
from supervisor.wording.goodput import Goodput, Measured, goodput, measure, redone_s, start_waits
from supervisor.wording.plan import plan
from supervisor.wording.status import status_tail
from supervisor.wording.values import local_time
from tests.fast.waiting import some
from tests.fast.world import World, spec


def grouped(world: World, rank: int, took: float, age: float = 0.0) -> None:
    """A rank's init_process_group has returned."""
    world.feed(inputs.Grouped(f"n{rank // 2 + 1}", world.state.generation, rank, took, age))


def restarted() -> World:
    """A group of four ranks that runs again half a second after a failure was seen."""
    world = World(spec(2))
    world.now = 100.0
    world.fail(1)
    world.deliver("report", "n1")
    world.now = 100.5
    world.settle()
    world.now = 102.0
    return world


def test_each_phase_ends_with_the_last_rank_and_the_first_step_of_any() -> None:
    world = restarted()
    world.now = 105.0
    for rank, (took, age) in enumerate([(2.0, 0.0), (0.5, 0.0), (0.2, 0.0)]):
        grouped(world, rank, took, age)
    assert "process_group_up" not in world.types()
    # Its report was late: it called at 104.4 and had the group at 105.2.
    world.now = 106.0
    grouped(world, 3, 0.8, age=0.8)
    up = world.last("process_group_up")
    running = world.last("generation_running").detail["main"] / 1000 + 100.5
    assert up.detail["imports"] == pytest.approx((104.8 - running) * 1000, abs=1)
    assert up.detail["process_group"] == pytest.approx(400, abs=1)
    world.now = 107.0
    world.feed(inputs.Heartbeat("n2", stepped=True, first_step_age=0.7))
    world.feed(inputs.Heartbeat("n1", stepped=True, first_step_age=0.1))
    assert world.last("first_step").detail == {"first_step": pytest.approx(1100, abs=1)}
    assert world.types().count("first_step") == world.types().count("process_group_up") == 1


def test_the_journal_and_the_status_have_the_phases_of_the_newest_start() -> None:
    world = restarted()
    for rank in range(4):
        grouped(world, rank, 0.1)
    world.feed(inputs.Heartbeat("n1", first_step_age=0.0))
    status = document(world.state, {}, "n1")
    names = ["detect", "stop", "rendezvous", "spawn", "main", "imports", "process_group", "first_step"]
    assert list(status["phases"]) == names
    assert contract(status)["phases"] == status["phases"]
    nodes: Any = contract(status)["nodes"]
    assert {"start", "standby"} <= set(nodes[0])
    assert document(replay.fold(world.state.spec, world.records()), {}, "n1")["phases"] == status["phases"]
    assert phases_by_generation(world.records())[1] == status["phases"]
    world.fail(0)
    world.settle()
    assert list(document(world.state, {}, "n1")["phases"]) == names[:5], "what the group before has shown is over"
    assert list(phases_by_generation(world.records())) == [0, 1, 2]


def test_what_ranks_do_not_show_is_left_out() -> None:
    world = restarted()
    grouped(world, 0, 0.1)
    world.now = 110.0
    world.feed(inputs.Heartbeat("n1", first_step_age=2.0))
    begun = world.state.marks["running"]
    assert world.last("first_step").detail == {"first_step": pytest.approx((108.0 - begun) * 1000, abs=1)}
    for rank in range(1, 4):
        grouped(world, rank, 0.1)
    assert "process_group_up" not in world.types(), "a step was made before"
    stopped = World(spec(1))
    stopped.feed(inputs.Restart("me"))
    stopped.feed(inputs.Heartbeat("n1", first_step_age=0.0))
    assert "first_step" not in stopped.types(), "it belongs to the group that is stopped"


def test_the_texts_name_what_was_reached() -> None:
    world = restarted()
    status = document(world.state, {}, "n1")
    assert start_text(1, {}) == ""
    (line,) = (line for line in status_tail(status) if line.startswith("restart "))
    assert line.startswith("restart 0.50 s to main: stop 0.50")
    assert start_text(0, {"main": 500.0, "imports": 3000.0}) == "start 3.5 s to init_process_group"
    assert start_text(1, {"main": 500.0, "process_group": 1.0, "first_step": 1.0}) == "restart 0.50 s to first step"
    for rank in range(4):
        grouped(world, rank, 0.1)
    world.now += 1.0
    world.feed(inputs.Heartbeat("n1", first_step_age=0.0))
    total = sum(value for name, value in world.state.phases.items() if name != "detect") / 1000
    facts = dict(plan("restart", [], document(world.state, {}, "n1"), world.records()).facts)
    assert facts["Downtime"] == f"about {total:.1f} s (from 1 earlier restart)"


@pytest.mark.parametrize(
    ("texts", "first"),
    [
        ([b"step 0 loss 1.0\n", b"step 1 loss 0.9\n"], 0),
        ([b"resumed from snapshot.pt: step=20\n", b"step=21 loss 1.0\n"], 1),
        ([b"rank 0 starts at step 5\n", b"quiet\n"], None),
        ([b"epoch 1\n", b"epoch 2\n"], None),
        # A bar: of a data set, then of the training, which shows itself by a loss.
        ([b"\rMap:  50%|##  | 5/10 [00:01<00:01]", b"\rMap: 100%|####| 10/10 [00:01<00:00]\n", b"loading\n"], None),
        ([b"\r  0%|    | 0/9 [00:00<?]", b"\r 11%|#   | 1/9 [00:01<00:01]", b"{'loss': 2.5}\n"], 1),
        ([b"\rMap: 100%|####| 9/9 [00:01<00:00]\n", b"\r 50%|##  | 1/2 [00:01<00:01]", b"loss=2.5\n"], 1),
    ],
)
def test_the_first_step_is_read_from_what_a_rank_prints(texts: list[bytes], first: int | None) -> None:
    reader = StepReader()
    for number, text in enumerate(texts):
        reader.feed("stderr", text, number + 1)
    assert reader.first_step_ns == (None if first is None else first + 1)


# What of a job's time counts, and what the rest was spent on.


BEGIN = "2026-11-20T10:00:00.000Z"


def at(second: float) -> str:
    return f"2026-11-20T10:{int(second) // 60:02d}:{second % 60:06.3f}Z"


def event(second: float, kind: str, generation: int = 0, **detail: Any) -> Any:
    return {"time": at(second), "type": kind, "generation": generation, "detail": detail}


def now(second: float) -> float:
    moment = some(local_time(at(second)))
    return moment.timestamp()


START = [
    event(0, "generation_started"),
    event(1, "generation_running", spawn=200.0, main=800.0, world_size=8),
    event(6, "process_group_up", imports=4500.0, process_group=500.0),
    event(7, "first_step", first_step=1000.0),
]
RESTART = [
    event(60, "generation_stopped", cause="failure"),
    event(60, "generation_started", 1),
    event(61, "generation_running", 1, detect=100.0, stop=23_900.0, rendezvous=0.0, spawn=1000.0, world_size=4),
    event(73, "first_step", 1, first_step=2000.0, imports=10_000.0),
]


def test_a_start_and_a_restart_cost_their_phases_and_the_steps_that_are_made_again() -> None:
    found = some(goodput([*START, *RESTART], now(200), Measured(redone_s=2.0)))
    assert found.total_s == 200
    assert found.lost == {"start": 2.0, "import": 15.0, "first step": 3.0, "stop": 24.0, "redo": 2.0}
    assert found.share == pytest.approx(0.77)
    assert found.text() == "goodput 77 %, 46 s lost: stop 24, import 15, first step 3, start 2, redo 2"
    assert found.text(details=False) == "goodput 77 %"


def test_the_hours_of_all_devices_are_split() -> None:
    slow: Any = {"ranks": [1], "node": "n1", "phase": "script", "share": 0.5}
    events = [*START, event(20, "slow", **slow), event(40, "slow_over"), *RESTART]
    found = some(goodput(events, now(241), Measured(redone_s=2.0, loading=0.25, saving=0.1)))
    # 60 s of 8 ranks, 180 s of 4. 46 s are lost, and 7 of 8 ranks waited for the slow one in half of 20 s.
    assert found.devices == pytest.approx((60 * 8 + 180 * 4) / 240)
    trained = 241 - 46 - 8.75
    assert found.spent == pytest.approx(
        {"training": 0.65 * trained, "loading data": 0.25 * trained, "checkpoints": 0.1 * trained,
         "waiting for a slow rank": 8.75, "start": 7.0, "restarts": 37.0, "steps made again": 2.0}
    )  # fmt: skip
    assert sum(found.hours().values()) == pytest.approx(241 * 5 / 3600)
    gpus: Any = {"nodes": [{"vitals": {"gpus": [{"index": 0}]}}]}
    assert found.hours_text(gpus) == (
        "0.335 GPU hours: training 50 %, loading data 19 %, checkpoints 8 %, waiting for a slow rank 4 %, start 3 %, "
        "restarts 15 %, steps made again 1 %"
    )
    assert " rank hours: " in found.hours_text({"nodes": [{"vitals": None}]})  # type: ignore[typeddict-item]


def test_a_slowness_that_is_none_of_a_rank_or_counts_elsewhere_is_no_wait() -> None:
    details: list[Any] = [
        {"ranks": [], "node": None, "phase": "input", "share": 0.7},
        {"ranks": [0], "node": "n1", "phase": "checkpoint", "share": 0.7},
    ]
    for detail in details:
        found = some(goodput([*START, event(20, "slow", **detail)], now(100)))
        assert "waiting for a slow rank" not in found.spent
    ongoing: Any = {"ranks": [], "node": "n3", "phase": "network", "share": 0.9}
    stopped = event(40, "generation_stopped", cause="restart")
    found = some(goodput([*START, event(20, "slow", **ongoing), stopped], now(100)))
    assert found.spent["waiting for a slow rank"] == pytest.approx(18.0)


def spans(kind: str, rows: list[list[float]]) -> dict[tuple[str, int], Span]:
    return {(kind, rank): Span(2, 0, *(array("f", row) for _ in range(3))) for rank, row in enumerate(rows)}


def test_what_was_sampled_of_the_time_counts_whatever_was_not() -> None:
    nan = math.nan
    ranks = {
        **spans("input", [[0.2, nan, 0.4], [0.4, nan, 0.6], [0.9, nan, nan]]),
        **spans("checkpoint", [[0.0, nan, 0.5], [0.0, nan, 0.0]]),
    }
    found = measure(START, Series(2, 0, 3, ranks, {}))
    assert [found.loading, found.saving] == pytest.approx([(0.4 + 0.5) / 2, 0.25])
    assert measure(START, None) == Measured()


def test_nothing_is_said_of_a_job_whose_steps_nobody_knows() -> None:
    assert goodput([], now(9)) is None
    assert goodput(START[:3], now(9)) is None


def test_a_hang_costs_until_it_is_over_and_a_group_that_is_down_until_another_one_runs() -> None:
    hang = event(100, "incident", category="hang", ongoing=True)
    assert _lost([*START, hang], 130)["hang"] == 30
    assert _lost([*START, hang, event(110, "hang_over")], 130)["hang"] == 10
    stopped = event(120, "generation_stopped", cause="restart")
    assert _lost([*START, hang, stopped], 130)["hang"] == 20
    assert _lost([*START, stopped], 130)["restart"] == 10
    assert "restart" not in _lost([*START, *RESTART], 130)
    # Until its first step a restart costs what it has cost up to now, not all of it afterwards.
    assert _lost([*START, *RESTART[:3]], 70)["import"] == 5 + 9
    grouped = event(70, "process_group_up", 1, imports=9000.0)
    assert _lost([*START, *RESTART[:3], grouped], 72)["first step"] == 1 + 2
    # A failure is no hang.
    assert "hang" not in _lost([*START, event(100, "incident", category="python")], 130)


def test_a_start_waits_for_its_imports_and_then_for_its_first_step() -> None:
    assert start_waits(START[:1], now(3)) == "imports: 3 s"
    assert start_waits(START[:2], now(5)) == "imports: 4 s"
    assert start_waits(START[:3], now(8)) == "first step: 2 s"
    assert start_waits(START, now(60)) == start_waits([], now(60)) == ""
    assert start_waits([*START, *RESTART[:3]], now(70)) == "imports: 9 s"
    assert start_waits([*START, *RESTART[:2]], now(61)) == ""


def test_after_the_end_nothing_grows() -> None:
    ended = [*START, event(50, "job_succeeded")]
    assert goodput(ended, now(51)) == goodput(ended, now(900))


def _lost(events: list[Any], second: float) -> dict[str, float]:
    found = some(goodput(events, now(second)))
    return found.lost


def test_a_job_without_loss_says_so_and_no_time_is_no_division() -> None:
    assert Goodput(100.0, {}).text() == "goodput 100 %"
    assert Goodput(0.0, {}).share == 1.0
    assert Goodput(1.0, {"stop": 9.0}).share == 0.0


def test_steps_before_a_restart_that_come_again_are_made_again() -> None:
    steps = [(2.0, 1.0, 10.0), (4.0, 11.0, 20.0), (6.0, 15.0, 18.0), (8.0, 19.0, 30.0)]
    assert redone_s(steps, [5.0], 0.5) == 2.5
    assert redone_s(steps, [], 0.5) == 0.0
    # Groups that made no step made none again.
    assert redone_s(steps, [4.5, 5.0, 5.5], 0.5) == 2.5
    # The script went on where it was, or nothing is known of one side.
    assert redone_s(steps, [7.0], 0.5) == redone_s(steps, [1.0, 9.0], 0.5) == 0.0
