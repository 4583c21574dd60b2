"""What is said of the failures of the field: stock torchrun and ours, the same scripts, hosts and faults.

In: a Cluster of two or three hosts, two ranks each. Out: a Report; seconds are from the fault to the verdict. `skewed`:
ours alone, where one host's clock is 5 s ahead and the other's 5 s behind.
"""

from __future__ import annotations

import datetime
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import skew
from tests.bench import contest, torchrun
from tests.bench.contest import OurRun, Run, Setting, StockRun
from tests.bench.faults import FAULTS, HOST, WARNING, Fault
from tests.bench.report import Report, Table, seconds
from tests.bench.stamps import POLL_S
from tests.cluster import Cluster

WATCH_S = 60.0
HANG_AFTER_S = 10.0
NODE_TIMEOUT_S = 5.0
AHEAD_S = {"n1": 5, "n2": -5}


@dataclass(frozen=True)
class Said:
    """What a launcher said, and when."""

    text: str
    after_s: float | None
    right: bool = False


def play(
    fault: Fault, cluster: Cluster, work: Path, *, stock: bool = True, hosts: Mapping[str, Any] | None = None
) -> list[Said]:
    """Return what torchrun (if asked), ours and `diagnose` say; raises ClusterError, AssertionError, OSError."""
    keys = {"hang_after": HANG_AFTER_S, "node_timeout": NODE_TIMEOUT_S, "hosts": hosts or {}}
    setting = Setting(
        fault.script, fault.hosts, str(len(fault.hosts)), nproc=2, max_restarts=0,
        stock_env=torchrun.OWN_STORE, keys=keys,
    )  # fmt: skip
    said: list[Said] = []
    for name, launch in (*((("stock", contest.stock),) if stock else ()), ("ours", contest.ours)):
        (work / name).mkdir(parents=True)
        with launch(cluster, work / name, setting) as run:
            begun_ns = _break(run, fault, work / name / "go")
            try:
                said += [_theirs(run, begun_ns)] if isinstance(run, StockRun) else _ours(run, fault, begun_ns)
            finally:
                if fault.undo is not None:
                    fault.undo(cluster)
    return said


def _break(run: Run, fault: Fault, go: Path) -> int:
    """Let it fail; returns since when, in nanoseconds."""
    since_ns = time.time_ns()
    if fault.act is not None:
        fault.act(run)
        return since_ns
    go.touch()
    at_ns = run.notes.wait("fault", 0, WATCH_S, run.goes_on, fault.breaking)
    return at_ns or since_ns


def _theirs(run: StockRun, begun_ns: int) -> Said:
    end = time.monotonic() + WATCH_S
    while run.goes_on() and time.monotonic() < end:
        time.sleep(POLL_S)
    if run.goes_on():
        return Said(f"nothing within {WATCH_S:g} s", None)
    after_s = (time.time_ns() - begun_ns) / 1e9
    cause = run.where(0).rpartition("Root Cause")[2]
    if not cause or not (rank := re.search(r"^ *rank +: (\d+)", cause, re.MULTILINE)):
        return Said(run.said(), after_s)
    code = re.search(r"^ *exitcode +: (-?\d+)", cause, re.MULTILINE)
    trace = re.search(r"^ *traceback +: (.+)", cause, re.MULTILINE)
    reported = "" if trace is None or trace[1].startswith("To enable traceback") else f", {trace[1].strip()}"
    return Said(f"rank {rank[1]}, exitcode {code[1] if code else '?'}{reported}", after_s)


def _ours(run: Run, fault: Fault, begun_ns: int) -> list[Said]:
    assert isinstance(run, OurRun)
    event = run.reported("warning" if fault.category == WARNING else "incident", WATCH_S)
    at_ns = datetime.datetime.fromisoformat(event["time"].replace("Z", "+00:00")).timestamp() * 1e9
    after_s = (at_ns - begun_ns) / 1e9
    live = _warned(fault, event, after_s) if fault.category == WARNING else _judged(fault, event["detail"], after_s)
    if fault.hangs:
        run.stop()
    homes = [str(run.cluster.host(name).home / ".supervisor" / "jobs") for name in fault.hosts]
    done = subprocess.run(
        [sys.executable, "-m", "supervisor", "diagnose", "--json", *homes],
        capture_output=True, timeout=WATCH_S, check=True,
    )  # fmt: skip
    incidents = json.loads(done.stdout)["incidents"]
    later = (
        _judged(fault, incidents[0], None)
        if incidents
        else Said("no failure found", None, right=fault.category == WARNING)
    )
    return [live, later]


