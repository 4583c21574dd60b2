"""The table of keys, nothing twice and everything explained; and the commands of the user, with keys of their own."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from textual.binding import Binding

from supervisor.actions import ACTIONS
from supervisor.tui import keys
from supervisor.tui.app import SupervisorApp
from supervisor.tui.commands import read
from supervisor.tui.dialogs.actions import offered
from supervisor.tui.dialogs.base import Dialog
from supervisor.tui.model import take
from supervisor.tui.screens.base import LiveScreen
from supervisor.tui.widgets.chart_view import ChartView
from supervisor.tui.widgets.picker import Picker
from supervisor.tui.widgets.rank_grid import RankGrid
from supervisor.tui.widgets.virtual_log import VirtualLog
from tests.screens import recorded
from tests.screens.screens import playing, press, running, text_of, until

TABLES: dict[str, dict[str, Any]] = {
    "hosts": {"key": "h", "command": "echo $HOSTS $(date) | less"},
    "ping": {"key": "ctrl+t", "command": "ping $NODE", "scope": "node", "wait": False},
    "trace": {
        "key": "f5", "command": "py-spy dump -p $PID; ls $LOGS", "scope": "rank", "on": "node", "confirm": True,
    },
}  # fmt: skip


class Terminal:
    """Takes down what would run on the terminal."""

    def __init__(self) -> None:
        self.ran: list[tuple[Sequence[str], dict[str, str]]] = []
        self.waited = 0

    async def run(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Run nothing."""
        own = {name: value for name, value in (env or {}).items() if os.environ.get(name) != value}
        self.ran.append((words, own))

    async def wait_enter(self) -> None:
        """Count."""
        self.waited += 1


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """What has the terminal instead of the screen."""
    terminal = Terminal()

    async def lend(_app: SupervisorApp, use: Callable[[Any], Awaitable[None]]) -> None:
        await use(terminal)

    monkeypatch.setattr(SupervisorApp, "lend", lend)
    return terminal


CONFIG = keys.Config({}, "bell", read(TABLES, Path("config.toml"), ""))


async def test_they_are_in_the_help_the_menu_and_the_palette() -> None:
    async with running(recorded.load("running_2x2"), (120, 60), config=CONFIG) as (app, pilot):
        text = await press(app, pilot, "3", "?")
        assert "  h              hosts: echo $HOSTS $(date) | less" in text
        await press(app, pilot, "escape", "x")
        await until(app, pilot, lambda: " h hosts" in text_of(app) and "    trace" in text_of(app))
        text = await press(app, pilot, "escape", ":", *"ping")
        assert "ping $NODE ctrl+t" in " ".join(text.split())


async def test_they_run_with_the_selection_as_variables(lent: Terminal) -> None:
    async with playing("running_2x2", (120, 30), config=CONFIG) as (app, pilot, session):
        await press(app, pilot, "3", "down", "h")
        # The line is as it was written: only the shell puts the values into it.
        job = {"JOB": session.job, "GENERATION": "0", "HOSTS": "n1,n2"}
        assert lent.ran.pop() == (["sh", "-c", "echo $HOSTS $(date) | less"], job)
        assert lent.waited == 1
        await press(app, pilot, "x", "end", "up", "enter")
        assert lent.ran.pop() == (["sh", "-c", "ping $NODE"], {**job, "NODE": "n1"})
        assert lent.waited == 1
        text = await press(app, pilot, "f5")
        assert "py-spy dump -p $PID; ls $LOGS" in text
        pid = session.status["nodes"][0]["ranks"][1]["pid"]
        assert f"PID={pid}" in text
        assert "rank 1 on n1" in text
        assert session.requests == []
        await press(app, pilot, "y")
        values = {**job, "NODE": "n1", "RANK": "1", "PID": str(pid)}
        asked = {"node": "n1", "rank": 1, "line": "py-spy dump -p $PID; ls $LOGS", "variables": values}
        assert session.requests == [("shell", asked)]


