"""Jumps to a line of the log: hits of a search, errors, tracebacks, a time, a line number.

In: what the user types, such as `14:03` or `-5m`; hits that the agents send. Out: the view at that line.
"""

from __future__ import annotations

import datetime
import functools
import re
from typing import TYPE_CHECKING, Final

from supervisor.tui import times
from supervisor.tui.logs.feed import LATEST_NS
from supervisor.tui.logs.finder import Finder
from supervisor.tui.rows.spans import clean, fit, row_width, width_of
from supervisor.wording import values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from supervisor.logs.rows import Clocks
    from supervisor.tui.rows.spans import Row
    from supervisor.tui.screens.logs.shown import ShownLog
    from supervisor.tui.shell import Shell
    from supervisor.tui.widgets.ask import Ask

TIME_HINT: Final = "14:03, 14:03:20, -5m or +1h30m from the selected line, 2026-11-20T14:03:20Z"
# A clock that is this much behind those of the nodes does not take a time of today for one of yesterday, seconds.
SLACK_S: Final = 3600.0
_AGO = re.compile(r"([+-])((?:\d{1,9}(?:\.\d+)?[smhd])+)")
_PART = re.compile(r"([\d.]+)([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2})(?:\.(\d{1,6}))?)?")


def read_time(text: str, read_ns: int, now_s: float) -> int:
    """Return the time that is meant; raises ValueError that says what can be typed.

    A time of day is the one next to `read_ns` that is not in the future.
    """
    text = text.strip()
    ago, clock = _AGO.fullmatch(text), _CLOCK.fullmatch(text)
    if ago is not None:
        span_s = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(ago[2]))
        return min(LATEST_NS, max(1, read_ns + int(span_s * 1e9) * (1 if ago[1] == "+" else -1)))
    local = _of_day(clock, read_ns, now_s) if clock is not None else values.local_time(text)
    if local is None:
        raise ValueError(f"not a time; try {TIME_HINT.partition(' or')[0]}")
    return max(1, int(local.timestamp() * 1e6) * 1000)


def _of_day(clock: re.Match[str], read_ns: int, now_s: float) -> datetime.datetime | None:
    hour, minute, second, fraction = clock.groups()
    now, read_time = (_local_time(time_s) for time_s in (now_s + SLACK_S, read_ns / 1e9))
    try:
        of_day = datetime.time(int(hour), int(minute), int(second or 0), int((fraction or "0").ljust(6, "0")))
    except ValueError:
        return None
    days = (read_time.date() + datetime.timedelta(days=offset) for offset in (-1, 0, 1))
    moments = [datetime.datetime.combine(day, of_day).astimezone() for day in days]
    past = [moment for moment in moments if moment <= now] or moments[:1]
    return min(past, key=lambda moment: abs(moment - read_time))


