"""Restarts of DDP with an optimizer, warm and cold, and what a waiting process costs.

In: a Cluster of two hosts on this machine, two ranks each; SUPERVISOR_BENCH_KILLS (10): how often a worker is killed.
Out: a Report. Times are from the ranks' own notes; each restart says whether it was warm.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import stamps
from tests.bench.fleet import journal, processes, wait_quiet
from tests.bench.report import Report, Table, median, seconds, spread
from tests.bench.restart import NODES, NPROC, Measured, Script
from tests.bench.stamps import Stamps
from tests.cluster import Cluster, ClusterError
from tests.cluster.job import Job

KILLS = int(os.environ.get("SUPERVISOR_BENCH_KILLS", "10"))
COLD_KILLS = 3
READY_S = 300.0
TURNS = 2
PACE_S = 20.0
# As acceptance has it: the first seconds of a group are not its pace.
SETTLE_S = 30.0
STEPS = 200
TEXT = f"""{stamps.STAMP}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
while True:
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    if step == 0:
        dist.barrier()
        stamp("group")
    if step % {STEPS} == 0:
        print(f"step {{step}} loss {{loss.item():.4f}}", flush=True)
        stamp("steps")
    step += 1
"""
SCRIPT = Script("standby", TEXT, "group", "DDP over gloo with SGD; a rank's first step is done")


@dataclass(frozen=True)
class Kill:
    """One worker killed: seconds to every rank's next step, and how the nodes started their ranks."""

    complete_s: float | None
    cold: dict[str, str]
    """Why, by node; empty where the restart was warm on every node."""
    memory_mb: float
    """PSS of what we run on all nodes before the kill, waiting processes included, workers not."""


@contextlib.contextmanager
def started(cluster: Cluster, work: Path, name: str, **keys: object) -> Iterator[tuple[Job, Measured, Stamps]]:
    """Start a job of our own, and wait for its first step; it is stopped at the end."""
    notes = Stamps(work / name, NODES * NPROC)
    job = Job(
        cluster, work / f"tree-{name}", TEXT, str(notes.directory), nproc_per_node=NPROC, max_restarts=1000, **keys
    )
    with job.start("--job", f"bench-{name}"):
        measured = Measured(notes, SCRIPT, lambda: job.up is not None and job.up.poll() is None, job.errors)
        measured.wait_start()
        yield job, measured, notes
        job.run("stop")
        job.wait()


def waiting(job: Job) -> list[dict[str, Any]]:
    """Return what each node says of its waiting process."""
    return [node.get("standby") or {"state": "none"} for node in job.ask("status")["nodes"]]


def wait_ready(job: Job) -> list[dict[str, Any]]:
    """Wait until every node's waiting process is ready, or has failed; raises ClusterError."""
    end = time.monotonic() + READY_S
    found = waiting(job)
    while any(one["state"] not in ("ready", "failed") for one in found):
        if time.monotonic() > end:
            raise ClusterError(f"the nodes are not warm within {READY_S:g} s: {found}")
        time.sleep(0.2)  # only the status says so
        found = waiting(job)
    return found


