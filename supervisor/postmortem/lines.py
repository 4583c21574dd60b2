"""Lines of log files without what runners, loggers and terminals add to them.

In: lines of a file. Out: the same lines as they were printed; tracebacks in one piece, without prefixes; the time at
which a line was written, as far as the text shows it. Without a year or a zone, times only order the lines of one run.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Sequence
from typing import NamedTuple

from remote_agent.diagnose.json_lines import shown_lines
from remote_agent.diagnose.tracebacks import HEAD

# Colours, titles and other control sequences of terminals.
_CONTROL = re.compile(r"\x1b\[[\d;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
# A traceback is searched for in this many lines below its head; it has at least this many lines.
_NEAR = 200
_LEAST = 3
_DIGIT = re.compile(r"\d")
# A timestamp further above a line without one may be much older.
LINES_BACK = 200
SECOND_NS = 1_000_000_000
DAY_NS = 86_400 * SECOND_NS
_ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
# glog, which torch's C++ code uses: E0709 17:05:38.162555, E709 17:05:38.162555850.
_GLOG = re.compile(r"\b[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")


class FileLine(NamedTuple):
    """One line of a file; numbers count from 1."""

    number: int
    text: str


def clean(text: str) -> str:
    """Return a line without colours and control characters, as a terminal finally shows it."""
    text = text.rstrip("\r\n")
    return text if text.isprintable() else _CONTROL.sub("", text).rpartition("\r")[2]


def without_json(lines: Sequence[FileLine]) -> list[FileLine]:
    """Return the lines with JSON records replaced by their text as a terminal would show it, with the rank's tag."""
    return [
        shown for line in lines for shown in [line._replace(text=text) for text in shown_lines(line.text)] or [line]
    ]


def without_prefixes(lines: list[FileLine]) -> list[FileLine]:
    """Return the lines with the prefixes of tracebacks removed, except on the first line, which has the time."""
    lines = list(lines)
    for index in range(len(lines)):
        before, head, after = lines[index].text.partition(HEAD)
        if not head or after.strip() or not before.strip():
            continue
        near = lines[index + 1 : index + _NEAR]
        own = _one_traceback(near, before)
        if len(own) + 1 < _LEAST:
            continue
        numbers = {each.number for each in own}
        stripped = [each._replace(text=each.text[len(before) :]) for each in own]
        lines[index + 1 : index + _NEAR] = [*stripped, *(each for each in near if each.number not in numbers)]
    return lines


def _one_traceback(near: list[FileLine], before: str) -> list[FileLine]:
    """Return the lines of a traceback below its head: they have the same prefix, possibly with another time."""
    exact = [each for each in near if each.text.startswith(before)]
    like = _DIGIT.sub("0", before)
    alike = [each for each in near if _DIGIT.sub("0", each.text[: len(before)]) == like]
    own = exact if len(exact) + 1 >= _LEAST else alike
    for count, each in enumerate(own, 1):
        # The line of the exception is the first one without indentation.
        if each.text[len(before) : len(before) + 1].strip():
            return own[:count]
    return []


def time_in(text: str) -> int | None:
    """Return the first timestamp in a line; None if it has none."""
    iso = _ISO.search(text)
    if iso is not None:
        return _ns([int(part) for part in iso.groups()[:6]], iso[7])
    glog = _GLOG.search(text)
    if glog is not None:
        return _ns([1970, *(int(part) for part in glog.groups()[:5])], glog[6])
    return None


def time_of_line(lines: Sequence[str], index: int) -> tuple[int, int] | None:
    """Return the timestamp of a line, or the nearest one above it, and its uncertainty in ns.

    The uncertainty of a timestamp in whole seconds follows from the lines after it.
    """
    for number in range(index, max(-1, index - LINES_BACK), -1):
        t_ns = time_in(lines[number])
        if t_ns is not None:
            return t_ns, 0 if t_ns % SECOND_NS else _uncertainty(lines[index + 1 : index + LINES_BACK], t_ns)
    return None


def _uncertainty(after: Sequence[str], t_ns: int) -> int:
    """Return how long after t_ns, the start of a second, a line before these may have been written."""
    for line in after:
        later = time_in(line)
        # One of the two may lack the year.
        after_ns = 0 if later is None else (later - t_ns) % DAY_NS
        if after_ns:
            return min(after_ns, SECOND_NS)
    return SECOND_NS


def _ns(parts: list[int], fraction: str | None) -> int | None:
    year, month, day, *rest = parts
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    seconds = calendar.timegm((year, month, day, *rest, 0, 0, 0))
    return seconds * 1_000_000_000 + int((fraction or "0").ljust(9, "0"))
