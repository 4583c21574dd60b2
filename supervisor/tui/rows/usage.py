"""The usage of nodes, GPUs and ranks as columns and lines: unknown values are left out, old ones are dim.

In: rows of a snapshot, the history. Out: columns of the tables, lines of the detail panes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from supervisor.tui.rows import charts
from supervisor.tui.rows.tables import Column, flow, step_text
from supervisor.wording import usage, values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from supervisor.history import Series
    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import NodeRow, RankRow
    from supervisor.tui.rows.spans import Row
    from supervisor.tui.source import Json

MOST_GPUS = 8
# What the page of a rank shows the history of, and the name of its line.
PAST_KINDS = ("loss", "rate", "step_s")
_PAST_OF = {"loss": "loss", "rate": "rate", "pace": "step_s"}
# Lines of a curve.
CURVE_MIN, CURVE_MAX = 4, 10


def node_vitals(nodes: Sequence[NodeRow], glyphs: Glyphs) -> list[Column[NodeRow]]:
    """The usage columns of the node table that are known for at least one node."""

    def column(
        name: str,
        width: int,
        keep: float,
        text: Callable[[Json], str],
        value: Callable[[Json], float | None],
        *,
        at_right: bool = True,
    ) -> Column[NodeRow]:
        def cell(node: NodeRow) -> Row:
            said = text(node.vitals) if node.vitals else "-"
            return ((said, "off" if node.vitals_old or said == "-" else "text"),)

        return Column(name, width, cell, keep, at_right, lambda node: value(node.vitals))

    def number(key: str) -> Callable[[Json], float | None]:
        return lambda vitals: vitals.get(key)

    gpus = min(MOST_GPUS, max((len(usage.gpus_of(node.vitals)) for node in nodes), default=0))
    columns = [
        column("gpu%", 5 + gpus, 2.6, lambda vitals: _gpus(vitals, glyphs), _gpu_use, at_right=False),
        column("cpu", 4, 2.5, lambda vitals: usage.percent(vitals.get("cpu")), number("cpu")),
        column("mem", 9, 2.4, _memory, number("mem_used")),
        column("disk free", 9, 2.2, lambda vitals: usage.size(vitals.get("disk_free")), number("disk_free")),
        column("net in/out", 11, 2.1, usage.traffic, number("net_in")),
    ]
    # The last usage of a removed node is of no interest.
    measured = [node for node in nodes if node.vitals and node.state != "removed"]
    known = [each for each in columns if any(each.cell(node)[0][0] != "-" for node in measured)]
    if any(node.vitals_old for node in measured):
        known.append(Column("old", 6, lambda node: _age(node.vitals, node.vitals_old), 2.7, at_right=True))
    return known


def _age(vitals: Json, old: bool) -> Row:
    return ((values.age(vitals.get("age_s")) if vitals and old else "", "warn"),)


def _memory(vitals: usage.Document) -> str:
    return usage.share(vitals.get("mem_used"), vitals.get("mem_total"))


def _gpu_use(vitals: Json) -> float | None:
    used = [gpu.get("use") for gpu in usage.gpus_of(vitals)]
    return usage.mean(used) if used else None


def _gpus(vitals: Json, glyphs: Glyphs) -> str:
    """The mean, and one bar per GPU."""
    used = [gpu.get("use") for gpu in usage.gpus_of(vitals)]
    if not used:
        return "-"
    bars = "".join("-" if use is None else glyphs.level(use / 100) for use in used[:MOST_GPUS])
    return f"{usage.percent(usage.mean(used)):>4} {bars}"


def rank_vitals(ranks: Sequence[RankRow]) -> list[Column[RankRow]]:
    """The columns for progress and usage of ranks: GPUs if there are any, otherwise processor and memory."""

    def column(
        name: str,
        width: int,
        keep: float,
        text: Callable[[RankRow], str],
        value: Callable[[RankRow], Any],
        *,
        of_vitals: bool = True,
    ) -> Column[RankRow]:
        def cell(rank: RankRow) -> Row:
            said = text(rank)
            return ((said, "off" if said == "-" or (of_vitals and rank.vitals_old) else "text"),)

        return Column(name, width, cell, keep, True, value)

    def progress(key: str) -> Callable[[RankRow], Any]:
        return lambda rank: rank.progress.get(key)

    def gpu(key: str) -> Callable[[RankRow], Any]:
        return lambda rank: rank.gpu.get(key)

    def vital(key: str) -> Callable[[RankRow], Any]:
        return lambda rank: rank.vitals.get(key)

    columns = [
        column("loss", 9, 3, lambda rank: usage.figure(rank.progress.get("loss")), _loss, of_vitals=False),
        column("rate", 14, 2, lambda rank: usage.rate(rank.progress), progress("rate"), of_vitals=False),
        column("lag", 5, 2, _lag, progress("lag"), of_vitals=False),
    ]
    if any(rank.gpu for rank in ranks):
        columns += [
            column("gpu%", 4, 3, lambda rank: usage.percent(rank.gpu.get("use")), gpu("use")),
            column("gpu mem", 8, 3, lambda rank: _memory(rank.gpu), gpu("mem_used")),
            column("temp", 4, 2, lambda rank: _unit(rank.gpu.get("temp"), "C"), gpu("temp")),
            column("power", 5, 2, lambda rank: _unit(rank.gpu.get("power"), "W"), gpu("power")),
        ]
    else:
        columns += [
            column("cpu", 5, 3, lambda rank: usage.percent(rank.vitals.get("cpu")), vital("cpu")),
            column("rss", 5, 3, lambda rank: usage.size(rank.vitals.get("rss")), vital("rss")),
        ]
    known = [each for each in columns if any(each.cell(rank)[0][0] not in ("-", "0") for rank in ranks)]
    if any(rank.vitals_old for rank in ranks):
        known.append(Column("old", 6, lambda rank: _age(rank.vitals, rank.vitals_old), 3.5, at_right=True))
    return known


def _loss(rank: RankRow) -> float | None:
    loss = rank.progress.get("loss")
    return None if isinstance(loss, str) else loss


def _lag(rank: RankRow) -> str:
    lag = rank.progress.get("lag")
    return "-" if lag is None else f"{lag:,.0f}"


def _per_second(value: float | None) -> str:
    return "-" if value is None else f"{usage.size(value)}/s"


def _unit(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def node_usage_lines(node: NodeRow, width: int) -> list[Row]:
    """The usage of a node in full: host, then each GPU."""
    vitals = node.vitals
    if not vitals:
        return []
    host = [
        ("cpu", usage.percent(vitals.get("cpu"))),
        ("memory", _memory(vitals)),
        ("disk free", usage.size(vitals.get("disk_free"))),
        ("shm free", usage.size(vitals.get("shm_free"))),
    ]
    age, old = vitals.get("age_s"), node.vitals_old
    lines = _line("uses", host, age, width, old=old)
    net = [(way, _per_second(vitals.get(f"net_{way}"))) for way in ("in", "out")]
    lines += _line("net", net, age, width, old=old)
    for gpu in usage.gpus_of(vitals):
        lines += _gpu_line(gpu, width, old=old)
    return lines


def _gpu_line(gpu: usage.Document, width: int, *, old: bool) -> list[Row]:
    power, limit = gpu.get("power"), gpu.get("power_limit")
    facts = [
        ("", usage.percent(gpu.get("use"))),
        ("", usage.share(gpu.get("mem_used"), gpu.get("mem_total"))),
        ("", _unit(gpu.get("temp"), "C")),
        ("", "-" if power is None else f"{power:.0f}W" if limit is None else f"{power:.0f}/{limit:.0f}W"),
        ("", _unit(gpu.get("clock"), "MHz")),
        ("ecc errors", _unit(gpu.get("ecc"), "")),
        ("Xid", _unit(gpu.get("xid"), "")),
    ]
    bad = bool(gpu.get("ecc")) or gpu.get("xid") is not None
    return _line(
        f"gpu {_unit(gpu.get('index'), '')}",
        facts,
        gpu.get("age_s"),
        width,
        old=old,
        role="bad" if bad else "text",
    )


def _line(
    name: str, facts: Sequence[tuple[str, str]], age: float | None, width: int, *, old: bool, role: str = "text"
) -> list[Row]:
    """Facts in as few lines as possible, without unknown ones; old ones with their age."""
    shown: list[Row] = [
        ((f"{label} " if label else "", "dim"), (text, "off" if old else role)) for label, text in facts if text != "-"
    ]
    if old:
        shown.append(((f"{values.age(age)} old", "warn"),))
    return flow(((f"  {name:<9}", "dim"),), shown, width)


def rank_lines(rank: RankRow, series: Series | None, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """The facts of one rank, with its history since the launch: curves where `height` has room for them, else bars."""
    state: Row = ((f"{rank.look.word}  {rank.outcome}".rstrip(), rank.look.role),)
    where = [((text, "dim"),) for text in (rank.node, f"local rank {rank.local_rank}", f"pid {rank.pid or '-'}")]
    lines = flow((("  state    ", "dim"),), [state, *where], width)
    if rank.step is not None:
        lag = rank.progress.get("lag")
        behind = f"   {lag:,.0f} behind the median" if lag else ""
        lines.append((("  step     ", "dim"), (step_text(rank.step), "text"), (behind, "warn")))
    now = {
        "loss": usage.figure(rank.progress.get("loss")),
        "rate": usage.rate(rank.progress),
        "pace": _pace(rank),
    }
    used = [
        ("cpu", usage.percent(rank.vitals.get("cpu"))),
        ("resident", usage.size(rank.vitals.get("rss"))),
    ]
    curves = _rank_curves(rank, series, width, height - len(lines) - len(now) - len(used), glyphs)
    for name, text in now.items():
        if text != "-":
            role = "bad" if text.lstrip("-") in ("nan", "inf") else "text"
            bars = () if curves else _bars(name, _past_of(series, rank.rank, name), width - 28, glyphs)
            lines.append(((f"  {name:<9}", "dim"), (f"{text:<16}", role), *bars))
    if rank.vitals:
        lines += _line("uses", used, rank.vitals.get("age_s"), width, old=rank.vitals_old)
    if rank.gpu:
        lines += _gpu_line(rank.gpu, width, old=rank.vitals_old)
    return lines + curves


def _pace(rank: RankRow) -> str:
    pace = rank.progress.get("steps_s")
    return f"{values.duration(1 / pace)}/step" if pace else "-"


_ENDS: dict[str, Callable[[float], str]] = {"loss": usage.figure, "rate": usage.short_speed, "pace": values.duration}


def _past_of(series: Series | None, rank: int, name: str) -> Sequence[float]:
    span = None if series is None else series.ranks.get((_PAST_OF[name], rank))
    return () if span is None else span.mean


def _bars(name: str, past: Sequence[float], width: int, glyphs: Glyphs) -> Row:
    """The history in one line, with its least and its greatest value."""
    ends = charts.bounds(past)
    if ends is None:
        return ()
    scale = f"  {_ENDS[name](ends[0])} to {_ENDS[name](ends[1])}"
    room = width - len(scale)
    (bars,) = charts.filled(past, max(0, room), 1, glyphs)
    return ((bars, "accent"), (scale, "dim")) if room > 0 else ()


def _rank_curves(rank: RankRow, series: Series | None, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Curves of what is known of the rank, each with a line of its own above it."""
    known = {name: past for name in _PAST_OF if charts.bounds(past := _past_of(series, rank.rank, name)) is not None}
    # The throughput is the pace, in other units.
    known.pop("pace" if "rate" in known else "", None)
    each = min(CURVE_MAX, height // len(known) - 1) if known else 0
    if series is None or each < CURVE_MIN:
        return []
    rows: list[Row] = []
    for name, past in known.items():
        rows += [(), *charts.named_curve(name, past, width - charts.GUTTER - 2, each, glyphs, _ENDS[name])]
    return rows
