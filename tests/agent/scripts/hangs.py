"""Three ranks that train; after step 5 rank 1 does what the argument says."""

import asyncio
import ctypes
import os
import queue
import socket
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

mode, rank = sys.argv[1], int(os.environ["RANK"])
if mode == "unrecorded":
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"


class Data(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if mode == "loader" and rank == 1 and index >= 6:
            time.sleep(1000)
        return torch.ones(1)


def work_in_a_thread() -> None:
    results: queue.Queue[int] = queue.Queue()
    threading.Thread(target=lambda: results.put(1 // 0)).start()
    results.get()


def work_in_a_task() -> None:
    async def feed() -> None:
        await asyncio.sleep(1 // 0)

    async def wait_for_it() -> None:
        feeding = asyncio.get_running_loop().create_task(feed())
        del feeding
        await asyncio.Event().wait()

    asyncio.run(wait_for_it())


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.randn(200, 200) @ torch.randn(200, 200)


def save(seconds: float) -> None:
    until = time.monotonic() + seconds
    with open("checkpoint.pt", "wb") as file:
        while time.monotonic() < until:
            file.write(b"x" * 1_000_000)
            file.seek(0)
            time.sleep(0.01)


def upload(seconds: float) -> None:
    ends = socket.create_server(("127.0.0.1", 0))
    here = socket.create_connection(ends.getsockname())
    there, _ = ends.accept()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        here.sendall(b"x" * 100_000)
        there.recv(100_000, socket.MSG_WAITALL)
        time.sleep(0.1)


def act() -> None:
    if mode == "gil":
        ctypes.PyDLL(None).sleep(1000)
    elif mode == "thread":
        (work_in_a_task if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) else work_in_a_thread)()
    elif mode == "other":
        dist.broadcast(torch.ones(7), 0)
    elif mode == "group":
        dist.barrier(dist.new_group([0, 1]))
    elif mode == "exit":
        os._exit(0 if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) else 3)
    elif mode == "compute":
        compute(8)
    elif mode == "save":
        save(4)
        upload(5)
    elif mode == "late":
        time.sleep(8)


if mode == "init" and rank == 1:
    time.sleep(1000)
if mode != "alone":
    dist.init_process_group("gloo")
loader = iter(DataLoader(Data(), num_workers=1, batch_size=None))
for step in range(600):
    value = next(loader)
    if step == 6 and rank == 1:
        act()
    if step == 6 and mode == "silent":
        time.sleep(8)
    if mode == "unrecorded":
        time.sleep(0.05 * rank)
    if mode != "alone":
        dist.all_reduce(value)
    if step == 40 and mode in ("compute", "save", "late", "silent"):
        break
    if mode == "unrecorded":
        if step == 80:
            break
        continue
    print(f"step={step} loss={'nan' if mode == 'alone' and rank == 0 else 1}", flush=True)
    time.sleep(0.02)
del loader
dist.barrier()
dist.destroy_process_group()
