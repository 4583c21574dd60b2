"""The usage of nodes, GPUs and ranks as columns and lines: unknown values are left out, old ones are dim.

In: rows of a job view, the history. Out: columns of the tables, lines of the detail panes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from supervisor.tui.rows import charts
from supervisor.tui.rows.tables import Column, flow, step_text
from supervisor.wording import usage, values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from remote_agent.wire.documents import GpuVitals, NodeVitals, RankVitals
    from supervisor.history import Series
    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import NodeRow, RankRow
    from supervisor.tui.rows.spans import Row
    from supervisor.wording.usage import UsageColumn

MOST_GPUS = 8
# The page of a rank shows the history of these values, by the name of their line.
_PAST_OF = {"loss": "loss", "rate": "rate", "pace": "step_s"}


def node_vitals(nodes: Sequence[NodeRow], glyphs: Glyphs) -> list[Column[NodeRow]]:
    """Return the usage columns of the node table that are known for at least one node."""

    def column(spec: UsageColumn, text: Callable[[NodeVitals], str], bars: int | None = None) -> Column[NodeRow]:
        def cell(node: NodeRow) -> Row:
            value = text(node.vitals) if node.vitals else "-"
            return ((value, "off" if node.vitals_old or value == "-" else "text"),)

        width = spec.width + (bars or 0)
        return Column(spec.name, width, cell, spec.keep, bars is None, lambda node: spec.value(node.vitals))

    # `status` has the GPUs last; here they come first, with a bar each.
    gpus = next(spec for spec in usage.NODE_COLUMNS if spec.keys == ("gpus",))
    others = [spec for spec in usage.NODE_COLUMNS if spec is not gpus]
    bars = min(MOST_GPUS, max((len(usage.gpus_of(node.vitals)) for node in nodes), default=0))
    columns = [column(gpus, lambda vitals: _gpus(vitals, glyphs), bars), *(column(spec, spec.text) for spec in others)]
    # The last usage of a removed node is of no interest.
    measured = [node for node in nodes if node.vitals and node.state != "removed"]
    known = [each for each in columns if any(each.cell(node)[0][0] != "-" for node in measured)]
    if any(node.vitals_old for node in measured):
        known.append(Column("old", 6, lambda node: _age(node.vitals, node.vitals_old), 2.7, at_right=True))
    return known


def _age(vitals: NodeVitals | RankVitals, old: bool) -> Row:
    return ((values.age(vitals.get("age_s")) if vitals and old else "", "warn"),)


def _gpus(vitals: NodeVitals, glyphs: Glyphs) -> str:
    """Return the mean, and one bar per GPU."""
    used = [gpu.get("use") for gpu in usage.gpus_of(vitals)]
    if not used:
        return "-"
    bars = "".join("-" if use is None else glyphs.level(use / 100) for use in used[:MOST_GPUS])
    return f"{usage.percent(usage.mean_use(usage.gpus_of(vitals))):>4} {bars}"


def rank_vitals(ranks: Sequence[RankRow]) -> list[Column[RankRow]]:
    """Return the columns for progress and usage of ranks: GPUs if there are any, otherwise processor and memory."""

    def column(spec: UsageColumn) -> Column[RankRow]:
        def cell(rank: RankRow) -> Row:
            value = spec.text(getattr(rank, spec.source))
            is_old = spec.source != "progress" and rank.vitals_old
            return ((value, "off" if value == "-" or is_old else "text"),)

        return Column(spec.name, spec.width, cell, spec.keep, True, lambda rank: spec.value(getattr(rank, spec.source)))

    left_out = "vitals" if any(rank.gpu for rank in ranks) else "gpu"
    columns = [column(spec) for spec in usage.RANK_COLUMNS if spec.source != left_out]
    known = [each for each in columns if any(each.cell(rank)[0][0] not in ("-", "0") for rank in ranks)]
    if any(rank.vitals_old for rank in ranks):
        known.append(Column("old", 6, lambda rank: _age(rank.vitals, rank.vitals_old), 3.5, at_right=True))
    return known


def _per_second(value: float | None) -> str:
    return "-" if value is None else f"{usage.size(value)}/s"


def node_usage_lines(node: NodeRow, width: int) -> list[Row]:
    """Return the usage of a node, without its GPUs."""
    vitals = node.vitals
    if not vitals:
        return []
    host = [
        ("cpu", usage.percent(vitals.get("cpu"))),
        ("memory", usage.MEMORY.text(vitals)),
        ("disk free", usage.size(vitals.get("disk_free"))),
        ("shm free", usage.size(vitals.get("shm_free"))),
    ]
    age, old = vitals.get("age_s"), node.vitals_old
    lines = _line("uses", host, age, width, old=old)
    net = [("in", _per_second(vitals.get("net_in"))), ("out", _per_second(vitals.get("net_out")))]
    lines += _line("net", net, age, width, old=old)
    return lines


def _gpu_line(gpu: GpuVitals, width: int, *, old: bool) -> list[Row]:
    limit = gpu.get("power_limit")
    facts = [
        ("", usage.percent(gpu.get("use"))),
        ("", usage.MEMORY.text(gpu)),
        ("", usage.unit(gpu.get("temp"), "C")),
        ("", usage.unit(gpu.get("power"), "W" if limit is None else f"/{limit:.0f}W")),
        ("", usage.unit(gpu.get("clock"), "MHz")),
        ("ecc errors", usage.unit(gpu.get("ecc"), "")),
        ("Xid", usage.unit(gpu.get("xid"), "")),
    ]
    bad = bool(gpu.get("ecc")) or gpu.get("xid") is not None
    return _line(
        f"gpu {usage.unit(gpu.get('index'), '')}",
        facts,
        gpu.get("age_s"),
        width,
        old=old,
        role="bad" if bad else "text",
    )


def _line(
    name: str, facts: Sequence[tuple[str, str]], age: float | None, width: int, *, old: bool, role: str = "text"
) -> list[Row]:
    """Return facts in as few lines as possible, without unknown ones; old ones with their age."""
    known: list[Row] = [
        ((f"{label} " if label else "", "dim"), (text, "off" if old else role)) for label, text in facts if text != "-"
    ]
    if old:
        known.append(((f"{values.age(age)} old", "warn"),))
    return flow(((f"  {name:<9}", "dim"),), known, width)


def rank_lines(rank: RankRow, series: Series | None, width: int, glyphs: Glyphs) -> list[Row]:
    """Return the facts of one rank, with its history as bars; without a series where charts show it."""
    state: Row = ((f"{rank.look.word}  {rank.outcome}".rstrip(), rank.look.role),)
    where = [((text, "dim"),) for text in (rank.node, f"local rank {rank.local_rank}", f"pid {rank.pid or '-'}")]
    lines = flow((("  state    ", "dim"),), [state, *where], width)
    if rank.step is not None:
        lag = rank.progress.get("lag")
        behind = f"   {lag:,.0f} behind the median" if lag else ""
        lines.append((("  step     ", "dim"), (step_text(rank.step), "text"), (behind, "warn")))
    now = {
        "loss": usage.figure(rank.progress.get("loss")),
        "rate": usage.RATE.text(rank.progress),
        "pace": _pace(rank),
    }
    used = [
        ("cpu", usage.percent(rank.vitals.get("cpu"))),
        ("resident", usage.size(rank.vitals.get("rss"))),
    ]
    for name, text in now.items():
        if text != "-":
            role = "bad" if text.lstrip("-") in ("nan", "inf") else "text"
            bars = _bars(name, _past_of(series, rank.rank, name), width - 28, glyphs)
            lines.append(((f"  {name:<9}", "dim"), (f"{text:<16}", role), *bars))
    if rank.vitals:
        lines += _line("uses", used, rank.vitals.get("age_s"), width, old=rank.vitals_old)
    if rank.gpu:
        lines += _gpu_line(rank.gpu, width, old=rank.vitals_old)
    return lines


def _pace(rank: RankRow) -> str:
    pace = rank.progress.get("steps_s")
    return f"{values.duration(1 / pace)}/step" if pace else "-"


_ENDS: dict[str, Callable[[float], str]] = {"loss": usage.figure, "rate": usage.short_speed, "pace": values.duration}


def _past_of(series: Series | None, rank: int, name: str) -> Sequence[float]:
    span = None if series is None else series.ranks.get((_PAST_OF[name], rank))
    return () if span is None else span.mean


def _bars(name: str, past: Sequence[float], width: int, glyphs: Glyphs) -> Row:
    """Return the history in one line, with its least and its greatest value."""
    ends = charts.bounds(past)
    if ends is None:
        return ()
    scale = f"  {_ENDS[name](ends[0])} to {_ENDS[name](ends[1])}"
    room = width - len(scale)
    (bars,) = charts.filled(past, max(0, room), 1, glyphs)
    return ((bars, "accent"), (scale, "dim")) if room > 0 else ()
