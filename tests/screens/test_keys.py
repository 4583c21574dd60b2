"""The table of keys: nothing twice, and everything explained."""

from __future__ import annotations

from typing import Any

import pytest
from textual.binding import Binding

from supervisor.actions import ACTIONS
from supervisor.tui import keys
from supervisor.tui.app import SupervisorApp
from supervisor.tui.dialogs.actions import offered
from supervisor.tui.dialogs.base import Dialog
from supervisor.tui.screens.base import LiveScreen
from supervisor.tui.widgets.chart_view import ChartView
from supervisor.tui.widgets.picker import Picker
from supervisor.tui.widgets.rank_grid import RankGrid
from supervisor.tui.widgets.virtual_log import VirtualLog
from tests.screens.screens import playing

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
