"""The kinds of dialogs: text with buttons, confirmation, text to read, menu.

In: text, buttons, items. Out: the answer; a dialog that is closed without one of its buttons answers None.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, TypeVar

from textual import events, on
from textual.await_complete import AwaitComplete
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from supervisor.tui.rows.spans import Row, clean, fit, width_of, wrap
from supervisor.tui.shell import shell_of
from supervisor.tui.widgets.lines import CellSelection
from supervisor.tui.widgets.picker import Picker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from textual.app import ComposeResult
    from textual.widget import Widget


T = TypeVar("T")

# For this many seconds a new dialog confirms nothing: the key may have been meant for the screen below.
GUARD_S: Final = 0.3
# On terminals with fewer lines a dialog has no empty lines at its edges.
ROOMY: Final = 20


class Dialog(CellSelection[T], ModalScreen[T], inherit_bindings=False):
    """A box in the middle of the screen."""

    ESCAPE_TO_MINIMIZE = False
    WIDEST: ClassVar[int] = 76
    BINDINGS = [
        Binding("escape,ctrl+c", "cancel", show=False),
        Binding("tab", "app.focus_next", show=False),
        Binding("shift+tab", "app.focus_previous", show=False),
    ]

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title
        self._opened_at = time.monotonic()

    @property
    def inner_width(self) -> int:
        """Cells for text in the box."""
        return min(self.WIDEST, self.app.size.width - 4) - 6

    @property
    def more(self) -> str:
        """The mark of a cut text."""
        return shell_of(self.app).glyphs.more

    def compose(self) -> ComposeResult:
        """Yield title and content in a box."""
        with Vertical(id="box") as box:
            box.border_title = Content(clean(self._title))
            box.styles.width = self.inner_width + 6
            yield from self.content()

    def on_resize(self) -> None:
        """Fit the box and what is in it into the terminal."""
        if not self.app.is_running or self not in self.app.screen_stack:
            # A dialog that is being closed has lost its children already.
            return
        self.set_class(self.app.size.height < ROOMY, "-tight")
        self.query_one("#box").styles.width = self.inner_width + 6
        self.lay_out()

    def lay_out(self) -> None:
        """Take as many lines as there is room for."""

    def content(self) -> Iterable[Widget]:
        """Return the widgets in the box."""
        return ()

    def action_cancel(self) -> None:
        """Close without doing anything."""
        self.dismiss(None)

    def dismiss(self, result: T | None = None) -> AwaitComplete:
        """Close once: a key that was typed ahead must not close the dialog below as well."""
        return super().dismiss(result) if self.is_active else AwaitComplete()

    def tick(self) -> None:
        """Update the dialog when the state of the job has changed."""

    @property
    def guarded(self) -> bool:
        """Whether the dialog has only just opened."""
        return time.monotonic() - self._opened_at < GUARD_S


class DialogButton(NamedTuple):
    """A button."""

    id: str
    label: str
    danger: bool = False


class ButtonDialog(Dialog[str]):
    """Text and buttons; answers with the id of a button, or None."""

    BINDINGS = [
        Binding("left", "app.focus_previous", show=False),
        Binding("right", "app.focus_next", show=False),
        Binding("y", "yes", show=False),
        Binding("n", "cancel", show=False),
    ]
    OTHER_LINES: ClassVar[int] = 4
    """Lines of the box that are not facts: border, buttons, the widgets of `extra`."""

    def __init__(
        self, title: str, facts: Sequence[tuple[str, str]], buttons: Sequence[DialogButton], focus: str, yes: str = ""
    ) -> None:
        """`focus`: the id of the safe button, `yes`: of the one that y presses; there may be none."""
        super().__init__(title)
        self._yes = yes
        self._facts = facts
        self._buttons = buttons
        self._focus = focus

    def content(self) -> Iterable[Widget]:
        """Yield facts as name and text, then the buttons."""
        yield Static(id="facts", markup=False)
        yield from self.extra()
        with Horizontal(id="buttons"):
            for button in self._buttons:
                yield Button(button.label, id=button.id, compact=True, classes="danger" if button.danger else "")

    def lay_out(self) -> None:
        self.query_one("#facts", Static).update(self._text())

    def extra(self) -> Iterable[Widget]:
        """Return more between the facts and the buttons."""
        return ()

    def _text(self) -> str:
        room = max((len(name) for name, _ in self._facts), default=0) + (2 if any(n for n, _ in self._facts) else 0)
        lines: list[str] = []
        for name, text in self._facts:
            for number, line in enumerate(wrap(text, self.inner_width - room)):
                lines.append(fit(name if number == 0 else "", room) + line)
        # The buttons must stay in view; the most important facts come first.
        rows = max(3, self.app.size.height - self.OTHER_LINES - (-1 if self.has_class("-tight") else 2))
        if len(lines) > rows:
            lines = [*lines[: rows - 1], self.more]
        return "\n".join(lines)

    def action_yes(self) -> None:
        """Do what the dialog asks, as its button does."""
        for button in self.query(Button):
            if button.id == self._yes:
                button.press()

    def on_mount(self) -> None:
        """Focus the safe button."""
        self.query_one(f"#{self._focus}", Button).focus()

    @on(Button.Pressed)
    def answer(self, event: Button.Pressed) -> None:
        """Answer with the button; a dangerous one is ignored while the dialog has only just opened."""
        event.stop()
        if self.guarded and event.button.has_class("danger"):
            return
        self.dismiss(event.button.id)


class Confirm(ButtonDialog):
    """Target and effect of an action; Cancel has the focus."""

    def __init__(self, title: str, facts: Sequence[tuple[str, str]], yes: str) -> None:
        buttons = [DialogButton("cancel", "Cancel"), DialogButton("yes", yes, danger=True)]
        super().__init__(title, facts, buttons, "cancel", "yes")


class ConfirmTyped(Confirm):
    """A confirmation for which a word must be typed first."""

    BINDINGS = [Binding("y", "nothing", show=False)]
    OTHER_LINES = ButtonDialog.OTHER_LINES + 3

    def __init__(self, title: str, facts: Sequence[tuple[str, str]], yes: str, word: str) -> None:
        super().__init__(title, facts, yes)
        self._word = word

    def extra(self) -> Iterable[Widget]:
        """Yield the field for the word."""
        yield Static(f"Type {clean(self._word)} to confirm:", id="ask", markup=False)
        field = Input(id="typed", compact=True, select_on_focus=False)
        field.cursor_blink = False
        yield field

    def on_mount(self) -> None:
        """Disable the button until the word is typed."""
        super().on_mount()
        self.query_one("#yes", Button).disabled = True

    def on_key(self, event: events.Key) -> None:
        """Send typed characters to the field, wherever the focus is."""
        field = self.query_one("#typed", Input)
        if event.is_printable and event.character and not field.has_focus:
            event.stop()
            field.focus()
            field.insert_text_at_cursor(event.character)

    @on(Input.Changed)
    def check(self, event: Input.Changed) -> None:
        """Enable or disable the button."""
        self.query_one("#yes", Button).disabled = event.value.strip() != self._word

    @on(Input.Submitted)
    def submit(self) -> None:
        """Enter behind the word presses the button: who has typed it has confirmed."""
        button = self.query_one("#yes", Button)
        if not button.disabled:
            button.press()

    def action_nothing(self) -> None:
        """Do nothing: here `y` is text."""


class RowsDialog(Dialog[None]):
    """Rows to read."""

    BINDINGS = [Binding("q,enter", "cancel", show=False)]

    def content(self) -> Iterable[Widget]:
        """Yield a list."""
        yield Picker(id="rows")

    def rows(self) -> Sequence[Row]:
        """Return the rows in `inner_width`."""
        return ()

    def lay_out(self) -> None:
        rows, picker = self.rows(), self.query_one(Picker)
        picker.styles.height = min(len(rows), max(3, self.app.size.height - 6))
        picker.show(range(len(rows)), lambda index: rows[index])

    @on(Picker.Opened)
    def read(self) -> None:
        """Enter closes it."""
        self.dismiss(None)


class TextDialog(RowsDialog):
    """A long text to read and to copy."""

    BINDINGS = [Binding("y", "copy", show=False)]

    def __init__(self, title: str, text: str) -> None:
        super().__init__(title)
        self._text = text

    def rows(self) -> Sequence[Row]:
        """Return the text, wrapped."""
        return [((line, "text"),) for line in wrap(self._text, self.inner_width)]

    def on_mount(self) -> None:
        """Show the keys."""
        self.query_one("#box").border_subtitle = "y copy  esc close"

    def show_text(self, text: str) -> None:
        """Show another text."""
        self._text = text
        self.lay_out()

    def action_copy(self) -> None:
        """Copy the whole text to the clipboard."""
        shell_of(self.app).copy(self._text)


class MenuItem(NamedTuple):
    """A line of a menu."""

    id: str
    key: str
    label: str
    note: str
    off: str = ""
    """Why it cannot be chosen; "" if it can."""


class Menu(Dialog[str]):
    """A list to choose from by letter or with the cursor; answers with the id of an item.

    The items are updated while it is open: what can be done may change.
    """

    WIDEST = 96

    def __init__(self, title: str, make: Callable[[], Sequence[MenuItem]]) -> None:
        super().__init__(title)
        self._make = make
        self._items: dict[str, MenuItem] = {}

    def content(self) -> Iterable[Widget]:
        """Yield one line per item."""
        yield Picker(id="menu")

    def on_mount(self) -> None:
        """Fill the list: a letter may be typed before the first frame."""
        self.tick()

    def lay_out(self) -> None:
        self.tick()
        self.query_one(Picker).styles.height = min(len(self._items), max(3, self.app.size.height - 6))

    def tick(self) -> None:
        items = list(self._make())
        self._items = {item.id: item for item in items}
        room = max((width_of(item.label) for item in items), default=0)
        self.query_one(Picker).show([item.id for item in items], lambda index: self._row(items[index], room))

    def _row(self, item: MenuItem, room: int) -> Row:
        text = fit(item.off or item.note, max(0, self.inner_width - room - 6), self.more)
        look = ("off", "off", "off") if item.off else ("key", "title", "dim")
        return ((f" {item.key or ' '} ", look[0]), (fit(item.label, room) + "  ", look[1]), (text, look[2]))

    def on_key(self, event: events.Key) -> None:
        """Choose an item by its letter."""
        for item in self._items.values():
            if item.key and event.character == item.key:
                event.stop()
                self._choose(item)
                return

    @on(Picker.Opened)
    def chosen(self, event: Picker.Opened) -> None:
        """Enter chooses."""
        item = self._items.get(str(event.key))
        if item is not None:
            self._choose(item)

    def _choose(self, item: MenuItem) -> None:
        if item.off:
            self.notify(clean(item.off), severity="warning", markup=False)
        else:
            self.dismiss(item.id)
