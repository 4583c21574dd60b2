"""Ranks that train; after step 5 rank 1 does what the argument says: one word a generation."""

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

mode = sys.argv[1].split(",")[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
rank = int(os.environ["RANK"])
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


def spin(until: float) -> None:
    count = 0
    while time.monotonic() < until:
        count += 1


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


def meet_where_nobody_answers() -> None:
    """What a firewall that drops packets is like: the port is there, and its queue is full."""
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    with socket.create_connection(full.getsockname()):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(full.getsockname()[1]))
        dist.init_process_group("gloo")


def act() -> None:
    if mode == "gil":
        ctypes.PyDLL(None).sleep(1000)
    elif mode == "thread":
        work_in_a_thread()
    elif mode == "task":
        work_in_a_task()
    elif mode == "over":
        threading.Thread(target=time.sleep, args=(1000,)).start()
        raise ValueError("no more shards")
    elif mode == "loop":
        spin(time.monotonic() + 1000)
    elif mode == "other":
        dist.broadcast(torch.ones(7), 0)
    elif mode == "group":
        dist.barrier(dist.new_group([0, 1]))
    elif mode == "exit 3":
        os._exit(3)
    elif mode == "exit 0":
        os._exit(0)


def keep_busy(step: int) -> None:
    """Let the other one wait, for longer than a hang may last, again and again; at last both do nothing together."""
    if step == 6 and rank == 1:
        compute(5)
    if step == 12 and rank == 1:
        save(4)
    if step == 18 and rank == 1:
        upload(4)
    if step == 24:
        time.sleep(6)


if mode == "init" and rank == 1:
    time.sleep(1000)
if mode == "blocked" and rank == 1:
    meet_where_nobody_answers()
dist.init_process_group("gloo")
loader = iter(DataLoader(Data(), num_workers=1, batch_size=None))
for step in range(600):
    value = next(loader)
    if step == 6 and rank == 1:
        act()
    if mode == "busy":
        keep_busy(step)
    if mode == "unrecorded":
        time.sleep(0.1 * rank)
    dist.all_reduce(value)
    if (mode, step) in (("busy", 40), ("unrecorded", 70)):
        break
    if mode == "unrecorded":
        continue
    print(f"step={step} loss=1", flush=True)
    time.sleep(0.02)
del loader
dist.barrier()
dist.destroy_process_group()
