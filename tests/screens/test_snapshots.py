"""Every screen as text, at the four sizes of the brief, in every mode that changes its characters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from supervisor.tui import times
from tests.screens import fabrics, recorded
from tests.screens.screens import SIZES, compare, named, press, running, settle, text_of, until

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
    "nodes_gpu": ("4x4 gpu", ("2", "down")),
    "ranks_gpu": ("4x4 gpu", ("3",)),
    "map_gpu": ("64x8 gpu", ("m", "m", "m")),
    "ranks_charts": ("4x2 trained", ("3", *["down"] * 5)),
    "ranks_chart_alone": ("4x2 trained", ("3", "c", *["left"] * 12, "plus")),
    "map_chart": ("4x2 trained", ("c",)),
    "nodes_wall": ("2x8 trained", ("2",)),
    "run_speeds": ("4x2 trained", ("6",)),
    "nodes_cpu": ("2x2 cpu", ("2",)),
    "ranks_cpu": ("2x2 cpu", ("3", "down", "down")),
    "logs": ("running_2x2", ("4",)),
    "logs_found": ("failed_4x2", ("4", "slash", "C", "U", "D", "A", "enter")),
    "incident": ("failed_4x2", ("5",)),
    "evidence": ("restarting_4x2", ("i", "G", "k", "k", "k", "k", "k", "k", "enter")),
    "incident_healing": ("restarting_4x2", ("i",)),
    "victims_healing": ("restarting_4x2", ("i", "G", "k", "k", "enter")),
    "run": ("restarting_4x2", ("6",)),
    "run_first": ("restarting_4x2", ("6", "tab", "j")),
    "nccl": ("nccl_4", ("7",)),
    "nccl_64": ("nccl_64", ("7",)),
    "nccl_level": ("running_2x2", ("x", "n", "i")),
    "launch": ("launch", ()),
    "launch_failed": ("launch_failed", ()),
    "menu": ("restarting_4x2", ("down", "x")),
    "confirm": ("restarting_4x2", ("down", "x", "m")),
    "confirm_stop": ("running_2x2", ("x", "S")),
    "leave": ("running_2x2", ("q",)),
    "help": ("running_2x2", ("question_mark",)),
    "palette": ("running_2x2", ("colon", "r", "e", "s")),
}


def open_recording(name: str) -> recorded.RecordedSession:
    """A recording by name, or a job of so many nodes and ranks, or one in which NCCL tells something."""
    if name.startswith("nccl_"):
        session = recorded.many(int(name[5:]), 8)
        session.fabric = fabrics.sample(int(name[5:]))
        return session
    name, _, measured = name.partition(" ")
    if measured:
        nodes, per_node = name.split("x")
        session = recorded.measured(recorded.many(int(nodes), int(per_node)), gpus=measured != "cpu")
        return recorded.trained(session, times.now(), 600 if nodes == "4" else 80) if measured == "trained" else session
    if name[0].isdigit():
        nodes, per_node = name.split("x")
        session = recorded.many(int(nodes), int(per_node))
        for node, local, state in ((17, 3, "failed"), (17, 4, "starting"), (41, 6, "silent"), (5, 2, "killed")):
            session.status["nodes"][node]["ranks"][local]["state"] = state
        session.status["nodes"][52].update(state="lost", reason="no heartbeat within 15 s")
        return session
    return recorded.load(name)


# What nobody has planned for: no picture, and no error either.
ODD_SIZES = ((60, 16), (200, 60), (1, 1), (80, 24))


async def _shots(
    name: str,
    mode: str = "",
    sizes: Sequence[tuple[int, int]] = SIZES,
    odd: Sequence[tuple[int, int]] = (),
    **options: object,
) -> None:
    recording, keys = SCREENS[name]
    session = open_recording(recording)
    if name == "map_stale":
        session.status_age_s = 12.0
    texts = {}
    async with running(session, sizes[0], **options) as (app, pilot):
        await press(app, pilot, *keys)
        for size in sizes:
            await pilot.resize_terminal(*size)
            texts[named(size) + mode] = await settle(app, pilot)
        for size in odd:
            await pilot.resize_terminal(*size)
            await pilot.pause()
            app.tick()
            await until(app, pilot, lambda: bool(text_of(app)))
        await settle(app, pilot)
    compare(name, texts)


@pytest.mark.parametrize("name", SCREENS)
def test_screen(name: str) -> None:
    asyncio.run(_shots(name, odd=ODD_SIZES))


ASCII = ("map", "map_training", "map_512", "incident", "confirm_stop", "logs_found")


@pytest.mark.parametrize("name", ASCII)
def test_ascii(name: str) -> None:
    asyncio.run(_shots(name, " ascii", [(80, 24)], ascii_only=True))


@pytest.mark.parametrize(
    "name",
    [*ASCII, "menu", "launch_failed", "nodes_gpu", "nodes_wall", "ranks_gpu", "ranks_chart_alone", "run", "nccl"],
)
def test_ascii_mode_draws_ascii_only(name: str) -> None:
    async def scenario() -> None:
        recording, keys = SCREENS[name]
        session = open_recording(recording)
        # What the ranks print themselves is theirs.
        session.files = {file: lines for file, lines in session.files.items() if file[3] == "stdout"}
        async with running(session, (120, 30), ascii_only=True) as (app, pilot):
            text = await press(app, pilot, *keys)
            assert text.isascii(), [char for char in text if not char.isascii()]

    asyncio.run(scenario())


def test_read_only_menu() -> None:
    asyncio.run(_shots("menu", " read-only", [(80, 24)], read_only=True))


def test_too_small() -> None:
    async def scenario() -> None:
        async with running(recorded.load("running_2x2"), (52, 14)) as (app, pilot):
            text = await press(app, pilot, "j")
            assert text.strip() == "needs 60x16, has 52x14"
            await pilot.resize_terminal(60, 16)
            assert "train-k3f9" in await press(app, pilot, "j")

    asyncio.run(scenario())
