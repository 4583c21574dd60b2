"""All-reduce with gloo over the agent's store, then wait inside a function that has a name."""

import os
import sys
import time

import torch
import torch.distributed as dist


def wait_in_training() -> None:
    time.sleep(600)


dist.init_process_group("gloo")
ones = torch.ones(2)
for _ in range(3):
    dist.all_reduce(ones)
print("sum", ones.tolist(), dist.get_world_size(), os.environ["TORCHELASTIC_RESTART_COUNT"])
if "wait" in sys.argv:
    wait_in_training()
dist.destroy_process_group()
