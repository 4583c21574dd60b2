"""What texts mean: a table of signatures.

In: nothing. Out: PATTERNS, to be searched in the text of a rank.

Order in time and across ranks decides, not the loudest line: `primary` is a candidate for the cause, `generic` too
where nothing says more, `secondary` marks a rank that is usually a victim, `neutral` is a wrapper whose reason stands
elsewhere.
"""

from __future__ import annotations

import dataclasses
import re

from remote_agent.diagnose.exits import told_of

PRIMARY, GENERIC, SECONDARY, NEUTRAL = "primary", "generic", "secondary", "neutral"


@dataclasses.dataclass(frozen=True)
class Pattern:
    """One signature; `title` replaces the text in the summary.

    A group `rank` names the culprits; a group `peer` one that others differ from: the culprit where several say so.
    """

    category: str
    role: str
    regex: re.Pattern[str]
    title: str = ""
    hint: str = ""
    signal: str = ""
    """The signal that the text says ended the process."""


def _death(signal: str, word: str, category: str, *also: str, role: str = PRIMARY, title: str = "") -> Pattern:
    return Pattern(category, role, re.compile("|".join((*told_of(signal, word), *also))), title, signal=signal)


def _p(category: str, role: str, *texts: str, title: str = "", hint: str = "") -> Pattern:
    return Pattern(category, role, re.compile("|".join(texts)), title, hint)


