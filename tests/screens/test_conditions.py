"""The two rows above every screen say what is true now: the condition of the job, a hang while it lasts and after.

In: snapshots of a job that hangs, heals, degrades, stops. Out: the rows as text; durations that count.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from supervisor.tui import model, times
from supervisor.tui.looks import Glyphs
from supervisor.tui.rows.spans import text_of
from supervisor.tui.rows.tables import legend
from supervisor.tui.terminal import notice_sequence, title_sequence
from supervisor.tui.widgets.bars import alert_rows
from tests.screens import recorded
from tests.screens.conftest import NOW
from tests.screens.screens import press, running
from tests.screens.screens import text_of as screen_text

HANG: Any = {
    "id": 1, "generation": 0, "time": "2026-11-20T10:45:08.000Z", "category": "hang_no_output", "scope": "one_rank",
    "culprit_ranks": [3], "culprit_node": "n2", "confidence": "established",
    "summary": "rank 3 (n2): stopped by a signal (SIGSTOP, SIGTSTP or a debugger); ranks 0-2 waiting in all_reduce 44",
    "evidence": [], "traceback": None, "exit": {"code": None, "signal": None}, "hint": "kill -CONT resumes it",
    "victims": [],
    "missing": {"collective": "all_reduce", "seq": 44, "waiting": [0, 1, 2], "missing": [3], "stacks": {}},
    "ongoing": True, "times_out_at": "2026-11-20T11:14:47.000Z", "restarts_at": None,
    "state": "open", "ended_at": None, "over": None,
}  # fmt: skip
HEALED = {
    **HANG, "ongoing": False, "state": "healed", "ended_at": "2026-11-20T10:45:28.000Z",
    "over": "training resumed after 20 s",
}  # fmt: skip


def job(condition: str, incident: Any | None = None, **more: Any) -> recorded.RecordedSession:
    session = recorded.load("running_2x2")
    session.status.update(condition=condition, incident=incident, **more)
    session.incidents = [incident] if incident else []
    return session


def rows(session: recorded.RecordedSession, width: int = 160, **options: Any) -> list[str]:
    return [text_of(row) for row in alert_rows(model.take(session), 0.2, width, Glyphs(), **options)]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the clock of the screens go forward, from 32 s after the hang began."""

    def pass_time(seconds: float) -> None:
        monkeypatch.setattr(times, "now", lambda: NOW + 20 + seconds)

    return pass_time


@pytest.mark.parametrize(
    ("condition", "state", "word"),
    [
        ("launching", "starting", "~ LAUNCHING"),
        ("importing", "running", "~ IMPORTING"),
        ("running", "running", "● RUNNING"),
        ("degraded", "running", "! DEGRADED"),
        ("hung", "running", "? HUNG"),
        ("restarting", "restarting", "~ RESTARTING"),
        ("stopping", "restarting", "↓ STOPPING"),
        ("stopped", "stopped", "□ STOPPED"),
    ],
)
def test_the_first_row_has_the_condition(condition: str, state: str, word: str) -> None:
    first, _ = rows(job(condition, HANG if condition == "hung" else None, state=state))
    assert word in first


def test_a_notice_is_a_bell_or_one_of_two_sequences() -> None:
    args = ("supervisor llama", "HUNG: rank 3; waiting\x1b]0;x\a")
    assert (notice_sequence("bell", *args, {}), notice_sequence("off", *args, {})) == ("\a", "")
    assert notice_sequence("osc777", *args, {"TERM": "linux"}) == "\a"
    assert notice_sequence("osc9", *args, {}).startswith("\x1b]9;supervisor llama: HUNG: rank 3, waiting")
    sent = notice_sequence("osc777", *args, {})
    # What a rank has printed neither ends the sequence nor begins another one.
    assert sent.startswith("\x1b]777;notify;supervisor llama;HUNG: rank 3, waiting")
    assert (sent.count("\x1b"), sent.count("\a"), sent.count(";")) == (1, 1, 3)
    assert notice_sequence("osc9", "a", "b", {"TMUX": "1"}) == "\x1bPtmux;\x1b\x1b]9;a: b\a\x1b\\"


