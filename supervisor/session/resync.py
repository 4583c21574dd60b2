"""Bring the edited work tree to the nodes of a running job, whose next group starts from it; or go back to the last.

In: a session, the work tree here, the status document. Out: what changed; what the restart asks for, once every node
has the tree; what came of each node, where some could not get it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from remote_agent.wire import CallFailed, JobSpec, SpecError, WireError
from supervisor.errors import RequestFailed, SupervisorError, why
from supervisor.session.specs import read_tree, read_tree_again
from supervisor.ssh.sync import manifest, push_tree

if TYPE_CHECKING:
    from supervisor.session.link import Link
    from supervisor.session.session import Session
    from supervisor.ssh.scan import Tree

# As for a launch: syncing to all nodes shares one uplink.
LIMIT = 64
ASK_DEADLINE = 60.0
# Nodes in these states take part in the next group, or may.
TAKING_PART = ("running", "ready", "spare")


@dataclasses.dataclass(frozen=True)
class Change:
    """What the next group would start from, against what the group runs from now."""

    digest: str
    files: int = 0
    """That are changed, new or gone."""
    bytes: int = 0
    paths: tuple[str, ...] = ()
    """Some of them."""

    def told(self) -> dict[str, Any]:
        """What the journal and the screen say."""
        return {"files": self.files, "bytes": self.bytes, "paths": list(self.paths)}


async def look(session: Session) -> dict[str, Any]:
    """Return {change, tree}: what is edited here against what the group runs from, or None; `tree` of the status.

    Raises RequestFailed where the job has no synced tree, and what reading the tree raises.
    """
    known = await _known(session)
    tree = await _read(session, await _spec(session))
    change = None if tree.digest == known["digest"] else await _compare(session, tree)
    return {"change": None if change is None else {"digest": change.digest, **change.told()}, "tree": known}


async def spread(session: Session, verb: str, wish: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Bring the tree to all nodes, or with `rollback` make sure that they have the one before.

    Returns the arguments of the restart, empty where it must not be asked for, and what came of each node.
    Raises RequestFailed, SyncError, UsageError.
    """
    known = await _known(session)
    previous = known.get("previous") or {}
    tree: Tree | None = None
    if verb == "rollback":
        if not previous:
            raise RequestFailed("there is no work tree before this one: nothing has been synced since the launch")
        change = Change(str(previous["digest"]))
    else:
        tree = await _read(session, await _spec(session))
        if wish.get("digest") not in (None, tree.digest):
            raise RequestFailed("the work tree has changed since it was looked at", "look again", "stale")
        if tree.digest == known["digest"]:
            hint = "supervisor restart starts the group from it again"
            raise RequestFailed("no file has changed: the group runs from this work tree already", hint, "done")
        change = await _compare(session, tree)
    names = [str(one["name"]) for one in session.status.get("nodes", ()) if one.get("state") in TAKING_PART]
    keep = [str(one["digest"]) for one in (known, previous) if one]
    await session.settle(nodes=names)
    told = await _each(session, names, known["name"], change.digest, tree, keep)
    failed = [name for name, one in told.items() if not one["accepted"]]
    if failed and not (wish.get("partial") and len(failed) < len(told)):
        return {}, told
    # Whichever generation has begun meanwhile: what keeps failing is mended so; and asked for twice, it is done once.
    args = {"tree": change.digest, "told": change.told(), "without": failed, "if_generation": None}
    return {**args, "operator": wish["operator"]}, told


async def ensure(session: Session, link: Link, spec: JobSpec) -> None:
    """Bring a live agent the tree of its job, where it has it not; raises HostError, SyncError and what a wire raises.

    `spec`: as `as_now` returns it.
    """
    if spec.tree is None or not spec.tree_digest:
        return
    wish = {"tree": spec.tree, "digest": spec.tree_digest, "kept": True}
    if (await link.call("tree_has", wish, timeout_s=ASK_DEADLINE)).data["has"]:
        return
    tree = await read_tree_again(session.inventory, spec, link.host.name)
    if tree is not None:
        await push_tree(link.node, tree, lambda text: link.progress("sync", text))


def changed_since_launch(session: Session) -> bool:
    """Whether the groups start from another tree than the one that the job was launched with."""
    return bool((session.status.get("tree") or {}).get("previous"))


