"""Inside a real Slurm allocation: the job runs on its nodes, reached by SSH or by srun, and ends with it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster, cluster_obstacle
from tests.cluster.prepared import prepared
from tests.cluster.scripts import LIGHT
from tests.cluster.slurm import Slurm, slurm_obstacle
from tests.stub import STUB

ROOT = Path(__file__).parents[2]
# What ends with an allocation: workers, agents in a step, whatever is Slurm's.
LEFT = ("train.py", "serve --job alloc --step", "srun --jobid", "slurmstepd")
AGENT = "serve --job alloc"
# Needs longer to save than an engine gives to workers whose agent is gone.
SAVES = """
import os, signal, time

def save(number, frame):
    time.sleep(1)
    print("saved", flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, save)
print("in main", flush=True)
while True:
    signal.pause()
"""
BATCH = """#!/bin/sh
cd {work}
export PATH={bin}:$PATH
export PYTHONPATH={root}:{stub} STAY_S={stay}
exec {python} -m supervisor up {way} --headless --nproc-per-node 1 --job alloc --env STAY_S train.py
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    """Two hosts."""
    obstacle = cluster_obstacle() or slurm_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    with Cluster(2, stub_torch=True, agent=True) as made:
        for host in made.hosts:
            # As on a real cluster: the user may go from node to node.
            config = [f"IdentityFile {made.identity_file}", f"UserKnownHostsFile {made.known_hosts}"]
            names = [f"Host {one.name}\n  HostName {one.address}\n" for one in made.hosts]
            ssh = host.home / ".ssh"
            ssh.mkdir(mode=0o700, exist_ok=True)
            (ssh / "config").write_text("\n".join([*names, "Host *", *(f"  {line}" for line in config), ""]))
        yield made


@pytest.fixture(scope="module")
def daemons(hosts: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Slurm on both hosts."""
    with Slurm(hosts, tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def slurm(hosts: Cluster, daemons: Slurm) -> Iterator[Slurm]:
    """The same, without an allocation, an agent or files of ours."""
    yield daemons
    daemons.run("scancel", "--me")
    await_nothing_left(hosts, daemons)
    for host in hosts.hosts:
        # Agents that were started by SSH stay a while for operators who read the outcome.
        for pid in (pid for pid, line in hosts.processes(host).items() if AGENT in line):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    await_nothing_left(hosts, daemons, AGENT)
    for host in hosts.hosts:
        shutil.rmtree(host.home / ".supervisor")
        shutil.copytree(prepared(), host.home / ".supervisor")


@pytest.fixture
def no_ssh(hosts: Cluster) -> Iterator[None]:
    """No host lets anybody in by SSH."""
    keys = hosts.identity_file.with_suffix(".pub")
    away = keys.rename(keys.with_suffix(".away"))
    yield
    away.rename(keys)


def submit(slurm: Slurm, work: Path, program: str, stay: float = 0.0, way: str = "--slurm") -> str:
    """Submit a batch job on both nodes; returns its number."""
    work.mkdir()
    (work / "train.py").write_text(program)
    script = work / "batch.sh"
    python = Path(sys.executable)
    script.write_text(
        BATCH.format(work=work, root=ROOT, stub=STUB, python=python, bin=python.parent, stay=stay, way=way)
    )
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


def await_nothing_left(hosts: Cluster, slurm: Slurm, *more: str) -> None:
    """Wait until there is no allocation, no step, and no process of either, or with one of `more` in its command."""
    end = time.monotonic() + 40
    while slurm.run("squeue", "-h") + slurm.run("squeue", "-h", "-s"):
        assert time.monotonic() < end, slurm.run("squeue", "-s")
        time.sleep(0.1)
    for host in hosts.hosts:
        while left := [line for line in hosts.processes(host).values() if any(word in line for word in (*LEFT, *more))]:
            assert time.monotonic() < end, left
            time.sleep(0.1)


def test_an_allocation_trains_on_its_nodes(hosts: Cluster, slurm: Slurm, tmp_path: Path) -> None:
    submit(slurm, tmp_path / "work", LIGHT, stay=1)
    printed = until("job succeeded", tmp_path / "work")
    assert "n1:0| in main 0" in printed
    assert "n2:1| in main 1" in printed
    await_nothing_left(hosts, slurm)


@pytest.mark.parametrize("way", ["--slurm", "--srun"])
def test_a_cancelled_allocation_ends_its_job_and_the_incident_says_preempted(
    hosts: Cluster, slurm: Slurm, tmp_path: Path, way: str
) -> None:
    number = submit(slurm, tmp_path / "work", SAVES, way=way)
    for line in ("generation running", "n1:0| in main", "n2:1| in main"):
        until(line, tmp_path / "work")
    slurm.run("scancel", number)
    for line in ("job stopped", "n1:0| saved", "n2:1| saved"):
        until(line, tmp_path / "work")
    (incident,) = [event["detail"] for event in journal(hosts) if event["type"] == "incident"]
    assert (incident["category"], incident["scope"]) == ("signal_preempted", "outside_the_ranks")
    assert incident["summary"] == f"preempted: Slurm ends allocation {number} (SIGTERM)"
    await_nothing_left(hosts, slurm)


def test_where_ssh_is_refused_srun_brings_agents_that_need_no_supervisor(
    hosts: Cluster, slurm: Slurm, tmp_path: Path, no_ssh: None
) -> None:
    number = slurm.run("sbatch", "--parsable", "-N", "2", "-o", "/dev/null", "--wrap", "exec sleep 3600").strip()
    while slurm.run("squeue", "-h", "-o", "%T").strip() != "RUNNING":
        time.sleep(0.1)
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text(LIGHT)

    def supervisor(verb: str, *words: str) -> tuple[str, str]:
        environment = {**slurm.environment, "SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": "n[1-2]"}
        environment |= {"PYTHONPATH": f"{ROOT}:{STUB}", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
        command = ["env", "-C", str(work), sys.executable, "-m", "supervisor", verb, "--slurm", *words]
        done = hosts.exec("n1", command, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    _, said = supervisor("up", "--detach", "--nproc-per-node", "1", "--job", "alloc", "train.py")
    reported = [line for line in said.splitlines() if "SSH" in line]
    assert len(reported) == 1, said
    assert reported[0].startswith("srun is used instead of SSH: n")
    assert "auth: auth refused" in reported[0]
    for node in ("n1", "n2"):
        running = hosts.processes(node)
        assert not [line for line in running.values() if line.startswith("srun")], running
        (agent,) = [pid for pid, line in running.items() if "serve --job alloc" in line]
        # Slurm's own process is its parent: the step is the agent's, and ends with it.
        parent = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
        step = Path(f"/proc/{agent}/environ").read_bytes().split(b"SLURM_STEP_ID=")[1].partition(b"\0")[0].decode()
        assert running[parent] == f"slurmstepd: [{number}.{step}]"
    status = json.loads(supervisor("status", "--json", "alloc")[0])
    assert (status["state"], status["world_size"]) == ("running", 2)
    supervisor("stop", "alloc")
    slurm.run("scancel", number)
    await_nothing_left(hosts, slurm)
