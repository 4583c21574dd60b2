"""Rows: what a screen shows of a line.

In: raw lines. Out: visible text, clipped, with or without its escape codes; heads and continuation lines of records
such as tracebacks; NCCL's own lines.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from remote_agent.logs.levels import ESCAPE as ESCAPE
from remote_agent.logs.levels import ESCAPES, level_of
from remote_agent.logs.levels import NCCL_MARK as NCCL_MARK

# A row's text is cut here; the bytes stay in the file and `read` gives them.
CLIP = 64 * 1024

_RANK_TAG = re.compile(rb"^(?:\x1b\[[\d;]*m)*(?:\[(?:rank|default)?\d+\]: ?)?")
_LAST_OF_TRACEBACK = re.compile(rb"(?:[\w$]+\.)*[A-Z]\w*(?::\s|:?\s*$)")
# NCCL's lines in the forms of all its versions, and RCCL's; where it was told no file, they stand in stdout or stderr.
_NCCL = re.compile(
    rb"(?:\[[^\]\n]{1,64}\] ?)?(?:[\w.-]{1,255}:\d+:\d+ (?:\[-?\d+\] )?)?(?:\d+\.\d+ )?(?:\S{1,512}:\d+ )?"
    rb"[NR]CCL (?:(?:INFO|WARN|ERROR|CALL|TRACE|ABORT) |version ?:? ?\d)"
)
_CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")


class Row(NamedTuple):
    """One line: number, bytes [offset, end) without its newline, arrival (upper: no later than that)."""

    line: int
    offset: int
    end: int
    t_ns: int
    upper: bool
    text: bytes
    known_level: int = 0
    """Its level bit, where that is known already: of most rows nobody asks for it."""
    column: int = -1
    """Of a hit in a line whose text is cut: how many characters stand before it."""

    @property
    def level(self) -> int:
        """Its level bit."""
        return self.known_level or level_of(self.text)

    @property
    def cut(self) -> int:
        """So many bytes of the line follow its text."""
        return max(0, self.end - self.offset - CLIP) if len(self.text) == CLIP else 0


def visible(raw: bytes) -> bytes:
    """Return what a terminal would show in the end of a whole line: the last state of a progress bar, clipped."""
    return visible_ends(raw[:CLIP], raw[-CLIP:]) if len(raw) > CLIP else last_state(raw)


def last_state(raw: bytes) -> bytes:
    """Return what is left of a line that is written over itself."""
    if b"\r" not in raw:
        return raw
    shown = raw.rstrip(b"\r")
    return shown[shown.rfind(b"\r") + 1 :]


def seen(raw: bytes) -> bytes:
    """Return all that is seen of a line."""
    return without_escapes(last_state(raw))


def without_escapes(text: bytes) -> bytes:
    """Return the characters that are seen of a text; it may hold many lines."""
    return ESCAPES.sub(b"", text) if b"\x1b" in text else text


def visible_ends(head: bytes, tail: bytes) -> bytes:
    """Return the visible text of a line over 64 KiB from its first and last 64 KiB."""
    shown = tail.rstrip(b"\r")
    start = shown.rfind(b"\r")
    return shown[start + 1 :] if start >= 0 else head


def stream_of(file: str, text: bytes) -> str:
    """Return the stream that a line belongs to: a line of NCCL is nccl's, whichever file it stands in."""
    return "nccl" if NCCL_MARK in text[:1024] and _NCCL.match(text) is not None else file


def dropped_text(size: int) -> bytes:
    """Return the line that stands for so many bytes that are gone from the disk."""
    amount = f"{size / 1e9:.1f} GB" if size >= 10**9 else f"{size / 1e6:.1f} MB"
    return f"… {amount} were dropped here: log_bound".encode()


class RecordReader:
    """Tells, line after line, which ones continue the record before: indented lines and the parts of a traceback."""

    __slots__ = ("_chained", "_continued", "_indented")

    def __init__(self) -> None:
        self._indented = False
        self._continued = False
        self._chained = False

    def continues(self, text: bytes) -> bool:
        """Take the next line; True when it belongs to the one before."""
        tag = _RANK_TAG.match(text)
        rest = text[tag.end() :] if tag is not None else text
        blank = not rest.strip()
        indented = rest[:1] in (b" ", b"\t") and not blank
        if blank:
            answer = self._continued or self._chained
        elif indented:
            answer = True
        elif rest.startswith(_CHAINED):
            answer = self._continued
        elif rest.startswith(b"Traceback (most recent call last)"):
            answer = self._chained
        else:
            answer = self._indented and _LAST_OF_TRACEBACK.match(rest) is not None
        self._chained = rest.startswith(_CHAINED) or (blank and self._chained)
        self._indented = indented
        self._continued = answer
        return answer
