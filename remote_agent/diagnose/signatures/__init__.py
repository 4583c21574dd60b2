"""Signatures: what texts mean. Data, one file a subject, one entry a failure.

In: nothing. Out: SIGNATURES, to be searched in the text of a rank; HINTS, what to do by category. Imports `text`.

To add a failure, add an entry to the group that it belongs to.
"""

from remote_agent.diagnose.signatures import cuda, distributed, host, launcher, nccl, python
from remote_agent.diagnose.signatures.signature import Signature

# The order matters for two signatures of one role that match the same line: the first one counts. Specific groups come
# before general ones: a failed allocation before the error code that it is reported with, the reason of a death before
# the words of the launcher that saw it.
SIGNATURES: tuple[Signature, ...] = (
    *cuda.MEMORY,
    *nccl.MEMORY,
    *host.MEMORY,
    *cuda.ERRORS,
    *nccl.ERRORS,
    *distributed.COLLECTIVES,
    *distributed.RENDEZVOUS,
    *distributed.CONNECTIONS,
    *python.FILES,
    *python.LOSS,
    *launcher.ENDED,
    *host.CRASHES,
    *launcher.EXITED,
    *python.GENERIC_ERRORS,
)

# What to do next, by category.
HINTS = {
    "user_exception": "fix the code or configuration at the place shown; if only one rank failed, see what differs "
    "there",
    "cuda_oom": "use a smaller batch or more sharding; if this process uses much less than the GPU has, another "
    "process holds the rest (nvidia-smi)",
    "cuda_error": "rerun with CUDA_LAUNCH_BLOCKING=1 to see the failing call; look for Xid in the node's kernel log",
    "host_oom_kill": "use less host memory per rank (fewer DataLoader workers, one copy of the model) or raise the "
    "limit",
    "segfault": "check the top native frame; try another build of that library, NCCL or the driver",
    "sigabrt": "native code ended the process with this message: check its input, and the library's version",
    "bus_error_shm": "/dev/shm is too small or full: enlarge it (--shm-size, --ipc=host) or use fewer workers",
    "nccl_timeout_watchdog": "see what the missing rank is doing: supervisor stacks",
    "nccl_system_error": "rerun with NCCL_DEBUG=WARN: NCCL's warning line shows the reason",
    "nccl_remote_error": "another rank's process or network failed: check the ranks without this error",
    "nccl_version_mismatch": "install the same torch and NCCL on every node",
    "nccl_network": "check NCCL_SOCKET_IFNAME, and the routes and firewalls between the nodes",
    "rendezvous_timeout": "see which ranks are missing and why; check MASTER_ADDR, firewalls and name resolution",
    "port_in_use": "another process uses the port: end it, or let a free port be chosen (unset MASTER_PORT, port 0)",
    "hang_no_output": "supervisor stacks shows where each rank is waiting",
    "collective_desync": "the ranks took different code paths: compare the collectives shown and what depends on the "
    "rank",
    "gloo_connection_reset": "a peer disconnected: check the rank that failed or exited first",
    "nan_loss": "lower the learning rate, skip the data, or restart from an earlier checkpoint",
    "disk_full": "free space or raise the quota at the path shown, and delete the truncated file",
    "permission_import_missing_module": "install the module or fix the permission; if one node failed, check that node",
    "signal_preempted": "a person or the scheduler ended it: check for a time limit, a preemption, or a kill",
    "dataloader_worker_killed": "killed: host memory; bus error: /dev/shm. Use fewer workers or raise the limit",
    "checkpoint_corrupt": "restart from the previous checkpoint; write checkpoints to a temporary file and rename it",
    "torch_version_mismatch": "install a torch build that fits this GPU and driver, the same on every node",
    "node_lost": "check the node's power, network and console; the job continues without it if min_nodes allows",
    "other": "",
}

__all__ = ["HINTS", "SIGNATURES", "Signature"]
