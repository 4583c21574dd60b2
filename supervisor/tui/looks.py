"""How states are shown: a glyph with a shape of its own, a word, and only then a role for the colour.

In: states of the contract. Out: glyphs, words, roles.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from remote_agent.wire.events import Condition


class Look(NamedTuple):
    """How one state is shown."""

    glyph: str
    ascii: str
    word: str
    role: str


RANKS: Final[dict[str, Look]] = {
    "starting": Look("~", "~", "starting", "start"),
    "running": Look("■", "#", "running", "ok"),
    "silent": Look("?", "?", "silent", "hung"),
    "succeeded": Look("✓", "+", "succeeded", "done"),
    "failed": Look("X", "X", "failed", "bad"),
    "killed": Look("x", "x", "killed", "off"),
}
# Failed as well, and only because another rank had failed before.
VICTIM: Final = Look("x", "x", "failed", "warn")
NODES: Final[dict[str, Look]] = {
    "connecting": Look("~", "~", "connecting", "start"),
    "ready": Look("○", "o", "ready", "start"),
    "running": Look("●", "*", "running", "ok"),
    "draining": Look("↓", "v", "draining", "warn"),
    "removed": Look("·", ".", "removed", "off"),
    "lost": Look("X", "X", "lost", "bad"),
    "failed": Look("X", "X", "failed", "bad"),
    "spare": Look("○", "o", "spare", "off"),
}
JOBS: Final[dict[str, Look]] = {
    Condition.LAUNCHING: Look("~", "~", "LAUNCHING", "start"),
    Condition.IMPORTING: Look("~", "~", "IMPORTING", "start"),
    Condition.RUNNING: Look("●", "*", "RUNNING", "ok"),
    Condition.DEGRADED: Look("!", "!", "DEGRADED", "warn"),
    Condition.HUNG: Look("?", "?", "HUNG", "hung"),
    Condition.RESTARTING: Look("~", "~", "RESTARTING", "warn"),
    Condition.STOPPING: Look("↓", "v", "STOPPING", "warn"),
    Condition.SUCCEEDED: Look("✓", "+", "SUCCEEDED", "done"),
    Condition.FAILED: Look("X", "X", "FAILED", "bad"),
    Condition.STOPPED: Look("□", "o", "STOPPED", "off"),
}
UNKNOWN: Final = Look("-", "-", "unknown", "off")
NO_LINK: Final = Look("-", "-", "no link", "off")

# Worst first: the order of tables, and which rank represents its node where there is one glyph per node.
RANK_ORDER: Final = ("failed", "silent", "starting", "killed", "running", "succeeded")


class Glyphs:
    """The drawing characters of one run: Unicode, or ASCII where the terminal needs it."""

    def __init__(self, ascii: bool = False) -> None:  # noqa: A002
        self.ascii = ascii
        self.rule, self.bar, self.thumb = "-|#" if ascii else "─│┃"
        self.more = "~" if ascii else "…"
        """The mark of a cut."""
        self.dot = "-" if ascii else "·"
        """Between two facts of one line."""
        self.pointer, self.mark = ">+" if ascii else "▸◆"
        """Before the selected row, and before a marked one."""
        self.waits, self.missing, self.elsewhere = "#?." if ascii else "■?·"
        """A rank in the picture of a hang: in this collective, in none, in another one."""
        self.done = "+" if ascii else "✓"
        self.spinner = "|/-\\" if ascii else "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
        self.rising, self.falling = "^v" if ascii else "▲▼"
        """Behind the name of the column by which a table is sorted."""

    def of(self, look: Look) -> str:
        """The glyph of a state."""
        return look.ascii if self.ascii else look.glyph

    def level(self, share: float) -> str:
        """A bar for a share between 0 and 1."""
        levels = "0123456789" if self.ascii else "▁▂▃▄▅▆▇█"
        return levels[min(len(levels) - 1, int(min(1.0, max(0.0, share)) * len(levels)))]
