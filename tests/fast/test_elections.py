"""Succession: with elections, leases, partitions and deaths, never two groups, and after healing one again."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from remote_agent.coordinator import inputs, policy, quorum
from remote_agent.coordinator import state as s
from remote_agent.election import member
from remote_agent.election.ballot import Ballot
from remote_agent.election.member import Member
from remote_agent.wire import NodeSpec, leases
from tests.examples import examples
from tests.fast.agents_world import Agents
from tests.fast.cases import Case, read_cases
from tests.fast.waiting import some
from tests.fast.world import spec

# With these the two groups ran when heartbeats counted from their arrival.
SEEDS = (35, 39, 89, 180, 208, 237, 275, 473, 500, 551, 667, 798, 869, 881)


def group(size: int, seed: int = 0, spares: int = 0) -> Agents:
    world = Agents(spec(size, spares=spares, nproc=1, min_nodes=1, max_restarts=1000), seed)
    world.pass_time(10)
    assert world.running() == set(list(world.agents)[: size - spares])
    return world


def until_two_heads(world: Agents) -> None:
    for _ in range(200):
        if len(world.heads()) == 2:
            return
        world.pass_time(0.25)


def come_back_empty(world: Agents, name: str, follows: str) -> None:
    """A node comes back without its disk, and is told of the first coordinator."""
    world.agents[name].lose_disk()
    world.boot(name)
    world.agents[name].follow(1, follows)


# The commands of `data/elections.txt`; `run`: these have workers.
COMMANDS: dict[str, Callable[..., object]] = {
    "split": lambda world, *side: world.split(set(side)),
    "cut": lambda world, *pair: world.blocked.add(frozenset(pair)),
    "join": lambda world, *pair: world.blocked.discard(frozenset(pair)),
    "heal": Agents.heal,
    "die": Agents.die,
    "come_back_empty": come_back_empty,
    "until_two_heads": until_two_heads,
    "time": lambda world, seconds: world.pass_time(float(seconds)),
}
SEEN: dict[str, Callable[[Agents], set[str]]] = {
    "run": Agents.running,
    "heads": lambda world: {head.name for head in world.heads()},
}


@pytest.mark.parametrize("case", read_cases("elections.txt"), ids=lambda case: case.fields[0])
def test_who_goes_on_after_a_split(case: Case) -> None:
    """The promises are checked after every step: never two groups."""
    world = group(int(case.fields[1]))
    for line in case.body.strip().splitlines():
        command, *words = line.split()
        if command in SEEN:
            assert SEEN[command](world) == set(words), line
        else:
            COMMANDS[command](world, *words)


@pytest.mark.parametrize(("size", "pause"), [(2, 5), (2, 20), (3, 5), (3, 20)])
def test_a_coordinator_that_stood_still_blames_nobody_else(size: int, pause: int) -> None:
    world = group(size)
    world.freeze("n1", pause)
    world.pass_time(30)
    assert world.running() == set(world.agents)
    (head,) = world.heads()
    assert head.name == ("n2" if (size, pause) == (3, 20) else "n1")
    lost = {one["node"] for one in head.records if one["type"] == "node_lost"}
    assert lost == ({"n1"} if head.name == "n2" else set())
    paused = [one["detail"]["seconds"] for one in head.records if one["type"] == "coordinator_paused"]
    assert paused == ([] if head.name == "n2" else [pytest.approx(pause, abs=1)])
    assert head.role is not None
    assert (head.role.generation > 0, head.role.restarts) == (pause == 20, 0)


def test_many_candidates_in_a_row_that_are_gone_delay_an_election_by_seconds() -> None:
    assert [member.stagger_s(place, 4) for place in (0, 1, 3)] == [0.0, 1.0, 2.0]
    # Of many, the second lets the first one ask them all.
    assert [member.stagger_s(place, 100) for place in (0, 1, 3)] == [0.0, 2.0, 3.0]
    # The first 32 of a group of a thousand are gone.
    assert member.stagger_s(32, 1000) < 7
    order = [f"n{number}" for number in range(1000)]
    view = member.Member("n32", 15.0, term=1, contact=0.0)
    assert not member.election_due(view, order, 12.0)
    # The lease is over after 12 s: a coordinator is there within node_timeout and 6 s.
    assert member.election_due(view, order, 12.0 + 7.0)


def test_a_vote_is_lost_once_those_who_are_silent_could_not_turn_it() -> None:
    group = quorum.Group(1, 1, dict.fromkeys(("a", "b", "c", "d", "e"), ""), ("a", ""), formed=True)
    tally = quorum.Tally({"a": ""}, (1, 1), (group,))
    assert not tally.is_lost(["b", "c", "d", "e"])
    assert not tally.is_lost(["b", "c"])
    assert tally.is_lost(["b"])
    assert not tally.is_lost(["b"], dead=["c", "d"])


def test_a_node_of_the_group_takes_over_before_a_spare() -> None:
    node = s.Node(NodeSpec("", ""), connected=True, ready=True, status="running")
    nodes = {"n1": node, "n2": dataclasses.replace(node, status="spare"), "n3": node}
    state = s.State(spec(3), "n1", 1, nodes, members=s.ranked(("n1", "n3")))
    assert policy.successor(state) == "n3"
    alone = dataclasses.replace(state, members=s.ranked(("n1",)))
    assert policy.successor(alone) == "n2"


@pytest.mark.parametrize("late", [False, True])
def test_a_spare_comes_in_for_the_coordinators_node(late: bool) -> None:
    world = group(4, spares=1)
    if late:
        world.split({"n4"})
    world.die("n1")
    world.pass_time(45)
    world.heal()
    world.pass_time(20)
    assert world.running() == {"n2", "n3", "n4"}
    (head,) = world.heads()
    sizes = [len(one["detail"]["members"]) for one in head.records if one["type"] == "generation_started"]
    assert sizes == ([3, 2, 3] if late else [3, 3])
    assert head.role is not None
    assert head.role.restarts == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_heartbeat_from_before_a_cut_does_not_prolong_the_group_after_it(seed: int) -> None:
    """The link heals for a moment, in which the coordinator gets what was sent seconds ago, and the members vote."""
    chance = random.Random(seed)
    world = group(chance.choice((3, 4, 5)), seed)
    world.split({"n1"})
    if chance.random() < 0.7:
        world.heads()[0].feed(inputs.Restart())
    world.pass_time(world.job.node_timeout * chance.uniform(0.78, 0.92))
    world.heal()
    world.pass_time(chance.uniform(0.5, 1.75))
    world.split({"n1"})
    world.pass_time(world.job.node_timeout)


KINDS = ("split", "cut", "cut", "heal", "die", "boot", "wipe", "restart", "remove", "freeze", "time", "time")
MOVES = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 31)), max_size=14)


@examples(60, derandomize=True, phases=[Phase.generate])
@given(st.integers(2, 5), st.integers(0, 1), st.integers(0, 999), MOVES)
def test_never_two_groups(size: int, spares: int, seed: int, moves: list[tuple[str, int]]) -> None:
    world = group(size, seed, spares)
    for kind, number in moves:
        play(world, kind, number)
        world.pass_time(1 + number % 4)
    if any(kind == "wipe" for kind, _ in moves):
        # Too few may be left that remember; then only an operator can say that nobody else goes on.
        return
    world.heal()
    for name in world.agents:
        world.boot(name)
    world.pass_time(150)
    heads = world.heads()
    assert len(heads) == 1, [head.name for head in heads]
    state = some(heads[0].role)
    wanted = {name for name, node in state.nodes.items() if node.status not in ("removed", "failed")}
    if wanted:
        assert state.phase == s.RUNNING
        assert world.running() <= wanted
        # A spare takes the place of an absent node, not that of a removed one; a spare that is in the group stays.
        regular = [name for name, node in state.nodes.items() if node.status != "removed" and not node.spec.spare]
        least = min(len(wanted), max(1, len(regular)))
        assert least <= len(world.running()) <= max(least, size - spares)
        ranks = sorted(rank for name in world.running() for rank in world.agents[name].ranks)
        assert ranks == list(range(len(state.ranks)))


def play(world: Agents, kind: str, number: int) -> None:
    """One move of the random game."""
    names = list(world.agents)
    name = names[number % len(names)]
    heads = world.heads()
    alone = sum(agent.alive for agent in world.agents.values()) == 1
    moves: dict[str, Callable[[], object]] = {
        "split": lambda: world.split({one for place, one in enumerate(names) if number >> place & 1}),
        "cut": lambda: world.blocked.add(frozenset((name, names[(number // 5) % len(names)]))),
        "heal": world.heal,
        "die": lambda: None if alone else world.die(name),
        "boot": lambda: world.boot(name),
        "wipe": lambda: None if world.agents[name].alive else world.agents[name].lose_disk(),
        "freeze": lambda: world.freeze(name, number),
        "time": lambda: world.pass_time(number),
    }
    verbs: dict[str, inputs.Input] = {"restart": inputs.Restart(), "remove": inputs.Remove(name)}
    if kind in moves:
        moves[kind]()
    elif heads:
        heads[0].feed(verbs[kind])


# A member's lease and vote: whose orders count, what a vote promises, and how long workers live without an answer.


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


async def test_a_promise_that_cannot_be_written_makes_another_node_of_it(tmp_path: Path) -> None:
    path = tmp_path / "term.json"
    ballot = Ballot(path, Member("n2", TIMEOUT))
    assert await ballot.vote(1, "n1") == ""
    disk = ballot.disk
    assert Ballot(path, Member("n2", TIMEOUT)).disk == disk
    with nothing_can_be_written():
        assert await ballot.vote(2, "n3") == ""
        assert await ballot.vote(2, "n1") != ""
    assert (ballot.disk, ballot.view.voted) == (disk, "n3")
    # Not even when there is space again: the journal may lack what it said it had.
    assert await ballot.vote(3, "n1") == ""
    again = Ballot(path, Member("n2", TIMEOUT))
    assert (again.view.term, again.disk == disk) == (0, False)


def test_before_a_coordinator_was_named_nobody_stands() -> None:
    fresh = Member(me="n1", node_timeout=TIMEOUT)
    assert member.leaderless(fresh, 100.0)
    assert not member.election_due(fresh, ["n1"], 100.0)
