"""The training of a job at a glance: progress, speed, remaining time, goodput, slow ranks. Pure.

In: a job view, the journal's runs and events, the history's series. Out: rows of the dashboard.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import textwrap
from typing import TYPE_CHECKING, Final, NamedTuple

from remote_agent.wire.events import EventType
from supervisor.tui.rows import charts
from supervisor.tui.rows.series import among
from supervisor.tui.rows.spans import EMPTY, fit, fit_row, row_width
from supervisor.tui.rows.tables import fit_parts
from supervisor.wording import usage, values
from supervisor.wording.goodput import KINDS as OF_TIME
from supervisor.wording.goodput import Measured, measure
from supervisor.wording.incidents import is_hang
from supervisor.wording.slow import slow_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remote_agent.wire.documents import JournalEvent, Status
    from supervisor.history import Series
    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import JobView
    from supervisor.tui.rows.spans import Row, Span
    from supervisor.wording.goodput import Goodput

KINDS: Final = ("loss", "rate", *OF_TIME)
BAR: Final = 20
# Each rank prints its own tokens and samples; all make the same steps.
SUMMED: Final = ("tok/s", "samples/s")


# --- in one line


class Newest(NamedTuple):
    """What the ranks' output says about the training now."""

    step: int | None
    total: int | None
    """The total number of steps; None where ranks count to different ends."""
    pace: float | None
    """Steps per second."""
    speed: str
    """The throughput of the whole job: `41k tok/s`, the sum of its ranks; or its steps per second."""
    loss: str
    printing: int
    """Ranks that print their throughput in tokens or samples."""
    unit: str

    @property
    def is_known(self) -> bool:
        """Whether more is known than the step, which stands above every screen."""
        return bool(self.total or self.speed or self.loss != "-")


def newest(job_view: JobView) -> Newest:
    """Read the progress of all ranks, once for a frame: there may be 512."""
    totals, paces, loss = set(), [], "-"
    rates: dict[str, list[float]] = {}
    for rank in job_view.ranks:
        progress = rank.progress
        if not progress:
            continue
        if (total := progress.get("total")) is not None:
            totals.add(total)
        if pace := progress.get("steps_s"):
            paces.append(pace)
        if loss == "-":
            loss = usage.figure(progress.get("loss"))
        rate, unit = progress.get("rate"), progress.get("unit")
        if rate is not None and unit in SUMMED:
            rates.setdefault(str(unit), []).append(rate)
    total = totals.pop() if len(totals) == 1 else None
    pace = statistics.median(paces) if paces else None
    unit = next((each for each in SUMMED if each in rates), "step/s")
    return Newest(
        job_view.train_step,
        None if total is None else int(total),
        pace,
        f"{usage.short(sum(rates[unit]))} {unit}" if unit in rates else _pace_text(pace),
        loss,
        len(rates.get(unit, ())),
        unit,
    )


def _pace_text(pace: float | None) -> str:
    return "" if not pace else f"{pace:.3g} step/s" if pace >= 0.1 else f"{1 / pace:.0f} s/step"


def progress_row(now: Newest, cost: Goodput | None, width: int, glyphs: Glyphs, *, ended: bool = False) -> Row:
    """Return progress, speed, remaining time, and the goodput."""
    step, total, pace = now.step, now.total, now.pace
    dot = f" {glyphs.dot} "
    parts: list[tuple[int, Row]] = []
    if step is not None and total:
        parts.append((7, (*charts.bar(step / total, BAR, glyphs), (" ", ""))))
        parts.append((10, ((f"{step:,}/{total:,}", "text"), (dot, "rule"), (f"{100 * step // total} %", "text"))))
    elif step is not None:
        parts.append((10, ((f"step {step:,}", "text"),)))
    if step is not None and total and pace and not ended:
        parts.append((9, (("ETA ", "dim"), (values.elapsed((total - step) / pace), "text"))))
    if now.speed:
        parts.append((8, ((now.speed, "text"),)))
    if now.loss != "-":
        parts.append((6, (("loss ", "dim"), (now.loss, "bad" if now.loss.lstrip("-") in ("nan", "inf") else "text"))))
    if cost is not None:
        role = "text" if cost.share >= 0.9 else "warn"
        room = width - sum(row_width(row) + 3 for _, row in parts) - 1
        text = cost.text()
        parts.append((5, ((text if len(text) <= room else cost.text(details=False), role),)))
    return ((" ", ""), *fit_parts(parts, width - 1, glyphs.more)) if parts else EMPTY


