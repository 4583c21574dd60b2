"""Prose in lines of a width, in cells.

In: text with newlines. Out: lines; long words are cut, indentation of code is kept.
"""

from __future__ import annotations

from rich.cells import set_cell_size

from supervisor.tui.cells import clean, width_of


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
    start = 0
    while start < len(word):
        # Some characters have no width; of more than these in one place the terminal shows none.
        piece = set_cell_size(word[start : start + 4 * room], room).rstrip() or word[start]
        pieces.append(piece)
        start += len(piece)
    return pieces
