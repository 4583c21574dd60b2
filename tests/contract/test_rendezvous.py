"""torch's own rendezvous backends: its agents form the group under ours, and others may join by hand."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import Job
from tests.examples import nightly

# Each rank says its place at once, then steps with all the others.
STEPS = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
print(f"rank {rank} of {world}: {sys.argv[1:]}", flush=True)
for step in range(int(os.environ.get("STEPS", "100000"))):
    count = torch.ones(1)
    dist.all_reduce(count)
    assert int(count) == world
    print(f"step={step}", flush=True)
    time.sleep(0.05)
dist.destroy_process_group()
"""
# The same, but each by itself and without torch: for what is about torch's agents.
ALONE = """
import os, sys, time
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {sys.argv[1:]}", flush=True)
for step in range(100000):
    print(f"step={step}", flush=True)
    time.sleep(0.05)
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


hosts = hosts_of(3)


@contextlib.contextmanager
def running(cluster: Cluster, work: Path, *options: str, script: str = STEPS, **keys: Any) -> Iterator[Job]:
    """A job that ends with the test; what is left of it on the hosts is an error of ours."""
    with Job(cluster, work, script, "$5", "a b", nproc_per_node=1, **keys).start(*options) as job:
        try:
            yield job
        except BaseException:
            print(job.errors()[-4000:])
            raise
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.run("stop", timeout_s=60)
    for name in keys.get("only", ("n1", "n2", "n3")):
        end = time.monotonic() + 30
        while [line for line in cluster.processes(name).values() if "train.py" in line]:
            assert time.monotonic() < end, cluster.processes(name)
            time.sleep(0.1)


@contextlib.contextmanager
def torchrun(
    cluster: Cluster, node: str, work: Path, *options: str, script: str = STEPS
) -> Iterator[subprocess.Popen[bytes]]:
    """A torchrun that somebody starts by hand on a host."""
    here = cluster.host(node).home / "by_hand"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    (here / "train.py").write_text(script)
    log = (work.parent / f"{node}.by_hand").open("wb")
    process = cluster.popen(
        node,
        [*TORCHRUN, *options, "--nproc-per-node", "1", "--local-addr", cluster.host(node).address, "train.py"],
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TMPDIR": str(here)},
        cwd=here,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def in_world(job: Job, world: int) -> dict[int, dict[str, Any]]:
    """Wait until the job's own ranks step in a world of that size; returns them."""

    def fits(status: dict[str, Any]) -> bool:
        ranks = Job.ranks(status)
        return status["world_size"] == world and bool(ranks) and all((one["step"] or 0) > 1 for one in ranks.values())

    job.until("generation_started")
    return Job.ranks(job.watch("status", "--watch", fits=fits))


def meeting(job: Job, generation: int = 0) -> dict[str, str]:
    """Return where torch's agents of a generation meet, as its event tells."""
    found: dict[str, str] = job.until("generation_started", generation=generation)["detail"]["rendezvous"]
    return found


def words(where: dict[str, str]) -> list[str]:
    """Return torchrun's options for that meeting."""
    return ["--rdzv-backend", where["backend"], "--rdzv-endpoint", where["endpoint"], "--rdzv-id", where["run_id"]]


def test_c10d_names_a_killed_worker_does_without_a_removed_node_and_restarts(hosts: Cluster, tmp_path: Path) -> None:
    options = ("--rdzv-backend", "c10d", "--nnodes", "1:2", "--max-restarts", "1", "--standby", "auto")
    with running(hosts, tmp_path / "work", *options, script=ALONE, only=["n1", "n2"]) as job:
        ranks = in_world(job, 2)
        assert sorted(ranks) == [0, 1]
        out = job.run("logs", "--rank", "1", "--tail", "100000").stdout.decode()
        assert "rank 1 of 2: ['$5', 'a b']" in out
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        incident = job.until("incident")["detail"]
        assert incident["culprit_ranks"] == [1]
        assert incident["exit"]["signal"] == "SIGKILL"
        starts = job.until("generation_running", generation=1)["detail"]["starts"]
        assert [start["why"] for start in starts.values()] == ["torch's own agent starts the ranks"] * 2
        assert sorted(in_world(job, 2)) == [0, 1]
        status = job.ask("status")
        assert (status["generation"], status["restarts"]) == (1, 1)
        assert job.run("remove", "--node", "n1").returncode == 0
        job.until("generation_running", generation=2)
        assert {rank["node"] for rank in in_world(job, 1).values()} == {"n2"}
        assert job.run("restart").returncode == 0
        job.until("generation_running", generation=3)
        assert sorted(in_world(job, 1)) == [0]


