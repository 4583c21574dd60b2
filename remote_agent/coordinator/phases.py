"""What the start of a group is spent on, phase by phase, from its cause to the first step. Pure.

In: a Turn; when nodes and ranks reached what. Out: `phases` of the state, and the events that have them. A phase that
ranks do not show is left out: the next one that they do show then includes its time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remote_agent.coordinator import state as s
from remote_agent.wire.events import EventType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from remote_agent.coordinator import inputs
    from remote_agent.coordinator.transitions import Turn

Span = tuple[str, float, float]


def note_running(turn: Turn) -> dict[str, Any]:
    """Note that every rank runs the script; returns the phases up to now, in milliseconds."""
    marks = turn.state.marks
    start = marks.get("forming", marks["go"])
    return _add(
        turn,
        ("detect", marks.get("cause", start), marks.get("stop", start)),
        ("stop", marks.get("stop", start), marks.get("idle", start)),
        ("rendezvous", marks.get("idle", start), marks["go"]),
        ("spawn", marks["go"], marks["started"]),
        ("main", marks["started"], marks["running"]),
    )


def on_grouping(turn: Turn, event: inputs.Grouping) -> None:
    """Note that a rank waits in init_process_group for the others."""
    if event.rank not in turn.state.grouped:
        turn.add("grouping", event.rank)


def on_grouped(turn: Turn, event: inputs.Grouped) -> None:
    """Take the end of a rank's init_process_group; what the last rank needs, all need."""
    state = turn.state
    if state.phase not in (s.STARTING, s.RUNNING) or event.rank in state.grouped:
        return
    returned = turn.now - event.age
    marks = dict(state.marks)
    for name, at in (("imports", returned - event.took), ("process_group", returned)):
        marks[name] = max(at, marks.get(name, at))
    turn.set(marks=marks)
    turn.discard("grouping", event.rank)
    turn.add("grouped", event.rank)
    note_group(turn)


def note_group(turn: Turn) -> None:
    """Write to the journal, once, that the process group is up on every rank."""
    state = turn.state
    marks = state.marks
    if state.phase != s.RUNNING or {"process_group", "first_step"} & set(state.phases):
        return
    if len(state.grouped) >= len(state.ranks) > 0 and state.grouped >= state.ranks.keys():
        spans = (
            ("imports", marks["running"], marks["imports"]),
            ("process_group", max(marks["running"], marks["imports"]), marks["process_group"]),
        )
        turn.emit(EventType.PROCESS_GROUP_UP, **_add(turn, *spans))


def note_step(turn: Turn, age: float | None) -> None:
    """Write to the journal, once, that a rank printed its first step `age` seconds ago."""
    state = turn.state
    if age is None or state.phase != s.RUNNING or "first_step" in state.phases:
        return
    before = max(state.marks["running"], state.marks["process_group"] if "process_group" in state.phases else 0.0)
    turn.emit(EventType.FIRST_STEP, **_add(turn, ("first_step", before, turn.now - age)))


def _add(turn: Turn, *spans: Span) -> dict[str, Any]:
    added = dict(_milliseconds(spans))
    turn.set(phases={**turn.state.phases, **added})
    return added


def _milliseconds(spans: Iterable[Span]) -> Iterable[tuple[str, float]]:
    for name, begin, end in spans:
        yield name, round(max(0.0, end - begin) * 1000, 1)
