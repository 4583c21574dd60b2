"""Bring one host into a job: sync its work tree, start its agent and engine, introduce it to the others.

In: a link, the job's description, an authority that certifies the node. Out: a node that the coordinator may use.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.wire import CallFailed, JobSpec, WireError
from supervisor.errors import JobInTheWay, UsageError, why
from supervisor.launch.certificates import Authority, sign_with
from supervisor.ssh import HostError, NodeLink, SyncError
from supervisor.ssh.sync import Tree, TreeFile, push_tree

if TYPE_CHECKING:
    from remote_agent.wire.answers import Address
    from supervisor.link.host_link import HostLink
    from supervisor.link.hub import Hub
    from supervisor.ssh.answers import EngineFacts, Identity

# Deadlines in seconds. The node waits 45 s for its agent; importing torch from a cold network disk takes one or two
# minutes; an agent that gets no coordinator ends after three.
START_DEADLINE = 100.0
ENGINE_DEADLINE = 150.0
ASSIGN_DEADLINE = 30.0
# A program of Linux begins with these bytes.
ELF = b"\x7fELF"
# The node ends a build or a pull that says nothing for 30 minutes.
MAKE_SILENT = 2000.0
PROMOTE_DEADLINE = 30.0
# A removed agent stays for some seconds so that its end can be read.
REPLACE_PAUSE = 0.3
# Connected hosts wait this long for an earlier one in the inventory to connect, and then to lock its tree.
PASS_OVER_S = 5.0


class TreeOrder:
    """The order in which a launch locks the work tree of its hosts: on one host first, then on all others at once.

    That host is the first of the inventory, so launches of one tree at the same time meet there: the one that finds the
    lock taken holds none elsewhere, and the other one is not kept from starting. A host that failed is passed over; so
    are hosts that do not arrive within PASS_OVER_S, and one that does not answer within PASS_OVER_S of its turn. A host
    where another job is in the way is not: nothing else is locked then.
    """

    def __init__(self, hosts: Iterable[str]) -> None:
        self._candidates = list(hosts)
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._is_locked = False
        self._timer: asyncio.TimerHandle | None = None

    async def turn(self, name: str) -> None:
        """Wait until a connected host may lock its tree."""
        turn = self._turns[name] = asyncio.get_running_loop().create_future()
        if self._timer is None:
            self._wait()
        self._give_turns()
        await turn

    def locked(self) -> None:
        """Note that a host has locked its tree."""
        self._is_locked = True
        self._give_turns()

    def pass_over(self, name: str) -> None:
        """Note that a host failed."""
        if name in self._candidates:
            self._candidates.remove(name)
            self._give_turns()

    def _give_turns(self) -> None:
        is_open = self._is_locked or not self._candidates
        if is_open:
            chosen, self._turns = self._turns, {}
        else:
            first = self._candidates[0]
            chosen = {first: self._turns[first]} if first in self._turns else {}
        waiting = [turn for turn in chosen.values() if not turn.done()]
        for turn in waiting:
            turn.set_result(None)
        if is_open:
            self._stop_waiting()
        elif waiting:
            self._wait()

    def _wait(self) -> None:
        self._stop_waiting()
        self._timer = asyncio.get_running_loop().call_later(PASS_OVER_S, self._pass_over_silent)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _pass_over_silent(self) -> None:
        """Pass over the hosts that have not arrived, and the one that has had its turn."""
        self._candidates = [one for one in self._candidates if one in self._turns and not self._turns[one].done()]
        self._give_turns()


@dataclass(frozen=True)
class Material:
    """What a node needs to start: the job, who certifies it, and the tree to sync (None: it is there)."""

    spec: JobSpec
    authority: Authority | None
    """Certifies the node; None: it has a certificate that the others trust."""
    trusted: str = ""
    """PEM text of the other authorities that certify nodes of the job."""
    tree: Tree | None = None
    read: Callable[[], Awaitable[Tree | None]] | None = None
    """Reads the tree if the node lacks the job's tree; raises HostError, SyncError."""
    kept: bool = False
    """A stored version of the tree is enough: groups are switched to it."""
    is_new: bool = False
    """The job must not exist on the host yet."""
    begun: set[str] = field(default_factory=set)
    """Hosts on which this launch has created the job."""
    left: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By host: what the work tree contains besides the files that were sent."""
    order: TreeOrder | None = None
    """The launch's order of the hosts; None: another job may run from the same work tree."""
    slots: asyncio.Semaphore | None = None
    """So many hosts are synced and started at once; None: this one alone."""
    after_ns: int = 0
    """The time of the job's newest event, by the clock of its coordinator: a certificate is issued after it."""