async def test_without_what_they_need_they_say_so(lent: Terminal) -> None:
    async with playing("running_2x2", (120, 30), config=CONFIG) as (app, pilot, session):
        assert "trace: select a rank" in await press(app, pilot, "2", "f5")
        session.status["nodes"][0]["ranks"][0]["pid"] = None
        session.touch()
        assert "trace: $PID has no value" in await press(app, pilot, "3", "g", "f5")
    async with running(recorded.load("running_2x2"), (120, 30), config=CONFIG, read_only=True) as (app, pilot):
        assert "trace: this supervisor is read-only" in await press(app, pilot, "3", "f5")
        await press(app, pilot, "h")
        assert len(lent.ran) == 1, "what runs here changes nothing on a node"
        assert "read-only" in text_of(app)


def test_a_value_that_a_shell_may_interpret_is_refused() -> None:
    session = recorded.load("running_2x2")
    session.status["nodes"][0]["name"] = "-oProxyCommand=reboot"
    command = next(one for one in CONFIG.commands if one.label == "ping")
    with pytest.raises(LookupError, match="NODE would be '-oProxyCommand=reboot'"):
        command.variables(take(session), "-oProxyCommand=reboot", None)
    # One odd name does not refuse the commands that do not use it.
    variables = command.variables(take(session), "n2", None)
    assert variables["NODE"] == "n2"
    assert "HOSTS" not in variables


TAKEN = {f"ctrl+{letter}" for letter in "sqzabhijm"}


WIDGETS: dict[str, Any] = {"logs": VirtualLog, "map": RankGrid}


def keys_of(bindings: list[Binding]) -> list[str]:
    """All keys of some bindings."""
    return [key.strip() for binding in bindings for key in binding.key.split(",")]


@pytest.mark.parametrize("screen", [*(name for name, _ in keys.SCREENS), "launch"])
def test_no_key_is_bound_twice_on_a_screen(screen: str) -> None:
    bound = keys_of(keys.bindings(screen))
    assert sorted(set(bound)) == sorted(bound)
    widget: Any = WIDGETS.get(screen, Picker)
    assert not set(bound) & set(keys_of([b for b in widget.BINDINGS if isinstance(b, Binding)]))


def test_keys_that_terminals_use_are_left_alone() -> None:
    classes: list[Any] = [SupervisorApp, *SupervisorApp.MODES.values(), VirtualLog, Picker, RankGrid, ChartView, Dialog]
    for owner in classes:
        bound = keys_of([binding for binding in owner.BINDINGS if isinstance(binding, Binding)])
        assert not set(bound) & TAKEN, owner


async def test_every_action_of_a_screen_exists() -> None:
    async with playing("running_2x2") as (app, _, _):
        for name in SupervisorApp.MODES:
            await app.switch_mode(name)
            screen = app.screen
            assert isinstance(screen, LiveScreen)
            assert name == screen.NAME
            for key in keys.of(name):
                if key.bound:
                    action = key.action.partition("(")[0]
                    owner = app if action.startswith("app.") else screen
                    assert hasattr(owner, "action_" + action.removeprefix("app.")), (name, key.id)


def test_every_key_has_a_help_text() -> None:
    assert all(key.help for key in keys.KEYS)
    assert [key.id for key in keys.KEYS if key.palette and not key.label] == []
    assert len({key.id for key in keys.KEYS}) == len(keys.KEYS)
    letters = [action.key for action in offered()]
    assert len(set(letters)) == len(letters)
    for action in ACTIONS:
        if action.destructive:
            assert action.confirm >= 1, action.id
            assert action.help


@pytest.mark.parametrize("screen", [*(name for name, _ in keys.SCREENS), "launch"])
def test_the_footer_has_the_keys_that_matter(screen: str) -> None:
    labels = [key.label for key in keys.footer(screen)]
    assert "help" in labels
    assert "actions" in labels
    assert labels[-1] == "detach"
