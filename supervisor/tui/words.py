"""How states, times and ages are said: a glyph with its own shape, a word, and only then a role for the colour.

In: words of the contract. Out: glyphs, words, roles, short texts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from supervisor.plain import count as count


class Look(NamedTuple):
    """How one state is shown."""

    glyph: str
    ascii: str
    word: str
    role: str


RANKS: Final[dict[str, Look]] = {
    "starting": Look("~", "~", "starting", "start"),
    "running": Look("■", "#", "running", "ok"),
    "silent": Look("?", "?", "silent", "hung"),
    "succeeded": Look("✓", "+", "succeeded", "done"),
    "failed": Look("X", "X", "failed", "bad"),
    "killed": Look("x", "x", "killed", "off"),
}
# Failed as well, and only because another rank had failed before.
VICTIM: Final = Look("x", "x", "failed", "warn")
NODES: Final[dict[str, Look]] = {
    "connecting": Look("~", "~", "connecting", "start"),
    "ready": Look("○", "o", "ready", "start"),
    "running": Look("●", "*", "running", "ok"),
    "draining": Look("↓", "v", "draining", "warn"),
    "removed": Look("·", ".", "removed", "off"),
    "lost": Look("X", "X", "lost", "bad"),
    "failed": Look("X", "X", "failed", "bad"),
    "spare": Look("○", "o", "spare", "off"),
}
JOBS: Final[dict[str, Look]] = {
    "starting": Look("~", "~", "STARTING", "start"),
    "running": Look("●", "*", "RUNNING", "ok"),
    "restarting": Look("~", "~", "RESTARTING", "warn"),
    "degraded": Look("!", "!", "DEGRADED", "warn"),
    "succeeded": Look("✓", "+", "SUCCEEDED", "done"),
    "failed": Look("X", "X", "FAILED", "bad"),
    "stopped": Look("□", "o", "STOPPED", "off"),
}
UNKNOWN: Final = Look("-", "-", "unknown", "off")
NO_LINK: Final = Look("-", "-", "no link", "off")

# Worst first: the order of tables, and which rank speaks for its node where there is one glyph per node.
RANK_ORDER: Final = ("failed", "silent", "starting", "killed", "running", "succeeded")


@dataclasses.dataclass(frozen=True)
class Glyphs:
    """The drawing characters of one run: Unicode, or ASCII where the terminal needs it."""

    ascii: bool = False

    @property
    def rule(self) -> str:
        """Horizontal rule."""
        return "-" if self.ascii else "─"

    @property
    def bar(self) -> str:
        """Vertical rule."""
        return "|" if self.ascii else "│"

    @property
    def more(self) -> str:
        """The mark of a cut."""
        return "~" if self.ascii else "…"

    @property
    def dot(self) -> str:
        """Between two facts of one line."""
        return "-" if self.ascii else "·"

    @property
    def thumb(self) -> str:
        """Handle of a scroll bar."""
        return "#" if self.ascii else "┃"

    @property
    def pointer(self) -> str:
        """Before the selected row."""
        return ">" if self.ascii else "▸"

    @property
    def mark(self) -> str:
        """Before a marked row."""
        return "+" if self.ascii else "◆"

    def of(self, look: Look) -> str:
        """The glyph of a state."""
        return look.ascii if self.ascii else look.glyph

    def level(self, share: float) -> str:
        """A bar for a share between 0 and 1."""
        bounded = min(1.0, max(0.0, share))
        return "0123456789"[min(9, int(bounded * 10))] if self.ascii else "▁▂▃▄▅▆▇█"[min(7, int(bounded * 8))]


def age(seconds: float | None) -> str:
    """A short age: `0.4s`, `12s`, `3m`, `2h05`, `3d`; `-` when unknown."""
    if seconds is None:
        return "-"
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f}s"
    if seconds < 99.5:
        return f"{seconds:.0f}s"
    if seconds < 5940:
        return f"{seconds / 60:.0f}m"
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}h{rest // 60:02d}" if hours < 48 else f"{hours // 24}d"


def lasted(seconds: float) -> str:
    """A duration: `42 s`, `12 min`, `2 h 05 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 5970:
        return f"{seconds / 60:.0f} min"
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours} h {rest // 60:02d} min"


_clock: Callable[[], float] = time.time


def now() -> float:
    """Unix time in seconds; the one place where the screens ask for it."""
    return _clock()


@contextlib.contextmanager
def told_by(clock: Callable[[], float]) -> Iterator[None]:
    """Take the time from another clock, that of a recording."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before


def moment(time: str | None) -> datetime.datetime | None:
    """A time of the contract (`…Z`) as a local time; None where it is none."""
    if not isinstance(time, str) or not time:
        return None
    try:
        return datetime.datetime.fromisoformat(time.replace("Z", "+00:00")).astimezone()
    except ValueError:
        return None


def clock(time: str | None, *, millis: bool = False) -> str:
    """Local time of day of a time of the contract: `03:04:11`, or `03:04:11.207`."""
    local = moment(time)
    if local is None:
        return "--:--:--" + (".---" if millis else "")
    return local.strftime("%H:%M:%S") + (f".{local.microsecond // 1000:03d}" if millis else "")


def stamp_ns(t_ns: int) -> str:
    """Local date and time with milliseconds: `2026-11-20 03:04:11.207`."""
    local = datetime.datetime.fromtimestamp(t_ns // 1_000_000_000, tz=datetime.timezone.utc).astimezone()
    return f"{local:%Y-%m-%d %H:%M:%S}.{t_ns // 1_000_000 % 1000:03d}"


def clock_ns(t_ns: int | None) -> str:
    """Local time of day with milliseconds of a Unix time in nanoseconds."""
    if not t_ns:
        return "--:--:--.---"
    local = datetime.datetime.fromtimestamp(t_ns // 1_000_000_000, tz=datetime.timezone.utc).astimezone()
    return local.strftime("%H:%M:%S") + f".{t_ns // 1_000_000 % 1000:03d}"
