"""Ranks in containers of Podman, and behind bubblewrap: what is named, healed and left is the same as without."""

from __future__ import annotations

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

from tests.agents.engine_process import await_death
from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import WAIT_S, Job, until
from tests.cluster.podman import IMAGE, LIGHT_IMAGE, Podman, mounts, podman_obstacle
from tests.cluster.scripts import STEPS

pair = hosts_of(2, scope="module")
# An agent whose job is over waits at most this long for its operators.
LINGER_S = 30.0
HANGS = """
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")


def wait_for_data():
    time.sleep(3600)


for step in range(1000):
    if step == 5 and dist.get_rank() == 1:
        wait_for_data()
    dist.all_reduce(torch.ones(2))
    print(f"step={step} loss=1.0", flush=True)
    time.sleep(0.1)
"""
EATS = """
import os, time
from pathlib import Path
while os.environ["RANK"] == "0" or not Path("go").exists():
    time.sleep(0.1)
open("/proc/self/oom_score_adj", "w").write("1000")
full = []
while True:
    full.append(bytearray(1 << 24))
"""


@pytest.fixture(scope="module")
def podman(pair: Cluster) -> Podman:
    obstacle = podman_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    return Podman(pair)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(pair: Cluster) -> Iterator[None]:
    """The agents of jobs that are over wait for operators a little; then nothing of theirs is there any more."""
    yield
    until(lambda: not any(ours(pair, host.name) for host in pair.hosts), "nothing of ours on the hosts", LINGER_S)


def states(job: Job) -> list[str]:
    return [(node["standby"] or {}).get("state", "") for node in job.ask("status")["nodes"]]


def ours(cluster: Cluster, host: str) -> dict[int, str]:
    """Return the processes of a job on a host: agent, engine, ranks."""
    named = (" serve --job", " engine --job", " supervisor=", "conmon ")
    return {pid: line for pid, line in cluster.processes(host).items() if any(word in line for word in named)}


def job_in(podman: Podman, work: Path, script: str, image: str = LIGHT_IMAGE, **job: Any) -> Job:
    keys: dict[str, Any] = {"container": image, "mounts": mounts(), "max_restarts": 20, "min_nodes": 1, **job}
    return job_of(podman.cluster, work, script, {"prelude": podman.prelude}, **keys)


def job_of(cluster: Cluster, work: Path, script: str, defaults: dict[str, object], **job: Any) -> Job:
    made = Job(cluster, work, script)
    keys: dict[str, Any] = {"nproc_per_node": 1, "stop_grace": 3.0, "standby": "off", **job}
    made.inventory = cluster.inventory(work / "hosts.toml", defaults=defaults, **keys)
    return made


def containers(podman: Podman, host: str, job: Job) -> list[str]:
    return [name for name in podman.names(host) if name.startswith(f"supervisor-{job.name[0]}-")]


def shell(podman: Podman, job: Job, rank: int, line: str) -> list[str]:
    """Return what appears when a line is typed where a rank on n2 runs, as the screen opens a shell there."""
    home = podman.cluster.host("n2").home
    agent = next(path for path in home.glob(".supervisor/agents/*.pyz") if "cpython" not in path.name)
    words = f"--job {job.name[0]} --rank {rank} --pid {job.pid(rank)}"
    typed = f"printf '%s\\n' '{line}' exit"
    done = podman.cluster.exec("n2", ["sh", "-c", f"{podman.prelude}; {typed} | python3 {agent} shell {words}"])
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("\r", "").splitlines()


def test_launch_kill_remove_add_and_stop(podman: Podman, tmp_path: Path) -> None:
    with job_in(podman, tmp_path / "work", STEPS, standby="auto").start() as job:
        job.until_step(3)
        inside = Path(f"/proc/{job.pid(0)}/root/etc/os-release").read_text()
        assert "image of the tests" in inside
        place = Path(f"/proc/{job.pid(0)}/cwd").resolve()
        assert place.parent == podman.cluster.host("n1").home / ".supervisor" / "trees"
        assert len(containers(podman, "n1", job)) == len(containers(podman, "n2", job)) == 1
        until(lambda: states(job) == ["ready", "ready"], "waiting processes")
        os.kill(job.pid(1), signal.SIGKILL)
        failed = job.until("rank_failed")
        assert (failed["node"], failed["rank"]) == ("n2", 1)
        healed = job.until("generation_running", generation=1)
        assert [start["warm"] for start in healed["detail"]["starts"].values()] == [True, True], healed
        job.until_step(6)
        stacks = job.run("stacks").stdout.decode()
        assert "train.py" in stacks
        shown = shell(podman, job, 1, 'cat /etc/os-release; echo "rank $RANK"')
        assert shown[-3].endswith('NAME="image of the tests"'), shown
        assert shown[-2] == "rank 1", shown
        assert job.run("remove", "--node", "n2").returncode == 0
        until(lambda: not containers(podman, "n2", job), "no container on the node that was removed")
        assert job.run("add", "--node", "n2").returncode == 0
        job.until_step(9)
        assert job.run("stop").returncode == 0
        assert job.wait() == 4


