"""What a line proves: each line that matters is a claim of an author about a subject.

In: nothing. Out: Claim, the kinds of claims, their order. docs/failures.md says what each kind proves.

**Only a claim to have failed can name its author. Who reports a peer, waited for one or was stopped is not the cause;
the end of a process proves when it was seen, and nothing about the cause.**
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.text import shapes

if TYPE_CHECKING:
    from remote_agent.diagnose.hang.watchdogs import QueuedWait
    from remote_agent.diagnose.incidents import EvidenceLine
    from remote_agent.diagnose.rosters import Roster

# The kinds, as `diagnose --why` shows them.
FAILED = "failed by itself"
LOST = "saw a peer fail or not answer"
WAITED = "gave up waiting"
TOLD = "was told to end"
STOPPED = "was stopped by supervisor"
ENDED = "ended, it is not said why"
DONE = "is done or still running"
# These fail because of others.
OF_OTHERS = (LOST, WAITED, TOLD)
# What a claim says of its subjects, where these are others than its author: they FAILED, or
DIFFER, AWAITED = "are not like the author", "did not answer the author"
# or all others are compared with the one, so that the author differs, unless all others do.
BASE = "is what the author should be like"

# What schedulers, kernels and their like say of a job.
OF_SCHEDULERS = ("signal_preempted", "node_lost", "host_oom_kill")

# A headline has at most this length where a place follows: a summary must not lose the place.
_SHORT = 170
# The first of two claims with coarse timestamps is known if the other order is less likely than this.
_DOUBT = 0.05
_SAMPLES = 16


class Shown(NamedTuple):
    """What a text shows besides its failure, whichever rank wrote it; numbers of lines count from 0."""

    closed: tuple[int, int] | None = None
    """The local rank that lost a connection, and the one that closed it."""
    hosts: Sequence[tuple[int, str, str]] = ()
    """The line of each connection that was lost, its host and port."""
    wait: QueuedWait | None = None
    """What its watchdog says, of no rank yet."""
    aside: str = ""
    """What ended a thread, a task or a child of it, where the process itself went on."""
    address: str = ""
    """Where it looked for the store, and found none."""
    roster: Roster | None = None
    """Whom it lists as there, or as missing."""
    work: str = ""
    """Its last line, if that is about work that is not done: copying, saving, compiling."""
    row: tuple[str, str] | None = None
    """The time and the code of its row in a launcher's table."""
    text: str = ""
    """The text itself, for what few verdicts ask."""


_NOTHING = Shown()


# Two claims are never the same, however alike: comparing all fields of thousands would take seconds.
@dataclasses.dataclass(frozen=True, eq=False)
class Claim:
    """What one author says, of itself or of others; rank None: a launcher, a scheduler, a kernel, or one of k ranks."""

    rank: int | None
    node: str | None
    t_ns: int | None
    kind: str
    category: str
    headline: str
    """What happened, for the summary, without the rank."""
    place: str = ""
    hint: str = ""
    fingerprint: str = ""
    """Equal for the same failure on another rank or in another generation."""
    traceback: str | None = None
    evidence: tuple[EvidenceLine, ...] = ()
    exit_code: int | None = None
    exit_signal: str | None = None
    others: tuple[int, ...] = ()
    """The ranks that it speaks of; empty: itself."""
    says: str = ""
    """What it says of them: FAILED, DIFFER, AWAITED or BASE."""
    hosts: tuple[str, ...] = ()
    """The host of each connection that was lost, as the text names it."""
    uncertainty_ns: int = 0
    """How much later than t_ns it may have been: the timestamp has whole seconds."""
    wait: QueuedWait | None = None
    """What its watchdog says."""
    shown: Shown = _NOTHING
    """What its author's text shows besides the failure."""
    listed: EvidenceLine | None = None
    """The line of its roster."""
    report: str = ""
    """The first line of what a node reports, not its ranks."""
    later: Claim | None = None
    """Its last exception, if that one is a consequence: the rank may have survived this claim."""
    is_want: bool = False
    """True for an exception that says only that something from elsewhere did not come: other failures explain it."""
    is_row: bool = False
    """True where a launcher, a scheduler or a shell says of the process how it ended."""
    times: int = 1
    """How often a text of no rank has it: as often as processes failed alike."""
    proven: bool = False
    """True when the rank's own traceback, the kernel or the exit code shows it."""

    def of(self, says: str) -> tuple[int, ...]:
        """Return the ranks of which it says this."""
        return self.others if self.says == says else ()

    @property
    def likely_ns(self) -> int | None:
        """The most likely time."""
        return None if self.t_ns is None else self.t_ns + self.uncertainty_ns // 2

    @property
    def ended(self) -> bool:
        """Whether the exit of the process was observed."""
        return self.exit_code is not None or self.exit_signal is not None

    @property
    def text(self) -> str:
        """Return headline and place."""
        if not self.place:
            return self.headline
        short = self.headline if len(self.headline) <= _SHORT else f"{self.headline[: _SHORT - 1]}…"
        return f"{short} in {self.place}"

    @functools.cached_property
    def shape(self) -> str:
        """Return the text without its incidental parts."""
        return shapes.shape(self.text)


def in_order(claims: Iterable[Claim]) -> list[Claim]:
    """Return the claims by time; those without a time by their lines if all are of one file, otherwise by rank.

    If no times are known, the ranks' own text comes before a launcher's, but not before a scheduler's.
    """
    every = list(claims)
    files = {line.file for each in every if each.likely_ns is None for line in each.evidence[:1]}

    def order(claim: Claim) -> tuple[bool, int, bool, int, int]:
        line = claim.evidence[0].line if claim.evidence and len(files) == 1 else None
        rank = -1 if claim.rank is None else claim.rank
        of_launcher = claim.rank is None and (
            claim.is_row or claim.kind != FAILED or claim.category not in OF_SCHEDULERS
        )
        return claim.likely_ns is None, claim.likely_ns or 0, of_launcher, line or 0, rank

    return sorted(every, key=order)


def is_likely_first(first: Claim, other: Claim) -> bool:
    """Return whether one very likely came first, given the uncertainty of their times; False without times."""
    if first.t_ns is None or other.t_ns is None:
        return False
    # Every time within the uncertainty is equally likely.
    samples = (first.t_ns + first.uncertainty_ns * (2 * number + 1) // (2 * _SAMPLES) for number in range(_SAMPLES))
    earlier = [min(1.0, max(0.0, (t_ns - other.t_ns) / max(1, other.uncertainty_ns))) for t_ns in samples]
    return sum(earlier) / _SAMPLES < _DOUBT
