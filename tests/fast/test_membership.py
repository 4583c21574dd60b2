"""What a plan says is what the coordinator then does; what cannot be told is said to be unknown."""

from __future__ import annotations

from typing import Any

import pytest

from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator import state as s
from remote_agent.coordinator.operator_requests import CORDONED, answer, read
from remote_agent.coordinator.status import document
from remote_agent.wire import Problem
from supervisor.wording.plan import plan
from tests.fast.world import World, spec


def facts(op: str, names: tuple[str, ...], status: Any, events: tuple[Any, ...] = ()) -> dict[str, str]:
    return dict(plan(op, names, status, events).facts)


def carry_out(world: World, op: str, names: tuple[str, ...]) -> None:
    for name in names:
        world.feed(inputs.Remove(name) if op == "remove" else inputs.Add(world.state.nodes[name].spec))
    if op == "restart":
        world.feed(inputs.Restart())
    world.settle()


@pytest.mark.parametrize(
    ("job", "lost", "op", "names"),
    [
        (spec(4), (), "restart", ()),
        (spec(4), (), "remove", ("n2",)),
        (spec(5, min_nodes=1), (), "remove", ("n2", "n4")),
        (spec(4), (), "remove", ("n1",)),
        (spec(4, spares=1), (), "remove", ("n2",)),
        (spec(4, spares=1, min_nodes=2), (), "remove", ("n2",)),
        (spec(5, spares=2), ("n2",), "remove", ("n3",)),
        (spec(4, spares=1), (), "add", ("n4",)),
        (spec(5, spares=2), (), "add", ("n4", "n5")),
        (spec(4, spares=1), ("n2",), "restart", ()),
    ],
)
def test_the_plan_is_what_the_coordinator_does(
    job: Any, lost: tuple[str, ...], op: str, names: tuple[str, ...]
) -> None:
    world = World(job)
    for name in lost:
        world.die(name)
        world.settle()
    found = plan(op, names, document(world.state, {}, "n1"), ())
    generation = world.state.generation
    assert found.generation == generation
    carry_out(world, op, names)
    if op == "remove" and "n1" in names:
        # The role moves, and its successor forms the group.
        assert world.heirs == ["n2"]
        assert "the coordinator moves from n1 to n2; rank 0 moves from n1 to n2" in dict(found.facts)["Roles"]
        assert found.nodes == ("n2", "n3", "n4")
        return
    assert found.nodes == world.state.members
    # However many nodes: one restart.
    assert world.state.generation == generation + 1
    assert f"-> {len(world.state.ranks)} ranks on {len(world.state.members)} nodes" in dict(found.facts)["World"]


def test_ranks_that_move_are_named_in_runs() -> None:
    status = document(World(spec(4)).state, {}, "n1")
    assert facts("remove", ("n2",), status)["Ranks"] == "4-7 -> 2-5"
    assert facts("remove", ("n4",), status)["Ranks"] == "those that stay keep their numbers"
    assert facts("restart", (), status)["Ranks"] == "all keep their numbers"


def test_only_known_facts_of_the_past_are_shown() -> None:
    status = document(World(spec(3)).state, {}, "n1")
    reported = facts("remove", ("n3",), status)
    assert reported["Downtime"].startswith("unknown")
    assert reported["Minimum"].startswith("below min_nodes (3)")
    runs = [
        {
            "type": "generation_running",
            "generation": g,
            "detail": {"detect": 9e3, "stop": ms, "rendezvous": 100, "main": 0},
        }
        for g, ms in enumerate((5.0, 400.0, 900.0, 5000.0))
    ]
    assert facts("restart", (), status, tuple(runs))["Downtime"] == "about 1.0 s (from 3 earlier restarts)"
    assert facts("add", ("n9",), status)["World"] == "6 ranks on 3 nodes -> 6 ranks and those of n9 on 4 nodes"
    assert dict(plan("remove", ("n1",), {}, ()).facts)["Minimum"] == "unknown"


@pytest.mark.parametrize(
    ("reported", "lost"),
    [
        (((120, 100), (119, None)), "20 steps: at step 120; last snapshot: step 100"),
        (((1, None), (1, None)), "unknown: at step 1, and no rank has reported a snapshot"),
        (((None, None),), "unknown: no rank has reported a step yet"),
    ],
)
def test_a_restart_loses_the_steps_after_the_last_reported_snapshot(reported: Any, lost: str) -> None:
    ranks = [
        {"rank": rank, "step": step, "progress": {"saved": saved} if saved else None}
        for rank, (step, saved) in enumerate(reported)
    ]
    assert facts("restart", (), {"nodes": [{"name": "n1", "group_rank": 0, "ranks": ranks}]})["Lost"] == lost


@pytest.mark.parametrize(
    ("named", "lost"),
    [
        ("", "resumes from step 760 (ckpt_760.pt), 3 steps lost"),
        ("a", "resumes from step 500 (ckpt_500.pt), 263 steps lost"),
        ("none", "unknown: no node has snapshot none"),
    ],
)
def test_a_plan_says_from_which_kept_snapshot_the_group_resumes(named: str, lost: str) -> None:
    kept = [
        {"id": name, "path": f"ckpt_{step}.pt", "step": step, "time_ns": time_ns}
        for time_ns, (name, step) in enumerate((("a", 500), ("b", 760), ("c", 700)))
    ]
    event: Any = {"type": "snapshots_chosen", "detail": {"snapshots": kept[1:2], "skipped": [[1, 2]]}}
    ranks = [{"rank": 0, "step": 763, "progress": {"saved": 762}}]
    status: Any = {"nodes": [{"name": "n1", "group_rank": 0, "ranks": ranks}], "snapshots": kept}
    assert dict(plan("restart", (), status, (event,), named).facts)["Lost"] == lost


