"""Signatures: what texts mean. Data, one file a subject, one entry a failure.

In: nothing. Out: SIGNATURES, to be searched in the text of a rank; CATEGORIES, the kinds of failures. Imports `text`.

To add a failure, add an entry to the group that it belongs to.
"""

from typing import NamedTuple

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


class Category(NamedTuple):
    """A kind of failure."""

    name: str
    """The name that people see."""
    hint: str
    """What to do next."""


CATEGORIES = {
    category: Category(name, hint)
    for category, name, hint in (
        ("user_exception", "exception in the script",
         "fix the code or configuration at the place shown; if only one rank failed, see what differs there"),
        ("cuda_oom", "CUDA out of memory",
         ("use a smaller batch or more sharding; if this process uses much less than the GPU has, another process "
          "holds the rest (nvidia-smi)")),
        ("cuda_error", "CUDA error",
         "rerun with CUDA_LAUNCH_BLOCKING=1 to see the failing call; look for Xid in the node's kernel log"),
        ("host_oom_kill", "killed by the host's OOM killer",
         "use less host memory per rank (fewer DataLoader workers, one copy of the model) or raise the limit"),
        ("segfault", "segmentation fault",
         "check the top native frame; try another build of that library, NCCL or the driver"),
        ("sigabrt", "abort",
         "native code ended the process with this message: check its input, and the library's version"),
        ("bus_error_shm", "bus error (shared memory)",
         "/dev/shm is too small or full: enlarge it (--shm-size, --ipc=host) or use fewer workers"),
        ("nccl_timeout_watchdog", "NCCL timeout (watchdog)", "see what the missing rank is doing: supervisor stacks"),
        ("nccl_system_error", "NCCL system error", "rerun with NCCL_DEBUG=WARN: NCCL's warning line shows the reason"),
        ("nccl_remote_error", "NCCL error on another rank",
         "another rank's process or network failed: check the ranks without this error"),
        ("nccl_version_mismatch", "NCCL version mismatch", "install the same torch and NCCL on every node"),
        ("nccl_network", "NCCL network error",
         "check NCCL_SOCKET_IFNAME, and the routes and firewalls between the nodes"),
        ("rendezvous_timeout", "rendezvous timeout",
         "see which ranks are missing and why; check MASTER_ADDR, firewalls and name resolution"),
        ("port_in_use", "port in use",
         "another process uses the port: end it, or let a free port be chosen (unset MASTER_PORT, port 0)"),
        ("hang_no_output", "hang", "supervisor stacks shows where each rank is waiting"),
        ("collective_desync", "collective mismatch",
         "the ranks took different code paths: compare the collectives shown and what depends on the rank"),
        ("gloo_connection_reset", "Gloo connection reset",
         "a peer disconnected: check the rank that failed or exited first"),
        ("nan_loss", "NaN loss", "lower the learning rate, skip the data, or restart from an earlier checkpoint"),
        ("disk_full", "disk full", "free space or raise the quota at the path shown, and delete the truncated file"),
        ("permission_import_missing_module", "missing module or permission",
         "install the module or fix the permission; if one node failed, check that node"),
        ("signal_preempted", "stopped by a signal",
         "a person or the scheduler ended it: check for a time limit, a preemption, or a kill"),
        ("dataloader_worker_killed", "DataLoader worker killed",
         "killed: host memory; bus error: /dev/shm. Use fewer workers or raise the limit"),
        ("checkpoint_corrupt", "corrupt checkpoint",
         "restart from the previous checkpoint; write checkpoints to a temporary file and rename it"),
        ("torch_version_mismatch", "torch version mismatch",
         "install a torch build that fits this GPU and driver, the same on every node"),
        ("node_lost", "node lost",
         "check the node's power, network and console before it is used again"),
        ("other", "other", ""),
    )
}  # fmt: skip

__all__ = ["CATEGORIES", "SIGNATURES", "Category", "Signature"]
