"""Launch a job: connect, sync, start an agent on every host, wait for its engine, choose the coordinator.

In: a hub and a Plan. Out: a job that runs by itself; or LaunchFailed, with nothing left running.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from remote_agent.wire import FIRST_TERM, CallFailed, WireError
from supervisor.errors import HostFailure, JobInTheWay, LaunchFailed, SupervisorError, UsageError
from supervisor.inventory.pattern import fold
from supervisor.launch import bringup
from supervisor.launch.certificates import fingerprints, make_authority
from supervisor.launch.specs import read_tree
from supervisor.link.tasks import cancel_all
from supervisor.preflight.oddities import quick
from supervisor.ssh import HostError
from supervisor.ssh.reasons import together

if TYPE_CHECKING:
    from remote_agent.wire.answers import Address
    from supervisor.link.host_link import HostLink
    from supervisor.link.hub import Hub
    from supervisor.link.view import LaunchPlan
    from supervisor.ssh import NodeLink

log = logging.getLogger(__name__)

# An interrupted launch waits this long for agents to stop and their hosts to be cleaned, seconds.
ABANDON_DEADLINE = 20.0
# An agent that was asked to end does so within a moment, or once others have read the end.
CLEAN_TRIES = 20
CLEAN_PAUSE = 0.5
# This many hosts are synced and started at once: they share one uplink.
BRING_UP_LIMIT = 64
# A launch that cannot succeed waits this long for the errors of its other hosts, seconds: one look shows them together.
LAST_REPORTS_S = 2.0
# A notice names this many files of earlier runs.
MAX_NAMED = 4


class Launch:
    """One launch."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._order = None if plan.shares_tree else bringup.TreeOrder(plan.hosts)
        self._failures: dict[str, HostFailure] = {}
        self._begun: set[str] = set()
        self._left: dict[str, tuple[str, ...]] = {}
        self._in_the_way: dict[str, JobInTheWay] = {}
        """Hosts with a job that forbids this one."""

    async def run(self, hub: Hub) -> None:
        """Bring all hosts up and assign them; if that fails, undo it and raise LaunchFailed."""
        try:
            await self._run(hub)
        except (SupervisorError, asyncio.CancelledError):
            # A second interruption leaves agents behind, which end by themselves without a coordinator.
            await asyncio.shield(asyncio.ensure_future(self._abandon(hub)))
            raise

    async def _run(self, hub: Hub) -> None:
        spec = self._plan.spec
        tree = await read_tree(hub.inventory, spec)
        if tree is not None:
            # Nodes that are added later must have the same tree.
            spec = dataclasses.replace(spec, tree_digest=tree.digest)
            hub.set_spec(spec)
            self._plan = dataclasses.replace(self._plan, spec=spec)
        authority = make_authority(spec.job)
        hub.trust(fingerprints(authority.ca))
        material = bringup.Material(
            spec,
            authority,
            tree=tree,
            is_new=True,
            begun=self._begun,
            left=self._left,
            order=self._order,
            slots=asyncio.Semaphore(BRING_UP_LIMIT),
        )
        tasks = {name: asyncio.ensure_future(self._bring_up(hub, name, material)) for name in self._plan.hosts}
        try:
            late = await self._await_enough(tasks)
            await self._begin(hub, [name for name in self._plan.hosts if name not in late])
        except BaseException:
            await cancel_all(tasks.values())
            raise
        if late:
            hub.notice(f"the job starts without {' '.join(late)}; each joins once it is up", "warning")
            hub.own_late({name: self._admit(hub, name, tasks[name]) for name in late})

    async def _await_enough(self, tasks: Mapping[str, asyncio.Future[None]]) -> list[str]:
        """Wait for all hosts; in an elastic job, min_nodes, then settle_timeout. Returns the hosts not yet up.

        If the launch can no longer succeed, the others may only report their own errors too.
        """
        spec = self._plan.spec
        regular = {node.name for node in spec.nodes if not node.spare}
        pending = set(tasks.values())
        end: float | None = None
        hopeless = False
        loop = asyncio.get_running_loop()
        while pending:
            rest = None if end is None else max(0.0, end - loop.time())
            _, pending = await asyncio.wait(pending, timeout=rest, return_when=asyncio.FIRST_COMPLETED)
            up = [name for name, task in tasks.items() if task.done() and name not in self._failures]
            if not hopeless and (self._in_the_way or len(tasks) - len(self._failures) < spec.min_nodes):
                hopeless, end = True, loop.time() + LAST_REPORTS_S
            if end is not None and loop.time() >= end:
                break
            if end is None and spec.min_nodes < spec.max_nodes and len(regular & set(up)) >= spec.min_nodes:
                end = loop.time() + spec.settle_timeout
        for task in tasks.values():
            if task.done():
                task.result()
        return [name for name, task in tasks.items() if not task.done()]

    async def _admit(self, hub: Hub, name: str, task: asyncio.Future[None]) -> None:
        """Admit a host that came up after the start of the job."""
        try:
            await task
            if name not in self._failures:
                await bringup.introduce(hub, hub.links[name], self._plan.spec)
        except (SupervisorError, HostError, CallFailed, WireError, asyncio.TimeoutError) as error:
            hub.notice(f"{name}: {error}; the job continues without it", "warning", name)
            return
        if name in self._failures:
            hub.notice(f"{self._failures[name]}; the job continues without it", "warning", name)

    async def _begin(self, hub: Hub, hosts: list[str]) -> None:
        """Choose the coordinator and assign the hosts that are up; raises LaunchFailed, UsageError."""
        if self._in_the_way:
            # The smallest hint is `attach`, if the job is live on any host; else `clean`.
            first = min(self._in_the_way.values(), key=lambda error: error.hint)
            where = [name for name in self._plan.hosts if name in self._in_the_way]
            where = [name for name in where if self._in_the_way[name].reason == first.reason]
            # --hosts and --hostfile are known here without their values: then the word HOSTS stays.
            path = hub.inventory.path
            named = path is None or path.suffix == ".toml"
            hint = first.hint.replace("HOSTS ", "" if path is None else f"{path} ") if named else first.hint
            raise UsageError(f"{first.reason} on {' '.join(where)}", hint)
        ready = [name for name in hosts if name not in self._failures]
        self._check_enough(hub, ready)
        for finding in quick(hub.links[name].view for name in ready):
            hub.notice(
                f"{fold(finding.nodes)}: {finding.text}" + (f" ({finding.hint})" if finding.hint else ""), "warning"
            )
        self._report_left_files(hub, ready)
        await self._assign(hub, ready)
        ready = [name for name in ready if name not in self._failures]
        self._check_enough(hub, ready)
        # Hosts that were still coming up may have failed in the meantime.
        for name, failure in list(self._failures.items()):
            hub.notice(f"{failure}; the job starts without it", "warning", name)
            await self._end_agent(hub.links[name])

    def _report_left_files(self, hub: Hub, ready: list[str]) -> None:
        """Name what earlier runs have left in the work tree, before the script finds it."""
        nodes: dict[tuple[str, ...], list[str]] = {}
        for name in ready:
            if left := self._left.get(name):
                nodes.setdefault(left, []).append(name)
        for left, names in nodes.items():
            more = f" and {len(left) - MAX_NAMED} more" if len(left) > MAX_NAMED else ""
            hub.notice(
                f"{fold(names)}: the work tree has files of earlier runs, which the script will find: "
                f"{' '.join(left[:MAX_NAMED])}{more} (--job NAME: a tree without them)",
                "warning",
            )

    async def _bring_up(self, hub: Hub, name: str, material: bringup.Material) -> None:
        try:
            await bringup.start_on(hub, name, material)
        except HostError as error:
            if isinstance(error, JobInTheWay):
                self._in_the_way[name] = error
            elif self._order is not None:
                self._order.pass_over(name)
            self._note(hub, hub.links[name], error)

    def _note(self, hub: Hub, link: HostLink, error: HostError) -> None:
        name = link.host.name
        self._failures[name] = HostFailure(name, error.step, error.reason, error.hint)
        link.fail(error.step, error.reason, error.hint)

    def _check_enough(self, hub: Hub, ready: list[str]) -> None:
        spec = self._plan.spec
        if len(ready) >= spec.min_nodes:
            return
        total, failed = len(self._plan.hosts), len(self._failures)
        others = "" if len(ready) + failed == total else f" and {failed} failed"
        raise LaunchFailed(
            f"job {spec.job} was not started: {len(ready)} of {total} hosts came up{others}, "
            f"{spec.min_nodes} are needed",
            together(self._failures.values()),
            "fix these hosts, or lower --nnodes" if ready else "",
        )

    async def _assign(self, hub: Hub, ready: list[str]) -> None:
        spec = self._plan.spec
        found = await asyncio.gather(*(self._address(hub, name) for name in ready))
        members = {name: address for name, address in zip(ready, found, strict=True) if address is not None}
        # A spare is the coordinator only if there is no other node.
        order = sorted(members, key=lambda name: bool((node := spec.node(name)) and node.spare))
        if not order:
            return
        coordinator = order[0]
        await asyncio.gather(*(self._notify(hub, name, coordinator, members) for name in order))
        if coordinator in self._failures:
            raise LaunchFailed(
                f"job {spec.job} was not started: the connection to its coordinator {coordinator} was lost",
                together(self._failures.values()),
            )

    async def _address(self, hub: Hub, name: str) -> Address | None:
        """Return where the agent of a host listens for the others; None, and a failure of the host, without answer."""
        try:
            return await bringup.peer_address(hub.links[name], self._plan.spec)
        except HostError as error:
            self._note(hub, hub.links[name], error)
            return None

    async def _notify(self, hub: Hub, name: str, coordinator: str, members: dict[str, Address]) -> None:
        try:
            absent = {name: f"{failure.step}: {failure.reason}" for name, failure in self._failures.items()}
            await bringup.assign(hub.links[name], FIRST_TERM, coordinator, members, absent)
        except HostError as error:
            self._note(hub, hub.links[name], error)

    async def _abandon(self, hub: Hub) -> None:
        """Stop what was started and remove its files on every host that still answers."""
        undoing = [asyncio.ensure_future(self._undo(hub.links[name])) for name in sorted(self._begun)]
        if undoing:
            _, pending = await asyncio.wait(undoing, timeout=ABANDON_DEADLINE)
            await cancel_all(pending)

    async def _undo(self, link: HostLink) -> None:
        # A start in progress cannot be cancelled: wait for its end, then undo it.
        await link.idle(ABANDON_DEADLINE / 2)
        if not link.connected:
            return
        await self._end_agent(link)
        try:
            await link.carry_out(lambda node: self._clean(node))
        except (HostError, CallFailed, WireError, asyncio.TimeoutError) as error:
            log.debug("clean on %s: %s", link.view.name, error)

    async def _end_agent(self, link: HostLink) -> None:
        if not (link.opened and link.view.live):
            return
        for op, args in (("exit", {}), ("stop", {"kill": True, "operator": "launch"})):
            if await link.try_call(op, args, timeout_s=ABANDON_DEADLINE / 2) is not None:
                return

    async def _clean(self, node: NodeLink) -> None:
        """Remove the job's files once its agent has ended."""
        for _ in range(CLEAN_TRIES):
            answer = await node.channel.call("clean", {"job": self._plan.spec.job}, timeout=ABANDON_DEADLINE / 2)
            if not answer.data["kept"]:
                return
            await asyncio.sleep(CLEAN_PAUSE)
