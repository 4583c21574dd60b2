"""What the log is narrowed to: patterns that stay or go, a level.

In: what the user types. Out: the log with those records alone, at the line that was read.

**A filter keeps the line: where it drops the line that is read, its neighbour takes its place, and gives it back.**
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from textual import on

from remote_agent.logs.pattern import ignores_case
from supervisor.session.filters import ALL, LEVELS, Filter
from supervisor.tui.logs.feeds import RankFeed
from supervisor.tui.logs.finder import compiled
from supervisor.tui.logs.merged import LATEST_NS, MergedFeed
from supervisor.tui.screens.log_shown import BOTH
from supervisor.tui.screens.log_taken import TakenLog
from supervisor.tui.widgets.ask import Ask
from supervisor.tui.widgets.chips import Chips
from supervisor.tui.widgets.virtual_log import VirtualLog

if TYPE_CHECKING:
    from supervisor.tui.incident_rows import Place
    from supervisor.tui.screens.base import Target

HINT: Final = "text or regular expression"


class FilteredLog(TakenLog):
    """A log of which only some records may be shown."""

    _shelved: Filter = ALL
    """What was taken off by one key, to be put on again."""

    def on_mount(self) -> None:
        """Begin with what the log was narrowed to when this job was last looked at."""
        self.filter = self.tui.memory.log_filter

    def open_target(self, target: Target, generation: int | None = None, streams: tuple[str, ...] = BOTH) -> None:
        """Show the log of a rank, a node, or all, narrowed as the job's log is."""
        self.filter = self.tui.memory.log_filter
        super().open_target(target, generation, streams)
        self._show_chips()

    def open_place(self, place: Place) -> None:
        """Show one line of one stream, whatever it holds: the filter is off there alone."""
        if self.filter:
            self._shelved, self.filter = self.filter, ALL
            self.tui.say("the filter is off here; \\ puts it on again")
        super().open_place(place)
        self._show_chips()

    @on(VirtualLog.Changed)
    def _show_chips(self) -> None:
        self.query_one(Chips).show(self.filter, self.log_view.feed, ascii_only=self.log_view.glyphs.ascii)

    def action_include(self) -> None:
        """Ask for what stays."""
        self.query_one(Ask).ask("keep", HINT, self._include)

    def action_exclude(self) -> None:
        """Ask for what goes."""
        self.query_one(Ask).ask("drop", HINT, self._exclude)

    def _include(self, text: str) -> str:
        return self._add(text, dataclasses.replace(self.filter, include=(*self.filter.include, text)))

    def _exclude(self, text: str) -> str:
        return self._add(text, dataclasses.replace(self.filter, exclude=(*self.filter.exclude, text)))

    def _add(self, text: str, chosen: Filter) -> str:
        """Add a pattern; returns what is wrong with it, or nothing."""
        try:
            compiled(text, ignores_case(text))
        except ValueError as error:
            return str(error)
        self._narrow(chosen)
        return ""

    def action_level(self, step: int) -> None:
        """The next level from which on lines are shown."""
        at = LEVELS.index(self.filter.level)
        self._narrow(dataclasses.replace(self.filter, level=LEVELS[(at + step) % len(LEVELS)]))

    def action_wider(self) -> None:
        """Take the last part of the filter away."""
        now = self.filter
        if now.level:
            self._narrow(dataclasses.replace(now, level=""))
        elif now.exclude:
            self._narrow(dataclasses.replace(now, exclude=now.exclude[:-1]))
        elif now.include:
            self._narrow(dataclasses.replace(now, include=now.include[:-1]))

    def action_filter(self) -> None:
        """Take the filter off, or put it on again."""
        if not self.filter and not self._shelved:
            self.tui.say("no filter yet: & keeps lines, ! drops them, v sets a level")
            return
        self._shelved, chosen = self.filter, self._shelved
        self._narrow(chosen if not self.filter else ALL)

    def action_back(self) -> None:
        """End a search first, take the filter off then, go back at last."""
        if self.finder is None and self.filter:
            self.action_filter()
        else:
            super().action_back()

    def _narrow(self, chosen: Filter) -> None:
        """Show what another filter keeps; the line that is read stays, or its neighbour stands for it."""
        t_ns, key = (LATEST_NS, None) if self.log_view.follow else self._line_read()
        follows, finder, feed = self.log_view.follow, self.finder, self.log_view.feed
        clocks = feed.clocks if not follows and isinstance(feed, MergedFeed) else None
        self.filter = self.tui.memory.log_filter = chosen
        now = self._open()
        if key is not None and isinstance(now, RankFeed) and key[0] != now.generation:
            # A filter lets the lines of all generations through.
            self.generation = key[0]
            self._open()
        if not follows:
            self.log_view.jump_to_key(t_ns, key, clocks=clocks)
        if finder is not None:
            self._search_again(finder, None if t_ns == LATEST_NS else t_ns, clocks)
        self._show_chips()
