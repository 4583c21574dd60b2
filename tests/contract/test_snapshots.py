"""Three hosts and a spare with a disk each, rank 0 the only saver: its host loses power and disk, the job goes on."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import Job
from tests.contract.test_succession import until

pytestmark = [pytest.mark.cluster, pytest.mark.e2e, pytest.mark.torch]

# As the official tutorials save: into the working directory, over the last snapshot, by one rank.
SAVER = """
import os, time
from pathlib import Path
import torch

snapshot, rank = Path("snapshot.pt"), os.environ["RANK"]
step = torch.load(snapshot)["step"] + 1 if snapshot.exists() else 0
print(f"rank {rank} starts at step {step}", flush=True)
while not Path("over").exists():
    time.sleep(0.02)
    print(f"step={step}", flush=True)
    if rank == "0" and step % 50 == 49:
        torch.save({"step": step, "weights": torch.rand(500_000)}, snapshot)
    step += 1
"""


hosts = hosts_of(4)


def test_the_only_savers_host_burns_and_the_job_resumes_at_its_last_complete_snapshot(
    hosts: Cluster, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    job = Job(hosts, work, SAVER)
    keys: dict[str, Any] = {"nproc_per_node": 1, "stop_grace": 1.0, "node_timeout": 4.0, "min_nodes": 3}
    spare = {"n4": {"spare": True}}
    job.inventory = hosts.inventory(work / "hosts.toml", hosts=spare, snapshots=["snapshot.pt"], **keys)
    with job.start():
        try:
            job.until("generation_running")
            kept = until(lambda: [one for one in job.ask("snapshots")["snapshots"] if len(one["nodes"]) > 1], "a copy")
            hosts.crash("n1")
            shutil.rmtree(hosts.host("n1").home / ".supervisor")
            job.until("generation_running", generation=1)
            chosen = job.until("snapshots_chosen", generation=1)["detail"]
            assert chosen["snapshots"][0]["time_ns"] >= kept[0]["time_ns"]
            begun = until(lambda: len(first_steps(hosts)) == 3 and first_steps(hosts), "all ranks of the next group")
            assert set(begun) == {"0", "1", "2"}
            assert len(set(begun.values())) == 1
            # Saved at 49, 99, …
            assert begun["0"] > 0
            assert begun["0"] % 50 == 0
            back = chosen["snapshots"][0]["id"]
            until(lambda: job.ask("snapshots")["snapshots"][-1]["id"] != back, "a newer one")
            restarted = job.run("restart", "--from", back)
            assert restarted.returncode == 0, restarted.stderr.decode()
            assert job.until("snapshots_chosen", generation=2)["detail"]["snapshots"][0]["id"] == back
            for name in ("n2", "n3", "n4"):
                for tree in (hosts.host(name).home / ".supervisor/trees").glob("[!.]*"):
                    (tree / "over").touch()
            assert job.wait() == 0, job.errors()
        finally:
            hosts.boot("n1")


def first_steps(hosts: Cluster) -> dict[str, int]:
    """Return the step at which each rank of generation 1 has begun."""
    logs = [path for host in hosts.hosts for path in host.home.glob(".supervisor/jobs/*/generation_1/*/stdout.log")]
    found = [re.match(r"rank (\d) starts at step (\d+)\n", path.read_text()) for path in logs]
    return {match[1]: int(match[2]) for match in found if match is not None}
