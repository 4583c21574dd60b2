"""A status document as what changed in it: hundreds of ranks are not told again for each fact.

In: two documents, or one and its changes. Out: the changes, or the newer document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Document = Mapping[str, Any]


def changes(old: Document, new: Document) -> dict[str, Any]:
    """Return what makes `new` of `old`: other values, other `nodes`, and their `order` where that is another one."""
    told = {key: value for key, value in new.items() if key != "nodes" and (key not in old or old[key] != value)}
    before = {node["name"]: node for node in old.get("nodes", ())}
    nodes = [node for node in new.get("nodes", ()) if before.get(node["name"]) != node]
    order = [node["name"] for node in new.get("nodes", ())]
    if nodes:
        told["nodes"] = nodes
    if order != list(before):
        told["order"] = order
    return told


def merge(old: Document, told: Document) -> dict[str, Any]:
    """Return the document that `told` makes of `old`, which stays as it is."""
    nodes = {node["name"]: node for document in (old, told) for node in document.get("nodes", ())}
    order = told["order"] if "order" in told else [node["name"] for node in old.get("nodes", ())]
    rest = {key: value for key, value in told.items() if key != "order"}
    return {**old, **rest, "nodes": [nodes[name] for name in order]}
