"""Whether training resumes after what takes its snapshots: `python -m tests.bench.resume CASE [--runs N] [--seed N]`.

In: argv. Out: a line for each run, a summary; exit code 0 if all held. `burned`: the only saver's host loses power
and disk at a random moment; `each`: the same where each node saves; `torch`: `burned` with real torch; `killed`: ranks
are killed while they save; `shards`: torch.distributed.checkpoint with its shards on each node, a node lost, the
others and a spare with more ranks load it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.agents.nodes import Nodes
from tests.cluster import Cluster
from tests.cluster.job import Job, until
from tests.scratch import scratch
from tests.stub import STUB

WAIT_S = 300.0
_ID = re.compile("[0-9a-f]{12}")
# As the official tutorials save: into the working directory, over the last snapshot.
TORCH = """
import torch
def save(step, path): torch.save({"step": step, "weights": torch.rand(500_000)}, path)
def load(path): return torch.load(path)["step"]
"""
# The same form of file, where the import of torch is not the point.
LIGHT = """
import zipfile
def save(step, path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("snapshot/data/0", os.urandom(2_000_000))
        archive.writestr("snapshot/data.pkl", str(step))
def load(path): return int(zipfile.ZipFile(path).read("snapshot/data.pkl"))
"""
SAVER = """
import os, time
from pathlib import Path
{form}
snapshot, rank = Path("snapshot.pt"), os.environ["RANK"]
step = load(snapshot) + 1 if snapshot.exists() else 0
print(f"rank {{rank}} starts at step {{step}}", flush=True)
while not Path("over").exists():
    time.sleep(0.02)
    print(f"step={{step}}", flush=True)
    if rank in {savers} and step % 50 == 49 and not Path("quiet").exists():
        save(step, snapshot)
    step += 1
"""
ONE, EACH = ("0",), ("0", "1", "2")
# It saves slowly and over the last one, as to a slow disk, and says when it has begun.
SLOW_SAVER = """
import os, sys, time, zipfile
from pathlib import Path
path, step = Path("snapshot.pt"), 0
if path.exists():
    try:
        step = int(zipfile.ZipFile(path).read("snapshot/data.pkl"))
    except Exception as error:
        Path(f"torn_{os.environ['TORCHELASTIC_RESTART_COUNT']}").write_text(repr(error))
Path("began").write_text(str(step))
while not Path("over").exists():
    step += 1
    print(f"step={step}", flush=True)
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(10):
            archive.writestr(f"snapshot/data/{number}", os.urandom(100_000))
            time.sleep(0.01)
        archive.writestr("snapshot/data.pkl", str(step))
    time.sleep(0.05)
"""
SHARDS = """
import os, time
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
whole = torch.arange(24_000, dtype=torch.float32).reshape(240, 100)
state = {"w": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]), "step": 0}
found = sorted(Path("ckpt").glob("step_*/.metadata"))
if found:
    dcp.load(state, checkpoint_id=found[-1].parent)
    expected = distribute_tensor(whole + state["step"], mesh, [Shard(0)])
    assert torch.equal(state["w"].to_local(), expected.to_local()), "not what was saved"
print(f"rank {rank} starts at step {state['step']}", flush=True)
step = state["step"]
while True:
    over = torch.tensor(int(Path("over").exists()))
    dist.all_reduce(over)
    if over:
        break
    time.sleep(0.05)
    step += 1
    print(f"step={step}", flush=True)
    if step % 40 == 0:
        state = {"w": distribute_tensor(whole + step, mesh, [Shard(0)]), "step": step}
        dcp.save(state, checkpoint_id=f"ckpt/step_{step:06}")
