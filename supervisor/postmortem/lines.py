"""Lines of log files without what runners, loggers and terminals add to them.

In: lines of a file. Out: the same lines as they were printed; tracebacks in one piece, without prefixes; the time at
which a line was written, as far as the text shows it. Without a year everywhere, or a zone, times only order lines.
"""

from __future__ import annotations

import calendar
import datetime
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from remote_agent.diagnose.json_lines import shown_lines
from remote_agent.diagnose.tracebacks import HEAD

# Colours, titles and other control sequences of terminals.
_CONTROL = re.compile(r"\x1b\[[\d;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
# A launcher's record may be printed behind an unfinished line.
_GLUED = re.compile(r"(?<=\S)(?:WARNING|ERROR|INFO):torch\.distributed\..*")
# A progress bar that was not ended stands before the next record.
_BAR = re.compile(r"^.*\d%\|[^\]\n]*\](?=[A-Z\[])")
# Python marks a place in a line of code like this; processes that print at once tear such a line.
_CARETS = re.compile(r"[~^]{2,}")
# A traceback is searched for in this many lines below its head; it has at least this many lines.
_NEAR = 200
_LEAST = 3
_DIGIT = re.compile(r"\d")
# A timestamp further above a line without one may be much older.
LINES_BACK = 200
SECOND_NS = 1_000_000_000
# A line without a time was written at most this long after the record above it.
LATER_NS = 60 * SECOND_NS
_CLOCK = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
_ISO = re.compile(rf"(?P<year>\d{{4}})-(?P<month>\d\d)-(?P<day>\d\d)[ T_]{_CLOCK}(?:[.,](?P<fraction>\d{{1,9}}))?")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
# Times without a year: glog, which torch's C++ code uses (E0709 17:05:38.162555, E709 17:05:38.162555850), and syslog
# (Jul  9 17:05:38); the kernel's log may have the year at the end.
_NO_YEAR = (
    re.compile(rf"\b[EWIF](?P<month>\d{{1,2}})(?P<day>\d\d) {_CLOCK}\.(?P<fraction>\d{{1,9}})"),
    re.compile(rf"\b(?P<month>{'|'.join(_MONTHS)}) {{1,2}}(?P<day>\d{{1,2}}) {_CLOCK}(?: (?P<year>\d{{4}})\b)?"),
)
# A collector may put this before each line: up to three words and a bar or an arrow, or a text in brackets. A level or
# a number in brackets is excluded, because loggers and launchers print those.
_PREFIX = re.compile(
    r"(?:[^\s|>]{1,60}[ \t]{1,20}){0,2}[^\s|>]{1,60}[ \t]{0,20}(?:[|>][ \t]|[|>]$)|\[(?!\w+\])[^\]\s]{1,80}\][ \t]"
)
_SHARED = 0.6
# A time without a year gets this year if no other line has one.
_SOME_YEAR = 1972


class FileLine(NamedTuple):
    """One line of a file; numbers count from 1."""

    number: int
    text: str
    node: str | None = None
    """The node that wrote it, if its text said so."""


def clean(text: str) -> str:
    """Return a line without colours and control characters, as a terminal finally shows it."""
    text = text.rstrip("\r\n")
    text = text if text.isprintable() else _CONTROL.sub("", text).rpartition("\r")[2]
    text = _BAR.sub("", text) if "%|" in text else text
    return _GLUED.sub("", text) if ":torch.distributed." in text else text


def untorn(lines: list[FileLine]) -> list[FileLine]:
    """Return the lines with a traceback that several processes printed into each other put together, once for each.

    Such a text begins with several heads, and has each line several times, or as one line.
    """
    whole: list[FileLine] = []
    index = 0
    while index < len(lines):
        copies = 1
        while (
            index + copies < len(lines)
            and copies < _NEAR
            and all(each.text.strip() == HEAD for each in lines[index + copies - 1 : index + copies + 1])
        ):
            copies += 1
        if copies == 1:
            whole.append(_without_carets(lines[index], lines[max(0, index - _LEAST * 2) : index]))
            index += 1
            continue
        block, index = _torn(lines, index, copies)
        whole += block * copies
    return whole


def _torn(lines: list[FileLine], start: int, copies: int) -> tuple[list[FileLine], int]:
    """Return one of the tracebacks that begin here, and the index of the line after all of them."""
    block = [lines[start]]
    end = min(len(lines), start + copies * _NEAR)
    for index in range(start + copies, end):
        text = _once(_CARETS.sub("", lines[index].text), copies)
        if len(block) > 1 and block[-1].text[:1].strip() and text != block[-1].text:
            return block, index
        if text.strip() and text != block[-1].text:
            block.append(lines[index]._replace(text=text))
    return block, end


def _once(text: str, copies: int) -> str:
    """Return what several processes printed into one line: the same text, or the pieces of an exception."""
    pieces = re.fullmatch(rf"(.+?)\1{{{copies - 1}}}(?:(: )\2{{{copies - 1}}}(.+?)\3{{{copies - 1}}})?", text)
    return "".join(filter(None, pieces.groups())) if pieces is not None else text


def _without_carets(line: FileLine, before: Sequence[FileLine]) -> FileLine:
    """Return a line below a frame without the marks of another process's traceback, where these tear it."""
    if "^^" not in line.text or not any('File "' in each.text for each in before):
        return line
    text = _CARETS.sub("", line.text)
    return line._replace(text=text.strip() if HEAD in text else text) if text.strip() else line


def without_json(lines: Sequence[FileLine]) -> list[FileLine]:
    """Return the lines with JSON records replaced by their text as a terminal would show it, with the rank's tag."""
    return [
        shown for line in lines for shown in [line._replace(text=text) for text in shown_lines(line.text)] or [line]
    ]


def without_collector(lines: Sequence[FileLine], keeps: Callable[[str], object]) -> list[FileLine]:
    """Return the lines without a prefix of one shape that most of them share; `keeps` tells one that says more."""
    found = [match.group() if (match := _PREFIX.match(line.text)) else "" for line in lines]
    shapes = [" ".join(re.sub(r"\d+", "0", prefix).split()) for prefix in found]
    written = sum(bool(line.text.strip()) for line in lines)
    shape, count = next(iter(Counter(filter(None, shapes)).most_common(1)), ("", 0))
    if (
        count < 2
        or count < _SHARED * written
        or any(own == shape and keeps(prefix) for own, prefix in zip(shapes, found, strict=True))
    ):
        return list(lines)
    return [
        line._replace(text=line.text[len(prefix) :]) if own == shape else line
        for line, own, prefix in zip(lines, shapes, found, strict=True)
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


class Times:
    """The times of lines: one without a year is of the year in which it is nearest to those of other lines."""

    def __init__(self) -> None:
        """Begin without any line."""
        self._near: datetime.datetime | None = None
        self.has_year = False
        """Whether a line had a year; otherwise times only order the lines."""

    def learn(self, lines: Iterable[FileLine]) -> None:
        """Look at the lines of one more file until one of them has a year."""
        for line in lines if not self.has_year else ():
            found = _time_in(line.text)
            if found is not None and (found.has_year or self._near is None):
                self._near, self.has_year = found.at, found.has_year
            if self.has_year:
                return

    def of_line(self, lines: Sequence[str], index: int) -> tuple[int, int] | None:
        """Return the timestamp of a line, or the nearest one above it, and its uncertainty in ns.

        The uncertainty of a timestamp in whole seconds, or of another record's, follows from the lines after it.
        """
        for number in range(index, max(-1, index - LINES_BACK), -1):
            t_ns = self._in(lines[number])
            if t_ns is not None:
                is_own = number == index or any(HEAD in line for line in lines[number : number + 2])
                most_ns = 0 if is_own and t_ns % SECOND_NS else SECOND_NS if is_own else LATER_NS
                return t_ns, self._uncertainty(lines[index + 1 : index + LINES_BACK], t_ns, most_ns)
        return None

    def _uncertainty(self, after: Sequence[str], t_ns: int, most_ns: int) -> int:
        """Return how long after t_ns a line before these may have been written."""
        later = (time for line in after if (time := self._in(line)) is not None and time > t_ns)
        return min(next(later, t_ns + most_ns) - t_ns, most_ns) if most_ns else 0

    def _in(self, text: str) -> int | None:
        """Return the first timestamp in a line, in ns; None if it has none."""
        found = _time_in(text)
        if found is None:
            return None
        at = found.at
        if not found.has_year and self._near is not None:
            near = self._near
            years = (_in_year(at, year) for year in range(max(1, near.year - 1), min(9999, near.year + 1) + 1))
            at = min(years, key=lambda one: abs(one - near))
        return calendar.timegm(at.timetuple()) * SECOND_NS + found.fraction_ns


class _Time(NamedTuple):
    at: datetime.datetime
    fraction_ns: int
    has_year: bool


def _time_in(text: str) -> _Time | None:
    """Return the first timestamp in a line, in a leap year of long ago where it has none."""
    found = _ISO.search(text) or next((match for each in _NO_YEAR if (match := each.search(text))), None)
    if found is None:
        return None
    parts = found.groupdict()
    year, month = parts.get("year"), parts["month"]
    month = str(_MONTHS.index(month) + 1) if month in _MONTHS else month
    names = ("day", "hour", "minute", "second")
    day, hour, minute, second = (int(parts[name]) for name in names)
    try:
        at = datetime.datetime(
            int(year or _SOME_YEAR), int(month), day, hour, minute, second, tzinfo=datetime.timezone.utc
        )
    except ValueError:
        return None
    return _Time(at, int((parts.get("fraction") or "0").ljust(9, "0")), year is not None)


def _in_year(at: datetime.datetime, year: int) -> datetime.datetime:
    """Return the time in another year, which may have no 29 February."""
    try:
        return at.replace(year=year)
    except ValueError:
        return at.replace(year=year, day=28)
