"""The training at a glance: progress, curves, strips.

In: snapshots, the journal, the history's series. Out: rows; they are rebuilt only when one of these is newer.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from textual.message import Message

from supervisor.tui import times, training
from supervisor.tui.widgets.lines import LineView
from supervisor.wording.goodput import goodput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from textual import events

    from remote_agent.wire.documents import JournalEvent
    from supervisor.history import Series
    from supervisor.tui.model import Snapshot
    from supervisor.tui.rows.spans import Row


class Dashboard(LineView, can_focus=False):
    """One pane; without a title it is one line."""

    class TimeClicked(Message):
        """A time of the curves was clicked on."""

        def __init__(self, time_s: float) -> None:
            super().__init__()
            self.time_s = time_s

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self.strip = "step_s"
        self._rows: Sequence[Row] = ()
        self._training: training.Training | None = None
        self._printing: training.Newest | None = None
        """The newest state in which ranks printed their throughput: a new group prints none while it imports."""
        self._made: tuple[object, ...] = ()
        self._charts: list[Row] = []
        self._again: Callable[[], None] = self.redraw

    def show(
        self,
        snapshot: Snapshot,
        newest: training.Newest,
        events: Sequence[JournalEvent],
        series: Series | None,
    ) -> None:
        """Show a newer state; the line of progress each time, curves and strips when there is something new."""
        self._again = functools.partial(self.show, snapshot, newest, events, series)
        width, height = self.line_width, self.body_height
        self._printing = newest if newest.printing else self._printing
        known = training.strips_known(series)
        strip = self.strip if self.strip in known else next(iter(known), "step_s")
        made = (id(series), len(events), width, height, strip)
        if made != self._made or self._training is None:
            self._made, self._training = made, training.gather(events, series)
            args = (self._training, strip, width, height - 1, self.glyphs)
            self._charts = training.dashboard(snapshot, self._printing or newest, *args)
        cost = goodput(events, times.now(), self._training.again_s)
        line = training.progress_row(newest, cost, width, self.glyphs, ended=snapshot.ended)
        self._rows = [line, *self._charts]
        self.redraw()

    def on_resize(self) -> None:
        """Rebuild the whole layout."""
        self._again()

    def on_click(self, event: events.Click) -> None:
        """Go to the time of a cell below the line of progress."""
        if self._training is not None and event.y > bool(self.heading):
            time_s = training.time_at(self._training, event.x, self.line_width)
            if time_s is not None:
                self.post_message(self.TimeClicked(time_s))

    def next_strip(self, series: Series | None) -> bool:
        """Show another kind of strips; returns whether there is one."""
        known = training.strips_known(series)
        before = self.strip
        if known:
            self.strip = known[(known.index(before) + 1) % len(known)] if before in known else known[0]
        return self.strip != before

    def line_count(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    def line_at(self, index: int) -> tuple[Row, str]:
        """One row."""
        return self._rows[index], ""
