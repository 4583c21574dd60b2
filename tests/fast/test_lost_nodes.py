"""Nodes that are lost, that come back, that keep failing; on the pure state machine."""

from __future__ import annotations

from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator import state as s
from tests.fast.world import World, spec


def lose_and_regain(world: World, name: str) -> None:
    world.die(name)
    world.settle()
    world.join(name)
    world.settle()


def test_a_lost_node_is_left_out_and_admitted_when_it_returns() -> None:
    world = World(spec(3, min_nodes=2))
    world.die("n3")
    world.settle()
    assert (world.world_size, world.state.restarts) == (4, 0)
    assert world.last("incident").detail["category"] == "node_lost"
    world.join("n3")
    world.settle()
    assert (world.world_size, world.state.restarts) == (6, 0)


def test_where_the_machine_answers_it_is_the_agent_that_is_lost() -> None:
    world = World(spec(3, min_nodes=2))
    for alone, kinds in ((True, ["agent_lost", "node_lost"]), (False, ["node_lost"])):
        world.machines["n3"].connected, world.machines["n3"].running = False, None
        before = len(world.types())
        for _ in range(2):
            world.feed(inputs.AgentDead("n3", "gone", alone=alone))
        assert [kind for kind in world.types()[before:] if kind.endswith("_lost")] == kinds
        world.settle()
        world.join("n3")
        world.settle()
        assert world.world_size == 6


def test_a_node_that_keeps_failing_is_quarantined() -> None:
    world = World(spec(3, min_nodes=2))
    for _ in range(3):
        lose_and_regain(world, "n3")
        world.pass_time(world.state.spec.node_timeout)
    assert world.state.nodes["n3"].status == "failed"
    assert "quarantined" in str(world.state.nodes["n3"].reason)
    assert world.state.members == ("n1", "n2")


def test_a_node_that_keeps_losing_the_coordinator_is_quarantined_as_the_journal_says() -> None:
    world = World(spec(3, min_nodes=2))
    for _ in range(3):
        generation, world.machines["n3"].running = world.state.generation, None
        world.feed(inputs.Idle("n3", generation))
        world.settle()
        world.pass_time(world.state.spec.node_timeout)
    assert "quarantined" in world.last("node_lost").detail["reason"]
    assert (world.state.nodes["n3"].status, world.state.members) == ("failed", ("n1", "n2"))


def test_connections_that_one_outage_breaks_are_one_loss() -> None:
    world = World(spec(3, min_nodes=2))
    for _ in range(5):
        lose_and_regain(world, "n3")
    assert (world.state.nodes["n3"].status, world.state.members) == ("running", ("n1", "n2", "n3"))


def test_a_node_that_keeps_losing_its_connection_is_quarantined_however_short_the_pauses() -> None:
    world = World(spec(3, min_nodes=2))
    for _ in range(20):
        lose_and_regain(world, "n3")
        world.pass_time(world.state.spec.node_timeout / 4)
    assert (world.state.nodes["n3"].status, world.state.members) == ("failed", ("n1", "n2"))


NO_STORE = "NotImplementedError: this torch has no store"


def test_where_no_group_has_formed_the_node_that_cannot_open_the_store_is_not_left_out() -> None:
    """It is the only one that was asked: what every node lacks must not look like one node's fault."""
    world = World(spec(3, min_nodes=1), start=False)
    for machine in world.machines.values():
        machine.cannot_open = NO_STORE
    for name in world.machines:
        world.join(name)
    world.settle()
    assert world.state.ended == "failed"
    assert NO_STORE in str(world.state.failure)
    assert {node.status for node in world.state.nodes.values()} == {"ready"}


def test_a_node_that_alone_cannot_open_a_store_any_more_is_left_out() -> None:
    world = World(spec(3, min_nodes=2, max_restarts=10))
    world.feed(inputs.Heartbeat("n1", stepped=True))
    world.machines["n1"].cannot_open = "OSError: [Errno 24] Too many open files"
    world.fail(3)
    world.settle()
    assert (world.state.phase, world.state.members) == (s.RUNNING, ("n2", "n3"))
    assert "Too many open files" in str(world.state.nodes["n1"].reason)


def test_a_lost_node_that_comes_back_unable_says_why() -> None:
    world = World(spec(3, min_nodes=2))
    world.die("n3")
    world.settle()
    world.machines["n3"].connected = True
    world.feed(inputs.Joined("n3", "n3-again", None))
    world.feed(inputs.Unfit("n3", "torch sees no GPU here"))
    reason = "torch sees no GPU here; `supervisor add --node n3` brings it back"
    assert (world.state.nodes["n3"].status, world.state.nodes["n3"].reason) == ("failed", reason)
    assert replay.fold(world.state.spec, world.records()).nodes["n3"].reason == reason
    assert world.state.nodes["n3"].connected
    assert world.state.phase == s.RUNNING


def test_silence_makes_a_node_lost() -> None:
    world = World(spec(3, min_nodes=2, node_timeout=15.0))
    world.machines["n3"].connected = False
    world.pass_time(16)
    world.settle()
    assert world.state.nodes["n3"].status == "lost"
    assert world.world_size == 4
    assert world.dropped == ["n3"], "a node that was only asleep must join anew"


def test_a_node_that_joins_after_the_group_was_formed_again_is_taken_in() -> None:
    world = World(spec(3, min_nodes=1))
    world.pass_time(1)
    world.now += 3 * world.state.spec.node_timeout
    generation = world.state.generation
    for name in ("n2", "n3"):
        # Its lease has ended its workers, and its report is read before the pause is noticed or just after it.
        world.machines[name].running = None
    world.feed(inputs.Tick())
    assert sorted(world.dropped) == ["n2", "n3"]
    for name in ("n2", "n3"):
        world.feed(inputs.Idle(name, generation))
    world.settle()
    world.join("n2")
    world.settle()
    assert (world.state.members, world.state.phase) == (("n1", "n2"), s.RUNNING)
    world.join("n3")
    world.settle()
    assert world.world_size == 6
