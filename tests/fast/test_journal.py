"""The journal: whole, in order, the same after a restart."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from remote_agent.agent import jobs
from remote_agent.base.paths import Home
from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator.journal import Journal, chunks, public, read_records
from remote_agent.diagnose.incidents import iso_time
from remote_agent.election.ballot import Ballot
from remote_agent.election.member import Member
from tests.fast.world import World, spec

WAIT_S = 60.0


def record(seq: int, **changes: Any) -> Any:
    base = {
        "seq": seq, "time": iso_time(seq * 10**9), "type": "t", "generation": 0, "node": None, "rank": None,
        "detail": {},
    }  # fmt: skip
    return {**base, "term": 1, **changes}


async def test_records_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    journal.take([record(number) for number in (1, 2, 3)])
    journal.close()
    with path.open("a") as file:
        file.write('{"seq": 4, "ti')
    assert [one["seq"] for one in read_records(path)] == [1, 2, 3]
    journal = Journal(path)
    journal.append(record(4))
    journal.close()
    assert [one["seq"] for one in read_records(path)] == [1, 2, 3, 4]


async def test_a_journal_is_replaced_when_all_of_the_new_one_is_there(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    old, new = [record(1), record(2)], [record(number, term=2) for number in (1, 2, 3)]
    journal.take(old)
    assert journal.take(new[:1], reset=True, more=True)
    assert (journal.records, read_records(path)) == (old, old), "a part of the new journal counts"
    assert not journal.take(new[2:], reset=True), "the second piece is missing"
    assert (journal.records, read_records(path)) == (old, old)
    # The connection was cut after a piece; the next one sends all anew.
    for _ in range(2):
        assert journal.take(new[:1], reset=True, more=True)
    assert journal.take(new[1:], reset=True)
    await journal.sync()
    assert (journal.records, read_records(path)) == (new, new)
    # What follows a piece on another connection follows the journal that counts.
    assert journal.take(old[:1], reset=True, more=True)
    assert journal.take([record(4, term=2)])
    assert not journal.take(old[1:], reset=True)
    assert journal.records == read_records(path) == [*new, record(4, term=2)]
    journal.close()


async def test_what_a_journal_shows_is_computed_from_new_records_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status is asked for ten times a second, also while nobody coordinates, however long the journal is."""
    journal, job = Journal(tmp_path / "events.jsonl"), spec(2)
    shown, applied, real = replay.Fold(job, journal, "n1"), [0], replay._apply

    def count(state: Any, one: Any) -> Any:
        applied[0] += 1
        return real(state, one)

    monkeypatch.setattr(replay, "_apply", count)
    lost = [
        record(seq, type="node_lost", node=node, detail={"reason": "r", "status": "lost"}, term=1)
        for seq, node in enumerate(("n1", "n2"), 1)
    ]
    for records in (lost[:1], lost[1:]):
        journal.take(records)
        assert shown.state is shown.state
    assert {name: node.status for name, node in shown.state.nodes.items()} == {"n1": "lost", "n2": "lost"}
    assert applied == [2]
    journal.take([record(1, term=2)], reset=True)
    assert shown.state == replay.fold(job, journal.records, "n1")
    journal.close()


def test_the_state_of_an_ended_job_is_read_again_only_when_its_journal_has_changed(tmp_path: Path) -> None:
    files = Home(tmp_path).job("job")
    files.make()
    files.spec.write_text(json.dumps(spec(1).to_json()))
    assert jobs.describe(files)["state"] == "starting"
    stopped = record(1, type="job_stopped", detail={"reason": "an operator stopped the job"})
    files.events.write_text(json.dumps(stopped) + "\n")
    with mock.patch("remote_agent.coordinator.journal.read_records", wraps=read_records) as read:
        assert [jobs.describe(Home(tmp_path).job("job"))["state"] for _ in range(3)] == ["stopped"] * 3
    assert read.call_count == 1


def test_a_record_that_a_disk_has_damaged_ends_what_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    ready = record(2, type="node_ready", node="n1", detail={"nproc": "2"})
    path.write_text("".join(f"{json.dumps(one)}\n" for one in (record(1), ready, record(3))))
    assert [one["seq"] for one in read_records(path)] == [1]
    assert "cannot be read from line 2 on: detail.nproc is not a whole number" in caplog.text


