"""When a line was written, as far as the text tells.

In: lines. Out: nanoseconds; without a year or a zone they serve to order the lines of one run, and for nothing else.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Sequence

# What stands this far above a line without a stamp may be much older.
LINES_BACK = 200
SECOND_NS = 1_000_000_000
DAY_NS = 86_400 * SECOND_NS
_ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
# Of glog, which torch's C++ part uses: E0709 17:05:38.162555, E709 17:05:38.162555850.
_GLOG = re.compile(r"\b[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")


def stamp_of(text: str) -> int | None:
    """Return the first stamp in a line; None where it has none."""
    iso = _ISO.search(text)
    if iso is not None:
        return _ns([int(part) for part in iso.groups()[:6]], iso[7])
    glog = _GLOG.search(text)
    if glog is not None:
        return _ns([1970, *(int(part) for part in glog.groups()[:5])], glog[6])
    return None


def span_before(lines: Sequence[str], index: int) -> tuple[int, int] | None:
    """Return the stamp of a line, or the nearest one above it, and within how many ns of that the line was written.

    A stamp of whole seconds leaves that open, but for what the lines behind it tell.
    """
    for number in range(index, max(-1, index - LINES_BACK), -1):
        found = stamp_of(lines[number])
        if found is not None:
            return found, 0 if found % SECOND_NS else _blur(lines[index + 1 : index + LINES_BACK], found)
    return None


def _blur(behind: Sequence[str], t_ns: int) -> int:
    """Return how long after t_ns, the begin of a second, a line before these may have been written."""
    for line in behind:
        later = stamp_of(line)
        # One of the two may have no year.
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
