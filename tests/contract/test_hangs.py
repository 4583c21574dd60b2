"""A group that hangs names the rank that holds it up; one that is only slow raises no alarm. Real ranks, gloo."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from supervisor.postmortem.diagnosis import diagnose
from tests.agents.engine_process import PY_SPY, SCRIPTS
from tests.agents.nodes import Nodes
from tests.examples import nightly

SCRIPT = (SCRIPTS / "hangs.py").read_text()


def job(root: Path, *modes: str, nproc: int = 2, **changes: Any) -> Nodes:
    """Ranks of one node, in each generation with another mode; a hang is called one after two seconds."""
    defaults: dict[str, Any] = {"hang_after": 2.0, "max_restarts": 0, "stop_grace": 0.5}
    return Nodes(root, 1, SCRIPT, nproc=nproc, args=(",".join(modes),), **{**defaults, **changes})


# Mode, category, what the summary says, where the others wait.
HANGS = (
    ("gil", "hang_no_output", "holding the Python GIL", "all_reduce"),
    ("loader", "hang_no_output", "in <module> (__next__ of dataloader.py)", "all_reduce"),
    ("thread", "user_exception", "a thread failed with ZeroDivisionError", "all_reduce"),
    ("group", "hang_no_output", "waiting in new_group, which the others never reached", "all_reduce"),
    ("init", "hang_no_output", ": idle at ", "init_process_group"),
)


async def test_the_rank_that_holds_the_others_up_is_named(tmp_path: Path) -> None:
    """One job: an operator restarts its group once it hangs, and the next one hangs in another way."""
    async with job(tmp_path, *(mode for mode, *_ in HANGS), "loop", "blocked") as nodes:
        await nodes.launch()
        live = []
        for generation, (mode, category, says, collective) in enumerate(HANGS):
            incident = (await nodes.until("incident", generation=generation))["detail"]
            assert (incident["culprit_ranks"], incident["culprit_node"]) == ([1], "n1"), (mode, incident)
            assert (incident["category"], incident["scope"]) == (category, "one_rank"), (mode, incident)
            assert says in incident["summary"], (mode, incident)
            missing = incident["missing"]
            assert (missing["collective"], missing["waiting"], missing["missing"]) == (collective, [0], [1]), mode
            check_sources(mode, missing)
            check_evidence(mode, incident, nodes.journal("n1").parent)
            status = await nodes.call("n1", "status")
            assert (status["state"], status["condition"]) == ("running", "hung")
            assert [rank["state"] for rank in status["nodes"][0]["ranks"]] == ["running", "silent"], mode
            live.append((category, [1], missing))
            await nodes.call("n1", "restart")
        await a_loop_is_warned_of_and_is_no_hang(nodes, len(HANGS))
        await a_port_that_is_blocked_is_told_and_not_called_a_hang_of_all(nodes, len(HANGS) + 1)
        await nodes.call("n1", "stop", {"kill": True})
        await nodes.until("job_stopped")
        *reported, blocked = diagnose([nodes.journal("n1").parent])["incidents"]
        assert [(one["category"], one["culprit_ranks"], one["missing"]) for one in reported] == live
        assert (blocked["category"], blocked["culprit_node"]) == ("rendezvous_timeout", "n1")


def check_sources(mode: str, missing: dict[str, Any]) -> None:
    """The lines of the script around the place of the missing rank, as it is a file of the work tree."""
    place = missing["stacks"].get("1", "")
    if not place.startswith("train.py:"):
        return
    source, number = missing["sources"][place], int(place.split(":")[1].split()[0])
    assert source["text"].split("\n")[number - source["first"]] == SCRIPT.splitlines()[number - 1].rstrip(), mode


def check_evidence(mode: str, incident: dict[str, Any], files: Path) -> None:
    lines = [(line["file"], line["line"], line["text"]) for line in incident["evidence"]]
    if mode == "loader":
        assert lines[-1][2].startswith("1 x child process pt_data_worker sleeps")
        assert lines[-1][2].endswith("in __getitem__") or not PY_SPY
    if mode == "thread":
        assert incident["times_out_at"] > incident["time"], incident
        file, number, text = lines[0]
        said = (files / file).read_text().splitlines()
        assert said[number - 1] == text == "ZeroDivisionError: integer division or modulo by zero"
        assert incident["traceback"].endswith(text)


async def a_loop_is_warned_of_and_is_no_hang(nodes: Nodes, generation: int) -> None:
    warning = await nodes.until("warning", generation=generation, rank=1)
    assert warning["detail"]["kind"] == "busy", warning
    assert " s at train.py:" in warning["detail"]["message"], warning
    assert warning["detail"]["message"].endswith(" in spin; rank 0 waiting in all_reduce 7"), warning
    await nodes.call("n1", "restart")


async def a_port_that_is_blocked_is_told_and_not_called_a_hang_of_all(nodes: Nodes, generation: int) -> None:
    incident = (await nodes.until("incident", generation=generation))["detail"]
    assert (incident["category"], incident["culprit_node"]) == ("rendezvous_timeout", "n1"), incident
    assert "rank 1 (n1): no answer from 127.0.0.1:" in incident["summary"]
    assert "rank 0 waiting in init_process_group" in incident["summary"]


# They need nobody, and no torch.
ALONE = """
import os, time
for step in range(10**6):
    print(f"step={step} loss={'nan' if os.environ['RANK'] == '0' else 1}", flush=True)
    time.sleep(0.02)
