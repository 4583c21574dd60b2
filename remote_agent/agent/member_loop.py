"""A node as a member of its job: its engine, its link to the coordinator, its lease.

In: orders with their term, notices of the engine. Out: reports to the coordinator, heartbeats; a node that is idle
or reports why not. It owns the node's part in elections, and the coordinator's role while the node has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from remote_agent.agent import orders
from remote_agent.agent.coordinator_shell import Office
from remote_agent.base import clocks
from remote_agent.base.tasks import Tasks, within
from remote_agent.coordinator.formation import held_until
from remote_agent.coordinator.state import HEARTBEAT_S
from remote_agent.election import member, peers
from remote_agent.election.election import Election, PeerRequest
from remote_agent.history import samples
from remote_agent.wire import Answer, Args, CallFailed, Channel, Handler, Items, Problem, WireError, leases
from remote_agent.wire.events import EventType

if TYPE_CHECKING:
    from remote_agent.agent.context import Context
    from remote_agent.agent.engine_link import EngineLink, Notice
    from remote_agent.history.pyramid import Name
    from remote_agent.wire.documents import RankExit

log = logging.getLogger(__name__)

RETRY_S = (0.1, 0.2, 0.5, 1.0)
# An engine that keeps dying is given up; one that dies now and then is replaced, however long the job runs.
ENGINE_DEATHS = 3
ENGINE_WINDOW_S = 600.0
CALL_TIMEOUT_S = 10.0
# Less than the coordinator's own: an engine that does not stop its workers is killed before we are called stuck.
STOP_MARGIN_S = 30.0
# Without grace: workers that hold a GPU may take seconds to die.
KILL_MARGIN_S = 5.0
# Ranks that have made steps for this long have loaded what they need; so have those that print no steps after that.
STEADY_S = 3.0
SILENT_S = 60.0
# What a coordinator must know of this generation, and is told again after a new connection.
KEPT = ("recorded", "started", "assigned", "main", "grouping", "grouped", "exited", "idle", "order_failed")
PROGRESS = ("loss", "lr", "grad_norm", "rate", "unit", "steps_s", "saved", "total")
"""What a status has of a rank's progress, besides its step."""
Progress = Mapping[int, Mapping[str, Any]]
"""By rank, as `LogStore.progress` returns it."""


