"""Home: the jobs of several inventories in one table, alone and above a job, and the way to another job."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from supervisor.tui.shell import JobChoice
from supervisor.tui.source import HomeJob
from tests.screens import recorded
from tests.screens.conftest import NOW
from tests.screens.screens import SIZES, compare, named, press, running, settle, text_of, type_key, until


def home_job(words: str, job: str, state: str, *, live: bool, minutes: int, **more: Any) -> HomeJob:
    """A job that was launched so many minutes ago."""
    created = (NOW - 60 * minutes) * 1_000_000_000
    hosts = ["n1", "n2"] if job == "train-k3f9" else ["n9"]
    listed = {"job": job, "state": state, "live": live, "created_ns": created, "world_size": 4, "hosts": hosts}
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


def test_home_alone_shows_all_jobs_at_every_size() -> None:
    async def scenario() -> None:
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
        assert (app.return_value, app.choice, home.running) == (0, None, 0)

    asyncio.run(scenario())


def test_rows_come_as_hosts_answer_and_enter_takes_the_selected_job() -> None:
    async def scenario() -> None:
        home = Jobs()
        async with running(recorded.RecordedSession(""), home=home, has_job=False) as (app, pilot):
            assert "asking the hosts" in text_of(app)
            home.jobs, home.asked, home.version = JOBS, (3, 3), 2
            assert "5 jobs" in await settle(app, pilot)
            assert "llama-8b" not in await press(app, pilot, "slash", *"sweep", "enter")
            type_key(app, "enter")
            await until(app, pilot, lambda: app.return_value is not None)
            assert app.choice == JobChoice("", "sweep-4")

    asyncio.run(scenario())


def test_home_is_a_key_away_from_a_job_and_asks_hosts_only_while_it_is_seen() -> None:
    async def scenario() -> None:
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
            assert app.choice == JobChoice("/lab/gpu.toml", "hang-1")

    asyncio.run(scenario())


def test_there_is_no_home_where_the_hosts_are_part_of_the_program() -> None:
    async def scenario() -> None:
        async with running(recorded.load("running_2x2"), job_stays=False) as (app, pilot):
            assert "this screen shows one job only" in await press(app, pilot, "H")
            text = await press(app, pilot, "q")
            assert "and ends with it" in text
            assert "continues" not in text
            assert "End it and quit" in text
            type_key(app, "enter")
            await until(app, pilot, lambda: app.return_value is not None)
            assert app.return_value == 0

    asyncio.run(scenario())
