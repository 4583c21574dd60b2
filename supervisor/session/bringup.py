"""Bring one host into a job: its work tree, its agent, its engine, its place among the others.

In: an opened or fresh link, the job's description and authority. Out: a node that the coordinator may use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from remote_agent.wire import CallFailed, JobSpec, WireError
from supervisor.errors import UsageError, why
from supervisor.session.certificates import Authority, sign_with
from supervisor.ssh import HostError, NodeLink, SyncError
from supervisor.ssh.sync import Tree, push_tree

if TYPE_CHECKING:
    from supervisor.session.link import Link
    from supervisor.session.session import Session

# Deadlines in seconds. The node waits 45 s for its agent; importing torch from a cold network disk takes a minute
# or two, and an agent that nobody gives a coordinator ends after three.
START_DEADLINE = 100.0
ENGINE_DEADLINE = 150.0
ASSIGN_DEADLINE = 30.0
# An agent that was removed stays for some seconds, so that its end can be read.
REPLACE_DEADLINE = 20.0
REPLACE_PAUSE = 0.3
# Of the coordinator that a launch names; those that agents elect follow.
FIRST_TERM = 1


@dataclass(frozen=True)
class Material:
    """What a node needs to start: the job, who signs for it, and the tree to bring along (None: it is there)."""

    spec: JobSpec
    authority: Authority
    tree: Tree | None = None
    read: Callable[[], Awaitable[Tree | None]] | None = None
    """Reads the tree where the node has not that of the job already; raises HostError, SyncError."""
    kept: bool = False
    """A version beside the tree will do: groups are switched to it."""
    replaces: bool = False
    """An agent that was removed from the job may still be there for a moment: wait for its end."""
    is_new: bool = False
    """The job must not be there yet."""
    begun: set[str] = field(default_factory=set)
    """Hosts on which something of this job has been made."""


class JobExists(HostError):
    """A job of that name is on the host already, and it is not ours to touch."""


async def prepare(session: Session, link: Link, node: NodeLink, material: Material) -> None:
    """Sync the tree and start the agent, on a connection without an open job; raises HostError, CallFailed."""
    name = link.host.name
    if material.is_new:
        await _refuse_known(node, material)
    await _sync(session, link, node, material)
    link.progress("start", "starting the agent")
    leaf = sign_with(material.authority.ca, material.authority.ca_key, name)
    request = {
        "spec": material.spec.to_json(),
        "node": name,
        "ca": material.authority.ca,
        "ca_key": material.authority.ca_key,
        "cert": leaf.cert,
        "key": leaf.key,
    }
    material.begun.add(name)
    end = time.monotonic() + (REPLACE_DEADLINE if material.replaces else 0.0)
    while True:
        try:
            started = await node.start_agent(request, START_DEADLINE)
            link.view.script = started.get("script")
            return
        except CallFailed as refused:
            if refused.kind in ("already_running", "shared_home"):
                material.begun.discard(name)
            if refused.kind != "already_running" or time.monotonic() > end:
                raise
        except asyncio.TimeoutError as late:
            raise HostError(name, "start", f"the agent did not start within {START_DEADLINE:g} s", "") from late
        link.progress("start", "waiting for the old agent to end")
        await asyncio.sleep(REPLACE_PAUSE)


async def _sync(session: Session, link: Link, node: NodeLink, material: Material) -> None:
    name = link.host.name
    link.progress("sync", "comparing the work tree")
    try:
        tree = material.tree
        if material.read is not None and not await _has_tree(node, material):
            tree = await material.read()
        if tree is None:
            return
        result = await push_tree(node, tree, lambda text: link.progress("sync", text))
    except (SyncError, UsageError) as error:
        raise HostError(name, "sync", error.message, error.hint) from error
    if result.conflicts:
        session.notice(
            f"{name}: files that had been changed there were replaced: {' '.join(result.conflicts)}; "
            f"the old ones are in {result.kept_in}",
            "warning",
            name,
        )


async def _has_tree(node: NodeLink, material: Material) -> bool:
    """Tell whether the node has the very tree that the job runs from."""
    spec = material.spec
    if spec.tree is None or not spec.tree_digest:
        return False
    wish = {"tree": spec.tree, "digest": spec.tree_digest, "kept": material.kept}
    return bool((await node.channel.call("tree_has", wish, timeout=START_DEADLINE)).data["has"])


async def _refuse_known(node: NodeLink, material: Material) -> None:
    """Raise JobExists when the host knows the job, HostError when another of our hosts has just made it there."""
    job, name = material.spec.job, node.host.name
    try:
        known = (await node.channel.call("open", {"job": job}, timeout=START_DEADLINE)).data
    except CallFailed as refused:
        if refused.kind == "no_such_job":
            return
        raise
    other = known.get("node")
    if other != name and other in material.begun:
        hint = 'give each node a root of its own: env = { SUPERVISOR_HOME = "/local/disk/supervisor" }'
        raise HostError(name, "start", f"it shares its home with {other}", hint)
    verb = "attach" if known.get("live") else "clean"
    raise JobExists(
        name, "start", f"a job named {job} is there already", f"choose another --job, or: supervisor {verb} {job}"
    )


async def engine(link: Link) -> dict[str, Any]:
    """Wait until the node's engine has imported torch; raises HostError."""
    name = link.host.name
    link.progress("engine", "importing torch")
    try:
        facts = (await link.call("await_engine", timeout_s=ENGINE_DEADLINE)).data
    except CallFailed as error:
        raise HostError(name, "engine", error.message, error.hint) from error
    except (WireError, asyncio.TimeoutError) as error:
        raise HostError(
            name, "engine", why(error), "torch may take long to load from a cold disk: try again"
        ) from error
    link.view.engine = facts
    link.progress("ready", f"torch {facts.get('torch')}, {facts.get('nproc')} ranks")
    return facts


async def peer_address(link: Link, spec: JobSpec) -> dict[str, Any]:
    """Return where the other agents reach this one; raises HostError."""
    name = link.host.name
    try:
        identity = (await link.call("identity")).data
    except (CallFailed, WireError, asyncio.TimeoutError) as error:
        raise HostError(name, "assign", why(error), "") from error
    link.learn(identity)
    node = spec.node(name)
    return {"address": node.address if node is not None else link.host.address, "port": identity["peer_port"]}


async def assign(
    link: Link,
    term: int,
    coordinator: str,
    members: dict[str, dict[str, Any]],
    absent: dict[str, str] | None = None,
) -> None:
    """Tell the node who coordinates, where the others are, and which never came up and why; raises HostError."""
    request = {
        "term": term,
        "coordinator": {"node": coordinator, **members[coordinator]},
        "members": members,
        "absent": absent or {},
    }
    try:
        await link.call("assign", request, timeout_s=ASSIGN_DEADLINE)
    except (CallFailed, WireError, asyncio.TimeoutError) as error:
        hint = error.hint if isinstance(error, CallFailed) else ""
        raise HostError(link.host.name, "assign", why(error), hint) from error


async def start_on(session: Session, name: str, material: Material) -> None:
    """Bring one host of the session up to `ready to be assigned`; raises HostError."""
    link = session.links[name]
    try:
        await link.bring_up(lambda node: prepare(session, link, node, material))
        if not link.view.live:
            raise HostError(name, "start", "its agent ended at once", f"see agent.log of the job on {name}")
    except CallFailed as error:
        raise HostError(name, link.view.step, error.message, error.hint) from error
    except (WireError, asyncio.TimeoutError) as error:
        raise HostError(name, link.view.step, why(error), "") from error
    await engine(link)
