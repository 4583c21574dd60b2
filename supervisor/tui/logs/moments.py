"""A time as people type it.

In: `14:03`, `14:03:20`, `-5m`, `2026-11-20T14:03:20Z`; the time of the line that is read. Out: nanoseconds since 1970.
"""

from __future__ import annotations

import datetime
import re
from typing import Final

from supervisor.tui import words

HINT: Final = "14:03, 14:03:20, -5m or +1h30m from the line that is read, 2026-11-20T14:03:20Z"
# A clock that is this much behind those of the nodes does not take a time of today for one of yesterday, seconds.
SLACK_S: Final = 3600.0
LATEST_NS: Final = 1 << 62
_AGO = re.compile(r"([+-])((?:\d{1,9}(?:\.\d+)?[smhd])+)")
_PART = re.compile(r"([\d.]+)([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2})(?:\.(\d{1,6}))?)?")


def read(text: str, read_ns: int, now_s: float) -> int:
    """The time that is meant; raises ValueError that says what can be typed.

    A time of day is the one next to `read_ns` that is not in the future.
    """
    text = text.strip()
    ago, clock = _AGO.fullmatch(text), _CLOCK.fullmatch(text)
    if ago is not None:
        span_s = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(ago[2]))
        return min(LATEST_NS, max(1, read_ns + int(span_s * 1e9) * (1 if ago[1] == "+" else -1)))
    local = _of_day(clock, read_ns, now_s) if clock is not None else words.moment(text)
    if local is None:
        raise ValueError(f"no time; try {HINT.partition(' or')[0]}")
    return max(1, int(local.timestamp() * 1e6) * 1000)


def _of_day(clock: re.Match[str], read_ns: int, now_s: float) -> datetime.datetime | None:
    hour, minute, second, part = clock.groups()
    now, read = (_local(time_s) for time_s in (now_s + SLACK_S, read_ns / 1e9))
    try:
        of_day = datetime.time(int(hour), int(minute), int(second or 0), int((part or "0").ljust(6, "0")))
    except ValueError:
        return None
    days = (read.date() + datetime.timedelta(days=offset) for offset in (-1, 0, 1))
    moments = [datetime.datetime.combine(day, of_day).astimezone() for day in days]
    past = [moment for moment in moments if moment <= now] or moments[:1]
    return min(past, key=lambda moment: abs(moment - read))


def _local(time_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(time_s, tz=datetime.timezone.utc).astimezone()
