"""What it costs that the last output of each node's ranks is kept on another node: processor time and bytes.

In: a Cluster of two hosts; jobs with 8 ranks a host that write nothing, or fast. Out: a Report.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from remote_agent.agent.last_output import END_BYTES, LOOK_S
from tests.bench.report import Report, Table
from tests.cluster import Cluster
from tests.cluster.job import Job

RANKS = 8
SETTLE_S = 4 * LOOK_S
WINDOW_S = 12 * LOOK_S
# Lines of 100 bytes, on both streams: 200 kB a second of each rank.
SCRIPT = """
import os, sys, time
from pathlib import Path
fast = sys.argv[1] == "fast" and int(os.environ["RANK"]) < 8
block = ("step " + "x" * 94 + "\\n") * 250
while not Path("over").exists():
    if fast:
        os.write(1, block.encode())
        os.write(2, block.encode())
    time.sleep(0.25)
"""


def run() -> Report:
    """Measure."""
    cases = (("one host, fast: no other node", 1, "fast"), ("silent", 2, "silent"), ("fast", 2, "fast"))
    data: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root, Cluster(2, stub_torch=True) as hosts:
        for title, count, kind in cases:
            data[title] = _measure(hosts, Path(root) / f"{count}{kind}", count, kind)
    rows = tuple(
        (title, *(f"{found[key] / 1e3:.1f}" for key in ("cpu_us", "other_us", "bytes")))
        for title, found in data.items()
    )
    head = (f"{RANKS} ranks on n1", "agent of n1, ms/s", "agent of n2, ms/s", "n1 sends, kB/s")
    most = 2 * RANKS * END_BYTES / LOOK_S / 1e3
    notes = (f"at most {most:.0f} kB/s of last output: {END_BYTES // 1024} KiB a file, every {LOOK_S:g} s",)
    return Report("last_output", (Table("last output, kept on another node", head, rows, notes),), data)


def _measure(hosts: Cluster, work: Path, count: int, kind: str) -> dict[str, float]:
    """Return microseconds of both agents, and bytes that n1 sends, each per second."""
    job = Job(hosts, work, SCRIPT, kind, nproc_per_node=RANKS, stop_grace=1.0)
    names = [host.name for host in hosts.hosts[:count]]
    hosts.inventory(job.inventory, only=names, nproc_per_node=RANKS, stop_grace=1.0, standby="off")
    # Detached: nobody follows the logs.
    with job.start("--detach"):
        job.until("generation_running")
        time.sleep(SETTLE_S)
        before, begun = _counters(hosts, job.name[0], count), time.monotonic()
        time.sleep(WINDOW_S)
        after, took_s = _counters(hosts, job.name[0], count), time.monotonic() - begun
        job.finish()
        job.until("job_succeeded")
    return {key: (after[key] - value) / took_s for key, value in before.items()}


def _counters(hosts: Cluster, job: str, count: int) -> dict[str, float]:
    sent = hosts.exec(0, ["sh", "-c", "cat /sys/class/net/e*/statistics/tx_bytes"])
    numbers = [_processor_us(hosts, number, job) for number in range(count)]
    total = sum(int(line) for line in sent.stdout.split())
    return {"cpu_us": numbers[0], "other_us": numbers[-1] if count > 1 else 0.0, "bytes": float(total)}


def _processor_us(hosts: Cluster, number: int, job: str) -> float:
    """Return the processor time of a host's agent so far."""
    pid = int((hosts.host(number).home / ".supervisor/jobs" / job / "agent.pid").read_text().split()[0])
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") * 1e6
