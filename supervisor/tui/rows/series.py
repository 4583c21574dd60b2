"""The history of a rank, a node and its GPUs as charts, and as the wall of GPUs. Pure.

In: series of the agents' history, rows of a job view. Out: what is asked for, charts, rows.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from supervisor.tui.rows import charts
from supervisor.tui.rows.charts import Chart
from supervisor.tui.rows.spans import fit, row_width
from supervisor.wording import usage, values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from remote_agent.wire.documents import GpuVitals
    from supervisor.history import Series
    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import JobView, NodeRow, RankRow
    from supervisor.tui.rows.spans import Row, Span

T = TypeVar("T")


def _speed(value: float) -> str:
    # Ranks often differ by less than what a short text shows.
    return f"{value:,.0f}" if 99.5 <= value < 999_999.5 else usage.short_speed(value)


# The throughput and the use of GPUs are shown at 80x24, too; the rest has room on larger screens.
_RANK: Final[dict[str, tuple[str, Callable[[float], str]]]] = {
    "loss": ("loss", usage.figure),
    "rate": ("rate", _speed),
    "gpu_use": ("gpu use", usage.percent),
    "step_s": ("step time", values.duration),
    "grad_norm": ("grad norm", usage.figure),
    "lr": ("lr", usage.figure),
}
_NODE: Final[dict[str, tuple[str, Callable[[float], str]]]] = {
    "gpu_use": ("gpu use", usage.percent),
    "cpu": ("cpu", usage.percent),
    "mem": ("memory", usage.size),
}
NODE_KINDS: Final = tuple(_NODE)
# If there are more ranks than this, only those with problems and the first ones are asked for; so it is with nodes.
MOST: Final = 64


def chosen(job_view: JobView) -> list[int] | None:
    """Return the ranks whose history is wanted where that of all is too much; None: all."""
    if len(job_view.ranks) <= MOST:
        return None
    odd = [rank.rank for rank in job_view.ranks if rank.has_problem or rank.progress.get("lag")]
    return list(dict.fromkeys((*odd, *(rank.rank for rank in job_view.ranks))))[:MOST]


def chosen_nodes(job_view: JobView, node: str) -> list[str] | None:
    """Return the nodes whose history is wanted beside that of one node; None: all."""
    if len(job_view.nodes) <= MOST:
        return None
    odd = [other.name for other in job_view.nodes if other.state != "running"]
    return list(dict.fromkeys((node, *odd, *(other.name for other in job_view.nodes))))[:MOST]


def asked(job_view: JobView, rank: int | None) -> tuple[tuple[str, ...], list[int] | None]:
    """Return the kinds and the ranks whose history is wanted for the charts of a rank; None: all."""
    ranks = chosen(job_view)
    if ranks is None:
        return tuple(_RANK), None
    # GPUs are not numbered as ranks are: all of them would be sent.
    own = [] if rank is None else [rank]
    return tuple(kind for kind in _RANK if kind != "gpu_use"), list(dict.fromkeys((*own, *ranks)))


def rank_title(job_view: JobView, rank: int | None) -> str:
    """Return what the charts of a rank, or of all ranks, are of."""
    return _title("" if rank is None else f"rank {rank}", chosen(job_view), len(job_view.ranks), "ranks")


def node_title(job_view: JobView, node: str) -> str:
    """Return what the charts of a node are of."""
    return _title(f"node {node}", chosen_nodes(job_view, node), len(job_view.nodes), "nodes")


def _title(one: str, some: Sequence[object] | None, total: int, of: str) -> str:
    others = f"all {of}" if some is None else f"{len(some)} of {total} {of}"
    return f"history of {one} beside {others}" if one and total > 1 else f"history of {one or others}"


def rank_charts(series: Series, ranks: Iterable[RankRow], rank: int | None) -> list[Chart]:
    """Return what is known of a rank beside all others, or of all of them."""
    used = {}
    for row in ranks:
        gpu = row.vitals.get("gpu")
        span = None if gpu is None else series.nodes.get((row.node, "gpu_use", gpu))
        if span is not None:
            used[row.rank] = span.mean
    drawn = [
        among(name, text, used if kind == "gpu_use" else series.of(kind), rank) for kind, (name, text) in _RANK.items()
    ]
    return [chart for chart in drawn if chart.is_known]


def node_charts(series: Series, node: str) -> list[Chart]:
    """Return the use of a node's GPUs, processors and memory beside that of the other nodes."""

    def rows(kind: str) -> dict[str, Sequence[float]]:
        found: dict[str, list[Sequence[float]]] = {}
        for (name, one, _), span in series.nodes.items():
            if one == kind:
                found.setdefault(name, []).append(span.mean)
        return {name: charts.means(spans) for name, spans in found.items()}

    drawn = [among(name, text, rows(kind), node) for kind, (name, text) in _NODE.items()]
    return [chart for chart in drawn if chart.is_known]


def among(name: str, text: Callable[[float], str], rows: Mapping[T, Sequence[float]], selected: T | None) -> Chart:
    """Return a chart of the selected row over the median and the range of all rows."""
    columns = [charts.known(column) or [math.nan] for column in zip(*rows.values(), strict=True)]
    own = () if selected is None else rows.get(selected, ())
    median = list(map(statistics.median, columns))
    if len(rows) < 2:
        return Chart(name, text, own or median)
    return Chart(name, text, own, median, list(map(min, columns)), list(map(max, columns)))


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
