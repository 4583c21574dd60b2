"""The application on a recorded job, without a terminal: what is on the screen, as text of exact width.

In: a recording, a size. Out: text; a comparison with the stored one (UPDATE_SNAPSHOTS=1 stores it anew).
"""

from __future__ import annotations

import asyncio
import difflib
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from textual import events
from textual._context import visible_screen_stack
from textual.keys import _character_to_key, key_to_character
from textual.pilot import Pilot
from textual.strip import Strip

from supervisor.tui.app import SupervisorApp
from supervisor.tui.shell import ShellOptions
from tests.screens.recorded import RecordedSession, load

SNAPSHOTS = Path(__file__).parent / "snapshots"
SIZES = ((60, 16), (80, 24), (120, 30), (160, 48))
# Of the processor, in seconds: on a machine under load it may take minutes until a test has had so much of it.
DEADLINE_S = 30.0
MARK = re.compile(r"^=== (\d+x\d+.*)\n", re.MULTILINE)


@asynccontextmanager
async def running(
    session: RecordedSession, size: tuple[int, int] = (80, 24), **options: Any
) -> AsyncIterator[tuple[SupervisorApp, Pilot[int]]]:
    """The application with its first screen painted."""
    theme = options.pop("theme", None)
    app = SupervisorApp(session, ShellOptions(**options), theme=theme)
    async with running_app(app, size, ascii_only=options.get("ascii_only", False)) as pilot:
        yield app, pilot


@asynccontextmanager
async def playing(
    name: str, size: tuple[int, int] = (80, 24), **options: Any
) -> AsyncIterator[tuple[SupervisorApp, Pilot[int], RecordedSession]]:
    """The same on a recording of tests/screens/data."""
    session = load(name)
    async with running(session, size, **options) as (app, pilot):
        yield app, pilot, session


@asynccontextmanager
async def running_app(
    app: SupervisorApp, size: tuple[int, int], *, ascii_only: bool = False
) -> AsyncIterator[Pilot[int]]:
    """An application with its first screen painted."""
    # The test runner's own output may not be UTF-8, as a terminal's is.
    app.shell.glyphs = type(app.shell.glyphs)(ascii_only)
    async with app.run_test(size=size, notifications=True) as pilot:
        await settle(app, pilot)
        yield pilot


def text_of(app: SupervisorApp) -> str:
    """The screen as text; every line must have the width of the terminal."""
    lines = [strip.text for strip in strips_of(app)]
    width, height = app.size
    assert len(lines) == height, f"{len(lines)} lines instead of {height}"
    for number, line in enumerate(lines):
        assert cell_len(line) == width, f"line {number} has {cell_len(line)} cells instead of {width}: {line!r}"
    return "\n".join(line.rstrip() for line in lines) + "\n"


def strips_of(app: SupervisorApp) -> list[Strip]:
    """The lines of the screen, with what lies below a dialog, whether or not it was painted before."""
    visible_screen_stack.set(app._background_screens)
    return app.screen._compositor.render_strips()


def _is_laid_out(app: SupervisorApp) -> bool:
    """Whether the screen has lines for the whole terminal: one that was just pushed or resized gets them later."""
    return app.screen._compositor.size == app.size


async def settle(app: SupervisorApp, pilot: Pilot[int]) -> str:
    """Let the application work until it has nothing to do, and one more tick changes nothing; returns the screen."""
    text = ""
    end = time.process_time() + DEADLINE_S
    while time.process_time() < end:
        await _turn(app, pilot)
        before, text = text, text_of(app) if _is_laid_out(app) else ""
        if text and text == before:
            return text
    raise AssertionError("the screen does not come to rest")


# What tests/agents calls it.
rest = settle


async def _turn(app: SupervisorApp, pilot: Pilot[int]) -> None:
    """Let the application do what there is to do now."""
    app.tick()
    await pilot.pause(0.008)
    await _run_what_is_ready(app)


async def _run_what_is_ready(app: SupervisorApp) -> None:
    """Let the event loop run until all tasks wait for a time or something from outside, and the screen is laid out."""
    loop = asyncio.get_running_loop()
    end = time.process_time() + DEADLINE_S
    while time.process_time() < end:
        await asyncio.sleep(0)
        if app._exit:
            return
        if loop._ready:  # type: ignore[attr-defined]
            continue
        screen = app.screen
        if not (screen._layout_required or screen._scroll_required or screen._dirty_widgets or screen._callbacks):
            return
        screen._on_timer_update()
    raise AssertionError("the application is never idle")


async def until(app: SupervisorApp, pilot: Pilot[int], true: Callable[[], bool]) -> None:
    """Let the application work until something is true of a screen that is laid out."""
    end = time.process_time() + DEADLINE_S
    while time.process_time() < end:
        if _is_laid_out(app) and true():
            return
        app.tick()
        await pilot.pause(0.005)
    raise AssertionError("it did not become true:\n" + text_of(app))


async def press(app: SupervisorApp, pilot: Pilot[int], *keys: str) -> str:
    """Press keys one after the other, and return what is on the screen then."""
    for key in keys:
        type_key(app, key)
        await _turn(app, pilot)
    return await settle(app, pilot)


def type_key(app: SupervisorApp, key: str) -> None:
    """Send a key as a terminal does. (`Pilot.press` waits for 60 ms or more.)"""
    driver = app._driver
    assert driver is not None
    name = _character_to_key(key) if len(key) == 1 and not key.isalnum() else key
    event = events.Key(name, key if len(key) == 1 else key_to_character(name))
    event.set_sender(app)
    driver.send_message(event)


def stored(name: str) -> dict[str, str]:
    """The stored texts of one screen by size, `80x24`, or size and mode, `80x24 ascii`."""
    path = SNAPSHOTS / f"{name}.txt"
    parts = MARK.split(path.read_text(encoding="utf-8")) if path.exists() else [""]
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def compare(name: str, texts: Mapping[str, str]) -> None:
    """Compare one screen's texts with the stored ones; on a difference say where."""
    before = stored(name)
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        merged = {**before, **texts}
        reported = "".join(f"=== {size}\n{merged[size]}" for size in sorted(merged, key=_order))
        (SNAPSHOTS / f"{name}.txt").write_text(reported, encoding="utf-8")
        return
    diffs = [
        "\n".join(difflib.unified_diff(old, text.splitlines(), f"{size} stored", f"{size} now", lineterm="", n=1))
        for size, text in texts.items()
        if (old := before.get(size, "").splitlines()) != text.splitlines()
    ]
    if diffs:
        raise AssertionError("\n".join([f"{name} looks different (UPDATE_SNAPSHOTS=1 stores it)", *diffs]))


def _order(size: str) -> tuple[str, int]:
    cells, _, mode = size.partition(" ")
    return mode, int(cells.partition("x")[0])


def named(size: tuple[int, int]) -> str:
    """A size as it is written."""
    return f"{size[0]}x{size[1]}"
