"""The generations of a journal: why each began and ended; the screens Run and NCCL by keys."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from remote_agent.wire.events import PHASES, Condition
from supervisor.tui import looks
from supervisor.tui.generations import Run, Runs, bar
from supervisor.tui.screens import nccl, run
from tests.screens import fabrics, recorded
from tests.screens.screens import press, running, settle


def journal(*records: tuple[str, int, Any]) -> list[Any]:
    """Events from type, generation and detail; `node` of the detail is the event's own."""
    return [
        {
            "seq": seq,
            "time": f"2026-11-20T10:00:{seq:02d}.000Z",
            "type": kind,
            "generation": generation,
            "node": detail.get("node"),
            "rank": detail.get("rank"),
            "detail": {key: value for key, value in detail.items() if key not in ("node", "rank")},
        }
        for seq, (kind, generation, detail) in enumerate(records, 1)
    ]


def test_every_phase_and_condition_has_its_look() -> None:
    assert tuple(run.PHASES) == PHASES
    assert set(looks.JOBS) == set(Condition)


def folded(events: list[Any]) -> Runs:
    """What a screen makes of a journal that comes bit by bit."""
    found = Runs()
    for upto in range(1, len(events) + 1):
        found.follow(events[:upto])
    return found


def started(generation: int, **more: Any) -> tuple[str, int, Any]:
    """A group of one node."""
    return ("generation_started", generation, {"world_size": 2, "restarts": 0, "members": [{"node": "n1"}], **more})


def ended(cause: str, *reported: tuple[str, Any]) -> list[Run]:
    """The runs of a group that stopped for a cause, and of the one after it."""
    before = [(kind, 0, detail) for kind, detail in reported if kind in ("restart_requested", "rank_failed")]
    after = [(kind, 0, detail) for kind, detail in reported if kind not in ("restart_requested", "rank_failed")]
    events = journal(started(0), *before, ("generation_stopped", 0, {"cause": cause}), *after, started(1))
    return folded(events).runs


@pytest.mark.parametrize(
    ("cause", "reported", "word", "sentence"),
    [
        ("restart", [("restart_requested", {"operator": "ann@laptop"})], "operator", "restart by ann@laptop"),
        (
            "failure",
            [("rank_failed", {"node": "n1", "rank": 1}), ("incident", {"summary": "rank 1 (n1): out of memory"})],
            "failure",
            "rank 1 (n1): out of memory",
        ),
        ("failure", [("rank_failed", {"node": "n1", "rank": 1})], "failure", "rank 1 failed on n1"),
        ("removed", [("node_removed", {"node": "n2", "reason": "removed by an operator"})], "removal", "n2 removed"),
        ("node_lost", [("node_lost", {"node": "n2", "reason": "cut off"})], "node lost", "n2 lost: cut off"),
        ("paused", [], "pause", "the coordinator was paused"),
        ("quorum", [], "no quorum", "fewer than half of the nodes were reachable"),
        ("something new", [], "something new", "something new"),
    ],
)
def test_why_a_group_ended_is_why_the_next_one_began(
    cause: str, reported: list[tuple[str, Any]], word: str, sentence: str
) -> None:
    first, second = ended(cause, *reported)
    assert (first.began_by, first.because) == ("launch", "the job was launched")
    assert (first.how, second.began_by, second.because) == (sentence, word, f"after {sentence}")
    assert second.how == ""


def test_the_end_of_the_job_is_the_end_of_its_last_group() -> None:
    phases = {"detect": 0.0, "stop": 10.0, "rendezvous": 10.0, "spawn": 20.0, "main": 60.0}
    env = {"NCCL_DEBUG": "INFO"}
    events = journal(started(0, env=env, restarts=1), ("generation_running", 0, phases), ("job_succeeded", 0, {}))
    (run,) = folded(events).runs
    assert (run.how, run.took_ms, run.env, run.restarts) == ("all ranks succeeded", 100.0, env, 1)
    assert bar(run.phases, 200.0, 20) == [("stop", 1), ("rendezvous", 1), ("spawn", 2), ("main", 6)]
    assert bar({}, 0.0, 20) == []
    shown = journal(started(0), ("generation_running", 0, phases), ("process_group_up", 0, {"imports": 300.0}))
    (run,) = folded(shown).runs
    assert (run.took_ms, bar(run.phases, 400.0, 20)[-1]) == (400.0, ("imports", 15))
    assert run.starts == ""
    starts = {"n1": {"warm": True, "why": ""}, "n2": {"warm": False, "why": "not enough memory"}}
    facts = {**phases, "starts": starts}
    (run,) = folded(journal(started(0), ("generation_running", 0, facts), ("first_step", 0, {"first_step": 1.0}))).runs
    assert run.starts == "cold on n2: not enough memory"


def test_reports_of_nodes_are_compared() -> None:
    def ready(node: str, torch: str) -> tuple[str, int, Any]:
        return ("node_ready", -1, {"node": node, "nproc": 2, "versions": {"torch": torch, "python": "3.11"}})

    events = journal(ready("n1", "2.7.1"), ready("n2", "2.7.1"), ready("n3", "2.6.0"))
    assert folded(events).differing() == [("torch", {"2.7.1": ("n1", "n2"), "2.6.0": ("n3",)})]


def test_a_generation_leads_to_its_log() -> None:
    async def scenario() -> None:
        session = recorded.load("failed_4x2")
        async with running(session, (120, 30)) as (app, pilot):
            text = await press(app, pilot, "6", "tab", "G")
            assert "generation 0" in text
            text = await press(app, pilot, "enter")
            assert app.current_mode == "logs"
            assert "generation 0" in text

    asyncio.run(scenario())


def test_a_line_of_nccl_opens_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        session = recorded.many(4, 8)
        async with running(session, (120, 30)) as (app, pilot):
            assert "no NCCL output yet" in await press(app, pilot, "7")
            # It is asked again while somebody looks.
            monkeypatch.setattr(nccl, "EVERY_S", 0.05)
            session.fabric = fabrics.sample(4)
            assert "n002 uses TCP sockets" in await settle(app, pilot)
            assert "leads to no other machine" in await press(app, pilot, "j")
            assert "set NCCL_SOCKET_IFNAME" in await settle(app, pilot)
            text = await press(app, pilot, "enter")
            assert app.current_mode == "logs"
            assert "n002, nccl" in text

    asyncio.run(scenario())