@pytest.mark.parametrize("who", ["engine", "agent", "monitor", "client"])
def test_whoever_is_killed_no_rank_and_no_container_stays(podman: Podman, tmp_path: Path, who: str) -> None:
    with job_in(podman, tmp_path / "work", STEPS).start() as job:
        job.until_step(2)
        rank = job.pid(1)
        lines = {pid: line for pid, line in podman.cluster.processes("n2").items() if job.name[0] in line}.items()
        chosen = {
            "engine": [pid for pid, line in lines if " engine --job" in line and line.split()[0] == sys.executable],
            "agent": [pid for pid, line in lines if " serve " in line],
            "monitor": [pid for pid, line in lines if "conmon" in line.split()[0]],
            "client": [pid for pid, line in lines if line.split()[0].endswith("podman") and " run " in line],
        }[who]
        assert len(chosen) == 1, (who, dict(lines))
        began = time.monotonic()
        os.kill(chosen[0], signal.SIGKILL)
        if who in ("engine", "agent"):
            await_death(rank)
            assert time.monotonic() - began < 2.0 + 1.0, "the node's ranks end within two seconds"
            assert job.until("incident")["detail"]["culprit_node"] == "n2"
            job.until("generation_running", generation=1)
        job.until_step(6)
        # Whoever lives ends the container, also without its monitor or its client.
        assert job.run("stop").returncode == 0
        assert job.wait() == 4
        until(lambda: not containers(podman, "n2", job), "no container", LINGER_S)


def test_a_hang_is_named_with_its_line(podman: Podman, tmp_path: Path) -> None:
    line = next(number for number, text in enumerate(HANGS.split("\n"), 1) if "sleep(3600)" in text)
    with job_in(podman, tmp_path / "work", HANGS, IMAGE, hang_after=3.0).start() as job:
        hang = job.until("incident")["detail"]
        assert (hang["category"], hang["culprit_ranks"], hang["culprit_node"]) == ("hang_no_output", [1], "n2")
        assert hang["missing"]["stacks"]["1"].startswith(f"train.py:{line} "), hang
        assert job.run("stop").returncode == 0
        assert job.wait() == 4


def test_out_of_memory_is_named(podman: Podman, tmp_path: Path) -> None:
    with job_in(podman, tmp_path / "work", EATS, max_restarts=0).start() as job:
        job.until("generation_running")
        (name,) = containers(podman, "n2", job)
        identity = podman.run("n2", "inspect", "--format", "{{.Id}}", name).strip()
        limit = Path(f"/sys/fs/cgroup/memory/libpod_parent/libpod-{identity}/memory.limit_in_bytes")
        limit.write_text(str(400 << 20))
        Path(f"/proc/{job.pid(1)}/cwd/go").touch()
        failed = job.until("rank_failed")
        assert failed["rank"] == 1
        assert job.wait() == 1
        incident = job.until("incident")["detail"]
        assert (incident["category"], incident["culprit_ranks"]) == ("host_oom_kill", [1]), incident


def test_a_lost_host(podman: Podman, tmp_path: Path) -> None:
    with job_in(podman, tmp_path / "work", STEPS, node_timeout=4.0).start() as job:
        job.until_step(2)
        podman.cluster.crash("n2")
        lost = job.until("node_lost")
        assert lost["node"] == "n2"
        job.until_step(5)
        podman.cluster.boot("n2")
        podman.boot("n2")
        assert job.run("stop").returncode == 0
        assert job.wait() == 4


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="apt-get install bubblewrap")
def test_behind_a_prefix(pair: Cluster, tmp_path: Path) -> None:
    with job_of(pair, tmp_path / "work", STEPS, {"wrap": "bwrap --dev-bind / / --setenv BEHIND yes"}).start() as job:
        job.until_step(2)
        assert b"BEHIND=yes" in Path(f"/proc/{job.pid(1)}/environ").read_bytes().split(b"\0")
        os.kill(job.pid(1), signal.SIGKILL)
        failed = job.until("rank_failed")
        assert (failed["node"], failed["rank"]) == ("n2", 1)
        job.until("generation_running", generation=1)
        job.until_step(5)
        assert job.run("stop").returncode == 0
        assert job.wait() == 4


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="apt-get install bubblewrap")
def test_a_prefix_that_hides_pids_is_refused(pair: Cluster, tmp_path: Path) -> None:
    wrap = "bwrap --dev-bind / / --unshare-pid --proc /proc"
    with job_of(pair, tmp_path / "work", STEPS, {"wrap": wrap}).start() as job:
        assert job.wait() == 3
        assert "numbers of their own" in job.errors()
        assert "--unshare-pid" in job.errors()


def test_a_prefix_that_does_not_start(pair: Cluster, tmp_path: Path) -> None:
    with job_of(pair, tmp_path / "work", STEPS, {"wrap": "/nowhere/apptainer exec x.sif"}).start() as job:
        assert job.wait() == 3
        assert "/nowhere/apptainer" in job.errors()


def test_an_image_that_is_nowhere(podman: Podman, tmp_path: Path) -> None:
    with job_in(podman, tmp_path / "work", STEPS, "localhost:9/nothing/here:1").start() as job:
        assert job.wait() == 3
        assert "localhost:9/nothing/here:1 cannot be pulled" in job.errors()
        assert "n[1-2]: image" in job.errors()


def test_the_check_looks_into_the_image(podman: Podman, tmp_path: Path) -> None:
    job = job_in(podman, tmp_path / "work", STEPS)
    shown = job.supervisor.run(["check", str(job.inventory), "--json"], job.work, timeout=WAIT_S)
    nodes = json.loads(shown.stdout)["nodes"]
    places = {name: facts["torch"]["place"] for name, facts in nodes.items()}
    assert places == dict.fromkeys(("n1", "n2"), f"image {podman.identity(LIGHT_IMAGE)[:12]}")
