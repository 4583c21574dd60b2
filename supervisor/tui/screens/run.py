"""The run so far: its generations with why each began and ended, the phases of each restart, the journal.

In: snapshots, events. Out: a selection; ways to the logs and to what an event speaks of.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from textual import on

from supervisor.tui import words
from supervisor.tui.journal import event_row
from supervisor.tui.rows import Table
from supervisor.tui.run_rows import LEGEND, run_columns, run_lines
from supervisor.tui.runs import Runs
from supervisor.tui.screens.base import LiveScreen, Target
from supervisor.tui.widgets.picker import Picker
from supervisor.tui.widgets.tables import Page

if TYPE_CHECKING:
    from textual.widget import Widget

    from supervisor.tui.model import Snapshot

# Lines of the journal that stay whatever stands above.
EVENTS_MIN = 4


class RunScreen(LiveScreen):
    """Generations above, all about the selected one, the journal below."""

    NAME = "run"
    AUTO_FOCUS = "#events"

    def body(self) -> Iterable[Widget]:
        """Three panes."""
        yield Picker(title="generations", head=True, id="generations")
        yield Page("generation")
        yield Picker(title="events", id="events")

    def on_mount(self) -> None:
        """Say so when there is nothing."""
        self._runs = Runs()
        self._table_lines = 0
        self.query_one("#events", Picker).placeholder = ((" nothing has happened yet", "dim"),)
        self._generations.placeholder = ((" no group has been formed yet", "dim"),)

    @property
    def _generations(self) -> Picker:
        return self.query_one("#generations", Picker)

    def show(self, snapshot: Snapshot) -> None:
        """Show the newest state; a reader who has left the end of the journal stays where he is."""
        events = self.tui.source.events
        if len(events) < self._runs.taken:
            # It is another journal: a recording was turned back.
            self._runs = Runs()
        self._runs.follow(events)
        self._show_generations(snapshot)
        self._show_detail(snapshot)
        picker = self.query_one("#events", Picker)
        at_end = picker.at_end
        glyphs, width = self.tui.glyphs, self.size.width
        picker.show(range(len(events)), lambda index: event_row(events[index], glyphs, width, wide=True))
        picker.note = ((f"{len(events):,} in all", "dim"),)
        if at_end and events:
            picker.select(len(events) - 1)

    def _show_generations(self, snapshot: Snapshot) -> None:
        picker = self._generations
        newest_first = self._runs.runs[::-1]
        by_number = {run.number: run for run in newest_first}
        columns = run_columns(newest_first, snapshot, self.size.width)
        table = Table(columns, self.size.width - 1, self.tui.glyphs)
        picker.head = table.head()
        picker.heading = words.count(len(newest_first), "generation") if newest_first else "generations"
        picker.note = ((LEGEND, "dim"),) if self.size.width >= 80 else ()
        keys = [run.number for run in newest_first]
        # Who has not chosen one sees the newest.
        follows = picker.cursor <= 0 and not picker.has_focus
        self._table_lines = min(len(keys) + 2, max(4, (self.size.height - 4) // 3))
        picker.styles.height = self._table_lines
        picker.show(keys, lambda index: table.row(by_number[keys[index]]))
        if follows and keys:
            picker.select(keys[0])

    def _show_detail(self, snapshot: Snapshot) -> None:
        page = self.query_one(Page)
        run = next((run for run in self._runs.runs if run.number == self._generations.selected), None)
        page.display = run is not None
        if run is None:
            return
        source = self.tui.source
        lines = run_lines(run, snapshot, source.status, self._runs.differing(), self.size.width - 1, self.tui.glyphs)
        room = self.size.height - 4 - self._table_lines
        page.styles.height = max(2, min(len(lines) + 1, room - EVENTS_MIN))
        page.show_rows(f"generation {run.number}", lines)

    @on(Picker.Moved)
    def _moved(self, event: Picker.Moved) -> None:
        if event.view.id == "generations":
            self._show_detail(self.tui.snapshot)

    def selection(self) -> Target:
        """The node and rank of the selected event."""
        if self.focused is self._generations:
            return Target()
        return self.tui.target_of_event(self.query_one("#events", Picker).selected)

    @on(Picker.Opened)
    def open_selection(self, event: Picker.Opened) -> None:
        """Open the log of a generation, or what an event speaks of."""
        if event.view.id == "generations":
            self.tui.open_log(Target(), event.key if isinstance(event.key, int) else None)
        else:
            self.tui.open_event(event.key)

    def action_logs(self) -> None:
        """Open the log of the selected generation, or of what the event speaks of."""
        chosen = self._generations.selected if self.focused is self._generations else None
        self.tui.open_log(self.selection(), chosen if isinstance(chosen, int) else None)
