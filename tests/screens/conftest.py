"""One time zone and one moment for all screens, so that they read the same on every machine; what they look like is
read once for all of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

from supervisor.tui import times
from supervisor.tui.dialogs import base

_parse = Stylesheet._parse_rules
_parsed: dict[Any, list[RuleSet]] = {}

# 42 minutes after the recorded jobs have started.
NOW = 1795169000 + 42 * 60


@pytest.fixture(autouse=True)
def fixed_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """UTC, and always the same now."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    monkeypatch.setattr(times, "now", lambda: float(NOW))
    yield
    os.environ.pop("TZ", None)
    time.tzset()


@pytest.fixture(autouse=True)
def own_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No themes, no memory and no files of whoever runs the tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(autouse=True)
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's style sheets are the same for each application, and take a quarter of a second of each."""

    def parse(self: Stylesheet, *source: Any, **more: Any) -> list[RuleSet]:
        key = (frozenset(self._variables.items()), source, *more.items())
        if key not in _parsed:
            _parsed[key] = _parse(self, *source, **more)
        return _parsed[key]

    monkeypatch.setattr(Stylesheet, "_parse_rules", parse)


@pytest.fixture(autouse=True)
def no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a test come faster than any hand, and confirm all the same."""
    monkeypatch.setattr(base, "GUARD_S", 0.0)
