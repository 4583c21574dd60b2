"""A list with a selected line that stays on the same thing when the lines around it change.

In: rows and their keys. Out: the key of the selected row, a message when it is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.binding import Binding
from textual.message import Message

from supervisor.tui.widgets.lines import LineView

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from textual import events

    from supervisor.tui.rows.spans import Row


class Picker(LineView):
    """Lines of which one is selected."""

    BINDINGS = [
        Binding("up,k", "step(-1)", show=False),
        Binding("down,j", "step(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "edge(False)", show=False),
        Binding("end,G", "edge(True)", show=False),
        Binding("enter", "open", show=False),
    ]

    class Opened(Message):
        """The selected line was opened."""

        def __init__(self, view: LineView, key: Hashable) -> None:
            super().__init__()
            self.view = view
            self.key = key

    class Moved(Message):
        """Another line was selected."""

        def __init__(self, view: LineView) -> None:
            super().__init__()
            self.view = view

    def __init__(self, *, title: str = "", head: bool = False, id: str | None = None) -> None:  # noqa: A002
        super().__init__(title=title, id=id)
        self._keys: Sequence[Hashable] = ()
        self._row: Callable[[int], Row] = lambda index: ()
        self._selected: Hashable = None
        self.scrolled = False
        """The reader has turned the wheel, away from the end."""
        self.leads = False
        """The selection is shown as if the list had the focus: another widget drives it."""
        self._has_head = head
        self.head: Row = ()
        """Column names above the rows, if the picker was made with `head`."""
        self.placeholder: Row = ()
        """What is shown while there is no row."""

    @property
    def body_height(self) -> int:
        """Rows that fit below title and column names."""
        return max(0, super().body_height - self._has_head)

    @property
    def selected(self) -> Hashable:
        """Key of the selected row, or None."""
        return self._selected if self._keys else None

    @property
    def cursor(self) -> int:
        """Index of the selected row, -1 if there is none."""
        try:
            return self._keys.index(self._selected)
        except ValueError:
            return -1

    @property
    def text(self) -> str:
        """The selected row as plain text."""
        at = self.cursor
        return "".join(text for text, _ in self._row(at)).strip() if at >= 0 else ""

    @property
    def at_end(self) -> bool:
        """Whether the newest row is selected, or none, and the reader has not scrolled away from it."""
        return not self.scrolled and self.cursor in (-1, len(self._keys) - 1)

    def scroll_lines(self, delta: int) -> None:
        """Move the view by some lines."""
        super().scroll_lines(delta)
        self.scrolled = self.top < self.last_top

    def show(self, keys: Sequence[Hashable], row: Callable[[int], Row]) -> None:
        """Show these rows; the selected key stays selected, and stays in view."""
        before = self.cursor
        in_view = self.top <= before < self.top + self.body_height
        if keys != self._keys:
            self._keys = keys
            # If all rows disappear, as while a group restarts, the selected one may come back.
            if keys and self._selected not in keys:
                self._selected = keys[max(0, min(before, len(keys) - 1))]
        self._row = row
        if in_view:
            self._bring_into_view(self.cursor)
        self.redraw()

    def on_resize(self) -> None:
        """Keep the selected row in view: with a new height it may lie below the last one."""
        if not self.scrolled and self.cursor >= 0:
            self._bring_into_view(self.cursor)
        super().on_resize()

    def select(self, key: Hashable) -> None:
        """Select a row by its key and bring it into view; an unknown key changes nothing."""
        if key in self._keys:
            self._move_to(self._keys.index(key))

    def line_count(self) -> int:
        """Return how many rows there are."""
        return len(self._keys) or bool(self.placeholder)

    def line_at(self, index: int) -> tuple[Row, str]:
        """Return one row; the selected one is marked."""
        if not self._keys:
            return self.placeholder, ""
        if self._keys[index] != self._selected:
            return self._row(index), ""
        return self._row(index), "cursor" if self.has_focus or self.leads else "rest"

    def _title_lines(self) -> list[Row]:
        return [*super()._title_lines(), self.head] if self._has_head else super()._title_lines()

    def _move_to(self, index: int) -> None:
        if not self._keys:
            return
        index = max(0, min(index, len(self._keys) - 1))
        moved = self._keys[index] != self._selected
        self.scrolled = False
        self._selected = self._keys[index]
        self._bring_into_view(index)
        self.redraw()
        if moved:
            self.post_message(self.Moved(self))

    def _bring_into_view(self, index: int) -> None:
        if index < self.top:
            self.top = max(0, index)
        elif index >= self.top + self.body_height:
            self.top = max(0, index - self.body_height + 1)

    def action_step(self, delta: int) -> None:
        """Select the next or previous row."""
        self._move_to(self.cursor + delta)

    def action_page(self, pages: int) -> None:
        """Move by a screenful."""
        self._move_to(self.cursor + pages * max(1, self.body_height - 1))

    def action_edge(self, end: bool) -> None:
        """Select the first or last row."""
        self._move_to(len(self._keys) - 1 if end else 0)

    def action_open(self) -> None:
        """Open the selected row."""
        if self.selected is not None:
            self.post_message(self.Opened(self, self.selected))

    def on_click(self, event: events.Click) -> None:
        """Select a row with the mouse; a double click opens it."""
        index = self.top + event.y - (self.size.height - self.body_height)
        if 0 <= index < len(self._keys) and event.y >= self.size.height - self.body_height:
            self._move_to(index)
            if event.chain == 2:
                self.action_open()
