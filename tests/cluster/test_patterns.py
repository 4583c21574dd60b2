"""How a script of PyTorch's fault-tolerance tutorial is used: other sizes on the way, unequal hosts, many jobs."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import Job
from tests.cluster.scripts import TRAIN

pytestmark = [pytest.mark.cluster, pytest.mark.e2e, pytest.mark.torch]
# All to all, then out: what disturbs another job of the same hosts would fail or hang.
MEETS = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
names = [None] * dist.get_world_size()
dist.all_gather_object(names, os.environ["TORCHELASTIC_RUN_ID"])
assert names == [sys.argv[1]] * 2, names
print("met", *names, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


hosts = hosts_of(4)


def test_four_unequal_hosts_then_two_then_four_from_the_snapshot(hosts: Cluster, tmp_path: Path) -> None:
    sizes = {"hosts": {"n1": {"nproc_per_node": 2}}, "nproc_per_node": 1, "min_nodes": 2}
    with Job(hosts, tmp_path / "work", TRAIN, "--by-hand", "--epochs", "400", **sizes).start("--nnodes", "2:4") as job:
        job.until("generation_running", generation=0)
        assert job.until_step(1)["world_size"] == 5
        assert job.run("remove", "--node", "n[3-4]").returncode == 0
        status = job.until_step(1)
        assert [(node["name"], len(node["ranks"])) for node in status["nodes"] if node["ranks"]] == [
            ("n1", 2),
            ("n2", 1),
        ]
        assert job.run("add", "--node", "n3,n4").returncode == 0
        status = job.until_step(1)
        assert (status["world_size"], status["restarts"], status["generation"]) == (5, 0, 2)
        begun = job.run("logs", "--rank", "0", "--stream", "stdout", "--grep", "starts at epoch").stdout.decode()
        epochs = [int(line.rpartition(" ")[2]) for line in begun.splitlines()]
        assert epochs[0] > 0
        assert job.run("stop").returncode == 0


def test_ten_jobs_at_once_do_not_disturb_each_other(hosts: Cluster, tmp_path: Path) -> None:
    names = [f"job{number}" for number in range(10)]
    pairs = [("n1", "n2"), ("n3", "n4"), ("n1", "n3"), ("n2", "n4"), ("n1", "n4")]
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                Job(hosts, tmp_path / name, MEETS, name, nproc_per_node=1, only=pairs[number % 5]).start("--job", name)
            )
            for number, name in enumerate(names)
        ]
        try:
            assert [job.wait() for job in jobs] == [0] * 10, [job.errors()[-300:] for job in jobs]
            for name, job in zip(names, jobs, strict=True):
                assert job.out.read_text().count(f"met {name} {name}") == 2
        finally:
            for job in jobs:
                if job.up is not None and job.up.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        job.run("stop", timeout_s=60)
