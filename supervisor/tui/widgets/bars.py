"""The bars above and below every screen: state of the job, screens and keys.

In: a job view; the name of the screen. Out: two rows each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rich.style import Style

from remote_agent.text.names import count
from remote_agent.wire.events import LIVE_RANKS
from supervisor.inventory.pattern import fold
from supervisor.tui import keys, times
from supervisor.tui.rows.spans import EMPTY, Row, Span, clean, fit_row, row_width, spread
from supervisor.tui.rows.tables import fit_parts
from supervisor.tui.widgets.lines import Drawn, LineView
from supervisor.wording import incidents, values
from supervisor.wording.slow import slow_line
from supervisor.wording.status import start_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import JobView

# At least this many cells of a failure are shown: the rank and the first word.
LEAST_FAILURE: Final = 22


def alert_rows(
    job_view: JobView,
    age_s: float,
    width: int,
    glyphs: Glyphs,
    *,
    paused_s: float | None = None,
    bundle: str = "",
    waits: str = "",
) -> tuple[Row, Row]:
    """Return a row with the state of the job, and one with the failure and the next step, or what a start waits for."""
    end = _age(job_view, age_s) if paused_s is None else ((f" PAUSED {values.age(paused_s)} ", "pill"),)
    end = ((f"{bundle} ", "warn"),) if bundle else end
    # A frozen display stays at its time.
    now_s = times.now() - (paused_s or 0.0)
    state = _state_row(job_view, end, width, glyphs)
    waiting: Row = ((f" {waits}  ", "start"),) if waits else EMPTY
    return state, (*waiting, *_next_row(job_view, age_s, now_s, width - row_width(waiting), glyphs))


def _state_row(job_view: JobView, end: Row, width: int, glyphs: Glyphs) -> Row:
    look = job_view.look
    word, role = look.word, look.role
    glyph = "-" if job_view.stale else glyphs.of(look)
    if not job_view.state:
        glyph, word, role = _without_status(job_view)
    role = "off" if job_view.stale and job_view.state else role
    facts: list[tuple[int, Row]] = [
        (9, (((job_view.job or "no job yet"), "title"),)),
        (10, ((f"{glyph} {word}", role),)),
    ]
    if job_view.generation is not None and job_view.generation >= 0:
        facts.append((6, _pair("generation", job_view.generation, width)))
    if job_view.world_size:
        facts.append((5, _pair("world", job_view.world_size, width)))
    if job_view.train_step is not None:
        facts.append((7, _pair("step", f"{job_view.train_step:,}", width)))
    if job_view.restarts or (job_view.max_restarts and width >= 100):
        facts.append((4, _pair("restarts", f"{job_view.restarts}/{job_view.max_restarts}", width)))
    facts += _counts(job_view)
    room = width - row_width(end) - 2
    row = fit_parts(facts, room, glyphs.more, gap=3 if width >= 100 else 2, least=2)
    return spread([(" ", ""), *row], end, width, glyphs.more)


def _without_status(job_view: JobView) -> tuple[str, str, str]:
    if job_view.problem:
        return "X", "LAUNCH FAILED" if job_view.bringing_up else "UNREACHABLE", "bad"
    return "~", "LAUNCHING" if job_view.bringing_up else "CONNECTING", "start"


def _pair(name: str, value: object, width: int) -> Row:
    short = {"generation": "gen", "restarts": "restarts"}.get(name, name) if width < 120 else name
    return ((f"{short} ", "dim"), (str(value), "text"))


def _counts(job_view: JobView) -> list[tuple[int, Row]]:
    there = [node for node in job_view.nodes if node.state not in ("lost", "failed")]
    members = [node for node in there if node.ranks or node.state == "running"]
    awaited = [node for node in job_view.nodes if node.state not in ("removed", "spare")]
    facts: list[tuple[int, Row]] = []
    if awaited and not job_view.state:
        up = sum(node.host.state == "up" for node in job_view.nodes)
        facts.append((3, ((f"{up}/{len(awaited)}", "text"), (" hosts up", "dim"))))
    elif awaited:
        facts.append((3, ((f"{len(members)}/{len(awaited)}", "text"), (" nodes", "dim"))))
    if job_view.ranks:
        alive = sum(job_view.states[state] for state in LIVE_RANKS)
        done = job_view.states["succeeded"]
        share = f"{done}/{len(job_view.ranks)}" if done and not alive else f"{alive}/{len(job_view.ranks)}"
        facts.append((2, ((share, "text"), (" ranks done" if done and not alive else " ranks", "dim"))))
    return facts


def _age(job_view: JobView, age_s: float) -> Row:
    if job_view.ended:
        return (("ended ", "dim"),)
    if age_s == float("inf"):
        return ((" ", ""),)
    # A changing age would flicker.
    return ((f"{values.age(age_s)} old ", "warn"),) if job_view.stale else (("live ", "dim"),)


def _next_row(job_view: JobView, age_s: float, now_s: float, width: int, glyphs: Glyphs) -> Row:
    if job_view.problem:
        return fit_row(((f" X {clean(job_view.problem)}", "bad"),), width, glyphs.more)
    if job_view.stale and age_s != float("inf"):
        asks = any(node.host.asks for node in job_view.nodes)
        what = "ssh needs your answer: A" if asks else "reconnecting"
        text = f" no status for {values.age(age_s)}; the job continues; {what}"
        return fit_row(((text, "warn"),), width, glyphs.more)
    if job_view.ended:
        return _end_row(job_view, now_s, width, glyphs)
    incident, following = job_view.incident, clean(job_view.next_step(now_s))
    # It is over without having healed while the ranks of a failed job are stopped.
    if incident is not None and incident.get("state") in ("open", "over"):
        return _failure_row(job_view, following, now_s, width, glyphs)
    slow = job_view.status.get("slow")
    if slow and not following:
        text = clean(slow_line(slow[0], short=width < 100).removeprefix("slow: "))
        return spread([(f" ! SLOW  {text}", "warn")], [("  [x y] why ", "key")], width, glyphs.more)
    if incident is None:
        text, role = (following, "warn") if following else (_calm(job_view, now_s), "dim")
        return fit_row(((f" {text}", role),), width, glyphs.more)
    healed = f" {clean(incidents.healed_note(incident, now_s))}"
    rest = (f" {glyphs.dot} next: {following}", "warn") if following else (f"   {_calm(job_view, now_s)}", "dim")
    return spread([(healed, "ok"), rest], [("  [i] why ", "key")], width, glyphs.more)


def _failure_row(job_view: JobView, following: str, now_s: float, width: int, glyphs: Glyphs) -> Row:
    end: list[Span] = [("  [i] why ", "key")]
    left = _verdict(job_view, now_s)
    if width >= 100:
        left.append((f"  {values.clock(job_view.incident and job_view.incident['time'])}", "dim"))
    if following:
        plan = f" {glyphs.dot} next: {following}"
        if row_width(left) + row_width(end) + len(plan) > width:
            # Both must be shown; the details of the plan are on the incident screen.
            end.insert(0, (_shortened(plan, width // 2), "warn"))
            if row_width(left[:1]) + LEAST_FAILURE + row_width(end) > width:
                left[0], end[-1] = (" ! ", "alarm"), (" [i] ", "key")
        else:
            left.append((plan, "warn"))
    return spread(left, end, width, glyphs.more)


def _shortened(plan: str, room: int) -> str:
    """Return a plan without details, and without its last clauses where it is longer than the room."""
    clauses = [clause.partition(" on ")[0].partition(" (")[0] for clause in plan.split("; ")]
    while len(clauses) > 1 and len("; ".join(clauses)) > room:
        clauses.pop()
    return "; ".join(clauses)


def _verdict(job_view: JobView, now_s: float) -> list[Span]:
    incident = job_view.incident
    if incident is None:
        return [(" X FAILED ", "alarm"), (" ", "")]
    what = "HANG" if incidents.is_hang(incident) else "FIRST FAILURE"
    began = values.local_time(incident.get("time"))
    if incident.get("ongoing") and began is not None:
        what += f" {values.elapsed(now_s - began.timestamp())}"
    summary = incident.get("summary") or "unknown"
    return [(f" {'X' if job_view.ended else '!'} {what} ", "alarm"), (f" {clean(summary)}", "bad")]


def _end_row(job_view: JobView, now_s: float, width: int, glyphs: Glyphs) -> Row:
    status = job_view.exit_status
    end: list[Span] = [("  [q] quit ", "key")]
    if job_view.state == "failed":
        left = [*_verdict(job_view, now_s), (f" {glyphs.dot} exit code {status}", "bad")]
        reason = job_view.failure.partition(":")[0] if job_view.incident else job_view.failure
        left.append((f" {glyphs.dot} {clean(reason or 'the job failed')}", "dim"))
        return spread(left, [("  [i] why ", "key")] if job_view.incident else end, width, glyphs.more)
    word = {"succeeded": "all ranks succeeded", "stopped": "stopped by an operator"}.get(job_view.state, "ended")
    status_text = f" {glyphs.dot} exit code {status}" if status else ""
    left = [(f" {word}{status_text}", "done" if status == 0 else "warn")]
    if job_view.incident is not None:
        left.append((f" {glyphs.dot} {_restarts(job_view)}", "dim"))
    return spread(left, end, width, glyphs.more)


def _restarts(job_view: JobView) -> str:
    return count(job_view.restarts, "restart") if job_view.restarts else "no restart"


_LAUNCH_STEPS: Final = {"agent": "starting the agent", "engine": "looking for torch", "ready": "ready to form a group"}


def _calm(job_view: JobView, now_s: float) -> str:
    if not job_view.state:
        up = sum(node.host.state == "up" for node in job_view.nodes)
        steps: dict[str, list[str]] = {}
        for node in job_view.nodes:
            if node.host.state == "up" and node.host.step in _LAUNCH_STEPS:
                steps.setdefault(_LAUNCH_STEPS[node.host.step], []).append(node.name)
        if job_view.bringing_up and up == len(job_view.nodes) and steps:
            return "; ".join(f"{what} on {fold(names)}" for what, names in steps.items())
        return f"connecting to the hosts: {up} of {len(job_view.nodes)} up"
    if job_view.launching:
        return "waiting for the nodes"
    parts = ["no failure"] if job_view.incident is None else [_restarts(job_view)] if job_view.restarts else []
    if job_view.coordinator:
        gone = "" if job_view.coordinator_reachable else " (unreachable)"
        parts.append(f"coordinator {job_view.coordinator}{gone}")
    started = values.local_time(job_view.started_at)
    if started is not None:
        parts.append(f"up {values.elapsed(now_s - started.timestamp())}")
    if start := start_of(job_view.status):
        parts.append(start)
    if job_view.script:
        parts.append(job_view.script)
    return clean("   ".join(parts))


ALL_PANES = "all panes"
STAY = ("actions", ALL_PANES, "help", "detach", "quit", "abort")


LINKS: Final = {"[i]": "app.incident", "[q]": "app.leave"}


class Bar(LineView, can_focus=False):
    """Two rows that fill the width."""

    ALLOW_SELECT = False
    DEFAULT_CSS = "Bar { height: 2; width: 100%; }"

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self.rows: tuple[Row, ...] = (EMPTY, EMPTY)

    def _draw_all(self) -> list[Drawn]:
        rows = (*self.rows, *([EMPTY] * self.size.height))
        return [Drawn(row, "", ("", "")) for row in rows[: self.size.height]]

    def _link(self, role: str | Style, action: str) -> Style:
        """Return the style of text that runs an action when it is clicked on."""
        return self.palette.style(role) + Style(meta={"@click": action})


class AlertBar(Bar):
    """What the job does, what is wrong, what comes next."""

    def show(
        self,
        job_view: JobView,
        age_s: float,
        *,
        paused_s: float | None = None,
        bundle: str = "",
        waits: str = "",
    ) -> None:
        """Show a newer state; `paused_s`: seconds since the display was frozen; `waits`: what a start waits for."""
        state, second = alert_rows(
            job_view, age_s, self.size.width, self.glyphs, paused_s=paused_s, bundle=bundle, waits=waits
        )
        self.rows = state, tuple((text, self._linked(text, role)) for text, role in second)
        self.redraw()

    def _linked(self, text: str, role: str | Style) -> str | Style:
        action = LINKS.get(text.strip()[:3])
        return self._link(role, action) if action else role


class KeyBar(Bar):
    """The row with the current place, and the keys that matter there."""

    def __init__(self, screen: str) -> None:
        super().__init__("keys")
        self.screen_name = screen

    def show(
        self,
        *,
        table: Sequence[keys.KeyBinding],
        theme: str,
        read_only: bool,
        marked: int,
        quit_label: str,
        has_way_back: bool,
        has_job: bool,
        one_pane: bool,
    ) -> None:
        """Show screens and keys.

        `quit_label`: what q does now; `has_way_back`: esc leads anywhere; `one_pane`: the others are hidden.
        """
        self.rows = (
            self._screens(theme, read_only, marked, keys.SCREENS if has_job else ()),
            self._keys(table, quit_label, has_way_back, one_pane),
        )
        self.redraw()

    def _screens(self, theme: str, read_only: bool, marked: int, screens: Sequence[tuple[str, str]]) -> Row:
        spans: list[Span] = [(" H Home ", "accent")] if self.screen_name == keys.HOME else []
        for number, (name, title) in enumerate(screens, 1):
            look = self._link("accent" if name == self.screen_name else "dim", f"app.go('{name}')")
            spans += [(" ", ""), (f"{number} {title}", look)]
            if self.size.width >= 100:
                spans.append((" ", ""))
        room = self.size.width - row_width(spans)
        end: list[Span] = [("read-only " if room > 12 else "r/o ", "warn")] if read_only else []
        if marked:
            end.insert(0, (f"{marked} marked  ", "mark"))
        end.append((f"{theme} ", "dim"))
        while end and row_width(end) + 2 > room:
            end.pop()
        return spread(spans, end, self.size.width, self.glyphs.more)

    def _keys(self, table: Sequence[keys.KeyBinding], quit_label: str, has_way_back: bool, one_pane: bool) -> Row:
        entries = [key for key in keys.footer(self.screen_name, table) if has_way_back or key.label != "back"]
        entries = [replace(key, label=quit_label) if key.label == "detach" else key for key in entries]
        if one_pane:
            whole = next(replace(key, label=ALL_PANES) for key in table if key.id == keys.MAXIMIZE)
            entries = [whole if key.label == "pane" else key for key in entries]
        gap = 2 if self.size.width >= 80 else 1
        # Actions, help and the way out always stay; of the others the last ones give way first.
        for label in ("back", "palette", "pane", *(key.label for key in reversed(entries[2:]))):
            if 1 + sum(len(key.first) + 1 + len(key.label) + gap for key in entries) - gap <= self.size.width:
                break
            entries = [key for key in entries if key.label != label or label in STAY]
        spans: list[Span] = [(" ", "")]
        for number, key in enumerate(entries):
            spans += [(" " * gap if number else "", ""), (key.first, self._link("key", key.click))]
            spans.append((f" {key.label}", self._link("dim", key.click)))
        return tuple(spans)
