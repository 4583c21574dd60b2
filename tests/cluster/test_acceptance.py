"""What a user is promised, on four real hosts: launch, failures, scaling, survival. One test a promise."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import WAIT_S, Job
from tests.cluster.scripts import BYTES, TRAIN

pytestmark = [pytest.mark.cluster, pytest.mark.e2e, pytest.mark.torch]
# What differs between two launches by its nature, or says where a file lies.
OWN = {
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS",
    "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_RANK", "RANK", "ROLE_RANK", "LOCAL_RANK",
}  # fmt: skip


hosts = hosts_of(4, scope="function")
trio = hosts_of(3, scope="function")
pair = hosts_of(2, scope="function", operators=1)
# The fewest processes that show it: each imports torch, on the cores of one machine.
ONE_EACH = {"nproc_per_node": 1, "min_nodes": 2, "node_timeout": 5.0}


def worker_pid(job: Job, rank: int) -> int:
    """Return a rank's pid; the hosts share this machine's pid space."""
    return int(Job.ranks(job.ask("status"))[rank]["pid"])


def first_line(job: Job, rank: int) -> str:
    """Return what a rank of the newest generation printed first."""
    done = job.run("logs", "--raw", "--rank", str(rank))
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()[0]


def agent_pids(cluster: Cluster, node: str) -> list[int]:
    """Return the pids of our agents on a host."""
    return [pid for pid, line in cluster.processes(node).items() if " serve " in f" {line} "]


def test_four_hosts_two_ranks_each(hosts: Cluster, tmp_path: Path) -> None:
    with Job(hosts, tmp_path / "work", BYTES, "--an-option", "a value").start() as job:
        assert job.wait() == 0, job.errors()
        status = job.ask("status")
        assert (status["state"], status["world_size"], status["generation"]) == ("succeeded", 8, 0)
        nodes = [rank["node"] for _, rank in sorted(Job.ranks(status).items())]
        assert nodes == ["n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4"]
        check_environment(hosts, job, tmp_path)
        for rank in range(8):
            check_bytes(job, rank)


def check_environment(hosts: Cluster, job: Job, tmp_path: Path) -> None:
    """Compare what ranks saw with what a real torchrun shows on the same host."""
    other = tmp_path / "torchrun"
    other.mkdir()
    (other / "train.py").write_text(BYTES)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0"]
    command += ["--redirects", "3", "--log-dir", str(other / "logs"), "train.py", "--an-option", "a value"]
    done = hosts.exec("n1", ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(other), *command], timeout_s=WAIT_S)
    assert done.returncode == 0, done.stderr
    reference = json.loads((other / "environ_1.json").read_text())
    trees = hosts.hosts[1].home / ".supervisor" / "trees"
    found = json.loads(next(trees.glob("*/environ_3.json")).read_text())
    ignored = {
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "SSH_CLIENT",
        "SSH_CONNECTION",
        "MAIL",
        "SSH_TTY",
        "HOME",
        "SUPERVISOR_HOME",
        "TMPDIR",  # each test host has its own
        "LC_CTYPE",  # Python's own, under the C locale
    }
    ignored |= {key for key in reference["environ"] if key.startswith("SUPERVISOR_TEST")}
    torch_keys = {key for key in reference["environ"] if key not in os.environ or key in OWN}
    assert torch_keys - ignored <= set(found["environ"])
    extra = {key for key in found["environ"] if key not in reference["environ"]} - ignored - set(os.environ)
    assert not extra, extra
    same = (torch_keys & set(found["environ"])) - OWN - ignored
    assert {key: found["environ"][key] for key in same} == {key: reference["environ"][key] for key in same}
    assert found["environ"]["RANK"] == "3"
    assert (found["environ"]["GROUP_RANK"], found["environ"]["LOCAL_RANK"]) == ("1", "1")
    assert found["argv"] == reference["argv"]
    assert found["path0"] == found["cwd"]


def check_bytes(job: Job, rank: int) -> None:
    """`logs --raw` gives the very bytes that the rank wrote."""
    wanted = b"".join(f"rank {rank} line {number} ".encode() + bytes(range(256)) + b"\r\n" for number in range(2000))
    done = job.run("logs", "--raw", "--rank", str(rank), "--stream", "stdout")
    assert done.returncode == 0, done.stderr
    assert done.stdout == wanted
    errors = b"".join(f"rank {rank} error {number}".encode() + b"\xff\x00 no newline" for number in range(0, 2000, 100))
    assert errors in job.run("logs", "--raw", "--rank", str(rank), "--stream", "stderr").stdout


def test_a_killed_worker_is_named_and_the_job_finishes(pair: Cluster, tmp_path: Path) -> None:
    with Job(pair, tmp_path / "work", TRAIN, "--epochs", "40").start() as job:
        job.until_step(2)
        os.kill(worker_pid(job, 3), signal.SIGKILL)
        assert job.wait() == 0, job.errors()
        status = job.ask("status")
        assert (status["generation"], status["restarts"]) == (1, 1)
        incident = job.ask("incidents")["incidents"][0]
        assert incident["culprit_ranks"] == [3]
        assert incident["culprit_node"] == "n2"
        assert incident["exit"]["signal"] == "SIGKILL"
        assert 3 not in [rank for victims in incident["victims"] for rank in victims["ranks"]]
        starts = [first_line(job, rank) for rank in range(4)]
        assert all(line.startswith(f"generation 1 rank {rank} of 4") for rank, line in enumerate(starts)), starts
        assert not any(line.endswith("epoch 0") for line in starts)
        assert "rank 3" in job.errors()
        running = [event for event in job.events() if event["type"] == "generation_running"]
        assert {"detect", "stop", "rendezvous", "spawn", "main"} <= set(running[1]["detail"])


def test_remove_and_add_a_node_while_training(hosts: Cluster, tmp_path: Path) -> None:
    """The one with the coordinator and rank 0; others are in test_patterns.py."""
    with Job(hosts, tmp_path / "work", TRAIN, "--by-hand", "--epochs", "1000").start() as job:
        job.until_step(1)
        done = job.run("remove", "--node", "n1")
        assert done.returncode == 0, done.stderr.decode()
        assert job.ask("status")["world_size"] == 6
        done = job.run("add", "--node", "n1")
        assert done.returncode == 0, done.stderr.decode()
        status = job.ask("status")
        assert (status["world_size"], status["restarts"], status["generation"]) == (8, 0, 2)
        job.until_step(1)
        first = first_line(job, 0)
        assert first.startswith("generation 2")
        assert not first.endswith("epoch 0")
        assert job.run("stop").returncode == 0
        assert job.wait() == 4


def test_nobody_attached_and_the_job_heals(pair: Cluster, tmp_path: Path) -> None:
    options = ("--by-hand", "--epochs", "130", "--pause", "0.3")
    with Job(pair, tmp_path / "work", TRAIN, *options, nproc_per_node=1).start() as job:
        job.until_step(1)
        assert job.up is not None
        victim = worker_pid(job, 1)
        job.up.kill()
        job.up.wait()
        pair.cut("operator")
        os.kill(victim, signal.SIGKILL)
        time.sleep(60)
        pair.heal("operator")
        job.up = None
        job.until("generation_running", generation=1)
        # From a second machine, with nothing but the inventory.
        command = [sys.executable, "-m", "supervisor", "status", str(job.inventory), "--json"]
        done = pair.exec("op1", command, timeout_s=WAIT_S, env={"PYTHONPATH": os.getcwd()})
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["restarts"] == 1
        events = job.events()
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        attach = subprocess.run(
            job.command("attach", "--headless"), cwd=job.work, capture_output=True, timeout=180, check=False
        )
        assert attach.returncode == 0, attach.stderr[-3000:]


def test_a_killed_agent_leaves_no_worker_and_the_group_goes_on(trio: Cluster, tmp_path: Path) -> None:
    with Job(trio, tmp_path / "work", TRAIN, "--by-hand", "--epochs", "400", **ONE_EACH).start("--detach") as job:
        assert job.wait() == 0, job.errors()
        job.up = None
        job.until_step(1)
        pid = worker_pid(job, 2)
        (agent,) = agent_pids(trio, "n3")
        os.kill(agent, signal.SIGKILL)
        end = time.monotonic() + 2.0
        while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
            time.sleep(0.05)
        assert not Path(f"/proc/{pid}").exists()
        job.until("generation_running", generation=1)
        status = job.ask("status")
        assert (status["world_size"], status["restarts"]) == (2, 0)
        assert next(node for node in status["nodes"] if node["name"] == "n3")["state"] == "lost"
        assert job.run("stop").returncode == 0


@pytest.mark.parametrize("fault", ["cut", "freeze"])
def test_a_node_that_is_cut_off_stops_its_workers_and_returns(trio: Cluster, tmp_path: Path, fault: str) -> None:
    with Job(trio, tmp_path / "work", TRAIN, "--by-hand", "--epochs", "2000", **ONE_EACH).start("--detach") as job:
        assert job.wait() == 0, job.errors()
        job.up = None
        job.until_step(1)
        pid = worker_pid(job, 2)
        if fault == "cut":
            trio.cut("n3")
        else:
            trio.freeze("n3")
        job.until("generation_running", generation=1)
        if fault == "cut":
            assert not Path(f"/proc/{pid}").exists()
            trio.heal("n3")
        else:
            trio.thaw("n3")
        job.until("generation_running", generation=2)
        assert not Path(f"/proc/{pid}").exists()
        status = job.ask("status")
        assert (status["world_size"], status["restarts"]) == (3, 0)
        assert job.run("stop").returncode == 0


def test_the_coordinators_host_loses_power_and_nobody_is_attached(trio: Cluster, tmp_path: Path) -> None:
    with Job(trio, tmp_path / "work", TRAIN, "--by-hand", "--epochs", "200", **ONE_EACH).start("--detach") as job:
        assert job.wait() == 0, job.errors()
        job.up = None
        job.until_step(1)
        trio.crash("n1")
        job.until("generation_running", generation=1)
        status = job.ask("status")
        # The first in order usually finds no rival; on a machine that is busy another may come first.
        assert status["coordinator"] in ("n2", "n3")
        assert (status["world_size"], status["restarts"]) == (2, 0)
        assert job.run("stop").returncode == 0


def test_half_a_group_goes_on_when_the_operator_removes_the_dead_half(pair: Cluster, tmp_path: Path) -> None:
    keys = {**ONE_EACH, "min_nodes": 1}
    with Job(pair, tmp_path / "work", TRAIN, "--by-hand", "--epochs", "200", **keys).start("--detach") as job:
        assert job.wait() == 0, job.errors()
        job.up = None
        job.until_step(1)
        pid = worker_pid(job, 1)
        pair.crash("n1")
        end = time.monotonic() + WAIT_S
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < end, "the half without a quorum trains on"
            time.sleep(0.1)
        done = job.run("remove", "--node", "n1")
        assert done.returncode == 0, done.stderr.decode()
        status = job.ask("status")
        assert (status["coordinator"], status["world_size"], status["restarts"]) == ("n2", 1, 0)
        assert job.run("stop").returncode == 0
