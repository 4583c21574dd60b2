"""When a line was written, as far as the text tells.

In: lines. Out: nanoseconds; without a year or a zone they serve to order the lines of one run, and for nothing else.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Sequence

# What stands this far above a line without a stamp may be much older.
LINES_BACK = 200
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


def stamp_before(lines: Sequence[str], index: int) -> int | None:
    """Return the stamp of a line, or the nearest one above it."""
    for number in range(index, max(-1, index - LINES_BACK), -1):
        found = stamp_of(lines[number])
        if found is not None:
            return found
    return None


def _ns(parts: list[int], fraction: str | None) -> int | None:
    year, month, day, *rest = parts
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    seconds = calendar.timegm((year, month, day, *rest, 0, 0, 0))
    return seconds * 1_000_000_000 + int((fraction or "0").ljust(9, "0"))
