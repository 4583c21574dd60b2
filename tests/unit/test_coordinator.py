"""The coordinator's promises, on the pure state machine."""

from __future__ import annotations

import dataclasses

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote_agent import inputs, restore
from remote_agent import state as s
from remote_agent.coordinator import UNWANTED_S
from remote_agent.wire import NodeSpec
from tests.unit.world import World, spec


def test_forms_generation_0_in_inventory_order() -> None:
    world = World(spec(3))
    assert world.state.phase == s.RUNNING
    assert world.state.generation == 0
    assert [world.state.ranks[rank].node for rank in range(6)] == ["n1", "n1", "n2", "n2", "n3", "n3"]
    assert {"detect", "stop", "rendezvous", "spawn", "main"} <= set(world.last("generation_running").detail)


def test_waits_for_all_then_starts_with_min_nodes_after_the_join_timeout() -> None:
    world = World(spec(3, min_nodes=2, join_timeout=30.0), start=False)
    world.join("n1")
    world.join("n2")
    world.settle()
    assert world.state.phase == s.FORMING
    world.pass_time(31)
    world.settle()
    assert world.state.phase == s.RUNNING
    assert world.state.members == ("n1", "n2")


def test_a_node_that_never_came_up_is_not_waited_for() -> None:
    world = World(spec(3, min_nodes=2), start=False)
    world.feed(inputs.Unfit("n3", "connect: no route to host"))
    world.join("n1")
    world.join("n2")
    world.settle()
    assert world.state.phase == s.RUNNING
    assert world.state.nodes["n3"].status == "failed"


def test_a_failed_rank_restarts_all_and_is_charged() -> None:
    world = World(spec(3))
    world.fail(3)
    world.settle()
    assert (world.state.generation, world.state.restarts, world.state.phase) == (1, 1, s.RUNNING)
    incident = world.last("incident").detail
    assert incident["culprit_ranks"] == [3]
    assert incident["culprit_node"] == "n2"


def test_job_fails_when_the_budget_is_used_up() -> None:
    world = World(spec(2, max_restarts=2))
    for number in range(3):
        world.state = dataclasses.replace(world.state, stepped=True)
        world.fail(1, f"ValueError: another {'x' * number}")
        world.settle()
    assert world.state.ended == "failed"
    assert world.state.generation == 2
    assert "max_restarts" in str(world.state.failure)


def test_the_same_failure_before_the_first_step_twice_in_a_row_stops_the_job() -> None:
    world = World(spec(2, max_restarts=10))
    for _ in range(2):
        world.fail(0, "ModuleNotFoundError: No module named 'wandb'")
        world.settle()
    assert world.state.ended == "failed"
    assert world.state.generation == 1
    assert "twice in a row before the first step" in str(world.state.failure)


def test_the_same_failure_after_steps_uses_the_budget_only() -> None:
    world = World(spec(2, max_restarts=10))
    for _ in range(4):
        world.feed(inputs.Beat("n1", stepped=True))
        world.fail(0)
        world.settle()
    assert world.state.phase == s.RUNNING
    assert world.state.restarts == 4


def test_operator_restart_is_free() -> None:
    world = World(spec(2, max_restarts=0))
    world.feed(inputs.Restart("me"))
    world.settle()
    assert (world.state.generation, world.state.restarts, world.state.phase) == (1, 0, s.RUNNING)


def test_remove_and_add_again_is_free() -> None:
    world = World(spec(4))
    world.feed(inputs.Remove("n3"))
    world.settle()
    assert (world.world_size, world.state.restarts) == (6, 0)
    assert world.state.nodes["n3"].status == "removed"
    world.machines["n3"].lives += 1
    world.join("n3")
    assert world.world_size == 6
    world.feed(inputs.Add(NodeSpec("n3", "10.0.0.3", "2")))
    world.settle()
    assert (world.world_size, world.state.restarts) == (8, 0)
    assert world.state.members == ("n1", "n2", "n3", "n4")


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


def test_removing_the_coordinator_hands_the_role_over_after_the_stop() -> None:
    world = World(spec(3))
    world.feed(inputs.Remove("n1"))
    world.settle()
    assert world.heirs == ["n2"]
    assert all(machine.running is None for machine in world.machines.values())


