"""What a preflight asks of torch, in a process of its own: its facts, or one rank of a small all-reduce.

In: argv. Out: one JSON document on stdout; for rank 0 of a collective, the port of its store before it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

# 16 MiB of floats: enough that a slow link shows, little enough for any GPU.
ELEMENTS = 4 * 1024 * 1024
ROUNDS = 5


def main(what: str, text: str) -> int:
    """Print the answer; returns the exit status."""
    document = facts() if what == "facts" else collective(json.loads(text))
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


def facts() -> dict[str, Any]:
    """Return the versions that matter between nodes, and the GPUs by name."""
    import torch

    from remote_agent import engine_torch

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {**engine_torch.facts(), "gpu_names": names}


def collective(args: dict[str, Any]) -> dict[str, Any]:
    """Take part in all-reduces of 16 MiB; returns the median of one in ms. Raises what torch raises."""
    import torch
    from torch import distributed

    timeout = timedelta(seconds=float(args["timeout_s"]))
    rank, world, host = int(args["rank"]), int(args["world"]), str(args["host"])
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        host, int(args.get("port") or 0), is_master=rank == 0, wait_for_workers=False, timeout=timeout
    )
    if rank == 0:
        sys.stdout.write(json.dumps({"port": store.port}) + "\n")
        sys.stdout.flush()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    backend = "nccl" if device != "cpu" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    tensor = torch.ones(ELEMENTS, device=device)
    times = []
    for _ in range(ROUNDS + 1):
        began = time.monotonic()
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    right = bool(torch.all(tensor == 1.0).item())
    distributed.destroy_process_group()
    if not right:
        return {"error": "the all-reduce gave a wrong result"}
    # The first one connects.
    return {"ms": round(statistics.median(times[1:]) * 1000, 2), "backend": backend}
