"""The user's own commands: where they are listed, what they run with, and what is refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from supervisor.tui import keys
from supervisor.tui.app import SupervisorApp
from supervisor.tui.commands import read
from supervisor.tui.dialogs import base
from supervisor.tui.model import take
from tests.screens import recorded
from tests.screens.screens import press, running, text_of, until

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
    monkeypatch.setattr(base, "GUARD_S", 0.0)
    return terminal


CONFIG = keys.Config({}, "bell", read(TABLES, Path("config.toml"), ""))


def test_they_are_in_the_help_the_menu_and_the_palette() -> None:
    async def scenario() -> None:
        async with running(recorded.load("running_2x2"), (120, 60), config=CONFIG) as (app, pilot):
            text = await press(app, pilot, "3", "?")
            assert "  h              hosts: echo $HOSTS $(date) | less" in text
            await press(app, pilot, "escape", "x")
            await until(app, pilot, lambda: " h hosts" in text_of(app) and "    trace" in text_of(app))
            text = await press(app, pilot, "escape", ":", *"ping")
            assert "ping $NODE ctrl+t" in " ".join(text.split())

    asyncio.run(scenario())


def test_they_run_with_the_selection_as_variables(lent: Terminal) -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session, (120, 30), config=CONFIG) as (app, pilot):
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

    asyncio.run(scenario())


def test_without_what_they_need_they_say_so(lent: Terminal) -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session, (120, 30), config=CONFIG) as (app, pilot):
            assert "trace: select a rank" in await press(app, pilot, "2", "f5")
            session.status["nodes"][0]["ranks"][0]["pid"] = None
            session.touch()
            assert "trace: $PID has no value" in await press(app, pilot, "3", "g", "f5")
        async with running(recorded.load("running_2x2"), (120, 30), config=CONFIG, read_only=True) as (app, pilot):
            assert "trace: this supervisor is read-only" in await press(app, pilot, "3", "f5")
            await press(app, pilot, "h")
            assert len(lent.ran) == 1, "what runs here changes nothing on a node"
            assert "read-only" in text_of(app)

    asyncio.run(scenario())


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
