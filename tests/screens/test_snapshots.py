"""Screens and dialogs of jobs in every state, as text, in a usual and in a large window."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot

from supervisor.tui import times
from supervisor.tui.app import SupervisorApp
from tests.screens import recorded
from tests.screens.screens import compare, named, press, running, settle, stored, text_of, until

# Name, recording, keys to the screen.
SCREENS = {
    "map": ("running_2x2", ()),
    "map_stale": ("running_2x2", ()),
    "map_restarting": ("restarting_4x2", ()),
    "map_succeeded": ("succeeded_2x2", ()),
    "map_training": ("4x2 trained", ()),
    "map_training_512": ("64x8 trained", ()),
    "map_512": ("64x8", ()),
    "nodes": ("restarting_4x2", ("2",)),
    "ranks": ("failed_4x2", ("3",)),
    "map_gpu": ("64x8 gpu", ("m", "m", "m")),
    "ranks_charts": ("4x2 trained", ("3", *["down"] * 5)),
    "ranks_chart_alone": ("4x2 trained", ("3", "c", "z")),
    "map_chart": ("4x2 trained", ("c",)),
    "nodes_wall": ("2x8 trained", ("2",)),
    "run_speeds": ("4x2 trained", ("6",)),
    "logs_found": ("failed_4x2", ("4", "slash", "C", "U", "D", "A", "enter")),
    "incident": ("failed_4x2", ("5",)),
    "evidence": ("restarting_4x2", ("i", "G", "k", "k", "k", "k", "k", "k", "enter")),
    "incident_healing": ("restarting_4x2", ("i",)),
    "victims_healing": ("restarting_4x2", ("i", "G", "k", "k", "enter")),
    "run": ("restarting_4x2", ("6",)),
    "run_first": ("restarting_4x2", ("6", "tab", "j")),
    "nccl_level": ("running_2x2", ("x", "n", "i")),
    "launch": ("launch", ()),
    "launch_failed": ("launch_failed", ()),
    "menu": ("restarting_4x2", ("down", "x")),
    "confirm": ("restarting_4x2", ("down", "x", "m")),
}


def open_recording(name: str) -> recorded.RecordedSession:
    """A recording by name, or a job of so many nodes and ranks: measured, with its history too, or with problems."""
    if not name[0].isdigit():
        return recorded.load(name)
    size, _, more = name.partition(" ")
    nodes, per_node = map(int, size.split("x"))
    session = recorded.many(nodes, per_node)
    if more:
        recorded.measured(session)
        return recorded.trained(session, times.now(), 600 if nodes == 4 else 80) if more == "trained" else session
    for node, local, state in ((17, 3, "failed"), (17, 4, "starting"), (41, 6, "silent"), (5, 2, "killed")):
        session.status["nodes"][node]["ranks"][local]["state"] = state
    session.status["nodes"][52].update(state="lost", reason="no heartbeat within 15 s")
    return session


@asynccontextmanager
async def opened(name: str, size: tuple[int, int], **options: bool) -> AsyncIterator[tuple[SupervisorApp, Pilot[int]]]:
    """One of the screens above."""
    recording, keys = SCREENS[name]
    session = open_recording(recording)
    if name == "map_stale":
        session.status_age_s = 12.0
    async with running(session, size, **options) as (app, pilot):
        await press(app, pilot, *keys)
        yield app, pilot


@pytest.mark.parametrize("name", SCREENS)
async def test_a_screen_looks_as_stored(name: str) -> None:
    texts = {}
    async with opened(name, (60, 16)) as (app, pilot):
        for size in ((80, 24), (160, 48)):
            await pilot.resize_terminal(*size)
            texts[named(size)] = await settle(app, pilot)
    compare(name, texts)


@pytest.mark.parametrize(
    "name", ["map_training", "ranks_charts", "nodes_wall", "logs_found", "evidence", "launch_failed", "run", "menu"]
)
async def test_no_size_is_an_error(name: str) -> None:
    async with opened(name, (80, 24)) as (app, pilot):
        for size in ((60, 16), (200, 60), (1, 1), (80, 24)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            app.tick()
            await until(app, pilot, lambda: bool(text_of(app)))
        await settle(app, pilot)


@pytest.mark.parametrize("name", ["map_training", "launch_failed", "nodes_wall", "ranks_chart_alone"])
async def test_ascii_mode_draws_ascii_only(name: str) -> None:
    async with opened(name, (120, 30), ascii_only=True) as (app, _):
        text = text_of(app)
        assert text.isascii(), [char for char in text if not char.isascii()]


async def test_a_terminal_that_is_too_small_says_what_it_needs() -> None:
    async with running(recorded.load("running_2x2"), (52, 14)) as (app, pilot):
        text = await press(app, pilot, "j")
        assert text.strip() == "needs 60x16, has 52x14"
        await pilot.resize_terminal(60, 16)
        assert "train-k3f9" in await press(app, pilot, "j")


PICTURE = re.compile(r"<!-- snapshot: (\w+) -->\n```text\n(.*?)```\n", re.DOTALL)


def test_the_pictures_are_those_of_the_screen(repository: Path) -> None:
    path = repository / "docs" / "walk.md"
    text = path.read_text()
    found = PICTURE.findall(text)
    assert len(found) == text.count("<!-- snapshot:") > 4
    wanted = PICTURE.sub(lambda match: _picture(match[1]), text)
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(wanted)
    assert text == wanted or os.environ.get("UPDATE_SNAPSHOTS")


def _picture(name: str) -> str:
    # A screen's last lines may be empty; trailing blanks are cut in the snapshots.
    screen, _, size = name.rpartition("_")
    return f"<!-- snapshot: {name} -->\n```text\n{stored(screen)[size]}```\n"
