"""A rank that is killed, in a container and without: when all ranks step again, in one run.

In: two hosts of this machine with Podman. Out: a Report: the launch, and the next step after each kill, warm.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.report import Report, Table, ratio, seconds
from tests.cluster import Cluster, ClusterError
from tests.cluster.job import Job
from tests.cluster.podman import IMAGE, Podman, mounts, podman_obstacle
from tests.cluster.scripts import TRAIN

KILLS = 5
POLL_S = 0.005
DEADLINE_S = 60.0
PLAIN, INSIDE = "without a container", "in a container of Podman"


def _stepped(job: Job, generation: int) -> bool:
    place = f".supervisor/jobs/{job.name[0]}/generation_{generation}/rank_*/stdout.log"
    outputs = [path.read_bytes() for host in job.cluster.hosts for path in host.home.glob(place)]
    return len(outputs) == len(job.cluster.hosts) and all(b"step=" in output for output in outputs)


def _await_step(job: Job, generation: int) -> None:
    end = time.monotonic() + DEADLINE_S
    while not _stepped(job, generation):
        if time.monotonic() > end:
            raise ClusterError(f"no step in generation {generation}: {job.errors()[-2000:]}")
        time.sleep(POLL_S)


def _is_warm(job: Job) -> bool:
    nodes = job.ask("status")["nodes"]
    return all((node["standby"] or {}).get("state") == "ready" for node in nodes)


def _measure(cluster: Cluster, work: Path, defaults: dict[str, Any], **keys: Any) -> tuple[float, list[float]]:
    """Return the seconds of the launch until all ranks step, and of each restart."""
    with Job(cluster, work, TRAIN) as job:
        job.inventory = cluster.inventory(
            work / "hosts.toml", defaults=defaults, nproc_per_node=1, stop_grace=3.0, max_restarts=100, **keys
        )
        begun = time.monotonic()
        job.start()
        _await_step(job, 0)
        launch, restarts = time.monotonic() - begun, []
        for generation in range(1, KILLS + 1):
            while not _is_warm(job):
                time.sleep(0.2)
            pid = job.pid(1)
            begun = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            _await_step(job, generation)
            restarts.append(time.monotonic() - begun)
        job.run("stop", "--kill")
        job.wait()
    return launch, restarts


def run() -> Report:
    """Measure; raises ClusterError, OSError, subprocess.SubprocessError."""
    obstacle = podman_obstacle()
    if obstacle:
        raise ClusterError(f"no containers here: {obstacle}")
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as name, Cluster(2, agent=True) as cluster:
        podman = Podman(cluster)
        inside = {"container": IMAGE, "mounts": mounts()}
        found = {
            PLAIN: _measure(cluster, Path(name) / "plain", {}),
            INSIDE: _measure(cluster, Path(name) / "inside", {"prelude": podman.prelude}, **inside),
        }
    base = statistics.median(found[PLAIN][1])
    rows = tuple(
        (way, seconds(launch), seconds(statistics.median(took)), ratio(statistics.median(took), base))
        for way, (launch, took) in found.items()
    )
    notes = (f"next step: medians of {KILLS} kills of a rank, from the signal until all ranks have printed a step",)
    head = ("two hosts, torch, gloo", "launch to first step", "next step", "ratio")
    table = Table("ranks in containers", head, rows, notes)
    return Report(
        "containers", (table,), {way: {"launch_s": one, "next_s": many} for way, (one, many) in found.items()}
    )
