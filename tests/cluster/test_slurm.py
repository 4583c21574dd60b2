"""Inside a real Slurm allocation: the job runs on its nodes, and ends with it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster, cluster_obstacle
from tests.cluster.scripts import LIGHT
from tests.cluster.slurm import Slurm, slurm_obstacle

pytestmark = [pytest.mark.cluster, pytest.mark.e2e, pytest.mark.torch]
ROOT = Path(__file__).parents[2]
BATCH = """#!/bin/sh
cd {work}
export PATH={bin}:$PATH
export PYTHONPATH={root} STAY_S={stay}
exec {python} -m supervisor up --slurm --headless --nproc-per-node 1 --job alloc --env STAY_S train.py
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    """Two hosts; each test has a Slurm of its own on them."""
    obstacle = cluster_obstacle() or slurm_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    with Cluster(2) as made:
        for host in made.hosts:
            # As on a real cluster: the user may go from node to node.
            config = [f"IdentityFile {made.identity_file}", f"UserKnownHostsFile {made.known_hosts}"]
            names = [f"Host {one.name}\n  HostName {one.address}\n" for one in made.hosts]
            ssh = host.home / ".ssh"
            ssh.mkdir(mode=0o700, exist_ok=True)
            (ssh / "config").write_text("\n".join([*names, "Host *", *(f"  {line}" for line in config), ""]))
        yield made


@pytest.fixture
def slurm(hosts: Cluster, tmp_path: Path) -> Iterator[Slurm]:
    """Slurm on both hosts."""
    with Slurm(hosts, tmp_path / "slurm") as made:
        yield made


def submit(slurm: Slurm, work: Path, stay: float) -> str:
    """Submit a batch job on both nodes; returns its number."""
    work.mkdir()
    (work / "train.py").write_text(LIGHT)
    script = work / "batch.sh"
    program = Path(sys.executable)
    script.write_text(BATCH.format(work=work, root=ROOT, python=program, bin=program.parent, stay=stay))
    printed = slurm.run("sbatch", "--parsable", "-N", "2", "-o", str(work / "out"), str(script))
    return printed.strip()


def until(text: str, work: Path, timeout_s: float = 60.0, give_up: str = "was not started") -> str:
    """Wait until the batch job has printed that; returns all that it printed."""
    end = time.monotonic() + timeout_s
    while True:
        printed = (work / "out").read_text() if (work / "out").exists() else ""
        if text in printed:
            return printed
        assert give_up not in printed, printed
        assert time.monotonic() < end, printed[-3000:]
        time.sleep(0.1)


def journal(hosts: Cluster) -> list[dict[str, Any]]:
    """Return the journal on the first node."""
    text = (hosts.host("n1").home / ".supervisor" / "jobs" / "alloc" / "events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_an_allocation_trains_on_its_nodes(hosts: Cluster, slurm: Slurm, tmp_path: Path) -> None:
    submit(slurm, tmp_path / "work", 1)
    printed = until("job_succeeded", tmp_path / "work")
    assert "n1:0| in main 0" in printed
    assert "n2:1| in main 1" in printed
    hosts.exec("n1", ["rm", "-rf", str(hosts.host("n1").home / ".supervisor" / "jobs")])
    hosts.exec("n2", ["rm", "-rf", str(hosts.host("n2").home / ".supervisor" / "jobs")])


def test_a_cancelled_allocation_ends_its_job_and_the_incident_says_preempted(
    hosts: Cluster, slurm: Slurm, tmp_path: Path
) -> None:
    number = submit(slurm, tmp_path / "work", 3600)
    until("generation_running", tmp_path / "work")
    slurm.run("scancel", number)
    until("job_stopped", tmp_path / "work")
    (incident,) = [event["detail"] for event in journal(hosts) if event["type"] == "incident"]
    assert (incident["category"], incident["scope"]) == ("signal_preempted", "outside_the_ranks")
    assert incident["summary"] == f"preempted: Slurm ends allocation {number} (SIGTERM)"
    for node in ("n1", "n2"):
        end = time.monotonic() + 30
        while [line for line in hosts.processes(node).values() if "train.py" in line]:
            assert time.monotonic() < end, hosts.processes(node)
            time.sleep(0.1)
