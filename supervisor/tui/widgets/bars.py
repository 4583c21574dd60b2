"""The bars above and below every screen: state of the job, screens and keys.

In: a snapshot; the name of the screen. Out: two rows each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from supervisor.tui import keys
from supervisor.tui.alert import alert_rows
from supervisor.tui.cells import EMPTY, Row, Span, row_width, spread
from supervisor.tui.widgets.lines import Drawn, LineView

if TYPE_CHECKING:
    from supervisor.tui.model import Snapshot


STAY = ("actions", "help", "detach", "quit", "give up")


class Bar(LineView, can_focus=False):
    """Two rows that fill the width."""

    DEFAULT_CSS = "Bar { height: 2; width: 100%; }"

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self.rows: tuple[Row, ...] = (EMPTY, EMPTY)

    def _draw_all(self) -> list[Drawn]:
        rows = (*self.rows, *([EMPTY] * self.size.height))
        return [Drawn(row, "", ("", "")) for row in rows[: self.size.height]]


class AlertBar(Bar):
    """What the job does, what is wrong, what comes next."""

    def show(self, snapshot: Snapshot, age_s: float, *, paused_s: float | None = None, played: str = "") -> None:
        """Show a newer state; `paused_s`: seconds since the user has stopped the screen; `played`: of a recording."""
        self.rows = alert_rows(snapshot, age_s, self.size.width, self.glyphs, paused_s=paused_s, played=played)
        self.redraw()


class KeyBar(Bar):
    """Where we are, and the keys that matter here."""

    def __init__(self, screen: str) -> None:
        super().__init__("keys")
        self.screen_name = screen

    def show(
        self, *, table: Sequence[keys.Key], theme: str, read_only: bool, marked: int, way_out: str, way_back: bool
    ) -> None:
        """Show screens and keys; `way_out`: what q does now; `way_back`: esc leads anywhere."""
        self.rows = (self._screens(theme, read_only, marked), self._keys(table, way_out, way_back))
        self.redraw()

    def _screens(self, theme: str, read_only: bool, marked: int) -> Row:
        spans: list[Span] = []
        for number, (name, title) in enumerate(keys.SCREENS, 1):
            here = name == self.screen_name
            spans += [(" ", ""), (f"{number} ", "accent" if here else "dim"), (title, "accent" if here else "dim")]
            if self.size.width >= 100:
                spans.append((" ", ""))
        room = self.size.width - row_width(spans)
        end: list[Span] = [("read-only " if room > 12 else "r/o ", "warn")] if read_only else []
        if marked:
            end.insert(0, (f"{marked} marked  ", "mark"))
        end.append((f"{theme} ", "dim"))
        while end and row_width(end) + 2 > room:
            end.pop()
        return spread(spans, end, self.size.width, self.glyphs.more)

    def _keys(self, table: Sequence[keys.Key], way_out: str, way_back: bool) -> Row:
        pairs = [pair for pair in keys.footer(self.screen_name, table) if way_back or pair[1] != "back"]
        pairs = [(key, way_out if label == "detach" else label) for key, label in pairs]
        gap = 2 if self.size.width >= 80 else 1
        # Actions, help and the way out always stay; of the others the last ones give way first.
        for label in ("back", "palette", "pane", *(label for _, label in reversed(pairs[2:]))):
            if 1 + sum(len(key) + 1 + len(name) + gap for key, name in pairs) - gap <= self.size.width:
                break
            pairs = [pair for pair in pairs if pair[1] != label or label in STAY]
        spans: list[Span] = [(" ", "")]
        for number, (key, label) in enumerate(pairs):
            spans += [(" " * gap if number else "", ""), (key, "key"), (f" {label}", "dim")]
        return tuple(spans)
