"""The history of a rank, a node and its GPUs as charts, and as the wall of GPUs. Pure.

In: series of the agents' history, rows of a job view. Out: charts, rows.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Final, NamedTuple

from supervisor.tui.rows import charts
from supervisor.tui.rows.charts import Chart
from supervisor.tui.rows.spans import fit, row_width
from supervisor.wording import usage, values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from remote_agent.wire.documents import GpuVitals
    from supervisor.history import Series
    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import NodeRow
    from supervisor.tui.rows.spans import Row, Span


def _speed(value: float) -> str:
    # Ranks often differ by less than what a short text shows.
    return f"{value:,.0f}" if 99.5 <= value < 999_999.5 else usage.short_speed(value)


_RANK: Final[dict[str, tuple[str, Callable[[float], str]]]] = {
    "loss": ("loss", usage.figure),
    "rate": ("rate", _speed),
    "step_s": ("step time", values.duration),
    "grad_norm": ("grad norm", usage.figure),
    "lr": ("lr", usage.figure),
}
RANK_KINDS: Final = tuple(_RANK)
_NODE: Final[dict[str, tuple[str, Callable[[float], str]]]] = {
    "cpu": ("cpu", usage.percent),
    "mem": ("memory", usage.size),
}
NODE_KINDS: Final = tuple(_NODE)


def rank_charts(series: Series, rank: int, beside: Sequence[int]) -> list[Chart]:
    """Return what is known of a rank, beside another rank, or the median and the range of several."""
    drawn = []
    for kind, (name, text) in _RANK.items():
        buckets = series.ranks.get((kind, rank))
        if buckets is not None:
            others = {other: series.ranks[kind, other].mean for other in beside if (kind, other) in series.ranks}
            drawn.append(_beside(Chart(name, buckets.mean, text, low=buckets.low, high=buckets.high), others))
    return [chart for chart in drawn if chart.is_known]


def _beside(chart: Chart, others: Mapping[int, Sequence[float]]) -> Chart:
    if len(others) == 1:
        ((rank, means),) = others.items()
        return chart._replace(other_name=f"rank {rank}", other=means, low=(), high=())
    several = chart._replace(range_name=f"{len(others)} ranks", other_name="median")
    return among(several, list(others.values())) if others else chart


def among(chart: Chart, rows: Sequence[Sequence[float]]) -> Chart:
    """Return a chart over the median and the range of several series."""
    columns = [charts.known(column) or [math.nan] for column in zip(*rows, strict=True)]
    return chart._replace(
        other=[statistics.median(column) for column in columns] if chart.other_name else (),
        low=[min(column) for column in columns],
        high=[max(column) for column in columns],
    )


def node_charts(series: Series, node: str) -> list[Chart]:
    """Return the use of a node's processors and memory."""
    drawn = []
    for kind, (name, text) in _NODE.items():
        buckets = series.nodes.get((node, kind, -1))
        if buckets is not None:
            drawn.append(Chart(name, buckets.mean, text, low=buckets.low, high=buckets.high))
    return [chart for chart in drawn if chart.is_known]


# --- the wall of GPUs


class _Gauge(NamedTuple):
    """One value of each GPU: its share of what is possible, and its text."""

    name: str
    kind: str
    """In the history."""
    read: Callable[[GpuVitals], float | None]
    most: Callable[[GpuVitals], float | None]
    """What is possible."""
    text: Callable[[GpuVitals], str]


def _power(gpu: GpuVitals) -> str:
    power, limit = gpu.get("power"), gpu.get("power_limit")
    return usage.unit(power, "W") if power is None or limit is None else f"{power:.0f}/{limit:.0f}W"


