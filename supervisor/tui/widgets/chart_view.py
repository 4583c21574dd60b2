"""Charts over one time axis.

In: charts and the series that they are of. Out: rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from supervisor.tui.rows import charts
from supervisor.tui.widgets.lines import LineView

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from supervisor.history import Series
    from supervisor.tui.rows.charts import Chart

# A chart needs lines for a title, one chart and the time.
CHART_MIN: Final = 2 + charts.HEADING + charts.LEAST_CURVE


class ChartView(LineView):
    """One pane with charts of the same time."""

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__(title="history", id=id)
        self._series: Series | None = None
        self._charted: Hashable = None
        self._charts: Sequence[Chart] = ()

    @property
    def points(self) -> int:
        """The buckets that it has room for when it is shown: a braille character shows two."""
        return 2 * max(1, self.screen.size.width - 1 - charts.GUTTER)

    @property
    def is_known(self) -> bool:
        """Whether there is anything to draw."""
        return bool(self._charts)

    def show(self, title: str, series: Series | None, of: Hashable, make: Callable[[Series], Sequence[Chart]]) -> None:
        """Show a newer series; charts are made anew when it is newer, or `of` something else."""
        self.heading = title
        if series is not self._series or of != self._charted:
            self._series, self._charted = series, of
            self._charts = make(series) if series is not None else ()
        self.show_made(self._draw)

    def _draw(self) -> None:
        series, width = self._series, self.line_width
        if series is None or not self._charts:
            self._rows = [((" no history yet", "dim"),)]
        else:
            end_s = series.begin_s + series.buckets * series.width_s
            rows = charts.stacked(self._charts, width, self.body_height - 1, self.glyphs)
            self._rows = [*rows, charts.axis(series.begin_s, end_s, width)]
        self.redraw()
