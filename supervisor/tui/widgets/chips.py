"""The line above a log that says what the log is narrowed to.

In: a filter, the feed that goes by it. Out: `+loss  -DEBUG  ≥warn  (1,204 of 88,112)`; nothing without a filter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.widgets import Static

from supervisor.tui.cells import clean
from supervisor.tui.logs.merged import MergedFeed

if TYPE_CHECKING:
    from supervisor.session.filters import Filter
    from supervisor.tui.logs.feeds import Feed


class Chips(Static):
    """One line, which is there only while there is a filter."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(markup=False, id=id)
        self.display = False

    def show(self, chosen: Filter, feed: Feed | None, *, ascii_only: bool) -> None:
        """Say what is kept, and how much of what has been looked at that is."""
        self.display = bool(chosen)
        level = [f"{'>=' if ascii_only else '≥'}{chosen.level}"] if chosen.level else []
        patterns = [*(f"+{text}" for text in chosen.include), *(f"-{text}" for text in chosen.exclude)]
        self.update("  ".join([*map(clean, patterns), *level, *_counts(feed)]))


def _counts(feed: Feed | None) -> list[str]:
    if not isinstance(feed, MergedFeed) or not feed.looked_at:
        return []
    if feed.is_whole:
        return [f"({feed.passed:,} of {feed.looked_at:,})"]
    if feed.detached:
        return [f"({feed.passed:,} of {feed.looked_at:,} around here)"]
    return [f"({feed.passed:,} of the last {feed.looked_at:,})"]
