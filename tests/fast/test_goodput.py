"""What of a job's time counts, and what the rest was spent on."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.wording.goodput import Goodput, goodput, redone_s, start_waits
from supervisor.wording.values import local_time

BEGIN = "2026-11-20T10:00:00.000Z"


def at(second: float) -> str:
    return f"2026-11-20T10:{int(second) // 60:02d}:{second % 60:06.3f}Z"


def event(second: float, kind: str, generation: int = 0, **detail: Any) -> Any:
    return {"time": at(second), "type": kind, "generation": generation, "detail": detail}


def now(second: float) -> float:
    moment = local_time(at(second))
    assert moment is not None
    return moment.timestamp()


START = [
    event(0, "generation_started"),
    event(1, "generation_running", spawn=200.0, main=800.0),
    event(6, "process_group_up", imports=4500.0, process_group=500.0),
    event(7, "first_step", first_step=1000.0),
]
RESTART = [
    event(60, "generation_stopped", cause="failure"),
    event(60, "generation_started", 1),
    event(61, "generation_running", 1, detect=100.0, stop=23_900.0, rendezvous=0.0, spawn=1000.0),
    event(73, "first_step", 1, first_step=2000.0, imports=10_000.0),
]


def test_a_start_and_a_restart_cost_their_phases_and_the_steps_that_are_made_again() -> None:
    found = goodput([*START, *RESTART], now(200), redone_s=2.0)
    assert found is not None
    assert found.total_s == 200
    assert found.lost == {"start": 2.0, "import": 15.0, "first step": 3.0, "stop": 24.0, "redo": 2.0}
    assert found.share == pytest.approx(0.77)
    assert found.text() == "goodput 77 %, 46 s lost: stop 24, import 15, first step 3, start 2, redo 2"
    assert found.text(details=False) == "goodput 77 %"


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
    found = goodput(events, now(second))
    assert found is not None
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
