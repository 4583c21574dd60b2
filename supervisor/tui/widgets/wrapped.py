"""Lines of which each may take several rows: the position is a line and a row of it, so that each can be read whole.

In: `rows_of(index)` of a subclass. Out: the rows in view; while nothing is wrapped, all is as in a LineView.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from supervisor.tui.widgets.lines import LineView

if TYPE_CHECKING:
    from supervisor.tui.cells import Row

Place = tuple[int, int]
"""A line, and a row of it."""


class WrappedView(LineView):
    """Lines that are as long as the screen is wide, or wrapped."""

    def __init__(self, *, title: str = "", id: str | None = None) -> None:  # noqa: A002
        super().__init__(title=title, id=id)
        self.wrap = False
        self._sub = 0
        """The row of the first line in view that is the first one in view."""
        self._room = 0

    def rows_of(self, index: int) -> list[tuple[Row, str]]:
        """The rows of a line that is wrapped, at least one, each with what is laid over it."""
        return [self.line_at(index)]

    def text_room(self) -> int:
        """Cells of a row for what is wrapped."""
        return self.line_width

    @property
    def last_top(self) -> int:
        """The scroll position at the end."""
        return self._end()[0] if self.wrap else super().last_top

    def set_wrap(self, wrap: bool) -> None:
        """Wrap long lines, or not; the first line in view stays the first one."""
        self.wrap, self._sub = wrap, 0
        self.redraw()

    def places(self) -> list[Place]:
        """What stands on each row of the view."""
        total = self.line_count()
        if not self.wrap:
            return [(line, 0) for line in range(self.top, min(self.top + self.body_height, total))]
        places: list[Place] = []
        line, sub = self.top, self._sub
        while len(places) < self.body_height and line < total:
            places += [(line, row) for row in range(sub, len(self.rows_of(line)))]
            line, sub = line + 1, 0
        return places[: self.body_height]

    def _end(self) -> Place:
        if not self.wrap:
            return self.last_top, 0
        last = self.line_count() - 1
        return self.moved((last, len(self.rows_of(last)) - 1), 1 - self.body_height) if last >= 0 else (0, 0)

    def moved(self, place: Place, rows: int) -> Place:
        """The place so many rows further down, or up; as far as there are lines."""
        line, sub = place
        sub += rows
        while sub < 0 and line > 0:
            line -= 1
            sub += len(self.rows_of(line))
        while sub > 0 and line < self.line_count() - 1 and sub >= (height := len(self.rows_of(line))):
            line += 1
            sub -= height
        return line, max(0, sub)

    def show_from(self, place: Place) -> None:
        """Show what begins at a place, as far as there are lines."""
        self.top, self._sub = place if self.wrap else (place[0], 0)
        self._stay_inside()
        self.redraw()

    def scroll_to_line(self, top: int) -> None:
        """Show the lines from `top` on, as far as there are any."""
        self.show_from((max(0, top), 0))

    def scroll_lines(self, delta: int) -> None:
        """Move the view by some rows."""
        self.show_from(self.moved((self.top, self._sub), delta) if self.wrap else (self.top + delta, 0))

    def _stay_inside(self) -> None:
        if not self.wrap:
            super()._stay_inside()
            return
        room = self.text_room()
        if room != self._room:
            # What is read stays in view when the width changes.
            self._sub = self._sub * self._room // max(1, room)
            self._room = room
        self.top, self._sub = max((0, 0), min((self.top, self._sub), self._end()))
        self._sub = min(self._sub, len(self.rows_of(self.top)) - 1) if self.line_count() else 0

    def _body(self) -> list[tuple[Row, str]]:
        if not self.wrap:
            return super()._body()
        return [self.rows_of(line)[row] for line, row in self.places()]
