"""The journal's events in words, one row each.

In: event objects of the contract. Out: rows; what an event points at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from supervisor import overrides, plain, usage
from supervisor.inventory.pattern import fold
from supervisor.tui import words
from supervisor.tui.cells import Row, clean, entries, fit, whole_numbers

if TYPE_CHECKING:
    from supervisor.tui.source import Json
    from supervisor.tui.words import Glyphs

# Glyph and role by type; anything else is a plain fact.
_MARKS: Final = {
    "rank_failed": ("X", "bad"),
    "incident": ("!", "bad"),
    "job_failed": ("X", "bad"),
    "node_lost": ("X", "bad"),
    "node_failed": ("X", "bad"),
    "agent_lost": ("-", "warn"),
    "job_degraded": ("!", "warn"),
    "quorum_lost": ("!", "warn"),
    "coordinator_paused": ("!", "warn"),
    "job_stopped": ("!", "warn"),
    "stop_requested": ("!", "warn"),
    "restart_requested": ("~", "warn"),
    "remove_requested": ("~", "warn"),
    "generation_stopped": ("~", "start"),
    "generation_started": ("~", "start"),
    "node_removed": (".", "off"),
    "node_cordoned": ("!", "warn"),
    "signal_sent": ("!", "warn"),
    "ranks_assigned": ("~", "start"),
    "generation_running": ("+", "ok"),
    "node_joined": ("+", "ok"),
    "node_ready": ("+", "ok"),
    "node_added": ("+", "ok"),
    "hang_over": ("+", "ok"),
    "hook_failed": ("!", "warn"),
    "warning": ("!", "warn"),
    "metrics_failed": ("!", "warn"),
    "job_succeeded": ("+", "done"),
    "environment_set": ("~", "warn"),
    "tree_changed": ("~", "warn"),
}


def event_text(event: Json) -> str:
    """What happened, in one line."""
    facts = usage.part(event, "detail")
    teller = _TELLERS.get(str(event.get("type")))
    if teller is not None:
        return clean(teller(facts))
    shown = ((key, value) for key, value in facts.items() if isinstance(value, (str, int, float)) and value != "")
    return clean("  ".join(f"{key} {value}" for key, value in shown))


def _running(facts: Json) -> str:
    world = f"world {facts.get('world_size', '?')}"
    took = plain.phases_of(facts)
    if not took:
        return world
    parts = " ".join(f"{name} {value:.0f}" for name, value in took.items())
    return f"{world} in {sum(took.values()):.0f} ms: {parts}"


def _started(facts: Json) -> str:
    members = entries(facts.get("members"))
    names = fold(str(entry.get("node")) for entry in members if isinstance(entry, dict))
    joining = facts.get("rendezvous")
    meeting = f", {joining.get('backend')} {joining.get('endpoint')}" if isinstance(joining, dict) else ""
    return f"world {facts.get('world_size', '?')} on {names}{meeting}"


def _assigned(facts: Json) -> str:
    ranks = " ".join(str(entry[0]) for entry in entries(facts.get("ranks")) if isinstance(entry, list))
    return f"ranks {ranks} of {facts.get('world_size', '?')}, by torch"


def _failed(facts: Json) -> str:
    ended = usage.part(facts, "exit")
    how = ended.get("signal") or f"exit {ended.get('code', '?')}"
    return f"{how}  {facts.get('message') or ''}".rstrip()


def _reason(facts: Json) -> str:
    return str(facts.get("reason") or "")


def _asked(facts: Json) -> str:
    return f"by {facts.get('operator') or 'an operator'}"


def _signal(facts: Json) -> str:
    ranks = plain.ranges(whole_numbers(facts.get("ranks")))
    return f"{facts.get('signal') or '?'} to rank {ranks}, {_asked(facts)}"


def _ready(facts: Json) -> str:
    text = words.count(int(facts["nproc"]), "rank") if isinstance(facts.get("nproc"), int) else ""
    return text + (", returned" if facts.get("returned") else "")


_TELLERS: Final[dict[str, Any]] = {
    "generation_running": _running,
    "generation_started": _started,
    "ranks_assigned": _assigned,
    "generation_stopped": lambda facts: f"{facts.get('cause', '')}  in {facts.get('stop_ms', '?')} ms",
    "rank_failed": _failed,
    "incident": lambda facts: str(facts.get("summary") or ""),
    "node_ready": _ready,
    "node_added": _asked,
    "node_cordoned": _asked,
    "node_uncordoned": _asked,
    "signal_sent": _signal,
    "node_lost": _reason,
    "node_failed": _reason,
    "node_removed": _reason,
    "agent_lost": _reason,
    "hang_over": _reason,
    "hook_failed": _reason,
    "warning": lambda facts: str(facts.get("message") or ""),
    "metrics_failed": _reason,
    "job_failed": _reason,
    "job_stopped": _reason,
    "job_succeeded": lambda facts: "every rank ended with 0",
    "job_degraded": lambda facts: f"{facts.get('ready', '?')} nodes ready, {facts.get('needed', '?')} needed",
    "restart_requested": _asked,
    "environment_set": overrides.told,
    "tree_changed": plain.tree_text,
    "remove_requested": _asked,
    "stop_requested": _asked,
    "operator_attached": lambda facts: str(facts.get("operator") or ""),
    "operator_detached": lambda facts: str(facts.get("operator") or ""),
}


def event_row(event: Json, glyphs: Glyphs, width: int, *, wide: bool = False) -> Row:
    """One event; `wide` adds number and generation."""
    kind = str(event.get("type") or "?")
    mark, role = _MARKS.get(kind, (glyphs.dot, "dim"))
    generation = event.get("generation")
    spans = [(f" {words.clock(event.get('time'), millis=wide and width >= 100)} ", "time"), (f"{mark} ", role)]
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
    spans.append((fit(kind.replace("_", " "), 19, glyphs.more) + " ", loud))
    spans.append((event_text(event), "bad" if role == "bad" else "dim"))
    return tuple(spans)
