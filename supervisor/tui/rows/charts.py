"""Curves, heat strips and time lines as rows of exact width. Pure.

In: values in the order of time, None or NaN where nothing is known. Out: text and rows.
"""

from __future__ import annotations

import itertools
import math
import statistics
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from supervisor.tui.rows.spans import add_span, spread
from supervisor.wording import values as words

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


def curve(
    values: Sequence[float], width: int, height: int, glyphs: Glyphs, ends: tuple[float, float] | None = None
) -> list[str]:
    """Return a curve between two ends, or its own, `height` lines from the top, of `width` cells."""
    ends = bounds(values) if ends is None else ends
    if ends is None or width <= 0 or height <= 0:
        return [" " * width] * height
    across, down = (1, 1) if glyphs.ascii else (2, 4)
    cells = [[0] * width for _ in range(height)]
    last = None
    for x, value in enumerate(spread_over(values, width * across)):
        if not math.isfinite(value):
            last = None
            continue
        y = _dot(value, ends, height * down)
        # The curve has no gaps: from the height of the last point to this one.
        for each in range(
            min(y, y if last is None else last + (y > last)), max(y, y if last is None else last - (y < last)) + 1
        ):
            cells[each // down][x // across] |= 1 if glyphs.ascii else _DOTS[x % 2][each % 4]
        last = y
    if glyphs.ascii:
        return ["".join("*" if cell else " " for cell in line) for line in cells]
    return ["".join(chr(_BRAILLE + cell) if cell else " " for cell in line) for line in cells]


def _dot(value: float, ends: tuple[float, float], dots: int) -> int:
    """Return how far from the top a value is, of so many dots."""
    low, high = ends
    return round((dots - 1) * (1 - (value - low) / (high - low))) if high > low else dots // 2


def labelled(
    lines: Sequence[str],
    ends: tuple[float, float] | None,
    names: Sequence[str],
    text: Callable[[float], str],
    role: str,
) -> list[Row]:
    """Return curves with their name, their greatest and their least value in GUTTER cells before them."""
    labels = _labels(len(lines), ends, names, text)
    return [((label, "dim"), (line, role)) for label, line in zip(labels, lines, strict=True)]


def _labels(
    lines: int, ends: tuple[float, float] | None, names: Sequence[str], text: Callable[[float], str]
) -> list[str]:
    """Return what stands before each line, in GUTTER cells: the greatest value, the names, the least value."""
    labels = [""] * lines
    if ends is not None and lines:
        labels[-1], labels[0] = text(ends[0]), text(ends[1])
        if ends[0] == ends[1] and lines > 2:
            labels[-1] = labels[0] = ""
            labels[lines // 2] = text(ends[0])
    for at, name in enumerate(names, 1):
        # Names are between the two ends; if there is only one line, the name matters more.
        if at < lines - 1:
            labels[at] = name
    if lines == 1 and names:
        labels[0] = names[0]
    return [f"{label:>{GUTTER - 1}.{GUTTER - 1}} " for label in labels]


def filled(values: Sequence[float], width: int, height: int, glyphs: Glyphs, most: float | None = None) -> list[str]:
    """Return columns from 0 to `most`, or to the greatest value, `height` lines from the top."""
    ends = bounds(values)
    top = most or (ends[1] if ends is not None and ends[1] > 0 else 1.0)
    levels = [value / top * height if math.isfinite(value) else 0.0 for value in spread_over(values, width)]
    lines = []
    for row in range(height - 1, -1, -1):
        shares = [level - row for level in levels]
        lines.append("".join(" " if share <= 0.02 else glyphs.level(share - 0.01) for share in shares))
    return lines or [""] * height


def heat(values: Sequence[float], usual: float | None, width: int, glyphs: Glyphs) -> Row:
    """Return a strip of one rank; times above `usual` are highlighted."""
    spans: list[Span] = []
    for value in spread_over(values, width):
        if not math.isfinite(value) or not usual:
            glyph, role = glyphs.dot, "rule"
        else:
            ratio = value / usual
            glyph, role = glyphs.level(ratio / 2), "bad" if ratio >= VERY_SLOW else "warn" if ratio >= SLOW else "ok"
        add_span(spans, glyph, role)
    return tuple(spans)


def means(rows: Iterable[Sequence[float]]) -> list[float]:
    """Return the mean of all rows that have a value, by bucket."""
    columns = map(known, zip(*rows, strict=True))
    return [sum(column) / len(column) if column else math.nan for column in columns]


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


# --- a chart with its values: over time, beside the median and the range of all


class Chart(NamedTuple):
    """One series over time beside those of all; they have the same buckets."""

    name: str
    text: Callable[[float], str]
    """How a value is written."""
    own: Sequence[float] = ()
    """Of what is selected; if nothing is, the median is the curve."""
    median: Sequence[float] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """The range, which is shaded."""

    @property
    def is_known(self) -> bool:
        """Whether there is anything to draw."""
        return any(map(math.isfinite, itertools.chain(self.own, self.median)))


# A chart has this many lines for its heading, and at least this many for its curve.
HEADING, LEAST_CURVE = 1, 4


def stacked(charts: Sequence[Chart], width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Return as many charts as fit below each other, each with its newest values."""
    count = min(len(charts), max(1, height // (HEADING + LEAST_CURVE)))
    rows: list[Row] = []
    for number, chart in enumerate(charts[:count]):
        lines = (height - len(rows)) // (count - number) - HEADING
        rows += [values_row(chart), *chart_rows(chart, width, lines, glyphs)]
    return rows[:height]


def values_row(chart: Chart) -> Row:
    """Return the name of a chart, with its newest values."""

    def newest(values: Sequence[float]) -> str:
        some = known(values)
        return chart.text(some[-1]) if some else ""

    low, high = newest(chart.low), newest(chart.high)
    parts = (("", newest(chart.own)), ("median ", newest(chart.median)), ("range ", f"{low} to {high}"))
    spans: list[Span] = [(f"  {chart.name}", "head")]
    for label, text in parts[: 2 + (low != high)]:
        spans += [(f"   {label}", "dim"), (text, "text")] if text else []
    return tuple(spans)


def chart_rows(chart: Chart, width: int, height: int, glyphs: Glyphs, names: Sequence[str] = ()) -> list[Row]:
    """Return the curve of a chart over the median and the range.

    Before it stand its ends, and names between them. The scale is logarithmic where a curve would show nothing.
    """
    inner, height = max(0, width - GUTTER), max(0, height)
    ends = bounds(itertools.chain(chart.own, chart.median, chart.low, chart.high))
    is_log = ends is not None and ends[0] > 0 and ends[1] > LOG_FROM * ends[0]

    def scaled(values: Sequence[float]) -> Sequence[float]:
        return [math.log(value) for value in values] if is_log else values

    scale, down = bounds(scaled(ends)) if ends else None, 1 if glyphs.ascii else 4

    def lines_of(values: Sequence[float]) -> list[int | None]:
        """Return the line of each column, from the top."""
        shown = spread_over(scaled(values), inner)
        dots = [_dot(value, scale, height * down) if scale and math.isfinite(value) else None for value in shown]
        return [None if dot is None else dot // down for dot in dots] or [None] * inner

    medians, tops, bottoms = lines_of(chart.median), lines_of(chart.high), lines_of(chart.low)
    thin, shade = ("-", ":") if glyphs.ascii else ("─", "░")
    rows: list[list[Span]] = []
    for y, line in enumerate(curve(scaled(chart.own or chart.median), inner, height, glyphs, scale)):
        cells: list[Span] = []
        for glyph, median, top, bottom in zip(line, medians, tops, bottoms, strict=True):
            if glyph != " ":
                cells.append((glyph, "accent"))
            elif median == y and chart.own:
                cells.append((thin, "warn"))
            elif top is not None and bottom is not None and top <= y <= bottom:
                cells.append((shade, "off"))
            else:
                cells.append((" ", ""))
        runs = itertools.groupby(cells, itemgetter(1))
        rows.append([("".join(text for text, _ in run), role) for role, run in runs])
    labels = _labels(height, ends, (*names, "(log)" if is_log else ""), chart.text)
    return [((label, "dim"), *spans) for label, spans in zip(labels, rows, strict=True)]


def axis(begin_s: float, end_s: float, width: int) -> Row:
    """Return the times below charts of `width` cells: how long they are, when they begin and end."""
    days = end_s - begin_s > 86400

    def text(time_s: float) -> str:
        return words.date_ns(int(time_s * 1e9))[5:16] if days else words.clock_ns(int(time_s * 1e9), millis=False)

    span = f"{words.age(end_s - begin_s):>{GUTTER - 1}} "
    return spread(((span, "dim"), (text(begin_s), "time")), ((text(end_s), "time"),), width)