async def prepare(hub: Hub, link: HostLink, node: NodeLink, material: Material) -> None:
    """Sync the tree and start the agent, on a connection without an open job; raises HostError, CallFailed."""
    name = link.host.name
    if material.is_new:
        await _refuse_known(node, material)
    await _sync(hub, link, node, material)
    if material.spec.environment:
        await lend_uv(node, lambda text: link.progress("sync", text))
    link.progress("start", "starting the agent")
    request = {"spec": material.spec.to_json(), "node": name, "ca": material.trusted}
    if material.authority is not None:
        leaf = sign_with(material.authority.ca, material.authority.ca_key, name, material.after_ns)
        # Its own comes first: by that others see later whether they trust it.
        request |= {"ca": material.authority.ca + material.trusted, "cert": leaf.cert, "key": leaf.key}
    material.begun.add(name)
    try:
        started = await node.start_agent(request, START_DEADLINE)
    except CallFailed as refused:
        if refused.kind in ("already_running", "shared_home"):
            material.begun.discard(name)
        raise
    except asyncio.TimeoutError as late:
        raise HostError(name, "start", f"the agent did not start within {START_DEADLINE:g} s", "") from late
    link.learn_script(started.get("script"))


async def _sync(hub: Hub, link: HostLink, node: NodeLink, material: Material) -> None:
    name = link.host.name
    link.progress("sync", "comparing the work tree")
    try:
        tree = material.tree
        if material.read is not None and not await _has_tree(node, material):
            tree = await material.read()
        if tree is None:
            return
        order = material.order
        if order is not None:
            await order.turn(name)
        locked = order.locked if order is not None else None
        result = await push_tree(node, tree, lambda text: link.progress("sync", text), locked=locked)
    except (SyncError, UsageError) as error:
        raise HostError(name, "sync", error.message, error.hint) from error
    material.left[name] = result.left
    if result.conflicts:
        hub.notice(
            f"{name}: files changed on the node were replaced: {' '.join(result.conflicts)}; "
            f"the old versions are in {result.kept_in}",
            "warning",
            name,
        )


async def lend_uv(node: NodeLink, progress: Callable[[str], None]) -> None:
    """Bring this machine's uv to a node of the same platform that has none; raises HostError."""
    found = shutil.which("uv")
    here = os.uname()
    if found is None or node.hello["uv"] or node.hello["platform"] != f"{here.sysname} {here.machine}":
        return
    tree = await asyncio.to_thread(_tool, Path(found))
    if tree is not None:
        await push_tree(node, tree, lambda text: progress(f"copying uv: {text}"))


@functools.cache
def _tool(path: Path) -> Tree | None:
    """Return a program as a tree with one file, named by its content; None for a script, which needs other files."""
    content = path.read_bytes()
    if not content.startswith(ELF):
        return None
    digest = hashlib.sha256(content).hexdigest()
    file = TreeFile("uv", 0o700, len(content), digest, 0)
    return Tree(f"uv.{digest[:16]}", path.parent, (file,), (), ())


async def _has_tree(node: NodeLink, material: Material) -> bool:
    """Tell whether the node has exactly the tree from which the job runs."""
    spec = material.spec
    if spec.tree is None or not spec.tree_digest:
        return False
    request = {"tree": spec.tree, "digest": spec.tree_digest, "kept": material.kept}
    return bool((await node.channel.call("tree_has", request, timeout=START_DEADLINE)).data["has"])


async def _refuse_known(node: NodeLink, material: Material) -> None:
    """Raise JobInTheWay if the host knows the job, HostError if another host of this launch has created it there."""
    job, name = material.spec.job, node.host.name
    try:
        known = (await node.channel.call("open", {"job": job}, timeout=START_DEADLINE)).data
    except CallFailed as refused:
        if refused.kind == "no_such_job":
            return
        raise
    other = known.get("node")
    if other != name and other in material.begun:
        hint = 'set a local directory for each node: env = { SUPERVISOR_HOME = "/local/disk/supervisor" }'
        raise HostError(name, "start", f"it shares its home directory with {other}", hint)
    verb = "attach" if known.get("live") else "clean"
    hint = f"choose another --job, or: supervisor {verb} HOSTS {job}"
    raise JobInTheWay(name, "start", f"a job named {job} already exists", hint)


