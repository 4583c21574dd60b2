"""Curves, heat strips and time lines as rows of exact width. Pure.

In: values in the order of time, None or NaN where nothing is known. Out: text and rows.
"""

from __future__ import annotations

import itertools
import math
import statistics
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from supervisor.tui.looks import Glyphs
    from supervisor.tui.rows.spans import Row, Span

# Bits of the dots of a braille character, by column and row.
_DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE: Final = 0x2800
# A rank that needs this many times the median is slow, or very slow.
SLOW, VERY_SLOW = 1.15, 1.5
# Cells before a curve, for its name and the names of its ends.
GUTTER: Final = 8
# A greatest value of this many times the least one makes the scale logarithmic.
LOG_FROM: Final = 20


def known(values: Iterable[float]) -> list[float]:
    """Return the values that are numbers."""
    return [value for value in values if math.isfinite(value)]


def bounds(values: Iterable[float]) -> tuple[float, float] | None:
    """Return the least and the greatest value, None where nothing is known."""
    some = known(values)
    return (min(some), max(some)) if some else None


def spread_over(values: Sequence[float], columns: int) -> list[float]:
    """Return the values of this many columns: the mean of those that fall into it, or between its neighbours."""
    count = len(values)
    if not count or not columns:
        return []
    if count > columns:
        cuts = [at * count // columns for at in range(columns + 1)]
        groups = [known(values[begin:end]) for begin, end in itertools.pairwise(cuts)]
        return [sum(group) / len(group) if group else math.nan for group in groups]
    stretched = []
    for column in range(columns):
        at = column * (count - 1) / max(1, columns - 1)
        left, share = values[int(at)], at - int(at)
        right = values[min(int(at) + 1, count - 1)]
        stretched.append(
            left + (right - left) * share if share and math.isfinite(right) else left if share < 0.5 else right
        )
    return stretched


def curve(values: Sequence[float], width: int, height: int, glyphs: Glyphs) -> list[str]:
    """Return a curve between its least and its greatest value, `height` lines from the top, of `width` cells."""
    ends = bounds(values)
    if ends is None or width <= 0 or height <= 0:
        return [" " * width] * height
    low, size = ends[0], (ends[1] - ends[0]) or 1.0
    across, down = (1, 1) if glyphs.ascii else (2, 4)
    cells = [[0] * width for _ in range(height)]
    last = None
    for x, value in enumerate(spread_over(values, width * across)):
        if not math.isfinite(value):
            last = None
            continue
        y = round((height * down - 1) * (1 - (value - low) / size)) if ends[1] > low else height * down // 2
        # The curve has no gaps: from the height of the last point to this one.
        for each in range(
            min(y, y if last is None else last + (y > last)), max(y, y if last is None else last - (y < last)) + 1
        ):
            cells[each // down][x // across] |= 1 if glyphs.ascii else _DOTS[x % 2][each % 4]
        last = y
    if glyphs.ascii:
        return ["".join("*" if cell else " " for cell in line) for line in cells]
    return ["".join(chr(_BRAILLE + cell) if cell else " " for cell in line) for line in cells]


def named_curve(
    name: str, values: Sequence[float], width: int, height: int, glyphs: Glyphs, text: Callable[[float], str]
) -> list[Row]:
    """Return a curve of `width` cells with its name and ends before it; logarithmic where a line would show nothing."""
    ends = bounds(values)
    is_log = ends is not None and ends[0] > 0 and ends[1] > LOG_FROM * ends[0]
    drawn = [math.log(value) for value in values] if is_log else values
    return labelled(curve(drawn, width, height, glyphs), ends, (name, "(log)" if is_log else ""), text, "accent")


def labelled(
    lines: Sequence[str],
    ends: tuple[float, float] | None,
    names: Sequence[str],
    text: Callable[[float], str],
    role: str,
) -> list[Row]:
    """Return curves with their name, their greatest and their least value in GUTTER cells before them."""
    labels = [""] * len(lines)
    if ends is not None and lines:
        labels[-1], labels[0] = text(ends[0]), text(ends[1])
    for at, name in enumerate(names, 1):
        # Between the two ends; of one line alone the name is what matters.
        if at < len(lines) - 1:
            labels[at] = name
    if len(lines) == 1:
        labels[0] = names[0]
    return [
        ((f"{label:>{GUTTER - 1}.{GUTTER - 1}} ", "dim"), (line, role))
        for label, line in zip(labels, lines, strict=True)
    ]


def filled(values: Sequence[float], width: int, height: int, glyphs: Glyphs) -> list[str]:
    """Return columns from 0 to the greatest value, `height` lines from the top."""
    ends = bounds(values)
    top = ends[1] if ends is not None and ends[1] > 0 else 1.0
    levels = [value / top * height if math.isfinite(value) else 0.0 for value in spread_over(values, width)]
    lines = []
    for row in range(height - 1, -1, -1):
        shares = [level - row for level in levels]
        lines.append("".join(" " if share <= 0.02 else glyphs.level(share - 0.01) for share in shares))
    return lines or [""] * height


def heat(values: Sequence[float], usual: float | None, width: int, glyphs: Glyphs, *, percent: bool = False) -> Row:
    """Return a strip of one rank; times above `usual` are highlighted. percent: of 100, nothing is highlighted."""
    spans: list[Span] = []
    for value in spread_over(values, width):
        if not math.isfinite(value) or not usual:
            glyph, role = glyphs.dot, "rule"
        elif percent:
            glyph, role = glyphs.level(value / 100), "accent"
        else:
            ratio = value / usual
            glyph, role = glyphs.level(ratio / 2), "bad" if ratio >= VERY_SLOW else "warn" if ratio >= SLOW else "ok"
        if spans and spans[-1][1] == role:
            spans[-1] = (spans[-1][0] + glyph, role)
        else:
            spans.append((glyph, role))
    return tuple(spans)


def usual(rows: Iterable[Sequence[float]]) -> float | None:
    """Return the median of all known values."""
    some = [value for row in rows for value in known(row)]
    return statistics.median(some) if some else None


def time_line(
    begin_s: float,
    end_s: float,
    width: int,
    glyphs: Glyphs,
    *,
    runs: Iterable[tuple[float, float]],
    marks: Iterable[tuple[float, str, str]],
) -> Row:
    """Return a line of the time: thick while a group ran (from, to), with marks (when, glyph, role)."""
    if width < 1:
        return ()
    cells: list[Span] = [("." if glyphs.ascii else "╌", "rule")] * width
    scale = width / max(1e-9, end_s - begin_s)

    def at(time_s: float) -> int:
        return min(width - 1, max(0, int((time_s - begin_s) * scale)))

    for start, stop in runs:
        for cell in range(at(start), at(min(stop, end_s)) + 1):
            cells[cell] = ("=" if glyphs.ascii else "━", "ok")
    for time_s, glyph, role in marks:
        if begin_s <= time_s <= end_s:
            cells[at(time_s)] = (glyph, role)
    return tuple(cells)


def bar(share: float, width: int, glyphs: Glyphs) -> Row:
    """Return a bar of progress."""
    done = min(width, max(0, round(share * width)))
    full, empty = ("#", ".") if glyphs.ascii else ("▓", "░")
    return ((full * done, "accent"), (empty * (width - done), "rule"))
