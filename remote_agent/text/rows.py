"""Rows: the visible text of lines.

In: raw lines. Out: visible text, clipped, with or without escape codes; which lines continue a record such as a
traceback; which lines are NCCL's.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from remote_agent.text.levels import ESCAPE as ESCAPE
from remote_agent.text.levels import ESCAPES, level_of
from remote_agent.text.levels import NCCL_MARK as NCCL_MARK
from remote_agent.text.names import size_text

# The text of a row is cut here; `log_read` returns the rest of the line.
CLIP = 64 * 1024
# A file of indented lines must not become one record.
RECORD_LIMIT = 512
# A traceback is written at once: a rank that prints indented lines must not wait for an unindented one.
RECORD_GAP_NS = 1_000_000_000
# A record continues behind this many blank lines, so that few lines decide whether a line continues one.
BLANK_LIMIT = 8

_RANK_TAG = re.compile(rb"^(?:\x1b\[[\d;]*m)*(?:\[(?:rank|default)?\d+\]: ?)?")
_LAST_OF_TRACEBACK = re.compile(rb"(?:[\w$]+\.)*[A-Z]\w*(?::\s|:?\s*$)")
# This matches lines of NCCL, in the formats of all versions, and of RCCL. Without NCCL_DEBUG_FILE they go to stdout.
_NCCL = re.compile(
    rb"(?:\[[^\]\n]{1,64}\] ?)?(?:[\w.-]{1,255}:\d+:\d+ (?:\[-?\d+\] )?)?(?:\d+\.\d+ )?(?:\S{1,512}:\d+ )?"
    rb"[NR]CCL (?:(?:INFO|WARN|ERROR|CALL|TRACE|ABORT) |version ?:? ?\d)"
)
_CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")


class Row(NamedTuple):
    """One line: number, bytes [offset, end) without its newline, arrival."""

    line: int
    offset: int
    end: int
    t_ns: int
    text: bytes
    known_level: int = 0
    """Its level bit, if it is known already; it is computed only when needed."""

    @property
    def level(self) -> int:
        """Its level bit."""
        return self.known_level or level_of(self.text)

    @property
    def cut(self) -> int:
        """How many bytes of the line follow its text."""
        return max(0, self.end - self.offset - CLIP) if len(self.text) == CLIP else 0


def visible(raw: bytes) -> bytes:
    """Return what a terminal finally shows of a line: the last state of a progress bar, clipped."""
    return visible_ends(raw[:CLIP], raw[-CLIP:]) if len(raw) > CLIP else last_state(raw)


def last_state(raw: bytes) -> bytes:
    """Return the last state of a line that overwrites itself."""
    if b"\r" not in raw:
        return raw
    text = raw.rstrip(b"\r")
    return text[text.rfind(b"\r") + 1 :]


def without_escapes(text: bytes) -> bytes:
    """Return a text of any number of lines without its escape codes."""
    return ESCAPES.sub(b"", text) if b"\x1b" in text else text


def visible_ends(head: bytes, tail: bytes) -> bytes:
    """Return the visible text of a line over 64 KiB from its first and last 64 KiB."""
    text = tail.rstrip(b"\r")
    start = text.rfind(b"\r")
    return text[start + 1 :] if start >= 0 else head


def stream_of(file: str, text: bytes) -> str:
    """Return the stream of a line: lines of NCCL belong to nccl, whichever file they are in."""
    return "nccl" if NCCL_MARK in text[:1024] and _NCCL.match(text) is not None else file


def dropped_text(size: int) -> bytes:
    """Return the line that stands for bytes that were dropped from the disk."""
    return f"… {size_text(size)} were dropped here: log_bound, or --logs of a bundle".encode()


class RecordReader:
    """Decides line by line which ones continue a record: indented lines and the parts of a traceback."""

    __slots__ = ("_blanks", "_chained", "_continued", "_indented", "_last_ns", "age", "is_sure")

    def __init__(self) -> None:
        self.age = 0
        """How many lines before the last one its record has, whatever the limit."""
        self._last_ns: int | None = None
        self._indented: bool | None = None
        self._continued = False
        self._chained = False
        self._blanks = 0
        self.is_sure = False
        """True once no line before the first one read could change the answers."""

    def begins(self, text: bytes, t_ns: int) -> bool:
        """Read the next line; returns True when it begins a record, also because of its time or the record's length."""
        continues = self.continues(text) and self._last_ns is not None and t_ns - self._last_ns <= RECORD_GAP_NS
        self.age = self.age + 1 if continues else 0
        self._last_ns = t_ns
        return not self.age or self.age >= RECORD_LIMIT

    def continues(self, text: bytes) -> bool:
        """Read the next line; returns True when it continues the one before, by its text."""
        tag = _RANK_TAG.match(text) if text[:1] in (b"[", b"\x1b") else None
        rest = text[tag.end() :] if tag is not None else text
        blank = not rest.strip()
        indented = rest[:1] in (b" ", b"\t") and not blank
        self._blanks = self._blanks + 1 if blank else 0
        if self._blanks > BLANK_LIMIT:
            self._continued = self._chained = False
            self.is_sure = True
        if blank:
            answer = self._continued or self._chained
        elif indented:
            answer = self.is_sure = True
        elif rest.startswith(_CHAINED):
            answer = self._continued
        elif rest.startswith(b"Traceback (most recent call last)"):
            answer = self._chained
        else:
            answer = bool(self._indented) and _LAST_OF_TRACEBACK.match(rest) is not None
            self.is_sure = self.is_sure or self._indented is not None
        self._chained = rest.startswith(_CHAINED) or (blank and self._chained)
        self._indented = indented
        self._continued = answer
        return answer
