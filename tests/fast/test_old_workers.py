"""No group starts before the workers of the old one are known to be gone, whatever a node does or does not say."""

from __future__ import annotations

from remote_agent.coordinator import inputs
from remote_agent.coordinator import state as s
from remote_agent.coordinator.formation import STARTED_TIMEOUT_S
from remote_agent.coordinator.transitions import STOP_MARGIN_S
from tests.fast.world import World, spec


def test_a_node_that_returns_with_workers_is_admitted_when_they_are_gone() -> None:
    world = World(spec(3, min_nodes=2))
    world.feed(inputs.AgentDead("n3", "cut off"))
    world.settle()
    assert (world.state.members, world.state.phase) == (("n1", "n2"), s.RUNNING)
    assert world.machines["n3"].running == 0
    world.machines["n3"].connected = True
    world.feed(inputs.Joined("n3", "n3-0", running=0))
    world.feed(inputs.Ready("n3", 2))
    assert (world.state.members, world.state.phase) == (("n1", "n2"), s.RUNNING)
    world.settle()
    assert (world.state.members, world.state.phase) == (("n1", "n2", "n3"), s.RUNNING)
    assert world.state.restarts == 0


def test_no_group_starts_while_a_node_may_have_workers_of_the_old_one() -> None:
    """A node that does not stop loses its connection, and with it its lease, before the others go on."""
    world = World(spec(3, min_nodes=2, stop_grace=5.0))
    world.machines["n3"].stuck = True
    world.feed(inputs.Restart("me"))
    world.settle()
    world.pass_time(5.0 + STOP_MARGIN_S - 2)
    assert (world.state.phase, world.dropped) == (s.STOPPING, [])
    world.pass_time(3)
    assert (world.state.phase, world.dropped) == (s.STOPPING, ["n3"])
    world.pass_time(world.state.spec.node_timeout)
    assert world.state.phase == s.STOPPING
    world.pass_time(5.0 + STOP_MARGIN_S)
    world.settle()
    assert (world.state.phase, world.state.members) == (s.RUNNING, ("n1", "n2"))
    assert world.state.nodes["n3"].status == "failed"


def test_a_node_that_stops_on_its_second_chance_stays_in_the_group() -> None:
    world = World(spec(3, min_nodes=2, stop_grace=5.0))
    world.machines["n3"].stuck = True
    world.feed(inputs.Restart("me"))
    world.settle()
    world.pass_time(5.0 + STOP_MARGIN_S + 1)
    assert world.dropped == ["n3"]
    world.machines["n3"].stuck = False
    world.join("n3")
    world.settle()
    assert (world.state.phase, world.state.members) == (s.RUNNING, ("n1", "n2", "n3"))


def _start_that_nobody_hears_of() -> World:
    """Return a job that stops its group because n3 did not start its workers; n3 is still waited for."""
    world = World(spec(3, min_nodes=2, stop_grace=5.0))
    world.machines["n3"].stuck = True
    world.feed(inputs.Exited("n3", 0, world.exit(world.machines["n3"], 4, code=1)))
    world.machines["n3"].running = None
    world.feed(inputs.Idle("n3", 0))
    world.settle()
    assert (world.state.phase, world.state.generation) == (s.STARTING, 1)
    world.pass_time(STARTED_TIMEOUT_S + 1)
    assert world.state.phase == s.STOPPING
    assert "n3" in world.state.waiting
    return world


def test_a_node_whose_start_nobody_hears_of_is_stopped_before_the_others_go_on() -> None:
    world = _start_that_nobody_hears_of()
    world.machines["n3"].running = None
    world.feed(inputs.Idle("n3", 1))
    world.settle()
    assert (world.state.phase, world.state.members) == (s.RUNNING, ("n1", "n2"))
    assert world.last("node_lost").detail["reason"].startswith("it did not start its workers in time; `supervisor add")


def test_a_node_that_is_given_up_and_then_dies_is_not_waited_for() -> None:
    world = _start_that_nobody_hears_of()
    world.die("n3")
    world.settle()
    assert (world.state.phase, world.state.members) == (s.RUNNING, ("n1", "n2"))


def test_a_node_that_is_given_up_and_never_stops_is_not_waited_for_for_ever() -> None:
    world = _start_that_nobody_hears_of()
    world.settle()
    world.pass_time(2 * (5.0 + STOP_MARGIN_S) + 2)
    world.settle()
    assert (world.state.phase, world.state.members) == (s.RUNNING, ("n1", "n2"))


def test_who_comes_back_while_the_role_is_handed_over_is_not_sent_home() -> None:
    world = World(spec(3))
    world.feed(inputs.Remove("n1"))
    world.settle()
    assert (world.heirs, world.state.ended) == (["n2"], None)
    world.feed(inputs.Joined("n3", "n3-again", None))
    assert not world.sent("n3", "end")
