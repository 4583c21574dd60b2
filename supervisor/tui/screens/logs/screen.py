"""The log of a rank, of a node, or of all ranks by time.

In: keys, the newest snapshot. Out: the view, its title, and the filter above it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from textual import on

from supervisor.tui.logs import ansi
from supervisor.tui.logs.feeds import BOTH
from supervisor.tui.rows.spans import width_of
from supervisor.tui.rows.tables import fit_parts, name_width
from supervisor.tui.screens.base import LiveScreen
from supervisor.tui.screens.logs.export import LogExport
from supervisor.tui.screens.logs.filter import Chips, LogFilter
from supervisor.tui.screens.logs.search import LogSearch
from supervisor.tui.screens.logs.shown import ShownLog
from supervisor.tui.shell import Target
from supervisor.tui.widgets.ask import Ask
from supervisor.tui.widgets.lines import HEADING
from supervisor.tui.widgets.virtual_log import VirtualLog

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual import events
    from textual.widget import Widget

    from supervisor.tui.model import Snapshot
    from supervisor.tui.rows.incident import LogPlace

WAITING: Final = "waiting for output"
REACHING: Final = "connecting to the hosts; the log opens once one answers"
# Enough for all ranks of hundreds but one.
FOLD_WIDTH: Final = len("[0-136,138-511]~")


class LogsScreen(LiveScreen):
    """One log, composed of parts; the actions of the parts are actions of the screen."""

    NAME = "logs"
    AUTO_FOCUS = "#log"
    PARTS: ClassVar = (ShownLog, LogSearch, LogFilter, LogExport)

    def body(self) -> Iterable[Widget]:
        """The filter, the log, and a line to type in."""
        yield Chips(id="chips")
        yield VirtualLog(title="log", id="log")
        yield Ask(lambda: self.view, id="find")

    def on_mount(self) -> None:
        """Make the parts."""
        shell, view, ask = self.shell, self.view, self.query_one(Ask)
        view.show_time, view.wrap = shell.preferences.log_time, shell.preferences.log_wrap
        self.shown = ShownLog(shell, view, self._opened)
        self.search = LogSearch(shell, self.shown, ask, self._show_title)
        self.filter = LogFilter(shell, self.shown, self.search, ask)
        self.export = LogExport(shell, self.shown, ask, self._show_title)
        for part in (self.shown, self.search, self.filter, self.export):
            for name in dir(part):
                if name.startswith("action_"):
                    setattr(self, name, getattr(part, name))

    @property
    def view(self) -> VirtualLog:
        """The view of the log."""
        return self.query_one(VirtualLog)

    # --- what is shown

    def open_target(self, target: Target, generation: int | None = None, streams: tuple[str, ...] = BOTH) -> None:
        """Show the log of a rank, a node or all ranks, with the filter of the job."""
        self.filter.restore()
        self.shown.open_target(target, generation, streams)

    def open_place(self, place: LogPlace) -> None:
        """Show one line of one stream, without the filter."""
        self.filter.suspend()
        self.shown.open_place(place)

    def open_time(self, t_ns: int) -> None:
        """Show the lines of all ranks at a time."""
        self.open_target(Target())
        self.view.jump_to_time(t_ns)

    def show(self, snapshot: Snapshot) -> None:
        """Update the title; the view loads its lines itself."""
        self.shown.keep_up(snapshot)
        width = name_width(snapshot.nodes) + 2 + len(str(max(1, len(snapshot.ranks) - 1)))
        view = self.view
        view.source_width = max(width, FOLD_WIDTH) if self.shown.folded else width
        self._show_title()

    def selection(self) -> Target:
        """The rank or node whose log is shown."""
        return self.shown.target

    def copied_text(self) -> str:
        """The line that is read, in full."""
        row = self.shown.row_read()
        return ansi.plain(row.text) if row is not None else ""

    def _opened(self) -> None:
        self.search.end()
        self._show_filter()

    @on(VirtualLog.Changed)
    def _changed(self) -> None:
        self.search.take_steps()
        self._show_filter()
        self._show_title()

    def _show_filter(self) -> None:
        self.query_one(Chips).show(self.shown.filter, self.view.feed, ascii_only=self.view.glyphs.ascii)

    def _show_title(self) -> None:
        view = self.view
        view.heading = self.shown.heading()
        room = self.size.width - min(HEADING, width_of(view.heading)) - 7
        parts = self.shown.title_parts()
        parts = [*self.export.title_parts(), *self.search.title_parts(room, parts), *parts]
        view.note = fit_parts([part for part in parts if part[1]], room, view.glyphs.more)
        view.redraw()

    # --- the tick

    def tick(self, snapshot: Snapshot, age_s: float, changed: bool) -> None:
        """Let the view load lines as soon as a host is connected."""
        view = self.view
        view.held = not (snapshot.state or snapshot.problem or self.shell.replay_status)
        view.waiting_text = REACHING if view.held else WAITING
        super().tick(snapshot, age_s, changed)
        self.shown.follow_replay()
        view.tick()

    def tick_paused(self, snapshot: Snapshot, age_s: float, changed: bool) -> None:
        """A frozen display still loads the lines to which the reader scrolls."""
        self.tick(snapshot, age_s, changed)

    # --- keys

    def on_click(self, event: events.Click) -> None:
        """Point to a line."""
        if event.widget is self.view:
            self.view.point_to(event.y)

    def action_back(self) -> None:
        """Cancel an export, end a search, switch the filter off; then go back."""
        if self.export.cancel() or self.search.end():
            self._show_title()
        elif self.shown.filter:
            self.filter.action_filter()
        else:
            super().action_back()

    def action_follow(self) -> None:
        """Follow the end, or stop following."""
        self.view.set_follow(not self.view.follow)

    def action_time(self) -> None:
        """Show or hide the times."""
        view = self.view
        view.show_time = self.shell.preferences.log_time = not view.show_time
        view.redraw()

    def action_wrap(self) -> None:
        """Wrap long lines, or cut them."""
        self.shell.preferences.log_wrap = not self.view.wrap
        self.view.set_wrap(self.shell.preferences.log_wrap)
        self._show_title()

    def action_source(self) -> None:
        """Show or hide node and rank."""
        view = self.view
        view.show_source = not view.show_source
        view.redraw()
