"""Which work tree the next group starts from, and who has it.

In: a Turn, an operator's restart with a tree, what nodes say they have. Out: the change as a fact of the journal; nodes
without the tree are not ready.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remote_agent import formation, inputs
from remote_agent import state as s

if TYPE_CHECKING:
    from remote_agent.turn import Turn

# Of a digest, for people.
SHORT = 8
LACKING = "it has not the work tree"
# Files that the journal names.
MAX_TOLD = 20


def current(state: s.State) -> s.Version:
    """Return the tree that the next group starts from."""
    return state.trees[-1] if state.trees else s.Version(state.spec.tree_digest, state.spec.created_ns)


def admits(turn: Turn, name: str) -> bool:
    """Note whether a node has the tree of the next group; returns False where it has not, as it is not ready then."""
    state, node = turn.state, turn.node(name)
    digest = current(state).digest
    missing = bool(state.trees) and digest not in node.trees
    # One that is not ready anyway will say what it has when it is.
    lacks = missing and (node.ready or node.lacks)
    # Why a node is out anyway is worth more.
    reason = None if (node.reason or "").startswith(LACKING) else node.reason
    if lacks and node.connected and node.status not in ("removed", "failed", "draining"):
        reason = f"{LACKING} {digest[:SHORT]}: `supervisor add --node {name}` brings it"
    if lacks or node.lacks:
        turn.set_node(name, lacks=lacks, ready=node.connected and not lacks, reason=reason)
    return not missing


def change(turn: Turn, event: inputs.Restart) -> bool:
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
    told: dict[str, Any] = {key: event.told[key] for key in ("files", "bytes") if isinstance(event.told.get(key), int)}
    told["paths"] = [str(path) for path in event.told.get("paths", ())][:MAX_TOLD]
    if event.without:
        told["without"] = list(event.without)
    _take(turn, before, after, back, {**told, "operator": event.operator})
    return True


def _take(turn: Turn, before: s.Version, after: s.Version, back: bool, told: dict[str, Any]) -> None:
    """Let the next group start from a tree; what failed before its first step was the old code."""
    turn.set(trees=(before, after), tree_new_since=None if back else turn.state.generation, fingerprint=None)
    turn.emit("tree_changed", digest=after.digest, rollback=back, trees=[list(before), list(after)], **told)
    for name in turn.state.nodes:
        admits(turn, name)


def fall_back(turn: Turn, reason: str) -> bool:
    """Go back to the tree before one that has made no step, where that would end the job; returns whether it does."""
    state = turn.state
    if len(state.trees) < 2 or formation.has_proven_tree(state):
        return False
    before, after = state.trees
    part = [node for node in state.nodes.values() if node.connected and node.status == "ready"]
    if not all(before.digest in node.trees for node in part):
        return False
    _take(turn, after, before, True, {"reason": reason})
    return True


def _is_there(turn: Turn, event: inputs.Restart) -> bool:
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
    fit = [digest in node.trees for node in part if not node.cordoned]
    having, floor = sum(fit), formation.floor(state)
    # A job that waits for nodes anyway goes on waiting for them.
    if having < min(floor, len(fit)):
        text = f"{having} nodes have work tree {digest[:SHORT]}, and {floor} are needed (min_nodes)"
        turn.refuse("min_nodes", text, "`supervisor remove` those that cannot get it")
        return False
    return True


def told(state: s.State) -> dict[str, Any] | None:
    """Return what the status document says of the tree; None where it is not synced."""
    if state.spec.tree is None or not (now := current(state)).digest:
        return None
    before = state.trees[0]._asdict() if state.trees else None
    return {"name": state.spec.tree, **now._asdict(), "previous": before}


def origin(state: s.State) -> str:
    """Say which tree a group is started from, where that is not the launch's, and how to get the one before."""
    if not state.trees:
        return ""
    way_back = f"; R rolls back to {state.trees[0].digest[:SHORT]}" if state.fingerprint is not None else ""
    return f" from work tree {state.trees[-1].digest[:SHORT]}{way_back}"
