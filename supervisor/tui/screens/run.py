"""The run so far: its generations with why each began and ended, the phases of each restart, the journal.

In: job views, events. Out: a selection; ways to the logs and to what an event is about.
"""

from __future__ import annotations

import datetime
import math
from typing import TYPE_CHECKING, Final

from textual import on

from remote_agent.text.names import count
from supervisor.inventory.pattern import fold
from supervisor.tui import times
from supervisor.tui.generations import Run, Runs, bar
from supervisor.tui.history import Past
from supervisor.tui.rows import charts
from supervisor.tui.rows.series import chosen
from supervisor.tui.rows.tables import Column, Table, event_row, fact_lines, flow
from supervisor.tui.screens.base import LiveScreen
from supervisor.tui.shell import LogOf, Target
from supervisor.tui.training import SUMMED, newest
from supervisor.tui.widgets.picker import Picker
from supervisor.tui.widgets.tables import DetailPane
from supervisor.wording import usage, values
from supervisor.wording.events import phase_name, variables
from supervisor.wording.goodput import KINDS, NOTHING, Measured, goodput, measure
from supervisor.wording.status import environment, snapshot_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from textual.widget import Widget

    from remote_agent.wire.documents import Status
    from supervisor.history import Series
    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import JobView
    from supervisor.tui.rows.spans import Row, Span

# Each phase has a letter and a role; the letter alone tells them apart.
PHASES: Final = {
    "detect": ("d", "bad"),
    "stop": ("s", "warn"),
    "rendezvous": ("r", "key"),
    "spawn": ("p", "tag"),
    "main": ("m", "ok"),
    "imports": ("i", "start"),
    "process_group": ("g", "key"),
    "first_step": ("f", "ok"),
}
_LETTERS: Final = [f"{letter} {phase_name(name)}" for name, (letter, _) in PHASES.items()]
LEGEND: Final = "restart: " + "  ".join(_LETTERS[:5])
WIDE_LEGEND: Final = "restart: " + "  ".join(_LETTERS)
BAR: Final = 24
# From this width on, generations show their step time.
SPEEDS_FROM: Final = 100


def run_columns(
    runs: Sequence[Run], job_view: JobView, width: int, glyphs: Glyphs, series: Series | None = None
) -> list[Column[Run]]:
    """Return the columns of the table of generations; from the history, step time and throughput of each."""
    longest = max((run.took_ms or 0.0 for run in runs), default=0.0)
    columns: list[Column[Run]] = [
        Column("gen", 4, lambda run: ((f"g{run.number}", "title"),), 9),
        Column("began", 8, lambda run: ((values.clock(run.began_at), "time"),), 9),
        Column("after", 9, lambda run: ((run.began_by, "dim"),), 6),
        Column("world", 5, lambda run: ((str(run.world_size or "-"), "text"),), 5, at_right=True),
        Column("nodes", 5, lambda run: ((str(len(run.nodes) or "-"), "text"),), 4, at_right=True),
        Column("lasted", 12, lambda run: ((lasted(run), "dim"),), 7, at_right=True),
        Column("restart", 9, lambda run: ((_took(run), "text"),), 8, at_right=True),
    ]
    if series is not None and width >= SPEEDS_FROM:
        columns += speed_columns(runs, series, newest(job_view).unit)
    if width >= 120:
        columns.append(Column("phases", BAR, lambda run: tuple(bar_spans(run, longest, BAR, glyphs)), 3))
    columns.append(Column("ended", 0, lambda run: _outcome(run, job_view), 9))
    return columns


def speed_columns(runs: Sequence[Run], series: Series, unit: str) -> list[Column[Run]]:
    """Return the median step time of each generation, and its throughput if ranks print one in this unit."""
    speeds = {run.number: _speeds(run, series) for run in runs}

    def step_time(run: Run) -> Row:
        took_s = speeds[run.number][0]
        return (("-" if took_s is None else values.duration(took_s), "text"),)

    def rate(run: Run) -> Row:
        per_s = speeds[run.number][1]
        return (("-" if per_s is None else usage.short(per_s), "text"),)

    steps, rates = zip(*speeds.values(), strict=True) if speeds else ((), ())
    columns = [Column("step time", 9, step_time, 7.5, at_right=True)] if any(steps) else []
    return [*columns, Column(unit, 9, rate, 7.4, at_right=True)] if unit in SUMMED and any(rates) else columns


