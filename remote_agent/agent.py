"""The agent of one node in one job: what holds follower, coordinator's role, journal, logs and servers together.

In: the job directory that `start` has written. Out: a served job; the process ends when the job is over and nobody
looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any

from remote_agent import allocation, clocks, election, inputs, member, open_job, paths, peers, restore
from remote_agent.engine_link import EngineLink, Notice
from remote_agent.engine_watch import adopt_orphans
from remote_agent.follower import Follower
from remote_agent.formation import holds_quorum
from remote_agent.journal import Journal
from remote_agent.logs import LogStore
from remote_agent.memory import Memory
from remote_agent.role import Role
from remote_agent.tasks import Tasks
from remote_agent.tree_desk import JobTree
from remote_agent.vitals import Host, Vitals
from remote_agent.wire import Answer, Channel, Handler, Items, JobSpec, Problem

log = logging.getLogger(__name__)

# An agent that nobody gives a coordinator ends by itself.
ASSIGN_TIMEOUT_S = 180.0
# After the end: long enough for a supervisor that is just about to read the outcome.
LINGER_S = 5.0
ABANDONED_S = 3600.0
WATCH_S = 5.0
DEAD_CHECKS_S = (0.0, 0.1, 0.3, 0.6, 1.0, 2.0)


class Agent:
    """One node's agent; `run` is its whole life."""

    def __init__(self, files: paths.JobFiles, torchrun: int | None = None) -> None:
        self.files = files
        self._torchrun = torchrun
        self.spec = JobSpec.from_json(json.loads(files.spec.read_text()))
        self.node = str(json.loads(files.node.read_text())["node"])
        own = self.spec.node(self.node)
        self.address = own.address if own is not None else ""
        self.port = 0
        self._tasks = Tasks()
        self.memory = Memory(files, self._tasks)
        self.members = self.memory.members
        self.journal = Journal(files.events)
        self.tree = JobTree(files.home, self.spec.tree)
        self.logs = LogStore(files.root, live=True, bound=self.spec.log_bound)
        self.role: Role | None = None
        view = member.Member(me=self.node, node_timeout=self.spec.node_timeout, contact=clocks.now())
        self.follower = Follower(self, self.memory.restore(view))
        self.operators: set[Channel] = set()
        self.operators_changed = asyncio.Event()
        self.vitals = Vitals(Host(files.root), files.name, lambda: bool(self.operators))
        self._finished = asyncio.Event()
        self._hurry = asyncio.Event()
        self._preempted = False
        self.reason = ""
        """Why this agent ends."""
        self._peers: set[Channel] = set()

    def engine_link(self, notice: Notice) -> EngineLink:
        """Return what starts this node's workers: an engine of ours, or the torchrun that started us."""
        wire = self._torchrun
        return EngineLink(self.files, notice) if wire is None else open_job.TorchrunLink(self.files, notice, wire)

    async def run(self) -> None:
        """Serve until the job is over and nobody looks."""
        from remote_agent.server import serve_operators

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._interrupted, signal.Signals(number).name)
        server, self.port = await peers.listen(self.files, self.spec.coordinator_port, self._accept)
        self.memory.learn({self.node: self._where()})
        await self.logs.start()
        self.follower.start()
        waiting = open_job.Waiting(self).watch() if self.spec.endpoint else self._watch_assignment()
        self._tasks.spawn(waiting, "assignment")
        self.vitals.start(self._tasks, self.address, self.follower.workers)
        await open_job.claim(self)
        operators = await serve_operators(self)
        log.info("agent of %s for %s, peers on port %d", self.node, self.spec.job, self.port)
        try:
            await self._finished.wait()
            await self.follower.engine.dismiss(open_job.outcome(self))
            await self._wind_down()
        finally:
            operators.close()
            server.close()
            await self._close()

    async def _wind_down(self) -> None:
        """Let everybody read the end, and the hooks tell of it."""
        if self.role is not None:
            await self.role.flushed(LINGER_S)
        await self.logs.end()
        self.journal.end()
        quiet_since = time.monotonic()
        while not self._hurry.is_set() and time.monotonic() - quiet_since < LINGER_S:
            self.operators_changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.operators_changed.wait(), LINGER_S)
            if self.operators:
                quiet_since = time.monotonic()
        if self.role is not None and not self._hurry.is_set():
            hurry = self._tasks.spawn(self._hurry.wait(), "hurry")
            told = self._tasks.spawn(self.role.hooks.finish(), "the last hooks")
            await asyncio.wait((hurry, told), return_when=asyncio.FIRST_COMPLETED)

    async def _close(self) -> None:
        if self.role is not None:
            await self.role.close()
        self.role = None
        await self.follower.close()
        # At once: those that do not answer share one deadline.
        channels = (*self._peers, *self.operators)
        await asyncio.gather(*(channel.close() for channel in channels), return_exceptions=True)
        await self._tasks.close()
        await self.logs.stop()
        self.journal.close()

    def _interrupted(self, name: str) -> None:
        """Whoever sends a signal does not want to wait for readers; Slurm sends it first, and kills later."""
        preempted = allocation.ending() if name == "SIGTERM" and not self._preempted else ""
        if not preempted:
            self.finish(f"the agent got {name}", linger=False)
            return
        self._preempted = True
        self._tasks.spawn(self._stop_job(preempted), "the end of the allocation")

    async def _stop_job(self, preempted: str) -> None:
        wish = {"operator": "slurm", "preempted": preempted}
        try:
            if self.role is not None:
                self.role.request("stop", wish)
            else:
                await self.follower.forward("stop", wish)
        except Problem as problem:
            self.finish(f"{preempted}: {problem.message}", linger=False)

    def finish(self, reason: str, *, linger: bool = True) -> None:
        """The job is over for this node; linger: as long as somebody looks."""
        if not linger:
            self._hurry.set()
            self.operators_changed.set()
        if not self._finished.is_set():
            log.info("ending: %s", reason)
            self.reason = reason
            self._finished.set()

    @property
    def finished(self) -> bool:
        """Whether the job is over for this node."""
        return self._finished.is_set()

    def _where(self) -> dict[str, Any]:
        return {"address": self.address, "port": self.port}

    async def _watch_assignment(self) -> None:
        """End an agent that nobody cares for: neither a coordinator nor an operator."""
        alone_since = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            cared_for = self.role is not None or self.follower.channel is not None or bool(self.operators)
            if cared_for:
                alone_since = time.monotonic()
            alone_s = time.monotonic() - alone_since
            if alone_s > (ABANDONED_S if self.follower.member.term else ASSIGN_TIMEOUT_S):
                self.finish(f"neither a coordinator nor an operator for {alone_s:.0f} s")
                return

    # The role

    async def assign(self, args: dict[str, Any]) -> None:
        """Take the supervisor's word for who coordinates; raises Problem when this job knows better."""
        coordinator = args["coordinator"]
        if coordinator["node"] == self.node and self.role is None and self.journal.records:
            raise Problem("stale", f"this job has begun: {self.node} needs votes to coordinate it")
        where = {"address": coordinator["address"], "port": coordinator["port"]}
        self.memory.learn({**args["members"], coordinator["node"]: where, self.node: self._where()})
        if not self.follower.follow(int(args["term"]), coordinator["node"]):
            raise Problem("stale", f"this job is in term {self.follower.member.term} already")
        if coordinator["node"] == self.node and self.role is None:
            state = restore.initial(self.spec, self.node, clocks.now())
            self.role = Role(self, state)
            self.role.start(dict(args.get("absent") or {}))
            self.follower.in_charge()

    async def take_role(self, term: int, former: str) -> None:
        """Become the coordinator of that term: this node has the votes."""
        records = self.journal.records
        now = clocks.now()
        away_s = now - self.follower.member.contact
        state = restore.take_over(self.spec, self.node, term, records, now, away_s)
        self.follower.follow(term, self.node)
        self.role = role = Role(self, state)
        role.start({})
        role.record("coordinator_changed", self.node, former=former or None, term=term)
        if former in state.nodes and state.nodes[former].status != "removed":
            role.feed(inputs.Gone(former, "it coordinated the job, and is gone"))
        self.follower.in_charge()
        self._announce()

    async def keep_role(self, term: int) -> None:
        """Go on as the coordinator, in a newer term."""
        if self.role is not None:
            self.follower.follow(term, self.node)
            self.role.state = dataclasses.replace(self.role.state, term=term)
            self._announce()

    async def drop_role(self) -> None:
        """Another node is the coordinator now."""
        role, self.role = self.role, None
        if role is not None:
            log.warning("%s is the coordinator now", self.follower.member.coordinator)
            await role.close()

    def give_up(self, names: Iterable[str], operator: str) -> None:
        """Take an operator's word that these nodes are dead."""
        if self.role is not None:
            for name in names:
                self.role.feed(inputs.GivenUp(name, operator))

    def _renew_beyond(self, term: int) -> None:
        """Raise our term where a node has a newer one, left by a candidate without success: else it cannot follow.

        Only while we hold our group: otherwise the newer term may be that of another coordinator.
        """
        role = self.role
        if role is not None and term > role.state.term and holds_quorum(role.state, clocks.now()):
            self._tasks.spawn(election.renew(self.follower, term), "renew the term")

    def _announce(self) -> None:
        """Tell all others whom to follow."""
        for name in self.members:
            if name != self.node:
                self._tasks.spawn(election.ask(self.follower, name, "announce", self.announcement()), "announce")

    def announcement(self) -> dict[str, Any]:
        """Return what makes the others follow this node."""
        return {"term": self.follower.member.term, "coordinator": self.node, "members": self.members}

    # Peers

    async def _accept(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        channel.handler = self.peer_handler(name, channel)
        self._peers.add(channel)
        try:
            await channel.run()
        finally:
            self._peers.discard(channel)
            if self.role is not None and self.role.lost_channel(name, channel):
                self._tasks.spawn(self._check_dead(name), f"check {name}")

    async def _check_dead(self, name: str) -> None:
        """Call a node dead as soon as its machine says that nothing listens any more; else its heartbeat decides."""
        where = self.members.get(name)
        for pause in DEAD_CHECKS_S:
            await asyncio.sleep(pause)
            role = self.role
            if where is None or role is None or name in role.connected:
                return
            if await peers.is_dead(where["address"], int(where["port"])):
                role.feed(inputs.Gone(name, "its agent died (connection refused)", alone=True))
                return

    def peer_handler(self, name: str, channel: Channel | None = None) -> Handler:
        """Return what answers a node; its name comes from its certificate."""

        async def handle(op: str, args: dict[str, Any], body: bytes) -> Answer | Items:
            return await self._peer(name, channel, op, args)

        return handle

    async def _peer(self, name: str, channel: Channel | None, op: str, args: dict[str, Any]) -> Answer | Items:
        if op in ("join", "report", "beat", "time", "request"):
            return await self._as_coordinator(name, channel, op, args)
        if op in ("order", "journal", "members", "moved"):
            self._as_member(name, op, args)
            return Answer({})
        if op == "vote":
            return election.give_vote(self.follower, args)
        if op == "who":
            if "where" in args:
                self.memory.learn({name: args["where"]})
            self._renew_beyond(int(args["term"]))
            return Answer(self._who())
        if op == "announce":
            self.memory.learn(args["members"])
            self.follower.follow(int(args["term"]), str(args["coordinator"]))
            return Answer({})
        if op == "take_over":
            refusal = await election.inherit(self.follower)
            if refusal:
                raise Problem("election", refusal)
            return Answer({})
        raise Problem("unknown_op", f"no such request between agents: {op}")

    def _who(self) -> dict[str, Any]:
        view = self.follower.member
        return {"term": view.term, "coordinator": view.coordinator, "members": self.members}

    async def _as_coordinator(self, name: str, channel: Channel | None, op: str, args: dict[str, Any]) -> Answer:
        role = self.role
        if role is None:
            raise Problem("not_coordinator", f"{self.node} is not the coordinator")
        if op == "join":
            term = int(args["term"])
            if term > role.state.term:
                self._renew_beyond(term)
                raise Problem("stale", f"{self.node} coordinates term {role.state.term}, {name} is in {term}")
            assert channel is not None
            self.memory.learn({name: {"address": args["address"], "port": args["port"]}})
            role.join(name, channel, args)
            role.tell("members", {"members": self.members})
        elif op == "report":
            role.hear(name, args["op"], args["args"])
        elif op in ("beat", "time"):
            received_ns = time.time_ns()
            if op == "beat":
                role.beat(name, args)
            return Answer({"received_ns": received_ns, "answered_ns": time.time_ns()})
        elif op == "request":
            return Answer(role.status() if args["op"] == "status" else role.request(args["op"], args["args"]))
        return Answer({})

    def _as_member(self, name: str, op: str, args: dict[str, Any]) -> None:
        if name != self.follower.member.coordinator:
            log.warning("%s from %s ignored: %s coordinates", op, name, self.follower.member.coordinator)
        elif op == "order":
            if int(args["term"]) == self.follower.member.term or self.follower.follow(int(args["term"]), name):
                self.follower.order(args["op"], args["args"])
        elif op == "journal":
            self.journal.take(args["records"], reset=args["reset"])
        elif op == "members":
            self.memory.learn(args["members"])
        elif op == "moved":
            self.follower.member = dataclasses.replace(self.follower.member, heir=args["heir"])

    # What others need to know of the job

    @property
    def workdir(self) -> str:
        """Where the workers run on this node, and the hooks."""
        base = str(self.files.home.trees / self.spec.tree) if self.spec.tree else "/"
        return os.path.normpath(os.path.join(base, self.spec.workdir))

    def operator_came(self, channel: Channel) -> None:
        """Note an operator's connection."""
        self.operators.add(channel)
        self.operators_changed.set()

    def operator_left(self, channel: Channel) -> None:
        """Forget an operator's connection."""
        self.operators.discard(channel)
        self.operators_changed.set()


def main(job: str, torchrun: int | None = None) -> int:
    """Run the agent of a job on this node; returns the exit status. `torchrun`: a wire to whoever has the workers."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    files = paths.Home.from_environment().job(job)
    lock = paths.lock_agent(files)
    if lock is None:
        log.error("an agent of %s runs here already", job)
        return 1

    # What workers have started and what outlives their engine is ours to end.
    adopt_orphans()

    async def live() -> None:
        await Agent(files, torchrun).run()

    try:
        asyncio.run(live())
    except Exception:
        log.exception("the agent failed")
        return 1
    finally:
        with contextlib.suppress(FileNotFoundError):
            files.sock.unlink()
        os.close(lock)
    return 0
