"""Sizes, keys and themes that nobody has planned; no colour where none is wanted; nothing done for hidden screens."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input, Static

from remote_agent.diagnose.incidents import incidents_after
from remote_agent.wire import Answer
from supervisor.errors import HostFailure, LaunchFailed
from supervisor.link.view import Notice
from supervisor.paths import state_dir
from supervisor.session import Session
from supervisor.tui import themes
from supervisor.tui.app import SupervisorApp
from supervisor.tui.dialogs.base import Dialog, TextDialog
from supervisor.tui.dialogs.palette import CommandPalette
from supervisor.tui.source import Source
from supervisor.tui.widgets.lines import LineView
from supervisor.tui.widgets.picker import Picker
from tests.examples import TIMES
from tests.hostile import HOSTILE, check_harmless, hostile_session
from tests.screens import recorded
from tests.screens.screens import press, running, settle, text_of, type_key, until
from tests.screens.test_snapshots import open_recording

KEYS = [
    *"1234567", *"lifxmTMsen/Nt#[]<>gGjkudb0?:-", "enter", "escape", "tab", "shift+tab", "up", "down", "left", "right",
    "pageup", "pagedown", "home", "end", "space", "f1", "ctrl+p", "dollar_sign", "y", "a", "S", "backspace", *"!*UpZF",
    *"wmo@'{}E&vV", "quotation_mark", "ctrl+g", "backslash",
]  # fmt: skip


def as_source(session: Session) -> Source:
    """The real session is a source: the type checker says so."""
    return session


@pytest.mark.parametrize("screen", "1234567")
def test_random_keys_on_every_screen(screen: str) -> None:
    """Hundreds on each, as fast as a pasted text; KEYS_SEED=… plays other ones."""
    count = 400 * TIMES
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
                await settle(app, pilot, 0)

    try:
        while len(pressed) < count:
            asyncio.run(until_it_is_left())
    except Exception as error:
        raise AssertionError(f"KEYS_SEED={seed}, after {len(pressed)} keys: {' '.join(pressed[-40:])}") from error


def test_a_screen_that_is_opened_as_the_application_ends() -> None:
    async def body() -> None:
        async with running(recorded.load("running_2x2")) as (app, _):
            app.push_screen(CommandPalette([]))

    asyncio.run(body())


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


def colours(text: str) -> set[str]:
    """Colour parameters of all SGR sequences, but for the default ones."""
    found: set[str] = set()
    for sequence in re.findall(r"\x1b\[([0-9;]*)m", text):
        numbers = [int(part or 0) for part in sequence.split(";")]
        found |= {str(n) for n in numbers if 30 <= n <= 38 or 40 <= n <= 48 or n >= 90}
    return found


async def _painted(size: tuple[int, int], keys: tuple[str, ...], recording: str) -> str:
    session = recorded.load(recording)
    app = SupervisorApp(session)
    painted = Painted(app)
    async with app.run_test(size=size) as pilot:
        await settle(app, pilot)
        await press(app, pilot, *keys)
    return painted.text


def test_no_color_means_no_colour_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    for recording, keys in (("failed_4x2", ("1", "2", "3", "4", "x", "escape", "q")), ("running_2x2", ("4", "x", "S"))):
        text = asyncio.run(_painted((100, 30), keys, recording))
        assert len(text) > 2000
        assert colours(text) == set()


def test_an_empty_no_color_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "xterm-256color")
    text = asyncio.run(_painted((100, 30), ("1",), "failed_4x2"))
    assert colours(text)


@pytest.mark.parametrize("theme", sorted(themes.load_all()[0]))
def test_every_theme_draws_every_kind_of_screen(theme: str) -> None:
    async def scenario() -> None:
        async with running(recorded.load("restarting_4x2"), (100, 30), theme=theme) as (app, pilot):
            assert app.palette.name == theme
            await press(app, pilot, "x", "escape", "5", "4", "question_mark", "escape", "q", "escape", "colon")

    asyncio.run(scenario())


def test_next_theme_redraws() -> None:
    async def scenario() -> None:
        async with running(recorded.load("running_2x2")) as (app, pilot):
            names = [app.palette.name]
            for _ in app.skins:
                await press(app, pilot, "T")
                names.append(app.palette.name)
                assert app.palette.name in text_of(app)
            assert set(names) == set(app.skins)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = 'x'\nprimary = '#zzz'\n", "primary"),
        ("name = 'x'\nprimary = '#112233'\nprimry = '#112233'\n", "primary"),
        ("name = 'x'\nprimary = '#112233'\n[roles]\nbad = 'bold #nope'\n", "role bad"),
        ("name = 'x'\nprimary = '#112233'\n[roles]\nbat = 'bold'\n", "did you mean"),
        ("name = 'x'\nprimary = '#112233'\ndark = 'yes'\n", "dark"),
        ("name = ", "x.toml"),
        ("name = 'x'\n", "x.toml"),
    ],
)
def test_a_bad_user_theme_is_a_notice(text: str, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "supervisor" / "themes"
    folder.mkdir(parents=True)
    (folder / "x.toml").write_text(text)

    async def scenario() -> None:
        async with running(recorded.load("running_2x2"), (160, 48), theme="x") as (app, pilot):
            assert app.palette.name == themes.DEFAULT_THEME
            assert "no theme named x" in await settle(app, pilot)

    _, notices = themes.load_all()
    assert len(notices) == 1
    assert said in notices[0]
    assert "x.toml" in notices[0]
    asyncio.run(scenario())


def test_a_good_user_theme_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "supervisor" / "themes"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text("primary = '#112233'\n[roles]\nok = 'bold #445566'\n")
    skins, notices = themes.load_all()
    assert notices == []
    assert skins["mine"].palette.style("ok").bold


def test_text_of_a_node_cannot_move_the_cursor_or_the_layout() -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["launch", "launch_failed"])
def test_hosts_that_are_brought_up_say_only_text(name: str) -> None:
    async def scenario() -> None:
        session = hostile_session(name)
        failures = (HostFailure("n2", "auth", f"owned {HOSTILE}", HOSTILE),)
        session.failure = LaunchFailed(f"owned {HOSTILE}", failures, HOSTILE) if session.failure else None
        async with running(session, (120, 40)) as (app, pilot):
            assert app.current_mode == "launch"
            check_harmless(await settle(app, pilot))
            for key in ("enter", "r", "escape", "q"):
                check_harmless(await press(app, pilot, key) + "owned")

    asyncio.run(scenario())


def test_the_signal_of_the_first_failure_is_text_too() -> None:
    async def scenario() -> None:
        session = recorded.load("failed_4x2")
        for node in session.status["nodes"]:
            for rank in node["ranks"]:
                rank["signal"] = f"SIG{HOSTILE}owned" if rank["state"] == "failed" else rank["signal"]
        async with running(session, (160, 40)) as (app, pilot):
            check_harmless("".join([await press(app, pilot, key) for key in "123"]))

    asyncio.run(scenario())


def test_no_widget_sends_a_control_character_whatever_text_it_is_given() -> None:
    async def scenario() -> None:
        async with running(recorded.load("running_2x2"), (100, 30)) as (app, pilot):
            await app.mount(Static(f"owned{HOSTILE}|", markup=False), Input(value=f"owned{HOSTILE}"))
            app.notify(f"owned{HOSTILE}", title=HOSTILE, markup=False)
            check_harmless(await settle(app, pilot))

    asyncio.run(scenario())


def test_a_title_and_a_copy_are_text() -> None:
    async def scenario() -> None:
        async with running(recorded.load("running_2x2"), (100, 30)) as (app, pilot):
            app.push_screen(TextDialog(f"owned [bold]x[/nope]{HOSTILE}", f"owned {HOSTILE}\n[/nope]"))
            shown = await settle(app, pilot)
            check_harmless(shown)
            assert "[bold]x[/nope]" in shown
            await press(app, pilot, "y")
            check_harmless((state_dir() / "copied.txt").read_text())

    asyncio.run(scenario())


def test_only_one_pane_looks_focused() -> None:
    async def scenario() -> None:
        async with running(recorded.load("running_2x2")) as (app, pilot):
            for _ in range(5):
                await press(app, pilot, "tab")
                lit = [
                    view
                    for view in app.screen.query(LineView)
                    if any(role == "accent" for line in view._lines[:1] for _, role in line.row) and view.can_focus
                ]
                assert lit == [app.focused]

    asyncio.run(scenario())


def test_hidden_screens_do_not_work() -> None:
    class Counting(recorded.RecordedSession):
        """Counts what is asked of the agents."""

        merged_calls = 0
        window_calls = 0

        async def merged(self, *args: Any, **more: Any) -> Any:
            self.merged_calls += 1
            return await super().merged(*args, **more)

        async def log(self, node: str, op: str, args: Any) -> Answer:
            self.window_calls += 1
            return await super().log(node, op, args)

    async def scenario() -> None:
        source = recorded.load("running_2x2")
        session = Counting()
        session.hosts, session.status, session.files = source.hosts, source.status, source.files
        async with running(session) as (app, pilot):
            await press(app, pilot, "4", "6")
            merged, windows = session.merged_calls, session.window_calls
            for _ in range(30):
                session.touch()
                app.tick()
                await pilot.pause(0.02)
            assert (session.merged_calls, session.window_calls) == (merged, windows)

    asyncio.run(scenario())


def test_reading_an_old_incident_while_a_new_one_comes() -> None:
    async def scenario() -> None:
        session = recorded.load("restarting_4x2")
        first = session.incidents[0]
        session.incidents.append({**first, "id": 2, "summary": "the second"})
        async with running(session) as (app, pilot):
            await press(app, pilot, "5", "left_square_bracket")
            assert "incident 1," in text_of(app)
            session.incidents.append({**first, "id": 3, "summary": "the third"})
            session.touch()
            await until(app, pilot, lambda: "1 of 3" in text_of(app))
            assert "incident 1," in text_of(app)

    asyncio.run(scenario())


def test_a_failure_without_a_verdict_yet_is_no_peace() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session) as (app, pilot):
            assert "no failure so far" in await press(app, pilot, "5")
            rank = next(rank for node in session.status["nodes"] for rank in node["ranks"] if rank["rank"] == 3)
            rank.update(state="failed", exit_code=-9, signal="SIGKILL")
            session.touch()
            assert "rank 3 (n2) failed, SIGKILL; finding the first failure" in await settle(app, pilot)

    asyncio.run(scenario())


def test_an_incident_of_a_group_that_was_replaced_is_no_news() -> None:
    async def scenario() -> None:
        session = recorded.load("restarting_4x2")
        async with running(session) as (app, pilot):
            assert "FIRST FAILURE" in await settle(app, pilot)
            generation = session.incidents[-1]["generation"] + 1
            last = session.events[-1]
            ran: Any = {**last, "seq": last["seq"] + 1, "type": "incident_healed", "generation": generation}
            session.events.append(ran)
            session.incidents = incidents_after(session.incidents, ran)
            healed = {"generation": generation, "incident": session.incidents[-1]}
            session.touch(status={**session.status, **healed})
            # The next group is being stopped, and why is not known yet.
            text = await settle(app, pilot)
            assert "FIRST FAILURE" not in text
            assert "ago: rank 3 on n2, CUDA out" in text
            # A spare has come in.
            running_again = {"state": "running", "condition": "running", "plan": None, "restarts": 0}
            session.touch(status={**session.status, **running_again})
            text = await settle(app, pilot)
            assert "RUNNING" in text
            assert "ago: rank 3 on n2, CUDA out" in text

    asyncio.run(scenario())


def test_the_newest_incident_and_the_one_of_an_event() -> None:
    async def scenario() -> None:
        session = recorded.load("restarting_4x2")
        first = session.incidents[0]
        session.incidents += [{**first, "id": 2}, {**first, "id": 3}]
        event = next(event for event in session.events if event["type"] == "incident")
        async with running(session) as (app, pilot):
            assert "incident 1," in await press(app, pilot, "5", *["left_square_bracket"] * 2)
            assert "incident 1," in await press(app, pilot, "1", "5")
            assert "incident 3," in await press(app, pilot, "1", "i")
            app.open_event(session.events.index(event))
            assert "incident 1," in await settle(app, pilot)
            await press(app, pilot, "1")
            session.touch(ended=True, status={**session.status, "state": "failed", "incident": session.incidents[-1]})
            assert "incident 3," in await settle(app, pilot)

    asyncio.run(scenario())


@pytest.mark.parametrize("screen", ["1", "6"])
def test_the_wheel_is_not_turned_back(screen: str) -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        last = session.events[-1]
        session.events += [{**last, "seq": last["seq"] + 1 + number} for number in range(200)]
        async with running(session) as (app, pilot):
            await press(app, pilot, screen)
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

    asyncio.run(scenario())


def test_a_lost_node_without_ranks_stays_on_the_heat_map() -> None:
    async def scenario() -> None:
        session = recorded.many(64, 8)
        session.status["nodes"][52].update(state="lost", ranks=[])
        async with running(session) as (app, _):
            assert re.search(r"n052 X {8}", text_of(app))

    asyncio.run(scenario())


def test_a_dialog_closes_once_whatever_keys_were_typed_ahead() -> None:
    async def scenario() -> None:
        async with running(recorded.load("running_2x2")) as (app, pilot):
            await press(app, pilot, "question_mark")
            page = app.screen
            assert isinstance(page, Dialog)
            page.action_cancel()
            page.action_cancel()
            await settle(app, pilot)
            assert app.screen is app.active_screen

    asyncio.run(scenario())
