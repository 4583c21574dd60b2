"""The screens that are one list: nodes, ranks.

In: snapshots. Out: a selection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import on

from supervisor.tui.history import Past
from supervisor.tui.rows.tables import node_lines
from supervisor.tui.rows.usage import PAST_KINDS, node_usage_lines, rank_lines
from supervisor.tui.screens.base import LiveScreen
from supervisor.tui.shell import Target
from supervisor.tui.widgets.picker import Picker
from supervisor.tui.widgets.tables import DetailPane, NodeTable, RankTable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.widget import Widget

    from supervisor.tui.model import Snapshot


class NodesScreen(LiveScreen):
    """Every node, those that need a look first, with the reason of their state in full."""

    NAME = "nodes"
    HAS_TABLES = True

    def body(self) -> Iterable[Widget]:
        """A table, and all about the selected node."""
        yield NodeTable("nodes")
        yield DetailPane("detail")

    def show(self, snapshot: Snapshot) -> None:
        """Show a newer state."""
        table = self.query_one(NodeTable)
        memory = self.shell.preferences
        table.show_nodes(
            snapshot,
            worst_first=True,
            with_ranks=self.size.width >= 100,
            marked=set(memory.nodes),
            problems_only=memory.problems_only,
        )
        self._show_detail(snapshot)

    @on(Picker.Moved)
    def _moved(self) -> None:
        self._show_detail(self.shell.snapshot)

    def _show_detail(self, snapshot: Snapshot) -> None:
        node = snapshot.nodes_by_name.get(self.selection().node or "")
        width = self.size.width - 1
        lines = node_lines(node, snapshot, width) + node_usage_lines(node, width) if node is not None else []
        title = f"node {node.name}" if node is not None else ""
        self.query_one(DetailPane).show_below(self.query_one(NodeTable), title, lines, self.size.height)

    def selection(self) -> Target:
        """The selected node."""
        selected = self.query_one(NodeTable).selected
        return Target(selected if isinstance(selected, str) else None)

    @on(Picker.Opened)
    def open_selection(self, event: Picker.Opened) -> None:
        """Go to the node's ranks."""
        self.shell.open_ranks_of(str(event.key))


class RanksScreen(LiveScreen):
    """Every rank, and all about the selected one."""

    NAME = "ranks"
    HAS_TABLES = True

    def body(self) -> Iterable[Widget]:
        """A table, and a page."""
        yield RankTable("ranks")
        yield DetailPane("detail")

    def on_mount(self) -> None:
        """Prepare for the history of the selected rank."""
        self._past = Past(self.shell)

    def tick(self, snapshot: Snapshot, age_s: float, changed: bool) -> None:
        """Keep the history of the selected rank new."""
        super().tick(snapshot, age_s, changed)
        rank = self.selection().rank
        if rank is not None:
            self._past.ask(snapshot, PAST_KINDS, [rank], 2 * self.size.width)

    def show(self, snapshot: Snapshot) -> None:
        """Show a newer state."""
        memory = self.shell.preferences
        self.query_one(RankTable).show_ranks(snapshot, set(memory.ranks), memory.problems_only)
        self._show_detail(snapshot)

    @on(Picker.Moved)
    def _moved(self) -> None:
        self._show_detail(self.shell.snapshot)

    def _show_detail(self, snapshot: Snapshot) -> None:
        rank = snapshot.rank(self.selection().rank or 0)
        table, detail = self.query_one(RankTable), self.query_one(DetailPane)
        width, glyphs = self.size.width - 1, self.shell.glyphs
        room = detail.body_height if detail.is_maximized else self.size.height - 4 - table.line_count() - 2
        lines = rank_lines(rank, self._past.series, width, room, glyphs) if rank is not None else []
        title = f"rank {rank.rank}" if rank is not None else ""
        detail.show_below(table, title, lines, self.size.height)

    def selection(self) -> Target:
        """The selected rank."""
        selected = self.query_one(RankTable).selected
        row = self.shell.snapshot.rank(selected) if isinstance(selected, int) else None
        return Target(row.node, row.rank) if row is not None else Target()

    @on(Picker.Opened)
    def open_selection(self, event: Picker.Opened) -> None:
        """Open the rank's log."""
        self.shell.open_log(self.selection())
