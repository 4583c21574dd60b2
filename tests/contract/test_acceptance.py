"""What a user is promised, on four real hosts: launch, failures, scaling, survival. One test a promise."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.agents.engine_process import alive
from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import WAIT_S, Job
from tests.cluster.scripts import BYTES, STEPS, TRAIN

hosts = hosts_of(4, scope="function", stub_torch=True)
trio = hosts_of(3, scope="function", stub_torch=True)
pair = hosts_of(2, scope="function", operators=1, stub_torch=True)
torch_pair = hosts_of(2, scope="function")
# The fewest processes that show it.
ONE_EACH = {"nproc_per_node": 1, "min_nodes": 2, "node_timeout": 5.0}
WORDS = ("--an-option", "a value")


def first_lines(job: Job, generation: int, ranks: int) -> list[str]:
    """Return what the ranks of a generation of TRAIN or STEPS printed first."""
    return [(job.files(generation, rank) / "stdout.log").read_text().splitlines()[0] for rank in range(ranks)]


def charged(job: Job) -> set[int]:
    """Return the numbers of restarts that were charged, as each generation's begin tells them."""
    return {one["detail"]["restarts"] for one in job.journal() if one["type"] == "generation_started"}


def await_end(pid: int, within_s: float, what: str) -> None:
    """Wait until a process is gone."""
    end = time.monotonic() + within_s
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def test_four_hosts_two_ranks_each_and_a_node_that_goes_and_comes(hosts: Cluster, tmp_path: Path) -> None:
    """The node is the one with the coordinator and rank 0; others are in test_patterns.py.

    Without torch: the next test has it.
    """
    with Job(hosts, tmp_path / "work", BYTES + STEPS, *WORDS).start() as job:
        job.until_step(1)
        status = job.ask("status")
        assert (status["state"], status["world_size"], status["generation"]) == ("running", 8, 0)
        nodes = [rank["node"] for _, rank in sorted(Job.ranks(status).items())]
        assert nodes == ["n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4"]
        check_environment(hosts)
        done = job.run("remove", "--node", "n1")
        assert done.returncode == 0, done.stderr.decode()
        check_bytes(job)
        done = job.run("add", "--node", "n1")
        assert done.returncode == 0, done.stderr.decode()
        job.until_step(1)
        for rank, line in enumerate(first_lines(job, 2, 8)):
            assert line.startswith(f"generation 2 rank {rank} of 8 starts at step ")
            assert not line.endswith(" 0")
        job.finish()
        assert job.wait() == 0, job.errors()
        status = job.ask("status")
        assert (status["state"], status["restarts"], status["generation"]) == ("succeeded", 0, 2)
        running = [event["detail"] for event in job.journal() if event["type"] == "generation_running"]
        assert [detail["world_size"] for detail in running] == [8, 6, 8]


def check_environment(hosts: Cluster) -> None:
    """What a rank in the middle sees of its place; test_engine_environment compares all of it with a real torchrun."""
    found = json.loads(next((hosts.hosts[1].home / ".supervisor" / "trees").glob("*/environ_3.json")).read_text())
    place = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    place |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "4"}
    assert {key: found["environ"][key] for key in place} == place
    ours = {key for key in found["environ"] if key.startswith("SUPERVISOR_") and key not in os.environ}
    assert ours == {"SUPERVISOR_METRICS"}, "the one variable more that docs/torchrun.md names"
    assert found["argv"] == ["train.py", *WORDS]
    assert found["path0"] == found["cwd"]


def check_bytes(job: Job) -> None:
    """What every rank wrote is in its files, and `logs --raw` gives the very bytes: of the group that has ended."""
    for rank in range(8):
        out, err = ((job.files(0, rank) / f"{name}.log").read_bytes() for name in ("stdout", "stderr"))
        lines = (f"rank {rank} line {number} ".encode() + bytes(range(256)) + b"\r\n" for number in range(2000))
        assert out.startswith(b"".join(lines) + b"generation 0 ")
        errors = (f"rank {rank} error {number}".encode() + b"\xff\x00 no newline" for number in range(0, 2000, 100))
        assert err.startswith(b"".join(errors))
        for stream, written in {0: (("stdout", out),), 5: (("stderr", err),)}.get(rank, ()):
            done = job.run("logs", "--raw", "--generation", "0", "--rank", str(rank), "--stream", stream)
            assert (done.returncode, done.stdout == written) == (0, True), done.stderr


