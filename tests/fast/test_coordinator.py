"""The coordinator's promises, on the pure state machine; what reads better as a story is in testdata/*.txt."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_agent.agent import agent
from remote_agent.coordinator import formation, inputs, replay, views
from remote_agent.coordinator import state as s
from remote_agent.coordinator.operator_requests import answer, read
from remote_agent.coordinator.status import document
from remote_agent.coordinator.transitions import MAX_WARNINGS
from remote_agent.wire import PORTS, JobSpec, NodeSpec, Problem, Rendezvous
from supervisor.cli.status import contract
from supervisor.cli.up import job_options, parse_up
from supervisor.errors import UsageError
from supervisor.inventory import load
from supervisor.launch.specs import make_plan
from supervisor.wording.events import event_text
from supervisor.wording.status import status_lines
from tests.examples import examples
from tests.fast.cases import DATA
from tests.fast.waiting import some
from tests.fast.world import World, spec


def test_messages_of_another_generation_change_nothing() -> None:
    world = World(spec(2))
    before = world.state
    world.feed(inputs.Exited("n2", 7, world.exit(world.machines["n2"], 2, code=1)))
    world.feed(inputs.Prepared("n1", 7, 1))
    world.feed(inputs.Main("n2", 3, 2))
    assert world.state == before


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


# A job that nodes join by themselves: how many it waits for, and that every journal names the same nodes.


def open_world(nodes: int, **changes: Any) -> World:
    return World(spec(nodes, endpoint="n1:29400", **changes), start=False)


def come(world: World, name: str) -> None:
    """A node comes that nobody has named, as Role takes it in."""
    node = s.Node(NodeSpec(name, f"10.0.0.{name[1:]}"))
    world.state = dataclasses.replace(world.state, nodes={**world.state.nodes, name: node})
    world.join(name)
    world.settle()


def test_a_node_that_waits_says_for_what() -> None:
    world = open_world(2, join_timeout=20.0)
    come(world, "n2")
    assert agent.short_of(world.state, "n2") == "waiting for nodes: 2 are needed, connected: n2"
    come(world, "n1")
    assert agent.short_of(world.state, "n2") == ""


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


def test_every_journal_names_the_nodes_in_the_order_in_which_they_came() -> None:
    job = spec(1, endpoint="n2:29400")
    records: Any = [
        {"type": "node_joined", "node": name, "detail": {"spec": {"name": name, "address": "10.0.0.1"}}}
        for name in ("n2", "n1")
    ]
    assert list(replay.fold(job, records).nodes) == ["n2", "n1"]


# What operators set while a job runs: for which groups, and what is refused.


def test_what_an_operator_sets_holds_from_the_next_group_on_and_outlives_the_coordinator() -> None:
    world = World(spec(3, min_nodes=1))
    world.feed(inputs.Restart("me", {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring"}, later=True))
    assert world.replies[-1].message == "it applies from generation 1 on"
    assert world.last("environment_set").detail["from_generation"] == 1
    for env, part in (({"TOKEN": "secret"}, "TOKEN: only"), ({"NCCL_DEBUG": "x" * 2000}, "longer than")):
        world.feed(inputs.Restart("me", {"GLOO_X": "1", **env}))
        assert part in world.replies[-1].message
    world.state = replay.take_over(world.state.spec, "n2", 2, world.records(), world.now)
    world.die("n1")
    for name in ("n2", "n3"):
        world.machines[name].connected = False
        world.join(name)
    world.settle()
    assert world.last("generation_started").detail["env"] == {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring"}
    world.feed(inputs.Restart("me", {"NCCL_ALGO": None}))
    world.settle()
    assert world.last("generation_started").detail["env"] == {"NCCL_DEBUG": "INFO"}
    assert document(world.state, {}, "n2")["environment"] == {"env": {"NCCL_DEBUG": "INFO"}, "from_generation": 2}
    assert "secret" not in str(world.records())


def test_a_group_that_does_not_get_on_with_its_start_is_restarted() -> None:
    world = World(spec(2))
    world.feed(inputs.Restart("me"))
    while world.state.phase != s.STARTING:
        world.deliver(*world.waiting()[0])
    world.now += 6
    world.feed(inputs.Restart("me"))
    assert world.state.phase == s.STOPPING


# The status document: what nodes tell of themselves and their ranks, as it is by now.


def test_the_status_shows_who_lags_and_the_age_of_a_measurement() -> None:
    world = World(spec(2))
    said = {"progress": {"loss": 0.5}, "vitals": {"age_s": 1.0, "cpu": 5.0}}
    vitals = {"age_s": 1.0, "gpus": [{"index": 0, "age_s": 2.0}]}
    facts: Any = {
        "n1": {
            "generation": 0, "heard_at": 90.0, "measured_at": 90.0, "vitals": vitals,
            "ranks": {"0": {"step": 20, **said}, "1": {"step": 12, **said}},
        },
        "n2": {"generation": 0, "ranks": {"2": {"step": 19}, "3": {"step": 21}}},
    }  # fmt: skip
    first, second = document(world.state, facts, "n1", 100.0)["nodes"]
    assert first["vitals"] == {"age_s": 11.0, "gpus": [{"index": 0, "age_s": 12.0}]}
    assert [rank["progress"] for rank in first["ranks"]] == [{"loss": 0.5, "lag": 0}, {"loss": 0.5, "lag": 7}]
    assert first["ranks"][0]["vitals"] == {"age_s": 11.0, "cpu": 5.0}
    assert (second["vitals"], second["ranks"][0]["vitals"], second["ranks"][1]["progress"]) == (None, None, {"lag": 0})
    facts["n1"]["generation"] = -1
    before = document(world.state, {"n1": facts["n1"]}, "n1")
    assert before["nodes"][0]["vitals"] == vitals, "the node is the same in every generation, its ranks are not"
    assert before["nodes"][0]["ranks"][0]["vitals"] is None


def test_a_rank_that_just_reported_its_step_is_not_behind() -> None:
    world = World(spec(2))
    ranks = {"step": 100, "progress": {"steps_s": 10.0}}
    facts: Any = {
        "n1": {"generation": 0, "ranks": {"0": {**ranks, "step": 109}, "1": {**ranks, "step": 109}}},
        "n2": {"generation": 0, "heard_at": 99.1, "ranks": {"2": ranks, "3": {**ranks, "step": 50}}},
    }
    nodes: Any = document(world.state, facts, "n1", 100.0)["nodes"]
    assert [rank["progress"]["lag"] for node in nodes for rank in node["ranks"]] == [0, 0, 0, 50]


@pytest.mark.parametrize("over", [True, False], ids=["the job is over", "nothing is printed any more"])
def test_ranks_that_have_stopped_at_the_same_step_are_level(over: bool) -> None:
    world = World(spec(2))
    if over:
        world.feed(inputs.Stop())
        world.settle()
    last = {"step": 100, "progress": {"steps_s": 10.0}, "last_output_age_s": 0.1 if over else 30.0}
    facts: Any = {
        "n1": {"generation": 0, "heard_at": 99.9, "ranks": {"0": last, "1": last}},
        "n2": {"generation": 0, "heard_at": 90.0, "ranks": {"2": last, "3": last}},
    }
    nodes: Any = document(world.state, facts, "n1", 100.0)["nodes"]
    assert {rank["progress"]["lag"] for node in nodes for rank in node["ranks"]} == {0}


def test_a_rank_that_a_signal_ended_stays_failed_when_its_node_is_lost() -> None:
    world = World(spec(2))
    world.fail(2, signal="SIGSEGV")
    world.deliver("report", "n2")
    world.die("n2")
    for state in (world.state, replay.fold(world.state.spec, world.records())):
        assert [rank.state for rank in state.ranks.values()] == ["running", "running", "failed", "killed"]


def test_the_incident_of_a_lost_node_shows_the_last_line_of_each_of_its_ranks() -> None:
    world = World(spec(2))
    world.feed(inputs.Heartbeat("n2", said=((2, "step 6"), (3, "step 6"))))
    world.feed(inputs.Heartbeat("n2", said=((2, "step 7"), (3, "RuntimeError: x"))))
    world.die("n2")
    world.settle()
    shown = [(one["node"], one["rank"], one["text"]) for one in some(world.state.incident)["evidence"]]
    assert shown == [("n2", 2, "last output on n2: step 7"), ("n2", 3, "last output on n2: RuntimeError: x")]
    assert world.last("node_lost").detail["said"] == [[2, "step 7"], [3, "RuntimeError: x"]]
    # The next coordinator knows them as well.
    assert replay.fold(world.state.spec, world.records()).nodes["n2"].said == ((2, "step 7"), (3, "RuntimeError: x"))


def test_lines_of_an_earlier_group_are_not_shown_as_a_lost_nodes_last() -> None:
    world = World(spec(2))
    world.feed(inputs.Heartbeat("n2", said=((2, "step 7"),)))
    world.fail(0)
    world.settle()
    assert world.state.generation == 1
    world.die("n2")
    world.settle()
    assert some(world.state.incident)["evidence"] == []


# What a rank's output shows that is no failure: told once, in the journal and in the status, and nothing follows.


NAN = "loss is nan, about step 120"


def test_a_rank_is_warned_of_once_and_of_a_few_ranks() -> None:
    world = World(spec(2, nproc=8))
    for _ in range(3):
        world.feed(inputs.Heartbeat("n2", warnings={(9, "nan"): NAN}))
    world.feed(inputs.Heartbeat("n1", warnings={(rank, "nan"): NAN for rank in range(8)}))
    reported = [event for event in world.events if event.type == "warning"]
    assert [event.rank for event in reported] == [9, *range(MAX_WARNINGS - 1)]
    assert (reported[0].node, reported[0].detail) == ("n2", {"kind": "nan", "message": NAN})
    assert (world.state.phase, world.state.incident) == (s.RUNNING, None)
    # Whoever takes the role over does not tell it again.
    assert replay.fold(world.state.spec, world.records()).warnings == world.state.warnings
    status = document(world.state, {}, "n1")
    assert f"warning: rank 9: {NAN}" in status_lines(status)
    warnings: Any = contract(status)["warnings"]
    assert warnings[0] == {"kind": "nan", "node": "n2", "rank": 9, "message": NAN}
    record = next(record for record in world.records() if record["type"] == "warning")
    assert event_text(record) == NAN


# What a plan says is what the coordinator then does; what cannot be told is said to be unknown.


def test_a_request_about_several_nodes_is_answered_for_each() -> None:
    world = World(spec(3))
    nodes = {"nodes": ["n1", "n2"]}
    assert [name for name, _ in read("add", nodes, world.state)] == ["n1", "n2"]
    world.die("n2")
    with pytest.raises(Problem, match="not all"):
        read("add", nodes, world.state)
    reported = answer([("n1", s.Reply(True, "n1 drains", 1)), ("n9", s.Reply(False, "no n9", 0, "unknown_node"))])
    assert reported["nodes"]["n9"] == {"accepted": False, "message": "no n9", "hint": ""}
    assert (reported["generation"], reported["message"]) == (1, "n1 drains")
    with pytest.raises(Problem, match="no n9"):
        answer([("n9", s.Reply(False, "no n9", 0, "unknown_node"))])


# From which snapshots a group resumes: the coordinator's choice, and that no member starts without it.


def kept(
    name: str, time_ns: int, step: int | None = None, path: str = "snapshot.pt", *, exact: bool | None = None
) -> Any:
    exact = step is not None if exact is None else exact
    return {"id": name, "path": path, "time_ns": time_ns, "step": step, "exact": exact, "bytes": 1000}


def job(nodes: int = 3, **changes: Any) -> World:
    return World(spec(nodes, snapshots=("*.pt",), **{"min_nodes": 2, **changes}))


def in_place(world: World) -> set[tuple[str, ...]]:
    return {world.machines[name].in_place for name in world.state.members}


def have_all(world: World, *snapshots: Any) -> None:
    """All nodes have these, and have said so."""
    for machine in world.machines.values():
        machine.snapshots = list(snapshots)
        world.feed(inputs.Heartbeat(machine.name, snapshots=snapshots))


def go_back(world: World, name: str, wall_ns: int) -> set[tuple[str, ...]]:
    world.wall_ns = wall_ns
    world.feed(inputs.Restart("me", snapshot=name))
    world.settle()
    return in_place(world)


@pytest.mark.parametrize("late_s", [0.000000001, 20])
@pytest.mark.parametrize("exact", [True, False])
def test_the_files_of_one_save_are_gone_back_to_together(exact: bool, late_s: float) -> None:
    """Whichever of them is named, and also for the restarts that follow; a guessed step may be one look apart."""
    world = job()
    saves = [
        kept(
            f"{path}{step}",
            step * 10**9 + round(at * late_s * 1e9),
            step + (0 if exact else at),
            f"{path}.pt",
            exact=exact,
        )
        for step in (100, 200, 300)
        for at, path in enumerate(("model", "optim", "sched"))
    ]
    have_all(world, *saves)
    for number, name in enumerate(("optim200", "model100", "sched200")):
        save = {(f"model{name[5:]}", f"optim{name[5:]}", f"sched{name[5:]}")}
        assert go_back(world, name, 10**12 + number) == save
        world.fail(1)
        world.settle()
        assert in_place(world) == save, "the files that were written after the named one still count"


def test_a_series_with_its_own_rhythm_goes_back_to_what_it_was_then() -> None:
    world = job()
    best = [kept(f"best{step}", step * 10**9, step, f"best_{step}.pt") for step in (90, 290)]
    have_all(world, *best, *(kept(f"last{step}", step * 10**9, step, "last.pt", exact=False) for step in (200, 300)))
    assert go_back(world, "last200", 10**12) == {("best90", "last200")}


def test_the_status_names_each_snapshot_once_with_the_nodes_that_have_it() -> None:
    world = job()
    world.feed(inputs.Heartbeat("n1", snapshots=(kept("a", 1, 20), kept("b", 2, 30))))
    world.feed(inputs.Heartbeat("n3", snapshots=(kept("b", 2, 30),)))
    shown = views.kept_snapshots(world.state)
    assert [(one["id"], one["nodes"], one["skipped"]) for one in shown] == [
        ("a", ["n1"], False), ("b", ["n1", "n3"], False)
    ]  # fmt: skip


SAVES = st.lists(
    st.tuples(st.sampled_from(["deliver", "fail", "die", "join", "save", "restart", "time"]), st.integers(0, 31)),
    max_size=40,
)


@examples(25)
@given(SAVES)
def test_whatever_happens_the_members_of_a_group_resume_from_the_same_snapshot(moves: list[tuple[str, int]]) -> None:
    world = job(4, max_restarts=100)
    names = list(world.machines)
    for number, (kind, choice) in enumerate(moves):
        name = names[choice % len(names)]
        queues = world.waiting()
        if kind == "deliver" and queues:
            world.deliver(*queues[choice % len(queues)])
        elif kind == "fail":
            world.fail(choice % 8)
        elif kind == "die" and name != "n1":
            world.die(name)
        elif kind == "join":
            world.join(name)
        elif kind == "save":
            world.machines[name].snapshots.append(kept(f"s{number}", number, number))
        elif kind == "restart":
            world.feed(inputs.Restart("me"))
        elif kind == "time":
            world.pass_time(1.0)
        started = {machine.in_place for machine in world.machines.values() if machine.running is not None}
        assert len(started) <= 1


# A group that torch's own agents form: who opens the store, where others join, whose ranks are whose.


def group(backend: str = "c10d", endpoint: str = "", nodes: int = 2, generation: int = 0, nnodes: str = "") -> s.State:
    """A group that is about to be started."""
    asked = Rendezvous(backend, "job", endpoint, "", nnodes)
    world = World(spec(nodes), start=False)
    return dataclasses.replace(
        world.state,
        spec=dataclasses.replace(world.state.spec, rendezvous=asked),
        generation=generation,
        members=s.ranked(world.state.nodes),
    )


def test_c10d_meets_on_a_free_port_of_the_first_node() -> None:
    state = group()
    opened = some(formation.opener_of(state))
    node, order = opened
    assert (node, order["port"], order["hold"]) == ("n1", 0, True)
    found = some(formation.rendezvous_of(state, 4711))
    address = state.nodes["n1"].spec.address
    assert (found["endpoint"], found["nnodes"], found["run_id"]) == (f"{address}:4711", "2", "job")


def test_an_endpoint_on_a_node_of_ours_is_opened_there() -> None:
    state = group(endpoint="n2:4000")
    opened = some(formation.opener_of(state))
    assert (opened[0], opened[1]["port"]) == ("n2", 4000)
    assert formation.opener_of(group(endpoint="n2")) == ("n2", {**opened[1], "port": PORTS["c10d"]})


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("c10d", "elsewhere:4000"), ("etcd-v2", "etcd:2379"), ("etcd", "e:1")]
)
def test_a_store_that_is_not_ours_gets_another_run_with_each_generation(backend: str, endpoint: str) -> None:
    """torch closes a run for good when one of its agents leaves, and this store remembers it."""
    assert formation.opener_of(group(backend, endpoint)) is None
    names = [formation.rendezvous_of(group(backend, endpoint, generation=number), 0) for number in range(3)]
    assert [found and found["run_id"] for found in names] == ["job", "job.1", "job.2"]


def assigned(node: str, generation: int, ranks: dict[int, int], world_size: int) -> inputs.Assigned:
    """That node's only rank, by number, with its pid."""
    return inputs.Assigned(node, generation, tuple((rank, 0, pid) for rank, pid in ranks.items()), world_size)


