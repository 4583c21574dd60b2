"""Values as text: numbers, sizes, durations, times, and text that a terminal can show safely. Pure.

In: values of the documents. Out: short text; `-` for an unknown value.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from remote_agent.text.controls import escape_controls
from remote_agent.text.names import size_text


def safe(text: object) -> str:
    """Return text with control characters and invisible marks as escapes; newlines and tabs stay."""
    return escape_controls(str(text))


def one_line(text: object) -> str:
    """Return text as a single safe line."""
    return " ".join(safe(text).split())


def or_dash(value: object) -> str:
    """Return a value as one safe line, `-` for None."""
    return "-" if value is None else one_line(value)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows (the first is the head) with aligned columns, two spaces apart."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def cut_text(missing: int) -> str:
    """Return the mark at the end of a line that was cut, with the number of missing bytes."""
    return f"… +{size_text(missing)}"


# --- durations


def duration(seconds: float) -> str:
    """Return `0.84 s`, `4.2 s`, `3 min 20 s`, `2 h 05 min` or `3 d 4 h`; below 10 ms `0.003 s`."""
    if seconds < 1:
        return f"{seconds:.3f} s" if 0 < seconds < 0.01 else f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def elapsed(seconds: float) -> str:
    """Return a duration that counts up or down on a screen, in whole seconds: `32 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = max(0, int(seconds))
    return f"{whole} s" if whole < 60 else duration(whole)


def age(seconds: object) -> str:
    """Return an age in at most six characters: `0.2 s`, `42 s`, `3 min`, `2 h`, `3 d`."""
    if not isinstance(seconds, (int, float)):
        return "-"
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    # Only whole minutes that have passed count: 98 s are not 2 min.
    if seconds < 6000:
        return f"{seconds // 60:.0f} min"
    return f"{seconds // 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds // 86400:.0f} d"


# --- times: in the operator's time zone


def local_time(stamp: object) -> datetime.datetime | None:
    """Return a UTC time of the documents (`…Z`) in the operator's time zone, None if it is not one."""
    if not isinstance(stamp, str) or not stamp:
        return None
    try:
        return datetime.datetime.fromisoformat(stamp.replace("Z", "+00:00")).astimezone()
    except ValueError:
        return None


def local_time_ns(time_ns: int) -> datetime.datetime:
    """Return nanoseconds since the epoch in the operator's time zone, exact to a microsecond."""
    seconds, rest = divmod(time_ns, 1_000_000_000)
    whole = datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc)
    return whole.replace(microsecond=rest // 1000).astimezone()


def clock(stamp: object, *, millis: bool = False, utc: bool = False) -> str:
    """Return the time of day of a UTC time of the documents: `03:04:11`, with millis `03:04:11.207`.

    `utc`: in UTC, for a text that people in several time zones read.
    """
    time = local_time(stamp)
    return _time_of_day(time.astimezone(datetime.timezone.utc) if time and utc else time, millis)


def clock_ns(time_ns: int | None, *, millis: bool = True) -> str:
    """Return the time of day of nanoseconds since the epoch: `03:04:11.207`."""
    return _time_of_day(local_time_ns(time_ns) if time_ns else None, millis)


def _time_of_day(time: datetime.datetime | None, millis: bool) -> str:
    if time is None:
        return "--:--:--" + (".---" if millis else "")
    return time.strftime("%H:%M:%S") + (f".{time.microsecond // 1000:03d}" if millis else "")


def date(stamp: object) -> str:
    """Return a UTC time of the documents as a local date and time: `2026-11-20 03:04:11`."""
    time = local_time(stamp)
    return "-" if time is None else f"{time:%Y-%m-%d %H:%M:%S}"


def date_ns(time_ns: object, *, millis: bool = False) -> str:
    """Return nanoseconds since the epoch as a local date and time: `2026-11-20 03:04:11`, with millis `….207`."""
    if not isinstance(time_ns, int) or time_ns <= 0:
        return "-"
    time = local_time_ns(time_ns)
    return f"{time:%Y-%m-%d %H:%M:%S}" + (f".{time.microsecond // 1000:03d}" if millis else "")
