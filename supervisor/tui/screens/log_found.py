"""Ways to a line of the log: hits of a search, errors, tracebacks, a time, a number, bookmarks.

In: what the user types, hits that the agents send. Out: the view at that line.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from supervisor.tui import bookmarks, moments, words
from supervisor.tui.cells import clean
from supervisor.tui.feeds import RankFeed
from supervisor.tui.finder import Finder
from supervisor.tui.merged import MergedFeed
from supervisor.tui.screens.log_shown import ShownLog
from supervisor.tui.widgets.ask import Ask

if TYPE_CHECKING:
    from supervisor.tui.cells import Row
    from supervisor.tui.widgets.virtual_log import VirtualLog


# As Python prints it, and torch behind a tag.
TRACEBACK: Final = r"Traceback \(most recent call last\)"


class FoundLog(ShownLog):
    """A log in which lines are found."""

    finder: Finder | None = None

    def _open(self, *, one_file: bool = False) -> MergedFeed | RankFeed:
        self.finder, self.log_view.pattern = None, None
        feed = super()._open(one_file=one_file)
        self._show_bookmarks()
        return feed

    def _parts(self, log: VirtualLog) -> list[tuple[int, Row]]:
        if self.finder is None:
            return super()._parts(log)
        said: Row = ((clean(self.finder.said()), "bad" if self.finder.problem else "mark"),)
        return [(3, said), *super()._parts(log)]

    def action_find(self) -> None:
        """Ask for a pattern."""
        text = self.finder.text if self.finder is not None and not self.finder.level else ""
        self.query_one(Ask).ask("/", "text or regular expression", self._find, text)

    def _find(self, text: str) -> str:
        return self._search(text)

    def action_back(self) -> None:
        """End a search first; then go back."""
        if self.finder is not None:
            self.finder, self.log_view.pattern = None, None
            self.workers.cancel_group(self, "find")
            self._title()
        else:
            super().action_back()

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
        try:
            feed = self.log_view.feed
            only = feed.stream if isinstance(feed, RankFeed) else None
            finder = Finder(self.tui.source, self._selection(), text, level, only, name)
        except ValueError as error:
            return str(error)
        self.finder = finder
        self.log_view.pattern = finder.pattern
        around = self.log_view.body_height if type(feed) is MergedFeed and not feed.selection.filter else 0
        work = functools.partial(finder.run, lambda: self._found(finder, direction), around, self._time_read())
        # A coroutine would be left behind where the next search comes before it begins.
        self.run_worker(work, group="find", exclusive=True)  # type: ignore[arg-type]
        self._title()
        return ""

    def _found(self, finder: Finder, direction: int) -> None:
        # The last word of a search may come while the application closes.
        if finder is not self.finder or not self.tui.is_running:
            return
        # What comes later moves nobody.
        if finder.current < 0 and finder.hits and not finder.running and finder.looks == 1:
            self.action_hit(direction)
        self._title()

    def action_hit(self, direction: int) -> None:
        """Go to the next or previous hit."""
        log, finder = self.log_view, self.finder
        feed = log.feed
        if finder is None or feed is None:
            return
        row = None if log.follow else self._row_read()
        here = not log.strayed or (row is not None and row.is_at(log.pointer))
        hit = finder.step(direction, (row.t_ns, row.key) if row is not None else None, log.pointer if here else None)
        if hit is None:
            return
        t_ns, key = hit
        log.jump_to_key(t_ns, key, finder.pages(key))
        self._title()

    # --- a time, a number

    def action_at(self) -> None:
        """Ask for a time."""
        self.query_one(Ask).ask("go to", moments.HINT, self._go_to_time)

    def _go_to_time(self, text: str) -> str:
        row = self._row_read()
        try:
            t_ns = moments.read(text, row.t_ns if row is not None else int(words.now() * 1e9), words.now())
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
        feed, row = self.log_view.feed, self._row_read()
        selection = self._selection()
        marks = [mark for mark in self.tui.memory.bookmarks if mark.is_in(selection)]
        if isinstance(feed, RankFeed):
            marks = [mark for mark in marks if mark.stream == feed.stream]
        mark = bookmarks.beside(marks, (row.t_ns, row.key) if row is not None else (0, (0, 0, "", 0)), direction)
        if mark is None:
            self.tui.say("no bookmark among these lines; m sets one")
        else:
            self.log_view.jump_to_key(mark.t_ns, mark.key)
