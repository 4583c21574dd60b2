"""Wrap text and rows of spans to a width in cells.

In: text with newlines, or a row. Out: lines; long words of text are cut, and indentation of code is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import set_cell_size

from supervisor.tui.rows.spans import clean, width_of

if TYPE_CHECKING:
    from supervisor.tui.rows.spans import Row, Span


def wrap(text: str, width: int) -> list[str]:
    """The text in lines of at most `width` cells; at least one line."""
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
    """The word in pieces of at most `room` cells."""
    pieces: list[str] = []
    while word:
        count = _fits(word, room) or 1
        pieces.append(word[:count])
        word = word[count:]
    return pieces


def _fits(text: str, room: int) -> int:
    """How many characters there is room for."""
    if text[: room + 1].isascii():
        return min(room, len(text))
    # Some characters have no width; a terminal shows only a few of them in one place.
    head = set_cell_size(text[: 4 * room], room)
    # A space at its end may stand for half of a wide character.
    while not text.startswith(head):
        head = head[:-1]
    return len(head)


def fold_row(row: Row, width: int) -> list[Row]:
    """A row in rows of at most `width` cells, broken anywhere; at least one row."""
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