def _speeds(run: Run, series: Series) -> tuple[float | None, float | None]:
    """Return the median step time of a generation, and the throughput of all its ranks."""
    began, ended = values.local_time(run.began_at), values.local_time(run.ended_at)
    if began is None:
        return None, None
    # A bucket that another generation shares belongs to none.
    first = max(0, math.ceil((began.timestamp() - series.begin_s) / series.width_s))
    last = series.buckets
    if ended is not None:
        last = max(first, int((ended.timestamp() - series.begin_s) // series.width_s))
    step_s, rate = (charts.usual(row[first:last] for row in series.of(kind).values()) for kind in ("step_s", "rate"))
    return step_s, rate * run.world_size if rate is not None and run.world_size else None


def _outcome(run: Run, job_view: JobView) -> Row:
    if run.how:
        return ((run.how, run.role),)
    return ((job_view.look.word.lower(), job_view.look.role),)


def _took(run: Run) -> str:
    return values.duration(run.took_ms / 1000) if run.took_ms is not None else "-"


def lasted(run: Run) -> str:
    """Return its duration, until its end or now."""
    began = values.local_time(run.began_at)
    ended = values.local_time(run.ended_at) or datetime.datetime.fromtimestamp(times.now(), tz=datetime.timezone.utc)
    return values.duration(max(0.0, (ended - began).total_seconds())) if began is not None else "-"


def bar_spans(run: Run, longest_ms: float, width: int, glyphs: Glyphs) -> list[Span]:
    """Return the phases of its restart, each as long as it took; a letter tells them apart without colours."""
    line = "-" if glyphs.ascii else "━"
    return [
        (PHASES[name][0] + line * (cells - 1), PHASES[name][1]) for name, cells in bar(run.phases, longest_ms, width)
    ]


def run_lines(
    run: Run,
    job_view: JobView,
    status: Status,
    differs: Sequence[tuple[str, dict[str, tuple[str, ...]]]],
    width: int,
    glyphs: Glyphs,
    hours: str = "",
) -> list[Row]:
    """Return facts about one generation, and about the whole job; `hours`: what those of all devices went to."""
    facts: list[tuple[str, str, str]] = []
    facts.append(("began", f"{values.clock(run.began_at)}, {run.because}", "text"))
    if run.how:
        facts.append(("ended", f"{values.clock(run.ended_at)} after {lasted(run)}: {run.how}", run.role))
    lines = fact_lines(facts, width)
    if run.phases:
        lines += _restart(run, width, glyphs)
    mark = "S" if glyphs.ascii else "◆"
    lines += fact_lines([("saved", f"{mark} {words}", "key") for words in _saved(run, status)], width)
    ranks = f"{run.world_size or '?'} ranks on {fold(run.nodes)}"
    charged = f"restarts {run.restarts}/{job_view.max_restarts or 0}"
    more = [("world", f"{ranks}   {charged}", "text")]
    if hours:
        more.append(("spent", hours, "text"))
    if run.starts:
        more.append(("ranks", run.starts, "text"))
    if run.tree:
        more.append(("code", run.tree, "text"))
    if run.env:
        more.append(("set", variables({"env": run.env}), "text"))
    if (overrides := status.get("environment")) and environment(status) and run.env != overrides["env"]:
        more.append(("to set", environment(status), "warn"))
    for name, by_value in differs:
        text = "; ".join(f"{value} on {fold(nodes)}" for value, nodes in by_value.items())
        more.append(("differs", f"{name}: {text}", "warn"))
    if job_view.script:
        more.append(("command", job_view.script, "dim"))
    return lines + fact_lines(more, width)


def _saved(run: Run, status: Status) -> list[str]:
    """Return the kept snapshots that this generation has written, newest first; `x b` goes back to one."""
    began, ended = values.local_time(run.began_at), values.local_time(run.ended_at)
    snapshots = []
    for one in reversed(status.get("snapshots") or ()):
        saved = datetime.datetime.fromtimestamp(one["time_ns"] / 1e9, tz=datetime.timezone.utc)
        if began is not None and began <= saved and (ended is None or saved < ended):
            snapshots.append("  ".join(snapshot_words(one)))
    return snapshots


def _restart(run: Run, width: int, glyphs: Glyphs) -> list[Row]:
    """Return the phases as a bar, and in numbers."""
    room = max(10, width - 12)
    numbers: list[Row] = []
    for name, value in run.phases.items():
        letter, role = PHASES[name]
        numbers.append(((f"{letter} ", role), (f"{phase_name(name)} {values.duration(value / 1000)}", "dim")))
    head: Row = (("  restart  ", "dim"),)
    total = f"{_took(run)}  "
    spans = bar_spans(run, sum(run.phases.values()), max(5, room - len(total)), glyphs)
    return [(*head, (total, "text"), *spans), *flow(((" " * 11, ""),), numbers, width)]


# The journal keeps at least this many lines, whatever is above it.
EVENTS_MIN = 4


class RunScreen(LiveScreen):
    """Generations above, all about the selected one, the journal below."""

    NAME = "run"
    AUTO_FOCUS = "#events"

    def body(self) -> Iterable[Widget]:
        """Yield the three panes."""
        yield Picker(title="generations", head=True, id="generations")
        yield DetailPane("generation")
        yield Picker(title="events", id="events")

    def on_mount(self) -> None:
        """Say so when there is nothing."""
        self._runs = Runs()
        self._past = Past(self.shell)
        self._table_lines = 0
        self._measured: tuple[tuple[int, int], Measured] = ((0, 0), NOTHING)
        """What was measured of how much of the history and the journal."""
        self.query_one("#events", Picker).placeholder = ((" no event yet", "dim"),)
        self._generations.placeholder = ((" no generation yet", "dim"),)

    def tick(self, job_view: JobView, age_s: float, changed: bool) -> None:
        """Keep the history of all generations new."""
        super().tick(job_view, age_s, changed)
        self._past.ask(job_view, (*KINDS, "rate"), chosen(job_view), self.size.width)

    @property
    def _generations(self) -> Picker:
        return self.query_one("#generations", Picker)

    def show(self, job_view: JobView) -> None:
        """Show the newest state; if the end of the journal is not in view, the view does not move."""
        events = self.shell.source.events
        self._runs.follow(events)
        self._show_generations(job_view)
        self._show_detail(job_view)
        picker = self.query_one("#events", Picker)
        at_end, rows = picker.at_end, self.shell.event_rows
        glyphs, width = self.shell.glyphs, self.size.width
        picker.show(range(len(rows)), lambda index: event_row(rows[index], glyphs, width, wide=True))
        picker.note = ((f"{len(rows):,} in total", "dim"),)
        if at_end and rows:
            picker.select(len(rows) - 1)

    def _show_generations(self, job_view: JobView) -> None:
        picker = self._generations
        newest_first = self._runs.runs[::-1]
        by_number = {run.number: run for run in newest_first}
        columns = run_columns(newest_first, job_view, self.size.width, self.shell.glyphs, self._past.series)
        table = Table(columns, self.size.width - 1, self.shell.glyphs)
        picker.head = table.head()
        picker.heading = count(len(newest_first), "generation") if newest_first else "generations"
        legend = WIDE_LEGEND if self.size.width >= 120 else LEGEND
        picker.note = ((legend, "dim"),) if self.size.width >= 80 else ()
        keys = [run.number for run in newest_first]
        # If none has been selected, the newest one is shown.
        follows = picker.cursor <= 0 and not picker.has_focus
        self._table_lines = min(len(keys) + 2, max(4, (self.size.height - 4) // 3))
        picker.styles.height = self._table_lines
        picker.show(keys, lambda index: table.row(by_number[keys[index]]))
        if follows and keys:
            picker.select(keys[0])

    def _show_detail(self, job_view: JobView) -> None:
        page = self.query_one(DetailPane)
        run = next((run for run in self._runs.runs if run.number == self._generations.selected), None)
        page.display = run is not None
        if run is None:
            return
        source = self.shell.source
        differs, width = self._runs.differing(), self.size.width - 1
        lines = run_lines(run, job_view, source.status, differs, width, self.shell.glyphs, self._hours())
        room = self.size.height - 4 - self._table_lines
        page.styles.height = max(2, min(len(lines) + 1, room - EVENTS_MIN))
        page.show_rows(f"generation {run.number}", lines)

    def _hours(self) -> str:
        source, series = self.shell.source, self._past.series
        made = id(series), len(source.events)
        if made != self._measured[0]:
            self._measured = made, measure(source.events, series)
        cost = goodput(source.events, times.now(), self._measured[1])
        return "" if cost is None else cost.hours_text(source.status)

    @on(Picker.Moved)
    def _moved(self, event: Picker.Moved) -> None:
        if event.view.id == "generations":
            self._show_detail(self.shell.job_view)

    def selection(self) -> Target:
        """Return the node and rank of the selected event."""
        if self.focused is self._generations:
            return Target()
        return self.shell.target_of_event(self.query_one("#events", Picker).selected)

    @on(Picker.Opened)
    def open_selection(self, event: Picker.Opened) -> None:
        """Open the log of a generation, or what an event is about."""
        if event.view.id == "generations":
            self.shell.open_log(LogOf(Target(), event.key if isinstance(event.key, int) else None))
        else:
            self.shell.open_event(event.key)

    def action_logs(self) -> None:
        """Open the log of the selected generation, or of what the event is about."""
        chosen = self._generations.selected if self.focused is self._generations else None
        self.shell.open_log(LogOf(self.selection(), chosen if isinstance(chosen, int) else None))
