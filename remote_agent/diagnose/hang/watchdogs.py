"""What the watchdogs of NCCL's process groups say: in which collective each rank gave up, and who never reached it.

In: the text of each rank. Out: its QueuedWait; the ranks that are missing in a collective, or that called another one.

**Sequence numbers count within one process group: numbers of different groups, or far apart, are never compared. A rank
whose own watchdog gave up waited, too: it is not missing.**
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from remote_agent.diagnose.incidents import missing_ranks
from remote_agent.text.names import read_number

if TYPE_CHECKING:
    from remote_agent.wire.documents import MissingRanks

T = TypeVar("T")
# The GUID of a group is the same in all processes.
_GROUP = r"\[(?:PG (?:[^\]\n]*GUID )?(?P<group>[^\]\n]*?) ?)?Rank \d+\]"
_WORK = re.compile(
    rf"(?:{_GROUP}[^\n]{{0,80}}?)?WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+)"
    r"(?:, NumelIn=(?P<size>\d+), NumelOut=(?P<out>\d+))?"
)
_STATUS = re.compile(rf"{_GROUP}[^\n]*last enqueued (?:NCCL )?work: (?P<number>\d+)", re.IGNORECASE)
_GAVE_UP = re.compile(
    r"Watchdog caught collective operation timeout|detected by watchdog at work|Some NCCL operations have failed"
    r"|taking the entire process down"
)
# Waiting ranks of one group are within a few collectives of each other: numbers far apart are of different groups.
_NEAR = 16
# These have numbers of their own between two ranks each.
_PAIRWISE = ("SEND", "RECV")
# Each rank may have its own size in these.
_UNEVEN = (*_PAIRWISE, "ALLTOALL", "ALLTOALL_BASE", "GATHER", "SCATTER", "COALESCED")


class QueuedWait(NamedTuple):
    """What a rank's watchdog says. group: None where the text does not name it; operation "": it gave up nowhere."""

    rank: int
    gave_up: bool
    queued: Mapping[str | None, int]
    """The last collective of each group that the rank had queued."""
    group: str | None = None
    number: int = 0
    operation: str = ""
    size: str | None = None

    @property
    def last(self) -> int:
        """The last collective of its group that the rank had queued, as it says; else the one in which it waits."""
        return self.queued.get(self.group, self.number)


class Mismatch(NamedTuple):
    """Ranks that called another collective as the same number than most; odd is empty where no majority shows which."""

    number: int
    calls: Mapping[int, str]
    odd: Sequence[int]


def gave_up(text: str) -> bool:
    """Return whether the watchdog of the rank that wrote this has given up."""
    return _GAVE_UP.search(text) is not None


def read_wait(rank: int, text: str) -> QueuedWait | None:
    """Return what the watchdog of a rank says; None: nothing."""
    work, ended = _WORK.search(text), gave_up(text)
    states = list(_STATUS.finditer(text)) if work is not None or "nqueued" in text else []
    queued: dict[str | None, int] = {}
    for state in states:
        queued.setdefault(state["group"], read_number(state["number"]))
    if work is None:
        return QueuedWait(rank, ended, queued) if queued or ended else None
    group = work["group"] if work["group"] is not None else states[0]["group"] if states else None
    if group not in queued and None in queued:
        queued[group] = queued[None]
    size = work["size"] if work["size"] == work["out"] else f"{work['size']} to {work['out']}"
    return QueuedWait(rank, ended, queued, group, read_number(work["number"]), work["operation"], size)


def find_missing(
    every: Sequence[QueuedWait], world: Collection[int], away: Collection[int], *, all_known: bool
) -> MissingRanks | None:
    """Return the ranks that never reached the collective in which most waited; None if the texts do not show them.

    `world`: the ranks of the job, all of them if `all_known`; `away`: those that are out of reach.
    """
    waits = [wait for wait in every if wait.operation]
    group = _most_common([wait.group for wait in waits])
    here = [wait for wait in waits if wait.group == group and wait.operation not in _PAIRWISE]
    elsewhere = {wait.rank for wait in waits} - {wait.rank for wait in here}
    if not here:
        return None
    queued = {wait.rank: wait.queued[group] for wait in every if group is not None and group in wait.queued}
    queued |= {wait.rank: wait.last for wait in here}
    number, operation = Counter((wait.number, wait.operation) for wait in here).most_common(1)[0][0]
    behind = {rank for rank, last in queued.items() if number - _NEAR <= last < number}
    waiting = {wait.rank for wait in here if wait.number >= number} | {
        rank for rank, last in queued.items() if last >= number
    }
    ended = {wait.rank for wait in every if wait.gave_up}
    waiting |= ended - behind - elsewhere
    missing = behind or set(world) - waiting - elsewhere - set(away)
    # If only the texts show which ranks there were, a single one is not a group.
    if not all_known and len(waiting) < 2:
        return None
    # One late watchdog in a large group proves nothing: most ranks must be waiting.
    if not missing or len(missing) > max(1, len(waiting) // 2) or len(missing) >= len(world or waiting):
        return None
    return missing_ranks(operation, number, waiting - missing, missing)


def find_mismatch(every: Sequence[QueuedWait]) -> Mismatch | None:
    """Return the ranks of one group that wait in different collectives, or sizes of one, under the same number."""
    waits = [wait for wait in every if wait.operation and wait.operation not in _PAIRWISE]
    place = _most_common([(wait.group, wait.number) for wait in waits])
    same = [wait for wait in waits if (wait.group, wait.number) == place]
    sized = all(wait.size is not None for wait in same)
    calls = {wait.rank: _call(wait) if sized else wait.operation for wait in same}
    counts = Counter(calls.values())
    if len(counts) < 2:
        return None
    most, count = counts.most_common(1)[0]
    odd = sorted(rank for rank, call in calls.items() if call != most)
    return Mismatch(place[1] if place else 0, calls, odd if 2 * count > len(calls) else [])


def _call(wait: QueuedWait) -> str:
    """Return the operation, with its size where that must be the same on all ranks."""
    return wait.operation if wait.operation in _UNEVEN else f"{wait.operation} of {wait.size} elements"


def _most_common(values: Sequence[T]) -> T | None:
    return Counter(values).most_common(1)[0][0] if values else None
