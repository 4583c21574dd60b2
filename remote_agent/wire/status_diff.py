"""Status documents as differences, so that one change does not repeat hundreds of ranks.

In: two documents, or one and its changes. Out: the changes, or the newer document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Document = Mapping[str, Any]


def changes(old: Document, new: Document) -> dict[str, Any]:
    """Return the changes from `old` to `new`: changed values, changed `nodes`, and their `order` if it changed."""
    changed = {key: value for key, value in new.items() if key != "nodes" and (key not in old or old[key] != value)}
    before = {node["name"]: node for node in old.get("nodes", ())}
    nodes = [node for node in new.get("nodes", ()) if before.get(node["name"]) != node]
    order = [node["name"] for node in new.get("nodes", ())]
    if nodes:
        changed["nodes"] = nodes
    if order != list(before):
        changed["order"] = order
    return changed


def merge(old: Document, changed: Document) -> dict[str, Any]:
    """Return `old` with the changes applied; `old` itself stays unchanged."""
    nodes = {node["name"]: node for document in (old, changed) for node in document.get("nodes", ())}
    order = changed["order"] if "order" in changed else [node["name"] for node in old.get("nodes", ())]
    rest = {key: value for key, value in changed.items() if key != "order"}
    return {**old, **rest, "nodes": [nodes[name] for name in order]}
