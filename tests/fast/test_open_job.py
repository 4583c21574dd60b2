"""A job that nodes join by themselves: how many it waits for, and that every journal names the same nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

from remote_agent.agent import agent
from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator import state as s
from remote_agent.wire import NodeSpec
from tests.fast.world import World, spec


def open_world(nodes: int, **changes: Any) -> World:
    return World(spec(nodes, endpoint="n1:29400", **changes), start=False)


def come(world: World, name: str) -> None:
    """A node comes that nobody has named, as Role takes it in."""
    node = s.Node(NodeSpec(name, f"10.0.0.{name[1:]}"))
    world.state = dataclasses.replace(world.state, nodes={**world.state.nodes, name: node})
    world.join(name)
    world.settle()


def test_the_first_group_waits_for_min_nodes_and_settles_for_more() -> None:
    world = open_world(3, min_nodes=2, settle_timeout=3.0, join_timeout=600.0)
    come(world, "n1")
    world.pass_time(10)
    assert world.state.phase == s.FORMING
    come(world, "n2")
    assert world.state.phase == s.FORMING
    world.pass_time(4)
    world.settle()
    assert list(world.state.members) == ["n1", "n2"]
    come(world, "n3")
    assert list(world.state.members) == ["n1", "n2", "n3"]


def test_min_nodes_are_waited_for_no_longer_than_the_join_timeout() -> None:
    world = open_world(2, join_timeout=20.0)
    come(world, "n2")
    world.pass_time(15)
    assert agent.short_of(world.state, "n2") == "waiting for nodes: 2 are needed, connected: n2"
    come(world, "n1")
    assert world.state.members == ("n2", "n1")
    assert agent.short_of(world.state, "n2") == ""
    world.die("n1")
    world.settle()
    world.pass_time(15)
    assert world.state.phase == s.FORMING
    world.pass_time(10)
    assert (world.state.ended, world.state.failure) == ("failed", "fewer than 2 nodes for 20 s (join_timeout)")


def test_a_first_group_that_does_not_come_together_fails() -> None:
    world = open_world(2, join_timeout=5.0)
    come(world, "n1")
    world.pass_time(7)
    assert (world.state.ended, world.state.failure) == ("failed", "fewer than 2 nodes for 5 s (join_timeout)")


def test_a_removed_node_is_shown_how_to_come_back() -> None:
    world = open_world(3, min_nodes=1, settle_timeout=0.0)
    come(world, "n1")
    come(world, "n2")
    world.feed(inputs.Remove("n2"))
    world.settle()
    removed = "left out (removed by an operator): waiting for `supervisor add "
    assert agent.short_of(world.state, "n2").startswith(removed)
    world.feed(inputs.Add(NodeSpec("n3", "10.0.0.3")))
    (refusal,) = [one for one in world.replies if not one.accepted]
    assert "start torchrun there first" in refusal.hint


def test_a_removed_node_is_not_waited_for() -> None:
    world = open_world(2, settle_timeout=0.0)
    come(world, "n1")
    come(world, "n2")
    world.feed(inputs.Remove("n2"))
    world.settle()
    assert (world.state.phase, world.state.members) == (s.RUNNING, ("n1",))


def test_a_node_beyond_max_nodes_stands_by() -> None:
    world = open_world(3, min_nodes=1, max_nodes=2, settle_timeout=0.0)
    for name in ("n1", "n2", "n3"):
        come(world, name)
        world.pass_time(1)
        world.settle()
    assert world.state.nodes["n3"].status == "spare"
    world.die("n2")
    world.settle()
    assert world.state.members == ("n1", "n3")


def test_every_journal_names_the_nodes_in_the_order_in_which_they_came() -> None:
    job = spec(1, endpoint="n2:29400")
    records: Any = [
        {"type": "node_joined", "node": name, "detail": {"spec": {"name": name, "address": "10.0.0.1"}}}
        for name in ("n2", "n1")
    ]
    assert list(replay.fold(job, records).nodes) == ["n2", "n1"]


def test_all_agents_restarted_is_nobodys_failure() -> None:
    world = World(spec(2, max_restarts=0))
    records: Any = [
        {**dataclasses.asdict(event), "seq": number, "term": 1, "time": ""}
        for number, event in enumerate(world.events, 1)
    ]
    for machine in world.machines.values():
        machine.connected, machine.running, machine.lives = False, None, 1
    world.state = replay.take_over(world.state.spec, "n1", 2, records, world.now)
    world.join("n1")
    world.join("n2")
    world.settle()
    assert (world.state.phase, world.state.generation, world.state.restarts) == (s.RUNNING, 1, 0)
    assert "incident" not in world.types()
