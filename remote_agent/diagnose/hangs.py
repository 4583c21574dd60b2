"""Who did not come to a collective, as far as the texts of the watchdogs tell.

In: the texts of the ranks. Out: the contract's `missing` object and the ranks it names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from remote_agent.diagnose.model import Context, RankEvidence

_WORK = re.compile(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)")
# Of a group the GUID is the same in all processes.
_STATUS = re.compile(
    r"\[(?:PG (?:[^\]\n]*GUID )?(?P<group>[^\]\n]*?) ?)?Rank \d+\][^\n]*last enqueued (?:NCCL )?work: (?P<number>\d+)",
    re.IGNORECASE,
)
# Ranks of one group that wait do so within a few collectives: numbers far apart are of different groups.
_NEAR = 16


class Wait(NamedTuple):
    """A rank whose watchdog gave up."""

    rank: int
    seq: int
    collective: str


def find_waits(evidence: Sequence[RankEvidence]) -> list[Wait]:
    """Return the collectives that ranks say they waited for."""
    found = ((each.rank, _WORK.search(each.tail)) for each in evidence)
    return [Wait(rank, int(work[1]), work[2]) for rank, work in found if rank is not None and work is not None]


def find_missing(evidence: Sequence[RankEvidence], context: Context) -> dict[str, Any] | None:
    """Return who did not come: {collective, seq, waiting, missing, stacks}; None when the texts do not tell."""
    waits = find_waits(evidence)
    if not waits:
        return None
    queued = _queued(evidence, waits)
    seq, collective = Counter((wait.seq, wait.collective) for wait in waits).most_common(1)[0][0]
    behind = {rank for rank, number in queued.items() if seq - _NEAR <= number < seq}
    waiting = {wait.rank for wait in waits} | {rank for rank, number in queued.items() if number >= seq}
    world = {rank for ranks in context.ranks_per_node.values() for rank in ranks}
    world |= set(range(context.world_size or 0))
    away = {rank for node in context.lost_nodes for rank in context.ranks_of(node)}
    missing = behind or world - waiting - away or _furthest_behind(waits, queued)
    # Where only the texts tell which ranks there were, one of them is no group.
    if context.world_size is None and len(waiting) < 2:
        return None
    # One late watchdog in a large group proves nothing: those who wait must be the many.
    if not missing or len(missing) > max(1, len(waiting) // 2) or len(missing) >= len(world or waiting):
        return None
    return {
        "collective": collective,
        "seq": seq,
        "waiting": sorted(waiting - missing),
        "missing": sorted(missing),
        "stacks": {},
    }


def _queued(evidence: Sequence[RankEvidence], waits: list[Wait]) -> dict[int, int]:
    """Return the last collective that each rank queued in the group that waits; at least the one it waits for."""
    told = {each.rank: found for each in evidence if each.rank is not None and (found := _STATUS.search(each.tail))}
    groups = Counter(told[wait.rank]["group"] for wait in waits if wait.rank in told)
    group = groups.most_common(1)[0][0] if groups else None
    queued = {rank: int(found["number"]) for rank, found in told.items() if groups and found["group"] == group}
    return {**{wait.rank: wait.seq for wait in waits if wait.rank not in told}, **queued}


def _furthest_behind(waits: list[Wait], queued: dict[int, int]) -> set[int]:
    """Return the rank that queued fewer collectives than all others that wait."""
    numbers = [queued.get(wait.rank, wait.seq) for wait in waits]
    behind = {wait.rank for wait, number in zip(waits, numbers) if number == min(numbers)}
    return behind if len(behind) == 1 and len(waits) > 1 else set()


_ASTRAY = re.compile(r"client socket has failed to connect to any network address of \(([^()]{1,200})\)")
_IN_STORE = re.compile(r"wait timeout after \d+ms")


def find_astray(evidence: Sequence[RankEvidence]) -> tuple[int, str] | None:
    """Return the only rank that reached no store, and where it looked, while two or more others waited in one."""
    astray = {
        each.rank: found[1] for each in evidence if each.rank is not None and (found := _ASTRAY.search(each.tail))
    }
    waited = [each.rank for each in evidence if each.rank not in astray and _IN_STORE.search(each.tail)]
    return astray.popitem() if len(astray) == 1 and len(waited) > 1 else None
