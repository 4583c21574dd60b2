"""The progress of every rank in the last minutes, and bars of it.

In: snapshots. Out: values in order, a string of bars.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from supervisor.wording import usage

if TYPE_CHECKING:
    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import Snapshot
    from supervisor.tui.source import Json

# Together two and a half minutes.
EVERY_S: Final = 2.5
KEPT: Final = 60
NAMES: Final = ("loss", "rate", "pace")
Values = Sequence["float | None"]


class RankHistory:
    """The latest progress of each rank of the present generation."""

    def __init__(self) -> None:
        self._generation: int | None = None
        self._taken = float("-inf")
        self._ranks: dict[int, deque[Values]] = {}
        """By rank: the values of NAMES, oldest first."""

    def take(self, snapshot: Snapshot, now: float) -> None:
        """Add a newer state, unless the last one was added less than EVERY_S ago."""
        if snapshot.generation != self._generation:
            self._generation = snapshot.generation
            self._ranks.clear()
        if snapshot.stale or snapshot.ended or now - self._taken < EVERY_S:
            return
        self._taken = now
        for rank in snapshot.ranks:
            kept = self._ranks.get(rank.rank)
            if kept is None:
                kept = self._ranks[rank.rank] = deque(maxlen=KEPT)
            kept.append(_now(rank.progress))

    def of(self, rank: int) -> dict[str, Values]:
        """Return the values of a rank by name, oldest first; without names that have no value."""
        columns = zip(NAMES, zip(*self._ranks.get(rank, ()), strict=True), strict=False)
        return {name: values for name, values in columns if any(value is not None for value in values)}


def _now(progress: Json) -> Values:
    pace = usage.number(progress.get("steps_s"))
    return usage.number(progress.get("loss")), usage.number(progress.get("rate")), 1 / pace if pace else None


def spark(values: Values, width: int, glyphs: Glyphs) -> str:
    """Return the newest values as bars between their lowest and highest value; a space for an unknown value."""
    shown = values[-width:] if width > 0 else ()
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    return "".join(" " if value is None else glyphs.level((value - low) / span if span else 0.5) for value in shown)
