"""How the nodes reach each other, as NCCL told it: transports by pair of nodes, what differs, what surprises.

In: what the nodes answer while the screen is visible. Out: a way to the log of a node.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from textual import on

from supervisor.errors import SupervisorError
from supervisor.tui.nccl_rows import lines_of, nccl_page, nothing_told
from supervisor.tui.screens.base import LiveScreen, Target
from supervisor.tui.textflow import wrap
from supervisor.tui.widgets.picker import Picker
from supervisor.tui.widgets.tables import Page

if TYPE_CHECKING:
    from textual.widget import Widget

    from supervisor.session.fabric import Fabric
    from supervisor.tui.cells import Row
    from supervisor.tui.incident_rows import Line
    from supervisor.tui.model import Snapshot

# NCCL tells of itself when a group starts; ranks may take minutes to get there.
EVERY_S: Final = 5.0


class NcclScreen(LiveScreen):
    """What NCCL told on all nodes."""

    NAME = "nccl"

    def body(self) -> Iterable[Widget]:
        """One page, and all about the selected line."""
        yield Picker(title="nccl", id="nccl")
        yield Page("detail")

    def on_mount(self) -> None:
        """Begin with nothing."""
        self._fabric: Fabric | None = None
        self._lines: list[Line] = []
        self._about: dict[tuple[str, int], str] = {}
        self._more: dict[tuple[str, int], list[str]] = {}
        self._drawn: tuple[object, ...] = ()
        self._asked_at = 0.0
        self.query_one(Page).display = False
        self.query_one(Picker).placeholder = ((" asking the nodes", "dim"),)

    def tick(self, snapshot: Snapshot, age_s: float, changed: bool) -> None:
        """Ask again from time to time, while somebody looks."""
        super().tick(snapshot, age_s, changed)
        if snapshot.state and time.monotonic() - self._asked_at > EVERY_S:
            self._asked_at = time.monotonic()
            self.run_worker(self._ask, group="nccl", exclusive=True, exit_on_error=False)  # type: ignore[arg-type]

    async def _ask(self) -> None:
        try:
            self._fabric = await self.tui.source.nccl()
        except SupervisorError as error:
            self.tui.say(error.message, title="nccl", level="warning")
        self.tui.look_again()

    def show(self, snapshot: Snapshot) -> None:
        """Show what was told last."""
        picker, fabric = self.query_one(Picker), self._fabric
        width = picker.line_width or self.size.width - 1
        drawn = (fabric, width, snapshot.generation, snapshot.world_size, self.tui.source.status.get("environment"))
        if fabric is None or self._drawn == drawn:
            return
        self._drawn = drawn
        first = not self._more
        if fabric.nodes:
            page = nccl_page(fabric, width, self.tui.glyphs)
            self._lines, self._about, self._more = page.lines, page.nodes, page.more
        else:
            self._lines, self._about = (
                lines_of(nothing_told(snapshot.generation or 0, self.tui.source.status, width)),
                {},
            )
            self._more = {}
        ranks = sum(len(numbers) for numbers in fabric.ranks.values())
        picker.heading = f"nccl, generation {max(0, fabric.generation)}"
        picker.note = ((f"{ranks} of {snapshot.world_size or '?'} ranks told", "dim"),)
        lines = self._lines
        picker.show([line.key for line in lines], lambda index: lines[index].row)
        if first and self._more:
            picker.select(next(iter(self._more)))
            picker.scroll_to_line(0)
        self._show_more()

    def _show_more(self) -> None:
        """Show all that the selected line says."""
        detail, selected = self.query_one(Page), self.query_one(Picker).selected
        texts = self._more.get(selected, []) if isinstance(selected, tuple) else []
        rows: list[Row] = []
        for number, text in enumerate(texts):
            rows += [((f"  {line}", "dim" if number else "text"),) for line in wrap(text, self.size.width - 4)]
        detail.display = bool(rows)
        detail.styles.height = min(len(rows) + 1, max(3, (self.size.height - 4) // 3))
        detail.show_rows("in full, and what to do", rows)

    @on(Picker.Moved)
    def _moved(self) -> None:
        self.query_one(Page).top = 0
        self._show_more()

    def selection(self) -> Target:
        """The node that the selected line is about."""
        selected = self.query_one(Picker).selected
        return Target(self._about.get(selected) if isinstance(selected, tuple) else None)

    @on(Picker.Opened)
    def open_node(self) -> None:
        """Open what NCCL told there."""
        target = self.selection()
        if target.node is not None:
            self.tui.open_log(target, streams=("nccl",))

    def action_logs(self) -> None:
        """Open what NCCL told on the node of the selected line, or on all."""
        self.tui.open_log(self.selection(), streams=("nccl",))
