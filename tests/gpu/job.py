"""Four ranks of DDP on one GPU, one of which fails in a given way at a given step.

NCCL takes ranks of one GPU for ranks of separate machines if each sets its own NCCL_HOSTID. Arguments: the way, the
rank, the step, the number of steps. Each rank notes its start and its steps in a file of GPU_NOTES.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time

WAY, VICTIM, AT, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
RANK = int(os.environ["RANK"])
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
if WAY != "duplicate":
    os.environ["NCCL_HOSTID"] = f"host-{RANK}"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
OUT_OF_BOUNDS = 'extern "C" __global__ void bad(float *p) { p[threadIdx.x + (1ull << 40)] = 1.f; }'


def note(what: str, step: int = -1) -> None:
    with open(f"{os.environ['GPU_NOTES']}/{RANK}.{os.getpid()}", "a") as file:
        row = {"what": what, "rank": RANK, "pid": os.getpid(), "t": time.time(), "restarts": RESTARTS, "step": step}
        file.write(json.dumps(row) + "\n")


def load_batch(step: int) -> torch.Tensor:
    if RANK == VICTIM and WAY == "sleep" and step == AT:
        time.sleep(100000)
    if RANK == VICTIM and WAY == "slow":
        time.sleep(0.15)
    return torch.randn(64, 512, device=DEVICE)


def fail() -> None:
    if WAY == "spin":
        torch.cuda._sleep(10**13)  # type: ignore[no-untyped-call]
    elif WAY == "memory":
        torch.cuda.set_per_process_memory_fraction(0.02)
        print(len([torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE) for _ in range(200)]))
    elif WAY == "assert":
        torch.nn.Embedding(10, 4).to(DEVICE)(torch.tensor([99], device=DEVICE))
        torch.cuda.synchronize()
    elif WAY == "access":
        kernel = torch.cuda._compile_kernel(OUT_OF_BOUNDS, "bad")
        kernel((1, 1, 1), (32, 1, 1), (torch.zeros(32, device=DEVICE),))
        torch.cuda.synchronize()
    elif WAY == "desync":
        dist.broadcast(torch.zeros(8, device=DEVICE), 0)
    elif WAY == "shape":
        dist.all_reduce(torch.zeros(4096, device=DEVICE))
    elif WAY == "exception":
        raise ValueError("bad sample in shard 7")
    elif WAY == "early":
        print("nothing left for this rank", flush=True)
        sys.exit(0)


note("begun")
if HAS_GPU:
    torch.cuda.set_device(0)
dist.init_process_group("nccl" if HAS_GPU else "gloo", timeout=datetime.timedelta(minutes=10))
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).to(DEVICE)
ddp = DistributedDataParallel(model, device_ids=[0] if HAS_GPU else None)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for step in range(STEPS):
    loss = ddp(load_batch(step)).square().mean()
    is_at = step == AT and RESTARTS == 0
    if WAY == "shape" and is_at and RANK != VICTIM:
        dist.all_reduce(torch.zeros(64, device=DEVICE))
    if is_at and RANK == VICTIM:
        fail()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}/{STEPS} loss={loss.item():.5f}", flush=True)
    note("step", step)
    time.sleep(0.05)
print("done", flush=True)
dist.destroy_process_group()
