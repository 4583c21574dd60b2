"""The judges of the fault matrix see what must never be, which a matrix that finds nothing cannot show."""

from __future__ import annotations

import json

import pytest

from tests.faults import invariants
from tests.faults.invariants import Awake
from tests.faults.ranks import Rank, printed

_MS = 10**6


def rank(generation: int, begin_ms: int, end_ms: int, *, pid: int = 0, node: str = "n1") -> Rank:
    """Return a process that makes a step every 25 ms, and prints in each fourth one."""
    times = [t * _MS for t in range(begin_ms, end_ms, 25)]
    made = Rank((generation, f"n1:{generation}"), 0, 1, node, pid or generation + 1, times)
    made.written = [len(printed(step, made.pid)) if step % 4 == 0 else -1 for step in range(len(times))]
    return made


def test_two_groups_at_once_are_an_overlap_and_a_machine_that_wakes_is_none() -> None:
    assert invariants.overlap_ms([rank(0, 0, 1000), rank(1, 1000, 2000), rank(2, 2500, 3000)]) == (0.0, "")
    for older in (0, 7):
        assert invariants.overlap_ms([rank(older, 0, 1525), rank(1, 1000, 2000)])[0] == 500
    other = rank(1, 500, 2000)
    other.group = (1, "n2:1")
    assert invariants.overlap_ms([rank(1, 0, 1000), other])[0] == 475, "two groups of one generation are two"
    frozen, other = rank(0, 0, 1000, pid=7), rank(1, 5000, 12000, node="n2")
    frozen.times_ns += [9000 * _MS, 9100 * _MS]
    assert invariants.overlap_ms([frozen, other], [Awake(7, 8990 * _MS)]) == (0.0, "")
    assert invariants.overlap_ms([frozen, other], [Awake(7, 7000 * _MS)])[0] == 4100


def journal(*numbers: int, kind: str = "node_ready", term: int = 1) -> bytes:
    records = ({"seq": number, "type": kind, "term": term} for number in numbers)
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.mark.parametrize(
    ("other", "wrong"),
    [
        (journal(1, 2, 3), ""), (journal(1, 2), "n2 has 2 records, n1 3; from 3 on they differ"),
        (journal(1, 2, 2), "not numbered"), (journal(1, 3, 4), "not numbered"),
        (journal(1, 2, 3, kind="other"), "from 1 on they differ"), (journal(1, 2, 3)[:-5], "no JSON"),
    ],
)  # fmt: skip
def test_journals_are_whole_and_equal(other: bytes, wrong: str) -> None:
    found = invariants.journal_violations({"n1": journal(1, 2, 3), "n2": other})
    assert bool(found) is bool(wrong)
    assert wrong in "; ".join(one.text for one in found)
