"""A training with DDP that limps in one way, its first argument: rank 1 does, or rank 0 with what rank 0 does."""

import gc
import logging
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

HOW = sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("gloo")
RANK = dist.get_rank()
LATE, FIRST = RANK == 1, RANK == 0
WIDTH = 768
# So many squares take about a millisecond.
A_MS = 20_000
log = logging.getLogger("limps")
KEPT: list[list[int]] = []


class Numbers(Dataset[torch.Tensor]):
    """Rows of a data set, some of which take long to read."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a row."""
        self.read()
        return torch.full((WIDTH,), float(index % 7))

    def read(self) -> None:
        """Read a row."""
        if LATE and HOW == "workers":
            time.sleep(0.04)
        elif HOW == "all_input" or (LATE and HOW == "input"):
            sum(number * number for number in range(12 * A_MS))


def collate(rows: list[torch.Tensor]) -> torch.Tensor:
    """Make a batch of rows."""
    if LATE and HOW == "collate":
        sum(number * number for number in range(50 * A_MS))
    return torch.stack(rows)


def tokenize() -> int:
    """Split a text."""
    return sum(len(str(number * 31)) for number in range(150_000))


def naps() -> None:
    """Sleep."""
    time.sleep(0.05)


def counts() -> int:
    """Count in C, which keeps the GIL."""
    return sum(range(4_000_000))


def collects() -> None:
    """Collect garbage."""
    gc.collect()


class Handler(logging.Handler):
    """Writes each line to a slow place."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        sum(number * number for number in range(50 * A_MS))


def save(model: torch.nn.Module) -> None:
    """Save the model."""
    for _ in range(6):
        torch.save(model.state_dict(), f"model.{RANK}.pt")


def save_to_disk() -> None:
    """Write to the disk, and wait until it is there."""
    with open(f"state.{RANK}", "wb") as file:
        file.write(os.urandom(1 << 20) * 32)
        file.flush()
        os.fsync(file.fileno())


def evaluate(model: torch.nn.Module) -> None:
    """Look how good the model is."""
    model.eval()
    with torch.no_grad():
        for _ in range(240):
            model(torch.ones(64, WIDTH))
    model.train()


def writes() -> None:
    """Log a line."""
    log.warning("a step")


def sleeps() -> None:
    """Sleep for many steps."""
    time.sleep(4)


def delays(gradient: torch.Tensor) -> torch.Tensor:
    """Look at a gradient."""
    sum(number * number for number in range(50 * A_MS))
    return gradient


# What rank 1 does at each step.
LIMPS = {
    "tokenize": tokenize,
    "sleep": naps,
    "nap": sleeps,
    "gil": counts,
    "gc": collects,
    "logging": writes,
    "disk": save_to_disk,
}
# What rank 0 does now and then.
OF_FIRST = {"checkpoint": save, "evaluate": evaluate}


def limp(step: int, model: torch.nn.Module) -> None:
    """Do what takes long beside training."""
    if LATE and HOW in LIMPS:
        LIMPS[HOW]()
    if FIRST and step % 10 == 0 and HOW in OF_FIRST:
        OF_FIRST[HOW](model)
    if FIRST and step == 1500 and HOW == "once":
        time.sleep(20)
    if HOW == "jitter":
        sum(number * number for number in range(int(20 * A_MS * (0.7 + 0.6 * torch.rand(1).item()))))


def made() -> torch.nn.Module:
    """Return the model."""
    first = torch.nn.Linear(WIDTH, WIDTH)
    model = torch.nn.Sequential(first, torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    if HOW == "compile":
        model.compile(backend="aot_eager")
    if LATE and HOW == "hook":
        first.weight.register_hook(delays)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(model)


def train() -> None:
    """Train until it is stopped."""
    if HOW == "taken":
        os.sched_setaffinity(0, {RANK % (os.cpu_count() or 1)})
    if LATE and HOW == "gc":
        KEPT.extend([number] for number in range(400_000))
    log.addHandler(Handler())
    log.propagate = False
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    size = 192 if LATE and HOW == "batch" else 4 if HOW in ("input", "all_input", "workers") else 64
    loader = DataLoader(Numbers(), size, collate_fn=collate, num_workers=2 if LATE and HOW == "workers" else 0)
    for step, batch in enumerate(loader):
        limp(step, model)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step={step} loss={loss.item():.5f}", flush=True)


def pipeline() -> None:
    """Pass activations on: the first stage takes three times as long as the second."""
    given = torch.ones(64, WIDTH)
    for step in range(10**9):
        sum(number * number for number in range((30 if FIRST else 10) * A_MS))
        if FIRST:
            dist.send(given, 1)
        else:
            dist.recv(given, 0)
        if step % 20 == 0:
            print(f"step={step}", flush=True)


def sends() -> None:
    """Exchange large gradients, and compute little."""
    gradient = torch.ones(6_000_000)
    for step in range(10**9):
        torch.ones(256, 256) @ torch.ones(256, 256)
        dist.all_reduce(gradient)
        gradient.fill_(1.0)
        print(f"step={step}", flush=True)


{"pipeline": pipeline, "network": sends}.get(HOW, train)()
