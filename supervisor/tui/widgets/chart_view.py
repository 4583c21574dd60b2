"""Charts over one time axis, with a cursor and a zoom.

In: charts and the series that they are of; keys, wheel, clicks. Out: rows; the part of the history that is wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.binding import Binding

from supervisor.tui.history import WHOLE, Zoom
from supervisor.tui.rows import charts
from supervisor.tui.widgets.lines import LineView
from supervisor.wording import values

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from textual import events

    from supervisor.history import Series
    from supervisor.tui.rows.charts import Chart

# After a step of the zoom, this share of the history is shown.
STEP: Final = 0.5
LEAST_S: Final = 16.0
# A chart needs lines for a title, one chart and the time.
CHART_MIN: Final = 2 + charts.HEADING + charts.LEAST_CURVE


class ChartView(LineView):
    """One pane with charts of the same time."""

    # A drag reads values; it selects no text.
    ALLOW_SELECT = False
    BINDINGS = [
        Binding("left", "cursor(-1)", show=False),
        Binding("right", "cursor(1)", show=False),
    ]

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__(title="history", id=id)
        self.hint = ""
        """Its keys, for the title."""
        self.zoom = WHOLE
        self._cursor_s: float | None = None
        """The time of the cursor, in seconds since the epoch; None: at the newest value, not shown."""
        self._whole = (0.0, 0.0)
        self._series: Series | None = None
        self._charted: Hashable = None
        self._charts: Sequence[Chart] = ()

    @property
    def points(self) -> int:
        """The buckets that it has room for when it is shown: a braille character shows two."""
        return 2 * max(1, self.screen.size.width - 1 - charts.GUTTER)

    @property
    def _columns(self) -> int:
        return max(0, self.line_width - charts.GUTTER)

    @property
    def is_known(self) -> bool:
        """Whether there is anything to draw."""
        return bool(self._charts)

    def show(
        self,
        title: str,
        series: Series | None,
        whole: tuple[float, float],
        of: Hashable,
        make: Callable[[Series], Sequence[Chart]],
    ) -> None:
        """Show a newer series; charts are made anew when it is newer, or `of` something else.

        whole: when the job began and when it ended, or now.
        """
        self.heading, self._whole = title, whole
        if series is not self._series or of != self._charted:
            self._series, self._charted = series, of
            self._charts = make(series) if series is not None else ()
        self._draw()

    def _draw(self) -> None:
        series, width, height = self._series, self.line_width, self.body_height
        if series is None or not self._charts:
            self._rows = [((" no history yet", "dim"),)]
        else:
            at = self._bucket
            rows = charts.stacked(self._charts, width, height - 1, self.glyphs, at)
            column = charts.column_of(at, series.buckets, self._columns)
            cursor = None if at is None or column is None else (self._time_of(at), column)
            end_s = series.begin_s + series.buckets * series.width_s
            self._rows = [*rows, charts.axis(series.begin_s, end_s, width, cursor)]
        length_s = self.zoom.length_s
        self.note = ((self.hint, "dim") if length_s is None else (f"zoom: {values.duration(length_s)}", "accent"),)
        self.redraw()

    def on_resize(self) -> None:
        """Draw for the new size."""
        self._draw()

    # --- the cursor

    @property
    def _bucket(self) -> int | None:
        """The bucket under the cursor."""
        series = self._series
        if series is None or self._cursor_s is None:
            return None
        at = int((self._cursor_s - series.begin_s) // series.width_s)
        return at if 0 <= at < series.buckets else None

    def _time_of(self, bucket: int) -> float:
        return 0.0 if self._series is None else self._series.begin_s + bucket * self._series.width_s

    def action_cursor(self, columns: int) -> None:
        """Move the cursor; beyond the part that is shown, that moves too."""
        series = self._series
        if series is None or not self._charts:
            return
        step = columns * max(1, round(series.buckets / max(1, self._columns)))
        at = series.buckets if self._bucket is None else self._bucket
        self._point_at(at + step)
        if at + step < 0:
            self._show_around(self._time_of(0), 1.0, 0.5)
        elif at + step >= series.buckets and self.zoom.end_s is not None:
            self._show_around(self._time_of(series.buckets), 1.0, 0.5)

    def _point_at(self, bucket: int) -> None:
        """Move the cursor to a bucket; after the last one it disappears."""
        series = self._series
        if series is None or not series.buckets:
            return
        beyond = bucket >= series.buckets and self.zoom.end_s is None
        self._cursor_s = None if beyond else self._time_of(max(0, min(bucket, series.buckets - 1)))
        self._draw()

    def _bucket_below(self, event: events.MouseEvent) -> int:
        buckets = self._series.buckets if self._series is not None else 0
        return charts.bucket_at(max(0, int(event.x) - charts.GUTTER), buckets, self._columns)

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """Move the cursor to the mouse."""
        self._point_at(self._bucket_below(event))

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Drag the cursor."""
        if event.button:
            self._point_at(self._bucket_below(event))

    # --- the zoom

    def zoom_by(self, factor: float) -> None:
        """Show this many times the present part of the history, around the cursor or up to the same end."""
        series, at = self._series, self._bucket
        if series is not None:
            self._show_around(self._time_of(series.buckets if at is None else at), factor)

    def _show_around(self, time_s: float, factor: float, share: float | None = None) -> None:
        """Show another part, of `factor` times the length; `time_s` is at this share of it, or where it was."""
        series = self._series
        if series is None:
            return
        begin_s, end_s = self._whole
        shown_s = self.zoom.length_s or end_s - begin_s
        length_s = max(LEAST_S, shown_s * factor)
        if share is None:
            until_s = self.zoom.end_s or end_s
            share = min(1.0, max(0.0, 1 - (until_s - time_s) / shown_s))
        until_s = max(begin_s + length_s, time_s + (1 - share) * length_s)
        if length_s >= end_s - begin_s:
            self.zoom = WHOLE
        else:
            self.zoom = Zoom(length_s, None if until_s >= end_s - series.width_s else until_s)
        self._draw()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Zoom in at the mouse."""
        event.stop()
        self._show_around(self._time_of(self._bucket_below(event)), STEP)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Zoom out."""
        event.stop()
        self._show_around(self._time_of(self._bucket_below(event)), 1 / STEP)
