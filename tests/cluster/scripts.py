"""Training scripts for the acceptance tests: what a user has, in a few lines."""

from __future__ import annotations

# Saves after each epoch on every host, resumes from it; each rank says which generation it is in. It ends once there is
# a file "over". No DDP and no optimizer, whose first use imports as much as all of torch: examples/ddp has them.
TRAIN = """
import os, time
from pathlib import Path
import torch
import torch.distributed as dist

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


def make_step(inputs):
    loss = model(inputs).square().mean()
    for weights, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters())):
        dist.all_reduce(gradient)
        weights.data -= 0.01 / dist.get_world_size() * gradient
    return loss


over, epoch = torch.zeros(1), first
while not over:
    for batch in range(2):
        loss = make_step(torch.randn(4, 8))
        time.sleep(0.1)
    print(f"step={epoch} loss={loss.item():.4f}", flush=True)
    if os.environ["LOCAL_RANK"] == "0":
        part = snapshot.with_suffix(".part")
        torch.save({"epochs_run": epoch, "model": model.state_dict()}, part)
        part.replace(snapshot)
    epoch += 1
    over += Path("over").exists()
    dist.all_reduce(over)
dist.barrier()
dist.destroy_process_group()
"""

# The same as far as its supervisor sees it, without the seconds that every start of one takes to import torch.
STEPS = """
import os, time
from pathlib import Path

generation, rank, world = (os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
snapshot = Path("snapshot")
step = int(snapshot.read_text()) + 1 if snapshot.exists() else 0
print(f"generation {generation} rank {rank} of {world} starts at step {step}", flush=True)
while not Path("over").exists():
    time.sleep(0.1)
    print(f"step={step} loss={1 / (step + 1):.4f}", flush=True)
    if os.environ["LOCAL_RANK"] == "0":
        Path("part").write_text(str(step))
        Path("part").rename(snapshot)
        print(f"saved {snapshot}: step={step}", flush=True)
    step += 1
"""

# Bytes that a log pipeline likes to spoil, and the environment: before a training.
BYTES = """
import json, os, sys
from pathlib import Path

rank, again = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
for number in range(0 if again else 2000):
    sys.stdout.buffer.write(f"rank {rank} line {number} ".encode() + bytes(range(256)) + b"\\r\\n")
    if number % 100 == 0:
        sys.stderr.buffer.write(f"rank {rank} error {number}".encode() + b"\\xff\\x00 no newline")
sys.stdout.buffer.flush()
if not again:
    part = Path(f"part_{rank}.json")
    seen = {"environ": dict(os.environ), "argv": sys.argv, "path0": sys.path[0], "cwd": os.getcwd()}
    part.write_text(json.dumps(seen))
    part.rename(f"environ_{rank}.json")
"""

LIGHT = """
import os, time
print("in main", os.environ["RANK"], flush=True)
time.sleep(float(os.environ.get("STAY_S", "3600")))
"""