def started(nnodes: str = "") -> World:
    """Two nodes of one rank each whose torch agents run, and wait for each other."""
    made = spec(2, nproc=1)
    world = World(dataclasses.replace(made, rendezvous=Rendezvous("c10d", "job", nnodes=nnodes)), start=False)
    for name in ("n1", "n2"):
        world.feed(inputs.Joined(name, f"{name}-1"))
        world.feed(inputs.Ready(name, 1))
    world.feed(inputs.Prepared("n1", 0, 4711))
    world.feed(inputs.Recorded("n1", 0, 1))
    for name in ("n1", "n2"):
        world.feed(inputs.Started(name, 0, ()))
    return world


def test_torch_says_which_ranks_a_node_has() -> None:
    world = started()
    assert world.state.phase == s.STARTING
    world.feed(inputs.Main("n1", 0, 1))
    world.feed(assigned("n1", 0, {1: 101}, 2))
    world.feed(inputs.Main("n2", 0, 0))
    assert world.state.phase == s.STARTING
    world.feed(assigned("n2", 0, {0: 100}, 2))
    assert world.state.phase == s.RUNNING
    # A new coordinator knows it, too: from the journal.
    for state in (world.state, replay.fold(world.state.spec, world.records())):
        assert {rank.rank: (rank.node, rank.pid) for rank in state.ranks.values()} == {0: ("n2", 100), 1: ("n1", 101)}


