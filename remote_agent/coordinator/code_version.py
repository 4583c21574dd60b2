"""Which work tree the next group starts from, and which nodes have it.

In: a Turn, an operator's restart with a tree, the trees that nodes report. Out: the change in the journal; nodes
without the tree are not ready.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remote_agent.coordinator import inputs, views
from remote_agent.coordinator import state as s
from remote_agent.wire.events import OUT_OF_GROUPS, EventType

if TYPE_CHECKING:
    from remote_agent.coordinator.transitions import Turn

LACKING = "it is missing the work tree"
MAX_LISTED = 20


def admits(turn: Turn, name: str) -> bool:
    """Note whether a node has the tree of the next group; return False if it lacks it, since it is then not ready."""
    state, node = turn.state, turn.node(name)
    digest = views.current(state).digest
    missing = bool(state.trees) and digest not in node.trees
    # A node that is not ready yet will report its trees when it is.
    lacks = missing and (node.ready or node.lacks)
    # If the node is left out for another reason, that reason stays.
    reason = None if (node.reason or "").startswith(LACKING) else node.reason
    if lacks and node.connected and node.status not in OUT_OF_GROUPS:
        reason = f"{LACKING} {digest[: views.SHORT]}: `supervisor add --node {name}` brings it"
    if lacks or node.lacks:
        turn.set_node(name, lacks=lacks, ready=node.connected and not lacks, reason=reason)
    return not missing


def change(turn: Turn, event: inputs.Restart) -> bool:
    """Start the next group from another tree if all participants have it; return whether they do."""
    state, digest = turn.state, event.tree
    before = views.current(state)
    if state.spec.tree is None or not before.digest:
        turn.refuse("not_synced", "this job does not run from a work tree that was synced", "supervisor restart")
        return False
    if digest == before.digest:
        turn.refuse("done", f"the group already runs from work tree {digest[: views.SHORT]}", "supervisor restart")
        return False
    if not _is_available(turn, event):
        return False
    back = bool(state.trees) and state.trees[0].digest == digest
    after = state.trees[0] if back else s.Version(digest, turn.wall_ns)
    change: dict[str, Any] = {
        key: event.change[key] for key in ("files", "bytes") if isinstance(event.change.get(key), int)
    }
    change["paths"] = [str(path) for path in event.change.get("paths", ())][:MAX_LISTED]
    if event.without:
        change["without"] = list(event.without)
    _take(turn, before, after, back, {**change, "operator": event.operator})
    return True


def _take(turn: Turn, before: s.Version, after: s.Version, back: bool, detail: dict[str, Any]) -> None:
    """Make `after` the tree of the next group; an earlier failure before the first step was the old code's."""
    turn.set(trees=(before, after), tree_new_since=None if back else turn.state.generation, fingerprint=None)
    turn.emit(EventType.TREE_CHANGED, digest=after.digest, rollback=back, trees=[list(before), list(after)], **detail)
    for name in turn.state.nodes:
        admits(turn, name)


def fall_back(turn: Turn, reason: str) -> bool:
    """If the current tree has not completed a step and the job would end, return to the previous tree; return whether
    that was possible.
    """
    state = turn.state
    if len(state.trees) < 2 or views.has_proven_tree(state):
        return False
    before, after = state.trees
    participants = [node for node in state.nodes.values() if node.connected and node.status == "ready"]
    if not all(before.digest in node.trees for node in participants):
        return False
    _take(turn, after, before, True, {"reason": reason})
    return True


def _is_available(turn: Turn, event: inputs.Restart) -> bool:
    """Refuse the tree if a participant lacks it that the operator has not excluded, or if too many nodes lack it."""
    state, digest = turn.state, event.tree
    participants = [
        node for node in state.nodes.values() if node.connected and node.status in ("running", "ready", "spare")
    ]
    lacking = [
        node.name
        for node in participants
        if digest not in node.trees and node.status != "spare" and node.name not in event.without
    ]
    if lacking:
        text = f"{' '.join(lacking)}: work tree {digest[: views.SHORT]} is not there, so nothing is restarted"
        turn.refuse("no_tree", text, "sync again; --partial continues without them")
        return False
    fit = [digest in node.trees for node in participants if not node.cordoned]
    having, floor = sum(fit), views.floor(state)
    # A job that waits for nodes anyway continues waiting for them.
    if having < min(floor, len(fit)):
        text = f"{having} nodes have work tree {digest[: views.SHORT]}, and {floor} are needed (min_nodes)"
        turn.refuse("min_nodes", text, "`supervisor remove` those that cannot get it")
        return False
    return True
