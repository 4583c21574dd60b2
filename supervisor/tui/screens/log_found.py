"""Ways to a line of the log: hits of a search.

In: what the user types, hits that the agents send. Out: the view at that line.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from supervisor.tui.cells import clean
from supervisor.tui.feeds import MergedFeed, RankFeed
from supervisor.tui.finder import Finder
from supervisor.tui.screens.log_shown import ShownLog
from supervisor.tui.widgets.ask import Ask

if TYPE_CHECKING:
    from supervisor.tui.cells import Row
    from supervisor.tui.widgets.virtual_log import VirtualLog


class FoundLog(ShownLog):
    """A log in which lines are found."""

    finder: Finder | None = None

    def _open(self, *, one_file: bool = False) -> MergedFeed | RankFeed:
        self.finder, self.log_view.pattern = None, None
        return super()._open(one_file=one_file)

    def _parts(self, log: VirtualLog) -> list[tuple[int, Row]]:
        if self.finder is None:
            return super()._parts(log)
        said: Row = ((clean(self.finder.said()), "bad" if self.finder.problem else "mark"),)
        return [(3, said), *super()._parts(log)]

    def action_find(self) -> None:
        """Ask for a pattern."""
        text = self.finder.text if self.finder is not None else ""
        self.query_one(Ask).ask("/", "text or regular expression", self._find, text)

    def _find(self, text: str) -> str:
        return self._search(text, None)

    def action_back(self) -> None:
        """End a search first; then go back."""
        if self.finder is not None:
            self.finder, self.log_view.pattern = None, None
            self.workers.cancel_group(self, "find")
            self._title()
        else:
            super().action_back()

    def action_errors(self) -> None:
        """Search for what the agents take for errors."""
        self._search("", "error")

    def _search(self, text: str, level: str | None) -> str:
        """Begin a search; returns what is wrong with the pattern, or nothing."""
        try:
            feed = self.log_view.feed
            only = feed.stream if isinstance(feed, RankFeed) else None
            finder = Finder(self.tui.source, self._selection(), text, level, only)
        except ValueError as error:
            return str(error)
        self.finder = finder
        self.log_view.pattern = finder.pattern
        around = self.log_view.body_height if type(feed) is MergedFeed else 0
        work = functools.partial(finder.run, lambda: self._found(finder), around, self._time_read())
        # A coroutine would be left behind where the next search comes before it begins.
        self.run_worker(work, group="find", exclusive=True)  # type: ignore[arg-type]
        self._title()
        return ""

    def _found(self, finder: Finder) -> None:
        # The last word of a search may come while the application closes.
        if finder is not self.finder or not self.tui.is_running:
            return
        # What comes later moves nobody.
        if finder.current < 0 and finder.hits and not finder.running and finder.looks == 1:
            self.action_hit(1)
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
        if isinstance(feed, RankFeed):
            log.jump(feed.index_of(key), key)
        else:
            log.jump_to_key(t_ns, key, finder.pages(key))
        self._title()
