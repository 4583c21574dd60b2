"""What to do next, by category.

In: nothing. Out: HINTS.
"""

from __future__ import annotations

HINTS = {
    "user_exception": "fix the code or configuration at the place named; if one rank failed, see what differs there",
    "cuda_oom": "a smaller batch or more sharding; if this process uses far less than the GPU has, another one "
    "holds the rest (nvidia-smi)",
    "cuda_error": "run again with CUDA_LAUNCH_BLOCKING=1 to see the call; look for Xid in the node's kernel log",
    "host_oom_kill": "less host memory per rank (DataLoader workers, one copy of the model per rank) or a higher limit",
    "segfault": "look at the top native frame; try another build of that library, NCCL or the driver",
    "sigabrt": "the reason stands above the abort in this rank's stderr",
    "bus_error_shm": "/dev/shm is too small or full: raise it (--shm-size, --ipc=host) or use fewer workers",
    "nccl_timeout_watchdog": "see what the rank that did not come is doing: supervisor stacks",
    "nccl_system_error": "run again with NCCL_DEBUG=WARN: the reason is in NCCL's warning line",
    "nccl_remote_error": "another rank's process or its network went away: look at the ranks without such a text",
    "nccl_version_mismatch": "install the same torch and NCCL on every node",
    "nccl_network": "check NCCL_SOCKET_IFNAME, the route and the firewall between the nodes",
    "rendezvous_timeout": "see which ranks did not come and why; check MASTER_ADDR, firewall and name resolution",
    "port_in_use": "another process holds the port: end it, or let the port be chosen (MASTER_PORT unset, port 0)",
    "hang_no_output": "supervisor stacks shows where each rank waits",
    "collective_desync": "the ranks took different paths: compare the collectives named and what depends on the rank",
    "gloo_connection_reset": "a peer went away: look at the rank that failed or left first",
    "nan_loss": "lower the learning rate, skip the data, or start again from an earlier checkpoint",
    "disk_full": "free space or quota at the path named, and remove the file that was cut off",
    "permission_import_missing_module": "install the same environment on every node; on one node only, check that one",
    "signal_preempted": "somebody or the scheduler ended it: look for a time limit, a preemption, or a kill",
    "dataloader_worker_killed": "killed: host memory; bus error: /dev/shm. Use fewer workers or raise the limit",
    "checkpoint_corrupt": "start from the checkpoint before it; write checkpoints to a temporary file and rename",
    "torch_version_mismatch": "install a build of torch that fits this GPU and driver, the same on every node",
    "node_lost": "check power, network and the node's console; the group goes on without it if min_nodes allow",
    "other": "",
}
