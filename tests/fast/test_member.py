"""A member's lease and vote: whose orders count, what a vote promises, and how long workers live without an answer."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from remote_agent.election import member
from remote_agent.election.ballot import Ballot
from remote_agent.election.member import Member
from remote_agent.wire import leases

TIMEOUT = 15.0


def follower(name: str = "n2", **changes: Any) -> Member:
    base = Member(me=name, node_timeout=TIMEOUT, term=1, coordinator="n1", contact=0.0)
    return dataclasses.replace(base, **changes)


def test_an_older_term_is_not_followed() -> None:
    view, accepted = member.accept(follower(term=3), 2, "n4", 1.0)
    assert not accepted
    assert view.coordinator == "n1"


def test_a_second_coordinator_of_the_same_term_is_not_followed() -> None:
    assert not member.accept(follower(), 1, "n3", 1.0)[1]


def test_a_newer_term_is_followed_and_renews_the_lease() -> None:
    view, accepted = member.accept(follower(), 2, "n3", 9.0)
    assert accepted
    assert (view.coordinator, view.contact) == ("n3", 9.0)


def test_the_lease_runs_from_when_the_answered_heartbeat_was_sent() -> None:
    view = member.renew_lease(follower(), 5.0)
    assert not member.lease_over(view, 5.0 + 0.79 * TIMEOUT)
    assert member.lease_over(view, 5.0 + 0.81 * TIMEOUT)


def test_workers_are_dead_before_the_coordinator_may_form_a_group_without_them() -> None:
    """From the words of leases.py: one share and the end of the workers fit before the next share begins."""
    for timeout in (3.0, 3.5, 4.0, 6.0, 13.0, 15.0, 60.0, 3600.0):
        end = (leases.STOP + leases.DEATH) * timeout + leases.LOOK_S
        assert leases.HELD * timeout + end <= leases.LEASE * timeout
        assert leases.LEASE * timeout + end <= timeout
        assert leases.holds(timeout)
    assert not any(leases.holds(timeout) for timeout in (0.0, 0.5, 1.0, 2.9))


def test_no_vote_against_a_coordinator_in_charge() -> None:
    _, reason = member.vote(follower(contact=10.0), 2, "n3", 12.0)
    assert reason == "n1 is in charge"


def test_a_vote_for_the_successor_needs_no_wait() -> None:
    view, reason = member.vote(follower(contact=10.0, successor="n3"), 2, "n3", 10.1)
    assert reason == ""
    assert view.voted == "n3"


def test_a_dead_coordinator_is_replaced_sooner_than_a_silent_one() -> None:
    dead = member.refused(follower(contact=10.0), 10.5)
    assert member.leaderless(dead, 10.5 + member.DEAD_MARGIN_S + 0.1)
    assert not member.leaderless(follower(contact=10.0), 10.5 + member.DEAD_MARGIN_S + 0.1)


def test_candidates_take_turns() -> None:
    order = ["n2", "n3"]
    now = 0.8 * TIMEOUT + 0.1
    assert member.election_due(follower("n2"), order, now)
    assert not member.election_due(follower("n3"), order, now)
    assert member.election_due(follower("n3"), order, now + member.STAGGER_S)


@contextlib.contextmanager
def nothing_can_be_written() -> Iterator[None]:
    """As on a full disk: files can be made and deleted, and take no byte."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_promise_that_cannot_be_written_holds_until_the_restart_and_then_the_node_is_another_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "term.json"
    ballot = Ballot(path, Member("n2", TIMEOUT))
    assert ballot.vote(1, "n1") == ""
    disk = ballot.disk
    assert Ballot(path, Member("n2", TIMEOUT)).disk == disk
    with nothing_can_be_written():
        assert ballot.vote(2, "n3") == ""
        assert ballot.vote(2, "n1") != ""
    assert (ballot.disk, ballot.view.voted) == (disk, "n3")
    # Not even when there is space again: the journal may lack what it said it had.
    assert ballot.vote(3, "n1") == ""
    again = Ballot(path, Member("n2", TIMEOUT))
    assert (again.view.term, again.disk == disk) == (0, False)


def test_before_a_coordinator_was_named_nobody_stands() -> None:
    fresh = Member(me="n1", node_timeout=TIMEOUT)
    assert member.leaderless(fresh, 100.0)
    assert not member.election_due(fresh, ["n1"], 100.0)
