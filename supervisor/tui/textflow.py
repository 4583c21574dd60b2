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
    indent = line[: len(line) - len(line.lstrip())][: width // 2]
    lines: list[str] = []
    current = indent
    for word in line.split():
        joined = current + (" " if current.strip() else "") + word
        if width_of(joined) <= width:
            current = joined
            continue
        if current.strip():
            lines.append(current)
        current = indent + word
        while width_of(current) > width:
            piece = set_cell_size(current, width).rstrip() or current[:1]
            lines.append(piece)
            current = indent + current[len(piece) :]
    lines.append(current)
    return lines
