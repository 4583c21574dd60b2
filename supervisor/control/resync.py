"""Bring the edited work tree to the nodes of a running job, whose next group starts from it; or roll back.

In: a hub, the work tree here, the status document. Out: what changed; the arguments of the restart, once every node
has the tree; the outcome on each node.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from remote_agent.wire import Args, CallFailed, JobSpec, WireError
from supervisor.control import admission
from supervisor.control.replies import entry, failed_entry
from supervisor.errors import RequestFailed, SupervisorError
from supervisor.launch import bringup
from supervisor.launch.specs import is_of_launch, read_tree, read_tree_again
from supervisor.ssh.sync import manifest, push_tree

if TYPE_CHECKING:
    from remote_agent.wire.answers import TreeDifferences
    from remote_agent.wire.documents import EditedTree, NodeStatus, ReplyEntry, Status, TreeStatus, TreeSummary
    from supervisor.link.host_link import HostLink
    from supervisor.link.hub import Hub
    from supervisor.ssh.scan import Tree

# This many nodes are synced at once: they share one uplink.
LIMIT = 64
ASK_DEADLINE = 60.0
# Nodes in these states may take part in the next group; in those, if an agent of theirs is alive.
TAKING_PART = ("running", "ready", "spare")
RETURNING = ("lost", "connecting")


@dataclasses.dataclass(frozen=True)
class Change:
    """The tree from which the next group would start, compared with the tree of the current group."""

    digest: str
    files: int = 0
    """How many are changed, new or removed."""
    bytes: int = 0
    paths: tuple[str, ...] = ()
    """Some of their paths."""

    def summary(self) -> TreeSummary:
        """Return what the journal and the screen show."""
        return {"files": self.files, "bytes": self.bytes, "paths": list(self.paths)}


async def look(hub: Hub) -> EditedTree:
    """Return what has been edited here since the group's tree.

    Raises RequestFailed if the job has no synced tree, SyncError, UsageError.
    """
    known = await _known(hub)
    spec = await admission.description(hub)
    place = str(hub.inventory.job.workdir)
    if not is_of_launch(hub.inventory, spec.job, spec.script, spec.tree):
        # Another inventory with the same hosts may be meant, or the same files on another machine.
        place += ": the job was launched from another directory"
    tree = await _read(hub, spec)
    if tree.digest == known["digest"]:
        return {"change": None, "tree": known, "place": place}
    change = await _compare(hub, tree)
    return {"change": {"digest": change.digest, **change.summary()}, "tree": known, "place": place}


async def spread(hub: Hub, verb: str, args: Args) -> tuple[Args, dict[str, ReplyEntry]]:
    """Bring the tree to all nodes; with `rollback`, check that they have the previous one.

    Returns the arguments of the restart, empty if it must not be requested, and the outcome on each node.
    Raises RequestFailed, SyncError, UsageError.
    """
    known, spec = await _known(hub), await admission.description(hub)
    previous = known["previous"]
    tree: Tree | None = None
    if verb == "rollback":
        if not previous:
            raise RequestFailed("there is no previous work tree: nothing has been synced since the launch")
        change = Change(str(previous["digest"]))
    else:
        tree = await _read(hub, spec)
        if args.get("digest") not in (None, tree.digest):
            raise RequestFailed("the work tree has changed since it was compared", "compare again", "stale")
        if tree.digest == known["digest"]:
            text = f"no file of {hub.inventory.job.workdir} has changed: the group already runs from this work tree"
            raise RequestFailed(text, "to start the group from it again: supervisor restart", "done")
        change = await _compare(hub, tree)
    names = [str(one["name"]) for one in hub.status.get("nodes", ()) if _may_take_part(hub, one)]
    keep = [str(one["digest"]) for one in (known, previous) if one]
    await hub.reach(names)
    await hub.settle(nodes=names)
    entries = await _each(hub, names, spec, change.digest, tree, keep)
    failed = [name for name, one in entries.items() if not one["accepted"]]
    if failed and not (args.get("partial") and len(failed) < len(entries)):
        return {}, entries
    # The restart is valid in any generation: new files may end a series of failures. Repeating it changes nothing.
    restart = {"tree": change.digest, "change": change.summary(), "without": failed, "if_generation": None}
    return {**restart, "operator": args["operator"]}, entries


def _may_take_part(hub: Hub, node: NodeStatus) -> bool:
    """Tell whether a node may be in the next group: it is ready, or its agent is back and will be soon."""
    link, state = hub.links.get(str(node["name"])), node.get("state")
    return state in TAKING_PART or (state in RETURNING and link is not None and link.opened and bool(link.view.live))


async def ensure(hub: Hub, link: HostLink, spec: JobSpec) -> None:
    """Bring a live agent the tree of its job if it lacks it; `spec`: from `as_now`.

    Raises HostError, SyncError, CallFailed, WireError, asyncio.TimeoutError.
    """
    if spec.tree is None or not spec.tree_digest:
        return
    request = {"tree": spec.tree, "digest": spec.tree_digest, "kept": True}
    if not (await link.call("tree_has", request, timeout_s=ASK_DEADLINE)).data["has"]:
        tree = await read_tree_again(hub.inventory, spec, link.host.name)
        if tree is not None:
            await push_tree(link.node, tree, lambda text: link.progress("sync", text))
    await bringup.make(link, spec)


def changed_since_launch(hub: Hub) -> bool:
    """Tell whether groups start from another tree than at the launch."""
    return bool((tree := hub.status.get("tree")) and tree["previous"])


def as_now(hub: Hub, spec: JobSpec) -> JobSpec:
    """Return the description with the digest of the tree from which the next group starts."""
    known = hub.status.get("tree")
    return dataclasses.replace(spec, tree_digest=known["digest"]) if known and known["previous"] else spec


async def _known(hub: Hub) -> TreeStatus:
    status: Status = hub.status or await hub.call("status")
    known = status.get("tree")
    if known is None:
        raise RequestFailed(
            "supervisor did not copy this job's files to the nodes: there is nothing to sync",
            "to start it from the files as they are now: supervisor restart",
            "not_synced",
        )
    return known


async def _read(hub: Hub, spec: JobSpec) -> Tree:
    tree = await read_tree(hub.inventory, spec)
    assert tree is not None, "a job that has a tree in its status has one in its description"
    if spec.kind in ("script", "run_path") and not spec.script.startswith("/"):
        there = {file.path for file in tree.files}
        links = {path for path, _ in tree.links}
        if not any(path == spec.script or path.startswith(f"{spec.script}/") for path in there | links):
            text = f"script {spec.script} is not in the work tree {hub.inventory.job.workdir}"
            raise RequestFailed(text, "name the inventory whose workdir has the script", "no_script")
    return tree


async def _compare(hub: Hub, tree: Tree) -> Change:
    """Ask the best agent what differs from the tree on its node; raises RequestFailed, Unreachable."""
    packed = await asyncio.to_thread(manifest, tree)

    async def ask(link: HostLink) -> TreeDifferences:
        answer = await link.call("tree_differences", {"tree": tree.name}, packed, timeout_s=ASK_DEADLINE)
        differences: TreeDifferences = answer.data
        return differences

    difference = await hub.ask_best(ask, live=True)
    changed, removed = difference["changed"], difference["removed"]
    paths = (*(str(path) for path, _ in changed), *(f"{path} (removed)" for path in removed))
    return Change(tree.digest, difference["files"], sum(size for _, size in changed), paths)


async def _each(
    hub: Hub, names: Sequence[str], spec: JobSpec, digest: str, tree: Tree | None, keep: Iterable[str]
) -> dict[str, ReplyEntry]:
    """Bring the tree to all nodes at once (None: check that they have it); returns the outcome on each."""
    limit = asyncio.Semaphore(LIMIT)

    async def one(node: str) -> ReplyEntry:
        async with limit:
            try:
                link = hub.links.get(node)
                if link is None:
                    raise RequestFailed(f"{node} is not in this inventory")
                if tree is not None:
                    await push_tree(link.node, tree, lambda text: link.progress("sync", text), keep=list(keep))
                    # What the new files need is made beside the group, which goes on whatever becomes of it.
                    await bringup.make(link, dataclasses.replace(spec, tree_digest=digest))
                else:
                    await _check(link, str(spec.tree), digest)
            except (CallFailed, SupervisorError, WireError, asyncio.TimeoutError) as error:
                return failed_entry(node, error)
        return entry(True, f"{node} has work tree {digest[:8]}")

    entries = await asyncio.gather(*(one(node) for node in names))
    return dict(zip(names, entries, strict=True))


async def _check(link: HostLink, name: str, digest: str) -> None:
    """Check that a node has a version, and that it may be put in place; raises RequestFailed."""
    request = {"tree": name, "digest": digest, "kept": True}
    await link.call("tree_free", request, timeout_s=ASK_DEADLINE)
    if not (await link.call("tree_has", request, timeout_s=ASK_DEADLINE)).data["has"]:
        hint = "the node joined later; --partial continues without it"
        raise RequestFailed(f"{link.host.name}: work tree {digest[:8]} is not there", hint)
