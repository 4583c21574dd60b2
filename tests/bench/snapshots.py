"""A snapshot of 2 GiB every 30 s: what its copies cost the steps, and how long it takes until two nodes have it.

In: a Cluster of two hosts on this machine, which share processors and disk: separate machines pay less. Out: a Report.
Blocks with and without copies take turns in one run: the same script saves where the job's pattern matches, or beside.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.report import Report, Table, median, ratio, seconds, spread
from tests.cluster import Cluster
from tests.cluster.job import Job, until

SIZE = int(os.environ.get("SUPERVISOR_BENCH_SNAPSHOT", 2 << 30))
PERIOD_S = 30.0
SAVES = 2
ROUNDS = 2
WAIT_S = 300.0
# A step is a fixed amount of work on one core; rank 0 saves, rank 1 on the other node waits.
SCRIPT = """
import hashlib, json, os, struct, sys, time
from pathlib import Path
size, period, saves = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
block = os.urandom(1 << 20)
def save(path, number):
    tensor = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"w": tensor, "__metadata__": {"number": str(number)}}).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _ in range(size >> 20):
            file.write(block)
number = 0
while not Path("over").exists():
    for go in Path(".").glob("go_*") if os.environ["RANK"] == "0" else ():
        kind = go.name[3:]
        go.unlink()
        steps, begun, saved = 0, time.monotonic(), []
        for count in range(saves):
            number += 1
            save(f"{kind}.safetensors", number)
            saved.append(time.time_ns())
            while time.monotonic() < begun + period * (count + 1):
                hashlib.sha256(block).digest()
                steps += 1
        Path(f"done_{kind}.part").write_text(json.dumps({"steps": steps, "seconds": time.monotonic() - begun}))
        os.rename(f"done_{kind}.part", f"done_{kind}")
    time.sleep(0.05)
"""


def run() -> Report:
    """Measure."""
    with tempfile.TemporaryDirectory() as root, Cluster(2, stub_torch=True) as hosts:
        place = Path(root)
        job = Job(hosts, place / "work", SCRIPT, str(SIZE), str(PERIOD_S), str(SAVES))
        keys: dict[str, Any] = {"nproc_per_node": 1, "stop_grace": 1.0, "snapshots": ["kept.safetensors"]}
        job.inventory = hosts.inventory(place / "work/hosts.toml", **keys)
        with job.start():
            job.until("generation_running")
            (tree,) = hosts.host(0).home.glob(".supervisor/trees/work-*")
            rates: dict[str, list[float]] = {"beside": [], "kept": []}
            took: list[float] = []
            for _ in range(ROUNDS):
                for kind, found in rates.items():
                    found.append(_block(tree, kind))
                    took += _copied(hosts) if kind == "kept" else []
            job.finish()
            job.wait()
    return _report(rates, took)


def _block(tree: Path, kind: str) -> float:
    """Let rank 0 save and step for a while; returns its steps per second."""
    (tree / f"go_{kind}").touch()
    done = tree / f"done_{kind}"
    until(done.exists, "end of a block", WAIT_S)
    found = json.loads(done.read_text())
    done.unlink()
    return float(found["steps"]) / float(found["seconds"])


def _heads(hosts: Cluster, number: int) -> dict[str, tuple[int, int]]:
    """Return when the snapshots on a host were saved and when they were kept there, by id."""
    places = [
        path for path in hosts.host(number).home.glob(".supervisor/jobs/*/snapshots/*")
        if re.fullmatch("[0-9a-f]{12}", path.name)
    ]  # fmt: skip
    saved = {path: json.loads(path.read_bytes().partition(b"\n")[0])["time_ns"] for path in places}
    return {path.name: (int(time_ns), path.stat().st_mtime_ns) for path, time_ns in saved.items()}


def _copied(hosts: Cluster) -> list[float]:
    """Return how long it took from each save until both nodes had it, seconds; waits for the newest one."""

    def newest() -> bool:
        own, other = _heads(hosts, 0), _heads(hosts, 1)
        return bool(own) and max(own, key=own.__getitem__) in other

    until(newest, "copy of the newest snapshot", WAIT_S)
    own = _heads(hosts, 0)
    return [(kept_ns - own[name][0]) / 1e9 for name, (_, kept_ns) in _heads(hosts, 1).items() if name in own]


def _report(rates: dict[str, list[float]], took: list[float]) -> Report:
    plain, kept = median(rates["beside"]), median(rates["kept"])
    size = f"{SIZE / 2**30:.3g} GiB"
    rows = (
        ("not named in `snapshots`", f"{plain or 0:.0f}", "x 1.00"),
        ("kept, and copied to the other node", f"{kept or 0:.0f}", ratio(kept, plain)),
    )
    each = Table(f"{size} saved every {PERIOD_S:g} s", ("snapshots", "steps/s", ""), rows, text_columns=(0,))
    usual = median(took)
    speed = f"{SIZE / usual / 1e6:.0f} MB/s" if usual else "-"
    copies = (("from the save until both nodes have it", seconds(usual), spread(took), speed),)
    times = Table("time to two copies", ("", "median", "spread", "throughput"), copies, text_columns=(0,))
    return Report("snapshots", (each, times), {"rates": rates, "copied_s": took})
