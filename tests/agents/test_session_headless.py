"""Ctrl-C without a screen, where it comes between two states: what is said is what happens."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from supervisor.cli.headless import Headless
from supervisor.link import jobs
from supervisor.session import Session
from tests.agents.test_session import has, planned, until
from tests.agents.test_session_hosts import Hosts, hosts


async def test_ctrl_c_as_the_launch_ends_stops_the_job_and_one_while_connecting_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pressed = asyncio.Event()
    monkeypatch.setattr(jobs, "is_reached", lambda session: pressed.is_set() and bool(session.opened_links()))

    async def press(session: Session) -> None:
        await until(session, lambda: not session.launching and any(link.opened for link in session.links.values()))
        os.kill(os.getpid(), signal.SIGINT)
        # The handler runs before this.
        await asyncio.sleep(0.1)
        pressed.set()

    async def attach(made: Hosts) -> None:
        session = Session(made.inventory(), "job-t", attach="control")
        pressing = asyncio.ensure_future(press(session))
        with (tmp_path / "out").open("wb") as stdout:
            assert await Headless(session, stdout).attached(hosts=None) == 130
        await pressing
        assert "interrupted; the job keeps running" in capfd.readouterr().err

    with hosts(tmp_path, 1) as made:
        pressed.set()
        async with planned(made.inventory(), made, "100000", "0.05") as session:
            await session.ready()
            await until(session, lambda: has(session, "generation_running"))
            pressed.clear()
            await attach(made)
            assert not has(session, "stop_requested")
            await session.request("stop", kill=True)
            await until(session, lambda: session.ended)
        pressed.clear()
        session = planned(made.inventory(), made, "100000", "0.05", job="job-u")
        pressing = asyncio.ensure_future(press(session))
        with (tmp_path / "out").open("wb") as stdout:
            assert await Headless(session, stdout).launched(detach=False, hosts=None) == 130
        await pressing
        assert session.state == "stopped"
        assert "stopping the job" in capfd.readouterr().err
