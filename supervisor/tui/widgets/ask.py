"""The input line below a view: a pattern, a time, a file name.

In: a prompt, and a function that checks the answer. Out: the answer; an error is shown beside it, and the line stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import on
from textual.binding import Binding
from textual.containers import Horizontal
from textual.widgets import Input, Static

from supervisor.tui.rows.spans import clean

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import ComposeResult
    from textual.widget import Widget


class Ask(Horizontal):
    """One line, visible only while it asks."""

    BINDINGS = [Binding("escape", "close", show=False)]

    def __init__(self, back_to: Callable[[], Widget], *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.display = False
        self._back_to = back_to
        self._take: Callable[[str], str] = lambda text: ""
        self._follow: Callable[[str], None] = lambda text: None

    def compose(self) -> ComposeResult:
        """Prompt, input, error."""
        yield Static(id="asked", markup=False)
        field = Input(id="answer", compact=True)
        field.cursor_blink = False
        yield field
        yield Static(id="wrong", markup=False)

    def ask(
        self,
        name: str,
        hint: str,
        take: Callable[[str], str] = lambda text: "",
        text: str = "",
        *,
        follow: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Ask; `take` gets each answer and returns an error, or ""; `follow` the text as it is typed, and "" on esc."""
        self._take, self._follow = take, follow
        asked = self.query_one("#asked", Static)
        asked.update(name)
        # A space follows a word, but not a sign.
        asked.styles.padding = (0, int(name[-1:].isalpha()), 0, 1)
        self._say("")
        field = self.query_one(Input)
        field.placeholder = hint
        field.value = text
        field.cursor_position = len(text)
        self.display = True
        field.focus()

    def action_close(self) -> None:
        """Close it without an answer."""
        self._follow("")
        self._close()

    def _close(self) -> None:
        self.display = False
        self._back_to().focus()

    def _say(self, wrong: str) -> None:
        if wrong:
            # A notice would cover it.
            self.app.clear_notifications()
        self.query_one("#wrong", Static).update(clean(wrong))

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        self._say("")
        self._follow(event.value)

    @on(Input.Submitted)
    def _answered(self, event: Input.Submitted) -> None:
        event.stop()
        if not self.display:
            return
        wrong = self._take(event.value) if event.value else ""
        self._say(wrong)
        if not wrong:
            self._close()
