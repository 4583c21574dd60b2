"""The kinds of failures: how each is called, what to do about it, and what follows from it. Data.

In: nothing. Out: CATEGORIES. A new one is an entry here, its name in docs/json.md, and signatures that have it.
"""

from __future__ import annotations

from typing import NamedTuple

# What the kernel notes when it kills for memory, and before that.
OOM = r"(?i:oom-kill|Out of memory: Killed process|Memory cgroup out of memory|oom_kill [1-9]|oom_reaper)"
PRESSURE = r"(?i:memory pressure|page allocation failure|oom [1-9])"


class Category(NamedTuple):
    """A kind of failure."""

    name: str
    """The name that people see."""
    hint: str
    """What to do next."""
    machine: bool = False
    """A machine can cause it by itself. Any other failure follows the script from node to node."""
    outside: bool = False
    """No rank is to blame for it."""
    hits_all: bool = False
    """It happens to all ranks: which one was first is chance."""
    same_on_all: bool = False
    """It fails alike on each rank that gets as far, so one rank alone says nothing of ranks that were stopped first."""
    alone: bool = False
    """Two failures of this kind need not have anything in common."""
    window_ns: int = 60_000_000_000
    """The same failure on another rank within this time has the same cause."""
    notes: str = ""
    """A pattern of the host's notes that confirm it, whichever process they name."""


CATEGORIES = {
    "user_exception": Category(
        "exception in the script",
        "fix the code or configuration at the place shown; if only one rank failed, see what differs there",
        alone=True,
    ),
    "cuda_oom": Category(
        "CUDA out of memory",
        "use a smaller batch or more sharding; if this process uses much less than the GPU has, another process holds "
        "the rest (nvidia-smi)",
    ),
    "cuda_error": Category(
        "CUDA error",
        "rerun with CUDA_LAUNCH_BLOCKING=1 to see the failing call; look for Xid in the node's kernel log",
        machine=True,
        window_ns=200_000_000,
        notes="Xid",
    ),
    "host_oom_kill": Category(
        "killed (host memory)",
        "use less host memory per rank (fewer DataLoader workers, one copy of the model) or raise the limit",
        machine=True,
        notes=f"{OOM}|{PRESSURE}",
    ),
    "segfault": Category(
        "segmentation fault",
        "check the top native frame; try another build of that library, NCCL or the driver",
        alone=True,
    ),
    "sigabrt": Category(
        "abort",
        "native code ended the process with this message: check its input, and the library's version",
        alone=True,
    ),
    "bus_error_shm": Category(
        "bus error (shared memory)",
        "/dev/shm is too small or full: enlarge it (--shm-size, --ipc=host) or use fewer workers",
        machine=True,
        notes=r"^/dev/shm",
    ),
    "nccl_timeout_watchdog": Category(
        "NCCL timeout (watchdog)", "see what the missing rank is doing: supervisor stacks"
    ),
    "nccl_system_error": Category(
        "NCCL system error", "rerun with NCCL_DEBUG=WARN: NCCL's warning line shows the reason", machine=True
    ),
    "nccl_remote_error": Category(
        "NCCL error on another rank", "another rank's process or network failed: check the ranks without this error"
    ),
    "nccl_version_mismatch": Category("NCCL version mismatch", "install the same torch and NCCL on every node"),
    "nccl_network": Category(
        "NCCL network error", "check NCCL_SOCKET_IFNAME, and the routes and firewalls between the nodes", outside=True
    ),
    "rendezvous_timeout": Category(
        "rendezvous timeout",
        "see which ranks are missing and why; check MASTER_ADDR, firewalls and name resolution",
        outside=True,
        hits_all=True,
    ),
    "port_in_use": Category(
        "port in use",
        "another process uses the port: end it, or let a free port be chosen (unset MASTER_PORT, port 0)",
        outside=True,
        hits_all=True,
    ),
    "hang_no_output": Category("hang", "supervisor stacks shows where each rank is waiting"),
    "collective_desync": Category(
        "collective mismatch",
        "the ranks took different code paths: compare the collectives shown and what depends on the rank",
    ),
    "gloo_connection_reset": Category(
        "Gloo connection reset", "a peer disconnected: check the rank that failed or exited first"
    ),
    "nan_loss": Category("NaN loss", "lower the learning rate, skip the data, or restart from an earlier checkpoint"),
    "disk_full": Category(
        "disk full",
        "free space or raise the quota at the path shown, and delete the truncated file",
        machine=True,
        notes=r"\d MiB free",
    ),
    "permission_import_missing_module": Category(
        "missing module or permission",
        "install the module or fix the permission; if one node failed, check that node",
        same_on_all=True,
        alone=True,
    ),
    "signal_preempted": Category(
        "stopped by a signal",
        "a person or the scheduler ended it: check for a time limit, a preemption, or a kill",
        hits_all=True,
        alone=True,
    ),
    "dataloader_worker_killed": Category(
        "DataLoader worker killed",
        "killed: host memory; bus error: /dev/shm. Use fewer workers or raise the limit",
        machine=True,
        notes=rf"^/dev/shm|{OOM}",
    ),
    "checkpoint_corrupt": Category(
        "corrupt checkpoint",
        "restart from the previous checkpoint; write checkpoints to a temporary file and rename it",
    ),
    "torch_version_mismatch": Category(
        "torch version mismatch", "install a torch build that fits this GPU and driver, the same on every node"
    ),
    "node_lost": Category(
        "node lost", "check the node's power, network and console before it is used again", outside=True, hits_all=True
    ),
    "other": Category("other", "", alone=True),
}
