"""The animated picture: well-formed, one frame per screen at its time, and one still where nothing is animated."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

from rich.console import Console
from rich.text import Text

from tests.screens.animation import Frame, animate

SCREENS = ("step 1\nloss 9 & <falling>", "step 2\nloss 9 & <falling>", "step 1\nloss [red]8[/red]")
SVG = "{http://www.w3.org/2000/svg}"
Shown = list[tuple[float, float]]


def picture(markup: str, title: str = "$ up") -> str:
    """A picture as Textual exports it."""
    console = Console(
        width=20, height=2, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text.from_markup(markup, style="on #102030"))
    return console.export_svg(title=title)


def film(still: int = 1) -> str:
    frames = [Frame(at_s, picture(screen)) for at_s, screen in zip((3.0, 4.5, 7.0), SCREENS, strict=True)]
    return animate(frames, 6.0, still)


def shown(svg: str) -> dict[str, Shown]:
    """When each text is visible, in percent of the length."""
    rules = re.findall(r"@keyframes (\w+)\{(.*)\}", svg)
    times: dict[str, Shown] = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        name = (group.get("style") or "").removeprefix("animation-name:")
        steps = re.findall(r"([\d.]+)%\{visibility:(\w+)\}", dict(rules).get(name, "0%{visibility:visible}"))
        ends = [*(float(at) for at, _what in steps[1:]), 100.0]
        spans = [(float(at), end) for (at, what), end in zip(steps, ends, strict=True) if what == "visible"]
        for text in group.findall(f"{SVG}text"):
            times.setdefault((text.text or "").replace("\xa0", " "), []).extend(spans)
    return times


def test_every_text_is_shown_in_its_frames_only() -> None:
    times = shown(film())
    assert sorted(times["step 1"]) == [(0.0, 25.0), (66.67, 100.0)]
    assert times["step 2"] == [(25.0, 66.67)]
    # In two frames, and stored once.
    assert times["loss 9 & <falling>"] == [(0.0, 66.67)]
    assert times["8"] == [(66.67, 100.0)]
    assert times["$ up"] == [(0.0, 100.0)]
    assert {at for spans in times.values() for at, _end in spans} == {0.0, 25.0, 66.67}


def test_it_loops_and_shows_one_frame_where_nothing_moves() -> None:
    svg = film(still=1)
    assert "animation:6s step-end infinite" in svg
    assert "prefers-reduced-motion" in svg
    still = [group for group in ElementTree.fromstring(svg).iter(f"{SVG}g") if "still" in (group.get("class") or "")]
    texts = [(text.text or "").replace("\xa0", " ") for group in still for text in group.iter(f"{SVG}text")]
    assert sorted(texts) == ["loss 9 & <falling>", "step 2"]


def test_backgrounds_lie_below_the_texts() -> None:
    svg = film()
    assert 0 < svg.rindex("<rect") < svg.index('<text class="c')
