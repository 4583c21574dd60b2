"""Signatures of GPUs, their driver, and builds of torch that do not fit them.

In: nothing. Out: MEMORY, ERRORS.
"""

from __future__ import annotations

from remote_agent.diagnose.signatures.signature import failed

MEMORY = (
    failed(
        "cuda_oom",
        "CUDA out of memory",
        r"torch\.(?:cuda\.)?OutOfMemoryError",
        "CUDA error: out of memory",
        *("out of memory. Tried to allocate", r"cuda runtime error \(2\)"),
        title="CUDA out of memory",
    ),
)
ERRORS = (
    failed(
        "cuda_error",
        "uncorrectable (?:NVLink |double bit )?ECC error",
        "ECC (?:DBE|double[- ]bit)",
        hint="the GPU's memory is faulty: drain the node, then reset or replace the GPU",
    ),
    failed("cuda_error", "illegal memory access was encountered", title="CUDA illegal memory access"),
    failed(
        "cuda_error",
        "device-side assert triggered",
        "[Dd]evice-side assertion `",
        r"thread: \[\d+,\d+,\d+\] Assertion `",
        title="CUDA device-side assert",
        hint="usually an index out of range (labels, token ids); rerun with CUDA_LAUNCH_BLOCKING=1",
    ),
    failed(
        "cuda_error",
        "invalid device ordinal",
        title="CUDA invalid device ordinal",
        hint="more local ranks than visible GPUs: check CUDA_VISIBLE_DEVICES and nproc_per_node",
    ),
    failed(
        "torch_version_mismatch",
        "no kernel image is available",
        "invalid device function",
        *("NVIDIA driver on your system is too old", "driver version is insufficient"),
        *("forward compatibility was attempted", "unsupported display driver", "Driver/library version mismatch"),
        "cuDNN version incompatibility",
        r"compiled +against .{1,60} but found runtime version",
        r"undefined symbol: \S*(?:c10|torch|nccl|cuda)",
        "were compiled with different CUDA",
        r"detected CUDA version .{1,40} mismatches",
        "operator torchvision::nms does not exist",
        *("Torch not compiled with CUDA enabled", r"doesn't have \w+ built in"),
        r"version `GLIBC(?:XX)?_[\d.]+' not found",
    ),
    failed(
        "cuda_error",
        *("CUDA error: (?:unknown error|unspecified launch failure)", "CUDA unknown error"),
        "HW Exception by GPU",
        "GPU Hang",
        "HSA_STATUS_ERROR",
        "GPU has fallen off the bus",
        r"NVRM: Xid ",
        r"SXid \(PCI:[^)\n]*\): \d+, Fatal",
        *("Found no NVIDIA driver", r"nvidia-container-cli: \w+ error", "Memory access fault by GPU"),
        "No CUDA GPUs are available",
        "RuntimeError: Unexpected error from cudaGetDeviceCount",
    ),
    failed(
        "cuda_error",
        *(r"\bCUDA error: ", r"cuda runtime error \(", r"\bCUDNN_STATUS_", r"\bCUBLAS_STATUS_", r"\bHIP error: "),
        r"Cuda failure (?:\d+ )?'(?!driver shutting down)",
    ),
)