def test_ranks_of_others_are_counted_and_reported() -> None:
    world = started("3")
    for name, rank in (("n1", 0), ("n2", 2)):
        world.feed(assigned(name, 0, {rank: 100 + rank}, 3))
        world.feed(inputs.Main(name, 0, rank))
    reported = document(world.state, {}, "n1")
    assert reported["world_size"] == 3
    assert "1 of 3 ranks are outside HOSTS" in str(reported["plan"])
    assert "--rdzv-backend c10d --rdzv-endpoint" in str(reported["plan"])


def test_torch_may_assign_the_ranks_anew_while_the_group_runs() -> None:
    world = started("2:3")
    for name, rank in (("n1", 0), ("n2", 1)):
        world.feed(assigned(name, 0, {rank: 100 + rank}, 2))
        world.feed(inputs.Main(name, 0, rank))
    world.feed(assigned("n1", 0, {1: 201}, 3))
    world.feed(assigned("n2", 0, {2: 202}, 3))
    assert {rank.rank: rank.node for rank in world.state.ranks.values()} == {1: "n1", 2: "n2"}
    assert (world.state.phase, world.state.world_size, world.state.generation) == (s.RUNNING, 3, 0)


def test_a_repeated_report_does_not_raise_a_dead_rank() -> None:
    world = started()
    for name, rank in (("n1", 0), ("n2", 1)):
        world.feed(assigned(name, 0, {rank: 100 + rank}, 2))
        world.feed(inputs.Main(name, 0, rank))
    ended: Any = {"rank": 1, "local_rank": 0, "pid": 101, "code": 0, "signal": None, "t_ns": 1}
    world.feed(inputs.Exited("n2", 0, ended))
    world.feed(assigned("n2", 0, {1: 101}, 2))
    assert world.state.ranks[1].state == "succeeded"


