"""Which work tree a group starts from: all of its nodes have it, the journal says it, the next coordinator knows it."""

from __future__ import annotations

from typing import Any

import pytest

from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator import state as s
from remote_agent.coordinator.status import document
from supervisor.tui.generations import Runs
from supervisor.wording.events import event_text
from tests.fast.world import World, spec

OLD, NEW = "a" * 64, "b" * 64
TOLD = {"files": 2, "bytes": 1200, "paths": ["train.py", "model.py"]}


def world(count: int = 2, **changes: Any) -> World:
    """A job from a synced tree whose group runs."""
    made = World(spec(count, **{"tree": "work-1", "tree_digest": OLD, "created_ns": 5, **changes}))
    for name in made.machines:
        tell(made, name, OLD)
    return made


def tell(made: World, name: str, *trees: str) -> None:
    """A node says which trees it has."""
    made.feed(inputs.Ready(name, 2, trees=trees))


def change(made: World, digest: str, *without: str) -> s.Reply:
    """An operator wants another tree."""
    made.feed(inputs.Restart("me", tree=digest, change=TOLD, without=without))
    return made.replies[-1]


def group(made: World) -> str:
    """The nodes that are in the group."""
    return " ".join(made.state.members)


def test_a_tree_that_a_node_has_not_is_refused_with_its_name() -> None:
    made = world()
    tell(made, "n1", OLD, NEW)
    refused = change(made, NEW)
    assert (refused.accepted, refused.kind) == (False, "no_tree")
    assert "n2: work tree bbbbbbbb is not there, so nothing is restarted" in refused.message
    # Both are needed by min_nodes: going on without one would be no group at all.
    assert "1 nodes have work tree bbbbbbbb, and 2 are needed" in change(made, NEW, "n2").message
    assert "already runs from work tree aaaaaaaa" in change(made, OLD).message
    assert (made.state.phase, made.state.trees) == (s.RUNNING, ())
    assert not any(made.sent(name, "stop") for name in made.machines)
    assert "not run from a work tree" in change(World(spec(1)), NEW).message


def test_all_ranks_start_from_one_tree_that_the_journal_names_first_and_go_back_to_the_last() -> None:
    made = world()
    for name in made.machines:
        tell(made, name, OLD, NEW)
    assert change(made, NEW).accepted
    assert made.types()[-2:] == ["tree_changed", "restart_requested"]
    going = []
    while made.waiting():
        kind, name = made.waiting()[0]
        going += [order.args["tree"] for order in list(made.orders[name])[:1] if kind == "order" and order.op == "go"]
        made.deliver(kind, name)
    assert (going, made.last("generation_started").detail["tree"]) == ([NEW, NEW], NEW)
    tree = document(made.state, {}, "n1")["tree"]
    assert tree is not None
    assert tree["previous"] == {"digest": OLD, "since_ns": 5}
    # The next coordinator starts from it too, and knows the way back.
    made.state = replay.take_over(made.state.spec, "n2", 2, made.records(), made.now)
    assert [tree.digest for tree in made.state.trees] == [OLD, NEW]
    made.die("n1")
    made.machines["n2"].connected = False
    for name in ("n2", "n1"):
        made.join(name)
        tell(made, name, OLD, NEW)
    made.settle()
    assert made.last("generation_started").detail["tree"] == NEW
    assert change(made, OLD).accepted
    made.settle()
    assert (made.last("tree_changed").detail["rollback"], made.last("generation_started").detail["tree"]) == (True, OLD)


def test_a_node_that_comes_without_the_tree_waits_until_it_has_it() -> None:
    made = world(4, min_nodes=2)
    made.feed(inputs.Remove("n4"))
    made.settle()
    tell(made, "n1", OLD, NEW)
    tell(made, "n2", OLD, NEW)
    assert change(made, NEW, "n3").accepted
    made.settle()
    assert group(made) == "n1 n2"
    node = document(made.state, {}, "n1")["nodes"][2]
    assert (node["lacks_tree"], node["reason"]) == (
        True,
        "it is missing the work tree bbbbbbbb: `supervisor add --node n3` brings it",
    )
    assert change(made, OLD).accepted
    made.settle()
    assert group(made) == "n1 n2 n3"
    assert change(made, NEW, "n3").accepted
    made.settle()
    assert group(made) == "n1 n2"
    # Also after its agent was started again.
    made.die("n3")
    made.join("n3")
    made.settle()
    assert group(made) == "n1 n2"
    tell(made, "n3", OLD, NEW)
    made.settle()
    assert group(made) == "n1 n2 n3"
    assert document(made.state, {}, "n1")["nodes"][2]["reason"] is None
    assert made.last("tree_changed").detail["without"] == ["n3"]
    assert made.state.nodes["n4"].reason == "removed by an operator"


def test_a_new_tree_that_fails_at_once_costs_no_job() -> None:
    made = world(max_restarts=2)
    made.fail(0)
    made.settle()
    made.feed(inputs.Heartbeat("n1", stepped=True))
    for name in made.machines:
        tell(made, name, OLD, NEW)
    change(made, NEW)
    made.settle()
    made.fail(0)
    while made.state.phase != s.PREPARING:
        made.deliver(*made.waiting()[0])
    # The same failure as before the change is that of other code: it does not end the job.
    plan = "starting generation 3 on n1 n2 from work tree bbbbbbbb; R rolls back to aaaaaaaa"
    assert document(made.state, {}, "n1")["plan"] == plan
    made.settle()
    made.fail(0)
    made.settle()
    reported = made.last("tree_changed").detail
    assert (reported["rollback"], reported["digest"], made.state.phase) == (True, OLD, s.RUNNING)
    assert reported["reason"].startswith("the same failure twice in a row before the first step")
    assert made.last("generation_started").detail["tree"] == OLD
    # The tree of the launch is no new one: what it fails of ends the job as ever.
    for _ in range(2):
        made.fail(0)
        made.settle()
    assert made.types()[-1] == "job_failed"


def test_a_tree_that_has_made_a_step_is_not_gone_back_from() -> None:
    made = world(max_restarts=0)
    for name in made.machines:
        tell(made, name, OLD, NEW)
    change(made, NEW)
    made.settle()
    made.feed(inputs.Heartbeat("n1", stepped=True))
    made.feed(inputs.Restart("me"))
    made.settle()
    made.fail(0)
    made.settle()
    assert made.types()[-1] == "job_failed"


@pytest.mark.parametrize(
    ("detail", "text"),
    [
        ({"digest": NEW, **TOLD, "operator": "me@x"}, "bbbbbbbb, 2 files, 1.2 kB: train.py, model.py; by me@x"),
        ({"digest": OLD, "rollback": True, "reason": "it fails"}, "back to aaaaaaaa: it fails"),
        ({"digest": OLD, "rollback": True, "without": ["n3"]}, "back to aaaaaaaa; without n3; by an operator"),
    ],
)
def test_a_change_is_shown_with_the_run(detail: Any, text: str) -> None:
    event: Any = {"type": "tree_changed", "generation": 0, "time": "2026-11-21T14:02:00.000Z", "detail": detail}
    assert event_text(event) == text
    runs = Runs()
    started: Any = {"type": "generation_started", "generation": 1, "time": "2026-11-21T14:02:01.000Z"}
    facts = {"tree": detail["digest"], "world_size": 2, "restarts": 0, "members": []}
    started["detail"] = facts
    runs.follow([event, started])
    assert runs.runs[0].tree.startswith(f"{text} at ")