def _warned(fault: Fault, event: dict[str, Any], after_s: float) -> Said:
    ranks = () if event["rank"] is None else (event["rank"],)
    right = event["node"] == HOST and ranks == fault.culprit
    who = f"rank {ranks[0]} ({event['node']})" if ranks else event["node"]
    return Said(f"warning: {who}: {event['detail']['message']}", after_s, right)


def _judged(fault: Fault, incident: dict[str, Any], after_s: float | None) -> Said:
    categories = (fault.category,) if isinstance(fault.category, str) else fault.category
    right = incident["category"] in categories and (
        incident["culprit_node"] == HOST if fault.of_host else tuple(incident["culprit_ranks"]) == fault.culprit
    )
    return Said(f"{incident['category']}: {incident['summary']}", after_s, right)


def run(names: Sequence[str] = ()) -> Report:
    """Play all faults (or those whose name has one of these words) with both; raises ClusterError, OSError."""
    rows = []
    data: dict[str, Any] = {}
    for fault, cluster, work in _each(names):
        theirs, mine, later = play(fault, cluster, work)
        said = (theirs.text, seconds(theirs.after_s), mine.text, seconds(mine.after_s))
        rows.append((fault.name, *said, *_ok(mine, later)))
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
        data[fault.name] = {"torchrun": vars(theirs), "supervisor": vars(mine), "diagnose": vars(later)}
    notes = (
        "two hosts with two ranks each, gloo; the fault hits rank 2, on n2; after: from the fault until torchrun ended",
        f"(watched for {WATCH_S:g} s), or until our incident; hang_after = {HANG_AFTER_S:g} (default 30)",
        "right: category and rank (or node) are those of the fault; diagnose: the same from the files alone",
    )
    head = ("failure", "torchrun", "after", "supervisor", "after", "right", "diagnose")
    return Report("failures", (Table("failures of the field", head, tuple(rows), notes, (0, 1, 3, 5, 6)),), data)


def skewed(names: Sequence[str] = ()) -> Report:
    """Play all faults (or those named) with ours on hosts whose clocks are wrong; raises ClusterError, OSError."""
    rows = []
    data: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="supervisor-bench-") as folder:
        library = skew.build(Path(folder))
        wrong = {name: skew.environment(library, ahead_s) for name, ahead_s in AHEAD_S.items()}
        hosts = {
            name: {"prelude": "export " + " ".join(f"{key}={shlex.quote(value)}" for key, value in env.items())}
            for name, env in wrong.items()
        }
        for fault, cluster, work in _each(names):
            mine, later = play(fault, cluster, work, stock=False, hosts=hosts)
            rows.append((fault.name, mine.text, *_ok(mine, later)))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
            data[fault.name] = {"supervisor": vars(mine), "diagnose": vars(later)}
    notes = ("as `failures`, but all that n1 sees of the time of day is 5 s ahead, and n2 5 s behind",)
    head = ("failure", "supervisor", "right", "diagnose")
    return Report(
        "skewed", (Table("failures on hosts with wrong clocks", head, tuple(rows), notes, (0, 1, 2, 3)),), data
    )


def _each(names: Sequence[str]) -> Iterator[tuple[Fault, Cluster, Path]]:
    """Yield each fault (of those named) with hosts and a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="supervisor-bench-") as root:
        for number, fault in enumerate(FAULTS):
            if not names or any(word in fault.name for word in names):
                with Cluster(len(fault.hosts)) as cluster:
                    yield fault, cluster, Path(root) / str(number)


def _ok(mine: Said, later: Said) -> tuple[str, str]:
    return "yes" if mine.right else "NO", "yes" if later.right else f"NO: {later.text}"
