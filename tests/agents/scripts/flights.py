"""Ranks that part, over gloo: each kind by three forked processes, which write their flight records and end.

Argument: the directory in which each kind gets a directory with rank_0 … rank_2. Prints one line: done.
"""

import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch

# A dump loads it: once before the forks, and not in each of them.
import torch._dynamo
import torch.distributed as dist

c10d: Any = torch._C._distributed_c10d
WORLD = 3
A = torch.ones(4)


# Nothing here makes gloo end a process: no rank gets more bytes than it expects.
def reduce(tensor: torch.Tensor = A, group: Any = None) -> Any:
    return dist.all_reduce(tensor.clone(), group=group, async_op=True)


def spread(tensor: torch.Tensor = A) -> Any:
    return dist.broadcast(tensor.clone(), 0, async_op=True)


def gather() -> Any:
    return dist.all_gather([torch.ones(4) for _ in range(WORLD)], A, async_op=True)


def op(rank: int, pair: Any) -> Any:
    return spread() if rank == 1 else reduce()


def size(rank: int, pair: Any) -> Any:
    return spread(torch.ones(5) if rank == 2 else A)


def dtype(rank: int, pair: Any) -> Any:
    return reduce(A.int() if rank == 0 else A)


def order(rank: int, pair: Any) -> Any:
    return [call() for call in ((spread, reduce) if rank == 1 else (reduce, spread))]


def left_out(rank: int, pair: Any) -> Any:
    return [call() for call in ((reduce, gather, reduce) if rank == 2 else (reduce, spread, gather, reduce))]


def extra(rank: int, pair: Any) -> Any:
    return [call() for call in ((reduce, spread, reduce, gather) if rank == 0 else (reduce, reduce, gather))]


def group(rank: int, pair: Any) -> Any:
    return reduce(A, pair if rank == 1 else None)


def missing(rank: int, pair: Any) -> Any:
    return None if rank == 2 else reduce()


def ahead(rank: int, pair: Any) -> Any:
    return reduce() if rank == 1 else None


def no_record(rank: int, pair: Any) -> Any:
    if rank != 1:
        return reduce()
    return None


def scatter(rank: int, pair: Any) -> Any:
    # Sizes that may differ are no finding: rank 2 comes too late.
    parts = [torch.ones(2)] * WORLD if rank == 0 else None
    return None if rank == 2 else dist.scatter(torch.ones(2), parts, 0, async_op=True)


KINDS = (op, size, dtype, order, left_out, extra, group, missing, ahead, no_record, scatter)


def run(kind: Callable[[int, Any], Any], rank: int, folder: Path) -> None:
    store = c10d.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=60))
    pair = dist.new_group([0, 1])
    dist.all_reduce(A.clone())
    dist.barrier()
    # A call is recorded as ended a moment after it has returned.
    while not all(entry["retired"] for entry in json.loads(c10d._dump_fr_trace_json())["entries"]):
        pass
    works = kind(rank, pair)
    if not (kind is no_record and rank == 1):
        (folder / f"nccl_trace_rank_{rank}").write_bytes(c10d._dump_fr_trace())
    # Who ends closes the connections of the others.
    store.set(f"written by {rank}", "")
    store.wait([f"written by {other}" for other in range(WORLD)])
    del works


def main(root: Path) -> None:
    for kind in KINDS:
        folder = root / kind.__name__
        folder.mkdir(parents=True)
        pids = []
        for rank in range(WORLD):
            pid = os.fork()
            if pid == 0:
                try:
                    run(kind, rank, folder)
                    os._exit(0)
                except BaseException:  # noqa: BLE001  a fork must never come back
                    traceback.print_exc()
                    os._exit(1)
            pids.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(statuses):
            sys.exit(f"{kind.__name__}: {statuses}")
    print("done", flush=True)


main(Path(sys.argv[1]))
