"""All ranks at once: a name and one glyph per rank for each node, or one glyph per node if there are too many.

In: a job view. Out: rows; the selected rank or node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.binding import Binding

from supervisor.tui.rows.spans import EMPTY, Row, Span, add_span, fit
from supervisor.tui.rows.tables import legend, name_width
from supervisor.tui.widgets.lines import LineView
from supervisor.tui.widgets.picker import Picker

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from textual import events

    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import JobView, NodeRow, RankRow

METRICS: Final = ("state", "output", "lag", "gpu", "mem", "cpu")
# A rank that wrote this long ago, or is this many steps behind the median, has the lowest bar.
OUTPUT_FLOOR_S: Final = 60.0
LAG_FLOOR: Final = 10
# Metrics that the node measures; they may be old.
OF_VITALS: Final = ("gpu", "mem", "cpu")
GAP: Final = 2


class RankGrid(LineView):
    """The heat map of ranks."""

    BINDINGS = [
        Binding("left", "step(-1)", show=False),
        Binding("right", "step(1)", show=False),
        Binding("up,k", "row(-1)", show=False),
        Binding("down,j", "row(1)", show=False),
        Binding("pageup", "row(-8)", show=False),
        Binding("pagedown", "row(8)", show=False),
        Binding("home,g", "edge(0)", show=False),
        Binding("end,G", "edge(-1)", show=False),
        Binding("enter", "open", show=False),
    ]

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__(title="ranks", id=id)
        self.metric = "state"
        self.per_node = False
        """One glyph per node."""
        self.selected = 0
        """Number of the selected rank; index of the selected node, with one glyph per node."""
        self._cells: tuple[NodeRow, ...] = ()
        self._marked_ranks: Collection[int] = ()
        self._marked_nodes: Collection[str] = ()
        self._stale = False
        self._name_width = 4
        self._cell = 1

    def show(self, job_view: JobView, per_node: bool, ranks: Collection[int] = (), nodes: Collection[str] = ()) -> None:
        """Show a newer state; `ranks`, `nodes`: what is marked."""
        self._marked_ranks, self._marked_nodes = ranks, nodes
        if per_node != self.per_node:
            self.selected = 0
        self.per_node = per_node
        self._cells = tuple(job_view.nodes) if per_node else tuple(_in_grid(job_view))
        self._stale = job_view.stale
        self._name_width = name_width(self._cells)
        self._cell = self._name_width + 1 + (0 if per_node else _widest(self._cells))
        unseen = "" if self.metric == "state" else f"; {self.metric} needs room"
        self.heading = f"nodes by their worst rank{unseen}" if per_node else f"ranks by {self.metric}"
        self.note = legend(self.glyphs, job_view.ranks) if not job_view.stale else EMPTY
        self.redraw()

    @property
    def per_line(self) -> int:
        """Nodes in one line."""
        return nodes_per_line(self.line_width, self._cell, self.per_node)

    @property
    def selection(self) -> tuple[str | None, int | None]:
        """Node and rank of the selection."""
        if self.per_node:
            inside = 0 <= self.selected < len(self._cells)
            return (self._cells[self.selected].name if inside else None), None
        node = next((node for node in self._cells for rank in node.ranks if rank.rank == self.selected), None)
        return (node.name, self.selected) if node is not None else (None, None)

    def line_count(self) -> int:
        """Return the number of lines of nodes."""
        return -(-len(self._cells) // self.per_line)

    def line_at(self, index: int) -> tuple[Row, str]:
        """Return one line of nodes."""
        per_line = self.per_line
        first = index * per_line
        nodes = self._cells[first : first + per_line]
        return (self._node_glyphs(nodes, first) if self.per_node else self._rank_glyphs(nodes)), ""

    def _rank_glyphs(self, nodes: tuple[NodeRow, ...]) -> Row:
        spans: list[Span] = [(" ", "")]
        here, glyphs = self.selected if self.has_focus else None, self.glyphs
        for node in nodes:
            role = "warn" if node.state in ("lost", "failed") else "mark" if node.name in self._marked_nodes else "dim"
            spans.append((fit(node.name, self._name_width, glyphs.more) + " ", role))
            for rank in node.ranks:
                glyph, look = self._glyph(rank, glyphs)
                add_span(spans, glyph, "pill" if rank.rank == here else look)
            if not node.ranks:
                add_span(spans, "-" if self._stale else glyphs.of(node.look), "off" if self._stale else node.look.role)
            used = self._name_width + 1 + max(1, len(node.ranks))
            spans.append((" " * (self._cell - used + GAP), ""))
        # The gap is between nodes: behind the last one it would not fit.
        return tuple(spans[:-1])

    def _node_glyphs(self, nodes: tuple[NodeRow, ...], first: int) -> Row:
        spans: list[Span] = [(" " + fit(nodes[0].name, self._name_width, self.glyphs.more) + " ", "dim")]
        for number, node in enumerate(nodes, first):
            look = node.worst.look if node.worst is not None and node.state == "running" else node.look
            here = number == self.selected and self.has_focus
            glyph = "-" if self._stale else self.glyphs.of(look)
            role = "mark" if node.name in self._marked_nodes else look.role
            add_span(spans, glyph, "pill" if here else "off" if self._stale else role)
        return tuple(spans)

    def _glyph(self, rank: RankRow, glyphs: Glyphs) -> tuple[str, str]:
        """Return glyph and role of a rank."""
        if self._stale:
            return "-", "off"
        known = share(rank, self.metric) if rank.state == "running" else None
        glyph = glyphs.of(rank.look) if known is None else glyphs.level(known)
        if self.metric in OF_VITALS and rank.state == "running" and rank.vitals_old:
            return glyph, "off"
        return glyph, "mark" if rank.rank in self._marked_ranks else rank.look.role

    def next_metric(self) -> bool:
        """Show the next metric that is known; return whether there is another one."""
        ranks = [rank for node in self._cells for rank in node.ranks]
        at = METRICS.index(self.metric)
        order = [*METRICS[at + 1 :], *METRICS[:at]]
        known = (metric for metric in order if metric == "state" or any(share(r, metric) is not None for r in ranks))
        before, self.metric = self.metric, next(known, self.metric)
        return self.metric != before

    def _order(self) -> list[int]:
        return list(range(len(self._cells))) if self.per_node else [r.rank for node in self._cells for r in node.ranks]

    def _select(self, pick: Callable[[int, int], int]) -> None:
        order = self._order()
        if not order:
            return
        at = order.index(self.selected) if self.selected in order else 0
        self.selected = order[max(0, min(pick(at, len(order)), len(order) - 1))]
        self._follow_selection()
        self.redraw()
        self.post_message(Picker.Moved(self))

    def _follow_selection(self) -> None:
        node, _ = self.selection
        index = next((i for i, row in enumerate(self._cells) if row.name == node), 0)
        line = index // self.per_line
        self.top = min(max(self.top, line - self.body_height + 1), line)

    def action_step(self, delta: int) -> None:
        """Select the next or previous rank."""
        self._select(lambda at, _: at + delta)

    def action_row(self, delta: int) -> None:
        """Select in the next or previous line."""
        ranks = 1 if self.per_node else _widest(self._cells)
        self._select(lambda at, _: at + delta * self.per_line * ranks)

    def action_edge(self, end: int) -> None:
        """Select the first or the last."""
        self._select(lambda _, size: size - 1 if end else 0)

    def on_click(self, event: events.Click) -> None:
        """Select the rank or node at a cell; a double click opens it."""
        at = self._item_at(event.x - 1, self.top + event.y - (self.size.height - self.body_height))
        if event.y and at is not None:
            self._select(lambda _, __: at)
            if event.chain == 2:
                self.action_open()

    def _item_at(self, x: int, line: int) -> int | None:
        """Return the index of the rank or node at a cell of a line; a node's name stands for its first rank."""
        first = line * self.per_line
        if self.per_node:
            at = x - self._name_width - 1
            return first + at if 0 <= at < min(self.per_line, len(self._cells) - first) else None
        column, cell = divmod(x, self._cell + GAP)
        if not 0 <= column < self.per_line or not first + column < len(self._cells):
            return None
        rank = max(0, cell - self._name_width - 1)
        before = sum(len(node.ranks) for node in self._cells[: first + column])
        return before + rank if rank < len(self._cells[first + column].ranks) else None

    def action_open(self) -> None:
        """Open the selection."""
        node, rank = self.selection
        key = ("rank", rank) if rank is not None else ("node", node)
        self.post_message(Picker.Opened(self, key))