def test_a_killed_worker_is_named_and_the_job_finishes(torch_pair: Cluster, tmp_path: Path) -> None:
    """Real collectives; then the node with the coordinator and rank 0 goes and comes."""
    with Job(torch_pair, tmp_path / "work", TRAIN, nproc_per_node=1).start() as job:
        job.until_step(2)
        os.kill(job.pid(1), signal.SIGKILL)
        job.until("generation_running", generation=1)
        job.until_step(3)
        # Its rank tells of it a moment later, and no more once its group has been stopped.
        assert job.until("first_step", generation=1)["detail"]["first_step"] >= 0
        for verb in ("remove", "add"):
            done = job.run(verb, "--node", "n1")
            assert done.returncode == 0, done.stderr.decode()
            job.until_step(4)
        job.finish()
        assert job.wait() == 0, job.errors()
        (incident,) = job.ask("incidents")["incidents"]
        assert incident["culprit_ranks"] == [1]
        assert incident["culprit_node"] == "n2"
        assert incident["exit"]["signal"] == "SIGKILL"
        assert 1 not in [rank for victims in incident["victims"] for rank in victims["ranks"]]
        for generation, size in ((1, 2), (2, 1), (3, 2)):
            starts = first_lines(job, generation, size)
            head = f"generation {generation} rank {{}} of {size} starts at epoch "
            assert all(line.startswith(head.format(rank)) for rank, line in enumerate(starts)), starts
            assert not any(line.endswith("epoch 0") for line in starts)
        assert "rank 1" in job.errors()
        assert charged(job) == {0, 1}
        phases = job.until("generation_running", generation=1)["detail"]
        assert {"detect", "stop", "rendezvous", "spawn", "main"} <= set(phases)
        up = job.until("process_group_up", generation=1)["detail"]
        assert up["imports"] > 0


def test_nobody_attached_and_the_job_heals(pair: Cluster, tmp_path: Path) -> None:
    with Job(pair, tmp_path / "work", STEPS, nproc_per_node=1).start() as job:
        job.until_step(1)
        assert job.up is not None
        victim = job.pid(1)
        job.up.kill()
        job.up.wait()
        job.up = None
        pair.cut("operator")
        os.kill(victim, signal.SIGKILL)
        job.until("generation_running", generation=1)
        # From a second machine, with nothing but the inventory.
        command = [sys.executable, "-m", "supervisor", "status", str(job.inventory), "--json"]
        done = pair.exec("op1", command, timeout_s=WAIT_S, env={"PYTHONPATH": os.getcwd()})
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["restarts"] == 1
        job.until_step(2)
        pair.heal("operator")
        reported: list[int] = []

        def healed(event: dict[str, Any]) -> bool:
            reported.append(event["seq"])
            return (event["type"], event["generation"]) == ("generation_running", 1)

        job.watch("events", "-f", fits=healed)
        assert reported == list(range(1, len(reported) + 1))
        with subprocess.Popen(
            job.command("attach", "--headless"), cwd=job.work, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as attached:
            assert attached.stdout is not None
            assert attached.stdout.readline()
            job.finish()
            attached.communicate(timeout=WAIT_S)
        assert attached.returncode == 0


def test_nodes_are_lost_in_every_way_and_the_group_goes_on(trio: Cluster, tmp_path: Path) -> None:
    """One job, to which nobody is attached, and one fault after the other."""
    with Job(trio, tmp_path / "work", STEPS, **ONE_EACH).start("--detach") as job:
        assert job.wait() == 0, job.errors()
        job.up = None
        job.until("generation_running", generation=0)
        a_killed_agent_leaves_no_worker(trio, job)
        assert job.run("add", "--node", "n3").returncode == 0
        cut_off = a_node_that_is_cut_off_stops_its_worker_and_returns(job, 2, trio.cut, trio.heal)
        assert not cut_off, "two groups at once"
        a_node_that_is_cut_off_stops_its_worker_and_returns(job, 4, trio.freeze, trio.thaw)
        job.until("generation_running", generation=6)
        trio.crash("n1")
        assert job.until("generation_running", generation=7)["detail"]["world_size"] == 2
        # The first in order usually finds no rival; on a machine that is busy another may come first.
        assert job.until("coordinator_changed")["node"] in ("n2", "n3")
        assert charged(job) == {0}
        # Its host is not awaited as long as one that the job has not lost.
        logs = job.run("logs")
        assert (logs.returncode, logs.stderr) == (0, b"supervisor: n1: connect: no answer yet; its data is not shown\n")


def a_killed_agent_leaves_no_worker(trio: Cluster, job: Job) -> None:
    pid = job.pid(2)
    (agent,) = (pid for pid, line in trio.processes("n3").items() if " serve " in f" {line} ")
    os.kill(agent, signal.SIGKILL)
    await_end(pid, 30.0, "the agent's worker lives")
    job.until("generation_running", generation=1)
    status = job.ask("status")
    assert (status["world_size"], status["restarts"]) == (2, 0)
    assert next(node for node in status["nodes"] if node["name"] == "n3")["state"] == "lost"


def a_node_that_is_cut_off_stops_its_worker_and_returns(
    job: Job, generation: int, begin: Callable[[str], None], end: Callable[[str], None]
) -> bool:
    """Return whether its worker was there when the others went on."""
    job.until("generation_running", generation=generation)
    worker = job.pid(1)
    begin("n2")
    assert job.until("generation_running", generation=generation + 1)["detail"]["world_size"] == 2
    was_there = alive(worker)
    end("n2")
    assert job.until("generation_running", generation=generation + 2)["detail"]["world_size"] == 3
    assert not alive(worker)
    return was_there
