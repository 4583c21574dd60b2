"""The journal's events in words, one row each.

In: event objects of the contract. Out: rows; what an event points at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from remote_agent.wire.events import EventType, label
from supervisor.tui.rows.spans import Row, clean, fit
from supervisor.wording import values
from supervisor.wording.events import ROLES, event_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from supervisor.tui.looks import Glyphs

# The glyph of a role, and those of types that have another one.
_OF_ROLE: Final = {"bad": "X", "warn": "!", "start": "~", "ok": "+", "done": "+", "off": "."}
_OF_TYPE: Final[dict[str, str]] = {
    EventType.INCIDENT: "!",
    EventType.AGENT_LOST: "-",
    EventType.RESTART_REQUESTED: "~",
    EventType.REMOVE_REQUESTED: "~",
    EventType.GENERATION_STOPPED: "~",
    EventType.ENVIRONMENT_SET: "~",
    EventType.TREE_CHANGED: "~",
}


def event_row(event: Mapping[str, Any], glyphs: Glyphs, width: int, *, wide: bool = False) -> Row:
    """One event; `wide` adds number and generation."""
    kind = str(event.get("type") or "?")
    role = ROLES.get(kind, "dim")
    mark = _OF_TYPE.get(kind) or _OF_ROLE.get(role, glyphs.dot)
    spans = [(f" {values.clock(event.get('time'), millis=wide and width >= 100)} ", "time"), (f"{mark} ", role)]
    if wide:
        number = f"g{event['generation']}" if event["generation"] >= 0 else ""
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
