"""From what the coordinator knows of a stopped group to the verdict.

In: State with exits and lost nodes. Out: the contract's incident, and its fingerprint.
"""

from __future__ import annotations

from typing import Any


def judge(state: Any, number: int) -> tuple[dict[str, Any], str]:
    ours = {r: e for r, e in state.exits.items() if not e.get("stopped_by_us")}
    first = min(ours, key=lambda r: ours[r]["t_ns"], default=None)
    if state.lost:
        return {"id": number, "category": "node_lost", "culprit_ranks": [], "culprit_node": next(iter(state.lost)), "summary": "lost", "exit": {"code": None, "signal": None}}, "lost"
    e = ours[first] if first is not None else {}
    m = (e.get("error") or {}).get("message", "")
    return {"id": number, "category": "user_exception", "culprit_ranks": [first], "culprit_node": e.get("node"), "summary": m, "exit": {"code": e.get("code"), "signal": e.get("signal")}}, m
