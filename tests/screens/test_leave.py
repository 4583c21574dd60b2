"""Leaving is detaching; the exit code says how the job ended."""

from __future__ import annotations

import asyncio

import pytest

from supervisor.tui.dialogs import base
from tests.screens import recorded
from tests.screens.screens import press, running, settle, text_of, until


@pytest.fixture(autouse=True)
def no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a test come faster than any hand."""
    monkeypatch.setattr(base, "GUARD_S", 0.0)


@pytest.mark.parametrize(("key", "enter"), [("q", "enter"), ("ctrl+c", "ctrl+j"), ("q", "y")])
def test_leaving_asks_and_enter_detaches(key: str, enter: str) -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session) as (app, pilot):
            text = await press(app, pilot, key)
            assert "continues without this screen" in text
            await pilot.press(enter)
            await pilot.pause()
            assert app.return_value == 0
            assert session.requests == []

    asyncio.run(scenario())


@pytest.mark.parametrize("key", ["escape", "n"])
def test_escape_stays(key: str) -> None:
    async def scenario() -> None:
        async with running(recorded.load("running_2x2")) as (app, pilot):
            await press(app, pilot, "q", key)
            assert app.return_value is None
            assert len(app.screen_stack) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(("recording", "status"), [("succeeded_2x2", 0), ("failed_4x2", 1), ("launch_failed", 3)])
def test_a_job_that_is_over_needs_no_question(recording: str, status: int) -> None:
    async def scenario() -> None:
        async with running(recorded.load(recording)) as (app, pilot):
            await pilot.press("q")
            await pilot.pause()
            assert app.return_value == status

    asyncio.run(scenario())


def test_stop_from_the_way_out_leaves_when_the_job_is_stopped() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session) as (app, pilot):
            await press(app, pilot, "q", "right", "enter", *"train-k3f9", "enter")
            assert session.requests == [("stop", {"kill": False})]
            assert app.return_value is None
            session.touch(status={**session.status, "state": "stopped"}, ended=True)
            await until(app, pilot, lambda: app.return_value is not None)
            assert app.return_value == 4

    asyncio.run(scenario())


def test_stop_that_is_cancelled_does_not_leave_later() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session) as (app, pilot):
            await press(app, pilot, "q", "right", "enter", "escape")
            session.touch(status={**session.status, "state": "stopped"}, ended=True)
            text = await press(app, pilot, "1")
            assert app.return_value is None
            assert "exit code 4" in text

    asyncio.run(scenario())


def test_giving_up_a_launch_stops_what_was_started() -> None:
    async def scenario() -> None:
        session = recorded.load("launch")
        async with running(session) as (app, pilot):
            text = await press(app, pilot, "q")
            assert "still being brought up" in text
            await press(app, pilot, "right", "enter")
            await until(app, pilot, lambda: app.return_value is not None)
            assert session.cancelled

    asyncio.run(scenario())


def test_launch_gives_way_to_the_map_by_itself() -> None:
    async def scenario() -> None:
        session = recorded.load("launch")
        async with running(session) as (app, pilot):
            assert app.current_mode == "launch"
            running_job = recorded.load("running_2x2")
            session.touch(
                hosts=running_job.hosts, status=running_job.status, events=running_job.events, launching=False
            )
            session.status_age_s = 0.1
            await until(app, pilot, lambda: app.current_mode == "map")
            assert "RUNNING" in await press(app, pilot, "j")

    asyncio.run(scenario())


def test_the_incident_opens_once_by_itself_when_the_job_has_failed() -> None:
    async def scenario() -> None:
        session = recorded.load("restarting_4x2")
        async with running(session) as (app, pilot):
            assert app.current_mode == "map"
            failed = recorded.load("failed_4x2")
            session.touch(status=failed.status, incidents=failed.incidents, ended=True)
            await until(app, pilot, lambda: app.current_mode == "incident")
            text = await press(app, pilot, "escape")
            assert app.current_mode == "map"
            assert "exit code" in text or "FIRST FAILURE" in text
            session.touch()
            await press(app, pilot, "j")
            assert app.current_mode == "map"

    asyncio.run(scenario())


def test_an_incident_does_not_tear_a_dialog_away() -> None:
    async def scenario() -> None:
        session = recorded.load("restarting_4x2")
        async with running(session) as (app, pilot):
            await press(app, pilot, "x")
            failed = recorded.load("failed_4x2")
            session.touch(status=failed.status, incidents=failed.incidents, ended=True)
            assert "actions on" in await press(app, pilot, "down")
            await press(app, pilot, "escape")
            session.touch()
            await until(app, pilot, lambda: app.current_mode == "incident" and "first failure" in text_of(app))

    asyncio.run(scenario())


def test_a_notice_covers_neither_the_text_nor_the_buttons_of_a_question() -> None:
    async def scenario() -> None:
        async with running(recorded.load("running_2x2"), (80, 24)) as (app, pilot):
            facts = [(f"Fact {number}", "what it leads to, " * 3) for number in range(11)]
            choices = [base.DialogButton("no", "Cancel"), base.DialogButton("yes", "Stop the job")]
            app.push_screen(base.ButtonDialog("Stop?", facts, choices, "no"))
            before = (await settle(app, pilot)).splitlines()
            app.say("a notice " * 40, title="refused", level="error", seconds=60)
            await until(app, pilot, lambda: "a notice" in text_of(app))
            after = (await settle(app, pilot)).splitlines()
            top, bottom = (next(at for at, line in enumerate(before) if sign in line) for sign in "╭╰")
            left, right = before[top].index("╭"), before[top].index("╮") + 1
            assert "Stop the job" in before[bottom - 2]
            for number in range(top, bottom + 1):
                assert after[number][left:right] == before[number][left:right]

    asyncio.run(scenario())