def pss_mb(pids: list[int]) -> float:
    """Return the memory of these processes, shared pages by their share."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(text.partition("\nPss:")[2].split()[0])
    return total / 1024


def kills(cluster: Cluster, work: Path) -> tuple[list[Kill], list[str]]:
    """Kill a worker again and again; returns what was seen, and what was left over at the end."""
    found = []
    with started(cluster, work, "kills", standby="auto") as (job, measured, _):
        for _ in range(KILLS):
            standby = wait_ready(job)
            pids = [one["pid"] for one in standby if one.get("pid")]
            memory = pss_mb([*processes(cluster), *pids])
            complete_s = measured.kill().complete_s
            starts = newest(cluster, "bench-kills").get("starts") or {}
            cold = {node: start["why"] or "cold" for node, start in starts.items() if not start["warm"]}
            found.append(Kill(complete_s, cold if starts else {"all": "not told"}, memory))
        place = cluster.hosts[0].home / ".supervisor" / "jobs" / "bench-kills"
        left = [path.name for path in place.glob(".wait-*")]
    left = left[1:] + [f"process {pid}" for pid in processes(cluster) if wait_quiet(cluster)]
    return found, left


def newest(cluster: Cluster, job: str) -> dict[str, Any]:
    """Return the detail of the newest group that runs."""
    detail: dict[str, Any] = [one["detail"] for one in journal(cluster, job) if one["type"] == "generation_running"][-1]
    return detail


def cold_kills(cluster: Cluster, work: Path) -> list[float | None]:
    """Kill a worker a few times, without a waiting process."""
    with started(cluster, work, "cold", standby="off") as (_, measured, _notes):
        found = [measured.kill().complete_s for _ in range(COLD_KILLS)]
    wait_quiet(cluster)
    return found


def pace(notes: Stamps, begun_ns: int, end_ns: int) -> float:
    """Return the steps per second of rank 0 between two moments."""
    times = [
        one.t_ns for one in notes.read() if one.rank == "0" and one.what == "steps" and begun_ns <= one.t_ns <= end_ns
    ]
    return STEPS * (len(times) - 1) / (times[-1] - times[0]) * 1e9 if len(times) > 1 else 0.0


def paces(cluster: Cluster, work: Path) -> dict[str, float]:
    """Return steps per second of jobs without and with a waiting process, once the group has settled, in turn."""
    found: dict[str, list[float]] = {"off": [], "auto": []}
    for turn in range(TURNS):
        for standby, rates in found.items():
            with started(cluster, work, f"pace-{standby}-{turn}", standby=standby) as (job, _, notes):
                if standby == "auto":
                    wait_ready(job)
                time.sleep(SETTLE_S)
                begun_ns = time.time_ns()
                time.sleep(PACE_S)
                rates.append(pace(notes, begun_ns, time.time_ns()))
            wait_quiet(cluster)
    return {standby: median(rates) or 0.0 for standby, rates in found.items()}


def run() -> Report:
    """Measure; raises ClusterError, AssertionError, OSError."""
    with tempfile.TemporaryDirectory(prefix="supervisor-bench-") as name:
        work = Path(name)
        with Cluster(NODES) as cluster:
            warm, left = kills(cluster, work)
            cold = cold_kills(cluster, work)
            rates = paces(cluster, work)
    data = {"warm": [vars(one) for one in warm], "left": left, "cold": cold, "steps_s": rates}
    return Report("standby", (_kill_table(warm, cold), _cost_table(warm, left, rates)), data)


def _kill_table(warm: list[Kill], cold: list[float | None]) -> Table:
    lines = {
        "standby off": cold,
        "cold": [one.complete_s for one in warm if one.cold],
        "warm": [one.complete_s for one in warm if not one.cold],
    }
    rows = tuple(
        (label, str(len(times)), seconds(median(times)), spread(times), str(times.count(None)))
        for label, times in lines.items()
    )
    notes = tuple(sorted({f"cold on {node}: {text}" for one in warm for node, text in one.cold.items()}))
    head = ("", "runs", "every rank's next step", "least .. most", "never")
    return Table(f"worker killed, {NODES} nodes x {NPROC} ranks: {SCRIPT.meaning}", head, rows, notes)


def _cost_table(warm: list[Kill], left: list[str], rates: dict[str, float]) -> Table:
    memory = [one.memory_mb for one in warm]
    rows = (
        ("steps/s without a waiting process", f"{rates['off']:.0f}"),
        ("steps/s while one waits", f"{rates['auto']:.0f} (x {rates['auto'] / (rates['off'] or 1):.3f})"),
        ("PSS of agents, engines, waiting processes before the first kill", f"{memory[0]:.0f} MB"),
        ("the same before the last", f"{memory[-1]:.0f} MB"),
        ("warm restarts", f"{sum(not one.cold for one in warm)} of {len(warm)}"),
        ("left over", ", ".join(left) or "nothing"),
    )
    return Table("what it costs", ("", ""), rows)
