"""Repair of a job while an operator is attached: lost agents are restarted, an orphaned group gets a coordinator.

In: the hub's links and newest status. Out: requests to start, assign, promote and instruct agents, most of them shown
as notices.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING

from remote_agent.wire import CallFailed, WireError
from remote_agent.wire.events import ENDED_STATES, OUT_OF_GROUPS
from supervisor.control import admission, promotion, resync
from supervisor.errors import RequestFailed, SupervisorError
from supervisor.inventory.pattern import fold
from supervisor.launch import bringup
from supervisor.launch.specs import merge_host, read_tree_again
from supervisor.ssh import HostError

if TYPE_CHECKING:
    from remote_agent.wire import JobSpec, NodeSpec
    from remote_agent.wire.answers import Address
    from supervisor.link.host_link import HostLink
    from supervisor.link.hub import Hub

# A node's agent is restarted at most this often within this many seconds.
RESTARTS = 3
RESTART_WINDOW = 600.0
# An agent that was not found counts as dead after this many seconds: the job may just have ended.
SETTLE = 1.5
INTERVAL = 1.0
# If all agents have died, a request waits this long for those of the hosts in reach; between two looks, seconds.
REVIVAL_DEADLINE = 12.0
REVIVAL_PAUSE = 0.3
IDENTITY_DEADLINE = 5.0
STATUS_DEADLINE = 30.0
# A link without an agent looks for one again after this many seconds.
LOOK_AGAIN = 5.0
REOPEN_DEADLINE = 20.0
# An agent may take this long to learn that its node was removed; requests to end have this pause, seconds.
LEAVE_DEADLINE = 8.0
LEAVE_PAUSE = 0.3
# An agent that leaves may take this long to end.
REPLACE_DEADLINE = 20.0


async def bring_up_again(hub: Hub, name: str, *, full: bool, issuer: admission.Issuer | None = None) -> NodeSpec:
    """Start the agent of a host (`full`: also sync its tree), introduce it to the others, return its NodeSpec.

    An agent that is alive is only introduced. `issuer` certifies a node that is new here. Raises RequestFailed that
    names host and step.
    """
    link = hub.links.get(name)
    if link is None:
        raise RequestFailed(f"no host {name!r} in the inventory", "its hosts: " + " ".join(hub.links), "unknown_node")
    try:
        spec = resync.as_now(hub, merge_host(await admission.description(hub), link.host, hub.inventory))
        resynced = resync.changed_since_launch(hub)
        leaving = await _is_leaving(hub, link)
        if leaving or not (link.opened and link.view.live):
            if leaving:
                await _end_leaving(hub, link)
            await _start(hub, link, spec, issuer or admission.Issuer(hub, spec.job), full=full)
        elif resynced:
            await resync.ensure(hub, link, spec)
        await admission.spread(hub)
        await bringup.introduce(hub, link, spec)
        return next(node for node in spec.nodes if node.name == name)
    except HostError as error:
        link.fail(error.step, error.reason, error.hint)
        raise RequestFailed(f"{name}: {error.step}: {error.reason}", error.hint, _kind(error)) from error


def _kind(error: HostError) -> str:
    return error.__cause__.kind if isinstance(error.__cause__, CallFailed) else "bring_up"


async def _start(hub: Hub, link: HostLink, spec: JobSpec, issuer: admission.Issuer, *, full: bool) -> None:
    """Start the agent of a host, once the one before has ended; raises HostError.

    One that another operator has started there meanwhile serves as well.
    """
    end = time.monotonic() + REPLACE_DEADLINE
    while True:
        try:
            await _start_once(hub, link, spec, issuer, full=full)
            return
        except HostError as error:
            if _kind(error) != "already_running" or time.monotonic() > end:
                raise
        await link.until_open()
        if link.view.live and not await _is_leaving(hub, link):
            return
        link.progress("start", "waiting for the old agent to end")


async def _start_once(hub: Hub, link: HostLink, spec: JobSpec, issuer: admission.Issuer, *, full: bool) -> None:
    """Start the agent of a host under the certificate that it has, or under a new one; raises HostError."""
    name, resynced = link.view.name, resync.changed_since_launch(hub)
    trusted = await admission.authorities(hub)
    removed_ns = await admission.removed_ns(hub, name)
    authority = None if admission.is_certified(hub, link) and not removed_ns else issuer.authority()
    if authority is not None:
        # The others trust it before this node depends on it: this command may end at any moment.
        await admission.spread(hub)
    if authority is not None and (uninformed := admission.uninformed(hub, name)):
        hub.notice(
            f"{fold(uninformed)}: unreachable; it learns about the new node {name} once it is connected again",
            "warning",
        )
    read = functools.partial(read_tree_again, hub.inventory, spec, name) if full or resynced else None
    pems = "".join(trusted.values())
    material = bringup.Material(spec, authority, pems, read=read, kept=resynced, after_ns=removed_ns + 1)
    await bringup.start_on(hub, name, material)


async def _end_leaving(hub: Hub, link: HostLink) -> None:
    """Ask an agent that is out of the job to end, so that another one takes its place.

    One that was stopped or cut off when its node was removed refuses until it has heard of that.
    """
    end = time.monotonic() + LEAVE_DEADLINE
    while link.opened and link.view.live and time.monotonic() < end:
        if await link.try_call("exit", timeout_s=IDENTITY_DEADLINE) is not None:
            return
        await hub.wait_change(LEAVE_PAUSE)


async def _is_leaving(hub: Hub, link: HostLink) -> bool:
    """Tell whether the host's agent is out of the job and stays only so that operators can read its end."""
    if not (link.opened and link.view.live):
        return False
    nodes = (await hub.call("status")).get("nodes", ())
    # The agent of a failed node may have no engine any more.
    out = ("removed", "failed")
    if not any(node["name"] == link.view.name and node.get("state") in out for node in nodes):
        return False
    # Another operator may have started one for the node, of which the other agents do not know yet.
    identity = await link.try_call("identity", timeout_s=IDENTITY_DEADLINE)
    return identity is None or not identity.get("joining")


