"""Which work tree the next group starts from, and who has it.

In: a Turn, an operator's restart with a tree, what nodes say they have. Out: the change as a fact of the journal; nodes
without the tree are not ready.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remote_agent import formation
from remote_agent import state as s

if TYPE_CHECKING:
    from remote_agent.turn import Turn

# Of a digest, for people.
SHORT = 8
# Files that the journal names.
MAX_TOLD = 20


def current(state: s.State) -> s.Version:
    """Return the tree that the next group starts from."""
    return state.trees[-1] if state.trees else s.Version(state.spec.tree_digest, state.spec.created_ns)


def admits(turn: Turn, name: str) -> bool:
    """Note whether a node has the tree of the next group; returns False where it has not, as it is not ready then."""
    state, node = turn.state, turn.node(name)
    lacks = bool(state.trees) and state.trees[-1].digest not in node.trees
    if lacks:
        turn.set_node(name, lacks=True, ready=False, reason=_lacking(current(state).digest, name))
    elif node.lacks:
        turn.set_node(name, lacks=False, reason=None)
    return not lacks


def _lacking(digest: str, name: str) -> str:
    return f"it has not the work tree {digest[:SHORT]}: `supervisor add --node {name}` brings it"


def change(turn: Turn, event: s.Restart) -> bool:
    """Start the next group from another tree, if all that take part have it; returns whether that is so."""
    state, digest = turn.state, event.tree
    before = current(state)
    if state.spec.tree is None or not before.digest:
        turn.refuse("not_synced", "this job does not run from a work tree that was synced", "supervisor restart")
        return False
    if digest == before.digest:
        turn.refuse("done", f"the group runs from work tree {digest[:SHORT]} already", "supervisor restart")
        return False
    if not _is_there(turn, event):
        return False
    back = bool(state.trees) and state.trees[0].digest == digest
    after = state.trees[0] if back else s.Version(digest, turn.wall_ns)
    # What failed before its first step was the old code.
    turn.set(trees=(before, after), fingerprint=None)
    told: dict[str, Any] = {key: event.told[key] for key in ("files", "bytes") if isinstance(event.told.get(key), int)}
    told["paths"] = [str(path) for path in event.told.get("paths", ())][:MAX_TOLD]
    if event.without:
        told["without"] = list(event.without)
    turn.emit("tree_changed", digest=digest, rollback=back, trees=[list(one) for one in turn.state.trees], **told,
              operator=event.operator)  # fmt: skip
    for name in state.nodes:
        admits(turn, name)
    return True


def _is_there(turn: Turn, event: s.Restart) -> bool:
    """Refuse what would leave out a node that the operator has not named, or too many."""
    state, digest = turn.state, event.tree
    part = [node for node in state.nodes.values() if node.connected and node.status in ("running", "ready", "spare")]
    lacking = [
        node.name
        for node in part
        if digest not in node.trees and node.status != "spare" and node.name not in event.without
    ]
    if lacking:
        text = f"{' '.join(lacking)}: work tree {digest[:SHORT]} is not there, so nothing is restarted"
        turn.refuse("no_tree", text, "sync again; --partial goes on without them")
        return False
    having, floor = sum(digest in node.trees and not node.cordoned for node in part), formation.floor(state)
    if having < floor:
        text = f"{having} nodes have work tree {digest[:SHORT]}, and {floor} are needed (min_nodes)"
        turn.refuse("no_tree", text, "`supervisor remove` those that cannot get it")
        return False
    return True


def told(state: s.State) -> dict[str, Any] | None:
    """Return what the status document says of the tree; None where it is not synced."""
    if state.spec.tree is None or not (now := current(state)).digest:
        return None
    before = state.trees[0]._asdict() if state.trees else None
    return {"name": state.spec.tree, **now._asdict(), "previous": before}


def way_back(state: s.State) -> str:
    """Return the offer to roll back, where the first failure of a tree came before its first step; else nothing."""
    if len(state.trees) < 2 or state.fingerprint is None:
        return ""
    return f"; R rolls back to work tree {state.trees[0].digest[:SHORT]}"
