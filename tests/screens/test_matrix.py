"""Every screen at every size, of jobs of 2 to 512 ranks: one application per job and mode walks them all.

What the default shows is stored. The other modes are held against it for the smallest and the largest job, at the
smallest and the largest size; `make nightly` has all jobs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rich.segment import Segment
from textual.pilot import Pilot

from supervisor.tui.app import SupervisorApp
from tests.examples import nightly
from tests.screens.jobs import RANKS, job
from tests.screens.screens import SIZES, compare, named, rest, running, stored, strips_of, type_key

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
# The same over any job: in the modes that show no other text they are walked over the smallest one.
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

ENDS = (SIZES[0], SIZES[-1])
FEW_JOBS = [pytest.param(ranks, marks=[nightly] * (ranks not in (min(RANKS), max(RANKS)))) for ranks in RANKS]

Texts = dict[str, dict[str, str]]
Check = Callable[[SupervisorApp], None]


def dialogs(ranks: int) -> list[str]:
    """The dialogs that a job of so many ranks has."""
    return [name for name in DIALOGS if not (ranks == 16 and name in (*ASKS, "leave"))]


def plain_dialogs(ranks: int) -> list[str]:
    """Those that a mode walks."""
    return dialogs(ranks) if ranks == min(RANKS) else []


async def walk(
    ranks: int, over: Sequence[str], check: Check | None = None, sizes: Sequence[tuple[int, int]] = ENDS, **options: Any
) -> Texts:
    """Return the text of every screen, and of these dialogs, at these sizes."""
    ways = SCREENS | {name: DIALOGS[name] for name in over}
    texts: Texts = {name: {} for name in ways}
    async with running(job(ranks), sizes[0], **options) as (app, pilot):
        for size in sizes:
            await pilot.resize_terminal(*size)
            for name, keys in ways.items():
                texts[name][named(size)] = await typed(app, pilot, *keys)
                if check is not None:
                    check(app)
                if len(app.screen_stack) > 1:
                    await typed(app, pilot, "escape")
    return texts


async def typed(app: SupervisorApp, pilot: Pilot[int], *keys: str) -> str:
    """Press keys, and return what is on the screen once the application has nothing to do."""
    text = ""
    for key in keys:
        type_key(app, key)
        text = await rest(app, pilot)
    return text


def without_bar(text: str) -> list[str]:
    """The lines of a screen but for the one that names the theme and read-only."""
    lines = text.splitlines()
    return [*lines[:-2], lines[-2][:54].rstrip(), lines[-1]]


def segments(app: SupervisorApp) -> list[Segment]:
    """What is on the screen, with its styles."""
    return [segment for strip in strips_of(app) for segment in strip]


@pytest.mark.parametrize("ranks", RANKS)
def test_default(ranks: int) -> None:
    for name, texts in asyncio.run(walk(ranks, dialogs(ranks), sizes=SIZES)).items():
        compare(f"{ranks}_{name}", texts)


@pytest.mark.parametrize("ranks", FEW_JOBS)
def test_ascii_differs_where_the_default_is_not_ascii(ranks: int) -> None:
    for name, texts in asyncio.run(walk(ranks, plain_dialogs(ranks), ascii_only=True)).items():
        default = stored(f"{ranks}_{name}")
        for size, text in texts.items():
            assert text.isascii()
            for line, plain in zip(default[size].splitlines(), text.splitlines(), strict=True):
                cells = zip(line, plain.ljust(len(line)), strict=True)
                assert all(a == b or not a.isascii() for a, b in cells), (line, plain)


@pytest.mark.parametrize("ranks", FEW_JOBS)
def test_no_color_has_the_same_text_and_no_colour(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def colourless(app: SupervisorApp) -> None:
        styles = [segment.style for segment in segments(app) if segment.style is not None]
        colours = [colour for style in styles for colour in (style.color, style.bgcolor) if colour is not None]
        assert [colour for colour in colours if not colour.is_default] == []

    monkeypatch.setenv("NO_COLOR", "1")
    same_text(ranks, asyncio.run(walk(ranks, plain_dialogs(ranks), colourless)))


@pytest.mark.parametrize("ranks", FEW_JOBS)
def test_light_has_the_same_text_on_a_light_ground(ranks: int) -> None:
    def light(app: SupervisorApp) -> None:
        cells: Counter[str] = Counter()
        for segment in segments(app):
            assert segment.style is not None
            assert segment.style.bgcolor is not None
            cells[segment.style.bgcolor.name] += segment.cell_length
        ground, _ = cells.most_common(1)[0]
        assert ground.lower() in (app.theme_variables[name].lower() for name in ("background", "surface"))

    same_text(ranks, asyncio.run(walk(ranks, plain_dialogs(ranks), light, theme="default-light")))


def same_text(ranks: int, texts: Texts) -> None:
    """Hold a mode's texts against the default's."""
    for name, sizes in texts.items():
        default = stored(f"{ranks}_{name}")
        for size, text in sizes.items():
            assert without_bar(text) == without_bar(default[size]), f"{name} {size}"


@pytest.mark.parametrize("ranks", FEW_JOBS)
def test_read_only_says_so_and_offers_nothing(ranks: int) -> None:
    over = [name for name in plain_dialogs(ranks) if name not in ASKS]
    texts = asyncio.run(walk(ranks, over, sizes=SIZES, read_only=True))
    for name, sizes in texts.items():
        assert all("read-only" in text or "r/o" in text for text in sizes.values())
        if name in FOR_LOOKERS:
            compare(f"{ranks}_{name}", {f"{size} read-only": text for size, text in sizes.items()})
    same_text(ranks, {name: sizes for name, sizes in texts.items() if name not in FOR_LOOKERS})
