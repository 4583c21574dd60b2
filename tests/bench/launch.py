"""From the command to all ranks in main(): `up` of 32 hosts beside clush, in one run.

In: a Cluster of 32 hosts on this machine. Out: a Report.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench import stamps
from tests.bench.fleet import ended, wait_quiet
from tests.bench.report import Report, Table, median, ratio, seconds
from tests.bench.stamps import Stamps
from tests.cluster import Cluster, ClusterError
from tests.cluster.job import Job

HOSTS = 32
TIMEOUT_S = 400.0
# What takes a second is at the mercy of what else the machine does: the middle one of so many.
QUICK_RUNS = 3
ROOT = Path(__file__).resolve().parents[2]


class Bench:
    """All measurements, one after the other on the same hosts."""

    def __init__(self, cluster: Cluster, work: Path) -> None:
        self._cluster, self._work, self._count = cluster, work, 0
        # The script comes with the work tree.
        self._job = Job(cluster, work / "tree", stamps.ONCE, nproc_per_node=1)

    def up(self) -> float:
        """Launch with `up` and wait for the end of the job; raises ClusterError when it fails."""
        notes = self._stamps()
        words = ["up", str(self._job.inventory), "--headless", "--job", f"bench-{self._count}", "train.py"]
        took_s = self._timed([sys.executable, "-m", "supervisor", *words, str(notes.directory)], notes, "main")
        wait_quiet(self._cluster)
        return took_s

    def clush(self, script: str, what: str) -> float:
        """Start a script on all hosts by clush; raises ClusterError."""
        notes, path = self._stamps(), self._work / "clush.py"
        path.write_text(script)
        addresses = ",".join(host.address for host in self._cluster.hosts)
        # The system's own client, as in Cluster.ssh: `ssh`, options, address.
        options = " ".join(self._cluster.ssh_command(0)[1:-1])
        command = ["clush", "-S", "-n", "-f", str(HOSTS), "-o", options, "-w", addresses]
        return self._timed([*command, shlex.join([sys.executable, str(path), str(notes.directory)])], notes, what)

    def _stamps(self) -> Stamps:
        self._count += 1
        return Stamps(self._work / "stamps" / str(self._count), HOSTS)

    def _timed(self, command: list[str], notes: Stamps, what: str) -> float:
        """Return the seconds until the last rank has noted it."""
        log = self._work / f"{self._count}.log"
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        begun_ns = time.time_ns()
        with log.open("wb") as out:
            started = subprocess.Popen(
                command, cwd=self._job.work, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
            with ended(started) as process:
                status = process.wait(TIMEOUT_S)
        last_ns = notes.all_after(what, begun_ns)
        if status != 0 or last_ns is None:
            raise ClusterError(f"{command[0]}: status {status}: {log.read_text(errors='replace')[-2000:]}")
        return (last_ns - begun_ns) / 1e9


def run() -> Report:
    """Measure; raises ClusterError, OSError."""
    if shutil.which("clush") is None:
        raise ClusterError("to compare with: apt-get install clustershell")
    with tempfile.TemporaryDirectory(prefix="supervisor-bench-") as name, Cluster(HOSTS) as cluster:
        bench = Bench(cluster, Path(name))
        found = {"supervisor up, first run (agent and tree are pushed)": bench.up()}
        plain = median([bench.clush(stamps.ONCE, "main") for _ in range(QUICK_RUNS)])
        found["supervisor up, second run (nothing new)"] = bench.up()
        # The script's main() proper begins behind its imports.
        found["clush, script imports torch"] = bench.clush(stamps.ONCE_TORCH, "imported")
    rows = [(label, seconds(took_s), ratio(took_s, plain)) for label, took_s in found.items()]
    rows.append(("clush, script without torch", seconds(plain), ratio(plain, plain)))
    notes = (
        f"our engines import torch on all {HOSTS} hosts before the first rank starts, and these hosts are one machine",
        f"clush without torch: the middle one of {QUICK_RUNS} runs",
    )
    title = f"launch: {HOSTS} hosts x 1 rank, from the command to the last rank in main()"
    return Report("launch", (Table(title, ("", "main()", "to clush"), tuple(rows), notes),), {**found, "clush": plain})
