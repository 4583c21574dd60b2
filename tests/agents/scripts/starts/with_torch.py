"""Print as JSON what a script sees of torch and numpy before, while and after it uses them."""

import json
import os
import random
import sys
import threading
import traceback
import warnings

FIRST = list(sys.modules)
with warnings.catch_warnings(record=True) as WARNED:
    warnings.simplefilter("default")
    import torch
IMPORTED = list(sys.modules)

import held  # type: ignore[import-not-found]  # noqa: E402
import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

DATA = TensorDataset(torch.arange(8.0))


def settings() -> dict[str, object]:
    return {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "openmp": torch.__config__.parallel_info().split("Environment variables")[0],
        "dtype": str(torch.get_default_dtype()),
        "grad": [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cuda": torch.cuda.is_available(),
        "backends": [torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark],
        "printing": repr(torch.tensor([1.0, 1e-9])),
        "python_threads": [thread.name for thread in threading.enumerate()],
        "distributed": dist.is_available(),
        "environ": [f"{name}={value}" for name, value in os.environ.items()],
    }


def loads() -> list[str]:
    return [str(batch) for batch in DataLoader(DATA, batch_size=4, num_workers=2)]


def threads_set() -> list[int]:
    torch.set_num_threads(3)
    (torch.rand(300, 300) @ torch.rand(300, 300)).sum()
    return [torch.get_num_threads(), len(os.listdir("/proc/self/task")) > 0]


def trains() -> list[float]:
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 6))
    return losses


def fails() -> str:
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError:
        return traceback.format_exc()
    return ""


def group() -> list[object]:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return [dist.get_rank(), dist.get_world_size(), total.item()]


def main() -> None:
    """Look at each, in order."""
    drawn = [float(torch.initial_seed()), torch.rand(1).item()]
    found = {
        "first": FIRST,
        "imported": IMPORTED,
        "warned": [str(one) for one in WARNED],
        "settings": settings(),
        "numpy": np.ones(2).tolist(),
        "loader": loads(),
        "fails": fails(),
        "group": group(),
        "trains": trains(),
        "threads_set": threads_set(),
        "settings_after": settings(),
        "modules": list(sys.modules),
    }
    drawn += [random.random(), float(np.random.rand()), float(np.random.default_rng().random())]
    print(json.dumps({"fields": found, "drawn": drawn}))
    held.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
