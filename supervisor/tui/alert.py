"""The two lines at the top of every screen: does it make progress, what broke first, what happens next.

In: a snapshot, the age of its status. Out: two rows of exact width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from supervisor.tui import words
from supervisor.tui.cells import Row, Span, clean, fit_row, row_width, spread

if TYPE_CHECKING:
    from supervisor.tui.model import Snapshot
    from supervisor.tui.words import Glyphs


# So much of a failure has to be seen at least, cells: the rank and the first word of what it met.
SEEN: Final = 22


class Fact(NamedTuple):
    """A piece of the line; those with the lowest number go first where there is no room."""

    row: Row
    keep: int


def alert_rows(
    snapshot: Snapshot, age_s: float, width: int, glyphs: Glyphs, *, paused_s: float | None = None, played: str = ""
) -> tuple[Row, Row]:
    """The state of the job in one line, and what is wrong and comes next in the other; `played`: of a recording."""
    end = _age(snapshot, age_s) if paused_s is None else ((f" PAUSED {words.age(paused_s)} ", "pill"),)
    end = ((f"{played} ", "warn"),) if played else end
    return _state_row(snapshot, end, width, glyphs, was=bool(played)), _next_row(snapshot, age_s, width, glyphs)


def _state_row(snapshot: Snapshot, end: Row, width: int, glyphs: Glyphs, *, was: bool) -> Row:
    look = snapshot.look
    # Nothing of a recording is so now.
    word = f"was {look.word}" if was else look.word
    glyph, role = ("-" if snapshot.stale else glyphs.of(look)), look.role
    if not snapshot.state:
        glyph, word, role = _without_status(snapshot)
    role = "off" if snapshot.stale and snapshot.state else role
    facts = [
        Fact((((snapshot.job or "no job yet"), "title"),), 9),
        Fact(((f"{glyph} {word}", role),), 10),
    ]
    if snapshot.generation is not None and snapshot.generation >= 0:
        facts.append(Fact(_pair("generation", snapshot.generation, width), 6))
    if snapshot.world_size:
        facts.append(Fact(_pair("world", snapshot.world_size, width), 5))
    if snapshot.train_step is not None:
        facts.append(Fact(_pair("step", f"{snapshot.train_step:,}", width), 7))
    if snapshot.restarts or (snapshot.max_restarts and width >= 100):
        facts.append(Fact(_pair("restarts", f"{snapshot.restarts}/{snapshot.max_restarts}", width), 4))
    facts += _counts(snapshot)
    return _join(facts, end, width, glyphs)


def _without_status(snapshot: Snapshot) -> tuple[str, str, str]:
    if snapshot.problem:
        return "X", "LAUNCH FAILED" if snapshot.bringing_up else "NOT REACHED", "bad"
    return "~", "LAUNCHING" if snapshot.bringing_up else "CONNECTING", "start"


def _pair(name: str, value: object, width: int) -> Row:
    short = {"generation": "gen", "restarts": "restarts"}.get(name, name) if width < 120 else name
    return ((f"{short} ", "dim"), (str(value), "text"))


def _counts(snapshot: Snapshot) -> list[Fact]:
    there = [node for node in snapshot.nodes if node.state not in ("lost", "failed")]
    members = [node for node in there if node.ranks or node.state == "running"]
    awaited = [node for node in snapshot.nodes if node.state not in ("removed", "spare")]
    facts = []
    if awaited and not snapshot.state:
        up = sum(node.link == "up" for node in snapshot.nodes)
        facts.append(Fact(((f"{up}/{len(awaited)}", "text"), (" hosts up", "dim")), 3))
    elif awaited:
        facts.append(Fact(((f"{len(members)}/{len(awaited)}", "text"), (" nodes", "dim")), 3))
    if snapshot.ranks:
        alive = sum(snapshot.states[state] for state in ("running", "silent", "starting"))
        done = snapshot.states["succeeded"]
        share = f"{done} done" if done and not alive else f"{alive}/{len(snapshot.ranks)}"
        facts.append(Fact(((share, "text"), (" ranks", "dim")), 2))
    return facts


def _age(snapshot: Snapshot, age_s: float) -> Row:
    if snapshot.ended:
        return (("over ", "dim"),)
    if age_s == float("inf"):
        return ((" ", ""),)
    # An age that changes with every frame would only flicker.
    return ((f"{words.age(age_s)} old ", "warn"),) if snapshot.stale else (("live ", "dim"),)


def _join(facts: list[Fact], end: Row, width: int, glyphs: Glyphs) -> Row:
    gap = 3 if width >= 100 else 2
    chosen = list(facts)
    while len(chosen) > 2 and _length(chosen, gap) + row_width(end) + 1 > width:
        chosen.remove(min(chosen, key=lambda fact: fact.keep))
    spans: list[Span] = [(" ", "")]
    for index, fact in enumerate(chosen):
        spans += [*([(" " * gap, "")] if index else []), *fact.row]
    return spread(spans, end, width, glyphs.more)


def _length(facts: list[Fact], gap: int) -> int:
    return 1 + sum(row_width(fact.row) + gap for fact in facts) - gap


def _next_row(snapshot: Snapshot, age_s: float, width: int, glyphs: Glyphs) -> Row:
    if snapshot.problem:
        return fit_row(((f" X {clean(snapshot.problem)}", "bad"),), width, glyphs.more)
    if snapshot.stale and age_s != float("inf"):
        text = f" no news for {words.age(age_s)}: the job goes on; links are tried again"
        return fit_row(((text, "warn"),), width, glyphs.more)
    if snapshot.ended:
        return _end_row(snapshot, width, glyphs)
    if snapshot.incident is not None and _is_current(snapshot):
        return _failure_row(snapshot, width, glyphs)
    text = snapshot.plan or _calm(snapshot)
    return fit_row(((f" {clean(text)}", "warn" if snapshot.plan else "dim"),), width, glyphs.more)


def _is_current(snapshot: Snapshot) -> bool:
    """An incident is news until the next generation runs, a hang until it is over."""
    incident = snapshot.incident or {}
    if incident.get("ongoing") is False:
        return False
    number = incident.get("generation")
    if isinstance(number, int) and number < snapshot.ran:
        return False
    return snapshot.state != "running" or number == snapshot.generation


def _failure_row(snapshot: Snapshot, width: int, glyphs: Glyphs) -> Row:
    end: list[Span] = [("  [i] why ", "key")]
    left = _verdict(snapshot)
    if width >= 100:
        left.append((f"  {words.clock((snapshot.incident or {}).get('time'))}", "dim"))
    if snapshot.plan:
        plan = f" {glyphs.dot} next: {clean(snapshot.plan)}"
        if row_width(left) + row_width(end) + len(plan) > width:
            # Both must be seen; where on earth it happens next can be read elsewhere.
            end.insert(0, (plan.partition(" on ")[0].partition(";")[0].partition(" (")[0], "warn"))
            if row_width(left[:1]) + SEEN + row_width(end) > width:
                left[0], end[-1] = (" ! ", "alarm"), (" [i] ", "key")
        else:
            left.append((plan, "warn"))
    return spread(left, end, width, glyphs.more)


def _verdict(snapshot: Snapshot) -> list[Span]:
    if snapshot.incident is None:
        return [(" X FAILED ", "alarm"), (" ", "")]
    summary = snapshot.incident.get("summary") or "unknown"
    what = "HANG" if snapshot.incident.get("ongoing") else "FIRST FAILURE"
    return [(f" {'X' if snapshot.ended else '!'} {what} ", "alarm"), (f" {clean(summary)}", "bad")]


def _end_row(snapshot: Snapshot, width: int, glyphs: Glyphs) -> Row:
    status = snapshot.exit_status
    end: list[Span] = [("  [q] quit ", "key")]
    if snapshot.state == "failed":
        left = [*_verdict(snapshot), (f" {glyphs.dot} exit status {status}", "bad")]
        reason = snapshot.failure.partition(":")[0] if snapshot.incident else snapshot.failure
        left.append((f" {glyphs.dot} {clean(reason or 'the job failed')}", "dim"))
        return spread(left, [("  [i] why ", "key")] if snapshot.incident else end, width, glyphs.more)
    word = {"succeeded": "every rank ended with 0", "stopped": "stopped by an operator"}.get(snapshot.state, "over")
    left = [(f" {word} {glyphs.dot} exit status {status}", "done" if status == 0 else "warn")]
    if snapshot.incident is not None:
        left.append((f" {glyphs.dot} {_charged(snapshot)} on the way", "dim"))
    return spread(left, end, width, glyphs.more)


def _charged(snapshot: Snapshot) -> str:
    """What an operator asked for, and a lost node whose place a spare took, cost none."""
    return f"{words.count(snapshot.restarts, 'restart') if snapshot.restarts else 'no restart'} charged"


def _calm(snapshot: Snapshot) -> str:
    if not snapshot.state:
        up = sum(node.link == "up" for node in snapshot.nodes)
        return f"reaching the hosts: {up} of {len(snapshot.nodes)} answer"
    if snapshot.launching:
        return "waiting for the nodes to be ready"
    parts = ["no failure"] if snapshot.incident is None else [f"{_charged(snapshot)} so far"]
    if snapshot.coordinator:
        gone = "" if snapshot.coordinator_reachable else " (not reachable)"
        parts.append(f"coordinator {snapshot.coordinator}{gone}")
    started = words.moment(snapshot.started_at)
    if started is not None:
        lasted = words.now() - started.timestamp()
        parts.append(f"up {words.lasted(max(0.0, lasted))}")
    if snapshot.script:
        parts.append(snapshot.script)
    return "   ".join(parts)
