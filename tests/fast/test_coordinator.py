"""The coordinator's promises, on the pure state machine; what reads better as a story is in testdata/*.txt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator import state as s
from remote_agent.coordinator.machine import UNWANTED_S
from remote_agent.wire import NodeSpec
from remote_agent.wire.events import EventType
from tests.examples import examples
from tests.fast.world import World, spec


def test_forms_generation_0_in_inventory_order() -> None:
    world = World(spec(3))
    assert world.state.phase == s.RUNNING
    assert world.state.generation == 0
    assert [world.state.ranks[rank].node for rank in range(6)] == ["n1", "n1", "n2", "n2", "n3", "n3"]
    assert {"detect", "stop", "rendezvous", "spawn", "main"} <= set(world.last("generation_running").detail)


def test_an_agent_that_comes_to_a_removed_node_is_sent_away_unless_it_is_added_soon() -> None:
    for added in (False, True):
        world = World(spec(3, min_nodes=2))
        world.feed(inputs.Remove("n3"))
        world.settle()
        world.machines["n3"].connected, world.machines["n3"].running = False, None
        world.machines["n3"].lives += 1
        world.join("n3")
        world.settle()
        assert not world.sent("n3", "leave")
        if added:
            world.feed(inputs.Add(NodeSpec("n3", "10.0.0.3", "2")))
            world.settle()
        world.pass_time(UNWANTED_S + 2)
        assert bool(world.sent("n3", "leave")) is not added
        assert world.world_size == (6 if added else 4)


def test_messages_of_another_generation_change_nothing() -> None:
    world = World(spec(2))
    before = world.state
    world.feed(inputs.Exited("n2", 7, world.exit(world.machines["n2"], 2, code=1)))
    world.feed(inputs.Prepared("n1", 7, 1))
    world.feed(inputs.Main("n2", 3, 2))
    assert world.state == before


def test_the_journal_alone_gives_the_same_picture() -> None:
    world = World(spec(3, min_nodes=2))
    world.fail(1)
    world.settle()
    world.die("n3")
    world.settle()
    folded = replay.fold(world.state.spec, world.records())
    assert folded.generation == world.state.generation
    assert folded.members == world.state.members
    assert folded.restarts == world.state.restarts
    assert {name: node.status for name, node in folded.nodes.items()} == {
        name: node.status for name, node in world.state.nodes.items()
    }


def test_the_coordinator_that_is_removed_stays_until_another_node_can_take_over() -> None:
    """The agents of all others may be restarted at that moment: that is no reason to end the job."""
    world = World(spec(3, min_nodes=1))
    world.feed(inputs.Remove("n1"))
    world.die("n2")
    world.die("n3")
    world.settle()
    world.pass_time(30.0)
    assert (world.state.ended, world.heirs) == (None, [])
    assert "once another node can take over" in world.last("warning").detail["message"]
    world.join("n2")
    world.settle()
    assert (world.state.ended, world.heirs) == (None, ["n2"])
    assert world.last("node_removed").node == "n1"


@pytest.mark.parametrize(("size", "gone", "untold"), [(3, 2, ["n2", "n3"]), (3, 1, []), (2, 1, []), (4, 2, [])])
def test_an_end_names_the_nodes_that_may_continue_without_it(size: int, gone: int, untold: list[str]) -> None:
    """Those in reach are more than half of the group, or half with the node that formed it: then nobody else may."""
    world = World(spec(size, min_nodes=1))
    for name in list(world.machines)[size - gone :]:
        world.machines[name].connected = False
        world.orders[name].clear()
    world.feed(inputs.Stop(operator="me"))
    world.settle()
    world.pass_time(120.0)
    world.settle()
    detail = world.last("job_stopped").detail
    assert detail.get("untold", []) == untold
    assert ("may continue" in detail["reason"]) == bool(untold)


def test_a_stop_outlives_the_coordinator_that_was_asked() -> None:
    for cut in (1, 2):
        # While the workers stop, and while a generation is being formed.
        world = World(spec(3, min_nodes=2))
        world.feed(inputs.Stop(operator="me", preempted="the allocation ends"))
        if cut == 2:
            world.events[-1:-1] = [s.Emit(EventType.GENERATION_STOPPED, 0, detail={"cause": "failure", "stop_ms": 1.0})]
        world.state = replay.take_over(world.state.spec, "n2", 2, world.records(), world.now)
        world.die("n1")
        for name in ("n2", "n3"):
            world.machines[name].connected = False
            world.join(name)
        world.settle()
        assert (world.state.phase, world.state.ended) == (s.ENDED, "stopped")
        assert "the allocation ends" in world.last("job_stopped").detail["reason"]
        assert world.types().count("generation_started") == 1


def test_a_nodes_environment_stays_out_of_the_journal() -> None:
    world = World(spec(2, min_nodes=1))
    world.feed(inputs.Add(NodeSpec("n2", "10.0.0.2", "2", env={"TOKEN": "secret"})))
    world.feed(inputs.Remove("n2"))
    world.settle()
    world.join("n2")
    world.feed(inputs.Add(NodeSpec("n2", "10.0.0.2", "2", env={"TOKEN": "secret"})))
    assert world.last("node_added").detail["spec"]["address"] == "10.0.0.2"
    assert "secret" not in str(world.records())


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["deliver", "fail", "die", "join", "restart", "remove", "add", "time"]), st.integers(0, 31)
    ),
    max_size=60,
)


@examples(200)
@given(MOVES)
def test_whatever_happens_one_generation_runs_and_nothing_deadlocks(moves: list[tuple[str, int]]) -> None:
    world = World(spec(4, min_nodes=2, max_restarts=100), start=False)
    for name in world.machines:
        world.join(name)
    for kind, number in moves:
        play(world, kind, number)
        running = {machine.running for machine in world.machines.values() if machine.running is not None}
        newest = {generation for generation in running if generation == world.state.generation}
        assert len(running) <= 1 or not newest, f"generations {running} at once"
    for name in world.machines:
        if world.state.nodes[name].status not in ("removed", "failed"):
            world.join(name)
    world.settle()
    world.pass_time(200)
    world.settle()
    fit = [node for node in world.state.nodes.values() if node.status in ("ready", "running") and node.connected]
    if world.state.phase != s.ENDED and len(fit) >= 2:
        assert world.state.phase == s.RUNNING
        assert set(world.state.members) == {node.name for node in fit}


def play(world: World, kind: str, number: int) -> None:
    """One move of the random game; n1 holds the coordinator and stays."""
    other = f"n{2 + number % 3}"
    if kind == "deliver":
        queues = world.waiting()
        if queues:
            world.deliver(*queues[number % len(queues)])
    elif kind == "fail":
        world.feed(inputs.Heartbeat("n1", stepped=True))
        world.fail(number % 8)
    elif kind == "die":
        world.die(other)
    elif kind == "join":
        world.join(other)
    elif kind == "restart":
        world.feed(inputs.Restart())
    elif kind == "remove":
        world.feed(inputs.Remove(other))
    elif kind == "add":
        world.join(other)
        world.feed(inputs.Add(NodeSpec(other, "10.0.0.9", "2")))
    else:
        world.pass_time(float(number))


def test_an_order_that_cannot_be_carried_out_is_a_charged_failure() -> None:
    world = World(spec(2, max_restarts=1))
    world.feed(inputs.Restart())
    while not (world.orders["n1"] and world.orders["n1"][0].op == "go"):
        world.deliver(*world.waiting()[0])
    world.feed(inputs.OrderFailed("n1", 1, "go: [Errno 28] No space left on device"))
    world.settle()
    assert world.state.restarts == 1
    assert "n1" in world.last("incident").detail["summary"]


def test_an_order_to_open_the_store_that_was_lost_is_given_again() -> None:
    world = World(spec(2))
    world.feed(inputs.Restart("me"))
    while world.state.phase != s.PREPARING:
        world.deliver(*world.waiting()[0])
    assert world.orders["n1"].popleft().op == "prepare"
    world.machines["n1"].connected = False
    world.join("n2")
    world.join("n1")
    world.settle()
    assert (world.state.phase, world.state.generation, world.state.restarts) == (s.RUNNING, 1, 0)


def test_agents_that_leave_after_the_end_are_not_lost() -> None:
    world = World(spec(2))
    world.finish()
    world.settle()
    world.feed(inputs.AgentDead("n2", "its agent died"))
    assert world.types()[-1] == "job_succeeded"


def test_a_takeover_names_lost_nodes_and_stops_what_still_runs() -> None:
    world = World(spec(3, min_nodes=2))
    world.now = 100.0
    world.state = replay.take_over(world.state.spec, "n2", 2, world.records(), world.now, away_s=12.0)
    machines = world.machines
    machines["n1"].connected, machines["n1"].running = False, None
    for name in ("n2", "n3"):
        machines[name].connected = False
    world.feed(inputs.AgentDead("n1", "it coordinated the job, and is gone"))
    for name in ("n2", "n3"):
        world.join(name)
    world.settle()
    assert world.state.phase == s.RUNNING
    assert world.state.members == ("n2", "n3")
    kinds = world.types()
    assert kinds.index("node_lost") < kinds.index("generation_stopped") < kinds.index("incident")
    assert world.last("incident").detail["culprit_node"] == "n1"
    assert world.last("generation_running").detail["detect"] == 12_000.0
    assert world.state.restarts == 0


def test_a_notice_that_all_nodes_give_is_one_warning() -> None:
    world = World(spec(6), start=False)
    for name in world.machines:
        world.machines[name].notice = {"kind": "interface", "message": "use eth0"}
        world.join(name)
    world.settle()
    (warning,) = [event for event in world.events if event.type == EventType.WARNING]
    assert (warning.node, warning.rank) == ("n1", None)
    assert warning.detail == {"kind": "interface", "message": "use eth0 (also 5 other nodes)"}
    world.feed(inputs.Restart())
    world.settle()
    assert sum(event.type == EventType.WARNING for event in world.events) == 1
