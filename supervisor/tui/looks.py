"""How states are shown: a glyph with a shape of its own, a word, and only then a role for the colour.

In: states of the contract, their roles. Out: glyphs, words, roles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from remote_agent.wire.events import Condition, NodeState, RankState
from supervisor.wording.status import STATE_ROLES

if TYPE_CHECKING:
    from collections.abc import Mapping


class Look(NamedTuple):
    """How one state is shown."""

    glyph: str
    ascii: str
    word: str
    role: str


def _looks(glyphs: Mapping[str, str]) -> dict[str, Look]:
    """Return how states are shown; `glyphs`: by state, in Unicode and in ASCII."""
    return {state: Look(both[0], both[1], str(state), STATE_ROLES[state]) for state, both in glyphs.items()}


RANKS: Final = _looks({
    RankState.RUNNING: "■#", RankState.STARTING: "~~", RankState.SILENT: "??",
    RankState.FAILED: "XX", RankState.KILLED: "xx", RankState.SUCCEEDED: "✓+",
})  # fmt: skip
# The rank failed as well, but only because another rank had failed before.
VICTIM: Final = Look("x", "x", "failed", "warn")
NODES: Final = _looks({
    NodeState.CONNECTING: "~~", NodeState.READY: "○o", NodeState.RUNNING: "●*", NodeState.DRAINING: "↓v",
    NodeState.REMOVED: "·.", NodeState.LOST: "XX", NodeState.FAILED: "XX", NodeState.SPARE: "○o",
})  # fmt: skip
_JOBS: Final = _looks({
    Condition.LAUNCHING: "~~", Condition.IMPORTING: "~~", Condition.RUNNING: "●*", Condition.DEGRADED: "!!",
    Condition.SLOW: "◐%",
    Condition.HUNG: "??", Condition.RESTARTING: "~~", Condition.STOPPING: "↓v",
    Condition.SUCCEEDED: "✓+", Condition.FAILED: "XX", Condition.STOPPED: "□o",
})  # fmt: skip
JOBS: Final = {state: look._replace(word=look.word.upper()) for state, look in _JOBS.items()}
UNKNOWN: Final = Look("-", "-", "unknown", "off")
NO_LINK: Final = Look("-", "-", "no link", "off")

# The worst state is first: it decides the order of tables, and the glyph of a node that has only one for its ranks.
RANK_ORDER: Final[tuple[str, ...]] = (
    *(RankState.FAILED, RankState.SILENT, RankState.STARTING),
    *(RankState.KILLED, RankState.RUNNING, RankState.SUCCEEDED),
)


class Glyphs:
    """The drawing characters of one run: Unicode, or ASCII where the terminal needs it."""

    def __init__(self, ascii: bool = False) -> None:  # noqa: A002
        self.ascii = ascii
        self.rule, self.bar, self.thumb = "-|#" if ascii else "─│┃"
        self.more = "~" if ascii else "…"
        """The mark of a cut."""
        self.dot = "-" if ascii else "·"
        """The sign between two facts of one line."""
        self.pointer, self.mark = ">+" if ascii else "▸◆"
        """The signs before the selected row, and before a marked one."""
        self.waits, self.missing, self.elsewhere = "#?." if ascii else "■?·"
        """A rank in the picture of a hang: in this collective, in none, in another one."""
        self.done = "+" if ascii else "✓"
        self.spinner = "|/-\\" if ascii else "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
        self.rising, self.falling = "^v" if ascii else "▲▼"
        """The signs behind the name of the column by which a table is sorted."""

    def of(self, look: Look) -> str:
        """Return the glyph of a state."""
        return look.ascii if self.ascii else look.glyph

    def level(self, share: float) -> str:
        """Return a bar for a share between 0 and 1."""
        levels = "0123456789" if self.ascii else "▁▂▃▄▅▆▇█"
        return levels[min(len(levels) - 1, int(min(1.0, max(0.0, share)) * len(levels)))]