async def make(link: HostLink, spec: JobSpec) -> None:
    """Have a node make what the ranks of a job need there, if that is to be made; raises HostError."""
    what = "build" if spec.environment else "image" if spec.container else ""
    if not what:
        return
    link.progress(what, f"looking for {spec.environment or spec.container}")
    with _failing(link, what):
        items = link.whole_stream("make", {"tree": spec.tree_digest}, timeout_s=MAKE_SILENT)
        async with aclosing(items):
            async for item in items:
                link.progress(what, item.data["said"])


@contextmanager
def _failing(link: HostLink, step: str = "", hint: str = "") -> Iterator[None]:
    """Turn the errors of a request into a HostError at this step, else at the one that the link shows."""
    try:
        yield
    except (CallFailed, WireError, asyncio.TimeoutError) as error:
        advice = error.hint if isinstance(error, CallFailed) else hint
        raise HostError(link.host.name, step or link.view.step, why(error), advice) from error


async def engine(link: HostLink) -> EngineFacts:
    """Wait until the node's engine knows its torch; raises HostError."""
    link.progress("engine", "looking for torch")
    with _failing(link, "engine", "torch may load slowly from a cold disk: try again"):
        facts: EngineFacts = (await link.call("await_engine", timeout_s=ENGINE_DEADLINE)).data
    link.learn_engine(facts)
    link.progress("ready", f"torch {facts.get('torch')}, {facts.get('nproc')} ranks")
    return facts


async def peer_address(link: HostLink, spec: JobSpec) -> Address:
    """Return the address and port at which the other agents reach this one; raises HostError."""
    with _failing(link, "assign"):
        identity: Identity = (await link.call("identity")).data
    link.learn(identity)
    node = spec.node(link.host.name)
    return {"address": node.address if node is not None else link.host.address, "port": identity["peer_port"]}


async def assign(
    link: HostLink,
    term: int,
    coordinator: str,
    members: dict[str, Address],
    absent: dict[str, str] | None = None,
) -> None:
    """Send the node its coordinator, the addresses of all members, and why others are absent; raises HostError."""
    request = {
        "term": term,
        "coordinator": {"node": coordinator, **members[coordinator]},
        "members": members,
        "absent": absent or {},
    }
    with _failing(link, "assign"):
        await link.call("assign", request, timeout_s=ASSIGN_DEADLINE)


async def start_on(hub: Hub, name: str, material: Material) -> None:
    """Bring one host up until it can be assigned; raises HostError."""
    link = hub.links[name]
    # Torch may take long to load: that goes on without a slot.
    async with material.slots or contextlib.nullcontext():
        with _failing(link):
            await link.bring_up(lambda node: prepare(hub, link, node, material))
    try:
        await _started(link, material.spec)
    except HostError as lost:
        if not isinstance(lost.__cause__, WireError):
            raise
        # The connection ended, with the agent that this one replaces: the link has another one at once.
        await hub.wait_until(lambda: not link.opened, REPLACE_PAUSE)
        await link.until_open()
        await _started(link, material.spec)


async def _started(link: HostLink, spec: JobSpec) -> None:
    if not link.view.live:
        name = link.host.name
        raise HostError(name, "start", "its agent ended at once", f"read agent.log of the job on {name}")
    await make(link, spec)
    await engine(link)


async def introduce(hub: Hub, link: HostLink, spec: JobSpec) -> None:
    """Assign a started agent to the coordinator of the running job; raises HostError, RequestFailed."""
    agents = await hub.identities()
    mine = link.view.name
    others = {name: one for name, one in agents.items() if name != mine}
    heads = [one for one in others.values() if one.get("coordinator")]
    newest = max(heads, key=lambda one: (int(one.get("term") or 0), one.get("role") == "coordinator"), default=None)
    if newest is None or newest["coordinator"] == mine:
        # No other agent is left, or all wait for this one: it continues from the voters' journal, once they are enough.
        await link.try_call("promote", {"force": False}, timeout_s=PROMOTE_DEADLINE)
        return
    members: dict[str, Address] = {**newest.get("members", {})}
    members[mine] = await peer_address(link, spec)
    coordinator = str(newest["coordinator"])
    if coordinator not in members:
        raise HostError(mine, "assign", f"the address of the coordinator {coordinator} is unknown", "")
    await assign(link, int(newest["term"]), coordinator, members)
