"""The filter of a log: patterns to keep, patterns to drop, a level.

In: what the user types. Out: the log with the records that pass, at the line that was read; the filter above it:
`+loss  -DEBUG  ≥warn`.

**A filter keeps the position: if it drops the line that is read, the neighbour of that line takes its place.**
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from textual.widgets import Static

from remote_agent.text.patterns import ignores_case
from supervisor.logs.selection import ALL, LEVELS, RecordFilter
from supervisor.tui.logs.feed import LATEST_NS
from supervisor.tui.logs.finder import compiled
from supervisor.tui.rows.spans import clean

if TYPE_CHECKING:
    from supervisor.tui.screens.logs.search import LogSearch
    from supervisor.tui.screens.logs.shown import ShownLog
    from supervisor.tui.shell import Shell
    from supervisor.tui.widgets.ask import Ask


class Chips(Static):
    """One line, shown only while there is a filter."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(markup=False, id=id)
        self.display = False

    def show(self, chosen: RecordFilter, *, ascii_only: bool) -> None:
        """Show the parts of the filter."""
        self.display = bool(chosen)
        level = [f"{'>=' if ascii_only else '≥'}{chosen.level}"] if chosen.level else []
        patterns = [*(f"+{text}" for text in chosen.include), *(f"-{text}" for text in chosen.exclude)]
        self.update("  ".join([*map(clean, patterns), *level]), layout=False)


HINT: Final = "text or regular expression"


class LogFilter:
    """The filter of the log that is shown, and the keys that change it."""

    def __init__(self, shell: Shell, shown: ShownLog, search: LogSearch, ask: Ask) -> None:
        self._shell = shell
        self._shown = shown
        self._search = search
        self._ask = ask
        self._removed: RecordFilter = ALL
        """The filter that was switched off, to switch it on again."""

    def suspend(self) -> None:
        """Switch the filter off for the next log that is opened, not for the job."""
        if self._shown.filter:
            self._removed = self._shown.filter
            self._shown.use_filter(ALL)
            self._shell.say("the filter is off for this log; \\ switches it on")

    def restore(self) -> None:
        """Use the filter of the job again for the next log that is opened."""
        self._shown.use_filter(self._shell.preferences.log_filter)

    def action_include(self) -> None:
        """Ask for a pattern whose lines stay."""
        self._ask.ask("keep", HINT, self._include)

    def action_exclude(self) -> None:
        """Ask for a pattern whose lines go."""
        self._ask.ask("drop", HINT, self._exclude)

    def _include(self, text: str) -> str:
        now = self._shown.filter
        return self._add(text, dataclasses.replace(now, include=(*now.include, text)))

    def _exclude(self, text: str) -> str:
        now = self._shown.filter
        return self._add(text, dataclasses.replace(now, exclude=(*now.exclude, text)))

    def _add(self, text: str, chosen: RecordFilter) -> str:
        """Use a filter with one more pattern; return an error in the pattern, or ""."""
        try:
            compiled(text, ignores_case(text))
        except ValueError as error:
            return str(error)
        self._apply(chosen)
        return ""

    def action_level(self, step: int) -> None:
        """Set the next or previous least level."""
        now = self._shown.filter
        at = LEVELS.index(now.level)
        self._apply(dataclasses.replace(now, level=LEVELS[(at + step) % len(LEVELS)]))

    def action_wider(self) -> None:
        """Remove the last part of the filter."""
        now = self._shown.filter
        if now.level:
            self._apply(dataclasses.replace(now, level=""))
        elif now.exclude:
            self._apply(dataclasses.replace(now, exclude=now.exclude[:-1]))
        elif now.include:
            self._apply(dataclasses.replace(now, include=now.include[:-1]))

    def action_filter(self) -> None:
        """Switch the filter off, or on again."""
        now = self._shown.filter
        if not now and not self._removed:
            self._shell.say("no filter yet: & keeps lines, ! drops lines, v sets a level")
            return
        chosen = ALL if now else self._removed
        self._removed = now
        self._apply(chosen)

    def _apply(self, chosen: RecordFilter) -> None:
        view, finder = self._shown.view, self._search.finder
        follows, feed = view.follow, view.feed
        t_ns, key = (LATEST_NS, None) if follows else self._shown.place_read()
        clocks = feed.clocks if feed is not None and not follows else None
        self._shell.preferences.log_filter = chosen
        self._shown.open_filtered(chosen, key)
        if not follows:
            view.jump_to_key(t_ns, key, clocks=clocks)
        if finder is not None:
            self._search.repeat(finder, clocks)
