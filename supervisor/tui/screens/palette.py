"""Everything by name, and the help page: both made from the table of keys and the registry of actions.

In: entries. Out: the id of the chosen one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from textual import events, on
from textual.binding import Binding
from textual.fuzzy import Matcher
from textual.widgets import Input

from supervisor.tui.cells import Row, fit
from supervisor.tui.screens.dialogs import Dialog
from supervisor.tui.textflow import wrap
from supervisor.tui.widgets.picker import Picker

if TYPE_CHECKING:
    from textual.widget import Widget


# The longest keys of one thing, `left right 0 $`, and a space.
KEYS_WIDTH: Final = 15


class Entry(NamedTuple):
    """One thing that can be chosen by name."""

    id: str
    label: str
    help: str
    key: str = ""


class Palette(Dialog[str]):
    """Type a part of a name; enter runs what is selected."""

    BINDINGS = [
        Binding("up", "move(-1)", show=False, priority=True),
        Binding("down", "move(1)", show=False, priority=True),
    ]

    def __init__(self, entries: Sequence[Entry]) -> None:
        super().__init__("palette")
        self._entries = entries
        self._shown = list(entries)

    def content(self) -> Iterable[Widget]:
        """A field and the entries that match."""
        field = Input(id="query", compact=True, placeholder="part of a name: an action, a screen, a node, r12, a theme")
        field.cursor_blink = False
        yield field
        picker = Picker(id="found")
        picker.can_focus = False
        picker.leads = True
        picker.placeholder = ((" nothing has that name", "dim"),)
        yield picker

    def on_mount(self) -> None:
        """Show all entries."""
        self._fill()

    def lay_out(self) -> None:
        """As many lines as there is room for."""
        self._fill()
        self.query_one(Picker).styles.height = max(3, min(14, self.app.size.height - 7))

    @on(Input.Changed)
    def narrow(self, event: Input.Changed) -> None:
        """Show the entries that match, best first."""
        words = event.value.strip()
        if words:
            matcher = Matcher(words)
            scored = [(max(matcher.match(e.label), matcher.match(e.help) * 0.6), e) for e in self._entries]
            self._shown = [entry for score, entry in sorted(scored, key=lambda pair: -pair[0]) if score > 0]
        else:
            self._shown = list(self._entries)
        self._fill()
        self.query_one(Picker).action_edge(False)

    def _fill(self) -> None:
        shown = self._shown
        self.query_one(Picker).show([entry.id for entry in shown], lambda index: self._row(shown[index]))

    def _row(self, entry: Entry) -> Row:
        room = min(28, self.inner_width // 2)
        rest = max(0, self.inner_width - room - 8)
        label, note = fit(entry.label, room, self.more), fit(entry.help, rest, self.more)
        return ((f" {label} ", "title"), (f"{note} ", "dim"), (entry.key, "key"))

    def action_move(self, delta: int) -> None:
        """Move in the list while the field keeps the focus."""
        self.query_one(Picker).action_step(delta)

    @on(Input.Submitted)
    def run_selected(self) -> None:
        """Run what is selected."""
        selected = self.query_one(Picker).selected
        self.dismiss(selected if isinstance(selected, str) else None)

    def on_click(self, event: events.Click) -> None:
        """A click beside the box closes it."""
        if event.widget is self:
            self.dismiss(None)


class Help(Dialog[None]):
    """The keys of a screen."""

    BINDINGS = [Binding("q,question_mark,f1,enter", "cancel", show=False)]

    def __init__(self, title: str, sections: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        super().__init__(title)
        self._sections = sections

    def content(self) -> Iterable[Widget]:
        """Keys and what they do."""
        yield Picker(id="help")

    def lay_out(self) -> None:
        """Section by section, wrapped."""
        rows: list[Row] = []
        for title, entries in self._sections:
            if rows:
                rows.append(())
            rows.append(((f" {title}", "accent"),))
            for entry in entries:
                for number, line in enumerate(wrap(entry.help, self.inner_width - KEYS_WIDTH - 1)):
                    rows.append((("  " + fit("" if number else entry.key, KEYS_WIDTH), "key"), (line, "text")))
        picker = self.query_one(Picker)
        picker.styles.height = min(len(rows), max(3, self.app.size.height - 6))
        picker.show(range(len(rows)), lambda index: rows[index])

    @on(Picker.Opened)
    def read(self) -> None:
        """Enter closes it."""
        self.dismiss(None)
