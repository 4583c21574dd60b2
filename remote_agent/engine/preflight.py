"""The preflight's process that uses torch: it prints torch's facts, or takes part in a small all-reduce.

In: argv. Out: one JSON document on stdout; rank 0 of a collective first prints the port of its store.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from remote_agent.base.ports import reached_as
from remote_agent.base.proc import die_with_parent
from remote_agent.engine import torch_api
from remote_agent.engine.torch_api import distributed, torch

if TYPE_CHECKING:
    from remote_agent.wire import Args
    from remote_agent.wire.answers import AllReduce, TorchFacts

# 16 MiB of floats are enough to show a slow link, and small enough for any GPU.
ELEMENTS = 4 * 1024 * 1024
ROUNDS = 5


def main(what: str, text: str) -> int:
    """Print the document; returns the exit code."""
    die_with_parent()
    document = facts() if what == "facts" else collective(json.loads(text))
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


def facts() -> TorchFacts:
    """Return torch's facts, and the GPUs by name."""
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {**torch_api.facts(), "gpu_names": names}


def collective(args: Args) -> AllReduce:
    """Take part in all-reduces of 16 MiB and of 4 bytes; returns the medians in ms. Raises what torch raises.

    `bus_gb_per_s` is the traffic of each link as nccl-tests counts it: a ring moves 2 (n - 1) / n of the bytes.
    """
    timeout = timedelta(seconds=float(args["timeout_s"]))
    rank, world, host = int(args["rank"]), int(args["world"]), str(args["host"])
    if rank == 0:
        store = torch_api.open_store(host, reached_as(host, ports=str(args.get("ports") or "")), timeout)
        sys.stdout.write(json.dumps({"port": store.port}) + "\n")
        sys.stdout.flush()
    else:
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            host, int(args["port"]), is_master=False, wait_for_workers=False, timeout=timeout
        )
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    backend = "nccl" if device != "cpu" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    tensor = torch.full((ELEMENTS,), float(rank + 1), device=device)
    # The first all-reduce connects the ranks and checks the sum.
    distributed.all_reduce(tensor)
    right = bool(torch.all(tensor == world * (world + 1) / 2).item())
    large = _median_s(tensor)
    latency = _median_s(torch.ones(1, device=device))
    distributed.destroy_process_group()
    if not right:
        return {"error": "the all-reduce gave a wrong result"}
    moved = 4 * ELEMENTS * 2 * (world - 1) / world
    return {
        "ms": round(large * 1000, 2),
        "latency_ms": round(latency * 1000, 3),
        "bus_gb_per_s": round(moved / large / 1e9, 3),
        "backend": backend,
    }


def _median_s(tensor: Any) -> float:
    """Return the median time of several all-reduces of a tensor."""
    times = []
    for _ in range(ROUNDS):
        began = time.monotonic()
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    return statistics.median(times)
