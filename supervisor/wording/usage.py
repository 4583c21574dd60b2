"""Resource usage of nodes, GPUs and ranks as short text, the same on the screen and in `status`. Pure.

In: vitals and progress of a status document. Out: text of few characters; `-` where nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.wire.documents import is_old

if TYPE_CHECKING:
    from remote_agent.wire.documents import (
        GpuVitals,
        NodeStatus,
        NodeVitals,
        RankStatus,
        RankVitals,
    )

_RATES = ("tok/s", "samples/s", "it/s")
_UNITS = ("B", "K", "M", "G", "T", "P")


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


def traffic(into: float | None, out: float | None) -> str:
    """Return bytes per second, in and out, as `1.2G/800M`."""
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


def unit(value: float | None, name: str) -> str:
    """Return a whole number with its unit: `66C`, `627W`."""
    return "-" if value is None else f"{value:.0f}{name}"


def rate(value: float | None, unit: str | None, steps_s: float | None) -> str:
    """Return a throughput as `96,021 tok/s`; if the script prints none, steps per second."""
    if value is None or unit not in _RATES:
        value, unit = steps_s, "step/s"
    if value is None:
        return "-"
    return f"{value:,.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"


def gpus_of(vitals: NodeVitals) -> Sequence[GpuVitals]:
    """Return a node's GPUs."""
    return vitals.get("gpus") or ()


def own_gpu(node: NodeVitals, rank: RankVitals) -> GpuVitals:
    """Return the GPU that a rank uses, from the vitals of its node; empty if there is none."""
    index = rank.get("gpu")
    nothing: GpuVitals = {}
    return next((gpu for gpu in gpus_of(node) if index is not None and gpu.get("index") == index), nothing)


def mean_use(gpus: Sequence[GpuVitals] | None) -> float | None:
    """Return the mean use of a node's GPUs, of those whose use is known."""
    known = [use for gpu in gpus or () if (use := gpu.get("use")) is not None]
    return sum(known) / len(known) if known else None


# --- columns of `status`, and of the tables of screens


class UsageColumn(NamedTuple):
    """A column of nodes or ranks, from one document of theirs."""

    name: str
    """The name on screens; `status` writes it in capitals."""
    width: int
    """Cells on screens."""
    keep: float
    """The priority: where a screen has no room, columns with the lowest number go first."""
    source: str
    """The document: `vitals`, `progress`, or `gpu`, that of the GPU that a rank uses."""
    keys: tuple[str, ...]
    """The fields that the text is made of; screens sort by the first one."""
    form: Callable[..., str]
    falling: bool = True
    """Whether the greatest values are of interest."""

    def text(self, document: Mapping[str, object]) -> str:
        """Return its text, `-` if it is not known."""
        return self.form(*map(document.get, self.keys))

    def value(self, document: Mapping[str, object]) -> float | None:
        """Return what screens sort by: a number, of GPUs their mean use."""
        value = document.get(self.keys[0])
        return mean_use(value) if isinstance(value, list) else value if isinstance(value, (int, float)) else None


MEMORY = UsageColumn("mem", 9, 2.4, "vitals", ("mem_used", "mem_total"), share)
RATE = UsageColumn("rate", 14, 2, "progress", ("rate", "unit", "steps_s"), rate, falling=False)
NODE_COLUMNS = (
    UsageColumn("cpu", 4, 2.5, "vitals", ("cpu",), percent),
    MEMORY,
    UsageColumn("disk free", 9, 2.2, "vitals", ("disk_free",), size, falling=False),
    UsageColumn("net in/out", 11, 2.1, "vitals", ("net_in", "net_out"), traffic),
    UsageColumn("gpu%", 5, 2.6, "vitals", ("gpus",), lambda gpus: percent(mean_use(gpus))),
)
RANK_COLUMNS = (
    UsageColumn("loss", 9, 3, "progress", ("loss",), figure),
    RATE,
    UsageColumn("lag", 5, 2, "progress", ("lag",), lambda steps: "-" if steps is None else f"{steps:,.0f}"),
    UsageColumn("cpu", 5, 3, "vitals", ("cpu",), percent),
    UsageColumn("rss", 5, 3, "vitals", ("rss",), size),
    UsageColumn("gpu%", 4, 3, "gpu", ("use",), percent),
    UsageColumn("gpu mem", 8, 3, "gpu", ("mem_used", "mem_total"), share),
    UsageColumn("temp", 4, 2, "gpu", ("temp",), lambda value: unit(value, "C")),
    UsageColumn("power", 5, 2, "gpu", ("power",), lambda value: unit(value, "W")),
)
NODE_HEAD, RANK_HEAD = ([one.name.rstrip("%").upper() for one in table] for table in (NODE_COLUMNS, RANK_COLUMNS))


def node_cells(node: NodeStatus) -> list[str]:
    """Return the cells below NODE_HEAD; `-` for stale values."""
    vitals = node.get("vitals") or {}
    return [column.text({} if is_old(vitals) else vitals) for column in NODE_COLUMNS]


def rank_cells(node: NodeStatus, rank: RankStatus) -> list[str]:
    """Return the cells below RANK_HEAD; `-` for stale values."""
    host = node.get("vitals") or {}
    vitals = {} if is_old(host) else rank.get("vitals") or {}
    documents = {"progress": rank.get("progress") or {}, "vitals": vitals, "gpu": own_gpu(host, vitals)}
    return [column.text(documents[column.source]) for column in RANK_COLUMNS]


def known_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return head and rows without the columns that have no known value."""
    kept = [at for at in range(len(head)) if any(row[at] != "-" for row in rows)]
    return [[row[at] for at in kept] for row in (head, *rows)]
