"""One raw log line as spans: the last state of a progress bar, colours kept, without other control sequences.

In: the bytes of one line, without its newline. Out: spans of at most MAX_CELLS cells.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from rich.color import Color
from rich.style import Style

from remote_agent.text.patterns import TooLong, within
from remote_agent.text.rows import ESCAPE
from supervisor.tui.rows.spans import Row, Span, clean, crop_row, row_width, text_of

# A row longer than this is cut here; its detail shows all that the agent sent.
MAX_CELLS: Final = 4096
TAB: Final = 8
# A row is not highlighted if the pattern takes longer on it: the screen must stay responsive.
HIGHLIGHT_S: Final = 0.02

_ESCAPES = re.compile(ESCAPE)
_ATTRIBUTES: Final = {
    1: Style(bold=True),
    2: Style(dim=True),
    3: Style(italic=True),
    4: Style(underline=True),
    7: Style(reverse=True),
    9: Style(strike=True),
    22: Style(bold=False, dim=False),
    23: Style(italic=False),
    24: Style(underline=False),
    27: Style(reverse=False),
    29: Style(strike=False),
    39: Style(color=Color.default()),
    49: Style(bgcolor=Color.default()),
}


def decode(raw: bytes) -> str:
    """Return the text of a line; bytes that are no UTF-8 are shown as U+FFFD."""
    return raw.decode("utf-8", "replace")


def last_state(text: str) -> str:
    """Return what a terminal shows of a line with carriage returns: the last part that is not empty."""
    if "\r" not in text:
        return text
    return next((part for part in reversed(text.split("\r")) if part), "")


def plain(raw: bytes) -> str:
    """Return all of a line as plain text, for the detail view and the clipboard."""
    return clean(_expand(_ESCAPES.sub("", last_state(decode(raw)))))


# The cache holds the rows of a few screens; a row may have 64 KiB.
@lru_cache(maxsize=256)
def spans(raw: bytes, role: str = "text") -> Row:
    """Return the line as spans; text without a colour of its own gets `role`."""
    # Four bytes a cell are enough for any text; escapes may take more, then the row is only shorter.
    text = last_state(decode(raw[: MAX_CELLS * 16]))
    if "\x1b" not in text:
        return _cut(((clean(_expand(text)), role),))
    parts: list[Span] = []
    style = Style.null()
    start = 0
    for match in _ESCAPES.finditer(text):
        if match.start() > start:
            parts.append((clean(_expand(text[start : match.start()])), style if style else role))
        start = match.end()
        if match.group(2) == "m":
            style = _apply(style, match.group(1))
    if start < len(text):
        parts.append((clean(_expand(text[start:])), style if style else role))
    return _cut(tuple(parts))


def _cut(row: Row) -> Row:
    return crop_row(row, 0, MAX_CELLS) if row_width(row) > MAX_CELLS else row


def _expand(text: str) -> str:
    return text.expandtabs(TAB) if "\t" in text else text


def _apply(style: Style, parameters: str) -> Style:
    codes = [int(part) if part.isdigit() else 0 for part in re.split("[;:]", parameters)] or [0]
    index = 0
    while index < len(codes):
        code = codes[index]
        if code == 0:
            style = Style.null()
        elif code in _ATTRIBUTES:
            style += _ATTRIBUTES[code]
        elif code in (38, 48):
            color, used = _extended(codes[index + 1 :])
            index += used
            if color is not None:
                style += Style(color=color) if code == 38 else Style(bgcolor=color)
        else:
            style += _basic(code)
        index += 1
    return style


def _extended(codes: list[int]) -> tuple[Color | None, int]:
    if len(codes) >= 2 and codes[0] == 5:
        return Color.from_ansi(codes[1] & 255), 2
    if len(codes) >= 4 and codes[0] == 2:
        return Color.from_rgb(codes[1] & 255, codes[2] & 255, codes[3] & 255), 4
    return None, len(codes)


def _basic(code: int) -> Style:
    if 30 <= code <= 37:
        return Style(color=Color.from_ansi(code - 30))
    if 90 <= code <= 97:
        return Style(color=Color.from_ansi(code - 82))
    if 40 <= code <= 47:
        return Style(bgcolor=Color.from_ansi(code - 40))
    if 100 <= code <= 107:
        return Style(bgcolor=Color.from_ansi(code - 92))
    return Style.null()


def highlight(row: Row, pattern: re.Pattern[str]) -> Row:
    """Return the row with every match of the pattern in the role of a hit."""
    text = text_of(row)
    try:
        matches = within(HIGHLIGHT_S, lambda: [match.span() for match in pattern.finditer(text) if match.group()])
    except TooLong:
        return row
    if not matches:
        return row
    spans_out: list[Span] = []
    position = 0
    for piece, look in row:
        at = 0
        while at < len(piece):
            inside, stop = _next_edge(matches, position + at, position + len(piece))
            spans_out.append((piece[at : stop - position], "hit" if inside else look))
            at = stop - position
        position += len(piece)
    return tuple(spans_out)


def _next_edge(matches: list[tuple[int, int]], start: int, end: int) -> tuple[bool, int]:
    for first, last in matches:
        if start < first:
            return False, min(first, end)
        if start < last:
            return True, min(last, end)
    return False, end
