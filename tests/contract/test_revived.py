"""Commands on a job whose agents have all died: status says so, and a restart brings them back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import WAIT_S, Job
from tests.cluster.scripts import LIGHT


def kill_agents(pair: Cluster, *names: str) -> None:
    agents = [pid for name in names for pid, line in pair.processes(name).items() if " serve " in line]
    assert len(agents) == len(names)
    for pid in agents:
        os.kill(pid, signal.SIGKILL)


pair = hosts_of(2, scope="function", stub_torch=True)


def test_all_agents_are_dead_and_restart_carries_out_what_it_says(pair: Cluster, tmp_path: Path) -> None:
    with Job(pair, tmp_path / "work", LIGHT, nproc_per_node=1).start("--detach", "--job", "alone") as job:
        assert job.wait() == 0, job.errors()
        job.until("generation_running", generation=0)
        kill_agents(pair, "n1", "n2")
        status = job.run("status").stdout.decode()
        assert status.count("no agent of the job runs there") == 2
        assert "`supervisor attach` starts them" in status
        done = job.ask("restart", "--env", "NCCL_DEBUG=WARN")
        # The return of the agents starts a generation, too.
        assert done["outcome"]["type"] == "generation_running"
        asked = job.until("restart_requested")
        assert asked["generation"] <= done["outcome"]["generation"]
        kill_agents(pair, "n2")
        job.until("job_degraded")
        said = tmp_path / "said"
        with said.open("wb") as file:
            waiting = job.supervisor.start(job.words("restart"), job.work, out=file, err=file)
        try:
            end = time.monotonic() + WAIT_S
            while "waiting for nodes: fewer than min_nodes are ready" not in said.read_text():
                assert time.monotonic() < end, said.read_text()
                time.sleep(0.05)
            assert job.run("add", "--node", "n2").returncode == 0
            assert waiting.wait(WAIT_S) == 0, said.read_text()
        finally:
            waiting.kill()
            waiting.wait()
        kill_agents(pair, "n1", "n2")
        (job.work / "new.py").write_text("")
        # Without the job's name: a job that has not ended is meant, although no agent of it is alive.
        job.name = []
        synced = job.run("restart", "--sync")
        assert synced.returncode == 0, synced.stderr.decode()
        assert "1 file, 0 B: new.py" in synced.stderr.decode()
        ranks = [rank["state"] for node in job.ask("status")["nodes"] for rank in node["ranks"]]
        assert ranks == ["running", "running"]
        kill_agents(pair, "n1", "n2")
        stopped = job.run("stop")
        assert stopped.returncode == 0, stopped.stderr.decode()