async def test_a_disk_that_was_full_leaves_no_gap(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    journal.append(record(1))
    path.unlink()
    path.mkdir()
    (path / "x").touch()
    journal.take([record(1), record(2)], reset=True)
    journal.append(record(3))
    (path / "x").unlink()
    path.rmdir()
    journal.append(record(4))
    await journal.sync()
    assert [one["seq"] for one in read_records(path)] == [1, 2, 3, 4]
    journal.close()


async def test_a_slow_disk_holds_up_nothing_but_the_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes and records wait for it; heartbeats do not. What changes meanwhile follows in the file."""
    real, may_end, begun = os.fsync, threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        begun.set()
        assert may_end.wait(WAIT_S)
        real(fd)

    journal = Journal(tmp_path / "events.jsonl")
    ballot = Ballot(tmp_path / "term.json", Member("n1", 3.0))
    old, new = [record(1), record(2)], [record(number, term=2) for number in (1, 2)]
    journal.take(old)
    monkeypatch.setattr(os, "fsync", slow)
    promises = [asyncio.ensure_future(work) for work in (ballot.vote(1, "n2"), ballot.secure(journal))]
    await asyncio.to_thread(begun.wait, WAIT_S)
    # The file that is being synced is closed, and another one takes its place, which gets what comes then.
    journal.take(new, reset=True)
    promises.append(asyncio.ensure_future(ballot.secure(journal)))
    journal.append(record(3, term=2))
    await asyncio.sleep(0)
    assert [promise.done() for promise in promises] == [False] * 3
    assert await ballot.vote(1, "n3") != "", "it holds before it is on the disk"
    may_end.set()
    assert await promises[0] == ""
    await asyncio.gather(*promises)
    assert json.loads((tmp_path / "term.json").read_text())["voted"] == "n2"
    assert read_records(tmp_path / "events.jsonl") == journal.records == [*new, record(3, term=2)]
    journal.close()


async def test_what_a_full_disk_did_not_take_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("remote_agent.coordinator.journal.RETRY_S", 0.01)
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    keeping = asyncio.ensure_future(journal.keep_written())
    path.unlink()
    path.mkdir()
    (path / "x").touch()
    journal.close()
    journal.append(record(1))
    await asyncio.sleep(0.05)
    (path / "x").unlink()
    path.rmdir()
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    assert read_records(path) == [record(1)]
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    journal.close()
    assert caplog.text.count("cannot be written") == 1, "said once, not at each try"


def test_chunks_are_bounded_by_bytes() -> None:
    large = [record(seq, detail={"text": "x" * 400_000}) for seq in range(1, 8)]
    found = list(chunks(large))
    assert [one for chunk in found for one in chunk] == large
    assert [len(chunk) for chunk in found] == [2, 2, 2, 1]
    assert list(chunks([])) == [[]]


async def test_no_gap_and_no_duplicate_can_enter(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    for seq in (1, 1, 3, 2, 3):
        journal.append(record(seq))
    assert [journal.take([record(seq)]) for seq in (5, 2, 3)] == [False, True, True]
    assert [one["seq"] for one in journal.records] == [1, 2, 3]
    journal.close()


async def test_a_follower_gets_every_record_once_and_ends(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    journal.append(record(1))

    async def follow() -> list[int]:
        return [one["seq"] async for one in journal.follow(0)]

    task = asyncio.ensure_future(follow())
    for seq in range(2, 50):
        journal.append(record(seq))
        if seq % 7 == 0:
            await asyncio.sleep(0)
    journal.end()
    assert await asyncio.wait_for(task, 60) == list(range(1, 50))
    journal.close()


async def test_a_follower_has_what_the_journal_has_in_the_end(tmp_path: Path) -> None:
    """A coordinator may be lost before others have its last records; what it told is not what happened."""
    journal = Journal(tmp_path / "events.jsonl")
    seen: dict[int, str] = {}

    async def follow() -> None:
        async for one in journal.follow(0):
            seen[one["seq"]] = one["type"]

    for seq in (1, 2, 3):
        journal.append(record(seq))
    following = asyncio.ensure_future(follow())
    while len(seen) < 3:
        await asyncio.sleep(0)
    journal.take([record(1), record(2), record(3, type="else")], reset=True)
    journal.append(record(4))
    journal.end()
    await asyncio.wait_for(following, 60)
    assert seen == {one["seq"]: one["type"] for one in journal.records}
    assert seen[3] == "else"
    journal.close()


async def test_two_journals_with_other_tails_have_other_digests(tmp_path: Path) -> None:
    one, other = Journal(tmp_path / "a.jsonl"), Journal(tmp_path / "b.jsonl")
    one.append(record(1))
    other.append(record(1, type="else"))
    assert one.digest(1) != other.digest(1)
    assert one.digest(0) == other.digest(0) == ""
    one.close()
    other.close()


def test_the_term_stays_between_agents() -> None:
    assert set(public(record(1))) == {"seq", "time", "type", "generation", "node", "rank", "detail"}


def test_times_are_utc_with_milliseconds() -> None:
    assert iso_time(1_700_000_000_123_456_789) == "2023-11-14T22:13:20.123Z"


def test_the_journal_says_who_asked() -> None:
    world = World(spec(3, min_nodes=2))
    world.fail(1)
    world.settle()
    world.feed(inputs.Remove("n3", "ann@laptop"))
    world.settle()
    records = world.records()
    asked = next(record for record in records if record["type"] == "remove_requested")
    assert (asked["node"], asked["detail"]["operator"]) == ("n3", "ann@laptop")


def test_a_group_with_a_node_that_the_journal_lacks_is_taken_over_without_it() -> None:
    members = [{"node": name, "group_rank": at, "base_rank": at, "nproc": 1} for at, name in enumerate(("n1", "n9"))]
    started = record(1, type="generation_started", detail={"members": members, "restarts": 0})
    state = replay.take_over(spec(2), "n1", 2, [started], 0.0)
    assert state.members == {"n1": 0}
    assert state.waiting == {"n1"}
