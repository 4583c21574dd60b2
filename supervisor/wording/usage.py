"""Resource usage of nodes, GPUs and ranks as short text, the same on the screen and in `status`. Pure.

In: vitals and progress of a status document. Out: text of few characters; `-` where nothing is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]
# A measurement older than this many intervals is stale.
OLD_ROUNDS = 3
_RATES = ("tok/s", "samples/s", "it/s")
_UNITS = ("B", "K", "M", "G", "T", "P")


def is_old(vitals: Document) -> bool:
    """Return whether the vitals of a node are too old to be shown as current."""
    age, every = vitals.get("age_s"), vitals.get("every_s")
    return age is None or every is None or age > OLD_ROUNDS * every


def percent(value: float | None) -> str:
    """Return `43%`."""
    return "-" if value is None else f"{value:.0f}%"


def size(value: float | None) -> str:
    """Return bytes as `109B`, `800M`, `1.2G`, `71G`."""
    if value is None:
        return "-"
    power = _power(value)
    scaled = value / 1024**power
    return f"{scaled:.1f}{_UNITS[power]}" if power and scaled < 9.95 else f"{scaled:.0f}{_UNITS[power]}"


def share(used: float | None, total: float | None) -> str:
    """Return used and total bytes as `71/80G`, or `201G/2.0T`."""
    if used is None or total is None:
        return size(used)
    power = _power(total)
    if used and _power(used) != power:
        return f"{size(used)}/{size(total)}"
    digits = 1 if total / 1024**power < 9.95 else 0
    return f"{used / 1024**power:.{digits}f}/{total / 1024**power:.{digits}f}{_UNITS[power]}"


def _power(value: float) -> int:
    return next((power for power in range(len(_UNITS) - 1) if value < 1000 * 1024**power), len(_UNITS) - 1)


def traffic(vitals: Document) -> str:
    """Return bytes per second, in and out, as `1.2G/800M`."""
    into, out = vitals.get("net_in"), vitals.get("net_out")
    return "-" if into is None and out is None else f"{size(into)}/{size(out)}"


def short(value: float) -> str:
    """Return `987`, `4.1k`, `41k` or `1.2M`."""
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5 or unit == "G":
            return f"{value:.0f}{unit}" if not unit or abs(value) >= 9.95 else f"{value:.1f}{unit}"
        value /= 1000
    raise ValueError(value)


def short_speed(value: float) -> str:
    """Return a throughput in at most five characters."""
    return short(value) if value >= 9.95 else f"{value:.2g}"


def figure(value: float | str | None) -> str:
    """Return a loss as `1.883`, `6.1e-06` or `nan`."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def rate(progress: Document) -> str:
    """Return a throughput as `96,021 tok/s`; if the script prints none, steps per second."""
    value, unit = progress.get("rate"), progress.get("unit")
    if value is None or unit not in _RATES:
        value, unit = progress.get("steps_s"), "step/s"
    if value is None:
        return "-"
    return f"{value:,.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"


def gpus_of(vitals: Document) -> Sequence[Document]:
    """Return a node's GPUs."""
    return vitals.get("gpus") or ()


def own_gpu(node: Document, rank: Document) -> Document:
    """Return the GPU that a rank uses, from the vitals of its node; empty if there is none."""
    index = rank.get("gpu")
    return next((gpu for gpu in gpus_of(node) if gpu.get("index") == index), {}) if index is not None else {}


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# --- columns of `status`

NODE_HEAD = ("CPU", "MEM", "DISK FREE", "NET IN/OUT", "GPU")
RANK_HEAD = ("LOSS", "RATE", "LAG", "CPU", "RSS", "GPU", "GPU MEM", "TEMP", "POWER")


def node_cells(node: Document) -> list[str]:
    """Return the cells below NODE_HEAD; `-` for stale values."""
    vitals = node.get("vitals") or {}
    if not vitals or is_old(vitals):
        return ["-"] * len(NODE_HEAD)
    return [
        percent(vitals.get("cpu")),
        share(vitals.get("mem_used"), vitals.get("mem_total")),
        size(vitals.get("disk_free")),
        traffic(vitals),
        percent(mean([gpu.get("use") for gpu in gpus_of(vitals)])),
    ]


def rank_cells(node: Document, rank: Document) -> list[str]:
    """Return the cells below RANK_HEAD; `-` for stale values."""
    host, progress = node.get("vitals") or {}, rank.get("progress") or {}
    vitals = {} if is_old(host) else rank.get("vitals") or {}
    gpu = own_gpu(host, vitals)
    lag, temperature, power = progress.get("lag"), gpu.get("temp"), gpu.get("power")
    return [
        figure(progress.get("loss")),
        rate(progress),
        "-" if lag is None else f"{lag:.0f}",
        percent(vitals.get("cpu")),
        size(vitals.get("rss")),
        percent(gpu.get("use")),
        share(gpu.get("mem_used"), gpu.get("mem_total")),
        "-" if temperature is None else f"{temperature:.0f}C",
        "-" if power is None else f"{power:.0f}W",
    ]


def known_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return head and rows without the columns that have no known value."""
    kept = [at for at in range(len(head)) if any(row[at] != "-" for row in rows)]
    return [[row[at] for at in kept] for row in (head, *rows)]
