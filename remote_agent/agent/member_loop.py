"""A node as a member of its job: what it says of itself, its part in elections, its lease.

In: requests of other agents. Out: reports to the coordinator, heartbeats; workers that end with the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from remote_agent.agent.coordinator_link import CoordinatorLink
from remote_agent.agent.coordinator_shell import CoordinatorRole
from remote_agent.agent.local_workers import KEPT, LocalWorkers, Progress
from remote_agent.base import clocks
from remote_agent.base.tasks import Tasks
from remote_agent.coordinator.formation import held_until
from remote_agent.coordinator.state import HEARTBEAT_S
from remote_agent.election import member
from remote_agent.election.election import Election, PeerRequest
from remote_agent.history import samples
from remote_agent.wire import Answer, Args, Channel, Handler, Items, Problem, leases
from remote_agent.wire.agents import read_request
from remote_agent.wire.events import EventType
from remote_agent.wire.gate import Misfit

if TYPE_CHECKING:
    from remote_agent.agent.context import Context
    from remote_agent.agent.engine_link import EngineLink, Notice
    from remote_agent.history.pyramid import Name
    from remote_agent.wire.documents import JournalEvent, RankVitals, Steps

log = logging.getLogger(__name__)

PROGRESS = ("loss", "lr", "grad_norm", "rate", "unit", "steps_s", "saved", "total")
"""The fields of a rank's progress that a status has besides its step."""
# A node that was cut off when it was removed finds the coordinator by these, and hears of it when it joins.
HEARD = ("who", "time")
# A coordinator reads the facts of this many nodes a second. Up to as many nodes, each heartbeat has them.
FACTS_PER_S = 100


