"""The log of a rank, of a node, or of all ranks by time.

In: keys, the newest job view. Out: the view, its title, and the filter above it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual import on

from remote_agent.text.names import count
from supervisor.tui.dialogs.base import TextDialog
from supervisor.tui.logs import ansi
from supervisor.tui.logs.feed import BOTH
from supervisor.tui.rows.incident import LogPlace
from supervisor.tui.rows.spans import width_of
from supervisor.tui.rows.tables import fit_parts, name_width
from supervisor.tui.screens.base import LiveScreen
from supervisor.tui.screens.logs.filter import Chips, LogFilter
from supervisor.tui.screens.logs.record import RecordDialog
from supervisor.tui.screens.logs.save import LogSave
from supervisor.tui.screens.logs.search import LogSearch
from supervisor.tui.screens.logs.shown import ShownLog
from supervisor.tui.shell import LogOf, LogTime, Target
from supervisor.tui.widgets.ask import Ask
from supervisor.tui.widgets.lines import HEADING
from supervisor.tui.widgets.virtual_log import VirtualLog
from supervisor.wording import values

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual import events
    from textual.widget import Widget

    from supervisor.tui.model import JobView

WAITING: Final = "waiting for output"
# While the end is followed, the nodes are asked this often, seconds.
EVERY_S: Final = 0.25
REACHING: Final = "connecting to the hosts; the log opens once one answers"
# This has room for all ranks of hundreds except one.
FOLD_WIDTH: Final = len("[0-136,138-511]~")


class LogsScreen(LiveScreen):
    """One log, composed of parts; the actions of the parts are actions of the screen."""

    NAME = "logs"
    AUTO_FOCUS = "#log"

    def body(self) -> Iterable[Widget]:
        """Yield the filter, the log, and a line to type in."""
        yield Chips(id="chips")
        yield VirtualLog(title="log", id="log", every_s=EVERY_S)
        yield Ask(lambda: self.view, id="find")

    def on_mount(self) -> None:
        """Make the parts, and take their actions over: Textual looks for the action of a key on the screen."""
        shell, view, ask = self.shell, self.view, self.query_one(Ask)
        view.show_time, view.wrap = shell.preferences.log_time, shell.preferences.log_wrap
        self.shown = shown = ShownLog(shell, view, self._opened)
        self.action_scope, self.action_stream = shown.action_scope, shown.action_stream
        self.action_rank, self.action_generation = shown.action_rank, shown.action_generation
        self.action_fold = shown.action_fold
        self.search = search = LogSearch(shell, shown, ask, self._show_title)
        self.action_find, self.action_hit = search.action_find, search.action_hit
        self.action_errors, self.action_traceback = search.action_errors, search.action_traceback
        self.action_at, self.action_line = search.action_at, search.action_line
        self.filter = chosen = LogFilter(shell, shown, search, ask)
        self.action_include, self.action_exclude = chosen.action_include, chosen.action_exclude
        self.action_level, self.action_wider = chosen.action_level, chosen.action_wider
        self.save = save = LogSave(shell, shown, ask, self._show_title)
        self.action_save = save.action_save

    @property
    def view(self) -> VirtualLog:
        """The view of the log."""
        return self.query_one(VirtualLog)

    # --- what is shown

    def open(self, where: Target | LogOf | LogPlace | LogTime) -> None:
        """Show a log with the filter of the job, or one line of one stream without it."""
        if isinstance(where, LogPlace):
            self.filter.suspend()
            self.shown.open_place(where)
            return
        self.filter.restore()
        log = where if isinstance(where, LogOf) else LogOf(where if isinstance(where, Target) else Target())
        self.shown.open_target(log.target, log.generation, log.streams or BOTH)
        if isinstance(where, LogTime):
            self.view.jump_to_time(where.t_ns)

    def show(self, job_view: JobView) -> None:
        """Update the title; the view loads its lines itself."""
        self.shown.keep_up(job_view)
        width = name_width(job_view.nodes) + 2 + len(str(max(1, len(job_view.ranks) - 1)))
        view = self.view
        view.source_width = max(width, FOLD_WIDTH) if self.shown.folded else width
        self._show_title()

    def selection(self) -> Target:
        """Return the rank or node whose log is shown."""
        return self.shown.target

    def copied_text(self) -> str:
        """Return the line that is read, in full."""
        read = self.shown.line_read()
        return ansi.plain(read[1].text) if read is not None else ""

    def _opened(self) -> None:
        self.search.end()
        self._show_filter()

    @on(VirtualLog.Changed)
    def _changed(self) -> None:
        self.search.take_steps()
        self._show_title()

    def _show_filter(self) -> None:
        self.query_one(Chips).show(self.shown.filter, ascii_only=self.view.glyphs.ascii)

    def _show_title(self) -> None:
        view = self.view
        view.heading = self.shown.heading()
        room = self.size.width - min(HEADING, width_of(view.heading)) - 7
        parts = self.shown.title_parts()
        parts = [*self.save.title_parts(), *self.search.title_parts(room, parts), *parts]
        view.note = fit_parts([part for part in parts if part[1]], room, view.glyphs.more)
        view.redraw()

    # --- the tick

    def tick(self, job_view: JobView, age_s: float, changed: bool) -> None:
        """Let the view load lines as soon as a host is connected."""
        view = self.view
        view.held = not (job_view.state or job_view.problem)
        view.waiting_text = REACHING if view.held else WAITING
        super().tick(job_view, age_s, changed)
        view.tick()

    def tick_paused(self, job_view: JobView, age_s: float, changed: bool) -> None:
        """Load the lines to which the reader scrolls, although the display is frozen."""
        self.tick(job_view, age_s, changed)

    # --- keys

    def on_click(self, event: events.Click) -> None:
        """Point to a line."""
        if event.widget is self.view:
            self.view.point_to(event.y)

    def action_back(self) -> None:
        """Stop saving, end a search, switch the filter off; then go back."""
        if self.save.cancel() or self.search.end():
            self._show_title()
        elif self.shown.filter:
            self.action_filter()
        else:
            super().action_back()

    def action_detail(self) -> None:
        """Show the whole record of the line that is read."""
        read, feed = self.shown.line_read(), self.view.feed
        if read is None or feed is None:
            return
        index, line = read
        fold = feed.fold(index)
        if fold is not None:
            lines = (f"{each.node} r{each.rank}  {ansi.plain(each.text)}" for each in fold.rows)
            title = f"{count(len(fold.records), 'rank')} alike  {values.clock_ns(line.t_ns)}"
            self.shell.app.push_screen(TextDialog(title, "\n".join(lines)))
        else:
            self.shell.app.push_screen(RecordDialog(self.shell.source, line, feed.clocks))

    def action_filter(self) -> None:
        """Switch the filter off, or on again."""
        self.filter.action_filter()

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