# --- the whole dashboard


@dataclasses.dataclass(frozen=True)
class Training:
    """What the dashboard shows besides the newest state."""

    series: Series | None
    runs: tuple[tuple[float, float], ...]
    """The time from which, and to which, each group ran; to infinity: it runs."""
    marks: tuple[tuple[float, str], ...]
    """The time when something happened: restart, failure, hang."""
    measured: Measured


def gather(events: Sequence[JournalEvent], series: Series | None) -> Training:
    """Fold the journal for the dashboard."""
    began = 0
    runs: list[tuple[float, float]] = []
    marks: list[tuple[float, str]] = []
    running: float | None = None
    for event in events:
        kind, moment = event.get("type"), values.local_time(event.get("time"))
        if moment is None:
            continue
        time_s = moment.timestamp()
        if kind == EventType.GENERATION_STARTED:
            began += 1
            if began > 1:
                marks.append((time_s, "restart"))
        elif kind == EventType.GENERATION_RUNNING:
            running = time_s
        elif kind == EventType.INCIDENT:
            if not event["detail"].get("preliminary"):
                marks.append((time_s, "hang" if is_hang(event["detail"]) else "failure"))
        elif kind in _STOPS and running is not None:
            runs.append((running, time_s))
            running = None
    if running is not None:
        runs.append((running, math.inf))
    return Training(series, tuple(runs), tuple(marks), measure(events, series))


_STOPS: Final = (
    EventType.GENERATION_STOPPED,
    EventType.JOB_SUCCEEDED,
    EventType.JOB_FAILED,
    EventType.JOB_STOPPED,
)


def _left(width: int) -> int:
    """Return cells for the curves; the strips are beside them."""
    return width * 3 // 5


def time_at(training: Training, cell: int, width: int) -> float | None:
    """Return the time of a cell of the curves and of the line below, exactly that of a mark; None beside them."""
    series, inner = training.series, _left(width) - charts.GUTTER
    cell -= charts.GUTTER
    if series is None or not 0 <= cell < inner:
        return None
    scale = series.buckets * series.width_s / inner
    marked = (time_s for time_s, _ in training.marks if int((time_s - series.begin_s) / scale) == cell)
    return next(marked, series.begin_s + (cell + 0.5) * scale)


