"""Leaving is detaching, the exit code says how the job ended; home, with the jobs of several inventories."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from supervisor.tui.dialogs import base
from supervisor.tui.shell import JobChoice
from supervisor.tui.source import HomeJob
from tests.screens import recorded
from tests.screens.conftest import NOW
from tests.screens.screens import SIZES, compare, named, playing, press, running, settle, text_of, type_key, until


@pytest.mark.parametrize(("key", "enter"), [("q", "enter"), ("ctrl+c", "ctrl+j"), ("q", "y")])
async def test_leaving_asks_and_enter_detaches(key: str, enter: str) -> None:
    async with playing("running_2x2") as (app, pilot, session):
        for stays in ("escape", "n"):
            assert "continues without this screen" in await press(app, pilot, key)
            await press(app, pilot, stays)
            assert (app.return_value, len(app.screen_stack)) == (None, 1)
        await press(app, pilot, key)
        type_key(app, enter)
        await until(app, pilot, lambda: app.return_value == 0)
        assert session.requests == []


@pytest.mark.parametrize(("recording", "status"), [("succeeded_2x2", 0), ("failed_4x2", 1), ("launch_failed", 3)])
async def test_a_job_that_is_over_needs_no_question(recording: str, status: int) -> None:
    async with running(recorded.load(recording)) as (app, pilot):
        await pilot.press("q")
        await pilot.pause()
        assert app.return_value == status


@pytest.mark.parametrize("is_confirmed", [True, False])
async def test_stop_from_the_way_out_leaves_when_the_job_is_stopped(is_confirmed: bool) -> None:
    async with playing("running_2x2") as (app, pilot, session):
        await press(app, pilot, "q", "right", "enter", *((*"train-k3f9", "enter") if is_confirmed else ("escape",)))
        assert session.requests == ([("stop", {"kill": False})] if is_confirmed else [])
        assert app.return_value is None
        session.touch(status={**session.status, "state": "stopped"}, ended=True)
        if is_confirmed:
            await until(app, pilot, lambda: app.return_value == 4)
        else:
            assert "exit code 4" in await press(app, pilot, "1")
            assert app.return_value is None


async def test_giving_up_a_launch_stops_what_was_started() -> None:
    async with playing("launch") as (app, pilot, session):
        text = await press(app, pilot, "q")
        assert "still being brought up" in text
        await press(app, pilot, "right", "enter")
        await until(app, pilot, lambda: app.return_value is not None)
        assert session.cancelled


async def test_launch_gives_way_to_the_map_by_itself() -> None:
    async with playing("launch") as (app, pilot, session):
        assert app.current_mode == "launch"
        running_job = recorded.load("running_2x2")
        session.touch(hosts=running_job.hosts, status=running_job.status, events=running_job.events, launching=False)
        session.status_age_s = 0.1
        await until(app, pilot, lambda: app.current_mode == "map")
        assert "RUNNING" in await press(app, pilot, "j")


async def test_the_incident_opens_once_by_itself() -> None:
    async with playing("restarting_4x2") as (app, pilot, session):
        await press(app, pilot, "x")
        failed = recorded.load("failed_4x2")
        session.touch(status=failed.status, incidents=failed.incidents, ended=True)
        assert "actions on" in await press(app, pilot, "down")
        assert "first failure" in await press(app, pilot, "escape")
        assert app.current_mode == "incident"
        text = await press(app, pilot, "escape")
        assert "exit code" in text or "FIRST FAILURE" in text
        session.touch()
        await press(app, pilot, "j")
        assert app.current_mode == "map"


async def test_a_notice_does_not_cover_a_question() -> None:
    async with running(recorded.load("running_2x2"), (80, 24)) as (app, pilot):
        facts = [(f"Fact {number}", "what it leads to, " * 3) for number in range(11)]
        choices = [base.DialogButton("no", "Cancel"), base.DialogButton("yes", "Stop the job")]
        app.push_screen(base.ButtonDialog("Stop?", facts, choices, "no"))
        before = (await settle(app, pilot)).splitlines()
        app.shell.say("a notice " * 40, title="refused", level="error", seconds=60)
        await until(app, pilot, lambda: "a notice" in text_of(app))
        after = (await settle(app, pilot)).splitlines()
        top, bottom = (next(at for at, line in enumerate(before) if sign in line) for sign in "╭╰")
        left, right = before[top].index("╭"), before[top].index("╮") + 1
        assert "Stop the job" in before[bottom - 2]
        for number in range(top, bottom + 1):
            assert after[number][left:right] == before[number][left:right]


def home_job(words: str, job: str, state: str, *, live: bool, minutes: int, **more: Any) -> HomeJob:
    """A job that was launched so many minutes ago."""
    created = (NOW - 60 * minutes) * 1_000_000_000
    hosts = ["n1", "n2"] if job == "train-k3f9" else ["n9"]
    listed: Any = {"job": job, "state": state, "live": live, "created_ns": created, "world_size": 4, "hosts": hosts}
    status, incident = more.get("status", {}), more.get("incident")
    return HomeJob(words, words.rpartition("/")[2] or "this machine", listed, status, incident)


def progress(step: int, total: int, condition: str) -> dict[str, Any]:
    """A status with one rank."""
    rank = {"rank": 0, "state": "running", "step": step, "progress": {"total": total, "steps_s": 2.0}}
    return {"job": "any", "state": "running", "condition": condition, "nodes": [{"name": "n9", "ranks": [rank]}]}


class Jobs:
    """What the hosts have answered."""

    def __init__(self, jobs: Sequence[HomeJob] = (), troubles: Sequence[str] = (), hosts: tuple[int, int] = (0, 3)):
        self.jobs, self.troubles, self.asked = jobs, troubles, hosts
        self.version = 1
        self.running = 0

    async def run(self) -> None:
        """Note that the hosts are being asked."""
        self.running += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.running -= 1


WHY = {"state": "open", "summary": "rank 3 never reached all_reduce; 7 ranks are waiting"}


HEALED = {"state": "recovered", "summary": "rank 1 on n2 SIGKILL: likely the kernel's OOM killer"}


JOBS = (
    home_job("/lab/hosts.toml", "llama-8b", "running", live=True, minutes=61, status=progress(760, 12_000, "running")),
    home_job("/lab/gpu.toml", "hang-1", "running", live=True, minutes=9, status=progress(10, 90, "hung"), incident=WHY),
    home_job("/lab/hosts.toml", "train-k3f9", "running", live=True, minutes=42),
    home_job("", "sweep-4", "failed", live=False, minutes=3, status={"failure": "rank 0: exit 1"}, incident=HEALED),
    home_job("", "gone-2", "running", live=False, minutes=4000),
)


async def test_home_alone_shows_all_jobs_at_every_size() -> None:
    home, texts = Jobs(JOBS, ["gpu.toml: n4: connect: refused", "old.toml: x"], (3, 4)), {}
    async with running(recorded.RecordedSession(""), SIZES[0], home=home, has_job=False) as (app, pilot):
        for size in SIZES:
            await pilot.resize_terminal(*size)
            texts[named(size)] = await settle(app, pilot)
        assert "no job is open" in await press(app, pilot, "2")
        assert app.current_mode == "home"
        type_key(app, "q")
        await until(app, pilot, lambda: app.return_value is not None)
    compare("home", texts)
    assert (app.return_value, app.shell.choice, home.running) == (0, None, 0)


async def test_home_fills_as_hosts_answer() -> None:
    home = Jobs()
    async with running(recorded.RecordedSession(""), home=home, has_job=False) as (app, pilot):
        assert "asking the hosts" in text_of(app)
        home.jobs, home.asked, home.version = JOBS, (3, 3), 2
        assert "5 jobs" in await settle(app, pilot)
        assert "llama-8b" not in await press(app, pilot, "slash", *"sweep", "enter")
        type_key(app, "enter")
        await until(app, pilot, lambda: app.return_value is not None)
        assert app.shell.choice == JobChoice("", "sweep-4")


async def test_home_is_a_key_away_and_asks_hosts_only_while_it_is_seen() -> None:
    home, session = Jobs(JOBS, hosts=(3, 3)), recorded.load("running_2x2")
    async with running(session, home=home) as (app, pilot):
        assert home.running == 0
        assert "sweep-4" in await press(app, pilot, "3", "H")
        assert home.running == 1
        await press(app, pilot, "escape")
        assert (app.current_mode, home.running) == ("ranks", 0)
        await press(app, pilot, "H", "j", "j", "enter")
        assert app.current_mode == "map", "the selected job is the one that is shown already"
        session.launching = True
        assert "the launch is still running" in await press(app, pilot, "H", "k", "enter")
        session.launching = False
        type_key(app, "enter")
        await until(app, pilot, lambda: app.return_value is not None)
        assert app.shell.choice == JobChoice("/lab/gpu.toml", "hang-1")


async def test_there_is_no_home_where_the_hosts_are_part_of_the_program() -> None:
    async with running(recorded.load("running_2x2"), job_stays=False) as (app, pilot):
        assert "this screen shows one job only" in await press(app, pilot, "H")
        text = await press(app, pilot, "q")
        assert "and ends with it" in text
        assert "continues" not in text
        assert "End it and quit" in text
        type_key(app, "enter")
        await until(app, pilot, lambda: app.return_value is not None)
        assert app.return_value == 0
