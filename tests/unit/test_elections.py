"""Succession: with elections, leases, partitions and deaths, never two groups, and after healing one again."""

from __future__ import annotations

import pytest

from tests.unit.agents_world import Agents
from tests.unit.world import spec


def group(size: int, seed: int = 0) -> Agents:
    world = Agents(spec(size, nproc=1, min_nodes=1, max_restarts=1000), seed)
    world.pass_time(10)
    assert world.running() == set(world.agents)
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