def test_the_terminal_has_the_condition_in_its_title_and_calls_when_it_changes_for_the_worse_or_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        session = job("running")
        async with running(session) as (app, pilot):
            written: list[str] = []
            assert app._driver is not None
            monkeypatch.setattr(app._driver, "write", written.append)
            assert app._title == "RUNNING train-k3f9"
            for condition in ("restarting", "running", "hung", "hung", "running", "degraded"):
                session.status = {**session.status, "condition": condition}
                session.touch()
                app.tick()
                await pilot.pause()
            assert [text for text in written if text.startswith("\x1b]2;")] == [
                f"\x1b]2;{word} train-k3f9\a" for word in ("RESTARTING", "RUNNING", "HUNG", "RUNNING", "DEGRADED")
            ]
            # Hung, running again, degraded; an operator's restart calls nobody.
            assert written.count("\a") == 3
            assert app.config.notice == "bell"
        assert written[-1] == "\x1b[23;2t", "the terminal gets its own title back"
        assert title_sequence("x", {"TERM": "linux"}) == ""

    asyncio.run(scenario())


def test_after_the_end_no_age_stands_still_and_ranks_that_we_ended_are_no_victims() -> None:
    session = job("stopped", state="stopped")
    session.ended = True
    for rank in (rank for node in session.status["nodes"] for rank in node["ranks"]):
        rank.update(state="killed", signal="SIGKILL", last_output_age_s=5.4)
    snapshot = model.take(session)
    assert {rank.output_age_s for rank in snapshot.ranks} == {None}
    assert text_of(legend(Glyphs(), snapshot.ranks)) == "x killed"


def test_a_hang_counts_while_no_status_arrives(later: Any) -> None:
    session = job("hung", HANG)
    later(0)
    _, second = rows(session, 240)
    assert " ! HANG 32 s " in second
    assert "next: waiting for you; torch times out in 29 min 7 s (11:14)" in second
    later(70)
    _, second = rows(session, 240)
    assert " ! HANG 1 min 42 s " in second
    assert "in 27 min 57 s (11:14)" in second
    assert rows(session, 160)[1].endswith("next: waiting for you; torch times out in 27 min 57 s  [i] why ")
    assert rows(session, 80)[1].endswith(" next: waiting for you  [i] why ")
    _, frozen = rows(session, 240, paused_s=70.0)
    assert " ! HANG 32 s " in frozen, "a frozen display stays at its time"


def test_a_hang_restarts_at_a_time(later: Any) -> None:
    later(0)
    _, second = rows(job("hung", {**HANG, "restarts_at": "2026-11-20T10:55:40.000Z"}), 240)
    assert "next: the group restarts in 10 min (10:55) if the hang lasts" in second


def test_after_a_hang_its_culprit_stays_in_the_header(later: Any) -> None:
    later(0)
    first, second = rows(job("running", HEALED), 80)
    assert "RUNNING" in first
    assert second.startswith(" healed 12 s ago: rank 3 on n2, hang   ")
    assert second.endswith("[i] why ")
    assert "HANG" not in second
    # The ranks of a failed job are being stopped: nothing has healed.
    over = {**HEALED, "state": "over", "over": "job failed"}
    assert rows(job("stopping", over, plan="stopping generation 0 (failure); waiting for n1"))[1].startswith(" ! HANG ")
    killed = {**HEALED, "category": "other", "exit": {"code": None, "signal": "SIGKILL"}}
    assert rows(job("running", killed))[1].startswith(" healed 12 s ago: rank 3 on n2, killed by SIGKILL   ")


def test_the_page_of_a_healed_hang_is_in_the_past_without_advice(later: Any) -> None:
    later(0)

    async def scenario() -> None:
        async with running(job("hung", HANG), (100, 40)) as (app, pilot):
            text = await press(app, pilot, "5")
            assert "kill -CONT" in text
            assert "hung for 32 s" in text
            assert "waiting for you; torch times out in 29 min 7 s (11:14)" in text
            assert "all_reduce 44: 3 ranks are waiting" in text
            assert "n1 ■■  n2 ■?" in text
            assert "rank 3 never reached it" in text
            later(2)
            app.tick()
            await pilot.pause()
            assert "hung for 34 s" in screen_text(app), "it counts although no new status has arrived"
            session: Any = app.source
            session.status.update(condition="running", incident=HEALED)
            session.touch(incidents=[HEALED])
            text = await press(app, pilot, "g")
            assert "kill -CONT" not in text
            assert "healed 14 s ago: training resumed after 20 s" in text
            assert "3 ranks were waiting" in text
            assert "waiting for you" not in text

    asyncio.run(scenario())


def test_what_a_start_waits_for_leaves_the_way_to_the_verdict_in_view() -> None:
    failed = {**HANG, "ongoing": False, "category": "killed", "summary": "rank 3 (n2): killed by SIGKILL from outside"}
    for width in (60, 80, 160):
        _, second = rows(job("importing", failed), width, waits="imports: 8 s")
        assert second.startswith(" imports: 8 s ")
        assert second.endswith("[i] why ")
        assert len(second) == width
