"""One animated SVG from pictures of a screen: what is drawn alike in several of them is stored once, with its times.

In: SVGs as Textual exports them, each with the second at which it appears. Out: one SVG that loops, without a script.

Each piece of text or background is shown and hidden by a CSS animation. Where there is none, or the reader prefers
reduced motion, one of the pictures is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

_VIEW = re.compile(r'viewBox="([^"]*)"')
_WINDOW = re.compile(r'</defs>\s*(<rect [^>]*/>)<text [^>]*>[^<]*</text>\s*(<g .*?</g>)\s*(<g transform="[^"]*")', re.S)
_CAPTION = re.compile(r'<text class="[\w-]+-title"([^>]*>[^<]*)</text>')
_LOOK = re.compile(r"\.[\w-]+-(r\d+) \{ ([^}]*) \}")
_PIECE = re.compile(
    r'(<rect fill="[^"]*" x=[^>]*)( shape-rendering="crispEdges")/>|<text class="[\w-]+-(r\d+)"([^>]*>[^<]*)<'
)
_CLIP = re.compile(r' clip-path="[^"]*"')
_TITLE, _BACKGROUND, _TEXT = '<text class="title"', "<rect", '<text class="c'
_STYLE = """text{{font:20px "Fira Code",Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}}
.title{{font:bold 18px arial,sans-serif}}
rect{{shape-rendering:crispEdges}}
.f{{visibility:hidden;animation:{length_s:g}s step-end infinite}}
.still{{visibility:visible}}
@media(prefers-reduced-motion:reduce){{.f{{animation:none!important}}}}
{looks}
{keyframes}"""

# From which frame to which one, the latter not included, something is shown.
Life = tuple[int, int]


class Frame(NamedTuple):
    """What is on the screen from a time on."""

    at_s: float
    svg: str


def pieces(svg: str, looks: dict[str, str] | None = None) -> list[str]:
    """Return the backgrounds, the texts and the title of a picture; `looks` gets a name for each style of text."""
    named = {} if looks is None else looks
    style = dict(_LOOK.findall(svg))
    found = []
    for rect, _edges, look, rest in _PIECE.findall(svg):
        if rect:
            found.append(f"{rect}/>")
        else:
            name = named.setdefault(style[look], str(len(named)))
            found.append(f'{_TEXT}{name}"{_CLIP.sub("", rest)}</text>')
    return found + [f"{_TITLE}{title}</text>" for title in _CAPTION.findall(svg)]


def animate(frames: Sequence[Frame], length_s: float, still: int) -> str:
    """Return the animation, which begins again after `length_s`; `still` is the frame for who sees no animation."""
    looks: dict[str, str] = {}
    lives = _lives([pieces(frame.svg, looks) for frame in frames])
    times = [100 * (frame.at_s - frames[0].at_s) / length_s for frame in frames] + [100.0]
    names = {life: f"f{number}" for number, life in enumerate(sorted({life for life, _piece in lives}))}
    window, view = _WINDOW.search(frames[0].svg), _VIEW.search(frames[0].svg)
    if window is None or view is None:
        raise ValueError("these are no pictures as Textual exports them")
    border, buttons, screen = window.groups()
    style = _STYLE.format(
        length_s=length_s,
        looks="\n".join(f".c{name}{{{look}}}" for look, name in looks.items()),
        keyframes="\n".join(_keyframes(name, times[life[0]], times[life[1]]) for life, name in names.items()),
    )

    def groups(tag: str) -> str:
        kind = sorted(one for one in lives if one[1].startswith(tag))
        return "".join(
            _group(life, [piece for _life, piece in pair], names[life], len(frames), still)
            for life, pair in groupby(kind, lambda one: one[0])
        )

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view[1]}">\n<style>\n{style}\n</style>\n{border}\n'
        f"{buttons}\n{groups(_TITLE)}{screen}>\n{groups(_BACKGROUND)}{groups(_TEXT)}</g>\n</svg>\n"
    )


def _lives(frames: Sequence[Sequence[str]]) -> list[tuple[Life, str]]:
    """Return when each piece is shown; one that comes back is listed again."""
    lives: list[tuple[Life, str]] = []
    begun: dict[str, int] = {}
    for number, frame in enumerate([*frames, []]):
        shown = dict.fromkeys(frame)
        over = [piece for piece in begun if piece not in shown]
        lives += [((begun.pop(piece), number), piece) for piece in over]
        for piece in shown:
            begun.setdefault(piece, number)
    return lives


def _group(life: Life, shown: Iterable[str], name: str, end: int, still: int) -> str:
    """Return what is shown in the same frames; the frames of all are counted by `end`."""
    kind = "f still" if life[0] <= still < life[1] else "f"
    attributes = f' class="{kind}" style="animation-name:{name}"' if life != (0, end) else ""
    return "\n".join([f"<g{attributes}>", *shown, "</g>\n"])


def _keyframes(name: str, begin: float, end: float) -> str:
    """Return the rule of what is shown between two percentages."""
    steps = [(0.0, "hidden")] if begin else []
    steps.append((begin, "visible"))
    if end < 100:
        steps.append((end, "hidden"))
    return f"@keyframes {name}{{{''.join(f'{at:.4g}%{{visibility:{what}}}' for at, what in steps)}}}"
