"""Questions and pages over a screen: confirm, leave, choose, read.

In: what is asked. Out: the answer; closing a dialog in any way but its button means no.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, TypeVar, cast

from textual import events, on
from textual.await_complete import AwaitComplete
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from supervisor.tui.cells import Row, clean, fit, width_of
from supervisor.tui.textflow import wrap
from supervisor.tui.widgets.picker import Picker

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.widget import Widget

    from supervisor.tui.app import SupervisorApp
    from supervisor.tui.widgets.lines import Chrome

T = TypeVar("T")

# A key that was meant for the screen below must not confirm what has just opened, seconds.
GUARD_S: Final = 0.3
# Below this a dialog has no empty lines at its edges.
ROOMY: Final = 20


class Dialog(ModalScreen[T], inherit_bindings=False):
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
        """The mark of a cut."""
        return cast("Chrome", self.app).glyphs.more

    def compose(self) -> ComposeResult:
        """Title and content in a box."""
        with Vertical(id="box") as box:
            box.border_title = clean(self._title)
            box.styles.width = self.inner_width + 6
            yield from self.content()

    def on_resize(self) -> None:
        """Fit the box and what is in it into the terminal."""
        if not self.app.is_running or self not in self.app.screen_stack:
            # It is being closed, and what is in it goes first.
            return
        self.set_class(self.app.size.height < ROOMY, "-tight")
        self.query_one("#box").styles.width = self.inner_width + 6
        self.lay_out()

    def lay_out(self) -> None:
        """Fit the content into `inner_width` and the height of the terminal."""

    def content(self) -> Iterable[Widget]:
        """What stands in the box."""
        return ()

    def action_cancel(self) -> None:
        """Close without doing anything."""
        self.dismiss(None)

    def dismiss(self, result: T | None = None) -> AwaitComplete:
        """Close, once: a key that was typed ahead must not close what lies below as well."""
        return super().dismiss(result) if self.is_active else AwaitComplete()

    def tick(self) -> None:
        """Called when the state of the job has changed."""

    @property
    def guarded(self) -> bool:
        """The dialog has only just opened."""
        return time.monotonic() - self._opened_at < GUARD_S


class Choice(NamedTuple):
    """A button."""

    id: str
    label: str
    danger: bool = False


class ButtonDialog(Dialog[str]):
    """Text and buttons; answers with the id of a button, or None."""

    BINDINGS = [
        Binding("left", "app.focus_previous", show=False),
        Binding("right", "app.focus_next", show=False),
    ]
    TAKEN: ClassVar[int] = 4
    """Lines of the box that are not facts: border, buttons, what `extra` adds."""

    def __init__(self, title: str, facts: Sequence[tuple[str, str]], choices: Sequence[Choice], focus: str) -> None:
        super().__init__(title)
        self._facts = facts
        self._choices = choices
        self._focus = focus

    def content(self) -> Iterable[Widget]:
        """Facts as name and text, then the buttons."""
        yield Static(id="facts", markup=False)
        yield from self.extra()
        with Horizontal(id="buttons"):
            for choice in self._choices:
                yield Button(choice.label, id=choice.id, compact=True, classes="danger" if choice.danger else "")

    def lay_out(self) -> None:
        """Wrap the facts anew."""
        self.query_one("#facts", Static).update(self._text())

    def extra(self) -> Iterable[Widget]:
        """More between the facts and the buttons."""
        return ()

    def _text(self) -> str:
        room = max((len(name) for name, _ in self._facts), default=0) + (2 if any(n for n, _ in self._facts) else 0)
        lines: list[str] = []
        for name, text in self._facts:
            for number, line in enumerate(wrap(text, self.inner_width - room)):
                lines.append(fit(name if number == 0 else "", room) + line)
        # The buttons must stay in view; what matters most comes first.
        rows = max(3, self.app.size.height - self.TAKEN - (-1 if self.has_class("-tight") else 2))
        if len(lines) > rows:
            lines = [*lines[: rows - 1], self.more]
        return "\n".join(lines)

    def on_mount(self) -> None:
        """The safe button has the focus."""
        self.query_one(f"#{self._focus}", Button).focus()

    @on(Button.Pressed)
    def answer(self, event: Button.Pressed) -> None:
        """Answer with the button; a dangerous one only when the dialog has been seen."""
        event.stop()
        if self.guarded and event.button.has_class("danger"):
            return
        self.dismiss(event.button.id)


class Confirm(ButtonDialog):
    """Targets and effect of an action; the focus is on Cancel."""

    BINDINGS = [Binding("y", "yes", show=False), Binding("n", "cancel", show=False)]

    def __init__(self, title: str, facts: Sequence[tuple[str, str]], yes: str) -> None:
        super().__init__(title, facts, [Choice("cancel", "Cancel"), Choice("yes", yes, danger=True)], "cancel")

    def action_yes(self) -> None:
        """The same as the button."""
        self.query_one("#yes", Button).press()


class ConfirmTyped(Confirm):
    """Asks to type a word first."""

    BINDINGS = [Binding("y", "nothing", show=False)]
    TAKEN = ButtonDialog.TAKEN + 3

    def __init__(self, title: str, facts: Sequence[tuple[str, str]], yes: str, word: str) -> None:
        super().__init__(title, facts, yes)
        self._word = word

    def extra(self) -> Iterable[Widget]:
        """Where the word is typed."""
        yield Static(f"Type {clean(self._word)} to go on:", id="ask", markup=False)
        field = Input(id="typed", compact=True, select_on_focus=False)
        field.cursor_blink = False
        yield field

    def on_mount(self) -> None:
        """The button is off until the word is there."""
        super().on_mount()
        self.query_one("#yes", Button).disabled = True

    def on_key(self, event: events.Key) -> None:
        """Typing goes to the field, wherever the focus is."""
        field = self.query_one("#typed", Input)
        if event.is_printable and event.character and not field.has_focus:
            event.stop()
            field.focus()
            field.insert_text_at_cursor(event.character)

    @on(Input.Changed)
    def check(self, event: Input.Changed) -> None:
        """Switch the button on or off."""
        self.query_one("#yes", Button).disabled = event.value.strip() != self._word

    @on(Input.Submitted)
    def submit(self) -> None:
        """Enter in the field goes to the button, and does not press it."""
        button = self.query_one("#yes", Button)
        if not button.disabled:
            button.focus()

    def action_nothing(self) -> None:
        """A letter is text here."""


class TextDialog(Dialog[None]):
    """A long text to read, and to copy."""

    BINDINGS = [Binding("q,enter", "cancel", show=False), Binding("y", "copy", show=False)]

    def __init__(self, title: str, text: str) -> None:
        super().__init__(title)
        self._text = text

    def content(self) -> Iterable[Widget]:
        """The text."""
        yield Picker(id="text")

    def lay_out(self) -> None:
        """Wrap the text anew."""
        lines = wrap(self._text, self.inner_width)
        picker = self.query_one(Picker)
        picker.styles.height = min(len(lines), max(3, self.app.size.height - 6))
        picker.show(range(len(lines)), lambda index: ((lines[index], "text"),))

    def on_mount(self) -> None:
        """Say how to take it along."""
        self.query_one("#box").border_subtitle = "y copy  esc close"

    def tell(self, text: str) -> None:
        """Show another text."""
        self._text = text
        self.lay_out()

    def action_copy(self) -> None:
        """Hand all of it to the clipboard."""
        cast("SupervisorApp", self.app).copy(self._text)

    @on(Picker.Opened)
    def read(self) -> None:
        """Enter closes it."""
        self.dismiss(None)


class MenuItem(NamedTuple):
    """A line of a menu."""

    id: str
    key: str
    label: str
    note: str
    off: str = ""
    """Why it cannot be chosen."""


class Menu(Dialog[str]):
    """A list to choose from by letter or by moving; answers with the id of an item.

    The items are made anew while it is open: what can be done may change.
    """

    def __init__(self, title: str, make: Callable[[], Sequence[MenuItem]]) -> None:
        super().__init__(title)
        self._make = make
        self._items: dict[str, MenuItem] = {}

    def content(self) -> Iterable[Widget]:
        """One line per item."""
        yield Picker(id="menu")

    def on_mount(self) -> None:
        """A letter may be typed ahead of the first frame."""
        self.tick()

    def lay_out(self) -> None:
        """As many lines as there is room for."""
        self.tick()
        self.query_one(Picker).styles.height = min(len(self._items), max(3, self.app.size.height - 6))

    def tick(self) -> None:
        """Show what can be done now."""
        items = list(self._make())
        self._items = {item.id: item for item in items}
        room = max((width_of(item.label) for item in items), default=0)
        self.query_one(Picker).show([item.id for item in items], lambda index: self._row(items[index], room))

    def _row(self, item: MenuItem, room: int) -> Row:
        text = fit(item.off or item.note, max(0, self.inner_width - room - 6), self.more)
        look = ("off", "off", "off") if item.off else ("key", "title", "dim")
        return ((f" {item.key or ' '} ", look[0]), (fit(item.label, room) + "  ", look[1]), (text, look[2]))

    def on_key(self, event: events.Key) -> None:
        """A letter chooses at once; the next dialog asks."""
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