def share(rank: RankRow, metric: str) -> float | None:
    """Return the height of a rank's bar from 0 to 1; None if it is unknown."""
    if metric == "state":
        return None
    if metric == "output":
        return None if (age_s := rank.output_age_s) is None else 1.0 - age_s / OUTPUT_FLOOR_S
    if metric == "mem":
        return rank.memory
    if metric == "lag":
        lag = rank.progress.get("lag")
        return None if lag is None else 1.0 - lag / LAG_FLOOR
    used = rank.gpu.get("use") if metric == "gpu" else rank.vitals.get("cpu")
    return None if used is None else used / 100


def _in_grid(job_view: JobView) -> list[NodeRow]:
    """Return the nodes of the heat map: also lost ones, which have no ranks."""
    return [node for node in job_view.nodes if node.ranks or node.state not in ("spare", "removed")]


def _widest(nodes: Sequence[NodeRow]) -> int:
    return max((len(node.ranks) for node in nodes), default=0) or 1


def nodes_per_line(width: int, cell: int, per_node: bool) -> int:
    """Return how many nodes fit in a line of `width` cells."""
    if per_node:
        # Tens are easy to count.
        return max(1, (width - cell - 2) // 10 * 10)
    return max(1, (width - 1 + GAP) // (cell + GAP))


def lines_needed(job_view: JobView, width: int) -> int:
    """Return the number of lines for one glyph per rank."""
    nodes = _in_grid(job_view)
    cell = name_width(nodes) + 1 + _widest(nodes)
    return -(-len(nodes) // nodes_per_line(width - 1, cell, False))
