"""What a job is doing, in one word, at every point of its life; and what becomes of its incidents.

In: the pure coordinator in a world. Out: `condition` and `incident` of the status, live and from the journal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator.status import condition, document
from remote_agent.diagnose.incidents import incidents_in
from remote_agent.wire import NodeSpec
from supervisor.inventory import Inventory, JobDefaults
from supervisor.session import Session
from tests.fast.test_stalls import Watched, came, waiting
from tests.fast.world import World, spec


def incident_of(world: World) -> Any:
    return document(world.state, {}, "n1")["incident"]


def doing(world: World) -> str:
    return str(document(world.state, {}, "n1")["condition"])


def trains(world: World) -> None:
    """The ranks print steps."""
    world.feed(inputs.Heartbeat("n1", stepped=True, moved=True))


def test_from_launch_to_success() -> None:
    world = World(spec(2), start=False)
    assert doing(world) == "launching"
    for name in world.machines:
        world.join(name)
    assert doing(world) == "launching", "the group is being formed"
    world.settle()
    world.pass_time(1)
    assert doing(world) == "importing", "no rank has shown anything"
    trains(world)
    assert doing(world) == "running"
    world.finish()
    world.settle()
    assert doing(world) == "succeeded"


def test_first_ranks_that_wait_for_a_process_that_loads_their_modules_import() -> None:
    world = World(spec(2), start=False)
    for name, machine in world.machines.items():
        machine.stuck = True
        world.join(name)
    world.settle()
    assert doing(world) == "launching", "they have just been ordered"
    world.pass_time(2)
    assert doing(world) == "importing"


def test_imports_end_with_the_first_collective_and_not_later_than_a_minute() -> None:
    world = Watched()
    world.pulses = {"n1": {**came(0), "groups": {}}, "n2": {**came(0), "groups": {}}}
    world.live(20)
    assert doing(world) == "importing"
    world.pulses = {"n1": came(1), "n2": came(1)}
    world.live(20)
    assert doing(world) == "running"
    up = World(spec(2))
    up.pass_time(1)
    for rank in range(4):
        assert doing(up) == "importing", "the process group is up on every rank, or it is not up"
        up.feed(inputs.Grouped("n1" if rank < 2 else "n2", 0, rank, 0.1))
    assert doing(up) == "running"
    silent = World(spec(2))
    silent.pass_time(61)
    assert doing(silent) == "running"


def test_a_hang_is_no_running_job_and_its_end_is_healed() -> None:
    world = Watched()
    world.live(60)
    assert doing(world) == "hung"
    (known,) = [incident_of(world)]
    assert (known["state"], known["ended_at"], known["ongoing"]) == ("open", None, True)
    world.pulses = {"n1": waiting(6, age_s=0.0), "n2": came(6)}
    world.live(20)
    assert doing(world) == "running"
    healed = incident_of(world)
    assert (healed["state"], healed["ongoing"]) == ("healed", False)
    assert healed["ended_at"]
    assert healed["over"].startswith("training resumed after ")


def test_a_hang_that_an_operator_restarts_is_open_until_the_next_group_makes_a_step() -> None:
    world = Watched()
    world.live(60)
    world.feed(inputs.Restart("me"))
    assert doing(world) == "restarting"
    world.settle()
    assert world.state.incident is not None
    assert (world.state.incident["state"], world.state.incident["ongoing"]) == ("open", False)
    trains(world)
    healed = incident_of(world)
    assert (healed["state"], healed["ongoing"], healed["over"]) == ("healed", False, "restart")


def test_a_lost_node_leaves_the_job_degraded_and_its_return_does_not() -> None:
    world = World(spec(3, min_nodes=2))
    trains(world)
    world.die("n3")
    assert doing(world) == "restarting"
    world.settle()
    trains(world)
    assert (doing(world), world.state.members) == ("degraded", ("n1", "n2"))
    assert document(world.state, {}, "n1")["state"] == "running", "the contract's state says no more"
    world.join("n3")
    world.settle()
    trains(world)
    assert (doing(world), len(world.state.members)) == ("running", 3)


def test_too_few_nodes_are_degraded() -> None:
    world = World(spec(3))
    world.die("n3")
    world.settle()
    world.pass_time(1)
    assert doing(world) == "degraded"


@pytest.mark.parametrize(
    "takes_out", [inputs.Remove("n3"), inputs.Cordon("n3")], ids=["removed", "cordoned, then lost"]
)
def test_what_an_operator_takes_out_is_not_missed(takes_out: Any) -> None:
    world = World(spec(3, min_nodes=2))
    world.feed(takes_out)
    world.settle()
    world.die("n3")
    world.settle()
    trains(world)
    assert (doing(world), world.state.members) == ("running", ("n1", "n2"))


def test_a_spare_fills_the_place() -> None:
    world = World(spec(4, spares=1))
    world.die("n2")
    world.settle()
    trains(world)
    assert (doing(world), world.state.members) == ("running", ("n1", "n3", "n4"))


def test_a_job_that_ends_is_stopping_first() -> None:
    world = World(spec(2))
    world.feed(inputs.Stop())
    assert doing(world) == "stopping"
    world.settle()
    assert doing(world) == "stopped"


def test_a_failure_without_a_restart_left_is_no_restart() -> None:
    world = World(spec(2, max_restarts=1))
    trains(world)
    world.fail(0)
    world.deliver("report", "n1")
    assert doing(world) == "restarting"
    world.settle()
    trains(world)
    assert incident_of(world)["state"] == "healed"
    world.fail(0, "KeyError: other")
    world.deliver("report", "n1")
    assert doing(world) == "stopping"
    world.settle()
    assert doing(world) == "failed"
    assert [(each["state"], each["over"]) for each in incidents_in(world.records())] == [
        ("healed", "generation 1 has made a step"),
        ("over", "job failed"),
    ]


def test_a_group_that_stops_slowly_has_its_incident_at_once_and_keeps_its_number() -> None:
    world = World(spec(2))
    trains(world)
    world.fail(3, "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711")
    world.deliver("report", "n2")
    # Its SIGTERM handler takes its time: no order to stop is carried out here.
    world.pass_time(0.25)
    assert "incident" not in world.types(), "most groups have stopped by then"
    world.pass_time(2)
    assert world.types().count("incident") == 1
    first = incident_of(world)
    assert (first["id"], first["state"], first["preliminary"], first["confidence"]) == (1, "open", True, "unknown")
    assert "Connection closed by peer" in first["summary"]
    world.fail(0, "KeyError: 'labels'")
    world.deliver("report", "n1")
    world.pass_time(2)
    cause = incident_of(world)
    assert (cause["id"], cause["culprit_ranks"], cause["preliminary"]) == (1, [0], True)
    assert (cause["exit"]["code"], incidents_in(world.records())) == (1, [cause])
    world.settle()
    [verdict] = incidents_in(world.records())
    assert world.types().count("incident") == 3
    assert (verdict["id"], verdict["culprit_ranks"], verdict["victims"][0]["ranks"]) == (1, [0], [3])
    assert "preliminary" not in verdict
    replayed = replay.fold(world.state.spec, world.records())
    assert (replayed.incidents, replayed.incident, world.state.incident) == (1, verdict, verdict)


def test_a_preliminary_incident_ends_with_its_group_also_where_no_verdict_follows() -> None:
    world = World(spec(2))
    world.fail(0, "KeyError: 'labels'")
    world.deliver("report", "n1")
    world.pass_time(1)
    world.feed(inputs.Stop())
    world.settle()
    [incident] = incidents_in(world.records())
    assert (incident["culprit_ranks"], incident["state"], "preliminary" in incident) == ([0], "over", False)
    # The next coordinator begins with another number.
    assert replay.take_over(world.state.spec, "n2", 2, world.records(), 0.0).preliminary is None


def test_a_failure_is_healed_by_a_step_and_not_by_imports() -> None:
    world = World(spec(2))
    trains(world)
    world.fail(0)
    world.settle()
    world.pass_time(30)
    assert doing(world) == "importing"
    assert [each["state"] for each in incidents_in(world.records())] == ["open"]
    trains(world)
    trains(world)
    assert [each["state"] for each in incidents_in(world.records())] == ["healed"]
    assert world.types().count("incident_healed") == 1


def test_where_no_steps_are_shown_a_failure_is_healed_after_a_minute() -> None:
    world = World(spec(2))
    world.fail(0)
    world.settle()
    world.pass_time(58)
    assert incident_of(world)["state"] == "open"
    world.pass_time(3)
    healed = incident_of(world)
    assert (healed["state"], healed["over"]) == ("healed", "generation 1 has run for 60 s without showing steps")
    assert replay.fold(world.state.spec, world.records()).incident == {**healed, "ended_at": "2026-01-01T00:00:00.000Z"}


def test_a_group_whose_ranks_have_not_left_init_process_group_has_healed_nothing() -> None:
    world = World(spec(2))
    world.fail(0)
    world.settle()
    generation = world.state.generation
    for rank in range(4):
        world.feed(inputs.Grouping(f"n{rank // 2 + 1}", generation, rank))
    for rank in range(3):
        world.feed(inputs.Grouped(f"n{rank // 2 + 1}", generation, rank, 1.0))
    world.pass_time(120)
    assert incident_of(world)["state"] == "open"
    world.feed(inputs.Grouped("n2", generation, 3, 120.0))
    assert incident_of(world)["state"] == "healed"


def test_a_removed_node_that_is_added_again_is_wanted() -> None:
    world = World(spec(2, min_nodes=1))
    world.feed(inputs.Remove("n2"))
    world.settle()
    world.feed(inputs.Add(NodeSpec("n2", "10.0.0.2", "2")))
    world.machines["n2"].lives += 1
    world.join("n2")
    world.settle()
    world.die("n2")
    world.settle()
    trains(world)
    assert doing(world) == "degraded"


def test_who_follows_a_journal_knows_what_became_of_an_incident() -> None:
    """A screen that had the hang on it must not need to ask again when it is over."""
    world = Watched()
    world.live(60)
    session = Session(Inventory(None, (), JobDefaults(Path())), "any")
    records: Any = world.records()
    for event in records:
        session.add_event(event)
    assert [(each["state"], each["ongoing"]) for each in session.incidents] == [("open", True)]
    world.pulses = {"n1": waiting(6, age_s=0.0), "n2": came(6)}
    world.live(20)
    records = world.records()
    for event in records:
        session.add_event(event)
    assert [(each["state"], each["ongoing"]) for each in session.incidents] == [("healed", False)]


def test_the_journal_gives_back_condition_and_incident() -> None:
    world = Watched()
    world.live(60)
    for change in (None, inputs.Restart("me"), inputs.Stop()):
        if change is not None:
            world.feed(change)
        world.settle()
        read = replay.fold(world.state.spec, world.records())
        kept = {"ended_at"}
        live = {key: value for key, value in (world.state.incident or {}).items() if key not in kept}
        assert {key: value for key, value in (read.incident or {}).items() if key not in kept} == live
        expected = {"importing": "running"}.get(condition(world.state), condition(world.state))
        assert condition(read) == expected


NO_GPU = "nproc_per_node is gpu, and torch sees no GPU here"


@pytest.mark.parametrize("min_nodes", [2, 3])
def test_a_node_that_comes_back_unfit_is_missed_at_once_with_its_reason_and_the_way_out(min_nodes: int) -> None:
    world = World(spec(3, min_nodes=min_nodes))
    world.die("n3")
    world.settle()
    trains(world)
    reported = len(world.events)
    world.feed(inputs.Joined("n3", "anew", nproc=0))
    world.feed(inputs.Unfit("n3", NO_GPU))
    world.settle()
    status = document(world.state, {}, "n1")
    why = f"n3: {NO_GPU}; `supervisor add --node n3` brings it back"
    assert status["condition"] == "degraded"
    plan = str(status["plan"])
    assert why in plan
    assert plan.startswith(f"waiting for nodes: {'2 of 3 run' if min_nodes == 2 else 'fewer than'}")
    says = [event.detail["reason"] for event in world.events[reported:]]
    assert [why in reason for reason in says] == ([False] if min_nodes == 2 else [False, True]), says
    assert all(NO_GPU in reason for reason in says)


def slow_stop(world: World) -> str:
    """Let time go by while the members have not carried out their orders to stop; returns what the job does then."""
    world.pass_time(1)
    condition = doing(world)
    world.settle()
    return condition


def test_a_job_that_continues_without_its_bad_node_is_not_stopping() -> None:
    """The restarts are used up, and the third fault of the same machine leaves only that machine out."""
    world = World(spec(3, min_nodes=2, max_restarts=2))
    for _ in range(2):
        trains(world)
        world.fail(4, "RuntimeError: CUDA error: uncorrectable ECC error encountered")
        world.settle()
    trains(world)
    world.fail(4, "RuntimeError: CUDA error: uncorrectable ECC error encountered")
    world.deliver("report", "n3")
    assert doing(world) == "restarting", "it may be that machine"
    assert slow_stop(world) == "restarting"
    assert world.state.members == ("n1", "n2")


def test_the_same_failure_twice_before_the_first_step_ends_the_job_and_it_is_stopping() -> None:
    world = World(spec(2))
    world.fail(0)
    world.settle()
    world.fail(2)
    world.deliver("report", "n2")
    assert slow_stop(world) == "stopping"
    assert doing(world) == "failed"
