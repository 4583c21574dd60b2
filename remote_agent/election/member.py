"""The rules for one node: whose orders count, when to stop its workers, which candidate to vote for. Pure, no clock.

In: orders' terms, contacts, votes asked for, now. Out: the next Member and yes or no.

A member holds a lease from its coordinator: the time at which it sent the newest heartbeat that was answered, plus
leases.LEASE of node_timeout. After that it kills its workers, and may elect. The coordinator, for its part, stops its
workers when it has not held enough nodes of its group for a shorter time, and forms a new group only after
node_timeout.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from remote_agent.wire import leases

# The workers of an agent that died are gone within this time (its engine sees the end of its pipe).
DEAD_MARGIN_S = 2.5
# Candidates ask one after the other, so that the first in order usually finds no rival: the second after this time, or
# after what it may take to ask many nodes on busy machines, but no longer than LONGEST_S: those who ask together get no
# answers in time. If many in a row are gone, the others wait longer by the logarithm of their number.
STAGGER_S, LONGEST_S = 1.0, 2.5
ASKING_S = 0.02
# A term grows by one with each election. A node that was away for long has missed many, but never as many as this: a
# higher term is a mistake or an attack, and nobody could follow it with another.
MAX_TERM_JUMP = 1_000_000


@dataclasses.dataclass(frozen=True)
class Member:
    """One node's view; times are seconds of the caller's monotonic clock."""

    me: str
    node_timeout: float
    term: int = 0
    voted: str | None = None
    coordinator: str | None = None
    contact: float = 0.0
    dead_since: float | None = None
    """The time since which nothing listens at the coordinator's address any more."""
    successor: str | None = None
    """The successor that the coordinator named when it left."""

    def to_json(self) -> dict[str, Any]:
        """Return what must survive a restart of the agent."""
        return {"term": self.term, "voted": self.voted, "coordinator": self.coordinator}


def accept(member: Member, term: int, coordinator: str, now: float) -> tuple[Member, bool]:
    """Follow a coordinator unless its term is older than ours; two of one term cannot both have a quorum."""
    if term < member.term or (term == member.term and member.coordinator not in (None, coordinator)):
        return member, False
    if is_too_high(member, term):
        return member, False
    voted = member.voted if term == member.term else None
    changed = dataclasses.replace(
        member, term=term, voted=voted, coordinator=coordinator, contact=now, dead_since=None, successor=None
    )
    return changed, True


def is_too_high(member: Member, term: int) -> bool:
    """Return whether no job can have come to that term since we last heard of it."""
    return term > member.term + MAX_TERM_JUMP


def stagger_s(place: int, count: int) -> float:
    """Return for how long the candidate at that place of so many lets those before it go first."""
    second_s = min(LONGEST_S, max(STAGGER_S, ASKING_S * count))
    return second_s + STAGGER_S * math.log2((1 + place) / 2) if place else 0.0


def is_news(member: Member, term: int, coordinator: str) -> bool:
    """Return whether that is a coordinator that we do not know; a node never learns from others that it is one."""
    if coordinator == member.me:
        return False
    return term > member.term or (term == member.term and member.coordinator is None)


def renew_lease(member: Member, sent: float) -> Member:
    """Renew the lease: the coordinator answered a heartbeat that we sent then."""
    return dataclasses.replace(member, contact=max(member.contact, sent), dead_since=None)


def refused(member: Member, now: float) -> Member:
    """Note that nothing listens at the coordinator's address: its agent is dead."""
    return member if member.dead_since is not None else dataclasses.replace(member, dead_since=now)


def lease_over(member: Member, now: float) -> bool:
    """Return whether our workers must be dead by now."""
    return now - member.contact > leases.LEASE * member.node_timeout


def leaderless(member: Member, now: float) -> bool:
    """Return whether a new coordinator may be elected, as far as this node knows."""
    if member.coordinator == member.me:
        return False
    if member.coordinator is None or member.successor is not None:
        return True
    dead = member.dead_since is not None and now - member.dead_since > DEAD_MARGIN_S
    return dead or lease_over(member, now)


def election_due(member: Member, order: list[str], now: float) -> bool:
    """Return whether it is this node's turn to ask for votes; order: the last group without its coordinator."""
    # In term 0 no coordinator is named yet; that is up to the launch.
    if not member.term or member.me not in order or not leaderless(member, now):
        return False
    start = member.contact + leases.LEASE * member.node_timeout
    if member.dead_since is not None:
        start = min(start, member.dead_since + DEAD_MARGIN_S)
    return now > start + stagger_s(order.index(member.me), len(order))


def vote(member: Member, term: int, candidate: str, now: float) -> tuple[Member, str]:
    """Grant a vote, at most one a term; returns "" or why not."""
    if term < member.term or (term == member.term and member.voted not in (None, candidate)):
        return member, f"term {term} is over: {member.me} is in term {member.term}"
    if is_too_high(member, term):
        return member, f"{member.me} is in term {member.term}, and term {term} cannot follow"
    if term == member.term and member.coordinator is not None:
        return member, f"{member.coordinator} is the coordinator of term {term}"
    in_charge = member.coordinator is not None and not leaderless(member, now)
    if in_charge and candidate not in (member.successor, member.coordinator):
        return member, f"{member.coordinator} is in charge"
    return dataclasses.replace(member, term=term, voted=candidate, coordinator=None), ""
