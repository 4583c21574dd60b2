"""Launch a job: connect, sync, start an agent on every host, wait for its engine, name the coordinator.

In: an inventory and a Plan. Out: a Session whose job runs on its own; or LaunchFailed, with nothing left running.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from remote_agent.wire import CallFailed, WireError
from supervisor.errors import HostFailure, LaunchFailed, SupervisorError, UsageError
from supervisor.inventory.pattern import fold
from supervisor.session import bringup, heal
from supervisor.session.certificates import make_authority
from supervisor.session.oddities import quick
from supervisor.session.session import Session
from supervisor.session.specs import read_tree
from supervisor.session.tasks import cancel_all
from supervisor.ssh import HostError

if TYPE_CHECKING:
    from supervisor.inventory import Inventory
    from supervisor.session.link import Link
    from supervisor.session.specs import Plan
    from supervisor.ssh import NodeLink

log = logging.getLogger(__name__)

# How long an abandoned launch waits for an agent to stop and its host to be cleaned, seconds.
ABANDON_DEADLINE = 20.0
# An agent that was told to end is gone within a moment, or after it has let others read the end.
CLEAN_TRIES = 20
CLEAN_PAUSE = 0.5
# How many hosts read the network at once: syncing to all of them shares one uplink.
BRING_UP_LIMIT = 64


def launch_session(inventory: Inventory, plan: Plan, *, read_only: bool = False) -> Session:
    """Return a session that launches the planned job once begun; `ready` tells the outcome."""
    launch = Launch(plan)
    session = Session(
        inventory,
        plan.spec.job,
        attach="control",
        read_only=read_only,
        only=plan.hosts,
        spec=plan.spec,
        launch=launch.run,
    )
    for name in plan.hosts:
        session.links[name].held = True
    return session


class Launch:
    """One launch in progress."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._failures: dict[str, HostFailure] = {}
        self._begun: set[str] = set()
        self._taken: dict[str, str] = {}
        """Hosts on which a job of that name is known."""

    async def run(self, session: Session) -> None:
        """Bring all hosts up and assign them; raises LaunchFailed after having undone what was done."""
        try:
            await self._run(session)
        except (SupervisorError, asyncio.CancelledError):
            # Whoever interrupts us once more leaves agents behind that end by themselves: nobody coordinates them.
            await asyncio.shield(asyncio.ensure_future(self._abandon(session)))
            raise

    async def _run(self, session: Session) -> None:
        spec = self._plan.spec
        tree = await read_tree(session.inventory, spec)
        if tree is not None:
            # Whoever adds a node later compares.
            spec = session.spec = dataclasses.replace(spec, tree_digest=tree.digest)
            self._plan = dataclasses.replace(self._plan, spec=spec)
        material = bringup.Material(spec, make_authority(spec.job), tree, is_new=True, begun=self._begun)
        limit = asyncio.Semaphore(BRING_UP_LIMIT)

        async def one(name: str) -> None:
            async with limit:
                await self._bring_up(session, name, material)

        coming = {name: asyncio.ensure_future(one(name)) for name in self._plan.hosts}
        try:
            late = await self._await_enough(coming)
            await self._begin(session, [name for name in self._plan.hosts if name not in late])
        except BaseException:
            await cancel_all(coming.values())
            raise
        if late:
            session.notice(f"the job starts without {' '.join(late)}: admitted when up", "warning")
            session.own_late({name: self._admit(session, name, coming[name]) for name in late})

    async def _await_enough(self, coming: Mapping[str, asyncio.Future[None]]) -> list[str]:
        """Wait for all hosts; in an elastic job, for min_nodes and then a settle time. Returns those still coming."""
        spec = self._plan.spec
        regular = {node.name for node in spec.nodes if not node.spare}
        pending = set(coming.values())
        end: float | None = None
        loop = asyncio.get_running_loop()
        while pending:
            rest = None if end is None else max(0.0, end - loop.time())
            _, pending = await asyncio.wait(pending, timeout=rest, return_when=asyncio.FIRST_COMPLETED)
            up = [name for name, task in coming.items() if task.done() and name not in self._failures]
            if end is not None and loop.time() >= end:
                break
            if end is None and spec.min_nodes < spec.max_nodes and len(regular & set(up)) >= spec.min_nodes:
                end = loop.time() + spec.settle_timeout
        for task in coming.values():
            if task.done():
                task.result()
        return [name for name, task in coming.items() if not task.done()]

    async def _admit(self, session: Session, name: str, coming: asyncio.Future[None]) -> None:
        """Take a host in that came up when the job had begun."""
        try:
            await coming
            if name not in self._failures:
                await heal.introduce(session, session.links[name], self._plan.spec)
        except (SupervisorError, HostError, CallFailed, WireError, asyncio.TimeoutError) as error:
            session.notice(f"{name}: {error}; the job goes on without it", "warning", name)
            return
        finally:
            session.late.discard(name)
            session.touch()
        if name in self._failures:
            session.notice(f"{self._failures[name]}; the job goes on without it", "warning", name)

    async def _begin(self, session: Session, hosts: list[str]) -> None:
        """Name the coordinator to the hosts that are up; raises LaunchFailed, UsageError."""
        spec = self._plan.spec
        if self._taken:
            where = " ".join(name for name in self._plan.hosts if name in self._taken)
            # `attach`, where it lives on any of them, comes before `clean`.
            raise UsageError(f"a job named {spec.job} is on {where} already", min(self._taken.values()))
        ready = [name for name in hosts if name not in self._failures]
        self._check_enough(session, ready)
        for odd in quick(session.links[name].view for name in ready):
            session.notice(f"{fold(odd.nodes)}: {odd.text}" + (f" ({odd.hint})" if odd.hint else ""), "warning")
        await self._assign(session, ready)
        ready = [name for name in ready if name not in self._failures]
        self._check_enough(session, ready)
        # Hosts that still come up may fail meanwhile.
        for name, failure in list(self._failures.items()):
            session.notice(f"{failure}; the job starts without it", "warning", name)
            await self._end_agent(session.links[name])

    async def _bring_up(self, session: Session, name: str, material: bringup.Material) -> None:
        try:
            await bringup.start_on(session, name, material)
        except HostError as error:
            if isinstance(error, bringup.JobExists):
                self._taken[name] = error.hint
            self._note(session, session.links[name], error)

    def _note(self, session: Session, link: Link, error: HostError) -> None:
        name = link.host.name
        self._failures[name] = HostFailure(name, error.step, error.reason, error.hint)
        link.fail(error.step, error.reason, error.hint)

    def _check_enough(self, session: Session, ready: list[str]) -> None:
        spec = self._plan.spec
        if len(ready) >= spec.min_nodes:
            return
        total = len(self._plan.hosts)
        raise LaunchFailed(
            f"job {spec.job} was not started: {len(ready)} of {total} hosts came up, {spec.min_nodes} are needed",
            tuple(self._failures.values()),
            "mend the hosts above, or ask for fewer with --nnodes" if ready else "",
        )

    async def _assign(self, session: Session, ready: list[str]) -> None:
        spec = self._plan.spec
        members = {}
        for name in list(ready):
            try:
                members[name] = await bringup.peer_address(session.links[name], spec)
            except HostError as error:
                self._note(session, session.links[name], error)
        # A spare may coordinate only where there is nothing else.
        order = sorted(members, key=lambda name: bool((node := spec.node(name)) and node.spare))
        if not order:
            return
        coordinator = order[0]
        await asyncio.gather(*(self._tell(session, name, coordinator, members) for name in order))
        if coordinator in self._failures:
            raise LaunchFailed(
                f"job {spec.job} was not started: its coordinator {coordinator} was lost",
                tuple(self._failures.values()),
            )

    async def _tell(self, session: Session, name: str, coordinator: str, members: dict[str, dict[str, Any]]) -> None:
        try:
            absent = {name: f"{failure.step}: {failure.reason}" for name, failure in self._failures.items()}
            await bringup.assign(session.links[name], bringup.FIRST_TERM, coordinator, members, absent)
        except HostError as error:
            self._note(session, session.links[name], error)

    async def _abandon(self, session: Session) -> None:
        """Stop what was started and remove its files, on every host that still answers."""
        undoing = [asyncio.ensure_future(self._undo(session.links[name])) for name in sorted(self._begun)]
        if undoing:
            _, pending = await asyncio.wait(undoing, timeout=ABANDON_DEADLINE)
            await cancel_all(pending)

    async def _undo(self, link: Link) -> None:
        # A start that is under way cannot be called back: let it end, then undo it.
        await link.idle(ABANDON_DEADLINE / 2)
        if not link.connected:
            return
        await self._end_agent(link)
        try:
            await link.carry_out(lambda node: self._clean(node))
        except (HostError, CallFailed, WireError, asyncio.TimeoutError) as error:
            log.debug("clean on %s: %s", link.view.name, error)

    async def _end_agent(self, link: Link) -> None:
        if not (link.opened and link.view.live):
            return
        for op, args in (("exit", {}), ("stop", {"kill": True, "operator": "launch"})):
            try:
                await link.call(op, args, timeout_s=ABANDON_DEADLINE / 2)
                return
            except (CallFailed, WireError, asyncio.TimeoutError) as error:
                log.debug("%s on %s: %s", op, link.view.name, error)

    async def _clean(self, node: NodeLink) -> None:
        """Remove the job's files once its agent has ended."""
        for _ in range(CLEAN_TRIES):
            answer = await node.channel.call("clean", {"job": self._plan.spec.job}, timeout=ABANDON_DEADLINE / 2)
            if not answer.data["kept"]:
                return
            await asyncio.sleep(CLEAN_PAUSE)
