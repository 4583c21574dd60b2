"""Make a process group, twice, and look at what a wrapper around init_process_group would show."""

import inspect
import os
import sys

import torch.distributed as dist
from torch.distributed import c10d_logger

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
store = vars(dist)["HashStore"]()
print(inspect.signature(dist.init_process_group), dist.init_process_group.__module__)
if "fails" in sys.argv:
    dist.init_process_group("gloo", store=store, rank=0, world_size=-3)
for _ in range(2):
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    print(vars(c10d_logger)["_WaitCounter"])
    dist.destroy_process_group()
