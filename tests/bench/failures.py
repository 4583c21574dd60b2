"""What is said of the failures of the field.

In: a Cluster of two or three hosts, two ranks each. Out: a Report; seconds are from the fault to the verdict.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.faults import FAULTS, HOST, SLOW, WARNING, Fault, Run
from tests.bench.fleet import event_ns
from tests.bench.report import Report, Table, seconds
from tests.bench.stamps import Stamps
from tests.cluster import Cluster, ClusterError
from tests.cluster.job import Job
from tests.cluster.leftovers import end as kill

NPROC = 2
START_S = 90.0
STOP_S = 30.0
# A group that has just begun still starts threads: the fault meets one that runs.
REST_S = 0.2
WATCH_S = 60.0
HANG_AFTER_S = 10.0
NODE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Said:
    """What was said, and when."""

    text: str
    after_s: float | None
    right: bool = False


def play(fault: Fault, cluster: Cluster, work: Path) -> tuple[Said, Said]:
    """Return what the job and `diagnose` say; raises ClusterError, AssertionError, OSError."""
    keys: dict[str, Any] = {"hang_after": HANG_AFTER_S, "node_timeout": NODE_TIMEOUT_S}
    keys |= {"nproc_per_node": NPROC, "only": [*fault.hosts], "max_restarts": 0}
    notes = Stamps(work / "notes", len(fault.hosts) * NPROC)
    launch = Job(cluster, work / "tree", fault.script, str(notes.directory), **keys)
    try:
        with launch.start("--nnodes", str(len(fault.hosts))) as job:
            goes_on = partial(_goes_on, job)
            if notes.wait("ready", 0, START_S, goes_on) is None:
                raise ClusterError(f"the job did not start: {job.errors()[-500:]}")
            time.sleep(REST_S)
            run = Run(cluster, notes)
            begun_ns = _break(run, fault, work / "go", goes_on)
            try:
                return _heard(job, fault, begun_ns)
            finally:
                if fault.undo is not None:
                    fault.undo(cluster)
    finally:
        # After `up`, which would start a killed agent again; a host without power has nothing.
        for host in cluster.hosts:
            kill(cluster.pids(host))


def _goes_on(job: Job) -> bool:
    return job.up is not None and job.up.poll() is None


def _break(run: Run, fault: Fault, go: Path, goes_on: Callable[[], bool]) -> int:
    """Let it fail; returns since when, in nanoseconds."""
    since_ns = time.time_ns()
    if fault.act is not None:
        fault.act(run)
        return since_ns
    go.touch()
    return run.notes.wait("fault", 0, WATCH_S, goes_on, fault.breaking) or since_ns


def _heard(job: Job, fault: Fault, begun_ns: int) -> tuple[Said, Said]:
    goes_on = fault.category in (WARNING, SLOW)
    event = job.until(str(fault.category) if goes_on else "incident", WATCH_S)
    after_s = (event_ns(event) - begun_ns) / 1e9
    live = _warned(fault, event, after_s) if goes_on else _judged(fault, event["detail"], after_s)
    if fault.hangs:
        job.run("stop")
        job.wait(STOP_S)
    homes = [str(job.cluster.host(name).home / ".supervisor" / "jobs") for name in fault.hosts]
    done = subprocess.run(
        [sys.executable, "-m", "supervisor", "diagnose", "--json", *homes],
        capture_output=True, timeout=WATCH_S, check=True,
    )  # fmt: skip
    incidents = json.loads(done.stdout)["incidents"]
    if incidents:
        return live, _judged(fault, incidents[0], None)
    return live, Said("no failure found", None, right=goes_on)


def _warned(fault: Fault, event: dict[str, Any], after_s: float) -> Said:
    ranks = () if event["rank"] is None else (event["rank"],)
    right = event["node"] == HOST and ranks == fault.culprit
    who = f"rank {ranks[0]} ({event['node']})" if ranks else event["node"]
    return Said(f"{fault.category}: {who}: {event['detail']['message']}", after_s, right)


def _judged(fault: Fault, incident: dict[str, Any], after_s: float | None) -> Said:
    categories = (fault.category,) if isinstance(fault.category, str) else fault.category
    right = incident["category"] in categories and (
        incident["culprit_node"] == HOST if fault.of_host else tuple(incident["culprit_ranks"]) == fault.culprit
    )
    return Said(f"{incident['category']}: {incident['summary']}", after_s, right)


def run(names: Sequence[str] = ()) -> Report:
    """Play all faults (or those whose name has one of these words); raises ClusterError, AssertionError, OSError."""
    rows = []
    data: dict[str, Any] = {}
    for fault, cluster, work in _each(names):
        mine, later = play(fault, cluster, work)
        said = "yes" if mine.right else "NO", "yes" if later.right else f"NO: {later.text}"
        rows.append((fault.name, mine.text, seconds(mine.after_s), *said))
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
        data[fault.name] = {"supervisor": vars(mine), "diagnose": vars(later)}
    notes = (
        "two hosts with two ranks each, gloo; the fault hits rank 2, on n2; after: from the fault until our incident",
        f"(hang_after = {HANG_AFTER_S:g}, default 30); right: category and rank (or node) are those of the fault;",
        "diagnose: the same from the files alone",
    )
    head = ("failure", "supervisor", "after", "right", "diagnose")
    return Report("failures", (Table("failures of the field", head, tuple(rows), notes, (0, 1, 3, 4)),), data)


def _each(names: Sequence[str]) -> Iterator[tuple[Fault, Cluster, Path]]:
    """Yield each fault (of those named) with hosts and a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="supervisor-bench-") as root:
        for number, fault in enumerate(FAULTS):
            if not names or any(word in fault.name for word in names):
                with Cluster(len(fault.hosts)) as cluster:
                    yield fault, cluster, Path(root) / str(number)
