"""The status document: what nodes tell of themselves and their ranks, as it is by now."""

from __future__ import annotations

from typing import Any

from remote_agent.coordinator import replay
from remote_agent.coordinator.status import document
from tests.fast.world import World, spec


def test_the_status_shows_who_lags_and_the_age_of_a_measurement() -> None:
    world = World(spec(2))
    said = {"progress": {"loss": 0.5}, "vitals": {"age_s": 1.0, "cpu": 5.0}}
    vitals = {"age_s": 1.0, "gpus": [{"index": 0, "age_s": 2.0}]}
    facts: Any = {
        "n1": {
            "generation": 0, "heard_at": 90.0, "vitals": vitals,
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


def test_a_rank_that_a_signal_ended_stays_failed_when_its_node_is_lost() -> None:
    world = World(spec(2))
    world.fail(2, signal="SIGSEGV")
    world.deliver("report", "n2")
    world.die("n2")
    for state in (world.state, replay.fold(world.state.spec, world.records())):
        assert [rank.state for rank in state.ranks.values()] == ["running", "running", "failed", "killed"]
