"""Rows of text spans that are exactly as wide as they say, before any colour is known.

In: text from anywhere, roles or styles. Out: rows, wrapped to a width in cells, and segments for the terminal.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style

from remote_agent.text.controls import escape_controls

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Span = tuple[str, "str | Style"]
"""Text and how it looks: the name of a role of the theme, or a style of its own (colours of a log line)."""

Row = tuple[Span, ...]

EMPTY: Final[Row] = ()

_BREAKS: Final = {9: " ", 10: " ", 13: " "}


def clean(text: object) -> str:
    """Return text of a node, safe to print on one line: escapes for control characters and invisible marks."""
    plain = str(text)
    return plain if plain.isprintable() else escape_controls(plain.translate(_BREAKS))


def width_of(text: str) -> int:
    """Return the width in terminal cells."""
    return len(text) if text.isascii() else cell_len(text)


def fit(text: object, width: int, more: str = "…") -> str:
    """Return the text in exactly `width` cells: padded with spaces, or cut with a mark that says so."""
    if width <= 0:
        return ""
    plain = clean(text)
    size = width_of(plain)
    if size <= width:
        return plain + " " * (width - size)
    if width <= len(more):
        return set_cell_size(plain, width)
    return set_cell_size(plain, width - len(more)) + more


def add_span(spans: list[Span], text: str, role: str) -> None:
    """Add a text at the end, to the last span if that has the same role."""
    if spans and spans[-1][1] == role:
        spans[-1] = (spans[-1][0] + text, role)
    else:
        spans.append((text, role))


def row_width(row: Iterable[Span]) -> int:
    """Return the width of a row in cells."""
    return sum([len(text) if text.isascii() else cell_len(text) for text, _ in row])


def fit_row(row: Sequence[Span], width: int, more: str = "…") -> Row:
    """Return the row in exactly `width` cells; a cut is marked."""
    total = row_width(row)
    if total == width:
        return tuple(row)
    if total < width:
        return (*row, (" " * (width - total), ""))
    if width <= len(more):
        return crop_row(row, 0, width)
    cropped = crop_row(row, 0, width - len(more))
    return (*cropped, (more, cropped[-1][1] if cropped else ""))


def crop_row(row: Sequence[Span], left: int, width: int) -> Row:
    """Return exactly `width` cells of the row from cell `left` on; a wide character cut in half becomes a space."""
    spans: list[Span] = []
    start = 0
    end = left + width
    for text, role in row:
        size = width_of(text)
        if start + size > left and start < end:
            piece = _crop_text(text, max(0, left - start), min(size, end - start))
            if piece:
                spans.append((piece, role))
        start += size
        if start >= end:
            break
    missing = end - max(start, left)
    if missing > 0:
        spans.append((" " * missing, ""))
    return tuple(spans)


def _crop_text(text: str, left: int, stop: int) -> str:
    if text.isascii():
        return text[left:stop]
    if left:
        head = set_cell_size(text, left)
        # set_cell_size ends with a space where it cut a wide character: that half stands for a space here too.
        cut_wide = not text.startswith(head)
        rest = text[len(head) :]
        return set_cell_size((" " if cut_wide else "") + rest, stop - left)
    return set_cell_size(text, stop)


def spread(left: Sequence[Span], end: Sequence[Span], width: int, more: str = "…") -> Row:
    """Return one row with `left` at the left edge and `end` at the right one; `left` is cut if both do not fit."""
    room = width - row_width(end)
    if room <= 0:
        return fit_row(end, width, more)
    return (*fit_row(left, room, more), *end)


def text_of(row: Iterable[Span]) -> str:
    """Return the characters of a row."""
    return "".join([text for text, _ in row])


class Palette:
    """The styles of a theme by role."""

    def __init__(self, name: str, roles: dict[str, Style]) -> None:
        self.name = name
        self._roles = roles
        self._none = Style.null()

    def style(self, role: str | Style) -> Style:
        """Return the style of a role; no style for a role that the theme does not know."""
        return role if isinstance(role, Style) else self._roles.get(role, self._none)

    def segments(self, row: Row, width: int, base: Style, overlay: str = "", more: str = "…") -> list[Segment]:
        """Return the row in exactly `width` cells on a base style; `overlay` is a role laid over the whole row."""
        fitted, over = fit_row([(clean(text), role) for text, role in row], width, more), self.style(overlay)
        styles = {role: self._on(base, over, role) for role in {role for _, role in fitted}}
        return [Segment(text_of(spans), styles[role]) for role, spans in groupby(fitted, key=itemgetter(1))]

    def _on(self, base: Style, over: Style, role: str | Style) -> Style:
        style = self.style(role)
        # A hit or an alarm has a background of its own, which stays visible on a selected row.
        loud = style.bgcolor is not None or style.reverse
        if over.reverse and not loud:
            # Reversed colours of the text would be a patchwork of backgrounds.
            style = style.without_color
        return base + over + style if loud else base + style + over


def wrap(text: str, width: int) -> list[str]:
    """Return one or more lines of at most `width` cells; long words are cut, and indentation of code is kept."""
    width = max(1, width)
    lines: list[str] = []
    for part in str(text).splitlines() or [""]:
        lines += _wrap_line(clean(part.expandtabs(4).rstrip()), width)
    return lines


def _wrap_line(line: str, width: int) -> list[str]:
    if width_of(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    most = max(0, min(width // 2, width - 2))
    indent = indent if width_of(indent) <= most else set_cell_size(indent, most)
    room = width - width_of(indent)
    lines: list[str] = []
    current = indent
    for word in line.split():
        joined = current + (" " if current.strip() else "") + word
        if width_of(joined) <= width:
            current = joined
            continue
        if current.strip():
            lines.append(current)
        pieces = _chop(word, room)
        lines += [indent + piece for piece in pieces[:-1]]
        current = indent + pieces[-1]
    lines.append(current)
    return lines


def _chop(word: str, room: int) -> list[str]:
    """Return the word in pieces of at most `room` cells."""
    pieces: list[str] = []
    while word:
        count = _fits(word, room) or 1
        pieces.append(word[:count])
        word = word[count:]
    return pieces


def _fits(text: str, room: int) -> int:
    """Return how many characters there is room for."""
    if text[: room + 1].isascii():
        return min(room, len(text))
    # Some characters have no width; a terminal shows only a few of them in one place.
    head = set_cell_size(text[: 4 * room], room)
    # A space at its end may stand for half of a wide character.
    while not text.startswith(head):
        head = head[:-1]
    return len(head)


def fold_row(row: Row, width: int) -> list[Row]:
    """Return a row in rows of at most `width` cells, broken anywhere; at least one row."""
    rows: list[Row] = []
    spans: list[Span] = []
    room = width = max(1, width)
    for text, role in row:
        while text:
            count = _fits(text, room) if room else 0
            if not count and room == width:
                # A wide character in a single cell.
                count = 1
            if count:
                spans.append((text[:count], role))
                room -= width_of(text[:count])
                text = text[count:]
            if text:
                rows.append(tuple(spans))
                spans, room = [], width
    return [*rows, tuple(spans)]