"""


@pytest.mark.usefixtures("light_torch")
async def test_a_stopped_rank_is_named_and_its_return_noticed(tmp_path: Path) -> None:
    async with Nodes(tmp_path, 1, ALONE, nproc=3, hang_after=2.0) as nodes:
        await nodes.launch()
        pid = (await nodes.until("generation_running"))["detail"]["pids"]["2"]
        os.kill(pid, signal.SIGSTOP)
        try:
            incident = (await nodes.until("incident"))["detail"]
            (reported,) = diagnose([nodes.journal("n1").parent])["incidents"]
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (reported["category"], reported["culprit_ranks"], reported["culprit_node"]) == (
            "hang_no_output",
            [2],
            "n1",
        )
        assert (incident["culprit_ranks"], incident["confidence"]) == ([2], "established")
        assert "stopped by a signal" in incident["summary"]
        warning = await nodes.until("warning")
        assert (warning["node"], warning["rank"]) == ("n1", 0)
        assert warning["detail"]["message"].startswith("loss is nan, about step ")
        await nodes.until("hang_over")
        healed = (await nodes.call("n1", "status"))["incident"]
        assert (healed["state"], healed["ongoing"]) == ("healed", False)


async def test_a_rank_that_exits_is_named_whatever_its_status(tmp_path: Path) -> None:
    async with job(tmp_path, "exit 3", "exit 0", max_restarts=1) as nodes:
        await nodes.launch()
        await nodes.until("job_failed")
        # One that was known before its group was stopped is refined later.
        live = {one["detail"]["id"]: one["detail"] for one in await everything(nodes) if one["type"] == "incident"}
        reported = diagnose([nodes.journal("n1").parent])["incidents"]
        for category, *incidents in zip(("other", "collective_desync"), live.values(), reported, strict=True):
            for incident in incidents:
                assert (incident["category"], incident["culprit_ranks"]) == (category, [1]), incident
                assert incident["culprit_node"] == "n1"


async def test_ranks_in_different_collectives_are_named(tmp_path: Path) -> None:
    async with job(tmp_path, "other", nproc=3) as nodes:
        await nodes.launch()
        incident = (await nodes.until("incident"))["detail"]
        assert (incident["category"], incident["culprit_ranks"]) == ("collective_desync", [1]), incident
        missing = incident["missing"]
        assert (missing["waiting"], missing["missing"]) == ([0, 2], [1])
        assert incident["summary"].startswith("rank 1 (n1): called broadcast 7 at train.py:")
        assert " in act where ranks 0,2 called all_reduce at train.py:" in incident["summary"]
        assert "broadcast 7 [7] Float, not ended at " in incident["evidence"][1]["text"]


async def test_an_exception_that_ends_the_script_while_a_thread_keeps_its_process_is_shown(tmp_path: Path) -> None:
    async with job(tmp_path, "over") as nodes:
        await nodes.launch()
        incident = (await nodes.until("incident"))["detail"]
        assert (incident["category"], incident["culprit_ranks"]) == ("user_exception", [1]), incident
        assert "the script failed with ValueError: no more shards in " in incident["summary"]
        assert "Python waiting for its other threads at threading.py" in incident["summary"]
        line = incident["evidence"][0]
        said = (nodes.journal("n1").parent / line["file"]).read_text().splitlines()
        assert line["text"] == "ValueError: no more shards"
        # In a group torch puts the rank before each line of it.
        assert said[line["line"] - 1] == f"[rank1]: {line['text']}"
        assert incident["traceback"].startswith("Traceback (most recent call last):")
        assert incident["traceback"].endswith(line["text"])
        assert incident["missing"]["waiting"] == [0]


async def test_a_hang_is_restarted_where_the_job_says_so(tmp_path: Path) -> None:
    async with job(tmp_path, "thread", "task", hang_restart=1.0, max_restarts=1) as nodes:
        await nodes.launch()
        first = await nodes.until("incident")
        again = await nodes.until("incident", since=first["seq"])
        assert again["detail"]["culprit_ranks"] == first["detail"]["culprit_ranks"] == [1]
        await nodes.until("generation_running", generation=1)
        assert (await nodes.call("n1", "status"))["restarts"] == 1
        # Now it is not a thread's exception.
        task = (await nodes.until("incident", generation=1))["detail"]
        assert (task["category"], task["culprit_ranks"]) == ("user_exception", [1])
        assert "an asyncio task failed with ZeroDivisionError" in task["summary"]


@pytest.mark.parametrize("mode", ["busy", pytest.param("unrecorded", marks=nightly)])
async def test_who_works_is_waited_for(tmp_path: Path, mode: str) -> None:
    async with job(tmp_path, mode) as nodes:
        await nodes.launch()
        await nodes.until("job_succeeded")
        assert "incident" not in {event["type"] for event in await everything(nodes)}


async def everything(nodes: Nodes) -> list[dict[str, Any]]:
    """Return the journal of a job that is over."""
    return [event async for event in nodes.events("n1")]


# One loss on both, up to a step; the second one is the slower one all the time.
APART = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(10**6):
    time.sleep(0.003 + 0.05 * rank)
    loss = torch.tensor(2 + 1 / (step + 1))
    dist.all_reduce(loss)
    print(f"step {step} loss {loss.item() + (rank == 1 and step >= 300):.6f}", flush=True)
"""


async def test_who_is_slow_and_ranks_that_come_apart_are_warned_of(tmp_path: Path) -> None:
    async with Nodes(tmp_path, 2, APART, hang_after=6.0) as nodes:
        await nodes.launch()
        apart = await nodes.until("warning", rank=1)
        assert apart["detail"]["message"].startswith("loss differs from about step 3"), apart
        slow = await nodes.until("slow", rank=1)
        assert (slow["node"], slow["detail"]["ranks"], slow["detail"]["phase"]) == ("n2", [1], "script")
        line = APART[: APART.index("time.sleep")].count("\n") + 1
        assert slow["detail"]["message"].endswith(f" of the time for it: train.py:{line} in <module>, where it sleeps")
        status = await nodes.call("n1", "status")
        assert (status["incident"], status["condition"]) == (None, "slow")
        own = await nodes.call("n2", "why")
        assert {rank for ranks in own["windows"].values() for rank in ranks} == {"1"}
        await nodes.call("n1", "stop", {"kill": True})
        await nodes.until("job_stopped")
