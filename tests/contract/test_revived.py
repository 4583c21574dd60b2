"""Commands on a job whose agents have all died: status says so, and a restart brings them back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import Job
from tests.cluster.scripts import LIGHT

pair = hosts_of(2, scope="function", stub_torch=True)


def test_all_agents_are_dead_and_restart_carries_out_what_it_says(pair: Cluster, tmp_path: Path) -> None:
    with Job(pair, tmp_path / "work", LIGHT, nproc_per_node=1).start("--detach", "--job", "alone") as job:
        assert job.wait() == 0, job.errors()
        job.until("generation_running", generation=0)
        agents = [pid for host in pair.hosts for pid, line in pair.processes(host.name).items() if " serve " in line]
        assert len(agents) == 2
        for pid in agents:
            os.kill(pid, signal.SIGKILL)
        status = job.run("status").stdout.decode()
        assert status.count("no agent of the job runs there") == 2
        assert "`supervisor attach` starts them" in status
        done = job.ask("restart", "--env", "NCCL_DEBUG=WARN")
        # The return of the agents starts a generation, too.
        assert done["outcome"]["type"] == "generation_running"
        asked = job.until("restart_requested")
        assert asked["generation"] <= done["outcome"]["generation"]
        assert job.run("stop").returncode == 0
