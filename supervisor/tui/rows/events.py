"""The journal's events in words, one row each.

In: event objects of the contract. Out: rows; what an event points at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from remote_agent.wire.events import EventType, label
from supervisor.tui.rows.spans import Row, clean, fit
from supervisor.wording import values
from supervisor.wording.events import event_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from supervisor.tui.looks import Glyphs

# Glyph and role by type; anything else is a plain fact.
_MARKS: Final[dict[str, tuple[str, str]]] = {
    EventType.RANK_FAILED: ("X", "bad"),
    EventType.INCIDENT: ("!", "bad"),
    EventType.JOB_FAILED: ("X", "bad"),
    EventType.NODE_LOST: ("X", "bad"),
    EventType.NODE_FAILED: ("X", "bad"),
    EventType.AGENT_LOST: ("-", "warn"),
    EventType.JOB_DEGRADED: ("!", "warn"),
    EventType.QUORUM_LOST: ("!", "warn"),
    EventType.COORDINATOR_PAUSED: ("!", "warn"),
    EventType.JOB_STOPPED: ("!", "warn"),
    EventType.STOP_REQUESTED: ("!", "warn"),
    EventType.RESTART_REQUESTED: ("~", "warn"),
    EventType.REMOVE_REQUESTED: ("~", "warn"),
    EventType.GENERATION_STOPPED: ("~", "start"),
    EventType.GENERATION_PROPOSED: ("~", "start"),
    EventType.GENERATION_STARTED: ("~", "start"),
    EventType.NODE_REMOVED: (".", "off"),
    EventType.NODE_CORDONED: ("!", "warn"),
    EventType.SIGNAL_SENT: ("!", "warn"),
    EventType.RANKS_ASSIGNED: ("~", "start"),
    EventType.GENERATION_RUNNING: ("+", "ok"),
    EventType.NODE_JOINED: ("+", "ok"),
    EventType.NODE_READY: ("+", "ok"),
    EventType.NODE_ADDED: ("+", "ok"),
    EventType.INCIDENT_HEALED: ("+", "ok"),
    EventType.HANG_OVER: ("+", "ok"),
    EventType.HOOK_FAILED: ("!", "warn"),
    EventType.WARNING: ("!", "warn"),
    EventType.METRICS_FAILED: ("!", "warn"),
    EventType.JOB_SUCCEEDED: ("+", "done"),
    EventType.ENVIRONMENT_SET: ("~", "warn"),
    EventType.TREE_CHANGED: ("~", "warn"),
}


def event_row(event: Mapping[str, Any], glyphs: Glyphs, width: int, *, wide: bool = False) -> Row:
    """One event; `wide` adds number and generation."""
    kind = str(event.get("type") or "?")
    mark, role = _MARKS.get(kind, (glyphs.dot, "dim"))
    generation = event.get("generation")
    spans = [(f" {values.clock(event.get('time'), millis=wide and width >= 100)} ", "time"), (f"{mark} ", role)]
    if wide:
        number = f"g{generation}" if isinstance(generation, int) and generation >= 0 else ""
        spans.append((fit(number, 4, glyphs.more), "dim"))
    place = " ".join(
        part
        for part in (str(event.get("node") or ""), "" if event.get("rank") is None else f"r{event['rank']}")
        if part
    )
    room = 10 if width < 100 else 16
    spans.append((fit(place, room, glyphs.more) + " ", "tag"))
    loud = role if role in ("bad", "warn", "done") else "text"
    spans.append((fit(label(kind), 19, glyphs.more) + " ", loud))
    spans.append((clean(event_text(event)), "bad" if role == "bad" else "dim"))
    return tuple(spans)