class MemberLoop:
    """This node as a member; the coordinator's own node is one, too."""

    def __init__(self, context: Context, make_engine: Callable[[Notice], EngineLink]) -> None:
        """Make the member; `make_engine` returns what starts this node's workers."""
        self._context = context
        self._ballot = context.ballot
        self._tasks = Tasks()
        self.role = CoordinatorRole(context, self, self._tasks)
        self.election = Election(context.fold, context.journal, context.ballot, context.peers, self.role, self._tasks)
        self.link = CoordinatorLink(context, self, self.role, self.election)
        self.workers = LocalWorkers(context, self, make_engine)
        self.born_seq = context.journal.last_seq
        """The newest record that was here before this agent."""
        self._trees: set[str] | None = None
        """The versions of the work tree for which there was what their ranks need; None: nobody has looked yet."""
        self._heartbeat_at = 0.0
        self._whole = (-1, -1), 0.0
        """Of the last heartbeat with all facts: the term, the generation, and when it was made."""
        self._operators: dict[object, tuple[str, str]] = {}
        """By connection: the operator who is attached on it, and the mode."""
        self._requests: dict[str, PeerRequest] = {
            **self.role.requests,
            **self.election.requests,
            **context.snapshots.requests,
            "join": self._on_join,
        }
        # These notices count only from the coordinator that this node follows.
        self._notices: dict[str, Callable[[str, Args], None]] = {
            "order": self._take_order,
            "journal": self._take_records,
            "members": lambda _, args: context.peers.learn(args["members"]),
            "moved": lambda _, args: self._ballot.name_successor(args["successor"]),
        }

    def start(self) -> None:
        """Begin: the engine at once, the coordinator as soon as it is known."""
        self.workers.start()
        self._tasks.spawn(self.link.keep(), "link to the coordinator")
        self._tasks.spawn(self.keep_lease(), "lease")
        self._tasks.spawn(self._keep_engine_lease(), "the engine's lease")

    async def close(self, kept: EngineLink | None = None) -> None:
        """End the coordinator, the engine with its workers unless it is the one that is kept, then all else."""
        self.workers.close()
        await self.role.close()
        await self.workers.end(kept)
        await self._tasks.close()

    # Requests of other agents

    def serve(self, op: str, answer: PeerRequest) -> None:
        """Answer one more request of other agents."""
        self._requests[op] = answer

    def handler(self, node: str, channel: Channel | None = None, issued_ns: int | None = None) -> Handler:
        """Return what answers the requests of another agent; its node is known from its certificate of that time."""

        async def handle(op: str, args: Args, body: bytes) -> Answer | Items:
            is_revoked = issued_ns is not None and self._context.peers.is_revoked(node, issued_ns)
            if is_revoked and op not in HEARD:
                hint = "`supervisor add` gives it a new certificate"
                raise Problem("removed", f"{node} was removed from the job", hint)
            try:
                return await answer(op, read_request(op, args))
            except Misfit as misfit:
                raise Problem("malformed", f"{op} of {node}: {misfit}") from misfit

        async def answer(op: str, args: Args) -> Answer | Items:
            if op in self._notices:
                coordinator = self._ballot.view.coordinator
                if node == coordinator:
                    self._notices[op](node, args)
                else:
                    log.warning("%s from %s ignored: %s is the coordinator", op, node, coordinator)
                    if channel is None:
                        # This node has missed a record, and the coordinator sends nothing twice.
                        self.link.look_again.set()
                return Answer({})
            serve = self._requests.get(op)
            if serve is None:
                raise Problem("unknown_op", f"no such request between agents: {op}")
            return await serve(node, channel, args)

        return handle

    async def _on_join(self, node: str, channel: Channel | None, args: Args) -> Answer | Items:
        self.election.renew_beyond(args["term"])
        return await self.role.requests["join"](node, channel, args)

    def _take_order(self, node: str, args: Args) -> None:
        term = args["term"]
        if term == self._ballot.view.term or self._ballot.follow(term, node):
            self.order(args["op"], args["args"])

    def order(self, op: str, args: Args) -> None:
        """Take an order of the coordinator, which may be this very node."""
        self.workers.order(op, args)

    def _take_records(self, node: str, args: Args) -> None:
        journal, reset, more = self._context.journal, args["reset"], args["more"]
        if not journal.take(args["records"], reset=reset, more=more):
            log.warning("journal from %s: records before %d are missing", node, args["records"][0]["seq"])
            self.link.look_again.set()
            return
        # The coordinator waits for its newest proposal only, and a replaced journal may have had that in any piece.
        records = [] if more else journal.records if reset else args["records"]
        proposals = (record for record in reversed(records) if record["type"] == EventType.GENERATION_PROPOSED)
        newest = next(proposals, None)
        if newest is not None:
            self._tasks.spawn(self._record(newest), "write the proposal")

    async def _record(self, proposal: JournalEvent) -> None:
        """Report a proposal as recorded, once it is on disk."""
        try:
            await self._ballot.secure(self._context.journal)
        except OSError as error:
            log.warning("generation %d: %s", proposal["generation"], error)
            return
        self.report("recorded", {"generation": proposal["generation"], "term": proposal["term"]})

    # Reports about this node

    def introduction(self) -> dict[str, Any]:
        """Return what a member says when it joins."""
        workers = self.workers
        return {
            "term": self._ballot.view.term,
            "incarnation": workers.incarnation,
            "journal": self._context.journal.tail(),
            "disk": self._ballot.disk,
            "running": workers.running,
            "reason": workers.reason,
            "address": self._context.address,
            "port": self._context.peers.port,
            **self.link.offset.report(),
            "reports": [*self._readiness(), *workers.reports],
            "operators": dict(self._operators.values()),
        }

    def report(self, op: str, args: Args) -> None:
        """Report to the coordinator; see KEPT."""
        if op in KEPT:
            self.workers.reports.append({"op": op, "args": args})
        if self.role.coordinator is not None:
            self.role.coordinator.receive(self._context.node, op, args)
        elif self.link.channel is not None:
            self._tasks.spawn(self.link.send(op, args), "report")

    def _readiness(self) -> list[dict[str, Any]]:
        engine = self.workers.engine
        if not engine.ready.is_set() or self._trees is None:
            return []
        try:
            trees = [digest for digest in self._context.tree.digests if digest in self._trees]
            facts = {"versions": engine.versions, "trees": trees}
            return [{"op": "ready", "args": {"nproc": self.workers.nproc(), **facts}}]
        except Problem as problem:
            return [{"op": "unfit", "args": {"reason": problem.message}}]

    async def report_readiness(self) -> None:
        """Report what this node can start, once its engine is up."""
        # A work tree counts once there is what its ranks need. To look for that takes long, so it is remembered.
        self._trees = {digest for digest in self._context.tree.digests if await self._context.runtime.has(digest)}
        for report in self._readiness():
            self.report(report["op"], report["args"])

    async def note_operator(self, key: object, operator: str = "", mode: str = "") -> None:
        """Note the operator on a connection, `key`; without a name, that the connection has ended."""
        self._operators.pop(key, None)
        if operator:
            self._operators[key] = operator, mode
        # The next coordinator, if there is none now, learns it when this node joins.
        with contextlib.suppress(Problem):
            await self.link.ask("operators", dict(self._operators.values()))

    def facts(self) -> dict[str, Any]:
        """Return what is known here of the node and its ranks."""
        workers = self.workers
        vitals, rank_vitals = self._context.vitals.report(workers.pids())
        progress = self._context.logs.progress(workers.generation) if workers.generation >= 0 else {}
        return {
            "generation": workers.generation,
            "ranks": rank_facts(progress, rank_vitals, time.time_ns()),
            "agent_pid": os.getpid(),
            "vitals": vitals,
            "standby": workers.engine.standby,
            **({"snapshots": self._context.snapshots.heads()} if self._context.spec.snapshots else {}),
        }

    def heartbeat(self) -> dict[str, Any]:
        """Return a heartbeat: the lease, and the facts with the losses of some steps since the last facts.

        Of a large job, most heartbeats have the steps only: the coordinator reads FACTS_PER_S facts a second.
        """
        now, view = clocks.now(), self._ballot.view
        beat: dict[str, Any] = {**self.link.offset.report(), "heard_age": now - view.contact}
        whole, every_s = (view.term, self.workers.generation), len(self._context.peers.members) / FACTS_PER_S
        if whole == self._whole[0] and now - self._whole[1] < every_s:
            return {**beat, "steps": self._steps()}
        self._whole = whole, now
        facts = self.facts()
        if facts["vitals"] is not None:
            # They are not old before the next ones can be there.
            facts["vitals"] = {**facts["vitals"], "every_s": max(facts["vitals"].get("every_s") or 0.0, every_s)}
        for rank, losses in self._context.logs.take_losses(self.workers.generation).items():
            facts["ranks"][str(rank)]["losses"] = [[step, loss] for step, loss in losses]
        return {**beat, "facts": facts}

    def _steps(self) -> Steps:
        """Return the step of each rank, and the age of its last output."""
        generation = self.workers.generation
        progress = self._context.logs.progress(generation) if generation >= 0 else {}
        ranks = rank_facts(progress, {}, time.time_ns())
        steps = {rank: [one["step"], one["last_output_age_s"]] for rank, one in ranks.items()}
        return {"generation": generation, "ranks": steps}

    def samples(self) -> tuple[float, dict[Name, float]]:
        """Return the coordinator's time, in seconds since the epoch, and what is known of node, GPUs and ranks."""
        facts = self.facts()
        values = dict(samples.of_node(facts["vitals"]))
        for rank, one in facts["ranks"].items() if self.running is not None else ():
            values.update(samples.of_rank(int(rank), one["step"], one["progress"]))
        values.update(self.workers.sampling.take_shares())
        return time.time() + self.shift_ns / 1e9, values

    @property
    def shift_ns(self) -> int:
        """Nanoseconds to add to this machine's time to get the coordinator's."""
        return self.link.offset.ns

    @property
    def running(self) -> int | None:
        """The generation whose workers run here."""
        return self.workers.running

    # The lease: when it ends, the node's workers are stopped and a new coordinator is sought

    def lease_is_over(self) -> bool:
        """Return whether no worker of this node may be alive any more; the coordinator's own node has no lease."""
        view = self._ballot.view
        return not self.role.is_held and view.term > 0 and member.lease_over(view, clocks.now())

    async def keep_lease(self) -> None:
        """Check the lease until cancelled, whatever fails."""
        while True:
            await asyncio.sleep(leases.LOOK_S)
            try:
                await self._check_lease(clocks.now())
            except Exception:
                log.exception("lease")

    async def _check_lease(self, now: float) -> None:
        if self.role.coordinator is not None:
            self._ballot.renew_lease(now)
            if now - self._heartbeat_at >= HEARTBEAT_S:
                self._heartbeat_at = now
                self.role.coordinator.beat(self._context.node, self.heartbeat())
            return
        if self.running is not None and self.lease_is_over():
            away_s = now - self._ballot.view.contact
            log.warning("the coordinator has not answered for %.1f s: stopping the workers", away_s)
            margin_s = leases.STOP * self._context.spec.node_timeout
            await self.workers.stop({"generation": self.running, "grace_s": 0.0, "collect": False}, margin_s)
        self.election.stand_if_due(clocks.now())

    async def _keep_engine_lease(self) -> None:
        """Prove to the engine until cancelled that this agent is alive: an engine without it stops its workers."""
        timeout_s = self._context.spec.node_timeout
        while True:
            await self.workers.engine.renew(self._left_s(clocks.now()) + leases.STOP * timeout_s)
            await asyncio.sleep(min(HEARTBEAT_S, leases.RENEWAL * timeout_s))

    def _left_s(self, now: float) -> float:
        """Return how long workers may live here if no further answer arrives; without workers the whole lease."""
        timeout_s, coordinator = self._context.spec.node_timeout, self.role.coordinator
        if self.running is None:
            return leases.LEASE * timeout_s
        if coordinator is not None:
            return max(0.0, held_until(coordinator.state, now) - now)
        return max(0.0, self._ballot.view.contact + leases.LEASE * timeout_s - now)


def rank_facts(progress: Progress, vitals: Mapping[int, RankVitals], now_ns: int) -> dict[str, dict[str, Any]]:
    """Return step, last_output_age_s, first_step_age_s, said, warning, progress and vitals of each rank."""
    ranks: dict[str, dict[str, Any]] = {}
    for rank, seen in progress.items():
        last, first = seen["last_output_ns"], seen["first_step_ns"]
        ranks[str(rank)] = {
            "step": seen["step"],
            "last_output_age_s": None if last is None else round((now_ns - last) / 1e9, 2),
            "first_step_age_s": None if first is None else round((now_ns - first) / 1e9, 3),
            "said": seen["said"],
            "warning": seen["warning"],
            "progress": {name: seen[name] for name in PROGRESS},
            "vitals": vitals.get(rank),
        }
    return ranks
