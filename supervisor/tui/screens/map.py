"""The overview: nodes and ranks with their states, what happened, what is being printed.

In: job views, the history's series, the newest rows of all logs. Out: a selection; a way into everything else.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Final

from textual import on
from textual.binding import Binding
from textual.containers import Horizontal
from textual.message import Message

from supervisor.logs.selection import ALL, Selection
from supervisor.tui import times, training
from supervisor.tui.history import Past
from supervisor.tui.logs.feed import BOTH, LogFeed
from supervisor.tui.rows import tables
from supervisor.tui.rows.series import asked, chosen, rank_charts, rank_title
from supervisor.tui.rows.tables import event_row
from supervisor.tui.screens.base import LiveScreen
from supervisor.tui.shell import LogTime, Target
from supervisor.tui.widgets.chart_view import ChartView
from supervisor.tui.widgets.lines import LineView
from supervisor.tui.widgets.picker import Picker
from supervisor.tui.widgets.rank_grid import METRICS, RankGrid, lines_needed, nodes_per_line
from supervisor.tui.widgets.tables import NodeTable, RankTable
from supervisor.tui.widgets.virtual_log import VirtualLog
from supervisor.wording.goodput import goodput

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from textual import events
    from textual.widget import Widget

    from remote_agent.wire.documents import JournalEvent
    from supervisor.history import Series
    from supervisor.tui.model import JobView
    from supervisor.tui.rows.spans import Row

# The tail is a glance: a few frames a second are enough, and every frame asks all nodes.
TAIL_EVERY_S: Final = 0.4
WIDE: Final = 120
# From this width on, events and log are side by side.
WIDER: Final = 150
# This has room for a title, a line of progress, four lines of curves and the time.
CHARTS_MIN: Final = 7
# Events need at least a title, column names and two rows; the log needs a title and three lines.
EVENTS_MIN: Final = 4
LOG_MIN: Final = 4
LOG_GOOD: Final = 7


class Dashboard(LineView, can_focus=False):
    """The training at a glance, as one pane: progress, curves, strips; without a title it is one line.

    Curves and strips are rebuilt only when the journal, the series or the size is another one.
    """

    class TimeClicked(Message):
        """A time of the curves was clicked on."""

        def __init__(self, time_s: float) -> None:
            super().__init__()
            self.time_s = time_s

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._training: training.Training | None = None
        self._printing: training.Newest | None = None
        """The newest state in which ranks printed their throughput: a new group prints none while it imports."""
        self._made: tuple[object, ...] = ()
        self._charts: list[Row] = []

    def show(
        self, job_view: JobView, newest: training.Newest, events: Sequence[JournalEvent], series: Series | None
    ) -> None:
        """Show a newer state; the line of progress each time, curves and strips when there is something new."""
        self.show_made(functools.partial(self._draw, job_view, newest, events, series))

    def _draw(
        self, job_view: JobView, newest: training.Newest, events: Sequence[JournalEvent], series: Series | None
    ) -> None:
        width, height = self.line_width, self.body_height
        self._printing = newest if newest.printing else self._printing
        made = (id(series), len(events), width, height)
        if made != self._made or self._training is None:
            self._made, self._training = made, training.gather(events, series)
            args = (self._training, width, height - 1, self.glyphs)
            self._charts = training.dashboard(job_view, self._printing or newest, *args)
        cost = goodput(events, times.now(), self._training.measured)
        line = training.progress_row(newest, cost, width, self.glyphs, ended=job_view.ended)
        self._rows = [line, *self._charts]
        self.redraw()

    def on_click(self, event: events.Click) -> None:
        """Go to the time of a cell below the line of progress."""
        if self._training is not None and event.y > bool(self.heading):
            time_s = training.time_at(self._training, event.x, self.line_width)
            if time_s is not None:
                self.post_message(self.TimeClicked(time_s))


class MapScreen(LiveScreen, bind=[Binding("enter", "open", show=False)]):
    """Nodes, ranks, events and the newest lines."""

    NAME = "map"
    HAS_TABLES = True
    AUTO_FOCUS = "#nodes"

    def body(self) -> Iterable[Widget]:
        """Yield the panes; which of them are shown depends on the size."""
        yield Dashboard("training")
        yield ChartView("chart")
        yield RankGrid("grid")
        with Horizontal(id="band"):
            yield NodeTable("nodes")
            yield RankTable("side")
        yield RankTable("ranks")
        with Horizontal(id="below"):
            yield Picker(title="events", id="events")
            yield VirtualLog(title="log", id="tail", every_s=TAIL_EVERY_S)

    def on_mount(self) -> None:
        """Prepare the panes."""
        tail = self.query_one(VirtualLog)
        tail.show_time = False
        if self.shell.preferences.metric in METRICS:
            self.query_one(RankGrid).metric = self.shell.preferences.metric
        self.query_one("#events", Picker).placeholder = ((" no event yet", "dim"),)
        self._layout: MapLayout | None = None
        self._past = Past(self.shell)
        self._charted = Past(self.shell)

    def show(self, job_view: JobView) -> None:
        """Lay out for the job's size, then fill the panes that are visible."""
        newest = training.newest(job_view)
        layout, memory = self._arrange(job_view, newest.is_known), self.shell.preferences
        nodes, ranks = set(memory.nodes), set(memory.ranks)
        if layout.training:
            self.query_one(Dashboard).show(job_view, newest, self.shell.source.events, self._past.series)
        if layout.nodes:
            self.query_one(NodeTable).show_nodes(
                job_view,
                worst_first=bool(layout.grid),
                with_ranks=not layout.grid,
                marked=nodes,
                problems_only=memory.problems_only,
            )
        if layout.ranks:
            table = self.query_one("#side" if layout.beside else "#ranks", RankTable)
            table.show_ranks(job_view, ranks, memory.problems_only)
        if layout.grid:
            self.query_one(RankGrid).show(job_view, layout.per_node, ranks, nodes)
        self._show_events()
        self._show_tail(job_view, layout)
        if self.place_chart(0):
            make = functools.partial(rank_charts, ranks=job_view.ranks, rank=None)
            self.query_one(ChartView).show(rank_title(job_view, None), self._charted.series, None, make)

    def _arrange(self, job_view: JobView, trains: bool) -> MapLayout:
        width, height = self.size.width, self.size.height - 4
        curves = self._past.series is not None and bool(self._past.series.ranks)
        # The last cell is the scroll bar's.
        per_node = nodes_per_line(width - 1, tables.name_width(job_view.nodes) + 1, True)
        layout = map_layout(
            width,
            height,
            len(job_view.nodes),
            len(job_view.ranks),
            lines_needed(job_view, width),
            -(-len(job_view.nodes) // per_node),
            # While a new group imports, the history is what is known.
            trains=trains or curves,
            curves=curves,
        )
        if layout != self._layout:
            self._layout = layout
            self._apply(layout)
        return layout

    def _apply(self, layout: MapLayout) -> None:
        heights = {
            "#training": layout.training,
            "#band": layout.nodes,
            "#grid": layout.grid,
            "#ranks": 0 if layout.beside else layout.ranks,
            "#events": layout.events,
            "#tail": layout.log,
        }
        for name, lines in heights.items():
            pane = self.query_one(name)
            pane.display = lines > 0
            pane.styles.height = lines
        below = self.query_one("#below")
        below.styles.layout = "horizontal" if layout.abreast else "vertical"
        below.styles.height = layout.events + (0 if layout.abreast else layout.log)
        self.query_one("#side").display = layout.beside
        self.query_one(Dashboard).heading = "training" if layout.training > 1 else ""
        if self.focused is None or not self.focused.is_on_screen or not self.focused.display:
            first = "#grid" if layout.grid else "#nodes"
            self.set_focus(self.query_one(first), scroll_visible=False)

    def _show_events(self) -> None:
        picker = self.query_one("#events", Picker)
        if not picker.display:
            return
        rows = self.shell.event_rows
        at_end = picker.at_end or not (picker.has_focus or picker.scrolled)
        picker.show(range(len(rows)), lambda index: event_row(rows[index], self.shell.glyphs, picker.size.width))
        picker.note = ((f"{len(rows)}", "dim"),) if rows else ()
        if at_end and rows:
            picker.select(len(rows) - 1)

    def _show_tail(self, job_view: JobView, layout: MapLayout) -> None:
        tail = self.query_one(VirtualLog)
        if not layout.log or job_view.generation is None or job_view.generation < 0:
            return
        if tail.feed is None:
            tail.open(LogFeed(self.shell.source, Selection("all", None, BOTH, None, ALL)))
        tail.source_width = tables.name_width(job_view.nodes) + 2 + len(str(max(1, len(job_view.ranks) - 1)))
        self._title_tail()

    @on(VirtualLog.Changed)
    def _title_tail(self) -> None:
        tail = self.query_one(VirtualLog)
        new = tail.new_lines_text
        tail.note = ((f" {new}  G follows ", "pill"),) if new else (("all ranks", "dim"),)
        if tail.absent_text:
            tail.note = (*tail.note, (f"  {tail.absent_text}", "warn"))
        tail.redraw()

    def tick(self, job_view: JobView, age_s: float, changed: bool) -> None:
        """Keep the tail moving in the background."""
        super().tick(job_view, age_s, changed)
        tail = self.query_one(VirtualLog)
        if tail.display and tail.feed is not None:
            tail.tick()
        self._ask_series(job_view)

    def _ask_series(self, job_view: JobView) -> None:
        """Ask the nodes for newer series, in the background, if charts or curves are shown."""
        chart = self.query_one(ChartView)
        if chart.is_maximized:
            self._charted.ask(job_view, *asked(job_view, None), chart.points, recent=self.shell.preferences.recent)
            return
        layout = self._layout
        has_past = job_view.generation is not None and job_view.generation > 0
        if layout is None or not (layout.training or has_past) or self.size.width < WIDE:
            return
        self._past.ask(job_view, training.KINDS, chosen(job_view), 2 * self.size.width * 3 // 5)

    def selection(self) -> Target:
        """Return what the focused pane has selected; else what the first one has."""
        focused = self.focused
        if isinstance(focused, RankGrid):
            node, rank = focused.selection
            return Target(node, rank)
        if isinstance(focused, RankTable) and isinstance(focused.selected, int):
            row = self.shell.job_view.rank(focused.selected)
            return Target(row.node if row else None, focused.selected)
        if focused is not None and focused.id == "events":
            return self.shell.target_of_event(self.query_one("#events", Picker).selected)
        if isinstance(focused, VirtualLog):
            return Target()
        selected = self.query_one(NodeTable).selected
        return Target(selected if isinstance(selected, str) else None)

    @on(Picker.Opened)
    def open_selection(self, event: Picker.Opened) -> None:
        """Open what was selected."""
        if event.view.id == "events":
            self.shell.open_event(event.key)
        elif isinstance(event.view, NodeTable):
            self.shell.open_ranks_of(str(event.key))
        else:
            self.shell.open_log(self.selection())

    @on(Dashboard.TimeClicked)
    def _go_to_time(self, event: Dashboard.TimeClicked) -> None:
        self.shell.open_log(LogTime(int(event.time_s * 1e9)))

    def action_open(self) -> None:
        """Open the selection."""
        self.shell.open_log(self.selection())

    def action_span(self) -> None:
        """Show the charts, or the other span of them: the curves of the training are always of the whole run."""
        if self.query_one(ChartView).is_maximized:
            super().action_span()
        else:
            self.action_chart()

    def action_metric(self) -> None:
        """Show another metric in the heat map."""
        grid = self.query_one(RankGrid)
        if not grid.display:
            self.shell.say("no heat map here: each rank has a row")
        elif not grid.next_metric():
            self.shell.say("no other heat map: the ranks have no other values yet")
        self.shell.preferences.metric = grid.metric
        self.shell.look_again()


@dataclasses.dataclass(frozen=True)
class MapLayout:
    """Heights of the panes in lines, titles included; 0 hides a pane."""

    training: int = 0
    """The dashboard; 1: a line of progress."""
    nodes: int = 0
    ranks: int = 0
    """The table of ranks: below the nodes, or beside them where `beside` is set."""
    beside: bool = False
    grid: int = 0
    """The heat map, if the tables cannot show everything."""
    per_node: bool = False
    """The heat map has one glyph per node."""
    events: int = 0
    log: int = 0
    abreast: bool = False
    """Events and log stand side by side, each as high as both."""


def map_layout(
    width: int,
    body: int,
    nodes: int,
    ranks: int,
    grid_lines: int,
    grid_lines_per_node: int,
    *,
    trains: bool = False,
    curves: bool = False,
) -> MapLayout:
    """Return the layout for a body of `body` lines, which adds up to exactly that.

    trains, curves: there is progress to show, and a history of it.
    """
    plain = _layout_without_training(width, body, nodes, ranks, grid_lines, grid_lines_per_node)
    rest, height = plain.events + plain.log, 0
    # Below a heat map, events and log are only a few lines high, so each gets the whole width.
    abreast = width >= WIDER and plain.log > 0 and not plain.grid
    if trains and plain.log:
        # Events and log give the charts their room; with only a part of it there would be no curve.
        charts = min(rest - LOG_GOOD - (0 if abreast else EVENTS_MIN), body // 2) if curves and width >= WIDE else 0
        height = charts if charts >= CHARTS_MIN else min(1, max(0, plain.log - LOG_MIN))
    rest -= height
    events, log = (rest, rest) if abreast else _share(rest)
    return dataclasses.replace(plain, training=height, events=events, log=log, abreast=abreast)


def _layout_without_training(
    width: int, body: int, nodes: int, ranks: int, grid_lines: int, grid_lines_per_node: int
) -> MapLayout:
    table = max(nodes, 1) + 2
    if table + EVENTS_MIN <= body and table <= max(8, body * 3 // 5):
        return _small_job(width, body, table, ranks)
    return _big_job(body, nodes, grid_lines, grid_lines_per_node)


def _small_job(width: int, body: int, table: int, ranks: int) -> MapLayout:
    band, below, beside = table, 0, False
    rank_table = ranks + 2
    if width >= WIDE and ranks:
        beside = True
        band = max(table, min(rank_table, body // 3))
    elif ranks and band + rank_table + EVENTS_MIN + LOG_MIN <= body:
        below = rank_table
    rest = body - band - below
    events, log = _share(rest)
    return MapLayout(nodes=band, ranks=band if beside else below, beside=beside, events=events, log=log)


def _big_job(body: int, nodes: int, grid_lines: int, grid_lines_per_node: int) -> MapLayout:
    room = body - EVENTS_MIN
    per_node = grid_lines + 1 > room
    grid = min((grid_lines_per_node if per_node else grid_lines) + 1, room)
    rest = body - grid
    table = min(nodes + 2, (rest - EVENTS_MIN - LOG_MIN) * 3 // 5)
    if table < 6:
        table = 0
    events, log = _share(rest - table)
    return MapLayout(nodes=table, grid=grid, per_node=per_node, events=events, log=log)


def _share(rest: int) -> tuple[int, int]:
    """Divide the rest between events and log: the log gets more, or nothing if it would be too small."""
    if rest < EVENTS_MIN + LOG_MIN:
        return rest, 0
    log = max(LOG_MIN, rest - EVENTS_MIN if rest < EVENTS_MIN + LOG_GOOD else rest * 3 // 5)
    return rest - log, log
