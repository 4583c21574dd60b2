"""From which snapshots a group resumes: the coordinator's choice, and that no member starts without it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_agent.coordinator import inputs, replay, snapshots, views
from remote_agent.coordinator import state as s
from remote_agent.snapshots.choice import Skipped
from tests.examples import examples
from tests.fast.world import World, spec


def kept(
    name: str, time_ns: int, step: int | None = None, path: str = "snapshot.pt", *, exact: bool | None = None
) -> Any:
    exact = step is not None if exact is None else exact
    return {"id": name, "path": path, "time_ns": time_ns, "step": step, "exact": exact, "bytes": 1000}


def job(nodes: int = 3, **changes: Any) -> World:
    return World(spec(nodes, snapshots=("*.pt",), **{"min_nodes": 2, **changes}))


def in_place(world: World) -> set[tuple[str, ...]]:
    return {world.machines[name].in_place for name in world.state.members}


def test_the_newest_of_each_series_is_put_in_place_on_all_members_before_they_start() -> None:
    world = job()
    assert world.state.phase == s.RUNNING
    assert "snapshots_chosen" not in world.types()
    world.machines["n1"].snapshots = [kept("old", 1, 20), kept("new", 3, 40), kept("best", 2, path="best.pt")]
    world.machines["n3"].snapshots = [kept("new", 3, 40)]
    world.fail(1)
    world.settle()
    assert world.state.phase == s.RUNNING
    assert in_place(world) == {("new", "best")}
    chosen = world.last("snapshots_chosen").detail
    assert [(one["path"], one["step"]) for one in chosen["snapshots"]] == [("snapshot.pt", 40), ("best.pt", None)]
    assert chosen["placed"]["n2"]["placed"] == {"new": "n1", "best": "n1"}
    assert world.types().index("snapshots_chosen") < len(world.types()) - 1 - world.types()[::-1].index(
        "generation_started"
    )


def test_a_lost_nodes_snapshot_comes_from_a_node_outside_the_group() -> None:
    world = job(5, spares=2)
    world.machines["n2"].snapshots = [kept("a", 1, 20), kept("b", 2, 30)]
    world.machines["n5"].snapshots = [kept("a", 1, 20)]
    world.die("n2")
    world.settle()
    assert world.state.members == ("n1", "n3", "n4")
    assert in_place(world) == {("a",)}
    assert {one["placed"]["a"] for one in world.last("snapshots_chosen").detail["placed"].values()} == {"n5"}


def test_a_member_that_cannot_put_it_in_place_is_left_out() -> None:
    """A group starts only when each of its members has the chosen snapshots in place."""
    world = job()
    world.machines["n1"].snapshots = [kept("a", 1, 20)]
    world.machines["n3"].cannot_place = "no space left"
    world.fail(1)
    world.settle()
    assert world.state.members == ("n1", "n2")
    assert in_place(world) == {("a",)}
    assert world.machines["n3"].in_place == ()
    reason = world.state.nodes["n3"].reason
    assert reason is not None
    assert "no space left" in reason


def test_a_silent_member_is_left_out_and_a_silent_other_node_is_not_waited_for() -> None:
    world = job(4, spares=1, min_nodes=2)
    world.machines["n1"].snapshots = [kept("a", 1, 20)]
    world.fail(1)
    while not world.sent("n4", "snapshots"):
        world.deliver(*world.waiting()[0])
    world.orders["n4"].clear()
    world.settle()
    assert world.state.phase == s.PREPARING
    world.pass_time(snapshots.OTHERS_S + 1)
    world.settle()
    assert world.state.phase == s.RUNNING
    assert in_place(world) == {("a",)}

    world.feed(inputs.Restart("me"))
    while not world.sent("n3", "restore"):
        world.deliver(*world.waiting()[0])
    world.orders["n3"].clear()
    world.settle()
    world.pass_time(snapshots.PLACE_S + 2)
    world.settle()
    assert world.state.members == ("n1", "n2", "n4")
    assert in_place(world) == {("a",)}


def test_an_answer_to_an_older_order_does_not_count() -> None:
    """A node that joins during the choice may have a newer one."""
    world = job()
    world.machines["n1"].snapshots = [kept("a", 1, 20)]
    world.feed(inputs.Restart("me"))
    while not world.sent("n2", "restore"):
        world.deliver(*world.waiting()[0])
    world.machines["n3"].snapshots = [kept("b", 2, 30)]
    world.machines["n3"].connected = False
    world.join("n3")
    world.settle()
    assert world.state.phase == s.RUNNING
    assert in_place(world) == {("b",)}


def have_all(world: World, *snapshots: Any) -> None:
    """All nodes have these, and have said so."""
    for machine in world.machines.values():
        machine.snapshots = list(snapshots)
        world.feed(inputs.Heartbeat(machine.name, snapshots=snapshots))


def test_an_operator_goes_back_and_what_came_after_it_no_longer_counts() -> None:
    world = job()
    old, spike = kept("old", 10, 20), kept("spike", 30, 40)
    have_all(world, old, spike)
    world.feed(inputs.Restart("me", snapshot="none"))
    assert not world.replies[-1].accepted
    world.wall_ns = 50
    world.feed(inputs.Restart("me", snapshot="old"))
    world.settle()
    assert in_place(world) == {("old",)}
    assert world.last("snapshots_chosen").detail["skipped"] == [[10, 50]]
    # Also for the next restart, and for the next coordinator.
    world.feed(inputs.Restart("me"))
    world.settle()
    assert in_place(world) == {("old",)}
    assert replay.fold(world.state.spec, world.records()).skipped == Skipped(((10, 50),), frozenset({"old"}))
    for machine in world.machines.values():
        machine.snapshots = [old, spike, kept("next", 60, 25)]
    world.feed(inputs.Restart("me"))
    world.settle()
    assert in_place(world) == {("next",)}


def test_who_goes_forth_again_to_what_was_skipped_stays_there() -> None:
    world = job()
    first, second = kept("first", 10, 20), kept("second", 30, 40)
    have_all(world, first, second)
    for wall_ns, name in ((50, "first"), (60, "second")):
        world.wall_ns = wall_ns
        world.feed(inputs.Restart("me", snapshot=name))
        world.settle()
    world.fail(1)
    world.settle()
    assert in_place(world) == {("second",)}


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


def test_a_named_snapshot_that_is_gone_when_the_group_is_formed_is_told() -> None:
    world = job()
    have_all(world, kept("old", 10, 20), kept("new", 30, 40))
    world.feed(inputs.Restart("me", snapshot="old"))
    for machine in world.machines.values():
        machine.snapshots = machine.snapshots[1:]
    world.settle()
    assert in_place(world) == {("new",)}
    assert "no node has snapshot old any more" in world.last("warning").detail["message"]


def test_a_series_without_an_old_enough_version_is_hidden_on_every_member() -> None:
    """Else one node's ranks would start with it and the others' without."""
    world = job()
    have_all(world, kept("old", 10 * 10**9, 20), kept("spike", 30 * 10**9, 40), kept("ema", 30 * 10**9, 40, "ema.pt"))
    assert go_back(world, "old", 50 * 10**9) == {("old",)}
    assert [world.machines[name].skipped for name in world.state.members] == [[[10 * 10**9, 50 * 10**9]]] * 3


def test_the_status_names_each_snapshot_once_with_the_nodes_that_have_it() -> None:
    world = job()
    world.feed(inputs.Heartbeat("n1", snapshots=(kept("a", 1, 20), kept("b", 2, 30))))
    world.feed(inputs.Heartbeat("n3", snapshots=(kept("b", 2, 30),)))
    shown = views.kept_snapshots(world.state)
    assert [(one["id"], one["nodes"], one["skipped"]) for one in shown] == [
        ("a", ["n1"], False), ("b", ["n1", "n3"], False)
    ]  # fmt: skip


MOVES = st.lists(
    st.tuples(st.sampled_from(["deliver", "fail", "die", "join", "save", "restart", "time"]), st.integers(0, 31)),
    max_size=40,
)


@examples(25)
@given(MOVES)
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