def test_the_last_node_cannot_be_removed() -> None:
    world = World(spec(1))
    world.feed(inputs.Remove("n1"))
    assert not world.replies[-1].accepted
    assert world.state.phase == s.RUNNING


def test_ranks_that_fall_with_a_lost_node_are_not_charged() -> None:
    world = World(spec(3, min_nodes=2))
    world.fail(0, "RuntimeError: Connection closed by peer [10.0.0.3]:1")
    world.deliver("report", "n1")
    world.die("n3")
    world.settle()
    assert world.state.restarts == 0
    assert world.world_size == 4


def test_without_enough_nodes_it_waits_degraded() -> None:
    world = World(spec(3, min_nodes=3))
    world.die("n2")
    world.settle()
    assert world.state.phase == s.FORMING
    assert "job_degraded" in world.types()
    world.join("n2")
    world.settle()
    assert world.state.phase == s.RUNNING


def test_a_spare_replaces_a_lost_node() -> None:
    world = World(spec(4, spares=1))
    assert world.world_size == 6
    world.die("n2")
    world.settle()
    assert world.state.members == ("n1", "n3", "n4")
    assert world.state.restarts == 0


def test_the_smaller_side_stops_before_the_others_may_form_a_group() -> None:
    world = World(spec(4, min_nodes=1, node_timeout=15.0))
    for name in ("n2", "n3", "n4"):
        world.machines[name].connected = False
    world.pass_time(10)
    world.settle()
    assert world.machines["n1"].running is None
    assert world.state.phase != s.RUNNING
    world.pass_time(60)
    world.settle()
    assert world.machines["n1"].running is None


def test_success_ends_the_job_once() -> None:
    world = World(spec(2))
    world.finish()
    world.settle()
    assert world.state.ended == "succeeded"
    assert world.types().count("job_succeeded") == 1


def test_stop_ends_the_job_and_further_verbs_are_refused() -> None:
    world = World(spec(2))
    world.feed(inputs.Stop())
    world.settle()
    assert world.state.ended == "stopped"
    world.feed(inputs.Restart())
    assert not world.replies[-1].accepted


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
    folded = restore.fold(world.state.spec, world.records())
    assert folded.generation == world.state.generation
    assert folded.members == world.state.members
    assert folded.restarts == world.state.restarts
    assert {name: node.status for name, node in folded.nodes.items()} == {
        name: node.status for name, node in world.state.nodes.items()
    }


def test_a_new_coordinator_forms_the_next_generation_from_the_journal() -> None:
    world = World(spec(3, min_nodes=2))
    world.fail(1)
    world.settle()
    world.state = restore.take_over(world.state.spec, "n2", 2, world.records(), world.now)
    world.machines["n1"].connected, world.machines["n1"].running = False, None
    for name in ("n2", "n3"):
        world.machines[name].connected = False
        world.join(name)
    world.settle()
    world.pass_time(16)
    world.settle()
    assert world.state.phase == s.RUNNING
    assert world.state.members == ("n2", "n3")
    assert world.state.generation == 2
    assert world.state.restarts == 1


def test_a_stop_outlives_the_coordinator_that_was_asked() -> None:
    for cut in (1, 2):
        # While the workers stop, and while a generation is being formed.
        world = World(spec(3, min_nodes=2))
        world.feed(inputs.Stop(operator="me", preempted="the allocation ends"))
        if cut == 2:
            world.events[-1:-1] = [s.Emit("generation_stopped", 0, detail={"cause": "failure", "stop_ms": 1.0})]
        world.state = restore.take_over(world.state.spec, "n2", 2, world.records(), world.now)
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


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
        world.feed(inputs.Beat("n1", stepped=True))
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
    world.feed(inputs.Gone("n2", "its agent died"))
    assert world.types()[-1] == "job_succeeded"


def test_a_takeover_tells_who_was_lost_and_stops_what_still_runs() -> None:
    world = World(spec(3, min_nodes=2))
    world.now = 100.0
    world.state = restore.take_over(world.state.spec, "n2", 2, world.records(), world.now, away_s=12.0)
    machines = world.machines
    machines["n1"].connected, machines["n1"].running = False, None
    for name in ("n2", "n3"):
        machines[name].connected = False
    world.feed(inputs.Gone("n1", "it coordinated the job, and is gone"))
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
