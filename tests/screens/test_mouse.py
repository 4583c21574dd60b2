"""The mouse: what can be clicked on does what its key does, and what is dragged over is copied."""

from __future__ import annotations

from pathlib import Path

from textual.pilot import Pilot

from supervisor.tui import times
from supervisor.tui.app import SupervisorApp
from supervisor.tui.widgets.rank_grid import RankGrid
from supervisor.tui.widgets.virtual_log import VirtualLog
from tests.screens import recorded
from tests.screens.screens import press, running, settle, text_of


async def click(app: SupervisorApp, pilot: Pilot[int], text: str, times: int = 1) -> str:
    """Click on the last place where a text stands; returns what is on the screen then."""
    lines = text_of(app).splitlines()
    y = max(y for y, line in enumerate(lines) if text in line)
    await pilot.click(offset=(lines[y].rindex(text), y), times=times)
    return await settle(app, pilot)


async def drag(app: SupervisorApp, pilot: Pilot[int], begin: tuple[int, int], end: tuple[int, int]) -> str:
    """Drag over cells; returns what is on the screen before the button is let go."""
    await pilot.mouse_down(offset=begin)
    await pilot.hover(offset=end)
    text = await settle(app, pilot)
    await pilot.mouse_up(offset=end)
    await settle(app, pilot)
    return text


async def test_tabs_footer_and_the_words_above_do_what_their_keys_do() -> None:
    async with running(recorded.many(64, 8), (120, 30)) as (app, pilot):
        assert " nodes (64)" in await click(app, pilot, "2 Nodes")
        await click(app, pilot, "Map")
        assert app.current_mode == "map"
        assert "actions on" in await click(app, pilot, "actions")
        await press(app, pilot, "escape", "/", "n")
        # Also while something is being typed.
        assert "palette" in await click(app, pilot, ": palette")
        await press(app, pilot, "escape", "escape")
        assert "log of node n" in await click(app, pilot, "logs")
        assert "help: logs" in await click(app, pilot, "? help")


async def test_the_failure_in_the_upper_bar_leads_to_its_incident() -> None:
    async with running(recorded.load("restarting_4x2"), (120, 30)) as (app, pilot):
        await click(app, pilot, "[i] why")
        assert app.current_mode == "incident"


async def test_each_cell_of_the_map_is_its_rank_or_its_node() -> None:
    session = recorded.many(64, 8)
    async with running(session, (120, 30)) as (app, pilot):
        grid = app.screen.query_one(RankGrid)
        top = grid.region.y + 1
        x = text_of(app).splitlines()[top].index("n001")
        # A rank by its glyph, the first rank of a node by the node's name; what lies between them is nothing.
        for cell, rank in ((x + 8, 11), (x, 8), (x + 5, 8), (x + 12, 15), (x + 13, 15), (0, 15)):
            await pilot.click(offset=(cell, top))
            assert grid.selection == ("n001", rank), cell - x
        await pilot.click(offset=(x + 6, top + 1), times=2)
        assert f"log of rank {8 * (grid.per_line + 1) + 1} " in await settle(app, pilot)
    session = recorded.many(64, 8)
    async with running(session, (60, 16)) as (app, pilot):
        grid = app.screen.query_one(RankGrid)
        assert grid.per_node
        line = text_of(app).splitlines()[grid.region.y + 1]
        first = line.index("n000") + 5
        await pilot.click(offset=(first + 12, grid.region.y + 1))
        assert grid.selection == ("n012", None)


async def test_a_time_on_the_axis_opens_the_log_at_that_time() -> None:
    session = recorded.trained(recorded.measured(recorded.many(2, 2)), times.now(), 80)
    async with running(session, (160, 48)) as (app, pilot):
        board = app.screen.query_one("#training").region
        await settle(app, pilot)
        await pilot.click(offset=(board.x + 60, board.bottom - 1))
        await settle(app, pilot)
        assert app.current_mode == "logs"
        view = app.screen.query_one(VirtualLog)
        assert not view.follow
        # The strips beside the curves are no times.
        await press(app, pilot, "1")
        await pilot.click(offset=(board.x + 150, board.bottom - 1))
        await settle(app, pilot)
        assert app.current_mode == "map"


async def test_what_is_dragged_over_is_copied(tmp_path: Path) -> None:
    kept = tmp_path / "state" / "supervisor" / "copied.txt"
    async with running(recorded.load("running_2x2"), (120, 30)) as (app, pilot):
        lines = (await press(app, pilot, "4")).splitlines()
        view = app.screen.query_one(VirtualLog)
        # Within a line, backwards.
        await drag(app, pilot, (20, 10), (6, 10))
        assert kept.read_text() == lines[10][6:21].rstrip() + "\n"
        assert not view.follow, "the lines stay where they are"
        # Over several lines, without the scroll bar.
        await drag(app, pilot, (6, 10), (20, 12))
        assert kept.read_text().splitlines() == [
            lines[10][6:119].rstrip(),
            lines[11][:119].rstrip(),
            lines[12][:21].rstrip(),
        ]
        # From pane to pane, without the titles.
        lines = (await press(app, pilot, "1")).splitlines()
        at = next(y for y, line in enumerate(lines) if line.startswith("─ events"))
        await drag(app, pilot, (0, at - 1), (5, at + 1))
        copied = kept.read_text().splitlines()
        assert copied[0].startswith(" ■ running        0  n1")
        assert copied[-1] == lines[at + 1][:5]
        assert "events" not in "".join(copied)
        await press(app, pilot, "4")
        # A click copies nothing, and points to a line.
        kept.unlink()
        await pilot.click(offset=(6, 9))
        await settle(app, pilot)
        assert not kept.exists()
        # A page over the screen: stacks, help.
        await press(app, pilot, "?")
        lines = text_of(app).splitlines()
        y = next(y for y, line in enumerate(lines) if "this screen" in line)
        x = lines[y].index("this screen")
        await drag(app, pilot, (x, y), (x + 10, y))
        assert kept.read_text() == "this screen\n"


async def test_a_double_click_opens_a_row_and_selects_no_text(tmp_path: Path) -> None:
    async with running(recorded.load("running_2x2"), (120, 30)) as (app, pilot):
        await press(app, pilot, "3")
        assert "log of rank 1" in await click(app, pilot, "4101", times=2)
        assert not (tmp_path / "state" / "supervisor" / "copied.txt").exists()
