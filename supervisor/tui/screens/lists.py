"""The screens that are one list: nodes, ranks.

In: job views. Out: a selection.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar

from textual import on

from supervisor.tui.history import Past
from supervisor.tui.rows.series import (
    GPU_KINDS,
    NODE_KINDS,
    asked,
    chosen_nodes,
    gpu_wall,
    node_charts,
    node_title,
    rank_charts,
    rank_title,
)
from supervisor.tui.rows.tables import node_lines
from supervisor.tui.rows.usage import node_usage_lines, rank_lines
from supervisor.tui.screens.base import LiveScreen
from supervisor.tui.shell import Target
from supervisor.tui.widgets.chart_view import ChartView
from supervisor.tui.widgets.picker import Picker
from supervisor.tui.widgets.tables import DetailPane, NodeTable, RankTable
from supervisor.wording import usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from textual.widget import Widget

    from supervisor.tui.model import JobView
    from supervisor.tui.rows.spans import Row
    from supervisor.tui.widgets.tables import LaidOut


class _ListScreen(LiveScreen):
    """A list, and all about its selected row, with the history of it."""

    HAS_TABLES = True
    TABLE: ClassVar[type[NodeTable | RankTable]]

    def body(self) -> Iterable[Widget]:
        """Yield a table, a page, and charts."""
        yield self.TABLE(self.NAME)
        yield DetailPane("detail")
        yield ChartView("chart")

    def on_mount(self) -> None:
        """Prepare for the history."""
        self._past = Past(self.shell)

    @on(Picker.Moved)
    def _moved(self) -> None:
        self._show_detail(self.shell.job_view)

    def _show_detail(self, job_view: JobView) -> None:
        """Show the page and the charts of the selected row."""
        raise NotImplementedError

    def _show_page(self, title: str, lines: Sequence[Row], *, with_history: bool) -> None:
        """Show the page below the table; with a history in it, the key that changes its span."""
        detail, series = self.query_one(DetailPane), self._past.series
        is_known = with_history and series is not None and (series.ranks or series.nodes)
        detail.note = ((self.span_hint, "dim"),) if is_known else ()
        detail.show_below(self.query_one(self.TABLE), title, lines, self.size.height)


class NodesScreen(_ListScreen):
    """Every node, those that need a look first, with the reason of their state in full."""

    NAME = "nodes"
    TABLE = NodeTable

    def tick(self, job_view: JobView, age_s: float, changed: bool) -> None:
        """Keep the history of the selected node new."""
        super().tick(job_view, age_s, changed)
        node, chart = job_view.nodes_by_name.get(self.selection().node or ""), self.query_one(ChartView)
        if node is None:
            return
        recent = self.shell.preferences.recent
        if usage.gpus_of(node.vitals) and not chart.is_maximized:
            # Four strips share the width, each beside its bar and its value.
            self._past.ask(job_view, GPU_KINDS, None, self.size.width // 8, recent=recent, nodes=[node.name])
        else:
            nodes = chosen_nodes(job_view, node.name)
            self._past.ask(job_view, NODE_KINDS, None, chart.points, recent=recent, nodes=nodes)

    def show(self, job_view: JobView) -> None:
        """Show a newer state."""
        table = self.query_one(NodeTable)
        memory = self.shell.preferences
        table.show_nodes(
            job_view,
            worst_first=True,
            with_ranks=self.size.width >= 100,
            marked=set(memory.nodes),
            problems_only=memory.problems_only,
        )
        self._show_detail(job_view)

    def _show_detail(self, job_view: JobView) -> None:
        node = job_view.nodes_by_name.get(self.selection().node or "")
        table, width = self.query_one(NodeTable), self.size.width - 1
        lines, name, wall = [], "", []
        if node is not None:
            name, series = node.name, self._past.series
            lines = node_lines(node, job_view, width) + node_usage_lines(node, width)
            room = room_below(table, len(lines), self.size.height)
            wall = gpu_wall(node, series, width, room, self.shell.glyphs)
            lines += wall
            make = functools.partial(node_charts, node=name)
            self.query_one(ChartView).show(node_title(job_view, name), series, name, make)
        self.place_chart(room_below(table, len(lines), self.size.height) if node is not None else 0)
        self._show_page(f"node {name}" if name else "", lines, with_history=bool(wall))

    def selection(self) -> Target:
        """Return the selected node."""
        selected = self.query_one(NodeTable).selected
        return Target(selected if isinstance(selected, str) else None)

    @on(Picker.Opened)
    def open_selection(self, event: Picker.Opened) -> None:
        """Go to the node's ranks."""
        self.shell.open_ranks_of(str(event.key))


def room_below(table: LaidOut, lines: int, screen_height: int) -> int:
    """Return the lines that are left below a table, which keeps half of the screen if it needs it, and a page."""
    room = screen_height - 4
    return room - min(table.line_count() + 2, room // 2) - lines - 1


class RanksScreen(_ListScreen):
    """Every rank, and all about the selected one, beside the others."""

    NAME = "ranks"
    TABLE = RankTable

    def tick(self, job_view: JobView, age_s: float, changed: bool) -> None:
        """Keep the history of the selected rank, and of those beside it, new."""
        super().tick(job_view, age_s, changed)
        rank = self.selection().rank
        if rank is not None:
            points, recent = self.query_one(ChartView).points, self.shell.preferences.recent
            self._past.ask(job_view, *asked(job_view, rank), points, recent=recent)

    def show(self, job_view: JobView) -> None:
        """Show a newer state."""
        memory = self.shell.preferences
        self.query_one(RankTable).show_ranks(job_view, set(memory.ranks), memory.problems_only)
        self._show_detail(job_view)

    def _show_detail(self, job_view: JobView) -> None:
        rank = job_view.rank(self.selection().rank or 0)
        table = self.query_one(RankTable)
        width, glyphs, series = self.size.width - 1, self.shell.glyphs, self._past.series
        if rank is not None:
            make = functools.partial(rank_charts, ranks=job_view.ranks, rank=rank.rank)
            self.query_one(ChartView).show(rank_title(job_view, rank.rank), series, rank.rank, make)
            lines = rank_lines(rank, None, width, glyphs)
            has_chart = self.place_chart(room_below(table, len(lines), self.size.height))
            if not has_chart:
                lines = rank_lines(rank, series, width, glyphs)
            self._show_page(f"rank {rank.rank}", lines, with_history=not has_chart)
        else:
            self.place_chart(0)
            self._show_page("", [], with_history=False)

    def open(self, rank: int) -> None:
        """Select a rank."""
        self.show(self.shell.job_view)
        self.query_one(RankTable).select(rank)

    def selection(self) -> Target:
        """Return the selected rank."""
        selected = self.query_one(RankTable).selected
        row = self.shell.job_view.rank(selected) if isinstance(selected, int) else None
        return Target(row.node, row.rank) if row is not None else Target()

    @on(Picker.Opened)
    def open_selection(self, event: Picker.Opened) -> None:
        """Open the rank's log."""
        self.shell.open_log(self.selection())
