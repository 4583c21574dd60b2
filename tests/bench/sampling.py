"""What being sampled costs a rank: on and off in turns within one run, every half second.

In: SUPERVISOR_SAMPLING_S, seconds for each loop (60). Out: a Report: the median step, how much longer the steps are
while the rank is sampled, and the standard error of that; the memory that the sampler takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from remote_agent.engine import sampler
from tests.bench.report import Report, Table

SECONDS = float(os.environ.get("SUPERVISOR_SAMPLING_S", "60"))
HALF_S = 0.5
# Until a rank has imported torch, nobody listens.
START_S = 30
# Steps around a change belong to neither side.
EDGE_S = 0.06
# The slowest and fastest steps of each half, which something else has disturbed.
TRIM = 0.1
RANKS = {"pure Python, GIL never released": 1, "DDP over gloo": 2}
SCRIPT = """
import importlib.util, json, os, sys, time
here, kind, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
rank = int(os.environ["RANK"])
def rss(): return int(open("/proc/self/statm").read().split()[1]) * 4096
if kind.startswith("DDP"):
    import torch, torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{here}/store", rank=rank, world_size=2)
    layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    def step():
        model(torch.randn(64, 256)).sum().backward(); optimizer.step(); optimizer.zero_grad()
else:
    def step(): return sum([i * i for i in range(60_000)])
for _ in range(200): step()
before = rss()
spec = importlib.util.spec_from_file_location("supervisor_sampler", sys.argv[4])
sampler = importlib.util.module_from_spec(spec); spec.loader.exec_module(sampler)
sampler.start(here, rank)
times, end = [], time.time() + seconds
is_over = False
while not is_over:
    begun = time.time(); step(); times.append((begun, time.time() - begun))
    # Its own list would count as the sampler's.
    if len(times) == 500: grown = rss() - before
    is_over = begun > end
    if kind.startswith("DDP"):
        over = torch.tensor(float(is_over)); dist.all_reduce(over); is_over = bool(over)
if rank == 0:
    with open(os.path.join(here, "new"), "w") as file: json.dump({"times": times, "bytes": grown}, file)
    os.rename(os.path.join(here, "new"), os.path.join(here, "times.json"))
"""


def run() -> Report:
    """Measure each loop; returns the tables."""
    rows, numbers = [], {}
    for kind, ranks in RANKS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = _measure(Path(folder), kind, ranks)
        rows.append((kind, *(f"{1000 * found['step_s']:.2f} ms", f"{found['more']:+.2%}", f"{found['error']:.2%}"),
                     f"{found['bytes'] / 1e6:.1f} MB"))  # fmt: skip
        numbers[kind] = found
    notes = ("a job that is well is sampled for a sixth of its time", f"{SECONDS:.0f} s each, 20 looks a second")
    table = Table(
        "a rank that is sampled", ("loop", "step", "longer by", "standard error", "memory"), tuple(rows), notes
    )
    return Report("sampling", (table,), numbers)


def _measure(here: Path, kind: str, ranks: int) -> dict[str, float]:
    os.mkfifo(here / sampler.WAKE)
    (here / "rank.py").write_text(SCRIPT)
    command = [sys.executable, str(here / "rank.py"), str(here), kind, str(SECONDS), sampler.__file__]
    processes = [subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}) for rank in range(ranks)]
    switches: list[float] = []
    try:
        while len(switches) < SECONDS + START_S and not _is_over(here):
            with contextlib.suppress(OSError):
                now = time.time()
                (here / sampler.ORDER).write_text(f"{int((now + HALF_S) * 1e9)} 0 0")
                os.close(os.open(here / sampler.WAKE, os.O_WRONLY | os.O_NONBLOCK))
                switches.append(now)
            time.sleep(2 * HALF_S)
        for process in processes:
            process.wait(timeout=30)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    document = json.loads((here / "times.json").read_text())
    on, off = [], []
    for begun, took in document["times"]:
        since = min((begun - at for at in switches if begun >= at), default=None)
        if since is None or since > 2 * HALF_S:
            continue
        if since > EDGE_S and since + took < HALF_S:
            on.append(took)
        elif since > HALF_S + EDGE_S and since + took < 2 * HALF_S:
            off.append(took)
    more, error = _difference(on, off)
    return {"step_s": statistics.median(off), "more": more, "error": error, "bytes": float(document["bytes"])}


def _is_over(here: Path) -> bool:
    return (here / "times.json").exists()


def _difference(on: Sequence[float], off: Sequence[float]) -> tuple[float, float]:
    """Return by which part the trimmed mean of the first is larger, and the standard error of that."""
    means, errors = [], []
    for times in (on, off):
        cut = int(TRIM * len(times))
        kept = sorted(times)[cut : len(times) - cut]
        means.append(statistics.fmean(kept))
        errors.append(statistics.stdev(kept) / len(kept) ** 0.5)
    base = means[1]
    return means[0] / base - 1, (errors[0] ** 2 + errors[1] ** 2) ** 0.5 / base
