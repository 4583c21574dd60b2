"""A node's part in its job: its engine, its link to the coordinator, its lease.

In: orders with their term, notices of the engine. Out: reports to the coordinator, heartbeats; a node that is idle
or says why not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any

from remote_agent import clocks, election, heartbeat, member, peers
from remote_agent.engine_link import go_order, nproc, versions
from remote_agent.lease import Lease, is_over
from remote_agent.tasks import Tasks
from remote_agent.wire import Answer, CallFailed, Channel, Problem, WireError

if TYPE_CHECKING:
    from remote_agent.agent import Agent

log = logging.getLogger(__name__)

RETRY_S = (0.1, 0.2, 0.5, 1.0)
# An engine that keeps dying is given up; one that dies now and then is replaced, however long the job runs.
ENGINE_DEATHS = 3
ENGINE_WINDOW_S = 600.0
CALL_TIMEOUT_S = 10.0
# Less than the coordinator's own: an engine that does not stop its workers is killed before we are called stuck.
STOP_MARGIN_S = 30.0
# Without grace: workers that hold a GPU may take seconds to die; an engine that is killed must import torch again.
KILL_MARGIN_S = 5.0


class Follower:
    """This node as a member; also the coordinator's own node is one."""

    def __init__(self, agent: Agent, view: member.Member) -> None:
        self.agent = agent
        self.member = view
        self.incarnation = secrets.token_hex(8)
        self.engine = agent.engine_link(self._hear_engine)
        self.offset = clocks.Offset()
        self.channel: Channel | None = None
        """To the coordinator; None while there is none, or while we are it."""
        self.running: int | None = None
        self.generation = -1
        self._reports: list[dict[str, Any]] = []
        self.standing = asyncio.Lock()
        self.trouble = ""
        """What keeps this node from a coordinator, as last seen."""
        self.former = ""
        """The coordinator before this node took the role."""
        self._orders: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self._look_again = asyncio.Event()
        self._closing = False
        self._followed = ""
        self._reason = "its agent was restarted"
        self._tasks = Tasks()

    def start(self) -> None:
        """Begin: the engine at once, the coordinator as soon as it is known."""
        self._tasks.spawn(self._engines(), "engine")
        self._tasks.spawn(self._links(), "link to the coordinator")
        self._tasks.spawn(Lease(self, self._tasks).keep(), "lease")
        self._tasks.spawn(self._obey(), "orders")

    async def close(self) -> None:
        """End the engine, and with it the workers; then all else."""
        self._closing = True
        await self.engine.close()
        await self._tasks.close()

    # The coordinator's side

    def follow(self, term: int, node: str) -> bool:
        """Take a node's word as the coordinator's; False when its term is over."""
        changed = node != self._followed
        self.member, accepted = member.accept(self.member, term, node, clocks.now())
        if accepted:
            self._followed = node
            if node != self.agent.node:
                self.former = node
            try:
                self.agent.memory.keep(self.member)
            except OSError as error:
                # Only a vote is a promise: a full disk must not keep this node from following.
                log.warning("term %d is not written down: %s", term, error)
            if changed:
                self.offset = clocks.Offset(ours=node == self.agent.node)
                self._look_again.set()
            if node != self.agent.node and self.agent.role is not None:
                self._tasks.spawn(self.agent.drop_role(), "drop the role")
        return accepted

    def promise(self, view: member.Member) -> str:
        """Give a vote once it is written down, as it must hold after a restart; returns "" or why not."""
        try:
            self.agent.memory.keep(view)
        except OSError as error:
            return f"{self.agent.node} cannot write its vote down: {error}"
        self.member = view
        return ""

    def in_charge(self) -> None:
        """Note that this very node is the coordinator, and report to it what this node has."""
        role = self.agent.role
        if role is not None:
            role.hear_join(self.agent.node, self.introduction())

    def introduction(self) -> dict[str, Any]:
        """Return what a member says when it joins."""
        return {
            "term": self.member.term,
            "incarnation": self.incarnation,
            "journal": self.agent.journal.tail(),
            "running": self.running,
            "reason": self._reason,
            "address": self.agent.address,
            "port": self.agent.port,
            **self.offset.told(),
            "reports": [*self._readiness(), *self._reports],
        }

    def order(self, op: str, args: dict[str, Any]) -> None:
        """Queue an order of the coordinator; an immediate kill overtakes what is queued."""
        if op == "stop" and not args["grace_s"]:
            self._tasks.spawn(self.stop(args), "kill")
        elif op == "pulse":
            self._tasks.spawn(self._pulse(args), "pulse")
        else:
            self._orders.put_nowait((op, args))

    def report(self, op: str, args: dict[str, Any]) -> None:
        """Tell the coordinator; what concerns this generation is told again after a new connection."""
        if op in ("started", "assigned", "main", "exited", "idle", "order_failed"):
            self._reports.append({"op": op, "args": args})
        if self.agent.role is not None:
            self.agent.role.hear(self.agent.node, op, args)
        elif self.channel is not None:
            self._tasks.spawn(self._tell(self.channel, op, args), "report")

    async def _tell(self, channel: Channel, op: str, args: dict[str, Any]) -> None:
        with contextlib.suppress(WireError):
            await channel.notify("report", {"op": op, "args": args})

    def _readiness(self) -> list[dict[str, Any]]:
        if not self.engine.ready.is_set():
            return []
        try:
            facts = {"versions": versions(self.engine.facts), "trees": self.agent.tree.digests}
            return [{"op": "ready", "args": {"nproc": nproc(self.agent), **facts}}]
        except Problem as problem:
            return [{"op": "unfit", "args": {"reason": problem.message}}]

    # Loops

    async def _engines(self) -> None:
        """Keep an engine running; after it died, this node joins anew, without workers."""
        deaths: list[float] = []
        while True:
            greeting = self._tasks.spawn(self._greet(), "greet")
            how = await self.engine.run()
            greeting.cancel()
            if self._closing:
                return
            log.warning("the engine ended: %s", how)
            if self.running is not None:
                self._tasks.spawn(self.agent.logs.finish(self.running), "finish the logs")
            self.running, self._reports = None, []
            if not self.engine.replaceable:
                await self._part(how)
                return
            self.incarnation = secrets.token_hex(8)
            self._reason = f"its engine died ({how})"
            now = clocks.now()
            deaths = [*(when for when in deaths if now - when < ENGINE_WINDOW_S), now]
            if len(deaths) >= ENGINE_DEATHS:
                minutes = ENGINE_WINDOW_S / 60
                self.engine.problem = f"its engine died {len(deaths)} times in {minutes:.0f} minutes, last: {how}"
            if len(deaths) >= ENGINE_DEATHS or not self.engine.facts:
                self.report("unfit", {"reason": self.engine.problem})
                return
            self.engine = self.agent.engine_link(self._hear_engine)
            await self._rejoin()

    async def _part(self, how: str) -> None:
        """End with what had the workers; the job is told that this node is lost to it."""
        if self.channel is not None:
            await self._tell(self.channel, "gone", {"reason": how})
        self.agent.finish(how, linger=False)

    async def _greet(self) -> None:
        await self.engine.ready.wait()
        self.tell_readiness()

    def tell_readiness(self) -> None:
        """Say what this node can start, once its engine is up."""
        for report in self._readiness():
            self.report(report["op"], report["args"])

    async def _rejoin(self) -> None:
        if self.agent.role is not None:
            self.in_charge()
        elif self.channel is not None:
            await self.channel.close()

    async def _links(self) -> None:
        """Stay connected to the coordinator, whoever it is; news of another one ends whatever waits for the old."""
        tries = 0
        while True:
            self._look_again.clear()
            news = asyncio.ensure_future(self._look_again.wait())
            seeking = asyncio.ensure_future(self._seek())
            try:
                await asyncio.wait((news, seeking), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (news, seeking):
                    task.cancel()
                found, *_ = await asyncio.gather(seeking, news, return_exceptions=True)
            if isinstance(found, Exception):
                log.error("the link to the coordinator failed", exc_info=found)
            tries = 0 if found is True or self._look_again.is_set() else tries + 1
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._look_again.wait(), RETRY_S[min(tries, len(RETRY_S) - 1)])

    async def _seek(self) -> bool:
        """Serve a connection to the coordinator, then ask the others for a newer one; returns whether there was one."""
        was_there = False
        name = self.member.coordinator
        where = self.agent.members.get(name or "")
        if self.agent.role is None:
            try:
                if name not in (None, self.agent.node) and where:
                    await self._one_link(str(name), where)
                    was_there = True
            except peers.PeerRefused as error:
                self.trouble = str(error)
                log.info("coordinator: %s", error)
                self.member = member.refused(self.member, clocks.now())
            except (peers.PeerUnreachable, WireError, Problem, asyncio.TimeoutError) as error:
                self.trouble = str(error) or "no answer in time"
                log.info("coordinator %s: %s", name, self.trouble)
            await election.ask_around(self)
        elif self.agent.role.is_short() or self.agent.role.misses_some() or self.agent.spec.endpoint:
            await election.ask_around(self)
        return was_there

    async def _one_link(self, name: str, where: dict[str, Any]) -> None:
        handler = self.agent.peer_handler(name)
        channel = await peers.connect(self.agent.files, name, where["address"], int(where["port"]), handler)
        running = asyncio.ensure_future(channel.run())
        try:
            await self._timed(channel, "time", {}, CALL_TIMEOUT_S)
            # Orders may overtake the answer, and what is reported on them counts.
            self.channel = channel
            sent = clocks.now()
            await channel.call("join", self.introduction(), timeout=CALL_TIMEOUT_S)
            # The lease too begins anew: else the workers that it is told to start are ended by what is left of the old.
            self.member = member.heard(self.member, sent)
            log.info("joined %s", name)
            self.trouble = ""
            await self._beat(channel)
        finally:
            if self.channel is channel:
                self.channel = None
            # Not close(): a host without power would be waited for.
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _beat(self, channel: Channel) -> None:
        """Send heartbeats until the wire ends or another coordinator is known."""
        interval = min(1.0, self.agent.spec.node_timeout / 15)
        name = self.member.coordinator
        while self.member.coordinator == name and not channel.closed.is_set():
            sent = clocks.now()
            await self._timed(channel, "beat", heartbeat.beat(self), self.agent.spec.node_timeout)
            self.member = member.heard(self.member, sent)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(channel.closed.wait(), interval)

    async def _timed(self, channel: Channel, op: str, args: dict[str, Any], timeout_s: float) -> None:
        """Tell the coordinator, and compare the clocks by its answer: what is reported later is corrected by it."""
        offset, sent_ns = self.offset, time.time_ns()
        answer = await channel.call(op, args, timeout=timeout_s)
        offset.sample(sent_ns, int(answer.data["received_ns"]), int(answer.data["answered_ns"]))

    def facts(self) -> dict[str, Any]:
        """Return what a heartbeat carries."""
        return heartbeat.facts(self)

    def workers(self) -> dict[int, int]:
        """Return the pid by rank of what runs here, as far as it is known."""
        told = [report["args"]["ranks"] for report in self._reports if report["op"] in ("started", "assigned")]
        ranks = [rank for each in told for rank in each] if self.running is not None else []
        return {int(rank["rank"]): int(rank["pid"]) for rank in ranks}

    # Orders

    async def _obey(self) -> None:
        while True:
            op, args = await self._orders.get()
            try:
                await self._carry_out(op, args)
            except Exception:
                # The coordinator has a deadline for each order; the next one must be heard.
                log.exception("order %s", op)

    async def _carry_out(self, op: str, args: dict[str, Any]) -> None:
        if op == "stop":
            await self.stop(args)
        elif op in ("prepare", "go"):
            await self._try(op, args)
        elif op in ("leave", "end"):
            await self.stop({"generation": self.generation, "grace_s": 0.0, "collect": False})
            # A node that leaves may be wanted again at once: a new agent takes this one's place.
            self.agent.finish(str(args.get("state") or args.get("reason")), linger=op == "end")

    async def _try(self, op: str, args: dict[str, Any]) -> None:
        generation = int(args["generation"])
        if generation < self.generation or (op == "go" and self.running is not None):
            log.warning("order %s of generation %d ignored: this node is in %d", op, generation, self.generation)
            return
        try:
            if op == "prepare":
                done = await self.engine.call("prepare", args)
                self.report("prepared", {"generation": generation, "port": done["port"]})
            else:
                self.generation, self.running, self._reports = generation, generation, []
                await self.agent.tree.switch(args.get("tree"))
                if self.running == generation and is_over(self):
                    self.running = None
                    self.report("idle", {"generation": generation, "exits": []})
                # Else it was stopped before it began: a `go` may be read late, and the tree takes its time.
                if self.running == generation:
                    done = await self.engine.call("go", go_order(self.agent, args), CALL_TIMEOUT_S * 6)
                    self.report("started", {"generation": generation, "ranks": done["ranks"]})
        except (OSError, Problem, WireError, asyncio.TimeoutError) as error:
            why = str(error) or "no answer in time"
            self.report("order_failed", {"generation": generation, "message": f"{op}: {why}"})

    async def stop(self, args: dict[str, Any], margin_s: float | None = None) -> None:
        """End the workers up to a generation, and report this node idle; margin_s: what the engine has after grace."""
        generation, ran = int(args["generation"]), self.running
        exits: list[dict[str, Any]] | None = []
        if ran is not None and ran <= generation:
            default_s = STOP_MARGIN_S if args["grace_s"] else KILL_MARGIN_S
            exits = await self._end_workers(ran, args, default_s if margin_s is None else margin_s)
            if exits is None:
                # Not idle yet: the next engine joins anew, and says it.
                return
            if self.running == ran:
                self.running = None
            self._tasks.spawn(self.agent.logs.finish(ran), "finish the logs")
        self.report("idle", {"generation": generation, "exits": exits})

    async def _end_workers(self, ran: int, args: dict[str, Any], margin_s: float) -> list[dict[str, Any]] | None:
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

    async def _pulse(self, args: dict[str, Any]) -> None:
        """Tell what the ranks are doing; without an answer of the engine nothing is told."""
        with contextlib.suppress(CallFailed, WireError, asyncio.TimeoutError):
            answer = await self.engine.call("pulse", {"stacks": args["stacks"]}, CALL_TIMEOUT_S)
            ranks = heartbeat.with_steps(self, answer["ranks"])
            self.report("pulse", {"generation": int(args["generation"]), "ranks": ranks, **self.offset.told()})

    async def _hear_engine(self, op: str, args: dict[str, Any]) -> None:
        self.report(op, args)

    async def forward(self, op: str, args: dict[str, Any]) -> Answer:
        """Pass a request on to the coordinator; raises Problem when there is none."""
        channel = self.channel
        if channel is None:
            name, endpoint = self.member.coordinator, self.agent.spec.endpoint
            if endpoint and not self.member.term:
                message = f"{self.agent.node} has not found the job yet: waiting for {self.trouble or endpoint}"
                raise Problem("no_coordinator", message, "start torchrun there; `supervisor stop` ends the one here")
            if not self.member.term:
                raise Problem("no_coordinator", "the launch is not done: no coordinator is named yet")
            message = f"the coordinator{f' ({name})' if name else ''} cannot be reached from {self.agent.node}"
            hint = f"if {name or 'it'} is dead: `supervisor promote` lets the others go on, `stop` ends the job"
            raise Problem("no_coordinator", message, hint)
        try:
            return await channel.call("request", {"op": op, "args": args}, timeout=CALL_TIMEOUT_S)
        except (WireError, asyncio.TimeoutError) as error:
            raise Problem("no_coordinator", f"the coordinator did not answer: {error}") from error