def test_the_description_of_a_job_keeps_its_rendezvous() -> None:
    made = dataclasses.replace(spec(2), rendezvous=Rendezvous("etcd", "job", "etcd:2379", "a=b", "2:3"))
    assert JobSpec.from_json(made.to_json()) == made


def rendezvous_of(tmp_path: Path, argv: list[str]) -> str:
    """Who forms the group of the job that these options describe, on two hosts."""
    (tmp_path / "t.py").write_text("")
    hosts = tmp_path / "hosts.toml"
    hosts.write_text("".join(f'[[hosts]]\nname = "n{number}"\nssh = "10.0.0.{number}"\n' for number in (1, 2)))
    try:
        made = make_plan(load(hosts), job_options(parse_up([*argv, "t.py"])), tmp_path).spec
    except UsageError as refused:
        return f"refused: {refused.message}".replace(str(tmp_path), "HERE")
    found = made.rendezvous
    nodes = f"{made.min_nodes}-{made.max_nodes} nodes"
    if found is None:
        return f"the coordinator, of {nodes} within {made.join_timeout} s and {made.settle_timeout} s"
    place = f"at '{found.endpoint}' with '{found.conf}'"
    return f"{found.backend} {found.run_id} {place} of {nodes}, for torch '{found.nnodes}'"


MEETINGS = [line.split(" -> ") for line in (DATA / "rendezvous.txt").read_text().splitlines()[1:]]


@pytest.mark.parametrize(("argv", "told"), MEETINGS)
def test_options_say_who_forms_the_group(tmp_path: Path, argv: str, told: str) -> None:
    assert rendezvous_of(tmp_path, argv.replace("(none)", "").split()) == told
