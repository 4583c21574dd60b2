"""Journals as a coordinator writes them, made of the fields that a test is about.

In: events, as far as they matter. Out: lines of events.jsonl; a check of what a coordinator emits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from remote_agent.coordinator.state import Emit
from remote_agent.wire.documents import read_event

INCIDENT: Any = {
    "id": 1, "generation": 0, "time": None, "category": "other", "scope": "one_rank", "culprit_ranks": [],
    "culprit_node": None, "confidence": "supported", "summary": "", "evidence": [], "traceback": None,
    "exit": {"code": None, "signal": None}, "hint": "", "victims": [], "missing": None,
}  # fmt: skip
DETAILS: dict[str, Any] = {
    "incident": INCIDENT,
    "generation_started": {"restarts": 0, "members": []},
    "node_lost": {"status": "lost", "reason": "no heartbeat for 10 s"},
}


def event(seq: int, fields: Mapping[str, Any]) -> Any:
    """Return a whole event."""
    given = {"seq": seq, "time": "2026-11-20T10:03:51.207Z", "generation": 0, "node": None, "rank": None, **fields}
    return {**given, "detail": {**DETAILS.get(fields["type"], {}), **fields.get("detail", {})}}


def journal(events: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of a journal."""
    return "".join(json.dumps(event(seq, fields)) + "\n" for seq, fields in enumerate(events, 1))


def check_readable(emit: Emit) -> None:
    """Assert that an event which the coordinator emits passes the gate for journals as it is."""
    fields = {"type": str(emit.type), "generation": emit.generation, "node": emit.node, "rank": emit.rank}
    whole = json.loads(json.dumps({**event(1, fields), "detail": dict(emit.detail)}))
    assert read_event(whole) == whole