class MemberLoop:
    """This node as a member; the coordinator's own node is one, too."""

    def __init__(self, context: Context, make_engine: Callable[[Notice], EngineLink]) -> None:
        """Make the member; `make_engine` returns what starts this node's workers."""
        self._context = context
        self._ballot = context.ballot
        self._tasks = Tasks()
        self._make_engine = make_engine
        self.office = Office(context, self, self._tasks)
        self.election = Election(context.fold, context.journal, context.ballot, context.peers, self.office, self._tasks)
        self.incarnation = secrets.token_hex(8)
        self.born_seq = context.journal.last_seq
        """The newest record that was here before this agent."""
        self.engine = make_engine(self._on_engine)
        self.offset = clocks.Offset()
        self.channel: Channel | None = None
        """To the coordinator; None while there is none, or while we are it."""
        self._ended: str | None = None
        """The coordinator whose side has ended our last connection: dead, if nothing listens there any more."""
        self.running: int | None = None
        self.generation = -1
        self._reports: list[dict[str, Any]] = []
        self._orders: asyncio.Queue[tuple[str, Args]] = asyncio.Queue()
        self.look_again = asyncio.Event()
        """Connect to the coordinator anew: it is another one, or this node has missed something."""
        self._echo = clocks.Echo()
        """The last answer on the connection to the coordinator."""
        self._closing = False
        self._heartbeat_at = 0.0
        self._begun_at = 0.0
        """When the newest workers were ordered."""
        self._reason = "its agent was restarted"
        self._requests: dict[str, PeerRequest] = {
            **self.office.requests,
            **self.election.requests,
            **context.snapshots.requests,
            **context.last_output.requests,
            "join": self._on_join,
        }
        self._resuming: asyncio.Task[None] | None = None
        """Snapshots are being looked at or put in place."""
        # Notices that count only from the coordinator that this node follows.
        self._notices: dict[str, Callable[[str, Args], None]] = {
            "order": self._take_order,
            "journal": self._take_records,
            "members": lambda _, args: context.peers.learn(args["members"]),
            "moved": lambda _, args: self._ballot.name_successor(args["successor"]),
        }
        context.ballot.on_change(self._follow_another)

    def start(self) -> None:
        """Begin: the engine at once, the coordinator as soon as it is known."""
        self._tasks.spawn(self.keep_engine(), "engine")
        self._tasks.spawn(self._links(), "link to the coordinator")
        self._tasks.spawn(self.keep_lease(), "lease")
        self._tasks.spawn(self._keep_engine_lease(), "the engine's lease")
        self._tasks.spawn(self.carry_out_orders(), "orders")
        if self._context.spec.standby == "auto":
            self._tasks.spawn(self._keep_standby(), "standby")

    async def close(self, kept: EngineLink | None = None) -> None:
        """End the coordinator, the engine with its workers unless it is the one that is kept, then all else."""
        self._closing = True
        await self.office.close()
        if self.engine is not kept:
            await self.engine.close()
        await self._tasks.close()

    # Requests of other agents

    def handler(self, node: str, channel: Channel | None = None) -> Handler:
        """Return what answers the requests of another agent; its node is known from its certificate."""

        async def handle(op: str, args: Args, body: bytes) -> Answer | Items:
            if op in self._notices:
                coordinator = self._ballot.view.coordinator
                if node == coordinator:
                    self._notices[op](node, args)
                else:
                    log.warning("%s from %s ignored: %s is the coordinator", op, node, coordinator)
                    if channel is None:
                        self._join_again()
                return Answer({})
            answer = self._requests.get(op)
            if answer is None:
                raise Problem("unknown_op", f"no such request between agents: {op}")
            return await answer(node, channel, args)

        return handle

    async def _on_join(self, node: str, channel: Channel | None, args: Args) -> Answer | Items:
        self.election.renew_beyond(int(args["term"]))
        return await self.office.requests["join"](node, channel, args)

    def _take_order(self, node: str, args: Args) -> None:
        term = int(args["term"])
        if term == self._ballot.view.term or self._ballot.follow(term, node):
            self.order(args["op"], args["args"])

    def _join_again(self) -> None:
        """Reconnect to the coordinator: this node has missed a record, and the coordinator sends nothing twice."""
        self.look_again.set()

    def _take_records(self, node: str, args: Args) -> None:
        journal, reset, more = self._context.journal, bool(args["reset"]), bool(args["more"])
        if not journal.take(args["records"], reset=reset, more=more):
            log.warning("journal from %s: records before %d are missing", node, args["records"][0]["seq"])
            self._join_again()
            return
        # The coordinator waits for its newest proposal only, and a replaced journal may have had that in any piece.
        records = [] if more else journal.records if reset else args["records"]
        proposals = (record for record in reversed(records) if record["type"] == EventType.GENERATION_PROPOSED)
        newest = next(proposals, None)
        if newest is not None:
            self._tasks.spawn(self._record(newest), "write the proposal")

    async def _record(self, proposal: dict[str, Any]) -> None:
        """Report a proposal as recorded, once it is on disk."""
        try:
            await self._ballot.secure(self._context.journal)
        except OSError as error:
            log.warning("generation %d: %s", proposal["generation"], error)
            return
        self.report("recorded", {"generation": proposal["generation"], "term": proposal["term"]})

    # The coordinator

    def _follow_another(self, coordinator: str) -> None:
        """Compare the clock with the new coordinator's, and look for a connection to it."""
        self.offset = clocks.Offset(ours=coordinator == self._context.node)
        self.look_again.set()

    def introduction(self) -> dict[str, Any]:
        """Return what a member says when it joins."""
        return {
            "term": self._ballot.view.term,
            "incarnation": self.incarnation,
            "journal": self._context.journal.tail(),
            "disk": self._ballot.disk,
            "running": self.running,
            "reason": self._reason,
            "address": self._context.address,
            "port": self._context.peers.port,
            **self.offset.report(),
            "reports": [*self._readiness(), *self._reports],
        }

    def order(self, op: str, args: Args) -> None:
        """Queue an order of the coordinator; an immediate kill overtakes queued orders."""
        if op == "stop":
            self._context.snapshots.end_group()
        if op == "stop" and not args["grace_s"]:
            self._tasks.spawn(self.stop(args), "kill")
        elif op == "pulse":
            self._tasks.spawn(self._pulse(args), "pulse")
        else:
            self._orders.put_nowait((op, args))

    def report(self, op: str, args: Args) -> None:
        """Report to the coordinator; see KEPT."""
        if op in KEPT:
            self._reports.append({"op": op, "args": args})
        if self.office.coordinator is not None:
            self.office.coordinator.receive(self._context.node, op, args)
        elif self.channel is not None:
            self._tasks.spawn(self._send(self.channel, op, args), "report")

    async def _send(self, channel: Channel, op: str, args: Args) -> None:
        with contextlib.suppress(WireError):
            await channel.notify("report", {"op": op, "args": args})

    def _readiness(self) -> list[dict[str, Any]]:
        if not self.engine.ready.is_set():
            return []
        try:
            facts = {"versions": self.engine.versions, "trees": self._context.tree.digests}
            return [{"op": "ready", "args": {"nproc": self.nproc(), **facts}}]
        except Problem as problem:
            return [{"op": "unfit", "args": {"reason": problem.message}}]

    def nproc(self) -> int:
        """Return how many ranks this node runs; raises Problem when its engine or its GPUs are missing."""
        own = self._context.spec.node(self._context.node)
        return self.engine.nproc(own.nproc_per_node if own is not None else "auto")

    # Loops

    async def keep_engine(self) -> None:
        """Keep an engine running; after it died, this node joins again, without workers."""
        deaths: list[float] = []
        while True:
            greeting = self._tasks.spawn(self._greet(), "greet")
            how = await self.engine.run()
            greeting.cancel()
            if self._closing:
                return
            log.warning("the engine ended: %s", how)
            self._context.snapshots.end_group()
            if self.running is not None:
                self._tasks.spawn(self._context.logs.finish(self.running), "finish the logs")
            self.running, self._reports = None, []
            if not self.engine.replaceable:
                await self._leave(how)
                return
            self.incarnation = secrets.token_hex(8)
            self._reason = f"its engine died ({how})"
            now = clocks.now()
            deaths = [*(when for when in deaths if now - when < ENGINE_WINDOW_S), now]
            if len(deaths) >= ENGINE_DEATHS:
                minutes = ENGINE_WINDOW_S / 60
                self.engine.give_up(f"its engine died {len(deaths)} times in {minutes:.0f} minutes, last: {how}")
            if len(deaths) >= ENGINE_DEATHS or not (self.engine.facts or self.engine.has_served):
                self.report("unfit", {"reason": self.engine.problem})
                return
            self.engine = self._make_engine(self._on_engine)
            await self._rejoin()

    async def _leave(self, how: str) -> None:
        """End with the torchrun that had the workers, and report that this node is lost."""
        if self.channel is not None:
            await self._send(self.channel, "gone", {"reason": how})
        self._context.life.finish(how, linger=False)

    async def _greet(self) -> None:
        await self.engine.ready.wait()
        self.report_readiness()

    def report_readiness(self) -> None:
        """Report what this node can start, once its engine is up."""
        for report in self._readiness():
            self.report(report["op"], report["args"])

    async def _rejoin(self) -> None:
        if self.office.coordinator is not None:
            self.office.coordinator.hear_join(self._context.node, self.introduction())
        elif self.channel is not None:
            await self.channel.close()

    async def _links(self) -> None:
        """Stay connected to the coordinator, whichever it is; a new one ends whatever waits for the old one."""
        tries = 0
        while True:
            self.look_again.clear()
            another = asyncio.ensure_future(self.look_again.wait())
            seeking = asyncio.ensure_future(self._seek())
            try:
                await asyncio.wait((another, seeking), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (another, seeking):
                    task.cancel()
                outcome, *_ = await asyncio.gather(seeking, another, return_exceptions=True)
            if isinstance(outcome, Exception):
                log.error("the link to the coordinator failed", exc_info=outcome)
            tries = 0 if outcome is True or self.look_again.is_set() else tries + 1
            await within(self.look_again, RETRY_S[min(tries, len(RETRY_S) - 1)])

    async def _seek(self) -> bool:
        """Serve a connection to the coordinator, then ask the others for a newer one; returns whether there was one."""
        was_there = False
        name, coordinator = self._ballot.view.coordinator, self.office.coordinator
        if coordinator is None:
            try:
                if name not in (None, self._context.node) and name in self._context.peers.members:
                    await self._one_link(str(name))
                    was_there = True
            except peers.PeerRefused as error:
                self.election.note_trouble(str(error))
                log.info("coordinator: %s", error)
                if self._ended == name:
                    self._ballot.note_refused()
            except (peers.PeerUnreachable, WireError, Problem, asyncio.TimeoutError) as error:
                self.election.note_trouble(str(error) or "no answer in time")
                log.info("coordinator %s: %s", name, self.election.trouble)
            await self.election.ask_around()
        elif coordinator.is_short() or coordinator.misses_nodes() or self._context.spec.endpoint:
            await self.election.ask_around()
        return was_there

    async def _one_link(self, name: str) -> None:
        channel = await self._context.peers.connect(name, self.handler(name))
        running = asyncio.ensure_future(channel.run())
        self._ended, self._echo = None, clocks.Echo()
        try:
            await self._timed(channel, "time", {}, CALL_TIMEOUT_S)
            # Orders may overtake the answer, and the reports on them count.
            self.channel = channel
            sent = clocks.now()
            await channel.call("join", {**self.introduction(), **self._echo.facts()}, timeout=CALL_TIMEOUT_S)
            # The lease begins again, too: otherwise the end of the old one would stop the workers that are started now.
            self._ballot.renew_lease(sent)
            log.info("joined %s", name)
            self.election.note_trouble("")
            await self._send_heartbeat(channel)
        finally:
            if self.channel is channel:
                self.channel = None
            # Not close(): a host without power would be waited for.
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            self._ended = name if channel.ended else None

    async def _send_heartbeat(self, channel: Channel) -> None:
        """Send heartbeats until the wire ends or another coordinator is known."""
        timeout_s = self._context.spec.node_timeout
        interval = min(HEARTBEAT_S, leases.HEARTBEAT * timeout_s)
        name = self._ballot.view.coordinator
        while self._ballot.view.coordinator == name and not channel.closed.is_set():
            sent = clocks.now()
            await self._timed(channel, "beat", self.heartbeat(), timeout_s)
            self._ballot.renew_lease(sent)
            await within(channel.closed, interval)

    async def _timed(self, channel: Channel, op: str, args: Args, timeout_s: float) -> None:
        """Call the coordinator, and compare the clocks by its answer: later reports are corrected by the result."""
        offset, sent_ns = self.offset, time.time_ns()
        answer = await channel.call(op, {**args, **self._echo.facts()}, timeout=timeout_s)
        offset.sample(sent_ns, int(answer.data["received_ns"]), int(answer.data["answered_ns"]))
        self._echo = clocks.Echo(answer.data.get("now"))

    def facts(self) -> dict[str, Any]:
        """Return what a heartbeat carries; of each rank: step, last_output_age_s, warning, progress, vitals."""
        vitals, rank_vitals = self._context.vitals.report(self.workers())
        progress = self._context.logs.progress(self.generation) if self.generation >= 0 else {}
        return {
            "generation": self.generation,
            "ranks": rank_facts(progress, rank_vitals, time.time_ns()),
            "agent_pid": os.getpid(),
            **self.offset.report(),
            "heard_age": clocks.now() - self._ballot.view.contact,
            "vitals": vitals,
            "standby": self.engine.standby,
            **({"snapshots": self._context.snapshots.heads()} if self._context.spec.snapshots else {}),
        }

    @property
    def shift_ns(self) -> int:
        """Nanoseconds to add to this machine's time to get the coordinator's."""
        return self.offset.ns

    def samples(self) -> tuple[float, dict[Name, float]]:
        """Return the coordinator's time, in seconds since the epoch, and what is known of node, GPUs and ranks."""
        facts = self.facts()
        values = dict(samples.of_node(facts["vitals"]))
        for rank, one in facts["ranks"].items() if self.running is not None else ():
            values.update(samples.of_rank(int(rank), one["step"], one["progress"], one["vitals"]))
        return time.time() + self.offset.ns / 1e9, values

    def heartbeat(self) -> dict[str, Any]:
        """Return a heartbeat: the facts, and of each rank the losses of some steps since the last heartbeat."""
        facts = self.facts()
        for rank, losses in self._context.logs.take_losses(self.generation).items():
            facts["ranks"][str(rank)]["losses"] = losses
        return facts

    def workers(self) -> dict[int, int]:
        """Return the pid by rank of what runs here, as far as it is known."""
        if self.running is None:
            return {}
        started = [report["args"]["ranks"] for report in self._reports if report["op"] in ("started", "assigned")]
        return {int(rank["rank"]): int(rank["pid"]) for ranks in started for rank in ranks}

    # The lease: when it ends, the node's workers are stopped and a new coordinator is sought

    def _lease_is_over(self) -> bool:
        """Whether no worker of this node may be alive any more; the coordinator's own node has no lease."""
        view = self._ballot.view
        return not self.office.is_held and view.term > 0 and member.lease_over(view, clocks.now())

    async def keep_lease(self) -> None:
        """Check the lease until cancelled, whatever fails."""
        while True:
            await asyncio.sleep(leases.LOOK_S)
            try:
                await self._check_lease(clocks.now())
            except Exception:
                log.exception("lease")

    async def _check_lease(self, now: float) -> None:
        if self.office.coordinator is not None:
            self._ballot.renew_lease(now)
            if now - self._heartbeat_at >= HEARTBEAT_S:
                self._heartbeat_at = now
                self.office.coordinator.beat(self._context.node, self.heartbeat())
            return
        if self.running is not None and self._lease_is_over():
            away_s = now - self._ballot.view.contact
            log.warning("the coordinator has not answered for %.1f s: stopping the workers", away_s)
            margin_s = leases.STOP * self._context.spec.node_timeout
            await self.stop({"generation": self.running, "grace_s": 0.0, "collect": False}, margin_s)
        self.election.stand_if_due(clocks.now())

    async def _keep_engine_lease(self) -> None:
        """Prove to the engine until cancelled that this agent is alive: an engine without it stops its workers."""
        timeout_s = self._context.spec.node_timeout
        while True:
            await self.engine.renew(self._left_s(clocks.now()) + leases.STOP * timeout_s)
            await asyncio.sleep(min(HEARTBEAT_S, leases.RENEWAL * timeout_s))

    def _left_s(self, now: float) -> float:
        """Return how long workers may live here if no further answer arrives; without workers the whole lease."""
        timeout_s, coordinator = self._context.spec.node_timeout, self.office.coordinator
        if self.running is None:
            return leases.LEASE * timeout_s
        if coordinator is not None:
            return max(0.0, held_until(coordinator.state, now) - now)
        return max(0.0, self._ballot.view.contact + leases.LEASE * timeout_s - now)

    # The waiting process

    async def _keep_standby(self) -> None:
        """Have the engine start it, once the ranks of a group have made steps, or have run long enough without any."""
        asked, seen, stepped_at = -1, -1, 0.0
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            generation, now = self.generation, clocks.now()
            if self.running != generation or asked == generation:
                continue
            ranks = self._context.logs.progress(generation).values()
            if seen != generation and any(rank["step"] is not None for rank in ranks):
                seen, stepped_at = generation, now
            since, patience_s = (stepped_at, STEADY_S) if seen == generation else (self._begun_at, SILENT_S)
            if now - since < patience_s:
                continue
            asked = generation
            try:
                await self.engine.call("standby", {"generation": generation}, CALL_TIMEOUT_S)
            except (CallFailed, WireError, asyncio.TimeoutError) as error:
                log.info("no waiting process: %s", str(error) or "no answer in time")

    # Orders

    async def carry_out_orders(self) -> None:
        """Carry out queued orders until cancelled, whatever fails."""
        while True:
            op, args = await self._orders.get()
            try:
                await self._carry_out(op, args)
            except Exception:
                # The coordinator has a deadline for each order; the next one must be carried out.
                log.exception("order %s", op)

    async def _carry_out(self, op: str, args: Args) -> None:
        if op == "stop":
            await self.stop(args)
        elif op in ("prepare", "go"):
            await self._try(op, args)
        elif op in ("snapshots", "restore"):
            await self._cancel_resuming()
            self._resuming = self._tasks.spawn(self._resume(op, args), op)
        elif op in ("leave", "end"):
            await self.stop({"generation": self.generation, "grace_s": 0.0, "collect": False})
            # A node that leaves may be added again at once: a new agent then replaces this one.
            self._context.life.finish(str(args.get("state") or args.get("reason")), linger=op == "end")

    async def _try(self, op: str, args: Args) -> None:
        generation = int(args["generation"])
        if generation < self.generation or (op == "go" and self.running is not None):
            log.warning("order %s of generation %d ignored: this node is in %d", op, generation, self.generation)
            return
        try:
            if op == "prepare":
                done = await self.engine.call("prepare", orders.prepare(self._context, args))
                self.report("prepared", {"generation": generation, "port": done["port"]})
            else:
                self.generation, self.running, self._reports = generation, generation, []
                self._begun_at = clocks.now()
                await self._context.tree.switch(args.get("tree"))
                if self.running == generation and self._lease_is_over():
                    self.running = None
                    await self._ask_for_lease()
                    self.report("idle", {"generation": generation, "exits": []})
                # Otherwise it was stopped before it began: a `go` may be read late, and switching the tree takes time.
                if self.running == generation:
                    self._context.snapshots.begin_group()
                    done = await self.engine.call("go", orders.go(self._context, args), CALL_TIMEOUT_S * 6)
                    started = {name: done.get(name) for name in ("ranks", "notice", "cold")}
                    self.report("started", {"generation": generation, **started})
        except (OSError, Problem, WireError, asyncio.TimeoutError) as error:
            why = str(error) or "no answer in time"
            self.report("order_failed", {"generation": generation, "message": f"{op}: {why}"})

    async def _ask_for_lease(self) -> None:
        """Send a heartbeat now: an idle node is in the next group, and starts nothing there without a lease."""
        channel, sent = self.channel, clocks.now()
        if channel is None:
            return
        with contextlib.suppress(CallFailed, WireError, asyncio.TimeoutError):
            await self._timed(channel, "beat", self.heartbeat(), CALL_TIMEOUT_S)
            if self.channel is channel:
                self._ballot.renew_lease(sent)

    async def _resume(self, op: str, args: Args) -> None:
        """Say which snapshots this node has, or put those in place from which the next group resumes."""
        generation, snapshots = int(args["generation"]), self._context.snapshots
        if op == "snapshots":
            self.report("held", {"generation": generation, "snapshots": await snapshots.hold(args.get("keep") or ())})
        else:
            report = await snapshots.restore(args["snapshots"], args.get("skipped") or ())
            self.report("placed", {"generation": generation, **report})

    async def _cancel_resuming(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
            await asyncio.gather(self._resuming, return_exceptions=True)

    async def stop(self, args: Args, margin_s: float | None = None) -> None:
        """End the workers up to a generation, and report this node idle; margin_s: what the engine has after grace."""
        self._context.snapshots.end_group()
        await self._cancel_resuming()
        generation, ran = int(args["generation"]), self.running
        exits: list[RankExit] | None = []
        if ran is not None and ran <= generation:
            default_s = STOP_MARGIN_S if args["grace_s"] else KILL_MARGIN_S
            exits = await self._end_workers(ran, args, default_s if margin_s is None else margin_s)
            if exits is None:
                # Not idle yet: the node joins again with its next engine.
                return
            if self.running == ran:
                self.running = None
            self._tasks.spawn(self._context.logs.finish(ran), "finish the logs")
        self.report("idle", {"generation": generation, "exits": exits})

    async def _end_workers(self, ran: int, args: Args, margin_s: float) -> list[RankExit] | None:
        """Return the exits of a generation's workers; None when they had to be ended together with their engine."""
        engine, grace_s = self.engine, float(args["grace_s"])
        if not engine.has_started:
            return []
        try:
            answer = await engine.call("stop", {**args, "generation": ran}, grace_s + margin_s)
        except (CallFailed, WireError, asyncio.TimeoutError) as error:
            if self.running == ran:
                log.warning("stop: %s; ending the engine", str(error) or "no answer in time")
                await (engine.close() if grace_s else engine.kill())
            return None
        return list(answer["exits"])

    async def _pulse(self, args: Args) -> None:
        """Report what the ranks are doing; without an answer of the engine nothing is reported."""
        with contextlib.suppress(CallFailed, WireError, asyncio.TimeoutError):
            answer = await self.engine.call("pulse", {"stacks": args["stacks"]}, CALL_TIMEOUT_S)
            ranks = with_steps(self._context.logs.progress(self.generation), answer["ranks"])
            self.report("pulse", {"generation": int(args["generation"]), "ranks": ranks, **self.offset.report()})

    async def _on_engine(self, op: str, args: Args) -> None:
        if op == "exited" and args["exit"]["code"] != 0:
            self._context.snapshots.end_group()
        self.report(op, args)

    async def ask_coordinator(self, op: str, args: Args) -> Any:
        """Return the coordinator's answer, wherever it is; raises Problem when there is none."""
        if self.office.coordinator is not None:
            return self.office.coordinator.request(op, args)
        if self.channel is None:
            raise self._unreachable()
        try:
            return (await self.channel.call("request", {"op": op, "args": args}, timeout=CALL_TIMEOUT_S)).data
        except (WireError, asyncio.TimeoutError) as error:
            raise Problem("no_coordinator", f"the coordinator did not answer: {error}") from error

    def _unreachable(self) -> Problem:
        """Say why there is no connection to a coordinator."""
        view, endpoint, me = self._ballot.view, self._context.spec.endpoint, self._context.node
        name = view.coordinator
        if endpoint and not view.term:
            message = f"{me} has not found the job yet: waiting for {self.election.trouble or endpoint}"
            return Problem("no_coordinator", message, "start torchrun there; `supervisor stop` ends the one here")
        if not view.term:
            return Problem("no_coordinator", "the launch is not complete: no coordinator has been named yet")
        message = f"the coordinator{f' ({name})' if name else ''} cannot be reached from {me}"
        hint = f"if {name or 'it'} is dead: `supervisor promote` lets the others continue, `stop` ends the job"
        return Problem("no_coordinator", message, hint)


def rank_facts(progress: Progress, vitals: Mapping[int, dict[str, Any]], now_ns: int) -> dict[str, dict[str, Any]]:
    """Return step, last_output_age_s, first_step_age_s, warning, progress and vitals of each rank."""
    ranks: dict[str, dict[str, Any]] = {}
    for rank, seen in progress.items():
        last, first = seen["last_output_ns"], seen["first_step_ns"]
        ranks[str(rank)] = {
            "step": seen["step"],
            "last_output_age_s": None if last is None else round((now_ns - last) / 1e9, 2),
            "first_step_age_s": None if first is None else round((now_ns - first) / 1e9, 3),
            "warning": seen["warning"],
            "progress": {name: seen[name] for name in PROGRESS},
            "vitals": vitals.get(rank),
        }
    return ranks


def with_steps(progress: Progress, pulses: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return these pulses with `step`: the step and the loss that each rank has printed last."""
    steps = {str(rank): [seen["step"], seen["loss"]] for rank, seen in progress.items()}
    return {rank: {**pulse, "step": steps.get(rank)} for rank, pulse in pulses.items()}