def _local_time(time_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(time_s, tz=datetime.timezone.utc).astimezone()


# Python prints it like this, and torch behind a tag.
TRACEBACK: Final = r"Traceback \(most recent call last\)"
# The search text is shown only if there is room for this many cells of it.
LEAST_NAME: Final = 4


class LogSearch:
    """The search in the log that is shown, and the keys that go to a line of it."""

    def __init__(self, shell: Shell, shown: ShownLog, ask: Ask, show_title: Callable[[], None]) -> None:
        self.finder: Finder | None = None
        self._shell = shell
        self._shown = shown
        self._view = shown.view
        self._ask = ask
        self._show_title = show_title
        self._text = ""
        """The last search text."""
        self._steps: tuple[int, ...] = ()
        """Steps from hit to hit that cannot be taken yet."""
        self._end_moves = 0
        """`end_moves` of the view when they were typed; they are dropped if the reader goes to an end meanwhile."""

    def title_parts(self, room: int, others: Sequence[tuple[int, Row]]) -> list[tuple[int, Row]]:
        """Return the state of the search, next to other parts of the title."""
        finder = self.finder
        if finder is None:
            return []
        name, state = clean(finder.name), clean(finder.state_text())
        # Next to the pills there may be no room for the whole search text.
        left = (
            room - width_of(f": {state}") - sum(row_width(row) + 3 for _, row in others if row and row[0][1] == "pill")
        )
        if width_of(name) > left:
            name = fit(name, left, self._view.glyphs.more) if left >= LEAST_NAME else ""
        text = f"{name}: {state}" if name else state
        return [(3, ((text, "bad" if finder.problem else "mark"),))]

    def end(self) -> bool:
        """End the search; return whether there was one."""
        was_searching, view = self.finder is not None, self._view
        self.finder, self._steps = None, ()
        view.pattern = None
        view.workers.cancel_group(view, "find")
        return was_searching

    def action_find(self) -> None:
        """Ask for a pattern."""
        self._ask.ask("/", "text or regular expression", self._find, self._text)

    def _find(self, text: str) -> str:
        self._text = text
        return self._search(text)

    def action_errors(self, direction: int) -> None:
        """Go to the next or previous line that looks like an error."""
        self._go_to_error("error", "", direction)

    def action_traceback(self, direction: int) -> None:
        """Go to the next or previous traceback."""
        self._go_to_error("traceback", TRACEBACK, direction)

    def _go_to_error(self, name: str, text: str, direction: int) -> None:
        finder = self.finder
        if finder is None or (finder.name, finder.level) != (name, "error"):
            self._search(text, "error", direction, name)
        else:
            self.action_hit(direction)

    def _search(self, text: str, level: str | None = None, direction: int = 1, name: str = "") -> str:
        """Search, and go to the first hit in a direction; return an error in the pattern, or ""."""
        feed = self._view.feed
        if feed is None:
            return "no log is open yet"
        try:
            finder = self._finder(text, level, name, feed.clocks)
        except ValueError as error:
            return str(error)
        self._begin(finder, direction)
        return ""

    def repeat(self, finder: Finder, clocks: Clocks | None) -> None:
        """Search for the same in the log that is shown now, without a jump."""
        self._begin(self._finder(finder.text, finder.level, finder.name, clocks), 0)

    def _finder(self, text: str, level: str | None, name: str, clocks: Clocks | None) -> Finder:
        feed = self._view.feed
        assert feed is not None
        return Finder(self._shell.source, feed.selection, text, level, name, clocks)

    def _begin(self, finder: Finder, direction: int) -> None:
        self.finder, self._steps = finder, ()
        self._view.pattern = finder.pattern
        work = functools.partial(finder.run, lambda: self._found(finder), lambda: self._complete(finder, direction))
        # A coroutine object instead of a function would never be awaited if the next search cancelled the worker.
        self._view.run_worker(work, group="find", exclusive=True)  # type: ignore[arg-type]
        self._show_title()

    def _complete(self, finder: Finder, direction: int) -> None:
        # Hits that come later do not move the view.
        if finder is self.finder and finder.current < 0 and finder.hits:
            if direction:
                self._steps, self._end_moves = (direction, *self._steps), self._view.end_moves
            else:
                finder.stand_at(self._view.pointer)
        self._found(finder)

    def _found(self, finder: Finder) -> None:
        # The last report of a search may arrive while the application closes.
        if finder is not self.finder or not self._shell.app.is_running:
            return
        if not finder.running:
            self.take_steps()
        self._show_title()

    def action_hit(self, direction: int) -> None:
        """Go to the next or previous hit, after the steps that were typed before."""
        view = self._view
        if self.finder is not None and view.feed is not None:
            before = self._steps if self._end_moves == view.end_moves else ()
            self._steps, self._end_moves = (*before, direction), view.end_moves
            self.take_steps()

    def take_steps(self) -> None:
        """Take the steps that were typed, as far as their start and their hit are known."""
        view, finder = self._view, self.finder
        while self._steps and self._end_moves == view.end_moves and finder is not None:
            read = None if view.follow else self._shown.line_read()
            is_here = not view.moved_since_jump or (read is not None and view.points_at(read[0]))
            place = (read[1].t_ns, read[1].key) if read is not None else None
            pointer = view.pointer if is_here else None
            if view.is_jumping and not finder.is_at(pointer):
                return
            hit = finder.step(self._steps[0], place, pointer)
            if hit is None and finder.running:
                return
            self._steps = self._steps[1:]
            if hit is not None:
                view.jump_to_key(*hit, finder.clocks)
                self._show_title()

    # --- a time, a line number

    def action_at(self) -> None:
        """Ask for a time."""
        self._ask.ask("go to", TIME_HINT, self._go_to_time)

    def _go_to_time(self, text: str) -> str:
        read_ns, now_s = self._shown.place_read()[0], times.now()
        try:
            t_ns = read_time(text, read_ns if 0 < read_ns < LATEST_NS else int(now_s * 1e9), now_s)
        except (ValueError, OverflowError) as error:
            return str(error)
        self._view.jump_to_time(t_ns)
        return ""

    def action_line(self) -> None:
        """Ask for a line number."""
        if self._view.feed is not None and self._view.feed.selection.file is not None:
            self._ask.ask("line", "1 is the first", self._go_to_line)
        else:
            self._shell.say("only one stream of one rank has line numbers: choose it with M and s; @ goes to a time")

    def _go_to_line(self, text: str) -> str:
        feed = self._view.feed
        number = text.strip().replace(",", "").replace("_", "")
        file = feed.selection.file if feed is not None else None
        if feed is None or file is None or not number.isdecimal() or not int(number):
            return "not a line number"
        if 0 < feed.last_line < int(number):
            return f"the last line is {feed.last_line:,}"
        self._view.jump_to_key(LATEST_NS, (*file, int(number) - 1))
        return ""
