"""The tables of nodes and ranks.

In: job views. Out: rows; the selected node or rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from textual.binding import Binding

from supervisor.tui.looks import Glyphs
from supervisor.tui.rows.tables import (
    Column,
    SortOrder,
    Table,
    legend,
    matching,
    name_width,
    node_columns,
    rank_columns,
)
from supervisor.tui.rows.usage import node_vitals, rank_vitals
from supervisor.tui.widgets.lines import LineView
from supervisor.tui.widgets.picker import Picker

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Sequence

    from textual import events

    from supervisor.tui.model import JobView
    from supervisor.tui.rows.spans import Row

T = TypeVar("T")

# Wider groups of ranks on one node are cut with a mark; the table of ranks has them all.
RANKS_WIDTH = 16


class LaidOut(Picker):
    """A table whose columns depend on its width."""

    def __init__(self, title: str, nothing: str, id: str) -> None:  # noqa: A002
        super().__init__(title=title, head=True, id=id)
        self.nothing = nothing
        """What an empty table says."""
        self.needle = ""
        """The text that the shown rows have in a cell."""
        self.order = SortOrder()
        self.table: Table[Any] = Table((), 0, Glyphs())
        """The present layout of the columns."""

    def show_items(
        self,
        items: Sequence[T],
        columns: Sequence[Column[T]],
        key: Callable[[T], Hashable],
        *,
        heading: str,
        unsorted: str = "",
        note: Row = (),
        faded: bool = False,
        marked: Collection[Hashable] = (),
        problems_only: bool = False,
    ) -> None:
        """Show one row per item that passes the filter; `unsorted`: more of the heading while nothing is sorted."""

        def make() -> None:
            selected = matching(items, columns, self.needle) if self.needle else items
            rows = self.order.sorted(selected, columns)
            self.table = Table(columns, self.line_width, self.glyphs)
            self.head = self.table.head(self.order)
            self.heading = heading if self.order.column else heading + unsorted
            self.note = note
            self._show_filter(problems_only)
            self.show(
                [key(item) for item in rows],
                lambda index: self.table.row(rows[index], faded=faded, marked=key(rows[index]) in marked),
            )

        self.show_made(make)

    def _show_filter(self, problems_only: bool) -> None:
        """Show in the title, or instead of rows, that other rows are hidden."""
        if problems_only:
            self.heading += ": problems only"
        if self.needle:
            self.heading += f" /{self.needle}"
        nothing = " no problem; ! shows all" if problems_only else f" {self.nothing}"
        self.placeholder = (
            (f" no row contains {self.needle}; / changes the filter" if self.needle else nothing, "dim"),
        )

    def filter_by(self, needle: str) -> None:
        """Show only the rows of which a cell has this text; all with ""."""
        self.needle = needle
        self._make()

    def sort_next(self) -> None:
        """Sort by the next column; after the last one in the table's own order."""
        self.order = self.order.next([column.name for column in self.table.columns if column.name])
        self._make()

    def sort_back(self) -> None:
        """Sort the other way round."""
        self.order = SortOrder(self.order.column, not self.order.falling)
        self._make()

    def on_click(self, event: events.Click) -> None:
        """Sort by the column whose name is clicked on."""
        if event.y != self.size.height - self.body_height - 1:
            super().on_click(event)
        elif name := self.table.column_at(event.x):
            self.order = self.order.of(name)
            self._make()


class NodeTable(LaidOut):
    """One row per node."""

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__("nodes", "no host in this job yet", id)

    def show_nodes(
        self,
        job_view: JobView,
        *,
        worst_first: bool = False,
        with_ranks: bool = True,
        marked: Collection[str] = (),
        problems_only: bool = False,
    ) -> None:
        """Show a newer state."""
        nodes = job_view.worst_first() if worst_first else job_view.nodes
        nodes = tuple(node for node in nodes if node.has_problem) if problems_only else nodes
        widest = max((len(node.ranks) for node in nodes), default=0)
        glyphs = min(RANKS_WIDTH, max(5, widest)) if with_ranks and widest else 0
        vitals = node_vitals(nodes, self.glyphs)
        columns = node_columns(self.glyphs, job_view.stale, glyphs, name_width(nodes), vitals)
        self.show_items(
            nodes,
            _without_empty(columns, nodes) if vitals else columns,
            lambda node: node.name,
            heading="nodes",
            unsorted=f" ({len(nodes)}), worst first" if worst_first else "",
            note=legend(self.glyphs, job_view.ranks) if with_ranks and not job_view.stale else (),
            faded=job_view.stale,
            marked=marked,
            problems_only=problems_only,
        )


class RankTable(LaidOut):
    """One row per rank."""

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__("ranks", "no ranks yet", id)

    def show_ranks(self, job_view: JobView, marked: Collection[int] = (), problems_only: bool = False) -> None:
        """Show a newer state."""
        ranks = [rank for rank in job_view.ranks if not problems_only or rank.has_problem]
        vitals = rank_vitals(ranks)
        columns = rank_columns(self.glyphs, job_view.stale, name_width(job_view.nodes), vitals)
        self.show_items(
            ranks,
            _without_empty(columns, ranks) if vitals else columns,
            lambda rank: rank.rank,
            heading="ranks",
            faded=job_view.stale,
            marked=marked,
            problems_only=problems_only,
        )


def _without_empty(columns: Sequence[Column[T]], items: Sequence[T]) -> list[Column[T]]:
    """Return the columns without an empty one for remarks: the others need its room."""
    return [column for column in columns if column.width or any(column.cell(item)[0][0] for item in items)]


class DetailPane(LineView):
    """Rows to read under a title; they scroll when it has the focus."""

    BINDINGS = [
        Binding("up,k", "scroll(-1)", show=False),
        Binding("down,j", "scroll(1)", show=False),
        Binding("pageup,u", "scroll_page(-1)", show=False),
        Binding("pagedown,d", "scroll_page(1)", show=False),
        Binding("home,g", "scroll(-100_000)", show=False),
        Binding("end,G", "scroll(100_000)", show=False),
    ]

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__(title="-", id=id)

    def show_rows(self, title: str, rows: Sequence[Row]) -> None:
        """Show other rows; with another title from the first one."""
        self.top = self.top if title == self.heading else 0
        self.heading, self._rows = title, rows
        self.redraw()

    def show_below(self, table: LaidOut, title: str, rows: Sequence[Row], screen_height: int) -> None:
        """Show rows below a table, which keeps half of the screen if it needs it; without a title nothing is shown."""
        self.display = bool(title)
        room = screen_height - 4
        self.styles.height = min(len(rows) + 1, max(room // 2, room - table.line_count() - 2))
        self.show_rows(title, rows)

    @property
    def has_more(self) -> bool:
        """Whether there are rows that do not fit."""
        return self.line_count() > self.body_height

    def action_scroll(self, lines: int) -> None:
        """Scroll by lines."""
        self.scroll_lines(lines)

    def action_scroll_page(self, pages: int) -> None:
        """Scroll by pages."""
        self.scroll_lines(pages * max(1, self.body_height - 1))