# Of two that stand in one line the first here counts: what says more comes before what says less.
PATTERNS: tuple[Pattern, ...] = (
    _p(
        "cuda_oom",
        PRIMARY,
        "CUDA out of memory",
        r"torch\.(?:cuda\.)?OutOfMemoryError",
        "CUDA error: out of memory",
        "HIP out of memory",
        title="CUDA out of memory",
    ),
    _p(
        "cuda_oom",
        PRIMARY,
        "Failed to CUDA calloc",
        "Cuda failure (?:2 )?'out of memory'",
        title="NCCL found no GPU memory left",
        hint="leave 1-2 GB of GPU memory free; empty_cache() before gathers at a checkpoint",
    ),
    _p(
        "host_oom_kill",
        PRIMARY,
        "oom-kill:",
        "oom[-_]kill event",
        "Out of memory: Killed process",
        "Memory cgroup out of memory",
        "oom_reaper: reaped",
        r"task \d+: Out Of Memory",
        "Exceeded (?:job|step) memory limit",
        r"exceeded memory limit \(",
        "TERM_MEMLIMIT",
        r"\bOOMKilled\b",
        "node running low on memory",
        title="killed by the host's OOM killer",
    ),
    _death(
        *("SIGKILL", "Killed", "host_oom_kill", "(?m:^Killed$)"),
        title="killed by SIGKILL, mostly for lack of host memory",
    ),
    _p(
        "host_oom_kill",
        PRIMARY,
        r"\bMemoryError\b",
        "DefaultCPUAllocator: can.?t allocate memory",
        "Cannot allocate memory",
        hint="the host has no memory left for this rank: smaller buffers, fewer workers",
    ),
    _p(
        "dataloader_worker_killed",
        PRIMARY,
        r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (?:exited unexpectedly|is killed by signal)",
    ),
    _p(
        "bus_error_shm",
        PRIMARY,
        "Error while (?:creating|attaching to) shared memory segment",
        "Call to posix_fallocate failed",
        "unable to (?:allocate|open|mmap|resize) shared memory",
        "insufficient shared memory",
        "unable to write to file </torch_",
        "No space left on device: '/dev/shm/",
    ),
    _death("SIGBUS", "Bus error", "bus_error_shm"),
    _p(
        "cuda_error",
        PRIMARY,
        "uncorrectable (?:NVLink |double bit )?ECC error",
        "ECC (?:DBE|double[- ]bit)",
        hint="the GPU's memory is broken: drain the node, reset or replace the GPU",
    ),
    _p("cuda_error", PRIMARY, "illegal memory access was encountered", title="CUDA illegal memory access"),
    _p(
        "cuda_error",
        PRIMARY,
        "device-side assert triggered",
        "[Dd]evice-side assertion `",
        title="CUDA device-side assert",
        hint="an index out of range (labels, token ids): run again with CUDA_LAUNCH_BLOCKING=1",
    ),
    _p(
        "cuda_error",
        PRIMARY,
        "invalid device ordinal",
        title="CUDA invalid device ordinal",
        hint="more local ranks than visible GPUs: check CUDA_VISIBLE_DEVICES and nproc_per_node",
    ),
    _p(
        "torch_version_mismatch",
        PRIMARY,
        "no kernel image is available",
        "invalid device function",
        "NVIDIA driver on your system is too old",
        "driver version is insufficient",
        "cuDNN version incompatibility",
        r"compiled +against .{1,60} but found runtime version",
        r"undefined symbol: \S*(?:c10|torch|nccl|cuda)",
        "were compiled with different CUDA",
        r"detected CUDA version .{1,40} mismatches",
        "operator torchvision::nms does not exist",
        "Torch not compiled with CUDA enabled",
        r"version `GLIBC(?:XX)?_[\d.]+' not found",
    ),
    _p(
        "cuda_error",
        PRIMARY,
        "CUDA error: (?:unknown error|unspecified launch failure)",
        "HW Exception by GPU",
        "GPU Hang",
        "GPU has fallen off the bus",
        r"NVRM: Xid ",
        "Memory access fault by GPU",
        "No CUDA GPUs are available",
        "RuntimeError: Unexpected error from cudaGetDeviceCount",
    ),
    _p("cuda_error", PRIMARY, r"\bCUDA error: ", r"\bCUDNN_STATUS_", r"\bCUBLAS_STATUS_", r"\bHIP error: "),
    _p("cuda_error", NEUTRAL, "unhandled cuda error", "ncclUnhandledCudaError"),
    _p("nccl_version_mismatch", PRIMARY, "Mismatched NCCL version detected", r"ncclMaxSharedMem \d+ exceeds"),
    _p(
        "other",
        PRIMARY,
        "Duplicate GPU detected",
        title="two ranks use the same GPU",
        hint="call torch.cuda.set_device(LOCAL_RANK) before init_process_group",
    ),
    _p(
        "collective_desync",
        PRIMARY,
        r"Message truncated : received \d+ bytes instead of",
        r"op\.preamble\.length <= op\.nbytes",
    ),
    _p("collective_desync", PRIMARY, r"Mismatched collective detected.*around rank (?P<peer>\d+)"),
    _p(
        "nccl_timeout_watchdog",
        SECONDARY,
        "Watchdog caught collective operation timeout",
        "Heartbeat monitor timed out",
        "watchdog got stuck for",
        title="NCCL watchdog: a collective timed out",
    ),
    # torch says this before any error of NCCL's.
    _p("nccl_timeout_watchdog", NEUTRAL, "Some NCCL operations have failed or timed out"),
    _p(
        "nccl_remote_error",
        SECONDARY,
        "ncclRemoteError",
        "remote process exited or there was a network error",
        "NCCL WARN .*(?:Connection closed by remote peer|connection closed by remote)",
        r"Connect to \S+ failed ?: Software caused connection abort",
        title="NCCL: a peer's process or network is gone",
    ),
    _p(
        "nccl_remote_error",
        SECONDARY,
        "IBV_WC_WR_FLUSH_ERR",
        r"Got completion (?:from peer|with error)[\s\S]{0,200}?(?:error |status=(?:\w+\()?)5\b",
    ),
    _p(
        "nccl_network",
        PRIMARY,
        "IBV_WC_RETRY_EXC_ERR",
        r"Got completion (?:from peer|with error)[\s\S]{0,200}?(?:error |status=(?:\w+\()?)(?:12|4)\b",
    ),
    _p(
        "nccl_network",
        PRIMARY,
        r"(?:ibv_modify_qp|ibv_create_qp|ibv_reg_mr\w*) failed",
        "Bootstrap : no socket interface found",
        r"socketPollConnect: connect[^\n]*(?:refused|No route|timed out)",
        r"Connect to \S+ failed ?: (?:Connection refused|No route|Connection timed out)",
    ),
    _p("nccl_system_error", PRIMARY, r"nvmlDeviceGetHandleByPciBusId\(\) failed"),
    _p(
        "nccl_system_error",
        NEUTRAL,
        "ncclSystemError",
        "unhandled system error",
        "ncclInternalError",
        "NCCL error",
        "NCCL communicator was aborted",
        "DistBackendError",
    ),
    _p(
        "collective_desync",
        PRIMARY,
        r"Ranks? (?P<rank>\d+(?:, \d+)*) failed to pass monitoredBarrier",
        title="did not come to monitoredBarrier",
    ),
    _p(
        "collective_desync",
        PRIMARY,
        r"Detected mismatch between collectives[\s\S]{0,2000}?but Rank (?P<peer>\d+) is running",
        "Detected mismatch between collectives",
        "Mismatch between collective operation types",
        "sequence number .* doesn.t match",
    ),
    _p(
        "collective_desync",
        PRIMARY,
        "appears not to match (?:sizes|strides) of the same param",
        "DDP expects same model across all ranks",
        "Expected to have finished reduction in the prior iteration",
    ),
    _p(
        "port_in_use",
        PRIMARY,
        "Address already in use",
        "EADDRINUSE",
        r"errno: 98\b",
        title="the port is taken",
    ),
    _p(
        "rendezvous_timeout",
        SECONDARY,
        r"\d+/\d+ clients joined",
        r"Timed out after \d+ seconds waiting for clients",
        "initializing process group in store based barrier",
    ),
    _p("rendezvous_timeout", SECONDARY, r"retr(?:ie|ei)ving ncclUniqueId from \[(?P<peer>\d+)\]"),
    _p(
        "rendezvous_timeout",
        SECONDARY,
        "client socket has timed out after",
        "client socket has failed to connect",
        "RendezvousTimeoutError",
        "RendezvousClosedError",
        "RendezvousConnectionError",
        r"wait timeout after \d+ms",
        "Socket Timeout",
        "DistStoreError",
    ),
    _p(
        "rendezvous_timeout",
        PRIMARY,
        "[Gg]loo connectFullMesh failed",
        "unable to find address for",
        "Name or service not known",
        "Temporary failure in name resolution",
    ),
    _p(
        "gloo_connection_reset",
        SECONDARY,
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "recvBytes",
        "sendBytes failed",
        "DistNetworkError",
        r"Timed out waiting \d+ms for (?:recv|send) operation",
        "Application timeout caused pair closure",
        "[Ss]ocket closed",
        "Connection was likely closed",
        "DistBackendError.*(?:store|Socket)",
    ),
    _p(
        "disk_full",
        PRIMARY,
        "No space left on device",
        r"Errno 28\b",
        "Disk quota exceeded",
        r"inline_container\.cc.*unexpected pos",
        r"unexpected pos \d+ vs",
    ),
    _p(
        "checkpoint_corrupt",
        PRIMARY,
        "failed finding central directory",
        "PytorchStreamReader failed",
        "invalid load key",
        "pickle data was truncated",
        "UnpicklingError",
        "SafetensorError",
        "archive is corrupted",
        "BadZipFile",
        "Ran out of input",
        "unexpected EOF, expected",
        "Invalid magic number; corrupt file",
    ),
    _p(
        "permission_import_missing_module",
        PRIMARY,
        "ModuleNotFoundError",
        r"\bImportError\b",
        "No module named",
        "PermissionError",
        "Permission denied",
    ),
    _p(
        "nan_loss",
        PRIMARY,
        "[Ll]oss is (?:nan|NaN|inf)",
        "returned nan values",
        "found NaN in",
        "[Ll]oss scale already at minimum",
        "Minimum loss scale reached",
        r"\bgrad_norm['\"]?[:=] ?nan\b",
        r"OVERFLOW! Rank \d+ Skipping step",
    ),
    _p(
        "signal_preempted",
        PRIMARY,
        "DUE TO PREEMPTION",
        "DUE TO TIME LIMIT",
        r"CANCELLED AT (?!\S+ DUE TO NODE)",
        r"job killed: walltime \d+ exceeded",
        "TERM_RUNLIMIT",
        title="the scheduler ended the job",
    ),
    _p("node_lost", PRIMARY, "DUE TO NODE FAILURE", "srun: error: Node failure on"),
    _p(
        "signal_preempted",
        SECONDARY,
        "closing signal SIGTERM",
        r"Received \S*(?:Signals\.)?SIGTERM\S* death signal",
        "SignalException",
        "KeyboardInterrupt",
        r"got signal: (?:15|2)\b",
    ),
    _death(
        "SIGSEGV", "Segmentation fault", "segfault", "Segmentation fault", "SIGSEGV rec", title="segmentation fault"
    ),
    _death("SIGILL", "Illegal instruction", "other", title="illegal instruction: built for another CPU"),
    _death("SIGFPE", "Floating point exception", "other", title="arithmetic error in native code"),
    _p("sigabrt", PRIMARY, "double free", "corrupted size vs", r"free\(\): invalid", r"malloc\(\): "),
    _death(
        *("SIGABRT", "Aborted", "sigabrt", "terminate called (?:without an active|after throw)", r"(?m:^Aborted\b)"),
        role=NEUTRAL,
    ),
    _p(
        "user_exception",
        NEUTRAL,
        r"exitcode\s*:? 1\b",
        title="exited with code 1, as after an exception; no text of its own says which",
        hint="look at this rank's own stderr; with torchrun: --redirects or --tee, and @record around main",
    ),
    _p(
        "other",
        NEUTRAL,
        "A worker died or was killed while executing a task",
        "ActorDiedError",
        "EngineDeadError",
        "ChildFailedError",
    ),
    _p("permission_import_missing_module", GENERIC, r": command not found\b"),
    _p("user_exception", GENERIC, "can't open file '", "No such file or directory: '"),
    # The last line of a traceback whose beginning is not in the text. RuntimeError is left out: it can mean anything.
    _p(
        "user_exception",
        GENERIC,
        r"(?m)^(?:\[(?:rank|default)?\d+\]: ?)?(?:Attribute|Type|Value|Key|Index|Name|Assertion|ZeroDivision"
        r"|NotImplemented|Syntax|Indentation|FileNotFound|UnboundLocal|Recursion)Error(?::.*)?$",
    ),
)
