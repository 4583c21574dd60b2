"""One time zone and one moment for all screens, so that they read the same on every machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.tui import words

# 42 minutes after the recorded jobs have started.
NOW = 1795169000 + 42 * 60


@pytest.fixture(autouse=True)
def fixed_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """UTC, and always the same now."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    monkeypatch.setattr(words, "now", lambda: float(NOW))
    yield
    os.environ.pop("TZ", None)
    time.tzset()


@pytest.fixture(autouse=True)
def own_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No themes, no memory and no files of whoever runs the tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