def as_now(session: Session, spec: JobSpec) -> JobSpec:
    """Return the description with the digest of the tree that the next group starts from."""
    known = session.status.get("tree") or {}
    return dataclasses.replace(spec, tree_digest=str(known["digest"])) if changed_since_launch(session) else spec


async def _known(session: Session) -> dict[str, Any]:
    status = session.status or await session.call("status")
    known: dict[str, Any] | None = status.get("tree")
    if known is None:
        raise RequestFailed(
            "this job runs from files that supervisor did not bring to the nodes: there is nothing to sync",
            "supervisor restart starts it from those files as they are now",
            "not_synced",
        )
    return known


async def _spec(session: Session) -> JobSpec:
    if session.spec is not None:
        return session.spec
    try:
        return JobSpec.from_json((await session.call("ca"))["spec"])
    except (SpecError, KeyError) as error:
        raise RequestFailed(f"the job's description cannot be read: {error}") from error


async def _read(session: Session, spec: JobSpec) -> Tree:
    tree = await read_tree(session.inventory, spec)
    assert tree is not None, "a job that has a tree in its status has one in its description"
    if spec.kind in ("script", "run_path") and not spec.script.startswith("/"):
        there = {file.path for file in tree.files}
        links = {path for path, _ in tree.links}
        if not any(path == spec.script or path.startswith(f"{spec.script}/") for path in there | links):
            text = f"script {spec.script} is not in the work tree {session.inventory.job.workdir}"
            raise RequestFailed(text, "name the inventory whose workdir it is", "no_script")
    return tree


async def _compare(session: Session, tree: Tree) -> Change:
    """Ask the best agent what differs from what lies there; raises RequestFailed, Unreachable."""
    packed = await asyncio.to_thread(manifest, tree)
    last = ""
    for link in session.opened_links(live=True):
        try:
            found = (await link.call("tree_differences", {"tree": tree.name}, packed, timeout_s=ASK_DEADLINE)).data
        except CallFailed as refused:
            raise RequestFailed(refused.message, refused.hint, refused.kind) from refused
        except (WireError, asyncio.TimeoutError) as broken:
            last = f"{link.view.name}: {why(broken)}"
            continue
        paths = (*(str(path) for path, _ in found["changed"]), *(f"{path} (gone)" for path in found["removed"]))
        return Change(tree.digest, int(found["files"]), sum(int(size) for _, size in found["changed"]), paths)
    raise session.unreachable(last or "no agent is alive there")


async def _each(
    session: Session, names: Sequence[str], name: str, digest: str, tree: Tree | None, keep: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Bring the tree, or where it is None ask for it, on all nodes at once; returns what came of each."""
    limit = asyncio.Semaphore(LIMIT)

    async def one(node: str) -> dict[str, Any]:
        async with limit:
            try:
                link = session.links.get(node)
                if link is None:
                    raise RequestFailed(f"{node} is not in this inventory")
                if tree is not None:
                    await push_tree(link.node, tree, lambda text: link.progress("sync", text), keep=list(keep))
                else:
                    await _check(link, name, digest)
            except CallFailed as refused:
                return {"accepted": False, "message": f"{node}: {refused.message}", "hint": refused.hint}
            except SupervisorError as error:
                return {"accepted": False, "message": error.message, "hint": error.hint}
            except (WireError, asyncio.TimeoutError) as error:
                return {"accepted": False, "message": f"{node}: {why(error)}", "hint": ""}
        return {"accepted": True, "message": f"{node} has work tree {digest[:8]}", "hint": ""}

    answers = await asyncio.gather(*(one(node) for node in names))
    return dict(zip(names, answers, strict=True))


async def _check(link: Link, name: str, digest: str) -> None:
    """Make sure that a node has a version, and that it may be put in place; raises RequestFailed."""
    wish = {"tree": name, "digest": digest, "kept": True}
    await link.call("tree_free", wish, timeout_s=ASK_DEADLINE)
    if not (await link.call("tree_has", wish, timeout_s=ASK_DEADLINE)).data["has"]:
        hint = "it joined later; --partial goes on without it"
        raise RequestFailed(f"{link.host.name}: work tree {digest[:8]} is not there", hint)
