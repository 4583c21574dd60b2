"""Signatures of NCCL (and RCCL), of other libraries for collectives, and of the networks under them.

In: nothing. Out: MEMORY, ERRORS.
"""

from __future__ import annotations

from remote_agent.diagnose.signatures.signature import WRONG_SIZE, ended, failed, lost, waited

# How lines of other libraries for collectives can be told: of Huawei, Intel, Amazon; UCX; MPI.
_OTHERS = (*(r"H(?:CCL|ccl)", r"E[A-Z]\d{4}: ", r"ERR0\d{4} DIST", "oneCCL", "CCL_ERROR", "NRT_", "UCX", r"MPI_"),)
# What all of them say, whatever the rest of the line.
# torch says this of itself; what NCCL or the store says has signatures of its own.
_OF_TORCH = r"DistBackendError: (?!NCCL|\[|[^\n]*[Ss]tore)"
_TIMES_OUT = r"[Tt]im(?:ed?|es|ing) ?-?out|TIMEOUT|exceeded \d+ ?s"
_NETWORK = r"[Rr]etr(?:y|ies) [\w ]{0,20}exceeded|RETRY_EXC|[Uu]nreachable|ATL_STATUS_FAILURE|No route"
_PEER = r"(?:[Pp]eer|[Rr]emote|[Ss]ocket|[Cc]onnection)\b[^\n]{0,60}(?:fail|lost|closed|reset|broken|abort|did not)"

MEMORY = (
    failed(
        "cuda_oom",
        "Failed to CUDA calloc",
        "Cuda failure (?:2 )?'out of memory'",
        title="NCCL could not allocate GPU memory",
        hint="leave 1-2 GB of GPU memory free; call empty_cache() before a checkpoint gathers tensors",
    ),
    # The limit on locked memory is too low; the host has enough memory.
    failed("nccl_network", r"ibv_(?:modify_qp|create_\w+|reg_\w+) failed"),
)
ERRORS = (
    ended("cuda_error", "unhandled cuda error", "ncclUnhandledCudaError"),
    failed("nccl_version_mismatch", "Mismatched NCCL version detected", r"ncclMaxSharedMem \d+ exceeds"),
    failed(
        "other",
        "Duplicate GPU detected",
        title="two ranks use the same GPU",
        hint="call torch.cuda.set_device(LOCAL_RANK) before init_process_group",
    ),
    failed(
        "other",
        r"rank \d+ of \d+ ranks has already checked in",
        title="two processes say that they are the same rank",
        hint="give each node its own node rank (--node-rank, NODE_RANK), and each process its own rank",
    ),
    failed(
        "collective_desync",
        r"[Mm]essage truncated",
        title=WRONG_SIZE,
        hint="another rank called this collective with another size; TORCH_DISTRIBUTED_DEBUG=DETAIL names it",
    ),
    waited(
        "nccl_timeout_watchdog",
        *("Watchdog caught collective operation timeout", "detected by watchdog at work"),
        *("Heartbeat monitor timed out", "watchdog got stuck for", "due to ProcessGroupNCCL watchdog hang"),
        "Received a dump signal due to a collective timeout",
        title="NCCL watchdog: a collective timed out",
    ),
    # torch prints this before any NCCL error.
    ended("nccl_timeout_watchdog", "Some NCCL operations have failed or timed out"),
    lost(
        "nccl_remote_error",
        *("ncclRemoteError", "remote process exited or there was a network error"),
        "NCCL WARN .*(?:[Cc]onnection closed by remote|Connection reset by peer|Broken pipe|NET/OFI.*with error)",
        r"Connect to \S+ failed ?: Software caused connection abort",
        title="NCCL lost the connection to a peer",
    ),
    lost(
        "nccl_remote_error",
        "caused by an exception on one of the ranks",
        "IBV_WC_WR_FLUSH_ERR",
        r"Got completion (?:from peer|with error)[\s\S]{0,200}?(?:error |status=(?:\w+\()?)5\b",
    ),
    failed(
        "nccl_network",
        "IBV_WC_RETRY_EXC_ERR",
        r"Got completion (?:from peer|with error)[\s\S]{0,200}?(?:error |status=(?:\w+\()?)(?:12|4)\b",
        vague=True,
    ),
    failed(
        "nccl_network",
        "Bootstrap : no socket interface found",
        "NCCL WARN NET/IB.*Got async event ?: (?:port error|device fatal)",
        # The kernel and the drivers of network adapters.
        r"[Ll]ink (?:is |went |becomes )?(?:[Dd]own|DOWN|not ready)\b",
    ),
    failed(
        "nccl_network",
        r"NCCL WARN Call to \w+ .*failed ?: (?:Connection timed out|No route|Connection refused|Network is unreach)",
        r"socketPollConnect: connect[^\n]*(?:refused|No route|timed out)",
        r"Connect to \S+ failed ?: (?:Connection refused|No route|Connection timed out)",
        vague=True,
    ),
    waited(
        "nccl_timeout_watchdog",
        *(rf"{each}[^\n]*(?:{_TIMES_OUT})" for each in (*_OTHERS, "NPU function error", _OF_TORCH)),
    ),
    failed("cuda_error", r"NPU function error: (?!\w*Timeout)"),
    lost("nccl_network", *(rf"{each}[^\n]*(?:{_NETWORK})" for each in _OTHERS)),
    lost("nccl_remote_error", *(rf"{each}[^\n]*{_PEER}" for each in _OTHERS)),
    failed("nccl_system_error", r"nvmlDeviceGetHandleByPciBusId\(\) failed", "Failed to bind the IP port"),
    ended(
        "nccl_system_error",
        "ncclSystemError",
        "unhandled system error",
        "ncclInternalError",
        "NCCL error",
        r"Proxy Service \d+\] Failed to execute operation",
        "NCCL communicator was aborted",
        "DistBackendError",
        *(f"{each}[^\\n]*(?:[Ee]rror|ERROR|[Ff]ail)" for each in _OTHERS),
    ),
    failed(
        "nccl_timeout_watchdog",
        r"\[(?P<rank>\d+(?:, \d+)*)\] (?:are the lagging ranks|finished collective #\d+, but didn't join)",
        title="did not reach the collective, according to torch's desync report",
    ),
    failed("nccl_timeout_watchdog", r"missing ranks: \{\d"),
)
