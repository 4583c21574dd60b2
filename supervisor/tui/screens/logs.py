"""The log of a rank, of a node, or of all ranks by time.

In: the session's windows. Out: what the user reads; nothing of it moves unless he moves it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from supervisor.tui.rows import name_width
from supervisor.tui.screens.log_filtered import FilteredLog
from supervisor.tui.widgets.ask import Ask
from supervisor.tui.widgets.chips import Chips
from supervisor.tui.widgets.virtual_log import VirtualLog

if TYPE_CHECKING:
    from textual import events
    from textual.widget import Widget

    from supervisor.tui.model import Snapshot

WAITING: Final = "waiting for output"
REACHING: Final = "reaching the hosts; the log opens once one answers"
# Enough for all ranks of hundreds but one.
FOLD_WIDTH: Final = len("[0-136,138-511]~")


class LogsScreen(FilteredLog):
    """One log view."""

    NAME = "logs"
    AUTO_FOCUS = "#log"

    def body(self) -> Iterable[Widget]:
        """The log, and a line to type in."""
        yield Chips(id="chips")
        yield VirtualLog(title="log", id="log")
        yield Ask(lambda: self.log_view, id="find")

    def show(self, snapshot: Snapshot) -> None:
        """Keep the title right; the text looks after itself."""
        log = self.log_view
        if log.feed is None:
            self.open_target(self.target)
        self._keep_up(snapshot)
        width = name_width(snapshot.nodes) + 2 + len(str(max(1, len(snapshot.ranks) - 1)))
        log.source_width = max(width, FOLD_WIDTH) if self.folded else width
        self._title()

    def tick(self, snapshot: Snapshot, age_s: float, changed: bool) -> None:
        """Let the log move, once there is somebody to ask."""
        log = self.log_view
        log.held = not (snapshot.state or snapshot.problem or self.tui.played)
        log.waiting_text = REACHING if log.held else WAITING
        super().tick(snapshot, age_s, changed)
        if self._turns != self.tui.turns:
            self._reread()
        log.tick()

    def tick_paused(self, snapshot: Snapshot, age_s: float, changed: bool) -> None:
        """A log is stopped by not following it; what one scrolls to has to come."""
        self.tick(snapshot, age_s, changed)

    def on_click(self, event: events.Click) -> None:
        """A click points to a line."""
        if event.widget is self.log_view:
            self.log_view.point_to(event.y)

    def action_follow(self) -> None:
        """Follow, or stop following."""
        self.log_view.set_follow(not self.log_view.follow)

    def action_time(self) -> None:
        """Times on and off."""
        self.log_view.show_time = self.tui.memory.log_time = not self.log_view.show_time
        self.log_view.redraw()

    def action_wrap(self) -> None:
        """Wrap long lines, or not."""
        self.tui.memory.log_wrap = not self.log_view.wrap
        self.log_view.set_wrap(self.tui.memory.log_wrap)
        self._title()

    def action_source(self) -> None:
        """Node and rank on and off."""
        self.log_view.show_source = not self.log_view.show_source
        self.log_view.redraw()
