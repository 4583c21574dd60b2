"""A small model under DistributedDataParallel that survives failures: it saves a snapshot and resumes from it.

In: torchrun's environment (from `supervisor up` or from `torchrun`); options below.
Out: a line `step=… loss=…` a step; the snapshot file, one on each host, so that any host may be lost.

    supervisor up hosts.toml train.py --epochs 20
    torchrun --standalone --nproc-per-node 2 train.py --epochs 20
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

FEATURES = 20


class Synthetic(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A linear function with noise; the same on every rank."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self._inputs = torch.randn(samples, FEATURES, generator=generator)
        weights = torch.randn(FEATURES, 1, generator=generator)
        self._targets = self._inputs @ weights + 0.1 * torch.randn(samples, 1, generator=generator)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs[index], self._targets[index]


class Trainer:
    """One rank's share of the training."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._snapshot = Path(options.snapshot)
        self._rank = int(os.environ["RANK"])
        self._device = _device()
        dataset = Synthetic(options.steps_per_epoch * options.batch_size * int(os.environ["WORLD_SIZE"]))
        self._sampler: DistributedSampler[tuple[torch.Tensor, torch.Tensor]] = DistributedSampler(dataset)
        self._data = DataLoader(dataset, batch_size=options.batch_size, sampler=self._sampler)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 1)).to(self._device)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self._epochs_run = 0
        self._step = 0
        self._resume(model)
        ids = [self._device.index] if self._device.type == "cuda" else None
        self._model = DistributedDataParallel(model, device_ids=ids)

    def _resume(self, model: nn.Module) -> None:
        """Take the newest snapshot that any host has; hosts that are new or were away get it from its rank."""
        snapshot = torch.load(self._snapshot, map_location="cpu", weights_only=True) if self._snapshot.exists() else {}
        mine = torch.tensor([snapshot.get("epochs_run", 0), snapshot.get("step", 0)], device=self._device)
        everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        progress = [tuple(int(number) for number in one.tolist()) for one in everyone]
        self._epochs_run, self._step = max(progress)
        if not self._epochs_run:
            return
        source = progress.index(max(progress))
        if self._rank == source:
            model.load_state_dict(snapshot["model"])
        for weights in model.state_dict().values():
            dist.broadcast(weights, src=source)
        print(f"resumed from {self._snapshot}: epochs_run={self._epochs_run} step={self._step}", flush=True)

    def _save(self) -> None:
        """Write the snapshot so that a crash at any moment leaves either the old or the new one."""
        weights = self._model.module.state_dict()
        new = self._snapshot.with_name(f"{self._snapshot.name}.{self._rank}.new")
        with new.open("wb") as file:
            torch.save({"model": weights, "epochs_run": self._epochs_run, "step": self._step}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._snapshot)
        print(f"saved {self._snapshot}: epochs_run={self._epochs_run} step={self._step}", flush=True)

    def _train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self._optimizer.zero_grad()
        loss = nn.functional.mse_loss(self._model(inputs.to(self._device)), targets.to(self._device))
        torch.autograd.backward(loss)
        self._optimizer.step()
        return float(loss.item())

    def run(self) -> None:
        """Train from where the snapshot ends to the last epoch."""
        total = self._options.epochs * len(self._data)
        for epoch in range(self._epochs_run, self._options.epochs):
            self._sampler.set_epoch(epoch)
            for inputs, targets in self._data:
                loss = self._train_step(inputs, targets)
                self._step += 1
                print(f"epoch={epoch} step={self._step}/{total} loss={loss:.4f}", flush=True)
                time.sleep(self._options.step_time)
            self._epochs_run = epoch + 1
            if os.environ["LOCAL_RANK"] == "0":
                self._save()


def _device() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps-per-epoch", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--step-time", type=float, default=0.1, help="seconds to wait after each step")
    parser.add_argument("--snapshot", default="snapshot.pt", help="saved on each host after each epoch")
    return parser.parse_args()


def _leave(number: int, frame: object) -> None:
    # Stopped: the last snapshot is complete, and the steps after it are repeated.
    print(f"received {signal.Signals(number).name}, leaving", file=sys.stderr, flush=True)
    sys.exit(128 + number)


def main() -> None:
    """Join the process group, train, leave it."""
    options = _options()
    signal.signal(signal.SIGTERM, _leave)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    Trainer(options).run()
    # Only after a successful run: if a rank were missing, this would wait for it.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
