"""What of a status goes into the history.

In: a rank's progress and usage, a node's usage, as the status document has them. Out: values by name. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remote_agent.history.pyramid import Name
    from remote_agent.wire.documents import Document

RANK_KINDS = ("step", "loss", "lr", "grad_norm", "rate", "step_s", "rank_cpu")
"""Of a rank: the last step, loss, learning rate, gradient norm, throughput, seconds of a step, and cores in percent."""
# Of a node: percent of its processors, bytes of memory.
_OF_NODE = {"cpu": "cpu", "mem": "mem_used"}
# Of a GPU: percent, bytes, watts, degrees Celsius.
_OF_GPU = {"gpu_use": "use", "gpu_mem": "mem_used", "gpu_power": "power", "gpu_temp": "temp"}


def of_rank(rank: int, step: Any, progress: Document | None, vitals: Document | None) -> Iterator[tuple[Name, float]]:
    """Yield what is known of a rank; a loss that is not finite is not."""
    progress = progress or {}
    pace = progress.get("steps_s")
    values = {
        "step": step,
        "step_s": 1 / pace if isinstance(pace, (int, float)) and pace > 0 else None,
        "rank_cpu": (vitals or {}).get("cpu"),
        **{kind: progress.get(kind) for kind in ("loss", "lr", "grad_norm", "rate")},
    }
    for kind, value in values.items():
        if _is_number(value):
            yield (kind, rank), float(value)


def of_node(vitals: Document | None) -> Iterator[tuple[Name, float]]:
    """Yield what is known of a node and its GPUs."""
    vitals = vitals or {}
    for kind, key in _OF_NODE.items():
        if _is_number(vitals.get(key)):
            yield (kind, -1), float(vitals[key])
    for gpu in vitals.get("gpus") or ():
        for kind, key in _OF_GPU.items():
            if _is_number(gpu.get(key)) and _is_number(gpu.get("index")):
                yield (kind, int(gpu["index"])), float(gpu[key])


def _is_number(value: Any) -> bool:
    # More than float32 has is unknown, too.
    return type(value) in (int, float) and abs(value) < 3e38
