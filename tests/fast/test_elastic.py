"""Elastic membership on the pure state machine: settle time, spares, nodes given up, stray agents."""

from __future__ import annotations

from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator import state as s
from tests.fast.world import World, spec


def test_an_elastic_group_starts_after_the_settle_time_and_admits_the_late() -> None:
    world = World(spec(4, min_nodes=2, max_nodes=4, settle_timeout=3.0), start=False)
    for name in ("n1", "n2"):
        world.join(name)
    world.settle()
    assert world.state.phase == s.FORMING
    world.pass_time(4)
    world.settle()
    assert (world.state.phase, world.state.members) == (s.RUNNING, ("n1", "n2"))
    world.join("n3")
    world.settle()
    assert (world.world_size, world.state.restarts) == (6, 0)


def test_a_node_that_returns_to_a_full_group_is_a_spare() -> None:
    world = World(spec(4, spares=1))
    world.die("n2")
    world.settle()
    generation = world.state.generation
    world.join("n2")
    world.settle()
    assert (world.state.nodes["n2"].status, world.state.generation) == ("spare", generation)
    world.die("n3")
    world.settle()
    assert world.state.members == ("n1", "n2", "n4")


def test_a_spare_takes_a_removed_place_only_where_min_nodes_asks() -> None:
    for needed, members in ((3, ("n1", "n3", "n4")), (2, ("n1", "n3"))):
        world = World(spec(4, spares=1, min_nodes=needed))
        world.feed(inputs.Remove("n2"))
        world.settle()
        assert world.state.members == members


def taken_over() -> World:
    """n1, which coordinated the group n1 n2 n3, is dead; n2 has taken over, and the spare n4 has yet to come."""
    world = World(spec(4, spares=1, min_nodes=2))
    world.state = replay.take_over(world.state.spec, "n2", 2, world.records(), world.now)
    for name in world.machines:
        world.machines[name].connected = False
    world.die("n1")
    for name in ("n2", "n3"):
        world.join(name)
    world.settle()
    assert world.state.phase == s.FORMING, "a node is absent, and the spare is not here yet"
    return world


def test_a_spare_replaces_the_coordinators_node_in_the_next_group() -> None:
    world = taken_over()
    world.join("n4")
    world.settle()
    assert (world.state.generation, world.state.members) == (1, ("n2", "n3", "n4"))


def test_a_spare_that_does_not_come_is_waited_for_once_and_comes_in_late() -> None:
    world = taken_over()
    world.pass_time(world.state.spec.node_timeout + 1)
    world.settle()
    assert (world.state.phase, world.state.members) == (s.RUNNING, ("n2", "n3"))
    assert (world.last("node_lost").node, world.state.nodes["n4"].status) == ("n4", "lost")
    world.join("n4")
    world.settle()
    assert (world.state.generation, world.state.members, world.state.restarts) == (2, ("n2", "n3", "n4"), 0)
    # The group is full again: who returns now stands by.
    world.machines["n1"].lives += 1
    world.join("n1")
    world.settle()
    assert (world.state.generation, world.state.nodes["n1"].status) == (2, "spare")


def test_a_spare_is_started_with_where_a_node_never_came_up() -> None:
    world = World(spec(4, spares=1, min_nodes=2), start=False)
    world.feed(inputs.Unfit("n2", "connect: no route to host"))
    for name in ("n1", "n3", "n4"):
        world.join(name)
    world.settle()
    assert (world.state.generation, world.state.members) == (0, ("n1", "n3", "n4"))


def test_a_node_that_an_operator_calls_dead_does_not_count_for_the_quorum() -> None:
    world = World(spec(5, min_nodes=1))
    world.state = replay.take_over(world.state.spec, "n4", 2, world.records(), world.now)
    for name in ("n1", "n2", "n3"):
        world.machines[name].connected, world.machines[name].running = False, None
        world.feed(inputs.GivenUp(name))
    for name in ("n4", "n5"):
        world.machines[name].connected = False
        world.join(name)
    world.settle()
    assert (world.state.phase, world.state.members) == (s.RUNNING, ("n4", "n5"))


def test_where_an_operator_calls_the_whole_last_group_dead_another_node_goes_on() -> None:
    world = World(spec(2, min_nodes=1))
    world.die("n2")
    world.settle()
    assert world.state.members == ("n1",)
    world.state = replay.take_over(world.state.spec, "n2", 2, world.records(), world.now)
    world.die("n1")
    world.machines["n2"].lives += 1
    world.join("n2")
    world.settle()
    assert world.state.phase == s.FORMING, "n1 may have formed another group"
    world.feed(inputs.GivenUp("n1"))
    world.settle()
    assert (world.state.phase, world.state.members) == (s.RUNNING, ("n2",))


def test_a_stray_agent_of_a_removed_node_is_sent_away() -> None:
    world = World(spec(3))
    world.feed(inputs.Remove("n3"))
    world.settle()
    world.machines["n3"].lives += 1
    world.join("n3")
    world.pass_time(62)
    world.settle()
    assert not world.machines["n3"].connected


ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def fail_on(world: World, rank: int, message: str = ECC) -> None:
    world.feed(inputs.Heartbeat("n1", stepped=True))
    world.fail(rank, message)
    world.settle()


def test_a_machine_that_keeps_failing_alone_is_left_out_until_it_is_added() -> None:
    world = World(spec(3, min_nodes=2, max_restarts=10))
    for _ in range(2):
        fail_on(world, 5)
        assert world.state.members == ("n1", "n2", "n3")
    fail_on(world, 5)
    assert (world.state.phase, world.state.members) == (s.RUNNING, ("n1", "n2"))
    reason = str(world.state.nodes["n3"].reason)
    assert "quarantined: caused 3 failures" in reason
    assert "supervisor add --node n3" in reason
    world.feed(inputs.Add(world.state.nodes["n3"].spec))
    world.settle()
    assert world.state.members == ("n1", "n2", "n3")
    fail_on(world, 5)
    assert world.state.members == ("n1", "n2", "n3")


def test_a_failure_of_the_script_or_of_several_nodes_blames_no_machine() -> None:
    world = World(spec(3, min_nodes=2, max_restarts=20))
    for number in range(4):
        fail_on(world, 5, f"ValueError: bad batch {number}")
    for rank in (5, 3, 5, 5, 5):
        fail_on(world, rank)
    assert (world.state.phase, world.state.members) == (s.RUNNING, ("n1", "n2", "n3"))


def test_the_end_of_the_allocation_is_an_incident_and_no_failure() -> None:
    world = World(spec(2))
    world.feed(inputs.Stop(preempted="Slurm ends allocation 7 (SIGTERM)"))
    world.settle()
    incident = world.last("incident").detail
    assert (incident["category"], incident["scope"], incident["culprit_ranks"]) == (
        "signal_preempted",
        "outside_the_ranks",
        [],
    )
    assert incident["summary"] == "preempted: Slurm ends allocation 7 (SIGTERM)"
    assert [victim["ranks"] for victim in incident["victims"]] == [[0, 1, 2, 3]]
    assert (world.state.ended, world.state.restarts) == ("stopped", 0)
    assert world.last("job_stopped").detail["reason"] == "Slurm ends allocation 7 (SIGTERM)"
