"""The launch: one line for each host, with reason and hint in full where it failed.

In: the progress of the hosts. Out: rows; the screen stays if too few hosts are up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remote_agent.text.names import count
from supervisor.tui.rows.spans import Row, Span, clean, fit
from supervisor.tui.rows.tables import name_width
from supervisor.tui.rows.wrapping import wrap
from supervisor.tui.screens.base import LiveScreen
from supervisor.tui.shell import Target
from supervisor.tui.widgets.picker import Picker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.widget import Widget

    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import NodeRow, Snapshot

_LOOKS = {
    "up": ("✓", "+", "ok"),
    "connecting": ("~", "~", "start"),
    "lost": ("!", "!", "warn"),
    "failed": ("X", "X", "bad"),
}


class LaunchScreen(LiveScreen):
    """Progress per host."""

    NAME = "launch"

    def body(self) -> Iterable[Widget]:
        """One list."""
        yield Picker(title="bringing up the hosts", id="hosts")

    def show(self, snapshot: Snapshot) -> None:
        """Show how far each host is."""
        picker = self.query_one(Picker)
        lines = launch_rows(snapshot, picker.line_width or self.size.width - 1, self.shell.glyphs)
        up = sum(node.link == "up" for node in snapshot.nodes)
        failed = sum(node.link == "failed" for node in snapshot.nodes)
        picker.heading = "bringing up the hosts" if snapshot.bringing_up else "connecting to the hosts"
        note: list[Span] = [(f"{up} of {count(len(snapshot.nodes), 'host')} up", "ok" if up else "dim")]
        if failed:
            note.append((f"  {failed} failed", "bad"))
        picker.note = tuple(note)
        picker.placeholder = ((" reading the inventory", "dim"),)
        picker.show([key for key, _ in lines], lambda index: lines[index][1])

    def selection(self) -> Target:
        """The selected host."""
        key = self.query_one(Picker).selected
        return Target(key[0] if isinstance(key, tuple) and key[0] else None)


def launch_rows(snapshot: Snapshot, width: int, glyphs: Glyphs) -> list[tuple[tuple[str, int], Row]]:
    """Keys and rows: a line per host, and below a failed one why and what to do."""
    lines: list[tuple[tuple[str, int], Row]] = []
    room = name_width(snapshot.nodes)
    for node in snapshot.nodes:
        for number, row in enumerate(_host(node, room, width, glyphs)):
            lines.append(((node.name, number), row))
    if snapshot.problem:
        said = [(line, "bad") for line in wrap(snapshot.problem, width - 2)]
        said += [(line, "text") for line in wrap(snapshot.hint, width - 2)] if snapshot.hint else []
        lines.append((("", 0), ()))
        for number, (line, role) in enumerate(said, 1):
            lines.append((("", number), ((f" {line}", role),)))
    return lines


def _host(node: NodeRow, room: int, width: int, glyphs: Glyphs) -> list[Row]:
    mark, ascii_mark, role = _LOOKS.get(node.link, ("-", "-", "off"))
    step = node.step or {"up": "ready"}.get(node.link, "")
    head: list[Span] = [
        (f" {ascii_mark if glyphs.ascii else mark} ", role),
        (fit(node.name, room, glyphs.more) + "  ", "title" if node.link == "failed" else "text"),
        (fit(step, 9, glyphs.more) + " ", role if node.link == "failed" else "dim"),
    ]
    indent = 3 + room + 2 + 10
    if not node.error:
        return [(*head, (clean(node.text), "dim"))]
    reason = wrap(node.error, max(20, width - indent - 1))
    rows: list[Row] = [(*head, (reason[0], "bad" if node.link == "failed" else "warn"))]
    rows += [((" " * indent + line, "bad"),) for line in reason[1:]]
    if node.hint:
        rows += [((" " * indent + line, "text"),) for line in wrap(node.hint, max(20, width - indent - 1))]
    return rows
