"""One pane over the whole screen: bars and filter stay, and all panes come back as they were."""

from __future__ import annotations

import asyncio

import pytest
from textual.widget import Widget

from supervisor.tui.app import SupervisorApp
from supervisor.tui.widgets.lines import LineView
from supervisor.tui.widgets.tables import RankTable
from tests.screens import fabrics, recorded
from tests.screens.screens import SIZES, named, press, running, settle

# Screen, and the pane that is shown alone.
PANES = {
    "map": (("1", "tab"), "#events"),
    "nodes": (("2", "tab"), "#nodes"),
    "ranks": (("3", "tab"), "#ranks"),
    "run": (("6",), "#events"),
    "generation": (("6", "tab"), "#generations"),
    "nccl": (("7",), "#nccl"),
}


def job() -> recorded.RecordedSession:
    """A job with something in every pane."""
    session = recorded.measured(recorded.many(2, 2))
    session.fabric = fabrics.sample(2)
    return session


def alone(app: SupervisorApp) -> Widget | None:
    """The pane that hides the others."""
    return app.screen.maximized


def body(text: str) -> list[str]:
    """What is between the bars."""
    return text.splitlines()[2:-2]


@pytest.mark.parametrize("name", PANES)
def test_one_pane_has_the_whole_body_and_all_come_back(name: str) -> None:
    async def scenario() -> None:
        async with running(job(), SIZES[1]) as (app, pilot):
            keys, id_ = PANES[name]
            await press(app, pilot, *keys)
            for size in (SIZES[1], SIZES[3]):
                await pilot.resize_terminal(*size)
                before = await settle(app, pilot)
                pane = app.screen.query_one(id_, LineView)
                app.screen.set_focus(pane)
                before = await settle(app, pilot)
                text = await press(app, pilot, "Z")
                assert tuple(pane.region) == (0, 2, size[0], size[1] - 4), named(size)
                assert text.splitlines()[:2] == before.splitlines()[:2]
                assert text.splitlines()[-2] == before.splitlines()[-2]
                assert "Z all panes" in text.splitlines()[-1]
                assert f" {pane.heading} " in body(text)[0]
                assert await press(app, pilot, "Z") == before
                await press(app, pilot, "Z")
                assert await press(app, pilot, "escape") == before

    asyncio.run(scenario())


def test_a_pane_alone_is_filtered_and_follows_the_job() -> None:
    async def scenario() -> None:
        session = job()
        async with running(session, (80, 24)) as (app, pilot):
            await press(app, pilot, "3", "Z", "slash", *"n001", "enter")
            table = app.screen.query_one(RankTable)
            assert (table.line_count(), alone(app)) == (2, table)
            session.touch(status={**session.status, "generation": 5})
            assert "gen 5" in await settle(app, pilot)
            # The escape of the filter is the filter's.
            text = await press(app, pilot, "slash", "escape")
            assert (table.line_count(), alone(app)) == (4, table)
            assert text.count("n001") == 2
            # Nothing else of this screen is there: the next pane is this one.
            await press(app, pilot, "tab")
            assert app.focused is table
            # Another screen and back: it is alone still.
            assert " ranks " in body(await press(app, pilot, "1", "3"))[0]
            await pilot.resize_terminal(40, 10)
            assert "needs 60x16" in await settle(app, pilot)
            await pilot.resize_terminal(80, 24)
            await settle(app, pilot)
            assert alone(app) is None

    asyncio.run(scenario())


def test_a_pane_that_is_gone_gives_its_room_back() -> None:
    async def scenario() -> None:
        async with running(recorded.many(3, 2), (160, 48)) as (app, pilot):
            await press(app, pilot, "shift+tab", "Z")
            assert alone(app) is app.screen.query_one("#tail")
            # At this size the map has no log.
            await pilot.resize_terminal(60, 16)
            text = await settle(app, pilot)
            assert alone(app) is None
            assert " nodes " in body(text)[0]

    asyncio.run(scenario())


def test_the_only_pane_says_so() -> None:
    async def scenario() -> None:
        session = recorded.many(2, 2)
        session.fabric = fabrics.sample(1)
        async with running(session, (80, 24)) as (app, pilot):
            text = await press(app, pilot, "7", "Z")
            assert "there is only one pane" in text
            assert alone(app) is None
            # A log and an incident are one pane each.
            for screen in "45":
                before = await press(app, pilot, screen)
                assert body(await press(app, pilot, "Z")) == body(before)

    asyncio.run(scenario())


def test_a_pane_without_a_table_says_what_to_do() -> None:
    async def scenario() -> None:
        async with running(job(), (80, 24)) as (app, pilot):
            text = await press(app, pilot, "shift+tab", "Z", "slash")
            assert "no table in this pane" in text
            assert "Z all panes" in text

    asyncio.run(scenario())
