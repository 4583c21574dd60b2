"""From the command to every rank's first training step: `up` beside torchrun started over ssh, in turn.

In: a Cluster of two hosts on this machine, two ranks of gloo DDP each. Out: a Report: times and their ratios.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench import stamps
from tests.bench.fleet import ended, wait_quiet
from tests.bench.report import Report, Table, median, ratio, seconds
from tests.bench.stamps import Stamps
from tests.bench.torchrun import PORT
from tests.cluster import Cluster, ClusterError
from tests.cluster.job import Job

NODES = 2
NPROC = 2
RUNS = int(os.environ.get("SUPERVISOR_BENCH_RUNS", "5"))
TIMEOUT_S = 300.0
# How long the ranks of the first run stay: until it was noted what they have loaded.
STAY_S = 20.0
STOCK = "torchrun, by ssh on both hosts"
COLD = 'supervisor up, standby = "off"'
FIRST = 'supervisor up, standby = "auto", a script that is new here'
WARM = 'supervisor up, standby = "auto", again'
KEPT = "supervisor up --keep-warm, after an edit"
SCRIPT = f"""{stamps.STAMP}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
until = time.monotonic() + float(sys.argv[2])
step = 0
while step == 0 or time.monotonic() < until:
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    step += 1
    print(f"step={{step}}", flush=True)
    if step == 1:
        stamp("step")
    time.sleep(0.2)
dist.destroy_process_group()
"""


class Bench:
    """All runs, one after the other on the same hosts."""

    def __init__(self, cluster: Cluster, work: Path) -> None:
        self._cluster = cluster
        self._work = work
        self._count = 0
        self._script = work / "train.py"
        self._script.write_text(SCRIPT)

    def up(self, standby: str, stay_s: float = 0.0) -> float:
        """Launch by `up`, and wait for the end of the job; returns the seconds to the last rank's first step."""
        notes = self._stamps()
        words = [str(notes.directory), str(stay_s)]
        job = Job(self._cluster, self._work / "tree", SCRIPT, *words, nproc_per_node=NPROC, standby=standby)
        begun_ns = time.time_ns()
        with job.start("--job", f"bench-{self._count}"):
            found = self._first_step(notes, begun_ns, job.errors)
            status = job.wait(TIMEOUT_S)
        if status != 0:
            raise ClusterError(f"up: status {status}: {job.errors()[-2000:]}")
        wait_quiet(self._cluster)
        return found

    def edit(self) -> float:
        """Launch by `up` after an edit, from a work tree whose last job has left what it loaded; as `up` does."""
        notes = self._stamps()
        script = f"{SCRIPT}# {self._count}\n"
        job = Job(self._cluster, self._work / "edited", script, str(notes.directory), "0", nproc_per_node=NPROC)
        # A job with a name of its own would have a work tree of its own.
        words = ("--standby", "auto", "--keep-warm", "10m", "train.py", *job.arguments)
        begun_ns = time.time_ns()
        with job.err.open("wb") as errors:
            started = subprocess.Popen(
                job.command("up", *words), cwd=job.work, stdout=subprocess.DEVNULL, stderr=errors
            )
            with ended(started):
                found = self._first_step(notes, begun_ns, job.errors)
                if started.wait(TIMEOUT_S) != 0:
                    raise ClusterError(f"up: {job.errors()[-2000:]}")
        return found

    def forget(self) -> None:
        """End what is kept, and forget what the script loads."""
        job = Job(self._cluster, self._work / "edited", SCRIPT)
        subprocess.run(job.command("clean"), check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)
        if wait_quiet(self._cluster):
            raise ClusterError("supervisor clean has left processes")

    def torchrun(self) -> float:
        """Start torchrun on both hosts at once; returns the seconds to the last rank's first step."""
        notes = self._stamps()
        log = self._work / f"torchrun-{self._count}.log"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            str(NODES),
            "--nproc-per-node",
            str(NPROC),
        ]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self._cluster.hosts[0].address}:{PORT}"]
        begun_ns = time.time_ns()
        with contextlib.ExitStack() as stack, log.open("wb") as out:
            for host in self._cluster.hosts:
                line = shlex.join(
                    [*command, "--local-addr", host.address, str(self._script), str(notes.directory), "0"]
                )
                started = subprocess.Popen(
                    [*self._cluster.ssh_command(host.name), line], stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
                stack.enter_context(ended(started))
            return self._first_step(notes, begun_ns, lambda: log.read_text(errors="replace"))

    def _stamps(self) -> Stamps:
        self._count += 1
        return Stamps(self._work / "stamps" / f"{self._count:03}", NODES * NPROC)

    def _first_step(self, notes: Stamps, begun_ns: int, said: Callable[[], str]) -> float:
        last_ns = notes.wait("step", begun_ns, TIMEOUT_S, lambda: True)
        if last_ns is None:
            raise ClusterError(f"no first step: {said()}"[-2000:])
        return (last_ns - begun_ns) / 1e9


def run() -> Report:
    """Measure; raises ClusterError, OSError, AssertionError."""
    with tempfile.TemporaryDirectory(prefix="supervisor-bench-") as name, Cluster(NODES) as cluster:
        bench = Bench(cluster, Path(name))
        # The agent and the tree are on the hosts.
        bench.up("off")
        found: dict[str, list[float]] = {STOCK: [], COLD: [], FIRST: [], WARM: [], KEPT: []}
        for _ in range(RUNS):
            found[STOCK].append(bench.torchrun())
            found[COLD].append(bench.up("off"))
            found[FIRST].append(bench.up("auto", STAY_S))
            found[WARM].append(bench.up("auto"))
            bench.edit()
            found[KEPT].append(bench.edit())
            bench.forget()
    middle = {label: median(times) for label, times in found.items()}
    rows = tuple(
        (label, seconds(middle[label]), ratio(middle[label], middle[STOCK]), " ".join(seconds(one) for one in times))
        for label, times in found.items()
    )
    table = Table(
        f"first step: {NODES} hosts x {NPROC} ranks of gloo DDP, from the command to every rank's first step",
        ("", "median", "to torchrun", "runs, in turn"),
        rows,
    )
    return Report("first_step", (table,), {"runs": found})
