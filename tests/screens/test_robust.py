"""Sizes, keys and themes that nobody has planned; no colour where none is wanted; nothing done for hidden screens."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from textual.widget import Widget
from textual.widgets import Input, Static

from supervisor.errors import HostFailure, LaunchFailed
from supervisor.link.view import Notice
from supervisor.paths import state_dir
from supervisor.session import Session
from supervisor.tui import themes
from supervisor.tui.app import SupervisorApp
from supervisor.tui.dialogs.base import TextDialog
from supervisor.tui.dialogs.palette import CommandPalette
from supervisor.tui.widgets.lines import LineView
from supervisor.tui.widgets.picker import Picker
from tests.examples import TIMES
from tests.hostile import HOSTILE, check_harmless, hostile_session
from tests.screens import recorded
from tests.screens.screens import playing, press, running, settle, strips_of, text_of, type_key, until
from tests.screens.test_snapshots import open_recording

KEYS = [
    *"1234567", *"lifxmTMsen/Nt#[]<>gGjkudb0?:-", "enter", "escape", "tab", "shift+tab", "up", "down", "left", "right",
    "pageup", "pagedown", "home", "end", "space", "f1", "ctrl+p", "dollar_sign", "y", "a", "S", "backspace", *"!*UpZF",
    *"wmo@'{}E&vV", "quotation_mark", "ctrl+g", "backslash",
]  # fmt: skip


def as_source(session: Session) -> Session:
    """The real session is a source: the type checker says so."""
    return session


@pytest.mark.parametrize("screen", "1234567")
def test_random_keys_on_every_screen(screen: str) -> None:
    """Many on each, as fast as a pasted text; KEYS_SEED=… plays other ones."""
    count = 150 * TIMES
    seed = int(os.environ.get("KEYS_SEED") or 518831469)
    rng = random.Random(f"{seed} {screen}")
    pressed: list[str] = []
    session = open_recording(("restarting_4x2", "failed_4x2", "64x8")[int(screen) % 3])

    async def until_it_is_left() -> None:
        async with running(session, (80, 24)) as (app, pilot):
            while app.return_value is None and len(pressed) < count:
                burst = rng.choices(KEYS, k=rng.randint(1, 30))
                pressed.extend(burst)
                for key in (*["escape"] * 3, screen, *burst) if rng.random() < 0.2 else burst:
                    type_key(app, key)
                session.touch()
                await settle(app, pilot)

    try:
        while len(pressed) < count:
            asyncio.run(until_it_is_left())
    except Exception as error:
        raise AssertionError(f"KEYS_SEED={seed}, after {len(pressed)} keys: {' '.join(pressed[-40:])}") from error


async def test_a_screen_that_is_opened_as_the_application_ends() -> None:
    async with running(recorded.load("running_2x2")) as (app, _):
        app.push_screen(CommandPalette([]))


class Painted:
    """What would go to the terminal: a headless application leaves the last step out."""

    def __init__(self, app: SupervisorApp) -> None:
        self.text = ""
        self._app = app
        display: Callable[..., None] = app._display
        self._display = display
        app._display = self.paint  # type: ignore[method-assign]

    def paint(self, screen: Any, renderable: Any) -> None:
        """Encode, then go on."""
        if renderable is not None and hasattr(renderable, "render_segments"):
            self.text += renderable.render_segments(self._app.console)
        elif renderable is not None:
            self.text += self._app.console._render_buffer(self._app.console.render(renderable))
        self._display(screen, renderable)


async def test_an_empty_no_color_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    async with running(recorded.load("failed_4x2")) as (app, _):
        assert len({segment.style.color for strip in strips_of(app) for segment in strip if segment.style}) > 3


async def test_every_theme_draws_every_kind_of_screen() -> None:
    async with running(recorded.load("restarting_4x2"), (100, 30)) as (app, pilot):
        names = [app.shell.palette.name]
        for _ in app.shell.themes.skins:
            text = await press(app, pilot, "escape", "escape", "T")
            assert app.shell.palette.name in text
            names.append(app.shell.palette.name)
            await press(app, pilot, "x", "escape", "5", "4", "question_mark", "escape", "q", "escape", "colon")
        assert set(names) == set(app.shell.themes.skins)


async def test_text_of_a_node_cannot_move_the_cursor_or_the_layout() -> None:
    session = hostile_session()
    evil = f"owned{HOSTILE}\nc\td [bold]e[/bold] 漢字😀"
    session.status["plan"] = evil
    event = {"seq": 7, "time": session.events[-1]["time"], "type": evil, "generation": 0, "node": evil}
    session.events.append({**event, "rank": None, "detail": {evil: evil}})
    proof = {"node": evil, "rank": 1, "file": evil, "line": 1, "text": evil}
    session.incidents.append({**session.incidents[-1], "summary": evil, "evidence": [proof]})
    session.notices.append(Notice(0, evil, "warning"))
    session.touch()
    async with running(session, (120, 40)) as (app, pilot):
        for key in "12345678":
            check_harmless(await press(app, pilot, key))


@pytest.mark.parametrize("name", ["launch", "launch_failed"])
async def test_hosts_that_are_brought_up_say_only_text(name: str) -> None:
    session = hostile_session(name)
    if session.failure:
        session.failure = LaunchFailed(
            f"owned {HOSTILE}", (HostFailure("n2", "auth", f"owned {HOSTILE}", HOSTILE),), HOSTILE
        )
    async with running(session, (120, 40)) as (app, pilot):
        assert app.current_mode == "launch"
        check_harmless(await settle(app, pilot))
        for key in ("enter", "r", "escape", "q"):
            check_harmless(await press(app, pilot, key) + "owned")


async def test_widgets_titles_and_copies_are_text_whatever_they_are_given() -> None:
    async with running(recorded.load("running_2x2"), (100, 30)) as (app, pilot):
        await app.mount(Static(f"owned{HOSTILE}|", markup=False), Input(value=f"owned{HOSTILE}"))
        app.notify(f"owned{HOSTILE}", title=HOSTILE, markup=False)
        check_harmless(await settle(app, pilot))
        app.push_screen(TextDialog(f"owned [bold]x[/nope]{HOSTILE}", f"owned {HOSTILE}\n[/nope]"))
        shown = await settle(app, pilot)
        check_harmless(shown)
        assert "[bold]x[/nope]" in shown
        await press(app, pilot, "y")
        check_harmless((state_dir() / "copied.txt").read_text())


async def test_only_one_pane_looks_focused() -> None:
    async with running(recorded.load("running_2x2")) as (app, pilot):
        accent = app.shell.palette.style("accent").color

        def is_lit(pane: Widget) -> bool:
            title = strips_of(app)[pane.region.y].crop(pane.region.x, pane.region.right)
            return any(segment.style is not None and segment.style.color == accent for segment in title)

        for _ in range(5):
            await press(app, pilot, "tab")
            panes = [view for view in app.screen.query(LineView) if view.can_focus and view.region]
            assert [view for view in panes if is_lit(view)] == [app.focused]


async def test_hidden_screens_do_not_work() -> None:
    async with playing("running_2x2") as (app, pilot, session):
        await press(app, pilot, "4", "6")
        calls = session.log_calls
        assert calls
        for _ in range(10):
            session.touch()
            await settle(app, pilot)
        assert session.log_calls == calls


async def test_a_failure_without_a_verdict_yet_is_no_peace() -> None:
    async with playing("running_2x2") as (app, pilot, session):
        assert "no failure so far" in await press(app, pilot, "5")
        rank = next(rank for node in session.status["nodes"] for rank in node["ranks"] if rank["rank"] == 3)
        rank.update(state="failed", exit_code=-9, signal="SIGKILL")
        session.touch()
        assert "rank 3 (n2) failed, SIGKILL; finding the first failure" in await settle(app, pilot)


async def test_the_newest_incident_and_the_one_of_an_event() -> None:
    session = recorded.load("restarting_4x2")
    first = session.incidents[0]
    session.incidents += [{**first, "id": 2}, {**first, "id": 3}]
    event = next(event for event in session.events if event["type"] == "incident")
    async with running(session) as (app, pilot):
        assert "incident 1," in await press(app, pilot, "5", *["left_square_bracket"] * 2)
        session.touch(incidents=[*session.incidents, {**first, "id": 4, "summary": "the fourth"}])
        await until(app, pilot, lambda: "1 of 4" in text_of(app))
        assert "incident 1," in text_of(app), "a new one moves nobody"
        assert "incident 1," in await press(app, pilot, "1", "5")
        assert "incident 4," in await press(app, pilot, "1", "i")
        app.shell.open_event(session.events.index(event))
        assert "incident 1," in await settle(app, pilot)
        await press(app, pilot, "1")
        session.touch(ended=True, status={**session.status, "state": "failed", "incident": session.incidents[-1]})
        assert "incident 4," in await settle(app, pilot)


async def test_the_wheel_is_not_turned_back() -> None:
    session = recorded.load("running_2x2")
    last = session.events[-1]
    session.events += [{**last, "seq": last["seq"] + 1 + number} for number in range(200)]
    async with running(session) as (app, pilot):
        picker = app.screen.query_one("#events", Picker)
        end = picker.top
        picker.scroll_lines(-30)
        session.events.append({**last, "seq": last["seq"] + 201})
        session.touch()
        await settle(app, pilot)
        assert picker.top == end - 30
        picker.scroll_lines(40)
        session.touch()
        await settle(app, pilot)
        assert picker.top == end + 1


async def test_a_lost_node_without_ranks_stays_on_the_heat_map() -> None:
    session = recorded.many(64, 8)
    session.status["nodes"][52].update(state="lost", ranks=[])
    async with running(session) as (app, _):
        assert re.search(r"n052 X {8}", text_of(app))


async def test_an_unknown_theme_is_a_notice() -> None:
    async with running(recorded.load("running_2x2"), (160, 48), theme="x") as (app, _):
        assert app.shell.palette.name == themes.DEFAULT_THEME
        assert "no theme named x" in text_of(app)
