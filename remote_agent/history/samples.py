"""What of a status goes into the history.

In: a rank's progress, a node's usage, as the status document has them. Out: values by name. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remote_agent.history.pyramid import Name
    from remote_agent.wire.documents import NodeVitals, RankProgress

RANK_KINDS = ("step", "loss", "lr", "grad_norm", "rate", "step_s", "input", "checkpoint")
"""A rank's last step, loss, learning rate, gradient norm, throughput, and seconds of a step; the shares of its time in
which it loads data and saves checkpoints, while it is sampled."""
# A node has percent of its processors and bytes of memory.
_OF_NODE = {"cpu": "cpu", "mem": "mem_used"}
# A GPU has percent, bytes, watts and degrees Celsius.
_OF_GPU = {"gpu_use": "use", "gpu_mem": "mem_used", "gpu_power": "power", "gpu_temp": "temp"}


def of_rank(rank: int, step: int | None, progress: RankProgress | None) -> Iterator[tuple[Name, float]]:
    """Yield what is known of a rank; a loss that is not finite is not."""
    own: Mapping[str, object] = progress or {}
    pace = _number(own.get("steps_s"))
    values: dict[str, object] = {
        "step": step,
        "step_s": 1 / pace if pace is not None and pace > 0 else None,
        **{kind: own.get(kind) for kind in ("loss", "lr", "grad_norm", "rate")},
    }
    yield from _known(values, rank)


def of_node(vitals: NodeVitals | None) -> Iterator[tuple[Name, float]]:
    """Yield what is known of a node and its GPUs."""
    vitals = vitals or {}
    yield from _known(_renamed(_OF_NODE, vitals), -1)
    for gpu in vitals.get("gpus") or ():
        if (index := gpu.get("index")) is not None:
            yield from _known(_renamed(_OF_GPU, gpu), index)


def _renamed(names: Mapping[str, str], vitals: Mapping[str, object]) -> dict[str, object]:
    return {kind: vitals.get(key) for kind, key in names.items()}


def _known(values: Mapping[str, object], of: int) -> Iterator[tuple[Name, float]]:
    for kind, value in values.items():
        if (number := _number(value)) is not None:
            yield (kind, of), number


def _number(value: object) -> float | None:
    # More than float32 has is unknown, too.
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < 3e38 else None
