"""Ways to a line of the log: hits of a search, errors, tracebacks, a time, a number, bookmarks.

In: what the user types, hits that the agents send. Out: the view at that line.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from textual import on

from supervisor.tui import words
from supervisor.tui.cells import clean, fit, row_width, width_of
from supervisor.tui.logs import bookmarks, moments
from supervisor.tui.logs.feeds import RankFeed
from supervisor.tui.logs.finder import BEGIN, Finder
from supervisor.tui.logs.merged import LATEST_NS, MergedFeed
from supervisor.tui.screens.log_shown import ShownLog
from supervisor.tui.widgets.ask import Ask
from supervisor.tui.widgets.virtual_log import VirtualLog

if TYPE_CHECKING:
    from supervisor.session.logs import Clocks
    from supervisor.tui.cells import Row
    from supervisor.tui.logs.finder import Key, Place


# As Python prints it, and torch behind a tag.
TRACEBACK: Final = r"Traceback \(most recent call last\)"
# So many cells of what is looked for say what it is.
LEAST_NAME: Final = 4


class FoundLog(ShownLog):
    """A log in which lines are found."""

    finder: Finder | None = None
    _typed = ""
    """What was looked for last."""
    _steps: tuple[int, ...] = ()
    """Steps from hit to hit that were asked for and cannot be taken yet."""
    _went = 0
    """How often the reader had gone to an end by then: who goes there has no use for them any more."""

    def _open(self, *, one_file: bool = False) -> MergedFeed | RankFeed:
        self._end_search()
        feed = super()._open(one_file=one_file)
        self._show_bookmarks()
        return feed

    def _parts(self, log: VirtualLog, room: int) -> list[tuple[int, Row]]:
        parts, finder = super()._parts(log, room), self.finder
        if finder is None:
            return parts
        name, how = clean(finder.name), clean(finder.how())
        # Beside the number of lines that wait there may be no room for all of what is looked for.
        left = room - width_of(f": {how}") - sum(row_width(row) + 3 for _, row in parts if row and row[0][1] == "pill")
        if width_of(name) > left:
            name = fit(name, left, log.glyphs.more) if left >= LEAST_NAME else ""
        said = f"{name}: {how}" if name else how
        return [(3, ((said, "bad" if finder.problem else "mark"),)), *parts]

    def action_find(self) -> None:
        """Ask for a pattern."""
        self.query_one(Ask).ask("/", "text or regular expression", self._find, self._typed)

    def _find(self, text: str) -> str:
        self._typed = text
        return self._search(text)

    def action_back(self) -> None:
        """End a search first; then go back."""
        if self.finder is not None:
            self._end_search()
            self._title()
        else:
            super().action_back()

    def _end_search(self) -> None:
        self.finder, self.log_view.pattern, self._steps = None, None, ()
        self.workers.cancel_group(self, "find")

    def action_errors(self, direction: int) -> None:
        """Go to the next or previous line that the agents take for an error."""
        self._way("error", "", direction)

    def action_traceback(self, direction: int) -> None:
        """Go to the next or previous traceback."""
        self._way("traceback", TRACEBACK, direction)

    def _way(self, name: str, text: str, direction: int) -> None:
        """Step through what has been found, from where one reads; search first if that is not known."""
        finder = self.finder
        if finder is None or (finder.name, finder.level) != (name, "error"):
            self._search(text, "error", direction, name)
        else:
            self.action_hit(direction)

    def _search(self, text: str, level: str | None = None, direction: int = 1, name: str = "") -> str:
        """Search, and go to the first hit in a direction; returns what is wrong with the pattern, or nothing."""
        feed = self.log_view.feed
        try:
            finder = self._finder(text, level, name, feed.clocks if isinstance(feed, MergedFeed) else None)
        except ValueError as error:
            return str(error)
        around = self.log_view.body_height if type(feed) is MergedFeed and not feed.selection.filter else 0
        self._begin_search(finder, direction, around, self._time_read())
        return ""

    def _search_again(self, before: Finder, near_ns: int | None, clocks: Clocks | None) -> None:
        """Search for the same in what is shown now; nobody is moved."""
        self._begin_search(self._finder(before.text, before.level, before.name, clocks), 0, 0, near_ns)

    def _finder(self, text: str, level: str | None, name: str, clocks: Clocks | None) -> Finder:
        feed = self.log_view.feed
        only = feed.stream if isinstance(feed, RankFeed) else None
        return Finder(self.tui.source, self._selection(), text, level, only, name, clocks)

    def _begin_search(self, finder: Finder, direction: int, around: int, near_ns: int | None) -> None:
        self.finder, self._steps = finder, ()
        self.log_view.pattern = finder.pattern
        work = functools.partial(finder.run, lambda: self._found(finder, direction), around, near_ns)
        # A coroutine would be left behind where the next search comes before it begins.
        self.run_worker(work, group="find", exclusive=True)  # type: ignore[arg-type]
        self._title()

    def _found(self, finder: Finder, direction: int) -> None:
        # The last word of a search may come while the application closes.
        if finder is not self.finder or not self.tui.is_running:
            return
        # What comes later moves nobody.
        if finder.current < 0 and not finder.running and finder.looks == 1:
            there = bool(finder.hits) or finder.part is not None
            if direction and there:
                self._steps, self._went = (direction, *self._steps), self.log_view.went
            elif there:
                finder.stand_at(self.log_view.pointer)
        if not finder.running:
            self._take_steps()
        self._title()

    def action_hit(self, direction: int) -> None:
        """Go to the next or previous hit, from where all that was asked for before leads to."""
        log = self.log_view
        if self.finder is not None and log.feed is not None:
            before = self._steps if self._went == log.went else ()
            self._steps, self._went = (*before, direction), log.went
            self._take_steps()

    @on(VirtualLog.Changed)
    def _take_steps(self) -> None:
        """Take the steps that were asked for, as far as it is known where they begin and lead to."""
        log, finder = self.log_view, self.finder
        while self._steps and self._went == log.went and finder is not None:
            if finder.running and finder.part is not None:
                return
            row = None if log.follow else self._row_read()
            here = not log.strayed or (row is not None and row.is_at(log.pointer))
            place, pointer = (row.t_ns, row.key) if row is not None else None, log.pointer if here else None
            if log.is_on_its_way and not finder.is_at(pointer):
                return
            hit = finder.step(self._steps[0], place, pointer)
            if hit is None and finder.running:
                return
            direction, self._steps = self._steps[0], self._steps[1:]
            if hit is not None:
                self._go_to_hit(finder, hit)
            elif finder.part is not None:
                finder.running = True
                self.run_worker(functools.partial(self._go_on, finder, direction, place, pointer), group="find")  # type: ignore[arg-type]

    async def _go_on(self, finder: Finder, direction: int, place: Place | None, pointer: Key | None) -> None:
        went = self.log_view.went
        hit = await finder.go_on(direction, place, pointer)
        if finder is not self.finder or not self.tui.is_running:
            return
        if hit is None:
            self._steps = ()
        elif went == self.log_view.went:
            self._go_to_hit(finder, hit)
        self._take_steps()
        self._title()

    def _go_to_hit(self, finder: Finder, hit: Place) -> None:
        t_ns, key = hit
        self.log_view.jump_to_key(t_ns, key, finder.pages(key), finder.clocks)
        self._title()

    # --- a time, a number

    def action_at(self) -> None:
        """Ask for a time."""
        self.query_one(Ask).ask("go to", moments.HINT, self._go_to_time)

    def _go_to_time(self, text: str) -> str:
        read_ns, now_s = self._line_read()[0], words.now()
        try:
            t_ns = moments.read(text, read_ns if 0 < read_ns < LATEST_NS else int(now_s * 1e9), now_s)
        except (ValueError, OverflowError) as error:
            return str(error)
        self.log_view.jump_to_time(t_ns)
        return ""

    def action_line(self) -> None:
        """Ask for the number of a line."""
        if isinstance(self.log_view.feed, RankFeed):
            self.query_one(Ask).ask("line", "1 is the first", self._go_to_line)
        else:
            self.tui.say("lines are numbered in one stream of one rank: choose them by M and s; @ goes to a time")

    def _go_to_line(self, text: str) -> str:
        feed = self.log_view.feed
        number = text.strip().replace(",", "").replace("_", "")
        if not isinstance(feed, RankFeed) or not number.isdecimal() or not int(number):
            return "no number of a line"
        if int(number) > feed.end:
            return f"the last line is {feed.end:,}"
        key = (feed.generation, feed.rank, feed.stream, int(number) - 1)
        self.log_view.jump(feed.index_of(key), key)
        return ""

    # --- bookmarks

    def action_bookmark(self) -> None:
        """Mark the line that is read, or take its mark away."""
        row = self._row_read()
        if row is not None:
            self.tui.memory.bookmarks = bookmarks.toggled(self.tui.memory.bookmarks, row)
            self._show_bookmarks()

    def _show_bookmarks(self) -> None:
        self.log_view.marks = frozenset(mark.key for mark in self.tui.memory.bookmarks)
        self.log_view.redraw()

    def action_to_bookmark(self, direction: int) -> None:
        """Go to the next or previous bookmark among the lines that are shown."""
        feed, selection = self.log_view.feed, self._selection()
        marks = [mark for mark in self.tui.memory.bookmarks if mark.is_in(selection)]
        if isinstance(feed, RankFeed):
            marks = [mark for mark in marks if mark.stream == feed.stream]
        t_ns, key = self._line_read()
        mark = bookmarks.beside(marks, (t_ns, key or BEGIN[1]), direction)
        if mark is None:
            self.tui.say("no bookmark among these lines; m sets one")
        else:
            self.log_view.jump_to_key(mark.t_ns, mark.key)
