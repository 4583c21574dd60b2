"""The screens that are one list: nodes, ranks.

In: job views. Out: a selection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from textual import on

from supervisor.tui.history import Past
from supervisor.tui.rows.series import GPU_KINDS, NODE_KINDS, RANK_KINDS, gpu_wall, node_charts, rank_charts
from supervisor.tui.rows.tables import node_lines
from supervisor.tui.rows.usage import node_usage_lines, rank_lines
from supervisor.tui.screens.base import LiveScreen
from supervisor.tui.shell import Target
from supervisor.tui.training import chosen
from supervisor.tui.widgets.chart_view import ChartView
from supervisor.tui.widgets.picker import Picker
from supervisor.tui.widgets.tables import DetailPane, NodeTable, RankTable
from supervisor.wording import usage

if TYPE_CHECKING:
    from collections.abc import Iterable

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
        if usage.gpus_of(node.vitals) and not chart.is_maximized:
            # Four strips share the width, each beside its bar and its value.
            self._past.ask(job_view, GPU_KINDS, None, self.size.width // 8, node=node.name)
        else:
            self._past.ask(job_view, NODE_KINDS, None, chart.points, zoom=chart.zoom, node=node.name)

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
        lines, name = [], ""
        if node is not None:
            name, series = node.name, self._past.series
            lines = node_lines(node, job_view, width) + node_usage_lines(node, width)
            room = room_below(table, len(lines), self.size.height)
            lines += gpu_wall(node, series, width, room, self.shell.glyphs)
            whole = self._past.whole(job_view)
            title = f"history of node {name}"
            self.query_one(ChartView).show(title, series, whole, name, lambda known: node_charts(known, name))
        self.place_chart(room_below(table, len(lines), self.size.height) if node is not None else 0)
        self.query_one(DetailPane).show_below(table, f"node {name}" if name else "", lines, self.size.height)

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


BESIDE: Final = ("all", "marked", "none")


class RanksScreen(_ListScreen):
    """Every rank, and all about the selected one, beside the others."""

    NAME = "ranks"
    TABLE = RankTable
    _beside = BESIDE[0]
    """What the charts are compared with."""

    def tick(self, job_view: JobView, age_s: float, changed: bool) -> None:
        """Keep the history of the selected rank, and of those beside it, new."""
        super().tick(job_view, age_s, changed)
        rank = self.selection().rank
        if rank is not None:
            some, chart = chosen(job_view), self.query_one(ChartView)
            ids = None if some is None else sorted({rank, *some, *self.shell.preferences.ranks})
            self._past.ask(job_view, RANK_KINDS, ids, chart.points, zoom=chart.zoom)

    def action_compare(self) -> None:
        """Compare the selected rank with all ranks, with the marked ones, or with none."""
        at = BESIDE.index(self._beside) + 1
        self._beside = BESIDE[at % len(BESIDE)]
        if self._beside == "marked" and not self.shell.preferences.ranks:
            self._beside = "none"
        self.shell.look_again()

    def _compared(self, job_view: JobView, rank: int) -> tuple[tuple[int, ...], str]:
        """Return the ranks beside the selected one, and what they are."""
        if self._beside == "marked":
            marked = tuple(one for one in self.shell.preferences.ranks if one != rank)
            return marked, f"rank {marked[0]}" if len(marked) == 1 else f"{len(marked)} marked ranks" if marked else ""
        if self._beside == "none" or len(job_view.ranks) < 2:
            return (), ""
        some, total = chosen(job_view), len(job_view.ranks)
        if some is None:
            return tuple(one.rank for one in job_view.ranks), f"all {total} ranks"
        return tuple(some), f"{len(some)} of {total} ranks"

    def show(self, job_view: JobView) -> None:
        """Show a newer state."""
        memory = self.shell.preferences
        self.query_one(RankTable).show_ranks(job_view, set(memory.ranks), memory.problems_only)
        self._show_detail(job_view)

    def _show_detail(self, job_view: JobView) -> None:
        rank = job_view.rank(self.selection().rank or 0)
        table, detail = self.query_one(RankTable), self.query_one(DetailPane)
        width, glyphs, series = self.size.width - 1, self.shell.glyphs, self._past.series
        lines: list[Row] = []
        if rank is not None:
            number = rank.rank
            beside, name = self._compared(job_view, number)
            title = f"history of rank {number}" + (f" beside {name}" if name else "")
            whole = self._past.whole(job_view)
            of = (number, beside)
            self.query_one(ChartView).show(title, series, whole, of, lambda known: rank_charts(known, number, beside))
            lines = rank_lines(rank, None, width, glyphs)
            if not self.place_chart(room_below(table, len(lines), self.size.height)):
                lines = rank_lines(rank, series, width, glyphs)
        else:
            self.place_chart(0)
        detail.show_below(table, f"rank {rank.rank}" if rank is not None else "", lines, self.size.height)

    def selection(self) -> Target:
        """Return the selected rank."""
        selected = self.query_one(RankTable).selected
        row = self.shell.job_view.rank(selected) if isinstance(selected, int) else None
        return Target(row.node, row.rank) if row is not None else Target()

    @on(Picker.Opened)
    def open_selection(self, event: Picker.Opened) -> None:
        """Open the rank's log."""
        self.shell.open_log(self.selection())
