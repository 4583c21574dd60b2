"""Who did not come to a collective, as far as the texts of the watchdogs tell.

In: the texts of the ranks. Out: the contract's `missing` object and the ranks it names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from remote_agent.diagnose.model import Context, RankEvidence

_WORK = re.compile(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)")
_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (-?\d+)")


class Wait(NamedTuple):
    """A rank whose watchdog gave up."""

    rank: int
    seq: int
    collective: str
    enqueued: int | None


def find_waits(evidence: Sequence[RankEvidence]) -> list[Wait]:
    """Return the collectives that ranks say they waited for."""
    waits = []
    for each in evidence:
        work = _WORK.search(each.tail)
        if work is not None and each.rank is not None:
            enqueued = _ENQUEUED.search(each.tail)
            last = int(enqueued[1]) if enqueued is not None else None
            waits.append(Wait(each.rank, int(work[1]), work[2], last))
    return waits


def find_missing(evidence: Sequence[RankEvidence], context: Context) -> dict[str, Any] | None:
    """Return who did not come: {collective, seq, waiting, missing, stacks}; None when the texts do not tell."""
    waits = find_waits(evidence)
    if not waits:
        return None
    waiting = {wait.rank for wait in waits}
    world = {rank for ranks in context.ranks_per_node.values() for rank in ranks}
    world |= set(range(context.world_size or 0))
    away = {rank for node in context.lost_nodes for rank in context.ranks_of(node)}
    missing = world - waiting - away
    if not missing:
        missing = _furthest_behind(waits)
    # Where only the texts tell which ranks there were, one of them is no group.
    if context.world_size is None and len(waiting) < 2:
        return None
    # One late watchdog in a large group proves nothing: those who wait must be the many.
    if not missing or len(missing) > max(1, len(waiting) // 2) or len(missing) >= len(world or waiting):
        return None
    first = min(waits, key=lambda wait: wait.seq)
    return {
        "collective": first.collective,
        "seq": first.seq,
        "waiting": sorted(waiting - missing),
        "missing": sorted(missing),
        "stacks": {},
    }


def _furthest_behind(waits: list[Wait]) -> set[int]:
    """Return the rank that queued fewer collectives than all others, if all say how many."""
    numbers = [wait.enqueued for wait in waits if wait.enqueued is not None]
    if len(numbers) < len(waits) or len(waits) < 2:
        return set()
    lowest = min(numbers)
    behind = {wait.rank for wait in waits if wait.enqueued == lowest}
    return behind if len(behind) == 1 else set()


_ASTRAY = re.compile(r"client socket has failed to connect to any network address of \(([^()]{1,200})\)")
_IN_STORE = re.compile(r"wait timeout after \d+ms")


def find_astray(evidence: Sequence[RankEvidence]) -> tuple[int, str] | None:
    """Return the only rank that reached no store, and where it looked, while two or more others waited in one."""
    astray = {
        each.rank: found[1] for each in evidence if each.rank is not None and (found := _ASTRAY.search(each.tail))
    }
    waited = [each.rank for each in evidence if each.rank not in astray and _IN_STORE.search(each.tail)]
    return astray.popitem() if len(astray) == 1 and len(waited) > 1 else None
