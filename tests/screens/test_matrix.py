"""Every screen of a small and a large job: one application per job and mode walks them all.

What the default shows is stored. The other modes, two at once, are held against it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from rich.style import Style

from supervisor.tui.app import SupervisorApp
from tests.screens import fabrics
from tests.screens.recorded import RecordedSession, load
from tests.screens.screens import compare, named, press, running, stored, strips_of
from tests.screens.test_snapshots import open_recording

# Keys from any screen to each, in the order of the walk.
SCREENS = {
    "map": ("1",),
    "nodes": ("2",),
    "ranks": ("3", "g"),
    "rank": ("3", "G"),
    "logs": ("4",),
    "incident": ("5", "g"),
    "run": ("6",),
    "nccl": ("7",),
}
DIALOGS = {
    "help": ("1", "question_mark"),
    "palette": ("1", "colon"),
    "menu": ("1", "x"),
    "confirm": ("1", "x", "r"),
    "typed": ("1", "x", "S"),
    "leave": ("1", "q"),
}
# What cannot be asked of a job that is over, or by who only looks, says so in a notice that goes with time.
ASKS = ("confirm", "typed")
# What says something else to who only looks.
FOR_LOOKERS = ("palette", "menu", "leave")

Check = Callable[[SupervisorApp], None]
SHOTS = [(name, size) for name in ("small", "large") for size in ((60, 16), (120, 30))]


def job(name: str) -> RecordedSession:
    """A job of four ranks, or one of 512 that was measured, has failed and runs again."""
    if name == "small":
        session = load("running_2x2")
        # What ranks print is theirs: progress bars, which are not ASCII.
        session.files = {file: lines for file, lines in session.files.items() if file[3] == "stdout"}
        return session
    session = open_recording("64x8 trained")
    session.fabric = fabrics.sample(64)
    [failed] = load("restarting_4x2").incidents
    others = [rank for rank in range(512) if rank != 3]
    victims = [{"ranks": others, "category": "gloo_connection_reset", "summary": "connection closed by its peer"}]
    session.incidents = [{**failed, "culprit_node": "n000", "victims": victims}]
    return session


async def walk(
    name: str, size: tuple[int, int], over: Iterable[str], check: Check | None = None, **options: Any
) -> dict[str, str]:
    """Return the text of every screen, and of these dialogs, at a size."""
    texts = {}
    async with running(job(name), size, **options) as (app, pilot):
        # So that there is a way back from the first one, as from all others.
        await press(app, pilot, "7")
        for screen, keys in {**SCREENS, **{dialog: DIALOGS[dialog] for dialog in over}}.items():
            texts[screen] = await press(app, pilot, *keys)
            if check is not None:
                check(app)
            if len(app.screen_stack) > 1:
                await press(app, pilot, "escape")
    return texts


@pytest.mark.parametrize(("name", "size"), SHOTS)
async def test_every_screen_looks_as_stored(name: str, size: tuple[int, int]) -> None:
    for screen, text in (await walk(name, size, DIALOGS)).items():
        compare(f"{name}_{screen}", {named(size): text})


def styles_of(app: SupervisorApp) -> list[tuple[Style, int]]:
    """The styles on the screen, each with the number of its cells."""
    segments = [segment for strip in strips_of(app) for segment in strip]
    return [(segment.style or Style(), segment.cell_length) for segment in segments]


@pytest.mark.parametrize(("name", "size"), SHOTS[1:3])
async def test_ascii_without_colour_says_the_same(
    name: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def colourless(app: SupervisorApp) -> None:
        colours = [colour for style, _ in styles_of(app) for colour in (style.color, style.bgcolor)]
        assert [colour for colour in colours if colour is not None and not colour.is_default] == []

    monkeypatch.setenv("NO_COLOR", "1")
    texts = await walk(name, size, DIALOGS, colourless, ascii_only=True)
    for screen, text in texts.items():
        assert text.isascii()
        default = stored(f"{name}_{screen}")[named(size)]
        for line, plain in zip(without_bar(default), without_bar(text), strict=True):
            cells = zip(line, plain.ljust(len(line)), strict=True)
            assert all(a == b or not a.isascii() for a, b in cells), (screen, line, plain)


@pytest.mark.parametrize(("name", "size"), SHOTS[1:3])
async def test_read_only_on_a_light_ground_offers_nothing(name: str, size: tuple[int, int]) -> None:
    def light(app: SupervisorApp) -> None:
        cells: Counter[str] = Counter()
        for style, count in styles_of(app):
            assert style.bgcolor is not None
            cells[style.bgcolor.name] += count
        ground, _ = cells.most_common(1)[0]
        assert ground.lower() in (app.theme_variables[name].lower() for name in ("background", "surface"))

    over = [dialog for dialog in DIALOGS if dialog not in ASKS] if name == "small" else []
    texts = await walk(name, size, over, light, theme="default-light", read_only=True)
    for screen, text in texts.items():
        assert "read-only" in text or "r/o" in text
        if screen not in FOR_LOOKERS:
            assert without_bar(text) == without_bar(stored(f"{name}_{screen}")[named(size)]), screen
        else:
            compare(f"{name}_{screen}", {f"{named(size)} read-only": text})


def without_bar(text: str) -> list[str]:
    """The lines of a screen but for the one that names the theme and read-only."""
    lines = text.splitlines()
    return [*lines[:-2], lines[-2][:54].rstrip(), lines[-1]]
