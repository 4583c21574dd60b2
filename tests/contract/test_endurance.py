"""What may not add up: many restarts of one job, and many removals where hosts share processes and paths."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import Job, until
from tests.contract.test_succession import workers
from tests.examples import nightly

RESTARTS = 200
CYCLES = 30
KEYS: dict[str, Any] = {"nproc_per_node": 1, "min_nodes": 1}
STEPS = """
import itertools, time
for step in itertools.count(1):
    print(f"step={step}", flush=True)
    time.sleep(0.05)
"""

pytestmark = nightly
hosts = hosts_of(2, scope="function", stub_torch=True)


def test_many_restarts_leave_no_open_files_behind(hosts: Cluster, tmp_path: Path) -> None:
    def open_files() -> dict[str, int]:
        return {
            f"{node} {mode}": len(os.listdir(f"/proc/{pid}/fd"))
            for node in ("n1", "n2")
            for pid, line in hosts.processes(node).items()
            for mode in ("serve", "engine")
            if f" {mode} --job" in line
        }

    with Job(hosts, tmp_path / "work", STEPS, max_restarts=RESTARTS + 1, **KEYS).start("--detach") as job:
        assert job.wait() == 0, job.errors()
        job.until_step(2)
        before, killed = open_files(), set[int]()
        while len(killed) < RESTARTS:
            (pid,) = until(lambda: [one for one in workers(hosts, "n1") if one not in killed], "worker")
            job.until_step(2)
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        job.until("generation_running", generation=RESTARTS)
        job.until_step(2)
        after = open_files()
        assert {name: after[name] - count for name, count in before.items() if after[name] > count + 3} == {}
        job.run("stop")


def test_removals_and_additions_on_hosts_with_the_same_processes_and_paths(hosts: Cluster, tmp_path: Path) -> None:
    """Containers with the host's PID namespace: each agent sees the ranks of the other node, under its own path."""
    place = tmp_path / "home"
    place.mkdir()
    for host in hosts.hosts:
        assert hosts.exec(host, ["mount", "-t", "tmpfs", "tmpfs", str(place)]).returncode == 0
    same = {host.name: {"env": {"SUPERVISOR_HOME": str(place / "supervisor")}} for host in hosts.hosts}
    with Job(hosts, tmp_path / "work", STEPS, hosts=same, max_restarts=1, **KEYS).start("--detach") as job:
        assert job.wait() == 0, job.errors()
        for _ in range(CYCLES):
            for verb in ("remove", "add"):
                done = job.run(verb, "--node", "n2")
                assert done.returncode == 0, done.stderr.decode()
        status = until(lambda: (found := job.ask("status"))["state"] == "running" and found, "running group")
        assert (status["generation"], status["world_size"], status["restarts"]) == (2 * CYCLES, 2, 0)
        assert job.ask("incidents")["incidents"] == []
        job.run("stop")
