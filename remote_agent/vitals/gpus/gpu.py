"""One reading of one GPU, and which GPU a rank uses.

In: a rank's environment, the GPUs of the node. Out: the index of the rank's GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypedDict

NVIDIA, AMD = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
SELECTORS = (NVIDIA, AMD)
"""The environment variables by which a process selects GPUs, one of each vendor."""


class Gpu(TypedDict):
    """One GPU at one moment; None for a value that the GPU does not report."""

    index: int
    uuid: str | None
    name: str | None
    use: float | None
    """Percent of the time in which a kernel ran."""
    mem_used: int | None
    mem_total: int | None
    temp: float | None
    power: float | None
    power_limit: float | None
    """Both in watts."""
    clock: float | None
    """The clock of the processors, in MHz."""
    ecc: int | None
    """Uncorrected errors since the node's start."""
    xid: int | None
    """The newest Xid since the reader's start."""
    t: float
    """Monotonic time of the reading."""
    chosen_by: str
    """The one of SELECTORS that selects GPUs of this vendor."""


Reader = Callable[[], "list[Gpu]"]
"""Reads the GPUs of one vendor; may raise OSError."""


def gpu_of(env: Mapping[str, str], gpus: Iterable[Gpu]) -> int | None:
    """Return the index of the GPU that a rank selects by its environment, None when it is unknown."""
    for gpu in gpus:
        wanted = _selected(env.get(gpu["chosen_by"]), int(env["LOCAL_RANK"]))
        # A slice of a GPU under its older name, MIG-GPU-<uuid>/<instance>/<instance>, contains the GPU's name.
        parent = wanted[len("MIG-") :].partition("/")[0] if wanted.startswith("MIG-GPU-") else wanted
        if wanted == str(gpu["index"]) or (parent.startswith("GPU-") and str(gpu["uuid"]).startswith(parent)):
            return gpu["index"]
    return None


def _selected(visible: str | None, local_rank: int) -> str:
    """Return the entry of the variable for this local rank; empty when there is none."""
    if visible is None:
        return str(local_rank)
    entries = [entry.strip() for entry in visible.split(",")]
    return entries[local_rank] if 0 <= local_rank < len(entries) else ""