def test_a_plan_names_each_series_and_says_where_a_step_is_not_exact() -> None:
    def kept(name: str, path: str, step: int | None, time_ns: int, *, exact: bool = True) -> dict[str, Any]:
        return {"id": name, "path": path, "step": step, "time_ns": time_ns, "exact": exact}

    snapshots = [
        kept("a", "model.pt", 500, 1, exact=False), kept("b", "optim.pt", 500, 2, exact=False),
        kept("c", "model.pt", 760, 10**10, exact=False), kept("d", "best_760.pt", 760, 10**10 + 1),
        kept("e", "x.bin", None, 10**10),
    ]  # fmt: skip
    ranks = [{"rank": 0, "step": 763, "progress": None}]
    status: Any = {"nodes": [{"name": "n1", "group_rank": 0, "ranks": ranks}], "snapshots": snapshots}
    lost = [dict(plan("restart", (), status, (), name).facts)["Lost"] for name in ("", "a")]
    newest = "step ~760 (model.pt), step 760 (best_760.pt), step ~500 (optim.pt), an unknown step (x.bin)"
    older = "step ~500 (model.pt, optim.pt), about 263 steps lost; best_760.pt, x.bin are hidden"
    assert lost == [
        f"resumes from {newest}, about 3 steps lost",
        f"resumes from {older}: no version is old enough",
    ]


def test_the_plan_of_a_request_that_is_refused_says_why() -> None:
    world = World(spec(2, min_nodes=1))
    world.feed(inputs.Remove("n2"))
    world.settle()
    found = plan("remove", ("n1",), document(world.state, {}, "n1"), ())
    assert dict(found.facts)["Refused"] == "n1 is the last node of the job; end the job with: supervisor stop"
    # The group goes on as it is.
    assert found.nodes == ("n1",)


def test_a_plan_that_leaves_less_than_half_of_the_group_forms_none() -> None:
    world = World(spec(4, min_nodes=1))
    status = document(world.state, {}, "n1")
    for node in status["nodes"][1:]:
        node["state"] = "lost"
    found = plan("restart", (), status, ())
    assert found.nodes == ()
    assert dict(found.facts)["World"] == "8 ranks on 4 nodes -> no group"


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


def members(world: World) -> list[str]:
    return list(world.state.members)


def test_a_cordoned_node_stays_until_it_is_lost_and_is_not_taken_back() -> None:
    world = World(spec(4, min_nodes=1))
    generation = world.state.generation
    world.feed(inputs.Cordon("n2"))
    world.feed(inputs.Cordon("n3"))
    world.settle()
    assert (world.state.generation, document(world.state, {}, "n1")["nodes"][1]["reason"]) == (generation, "cordoned")
    # A restart, and another coordinator, keep it.
    world.feed(inputs.Restart())
    world.settle()
    assert members(world) == ["n1", "n2", "n3", "n4"]
    successor = World(spec(4, min_nodes=1), start=False)
    successor.state = replay.take_over(world.state.spec, "n1", 2, world.records(), 0.0)
    for name in successor.machines:
        successor.join(name)
    successor.settle()
    assert members(successor) == ["n1", "n2", "n3", "n4"]
    for name in ("n2", "n4"):
        world.die(name)
        world.settle()
        without = world.state.generation
        world.join(name)
        world.settle()
        # Nobody is stopped for a node that is not taken in.
        assert (world.state.generation > without) == (name == "n4")
    assert members(world) == ["n1", "n3", "n4"]
    assert (world.state.nodes["n2"].status, world.state.nodes["n2"].reason) == ("spare", CORDONED)
    found = plan("restart", (), document(world.state, {}, "n1"), ())
    assert list(found.nodes) == members(world)
    world.feed(inputs.Cordon("n2", on=False))
    world.settle()
    assert members(world) == ["n1", "n2", "n3", "n4"]
    world.feed(inputs.Cordon("n2", on=False))
    assert (world.replies[-1].accepted, world.replies[-1].message) == (False, "n2 is not cordoned")


def test_a_cordoned_spare_takes_no_place_until_it_is_added() -> None:
    world = World(spec(4, spares=1, min_nodes=2))
    world.feed(inputs.Cordon("n4"))
    world.die("n2")
    world.settle()
    assert members(world) == ["n1", "n3"]
    without = world.state.generation
    world.die("n4")
    world.settle()
    world.join("n4")
    world.settle()
    assert (members(world), world.state.generation) == (["n1", "n3"], without)
    world.feed(inputs.Add(world.state.nodes["n4"].spec))
    world.settle()
    assert members(world) == ["n1", "n3", "n4"]
    assert not replay.fold(world.state.spec, world.records()).nodes["n4"].cordoned


def test_a_node_that_is_being_removed_is_not_in_the_group_already() -> None:
    world = World(spec(3))
    world.settle()
    world.feed(inputs.Remove("n2"))
    assert world.state.nodes["n2"].status == "draining"
    world.feed(inputs.Add(world.state.nodes["n2"].spec))
    reply = world.replies[-1]
    assert (reply.accepted, reply.kind, reply.message) == (False, "leaving", "n2 is being removed")
