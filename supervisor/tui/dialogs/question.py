"""One question of ssh: a password, a code, a host key.

In: the question. Out: the answer; None if there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import on
from textual.widgets import Input, Static

from supervisor.tui.dialogs.base import Dialog
from supervisor.tui.rows.spans import wrap

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.widget import Widget

    from supervisor.ssh.questions import Question


class QuestionDialog(Dialog[str]):
    """Asks what ssh asks; a secret is not shown while it is typed."""

    def __init__(self, question: Question) -> None:
        super().__init__(f"ssh to {question.where}")
        self._question = question

    def content(self) -> Iterable[Widget]:
        """Yield ssh's text, and a field."""
        yield Static(id="facts", markup=False)
        field = Input(id="typed", compact=True, password=self._question.kind != "yes_no")
        field.cursor_blink = False
        yield field

    def on_mount(self) -> None:
        """Show the keys."""
        self.query_one("#box").border_subtitle = "enter answers  esc does without this host"

    def lay_out(self) -> None:
        lines = [part for line in self._question.prompt.strip().splitlines() for part in wrap(line, self.inner_width)]
        rows = max(1, self.app.size.height - 6)
        # What ssh wants to know comes last.
        self.query_one("#facts", Static).update("\n".join(lines[-rows:]))

    @on(Input.Submitted)
    def submit(self, event: Input.Submitted) -> None:
        """Answer."""
        self.dismiss(event.value)
