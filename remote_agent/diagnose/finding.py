"""What is known of the end of one rank, and which of two ends came first.

In: what `reading` has made of a rank's evidence. Out: its order among others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remote_agent.diagnose.model import Evidence

# Of two whose stamps are coarse one is first only if the other hardly can be.
_DOUBT = 0.05
_SPOTS = 16


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is known of one rank's end."""

    rank: int | None
    node: str | None
    t_ns: int | None
    role: str
    category: str
    headline: str
    """For the summary: what happened, without who."""
    place: str = ""
    hint: str = ""
    signature: str = ""
    """The same for the same failure on another rank or in another generation."""
    traceback: str | None = None
    evidence: tuple[Evidence, ...] = ()
    exit_code: int | None = None
    exit_signal: str | None = None
    named: tuple[int, ...] = ()
    """The ranks that this rank's text names as the ones to look at."""
    peer: int | None = None
    """The rank that this rank's text tells that they differ, or that it waits for it."""
    blur_ns: int = 0
    """So much later it may have been: its stamp is of whole seconds."""
    outlived: Finding | None = None
    """What its own last exception says, where that is others' doing: it may have lived on after what it tells."""
    proven: bool = False
    """True when the rank's own traceback, the kernel, or the wait status shows it."""

    @property
    def likely_ns(self) -> int | None:
        """When it most likely was."""
        return None if self.t_ns is None else self.t_ns + self.blur_ns // 2

    @property
    def ended(self) -> bool:
        """Whether somebody saw how the process ended."""
        return self.exit_code is not None or self.exit_signal is not None

    @property
    def text(self) -> str:
        """Return headline and place."""
        return f"{self.headline} in {self.place}" if self.place else self.headline


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return them by time; those without one by their places in the one text that they are of, else by rank.

    Where no times are known, the ranks' own words come before a launcher's.
    """
    every = list(findings)
    texts = {line.file for each in every if each.likely_ns is None for line in each.evidence[:1]}

    def order(finding: Finding) -> tuple[bool, int, bool, int, int]:
        place = finding.evidence[0].line if finding.evidence and len(texts) == 1 else None
        rank = -1 if finding.rank is None else finding.rank
        return finding.likely_ns is None, finding.likely_ns or 0, finding.rank is None, place or 0, rank

    return sorted(every, key=order)


def is_likely_first(first: Finding, other: Finding) -> bool:
    """Whether one came before the other beyond doubt, as far as their stamps are known; False without stamps."""
    if first.t_ns is None or other.t_ns is None:
        return False
    # Anywhere within its blur each is equally likely.
    spots = (first.t_ns + first.blur_ns * (2 * number + 1) // (2 * _SPOTS) for number in range(_SPOTS))
    earlier = [min(1.0, max(0.0, (spot - other.t_ns) / max(1, other.blur_ns))) for spot in spots]
    return sum(earlier) / _SPOTS < _DOUBT