def dashboard(job_view: JobView, now: Newest, training: Training, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Return the rows below the line of progress: curves and time line at the left, the ranks' strips at the right."""
    if height <= 0 or training.series is None:
        return []
    left = _left(width)
    saved = [(one["time_ns"] / 1e9, "snapshot") for one in job_view.status.get("snapshots") or ()]
    curves = _curves(training.series, training, now, left, height, glyphs, saved)
    strips = _strips(training.series, job_view, width - left - 2, height, glyphs)
    return [(*fit_row(curves[at], left, glyphs.more), ("  ", ""), *strips[at]) for at in range(height)]


def _curves(
    series: Series,
    training: Training,
    now: Newest,
    width: int,
    height: int,
    glyphs: Glyphs,
    saved: list[tuple[float, str]],
) -> list[Row]:
    inner = width - charts.GUTTER
    loss = among("loss", usage.figure, series.of("loss"), None)
    speeds, unit = _speeds(series, now)
    # One line shows the time; the loss gets two thirds of the others.
    lines = height - 1
    low = 0 if not charts.known(speeds) else lines if not loss.is_known else max(1, lines // 3)
    rows: list[Row] = []
    if loss.is_known:
        rows += charts.chart_rows(loss, width, lines - low, glyphs, names=("loss",))
    if low:
        top = charts.bounds(speeds)
        rows += charts.labelled(
            charts.filled(speeds, inner, low, glyphs), (0.0, top[1]) if top else None, (unit,), usage.short_speed, "ok"
        )
    rows += [EMPTY] * (lines - len(rows))
    end_s = series.begin_s + series.buckets * series.width_s
    # If marks share a cell, the last one hides the others: a failure is seen, not the restart after it.
    ordered = sorted((*saved, *training.marks), key=lambda one: list(_MARKS).index(one[1]))
    marks = [(time_s, *_mark(what, glyphs)) for time_s, what in ordered]
    line = charts.time_line(series.begin_s, end_s, inner, glyphs, runs=training.runs, marks=marks)
    span = values.age(end_s - series.begin_s)
    rows.append(((fit(span, charts.GUTTER - 1, glyphs.more) + " ", "dim"), *line))
    return rows


_MARKS: Final = {
    "snapshot": ("S", "◆", "accent"),
    "restart": ("R", "▲", "warn"),
    "failure": ("X", "✖", "bad"),
    "hang": ("?", "?", "hung"),
}


def _mark(what: str, glyphs: Glyphs) -> tuple[str, str]:
    plain, drawn, role = _MARKS[what]
    return (plain if glyphs.ascii else drawn), role


def _speeds(series: Series, now: Newest) -> tuple[list[float], str]:
    """Return the throughput of the whole job by bucket, with its unit."""
    rates = charts.means(series.of("rate").values())
    if now.printing and charts.known(rates):
        # If there are many ranks, only some were asked.
        return [rate * now.printing for rate in rates], now.unit
    return [1 / value if value else math.nan for value in charts.means(series.of("step_s").values())], "step/s"


# --- the strips of the ranks


def _strips(series: Series, job_view: JobView, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Return a strip of each rank's step times, under a heading; of too many ranks those with the highest values.

    Below them stands for whom the others wait.
    """
    steps, slow = series.of("step_s"), _slow(job_view.status)
    said = [part for one in job_view.status.get("slow", ()) for part in textwrap.wrap(slow_line(one), max(20, width))]
    height = max(0, height - len(said))
    rows = [(rank, steps[rank.rank]) for rank in job_view.ranks if rank.rank in steps]
    lines: list[Row] = []
    if rows:
        usual = charts.usual(row for _, row in rows)
        if len(rows) > height - 1:
            worst = sorted(rows, key=lambda one: -max(charts.known(one[1]), default=0.0))[: height - 1]
            shown = {rank.rank for rank, _ in worst}
            rows = [one for one in rows if one[0].rank in shown]
        label = max((len(f"{rank.rank} {rank.node}") for rank, _ in rows), default=0) + 1
        note = " slow" if slow else ""
        median = "" if usual is None else f"  median {values.duration(usual)}"
        lines.append((("step time by rank", "head"), (median, "dim")))
        for rank, row in rows:
            odd = rank.rank in slow or rank.node in slow
            strip = charts.heat(row, usual, max(0, width - label - len(note) - 1), glyphs)
            name: Span = (f"{f'{rank.rank} {rank.node}':<{label}}", "bad" if odd else "dim")
            lines.append((name, *strip, (note if odd else " " * len(note), "bad")))
    lines = [*(lines[:height] if said else lines), *(((part, "warn"),) for part in said)]
    height += len(said)
    return [fit_row(line, width, glyphs.more) for line in (lines + [EMPTY] * height)[:height]]


def _slow(status: Status) -> set[object]:
    """Return the ranks, and nodes, that the others wait for most of the time."""
    return {who for one in status.get("slow", ()) for who in one["ranks"] or (one["node"],)}
