"""Training scripts for the acceptance tests: what a user has, in a few lines."""

from __future__ import annotations

# Saves after each epoch on every host, resumes from it; each rank says which generation it is in. With --by-hand it
# does without DDP and optimizer, whose first use imports as much as all of torch: for tests of what is around it.
TRAIN = """
import argparse, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--pause", type=float, default=0.1)
parser.add_argument("--by-hand", action="store_true")
options = parser.parse_args()
dist.init_process_group("gloo")
rank, generation = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
snapshot, first = Path("snapshot.pt"), 0
found = [torch.load(snapshot) if snapshot.exists() else {"epochs_run": -1, "model": None}]
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, found[0])
newest = max(everyone, key=lambda one: one["epochs_run"])
if newest["model"] is not None:
    model.load_state_dict(newest["model"])
    first = newest["epochs_run"] + 1
print(f"generation {generation} rank {rank} of {dist.get_world_size()} starts at epoch {first}", flush=True)


def step_by_hand(inputs):
    loss = model(inputs).square().mean()
    for weights, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters())):
        dist.all_reduce(gradient)
        weights.data -= 0.01 / dist.get_world_size() * gradient
    return loss


def step_by_ddp(inputs):
    optimizer.zero_grad()
    loss = ddp(inputs).square().mean()
    loss.backward()
    optimizer.step()
    return loss


if not options.by_hand:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for epoch in range(first, options.epochs):
    for batch in range(2):
        loss = (step_by_hand if options.by_hand else step_by_ddp)(torch.randn(4, 8))
        time.sleep(options.pause)
    print(f"step={epoch} loss={loss.item():.4f}", flush=True)
    if os.environ["LOCAL_RANK"] == "0":
        part = snapshot.with_suffix(".part")
        torch.save({"epochs_run": epoch, "model": model.state_dict()}, part)
        part.replace(snapshot)
dist.barrier()
dist.destroy_process_group()
"""

# Bytes that a log pipeline likes to spoil, and the environment.
BYTES = """
import json, os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
for number in range(2000):
    sys.stdout.buffer.write(f"rank {rank} line {number} ".encode() + bytes(range(256)) + b"\\r\\n")
    if number % 100 == 0:
        sys.stderr.buffer.write(f"rank {rank} error {number}".encode() + b"\\xff\\x00 no newline")
sys.stdout.buffer.flush()
with open(f"environ_{rank}.json", "w") as file:
    json.dump({"environ": dict(os.environ), "argv": sys.argv, "path0": sys.path[0], "cwd": os.getcwd()}, file)
dist.barrier()
dist.destroy_process_group()
"""

LIGHT = """
import os, time
print("in main", os.environ["RANK"], flush=True)
time.sleep(float(os.environ.get("STAY_S", "3600")))
"""