class Healer:
    """Checks the job of an attached operator once a second. The hub owns the task that runs `run`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._starts: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RESTARTS))
        self._given_up: set[str] = set()
        self._introduced: dict[str, tuple[float, dict[str, Address]]] = {}
        """The time since which a host's link is open, and what was sent to its agent about the others."""
        self._brought: set[tuple[str, str]] = set()
        """Nodes, and the work trees that this supervisor has tried to bring them."""
        self._spreading: asyncio.Task[None] | None = None
        self._restarting: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Check once a second; after the job's end, only for agents that do not know that it is over."""
        hub = self._hub
        while True:
            await asyncio.sleep(INTERVAL)
            if hub.launching or hub.failure is not None:
                continue
            controls = hub.attach == "control" and not hub.read_only
            try:
                if hub.ended or hub.state in ENDED_STATES:
                    if controls:
                        await promotion.end_cut_off(hub)
                    continue
                if controls:
                    self._spread()
                    await promotion.promote_if_orphaned(hub)
                    self._restart_lost()
                    await self._bring_trees()
                self._look_again()
            except (SupervisorError, HostError, CallFailed, WireError, asyncio.TimeoutError) as error:
                hub.notice(f"healing: {error}", "warning")

    async def revive(self, end: float) -> bool:
        """Restart the agents that have died, once, for a request of somebody who is not attached; wait for them.

        `end`: until when, as time.monotonic(). Returns whether any had died.
        """
        self._restart_lost()
        if not self._restarting:
            return False
        await asyncio.wait(self._restarting.values(), timeout=max(0.0, end - time.monotonic()))
        await self._exchange()
        await promotion.promote_if_orphaned(self._hub)
        return True

    async def revive_all(self) -> bool:
        """If no agent of the job is alive, restart those of all hosts in reach; returns whether any had died.

        The first one that is back would continue without the others.
        """
        hub, found = self._hub, False
        end = time.monotonic() + REVIVAL_DEADLINE
        all_dead = not hub.opened_links(live=True)
        while all_dead and self._has_lost() and time.monotonic() < end:
            found |= await self.revive(end)
            await hub.wait_change(REVIVAL_PAUSE)
        return found

    def _has_lost(self) -> bool:
        """Tell whether a host in reach has no agent of a node that takes part in the job."""
        lost = {link.view.name for link in self._hub.opened_links(live=False)}
        return bool(lost & self._taking_part(*OUT_OF_GROUPS))

    def _spread(self) -> None:
        """Send nodes the authorities to trust, in parallel with the checks: a silent node must not delay those.

        What counts is what most nodes report, so few of them decide nothing.
        """
        if self._hub.spared:
            return
        if self._spreading is None or self._spreading.done():
            self._spreading = self._hub.own(self._exchange(), "exchange the nodes' addresses")

    async def _exchange(self) -> None:
        await admission.spread(self._hub)
        await self._introduce()

    async def _introduce(self) -> None:
        """Tell all agents where the others listen: those that came back together know old ports only."""
        live = self._hub.opened_links(live=True)
        where: dict[str, Address] = {}
        for link in live:
            node, members = str(link.view.identity.get("node")), link.view.identity.get("members") or {}
            if node in members:
                where[node] = members[node]
        for link in live:
            name, known = link.view.name, link.view.identity.get("members") or {}
            introduction = (link.opened_at, where)
            if any(known.get(node) != at for node, at in where.items()) and self._introduced.get(name) != introduction:
                self._introduced[name] = introduction
                await link.try_call("introduce", {"members": where}, timeout_s=IDENTITY_DEADLINE)

    def _dead_links(self) -> list[HostLink]:
        """Return the links that have found no agent, without those whose agent is being restarted."""
        now = time.monotonic()
        self._restarting = {name: task for name, task in self._restarting.items() if not task.done()}
        links = [link for link in self._hub.links.values() if link.view.name not in self._restarting]
        return [link for link in links if link.opened and link.view.live is False and now - link.opened_at > SETTLE]

    def _restart_lost(self) -> None:
        """Restart lost agents in parallel with the other checks: a slow host must not delay other hosts."""
        hub = self._hub
        if not hub.status:
            return
        wanted = self._taking_part(*OUT_OF_GROUPS)
        for link in self._dead_links():
            name = link.view.name
            if name in wanted:
                self._restarting[name] = hub.own(self._restart(link), f"restart the agent of {name}")

    async def _bring_trees(self) -> None:
        """Bring nodes that came back the work tree that the group runs from, once."""
        hub = self._hub
        digest = tree["digest"] if (tree := hub.status.get("tree")) else ""
        missing = {str(node["name"]) for node in hub.status.get("nodes", ()) if node.get("lacks_tree")}
        for name in missing & self._taking_part(*OUT_OF_GROUPS):
            link = hub.links.get(name)
            if link is None or not (link.opened and link.view.live) or (name, digest) in self._brought:
                continue
            self._brought.add((name, digest))
            try:
                await resync.ensure(hub, link, resync.as_now(hub, await admission.description(hub)))
            except (SupervisorError, CallFailed, WireError, asyncio.TimeoutError) as error:
                hub.notice(f"{name}: cannot send it the job's work tree: {error}", "warning", name)
            else:
                hub.notice(f"{name}: has the job's work tree now", "info", name)

    def _taking_part(self, *out: str) -> set[str]:
        """Return the nodes of the job that are in none of these states."""
        return {node["name"] for node in self._hub.status.get("nodes", ()) if node.get("state") not in out}

    async def _restart(self, link: HostLink) -> None:
        hub, name = self._hub, link.view.name
        if not await self._is_still_dead(link):
            return
        status = await link.try_call("status", timeout_s=STATUS_DEADLINE)
        if status is not None and status.get("state") in ENDED_STATES:
            return
        if hub.ended or hub.state in ENDED_STATES or name not in self._taking_part(*OUT_OF_GROUPS):
            # The job ended, or the node was removed, in the meantime.
            return
        if not self._may_start(name):
            return
        hub.notice(f"{name}: agent lost; restarting it", "warning", name)
        try:
            await bring_up_again(hub, name, full=False)
        except (SupervisorError, CallFailed, WireError, asyncio.TimeoutError) as error:
            hub.notice(f"{name}: {error}", "error", name)
        else:
            hub.notice(f"{name}: agent restarted", "info", name)

    def _may_start(self, name: str) -> bool:
        starts = self._starts[name]
        now = time.monotonic()
        if len(starts) == RESTARTS and now - starts[0] < RESTART_WINDOW:
            if name not in self._given_up:
                self._given_up.add(name)
                self._hub.notice(
                    f"{name}: agent lost {RESTARTS} times in {RESTART_WINDOW / 60:.0f} min; not restarted again. "
                    f"Read agent.log on the host, then: supervisor add --node {name}",
                    "error",
                    name,
                )
            return False
        self._given_up.discard(name)
        starts.append(now)
        return True

    async def _is_still_dead(self, link: HostLink) -> bool:
        """Connect again: another supervisor may have started an agent there."""
        before = link.opened_at
        link.reopen()
        await self._hub.wait_until(lambda: link.opened and link.opened_at != before, REOPEN_DEADLINE)
        return link.opened and link.opened_at != before and link.view.live is False

    def _look_again(self) -> None:
        """Connect again to hosts without an agent: another supervisor may have started one."""
        now = time.monotonic()
        for link in self._dead_links():
            if now - link.opened_at > LOOK_AGAIN:
                link.reopen()
        taking_part = self._taking_part("removed")
        for name, link in self._hub.links.items():
            if name in taking_part and now - link.asked_at > LOOK_AGAIN:
                link.ask_again()
