"""Status documents as differences, so that one change does not repeat hundreds of ranks, and in pieces.

In: two documents, or one and its changes; one, or its pieces. Out: the changes, or the newer document; the pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remote_agent.wire.documents import Status, StatusChanges

_NONE = object()
# A frame has the rows of this many nodes at most.
PIECE_NODES = 512


def changes(old: Status, new: Status) -> StatusChanges:
    """Return the changes from `old` to `new`: changed values, changed `nodes`, and their `order` if it changed."""
    # Keys that only a newer version knows are included.
    known: Any = old
    changed: Any = {key: value for key, value in new.items() if key != "nodes" and known.get(key, _NONE) != value}
    different: StatusChanges = changed
    before = {node["name"]: node for node in old.get("nodes", ())}
    nodes = [node for node in new.get("nodes", ()) if before.get(node["name"]) != node]
    order = [node["name"] for node in new.get("nodes", ())]
    if nodes:
        different["nodes"] = nodes
    if order != list(before):
        different["order"] = order
    return different


def merge(old: Status, changed: StatusChanges) -> Status:
    """Return `old` with the changes applied; `old` itself stays unchanged."""
    nodes = {node["name"]: node for node in (*old.get("nodes", ()), *changed.get("nodes", ()))}
    order = changed["order"] if "order" in changed else [node["name"] for node in old.get("nodes", ())]
    rest = changed.copy()
    rest.pop("order", None)
    shared: Status = rest
    return {**old, **shared, "nodes": [nodes[name] for name in order]}


def pieces(status: Status) -> Iterator[dict[str, Any]]:
    """Yield a status in pieces of PIECE_NODES nodes; `more`: the next one belongs to it."""
    nodes = status["nodes"]
    for at in range(0, max(1, len(nodes)), PIECE_NODES):
        part, more = nodes[at : at + PIECE_NODES], at + PIECE_NODES < len(nodes)
        yield {"nodes": part, "more": more} if at else {"status": {**status, "nodes": part}, "more": more}


def joined(parts: Iterable[Mapping[str, Any]]) -> Status:
    """Return the status of which these are the pieces; raises KeyError."""
    first, *others = parts
    status: Status = first["status"]
    return {**status, "nodes": [*status["nodes"], *(node for part in others for node in part["nodes"])]}
