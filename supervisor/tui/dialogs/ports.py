"""Which port of a node is to be forwarded, and which ones are.

In: a node, the forwarded ports. Out: two ports; a copied address.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from textual import on
from textual.binding import Binding
from textual.widgets import Input, Static

from supervisor.tui.dialogs.base import Dialog
from supervisor.tui.rows.spans import wrap
from supervisor.tui.shell import shell_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from textual.widget import Widget

    from supervisor.ssh.forward import Forward

TENSORBOARD: Final = 6006
LAST_PORT: Final = 65535
ALLOWED: Final = "[0-9:]*"
WRONG: Final = f"a port is a number from 1 to {LAST_PORT}: 6006, or 16006:6006"


class Ports(NamedTuple):
    """A port of this machine that is to lead to one of a node."""

    here: int | None
    """The port on this machine; None: one of the same number, otherwise any free one."""
    node: int


def read_ports(text: str) -> Ports:
    """Read `PORT` or `LOCAL:REMOTE`; raises ValueError."""
    here, colon, node = text.rpartition(":")
    ports = Ports(int(here) if colon else None, int(node))
    if not all(0 < port <= LAST_PORT for port in ports if port is not None):
        raise ValueError(text)
    return ports


class PortField(Input):
    """Takes digits and colons; other characters are keys of the dialog."""

    def check_consume_key(self, key: str, character: str | None) -> bool:
        """Tell whether the field takes a key."""
        return super().check_consume_key(key, character) and bool(re.fullmatch(ALLOWED, character or ""))


class PortDialog(Dialog[Ports]):
    """Asks for a port."""

    BINDINGS = [Binding("y", "copy", show=False, priority=True)]

    def __init__(self, node: str, forwards: Sequence[Forward]) -> None:
        super().__init__(f"forward a port of {node}")
        # The newest one is the one to copy.
        self._forwards = [*reversed(forwards)]

    def content(self) -> Iterable[Widget]:
        """Yield the forwarded ports, and a field."""
        yield Static(id="facts", markup=False)
        yield Static(id="ask", markup=False)
        field = PortField(str(TENSORBOARD), id="typed", compact=True, restrict=ALLOWED, max_length=11)
        field.cursor_blink = False
        yield field

    def on_mount(self) -> None:
        """Show the keys."""
        ends, copies = ("opens or ends it", "  y copies the newest") if self._forwards else ("opens it", "")
        self.query_one("#box").border_subtitle = f"enter {ends}{copies}  esc closes"

    def lay_out(self) -> None:
        lines = [f"{one.url} leads to port {one.port} of {one.node}" for one in self._forwards]
        rows = max(1, self.app.size.height - 8)
        if len(lines) > rows:
            lines = [*lines[: rows - 1], self.more]
        facts = self.query_one("#facts", Static)
        facts.display = bool(lines)
        facts.update("\n".join(part for line in lines for part in wrap(line, self.inner_width)))
        ask = "Port on the node, or LOCAL:REMOTE. TensorBoard has 6006, Jupyter 8888."
        self._say("\n".join(wrap(ask, self.inner_width)))

    def _say(self, text: str) -> None:
        asked = self.query_one("#ask", Static)
        asked.styles.margin = (int(bool(self._forwards)), 0, 0, 0)
        asked.styles.height = text.count("\n") + 1
        asked.update(text)

    @on(Input.Submitted)
    def submit(self, event: Input.Submitted) -> None:
        """Answer, unless it is no port."""
        try:
            self.dismiss(read_ports(event.value))
        except ValueError:
            self._say("\n".join(wrap(WRONG, self.inner_width)))

    def action_copy(self) -> None:
        """Copy the address of the newest forwarded port."""
        if self._forwards:
            shell_of(self.app).copy(self._forwards[0].url)
