"""The judges of the fault matrix see each violation, and nothing where all is well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults import invariants
from tests.faults.commands import Answer
from tests.faults.invariants import Awake, Document
from tests.faults.matrix import BY_NAME, FAULTS
from tests.faults.ranks import Rank, Stamps, printed
from tests.faults.row import drawn, rows

_MS = 10**6
_S = 1000 * _MS


def rank(generation: int, begin_ms: int, end_ms: int, *, pid: int = 0, node: str = "n1") -> Rank:
    """Return a process that makes a step every 25 ms, and prints in each fourth one."""
    times = [t * _MS for t in range(begin_ms, end_ms, 25)]
    made = Rank((generation, f"n1:{generation}"), 0, 1, node, pid or generation + 1, times)
    made.written = [len(printed(step, made.pid)) if step % 4 == 0 else -1 for step in range(len(times))]
    return made


def test_groups_one_after_the_other_do_not_overlap() -> None:
    assert invariants.overlap_ms([rank(0, 0, 1000), rank(1, 1000, 2000), rank(2, 2500, 3000)]) == (0.0, "")


@pytest.mark.parametrize("older", [0, 7])
def test_an_overlap_is_measured_whatever_the_generations_are_called(older: int) -> None:
    overlap, text = invariants.overlap_ms([rank(older, 0, 1525), rank(1, 1000, 2000)])
    assert overlap == 500
    assert "stepped 500 ms into" in text


def test_two_groups_of_one_generation_are_two() -> None:
    other = rank(1, 500, 2000)
    other.group = (1, "n2:1")
    assert invariants.overlap_ms([rank(1, 0, 1000), other])[0] == 475


def test_a_machine_that_wakes_may_finish_its_ranks() -> None:
    frozen = rank(0, 0, 1000, pid=7)
    frozen.times_ns += [9000 * _MS, 9100 * _MS]
    other = rank(1, 5000, 12000, node="n2")
    assert invariants.overlap_ms([frozen, other])[0] == 4100
    assert invariants.overlap_ms([frozen, other], [Awake(7, 8990 * _MS)]) == (0.0, "")
    assert invariants.overlap_ms([frozen, other], [Awake(7, 7000 * _MS)])[0] == 4100


def test_the_longest_pause() -> None:
    assert invariants.pause_s([rank(0, 0, 1000), rank(1, 4000, 5000)], 500 * _MS, 5000 * _MS) == pytest.approx(3.025)
    assert invariants.pause_s([], 0, 2 * _S) == 2.0


@pytest.mark.parametrize(
    ("spoil", "wrong"),
    [
        (lambda data: data, False),
        (lambda data: data + printed(4, 1), False),  # printed, and killed before it was noted
        (lambda data: data[:-1], True),
        (lambda data: data[1:], True),
        (lambda data: data + data[:10], True),
        (lambda data: data.replace(b"step=0", b"step=9"), True),
        (lambda data: b"", True),
    ],
)
def test_each_byte_of_a_log_counts(tmp_path: Path, spoil: Any, wrong: bool) -> None:
    noted = rank(0, 0, 100)
    path = tmp_path / "stdout.log"
    path.write_bytes(spoil(noted.log()))
    assert bool(invariants.log_violations(noted, path)) is wrong


def test_what_a_full_disk_did_not_take_is_not_missed(tmp_path: Path) -> None:
    noted = rank(0, 0, 300)
    noted.written[4], noted.written[8] = 3, 0
    path = tmp_path / "stdout.log"
    path.write_bytes(printed(0, 1) + printed(4, 1)[:3])
    assert not invariants.log_violations(noted, path)


def journal(*numbers: int, kind: str = "node_ready", term: int = 1) -> bytes:
    """Return a journal with these numbers."""
    records = ({"seq": number, "type": kind, "term": term} for number in numbers)
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.mark.parametrize(
    ("other", "wrong"),
    [
        (journal(1, 2, 3), ""),
        (journal(1, 2), "n2 has 2 records, n1 3; from 3 on they differ"),
        (journal(1, 2, 2), "not numbered"),
        (journal(1, 3, 4), "not numbered"),
        (journal(1, 2, 3, kind="other"), "from 1 on they differ"),
        (journal(1, 2, 3)[:-1], "not numbered"),
        (journal(1, 2, 3)[:-5], "no JSON"),
        (b"", "n2 has 0 records"),
    ],
)
def test_journals_are_whole_and_equal(other: bytes, wrong: str) -> None:
    found = invariants.journal_violations({"n1": journal(1, 2, 3), "n2": other})
    assert bool(found) is bool(wrong)
    assert wrong in "; ".join(one.text for one in found)


def test_a_node_that_was_out_at_the_end_has_the_beginning_of_the_journal() -> None:
    whole = journal(1, 2, 3)
    assert not invariants.journal_violations({"n1": whole, "n2": journal(1, 2)}, all_there=False)
    assert invariants.journal_violations({"n1": whole, "n2": journal(1, 2, kind="other")}, all_there=False)


def test_a_coordinator_that_was_out_at_the_end_may_have_noted_more_alone_in_its_own_older_term() -> None:
    all_others = journal(1, 2) + journal(3, 4, term=2)
    alone = journal(1, 2) + journal(3, 4, 5, kind="alone")
    assert not invariants.journal_violations({"n1": alone, "n2": all_others, "n3": all_others}, all_there=False)
    assert invariants.journal_violations({"n1": alone, "n2": all_others}, all_there=True)
    in_the_same_term = journal(1, 2) + journal(3, kind="alone", term=2)
    assert invariants.journal_violations({"n1": in_the_same_term, "n2": all_others}, all_there=False)


def status(second: float, *pids: int, state: str = "running") -> Document:
    """Return a status that calls these processes alive."""
    ranks = [{"pid": pid, "state": "running"} for pid in pids]
    return Document(int(second * _S), {"state": state, "nodes": [{"name": "n1", "ranks": ranks}]})


def false_s(documents: list[Document], *ranks: Rank, **more: Any) -> float:
    """Return for how long it was false within 30 s."""
    return invariants.StatusJudge().until(documents, ranks, 30 * _S, **more)[0]


def test_a_status_that_agrees_is_not_false() -> None:
    documents = [status(1, 1), status(15, state="restarting"), status(16.5, 2)]
    assert false_s(documents, rank(0, 0, 15000), rank(1, 16000, 30000)) < 2


def test_a_status_that_calls_the_dead_alive_is_false() -> None:
    assert false_s([status(1, 1)], rank(0, 0, 10000)) == pytest.approx(18.25, abs=0.5)


def test_a_status_that_does_not_know_who_steps_is_false() -> None:
    assert false_s([status(1, state="degraded")], rank(0, 0, 30000)) == pytest.approx(28.75, abs=0.5)


def test_a_status_may_be_old_where_nobody_can_look_and_about_what_was_stopped() -> None:
    away = [(8 * _S, 25 * _S)]
    assert false_s([status(1, 1)], rank(0, 0, 10000), unseen=away) == pytest.approx(4.75, abs=0.5)
    assert false_s([status(1, 1)], rank(0, 0, 10000), stopped={1}) == 0


def test_what_is_false_in_one_case_goes_on_in_the_next() -> None:
    judge = invariants.StatusJudge()
    documents, dead = [status(1, 1)], [rank(0, 0, 2000)]
    assert judge.until(documents, dead, 10 * _S)[0] == pytest.approx(6.5, abs=0.5)
    assert judge.until(documents, dead, 15 * _S)[0] == pytest.approx(11.5, abs=0.5)
    documents.append(status(15, state="degraded"))
    assert judge.until(documents, dead, 30 * _S)[0] < 12


def test_an_overlap_counts_in_the_case_in_which_it_was() -> None:
    ranks = [rank(0, 0, 1525), rank(1, 1000, 2000)]
    assert invariants.overlap_ms(ranks, since_ns=1400 * _MS)[0] == 500
    assert invariants.overlap_ms(ranks, since_ns=1525 * _MS) == (0.0, "")


def test_a_row_has_each_fault_once_and_what_ends_the_job_last() -> None:
    for seed in (1, 2, 3):
        made = rows(FAULTS, seed)
        assert sorted(fault.name for row in made for fault in row) == sorted(BY_NAME)
        assert len(made) <= 9
        assert not [row for row in made for fault in row[:-1] if fault.over]
        assert {len({drawn(fault, seed) for fault in row}) for row in made} == {1}


def test_the_faults_of_a_row_make_the_same_row_again_up_to_each_of_them() -> None:
    longest = max(rows(FAULTS, 5), key=len)
    for count in range(1, len(longest) + 1):
        assert rows(sorted(longest[:count], key=lambda fault: fault.name), 5) == [longest[:count]]


def loss(seq: int, second: int, reason: str = "cut off", kind: str = "node_lost", node: str = "n2") -> dict[str, Any]:
    """Return a record of what happened to a node."""
    detail = {"reason": reason, "culprit_node": node}
    return {"seq": seq, "type": kind, "node": node, "time": f"2026-11-23T10:00:{second:02}.000Z", "detail": detail}


_THREE = "quarantined: lost 3 times in 10 minutes, last: cut off"
_ENGINE = "its engine died 3 times in 10 minutes, last: exit code -9"
_TWICE = "quarantined: failed alone twice before the first step, last: x"


@pytest.mark.parametrize(
    ("records", "place", "nodes"),
    [
        ([loss(1, 0), loss(2, 10), loss(3, 20, _THREE)], 2, {"n2"}),
        ([loss(1, 0), loss(2, 10), loss(3, 20, _THREE)], 1, {"n2"}),
        ([loss(1, 0), loss(2, 10), loss(3, 20, _THREE)], 0, set()),  # one case alone
        ([loss(1, 0), loss(2, 10), loss(3, 20), loss(4, 22, _THREE)], 1, {"n2"}),  # the last two are one
        ([loss(1, 0), loss(2, 10), loss(3, 20, _THREE), loss(4, 30, kind="node_added")], 2, set()),
        ([loss(1, 0), loss(2, 10, "no space")], 1, set()),
        (
            [loss(1, 0), loss(2, 10), loss(3, 20, "its engine died 3 times in 10 minutes, last: exit code -9")],
            2,
            {"n2"},
        ),
        ([loss(1, 0, kind="incident"), loss(2, 9, kind="incident"), loss(3, 9, _TWICE, "node_failed")], 1, {"n2"}),
        ([loss(1, 0, kind="incident"), loss(2, 9, kind="incident"), loss(3, 9, _TWICE, "node_failed")], 0, set()),
    ],
)
def test_who_is_left_out_for_earlier_cases_too(records: list[Any], place: int, nodes: set[str]) -> None:
    assert invariants.left_out(records, place, 4.0) == nodes


@pytest.mark.parametrize(
    ("seconds", "err", "wrong"), [(29.0, "no", False), (31.0, "", True), (1.0, "Traceback (most …", True)]
)
def test_answers_come_in_time_and_without_tracebacks(seconds: float, err: str, wrong: bool) -> None:
    assert bool(Answer(("stop",), 1, seconds, b"", err).violations()) is wrong


def test_notes_are_read_as_they_grow(tmp_path: Path) -> None:
    stamps = Stamps(tmp_path / "stamps")
    path = stamps.directory / "0.0.n1.7"
    head = json.dumps({"group": [0, "n1:1"], "rank": 0, "world": 1, "node": "n1", "pid": 7})
    path.write_text(f"{head}\n100 5\n200 ")
    (read,) = stamps.read()
    assert (read.times_ns, read.written) == ([100], [5])
    with path.open("a") as file:
        file.write("-1\n300 6\n")
    assert stamps.stepping(since_ns=300) == [read]
    assert (read.times_ns, read.written) == ([100, 200, 300], [5, -1, 6])
    assert not stamps.stepping(since_ns=301)


def test_there_are_at_least_thirty_faults_of_different_names() -> None:
    assert len(BY_NAME) == len(FAULTS) >= 30