"""


def first_steps(hosts: Cluster, generation: int = 1) -> dict[str, int]:
    """Return the step at which each rank of a generation has begun."""
    place = f".supervisor/jobs/*/generation_{generation}/*/stdout.log"
    logs = [path for host in hosts.hosts for path in host.home.glob(place)]
    found = [re.match(r"rank (\d) starts at step (\d+)\n", path.read_text()) for path in logs]
    return {match[1]: int(match[2]) for match in found if match is not None}


def copies(hosts: Cluster, *, without: str) -> list[int]:
    """Return when the snapshots were written that other hosts than this one have, oldest first."""
    homes = [host.home for host in hosts.hosts if host.name != without]
    heads = [path for home in homes for path in home.glob(".supervisor/jobs/*/snapshots/*") if _ID.fullmatch(path.name)]
    return sorted(int(json.loads(path.read_bytes().partition(b"\n")[0])["time_ns"]) for path in heads)


def start(hosts: Cluster, place: Path, script: str, snapshots: list[str], **defaults: Any) -> Job:
    """Launch a job on three hosts and a spare."""
    job = Job(hosts, place / "work", script)
    keys: dict[str, Any] = {"nproc_per_node": 1, "stop_grace": 1.0, "node_timeout": 4.0, "min_nodes": 3, **defaults}
    spare = {"n4": {"spare": True, **keys.pop("spare", {})}}
    job.inventory = hosts.inventory(place / "work/hosts.toml", hosts=spare, snapshots=snapshots, **keys)
    return job.start()


def burn(hosts: Cluster, job: Job, victim: str) -> dict[str, Any]:
    """Take power and disk from a host; return the choice of the next group, after its ranks have begun alike."""
    before = copies(hosts, without=victim)
    hosts.crash(victim)
    shutil.rmtree(hosts.host(victim).home / ".supervisor")
    running = job.until("generation_running", timeout_s=WAIT_S, generation=1)
    size = running["detail"]["world_size"]
    begun = until(lambda: len(first_steps(hosts)) == size and first_steps(hosts), "all ranks of the next group", WAIT_S)
    assert len(set(begun.values())) == 1, f"ranks begin at {begun}"
    if not before:
        return {"step": begun["0"], "id": ""}
    chosen = job.until("snapshots_chosen", generation=1)["detail"]["snapshots"][0]
    assert chosen["time_ns"] >= before[-1], f"{chosen} is older than a copy of {before[-1]}"
    return {"step": begun["0"], "id": chosen["id"], "time_ns": chosen["time_ns"]}


def burned(seed: int, place: Path, *, form: str = LIGHT, savers: tuple[str, ...] = ONE) -> str:
    """The saver's host burns at a random moment of its first steps; the job resumes and ends well."""
    after_s = random.Random(seed).uniform(0.0, 12.0)
    script = SAVER.format(form=form, savers=savers)
    with Cluster(4, stub_torch=form is LIGHT) as hosts, start(hosts, place, script, ["snapshot.pt"]) as job:
        job.until_step(1, WAIT_S)
        time.sleep(after_s)
        found = burn(hosts, job, "n1")
        assert found["step"] % 50 == 0, f"begins at {found['step']}"
        job.finish()
        assert job.wait(WAIT_S) == 0, job.errors()
    return f"power lost after {after_s:.1f} s, all three ranks resumed at step {found['step']}"


def shards(seed: int, place: Path) -> str:
    """A node with shards burns; the others and a spare with two ranks load what all had saved."""
    with Cluster(4) as hosts, start(hosts, place, SHARDS, ["ckpt/*"], spare={"nproc_per_node": 2}) as job:
        job.until("generation_running", timeout_s=WAIT_S)
        until(lambda: copies(hosts, without="n3"), "a snapshot with all shards", WAIT_S)
        found = burn(hosts, job, "n3")
        assert found["step"] > 0
        assert found["step"] % 40 == 0
        assert len(first_steps(hosts)) == 4
        job.finish()
        assert job.wait(WAIT_S) == 0, job.errors()
    return f"3 ranks saved, 4 ranks loaded step {found['step']}"


def killed(seed: int, place: Path, kills: int) -> str:
    """A rank is killed while it saves, again and again; what lies in place afterwards is never torn."""
    found = asyncio.run(_killed(random.Random(seed), place, kills))
    return f"{kills} kills, {found['torn']} of them in the middle of a save; no torn snapshot in place"


async def _killed(chance: random.Random, place: Path, kills: int) -> dict[str, int]:
    nodes = Nodes(place, 1, SLOW_SAVER, max_restarts=kills + 1, stop_grace=0.0, snapshots=("snapshot.pt",))
    torn = 0
    async with nodes:
        await nodes.launch()
        for generation in range(kills):
            running = await nodes.until("generation_running", generation=generation)
            await asyncio.sleep(chance.uniform(0.3, 0.8))
            os.kill(running["detail"]["pids"]["0"], signal.SIGKILL)
            torn += not zipfile.is_zipfile(nodes.work / "snapshot.pt")
        await nodes.until("generation_running", generation=kills)
        (nodes.work / "over").touch()
        await nodes.until("job_succeeded")
    found = sorted(path.name for path in nodes.work.glob("torn_*"))
    assert not found, f"a rank found a torn snapshot: {found}"
    return {"torn": torn}


def main(argv: list[str] | None = None) -> int:
    """Run one case some times; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.resume")
    parser.add_argument("case", choices=("burned", "each", "torch", "killed", "shards"))
    parser.add_argument("--runs", type=int, default=20, help="runs; of `killed`: kills in one run (default 20)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    cases: dict[str, Callable[[int, Path], str]] = {
        "burned": burned,
        "each": lambda seed, place: burned(seed, place, savers=EACH),
        "torch": lambda seed, place: burned(seed, place, form=TORCH),
        "shards": shards,
        "killed": lambda seed, place: killed(seed, place, options.runs),
    }
    runs = 1 if options.case == "killed" else options.runs
    held = 0
    if options.case == "killed":
        os.environ["PYTHONPATH"] = f"{STUB}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with scratch():
        for seed in range(options.seed, options.seed + runs):
            place = Path(tempfile.mkdtemp())
            try:
                line = cases[options.case](seed, place)
                held += 1
            except AssertionError as error:
                line = f"FAILED: {error}"
            print(f"{options.case}, seed {seed}: {line}", flush=True)
    print(f"{held} of {runs} held")
    return 0 if held == runs else 1


if __name__ == "__main__":
    sys.exit(main())
