"""Succession: with elections, leases, partitions and deaths, never two groups, and after healing one again."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from remote_agent.coordinator import inputs, policy
from remote_agent.coordinator import state as s
from remote_agent.wire import NodeSpec
from tests.examples import examples
from tests.fast.agents_world import Agents
from tests.fast.world import spec

# With these the two groups ran when heartbeats counted from their arrival.
SEEDS = (35, 39, 89, 180, 208, 237, 275, 473, 500, 551, 667, 798, 869, 881)


def group(size: int, seed: int = 0, spares: int = 0) -> Agents:
    world = Agents(spec(size, spares=spares, nproc=1, min_nodes=1, max_restarts=1000), seed)
    world.pass_time(10)
    assert world.running() == set(list(world.agents)[: size - spares])
    return world


@pytest.mark.parametrize(("size", "away"), [(3, {"n1"}), (4, {"n1"}), (5, {"n1", "n2"}), (5, {"n1"})])
def test_the_larger_side_elects_and_all_are_one_group_again(size: int, away: set[str]) -> None:
    world = group(size)
    world.split(away)
    world.pass_time(60)
    assert world.running() == set(world.agents) - away
    world.heal()
    world.pass_time(60)
    assert world.running() == set(world.agents)
    assert len(world.heads()) == 1


def test_half_of_a_group_stays_with_the_coordinator() -> None:
    world = group(4)
    world.split({"n1", "n2"})
    world.pass_time(60)
    assert world.running() == {"n1", "n2"}


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


def test_a_node_of_the_group_takes_over_before_a_spare() -> None:
    node = s.Node(NodeSpec("", ""), connected=True, ready=True, status="running")
    nodes = {"n1": node, "n2": dataclasses.replace(node, status="spare"), "n3": node}
    state = s.State(spec(3), "n1", 1, nodes, members=("n1", "n3"))
    assert policy.successor(state) == "n3"
    alone = dataclasses.replace(state, members=("n1",))
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


def test_a_node_that_counts_by_an_old_group_wins_no_vote() -> None:
    """n3 fell out, n1 and n2 went on without it: then n1 alone is half of that group, and n2 with n3 is not."""
    world = group(3)
    world.blocked.add(frozenset(("n1", "n3")))
    world.pass_time(60)
    assert world.running() == {"n1", "n2"}
    world.blocked.add(frozenset(("n1", "n2")))
    world.pass_time(90)
    assert world.running() == {"n1"}
    world.heal()
    world.pass_time(60)
    assert world.running() == {"n1", "n2", "n3"}


def test_the_half_with_the_coordinator_stays_though_the_others_were_more_before() -> None:
    world = group(5)
    world.split({"n5"})
    world.pass_time(60)
    assert world.running() == {"n1", "n2", "n3", "n4"}
    world.heal()
    world.split({"n1", "n2"})
    # n5 would be the fifth vote of the group before.
    world.pass_time(90)
    assert world.running() in ({"n1", "n2"}, {"n3", "n4", "n5"})


def test_a_new_coordinator_is_no_tie_break_before_its_own_group_has_formed() -> None:
    world = group(4)
    world.split({"n1"})
    for _ in range(200):
        if [head.name for head in world.heads()] == ["n1", "n2"]:
            break
        world.pass_time(0.25)
    world.heal()
    world.split({"n1", "n3"})
    world.pass_time(90)
    assert len({world.agents[name].running for name in world.running()}) <= 1


def test_a_node_without_its_disk_gives_no_vote_for_the_group_that_it_was_in() -> None:
    """n2 and n3 went on without n1, then n2 alone; n3 comes back without its disk and sees only n1."""
    world = group(3)
    world.split({"n1"})
    world.pass_time(60)
    assert world.running() == {"n2", "n3"}
    world.die("n3")
    world.pass_time(60)
    assert world.running() == {"n2"}
    world.split({"n2"})
    world.blocked.discard(frozenset(("n1", "n3")))
    world.agents["n3"].lose_disk()
    world.boot("n3")
    world.agents["n3"].follow(1, "n1")
    world.pass_time(90)
    assert world.running() == {"n2"}
    world.heal()
    world.pass_time(90)
    assert world.running() == {"n1", "n2", "n3"}


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


MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            ["split", "cut", "cut", "heal", "die", "boot", "wipe", "restart", "remove", "freeze", "time", "time"]
        ),
        st.integers(0, 31),
    ),
    max_size=14,
)


@examples(60, derandomize=True, phases=[Phase.generate])
@given(st.integers(2, 5), st.integers(0, 1), st.integers(0, 999), MOVES)
def test_never_two_groups_and_one_again_after_healing(
    size: int, spares: int, seed: int, moves: list[tuple[str, int]]
) -> None:
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
    state = heads[0].role
    assert state is not None
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