_GAUGES: Final = (
    _Gauge("use", "gpu_use", lambda gpu: gpu.get("use"), lambda _: 100.0, lambda gpu: usage.percent(gpu.get("use"))),
    _Gauge("memory", "gpu_mem", lambda gpu: gpu.get("mem_used"), lambda gpu: gpu.get("mem_total"), usage.MEMORY.text),
    _Gauge("power", "gpu_power", lambda gpu: gpu.get("power"), lambda gpu: gpu.get("power_limit"), _power),
    _Gauge("temp", "gpu_temp", lambda gpu: gpu.get("temp"), lambda _: 100.0, lambda g: usage.unit(g.get("temp"), "C")),
)
GPU_KINDS: Final = tuple(gauge.kind for gauge in _GAUGES)
# A strip has at most this many lines; from this many cells on, a gauge has a strip beside its bar.
_STRIP_MAX, _STRIP_FROM = 2, 6
_GAP: Final = 2


def gpu_wall(node: NodeRow, series: Series | None, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Return a bar, the value and the history of each gauge of each GPU; strips are higher where `height` has room."""
    gpus = usage.gpus_of(node.vitals)
    if not gpus:
        return []
    label = max(len(f"  gpu {_index(gpu)}") for gpu in gpus) + _GAP
    texts = [max(len(gauge.name) - 1, *(len(gauge.text(gpu)) for gpu in gpus)) for gauge in _GAUGES]
    room = (width - label - sum(texts)) // len(_GAUGES) - 2 - _GAP
    strip = max(0, room * 2 // 3 if room >= _STRIP_FROM else 0)
    bar = max(0, room - strip)
    lines = (height - 1) // len(gpus)
    blocks = [bar + 1 + text + 1 + strip for text in texts]
    names = "".join(fit(gauge.name, block + _GAP) for gauge, block in zip(_GAUGES, blocks, strict=True))
    rows: list[Row] = [((" " * label, ""), (names, "head"))]
    for gpu in gpus:
        parts = [_gauge(node, gpu, gauge, series, (bar, text, strip), max(1, min(_STRIP_MAX, lines - 1)), glyphs)
                 for gauge, text in zip(_GAUGES, texts, strict=True)]  # fmt: skip
        head = fit(f"  gpu {_index(gpu)}", label)
        for at, line in enumerate(zip(*parts, strict=True)):
            rows.append(((head if not at else " " * label, "dim"), *(span for part in line for span in part)))
        is_bad = bool(gpu.get("ecc")) or gpu.get("xid") is not None
        if lines > 1 or is_bad:
            rows.append(((" " * label, ""), (_facts(gpu), "bad" if is_bad else "dim")))
    return rows


def _index(gpu: GpuVitals) -> str:
    return usage.unit(gpu.get("index"), "")


def _facts(gpu: GpuVitals) -> str:
    facts = (
        ("", usage.unit(gpu.get("clock"), "MHz")),
        ("ecc errors ", usage.unit(gpu.get("ecc"), "")),
        ("Xid ", usage.unit(gpu.get("xid"), "")),
    )
    return "   ".join(name + text for name, text in facts if text != "-")


def _gauge(
    node: NodeRow,
    gpu: GpuVitals,
    gauge: _Gauge,
    series: Series | None,
    sizes: tuple[int, int, int],
    lines: int,
    glyphs: Glyphs,
) -> list[Row]:
    """Return one gauge in `lines` rows: its bar, its value and its history, each with so many cells."""
    bar, text, strip = sizes
    value, most = gauge.read(gpu), gauge.most(gpu)
    share = value / most if value is not None and most else 0.0
    role = "off" if node.vitals_old else "text"
    now: list[Span] = [*charts.bar(share, bar, glyphs), (f" {gauge.text(gpu):>{text}} ", role)]
    index = gpu.get("index")
    buckets = None if series is None or index is None else series.nodes.get((node.name, gauge.kind, index))
    past = [] if buckets is None else buckets.mean
    drawn = charts.filled(past, strip, lines, glyphs, most) if charts.bounds(past) else [" " * strip] * lines
    return [
        (*(now if not at else [(" " * row_width(now), "")]), (line, "ok"), (" " * _GAP, ""))
        for at, line in enumerate(drawn)
    ]
