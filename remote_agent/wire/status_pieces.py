"""A status in pieces, because that of a thousand nodes is larger than a frame.

In: a document, or its pieces. Out: its pieces, or the document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remote_agent.wire.documents import Status

# A frame has the rows of this many nodes at most.
PIECE_NODES = 512


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
