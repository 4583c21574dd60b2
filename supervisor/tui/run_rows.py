"""The generations of a job as rows: a table, and all about one of them.

In: Runs, a snapshot, a width. Out: columns and rows.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from supervisor import overrides
from supervisor.inventory.pattern import fold
from supervisor.tui import words
from supervisor.tui.cells import Row, Span, clean
from supervisor.tui.rows import Column, flow
from supervisor.tui.runs import Run, bar
from supervisor.tui.textflow import wrap

if TYPE_CHECKING:
    from supervisor.tui.model import Snapshot
    from supervisor.tui.source import Json
    from supervisor.tui.words import Glyphs

# Letter and role by phase: the letter alone tells them apart.
PHASES: Final = {
    "detect": ("d", "bad"),
    "stop": ("s", "warn"),
    "rendezvous": ("r", "key"),
    "spawn": ("p", "tag"),
    "main": ("m", "ok"),
}
LEGEND: Final = "restart: d detect  s stop  r rendezvous  p spawn  m main"
BAR: Final = 24


def run_columns(runs: Sequence[Run], snapshot: Snapshot, width: int) -> list[Column[Run]]:
    """The columns of the table of generations."""
    longest = max((run.took_ms or 0.0 for run in runs), default=0.0)
    columns: list[Column[Run]] = [
        Column("gen", 4, lambda run: ((f"g{run.number}", "title"),), 9),
        Column("began", 8, lambda run: ((words.clock(run.began_at), "time"),), 9),
        Column("after", 9, lambda run: ((run.began_by, "dim"),), 6),
        Column("world", 5, lambda run: ((str(run.world_size or "-"), "text"),), 5, at_right=True),
        Column("nodes", 5, lambda run: ((str(len(run.nodes) or "-"), "text"),), 4, at_right=True),
        Column("lasted", 8, lambda run: ((lasted(run), "dim"),), 7, at_right=True),
        Column("restart", 9, lambda run: ((_took(run), "text"),), 8, at_right=True),
    ]
    if width >= 120:
        columns.append(Column("phases", BAR, lambda run: tuple(bar_spans(run, longest, BAR)), 3))
    columns.append(Column("ended", 0, lambda run: _outcome(run, snapshot), 9))
    return columns


def _outcome(run: Run, snapshot: Snapshot) -> Row:
    if run.how:
        return ((run.how, run.role),)
    return ((snapshot.look.word.lower(), snapshot.look.role),)


def _took(run: Run) -> str:
    return f"{run.took_ms:,.0f} ms" if run.took_ms is not None else "-"


def lasted(run: Run) -> str:
    """How long it lasted, from its start to its end or now."""
    began = words.moment(run.began_at)
    ended = words.moment(run.ended_at) or datetime.datetime.fromtimestamp(words.now(), tz=datetime.timezone.utc)
    return words.lasted(max(0.0, (ended - began).total_seconds())) if began is not None else "-"


def bar_spans(run: Run, longest_ms: float, width: int) -> list[Span]:
    """The phases of its restart, each as long as it took."""
    return [(PHASES[name][0] * cells, PHASES[name][1]) for name, cells in bar(run.phases, longest_ms, width)]


def run_lines(
    run: Run,
    snapshot: Snapshot,
    status: Json,
    differs: Sequence[tuple[str, dict[str, tuple[str, ...]]]],
    width: int,
    glyphs: Glyphs,
) -> list[Row]:
    """All about one generation, and what holds for the whole job."""
    facts: list[tuple[str, str, str]] = []
    facts.append(("began", f"{words.clock(run.began_at)}, {run.because}", "text"))
    if run.how:
        facts.append(("ended", f"{words.clock(run.ended_at)}, it had lasted {lasted(run)}: {run.how}", run.role))
    lines = _facts(facts, width)
    if run.phases:
        lines += _restart(run, width, glyphs)
    said = f"{run.world_size or '?'} ranks on {fold(run.nodes)}"
    charged = f"{run.restarts} of {snapshot.max_restarts or 0} restarts charged"
    more = [("world", f"{said}   {charged}", "text")]
    if run.tree:
        more.append(("code", run.tree, "text"))
    if run.env:
        more.append(("set", overrides.variables({"env": run.env}), "text"))
    if status.get("environment") and overrides.now(status) and run.env != (status["environment"].get("env") or {}):
        more.append(("to set", overrides.now(status), "warn"))
    for name, values in differs:
        text = "; ".join(f"{value} on {fold(nodes)}" for value, nodes in values.items())
        more.append(("differs", f"{name}: {text}", "warn"))
    if snapshot.script:
        more.append(("command", snapshot.script, "dim"))
    return lines + _facts(more, width)


def _restart(run: Run, width: int, glyphs: Glyphs) -> list[Row]:
    """The phases as a bar, and in numbers."""
    room = max(10, width - 12)
    numbers: list[Row] = []
    for name, value in run.phases.items():
        letter, role = PHASES[name]
        numbers.append(((f"{letter} ", role), (f"{name} {value:,.0f}", "dim")))
    head: Row = (("  restart  ", "dim"),)
    total = f"{_took(run)}  "
    spans = bar_spans(run, sum(run.phases.values()), max(5, room - len(total)))
    return [(*head, (total, "text"), *spans), *flow(((" " * 11, ""),), numbers, width)]


def _facts(facts: Sequence[tuple[str, str, str]], width: int) -> list[Row]:
    lines: list[Row] = []
    for name, text, role in facts:
        for number, line in enumerate(wrap(clean(text), max(20, width - 12))):
            lines.append(((f"  {name if number == 0 else '':<9}", "dim"), (line, role)))
    return lines