@nightly
def test_a_torchrun_started_by_hand_joins_our_job(hosts: Cluster, tmp_path: Path) -> None:
    options = ("--rdzv-backend", "c10d", "--nnodes", "2")
    with running(hosts, tmp_path / "work", *options, only=["n1"]) as job:
        where = meeting(job)
        assert where["nnodes"] == "2"
        with torchrun(hosts, "n3", tmp_path / "work", *words(where), "--nnodes", "2"):
            assert len(in_world(job, 2)) == 1
            assert b"1 of 2 ranks are outside HOSTS" in job.run("status").stdout


@nightly
def test_our_job_joins_a_torchrun_started_by_hand(hosts: Cluster, tmp_path: Path) -> None:
    endpoint = f"{hosts.host('n3').address}:29511"
    options = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "theirs", "--nnodes", "2")
    with (
        torchrun(hosts, "n3", tmp_path / "work", *options, "--rdzv-conf", "is_host=1"),
        running(hosts, tmp_path / "work", *options, only=["n1"]) as job,
    ):
        assert len(in_world(job, 2)) == 1


@nightly
def test_static(hosts: Cluster, tmp_path: Path) -> None:
    options = ("--rdzv-backend", "static", "--nnodes", "2", "--env", "STEPS=5")
    with running(hosts, tmp_path / "work", *options, only=["n1", "n2"]) as job:
        assert job.wait() == 0
        assert job.ask("status")["state"] == "succeeded"


@pytest.fixture(scope="module")
def etcd(hosts: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real etcd on the third host, with the interface that torch speaks; yields its endpoint."""
    if shutil.which("etcd") is None:
        pytest.skip("no etcd here: apt-get install etcd-server")
    data = tmp_path_factory.mktemp("etcd")
    address = hosts.host("n3").address
    command = ["etcd", "--enable-v2", "--data-dir", str(data / "data"), "--listen-peer-urls", "http://127.0.0.1:2380"]
    command += ["--listen-client-urls", f"http://{address}:2379", "--advertise-client-urls", f"http://{address}:2379"]
    with (data / "etcd.log").open("wb") as log:
        process = hosts.popen("n3", command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            end = time.monotonic() + 30
            asking = "import urllib.request as r, sys; r.urlopen(sys.argv[1], timeout=2)"
            while hosts.exec("n3", [sys.executable, "-c", asking, f"http://{address}:2379/health"]).returncode:
                assert time.monotonic() < end, (data / "etcd.log").read_text()[-2000:]
                time.sleep(0.2)
            yield f"{address}:2379"
        finally:
            process.terminate()
            process.wait(10)


@pytest.mark.parametrize("backend", ["etcd", pytest.param("etcd-v2", marks=nightly)])
def test_etcd_with_a_torchrun_started_by_hand(hosts: Cluster, etcd: str, tmp_path: Path, backend: str) -> None:
    pytest.importorskip("etcd")
    options = ("--rdzv-backend", backend, "--rdzv-endpoint", etcd, "--nnodes", "2")
    with running(hosts, tmp_path / "work", *options, script=ALONE, only=["n1"]) as job:
        where = meeting(job)
        with torchrun(hosts, "n3", tmp_path / "work", *words(where), "--nnodes", "2", script=ALONE):
            assert len(in_world(job, 2)) == 1


@nightly
def test_a_meeting_nobody_else_comes_to_fails_with_torchs_reason(hosts: Cluster, tmp_path: Path) -> None:
    options = ("--rdzv-backend", "c10d", "--rdzv-conf", "join_timeout=3", "--nnodes", "2", "--max-restarts", "0")
    with running(hosts, tmp_path / "work", *options, only=["n1"]) as job:
        assert job.wait() == 1
        (incident,) = job.ask("incidents")["incidents"]
        assert "RendezvousTimeoutError" in incident["summary"]
        assert (incident["category"], incident["culprit_ranks"]) == ("rendezvous_timeout", [])
