"""Facts about nodes, trees and snapshots of a State: what the next group can have, what it waits for, what is kept.

In: a State. Out: answers; nothing is changed. The status of a job needs no more of the coordinator than this and the
fold of its journal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remote_agent.coordinator import state as s
from remote_agent.coordinator.quorum import lacking
from remote_agent.wire.documents import SLOW_OFF
from remote_agent.wire.events import StopCause

if TYPE_CHECKING:
    from remote_agent.wire.documents import Sampling, SlowStatus, SnapshotEntry, SnapshotStatus, TreeStatus, TreeVersion

# People see this many digits of a digest.
SHORT = 8


def floor(state: s.State) -> int:
    """Return how many nodes the group needs: what an operator removed is not waited for."""
    known = len(wanted(state))
    if state.spec.endpoint:
        known = max(known, state.spec.min_nodes - sum(node.status == "removed" for node in state.nodes.values()))
    return max(1, min(state.spec.min_nodes, known))


def wanted(state: s.State) -> list[s.Node]:
    """Return the nodes that the job is meant to have."""
    return [node for node in state.nodes.values() if node.status != "removed" and not node.spec.spare]


def choose(state: s.State) -> list[str]:
    """Return the nodes of the next generation in inventory order.

    Spares fill the places of absent nodes; that of a removed one only where min_nodes asks for it.
    """
    fit = [node for node in state.nodes.values() if node.connected and node.ready and node.running is None]
    regular = [node.name for node in fit if node.status in ("ready", "running")]
    spare = [node.name for node in fit if node.status == "spare" and not node.cordoned]
    regular.sort(key=lambda name: name not in state.members)
    chosen = set(regular[: state.spec.max_nodes])
    chosen.update(spare[: max(0, limit(state) - len(chosen))])
    return [name for name in state.nodes if name in chosen]


def limit(state: s.State) -> int:
    """Return up to how many nodes spares fill the group."""
    return min(state.spec.max_nodes, max(len(wanted(state)), state.spec.min_nodes))


def is_short(state: s.State) -> bool:
    """Return whether no group can be formed until more nodes are there."""
    return state.phase == s.FORMING and state.alone_since is not None


def shortage(state: s.State) -> str:
    """Say why no group can be formed now, and which nodes are left out for good unless an operator adds them."""
    fewer = len(choose(state)) < floor(state)
    connected = state.disks([name for name, node in state.nodes.items() if node.connected or name == state.me])
    group = lacking(state.groups, connected, state.given_up)
    reason = "fewer than min_nodes are ready"
    if not fewer:
        others = "" if group is None else f" ({group.needed} must be; if the others are dead: `supervisor promote`)"
        reason = f"too few nodes of the last group are connected{others}"
    return "; ".join([reason, *left_out(state, "failed")])


def left_out(state: s.State, *statuses: str) -> list[str]:
    """Return each node with one of these states, and why it has it."""
    return [f"{name}: {node.reason}" for name, node in state.nodes.items() if node.status in statuses]


def has_proven_tree(state: s.State) -> bool:
    """Return whether a group has completed a step from the current tree, or the tree is not new."""
    since = state.tree_new_since
    return since is None or (state.stepped and state.generation > since)


def current(state: s.State) -> s.Version:
    """Return the tree that the next group starts from."""
    return state.trees[-1] if state.trees else s.Version(state.spec.tree_digest, state.spec.created_ns)


def tree_status(state: s.State) -> TreeStatus | None:
    """Return the work tree as the status document shows it; None where it is not synced."""
    if state.spec.tree is None or not (now := current(state)).digest:
        return None
    before = state.trees[0] if state.trees else None
    previous: TreeVersion | None = before and {"digest": before.digest, "since_ns": before.since_ns}
    return {"name": state.spec.tree, "digest": now.digest, "since_ns": now.since_ns, "previous": previous}


def origin(state: s.State) -> str:
    """Say which tree a group is started from, where that is not the launch's, and how to get the one before."""
    if not state.trees:
        return ""
    way_back = f"; R rolls back to {state.trees[0].digest[:SHORT]}" if state.fingerprint is not None else ""
    return f" from work tree {state.trees[-1].digest[:SHORT]}{way_back}"


def kept_snapshots(state: s.State) -> list[SnapshotStatus]:
    """Return the snapshots that the nodes keep, oldest first, as the status shows them."""
    versions: dict[str, SnapshotStatus] = {}
    for name, node in state.nodes.items():
        for one in node.snapshots:
            skipped = state.skipped.has(one)
            known = versions.setdefault(one["id"], {**named(one), "nodes": [], "skipped": skipped})
            known["nodes"] += [name] if node.connected else []
    snapshots = [one for one in versions.values() if one["nodes"]]
    return sorted(snapshots, key=lambda one: (one["time_ns"], one["id"]))


def named(one: SnapshotEntry) -> SnapshotEntry:
    """Return what the journal and the status say about a snapshot."""
    return {
        "id": one["id"], "path": one["path"], "step": one["step"], "exact": bool(one.get("exact")),
        "bytes": one["bytes"], "time_ns": one["time_ns"],
    }  # fmt: skip


def is_last(state: s.State) -> bool:
    """Return whether no group follows the one that is being stopped, as far as is known."""
    if state.preliminary is not None:
        return state.preliminary.is_last
    # The verdict may still find one node at fault, or the new work tree.
    is_certain = not state.blames and not state.suspects and has_proven_tree(state)
    return state.cause == StopCause.FAILURE and state.restarts >= state.spec.max_restarts and is_certain


def slow_status(state: s.State) -> list[SlowStatus]:
    """Return for which ranks the others wait, or what limits all of them, while the group runs."""
    status = state.watch.slow.status
    return [status] if status is not None and state.phase == s.RUNNING else []


def sampling(state: s.State) -> Sampling:
    """Return whether the ranks are sampled."""
    off = SLOW_OFF if not state.spec.slow else state.watch.slow.off
    if state.phase == s.ENDED:
        off = "the job is over"
    return {"state": "off" if off else "on", "reason": off or None}
