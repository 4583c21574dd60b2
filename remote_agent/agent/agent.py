"""The agent of one node in one job: the life of its process.

In: the job directory that `start` has written. Out: a served job; the process ends when the job is over and no operator
is connected.

A job with an endpoint is one that nodes join by themselves: each node's torchrun has the workers, and its agent only
steers them, says what it waits for, and reports the outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import time

from remote_agent.agent import agent_log, keeping, orders
from remote_agent.agent.background import Background
from remote_agent.agent.context import Context, Life, working_directory
from remote_agent.agent.engine_link import EngineLink, Notice, TorchrunLink
from remote_agent.agent.member_loop import MemberLoop
from remote_agent.agent.relay import Relay
from remote_agent.agent.requests import serve_operators
from remote_agent.agent.snapshot_keeper import SnapshotKeeper
from remote_agent.agent.tree_requests import JobTree
from remote_agent.base import clocks, paths
from remote_agent.base.ports import NoFreePort
from remote_agent.base.proc import raise_open_files, slurm_ending
from remote_agent.base.tasks import Tasks
from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator import state as s
from remote_agent.coordinator.formation import holds_quorum
from remote_agent.coordinator.journal import Journal
from remote_agent.coordinator.views import floor, shortage
from remote_agent.election import peers
from remote_agent.election.ballot import Ballot
from remote_agent.election.listener import Listener, listen
from remote_agent.election.member import Member
from remote_agent.engine.processes import adopt_orphans, end_all_marked
from remote_agent.history.keeper import HistoryKeeper
from remote_agent.logs import LogStore
from remote_agent.runtime.runtime import Place, runtime_of
from remote_agent.vitals.host import HostUsage, Vitals
from remote_agent.wire import FIRST_TERM, Channel, JobSpec, Problem, split_endpoint
from remote_agent.wire.events import AGENT_DIED

log = logging.getLogger(__name__)

# An agent without an assigned coordinator exits; sooner if the operator who started it was connected and has left.
ASSIGN_TIMEOUT_S = 180.0
GIVEN_UP_S = 15.0
# The agent stays this long after the end, so that a supervisor can still read the outcome.
LINGER_S = 5.0
ABANDONED_S = 3600.0
LOOK_S = 1.0
# The end of processes that workers started and that outlived their agent and engine is awaited for this long.
LEFT_S = 5.0
# The same wait is reported again after this time.
AGAIN_S = 60.0
# The ballot and the journal get this long for their last write to the disk.
SYNC_S = 5.0
DEAD_CHECKS_S = (0.0, 0.1, 0.3, 0.6, 1.0, 2.0)


class Agent:
    """One node's agent; `run` is its whole life."""

    def __init__(self, files: paths.JobFiles, torchrun: int | None = None, engine: EngineLink | None = None) -> None:
        """Read the job.

        `torchrun`: the wire to the torchrun that has the workers, where it has started us; `engine`: one that an
        earlier job has left.
        """
        spec = JobSpec.from_json(json.loads(files.spec.read_text()))
        node = str(json.loads(files.node.read_text())["node"])
        self._tasks = Tasks()
        self.life = life = Life()
        journal, logs = Journal(files.events), LogStore(files.root, live=True, bound=spec.log_bound)
        runtime = runtime_of(files.home, Place.of(spec, node, working_directory(files, spec)), files)
        fold = replay.Fold(spec, journal, node)
        others = peers.Peers(
            files, node, spec.endpoint, self._tasks, lambda name, issued_ns: fold.state.is_revoked(name, issued_ns)
        )
        self._background = background = Background(node, others)
        self.context = Context(
            files=files,
            spec=spec,
            node=node,
            life=life,
            journal=journal,
            fold=fold,
            logs=logs,
            history=HistoryKeeper(files.history),
            tree=JobTree(files.home, spec.tree),
            runtime=runtime,
            vitals=Vitals(HostUsage(files.root), files.name, lambda: bool(life.operators)),
            peers=others,
            ballot=Ballot(files.term, Member(me=node, node_timeout=spec.node_timeout, contact=clocks.now())),
            snapshots=SnapshotKeeper(files, spec, working_directory(files, spec), background, others, logs, journal),
        )

        def make_engine(notice: Notice) -> EngineLink:
            nonlocal engine
            if torchrun is not None:
                return TorchrunLink(files, notice, torchrun, self.context.runtime)
            hello = orders.hello(self.context)
            left, engine = engine, None
            if left is None:
                return EngineLink(files, notice, hello, self.context.runtime)
            left.turn_to(files, notice, hello, self.context.runtime)
            return left

        self.keeper: keeping.EngineKeeper | None = None
        """What keeps the engine beyond the end of the job; None: nothing is kept."""
        self.member = MemberLoop(self.context, make_engine)
        self._preempted = False
        self._peers: set[Channel] = set()

    async def run(self) -> None:
        """Serve until the job is over and no operator is connected."""
        context, member = self.context, self.member
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._interrupted, signal.Signals(number).name)
        listener = self.listen(context.spec.coordinator_port)
        await context.logs.start()
        member.start()
        waiting = Waiting(context, member).watch() if context.spec.endpoint else self.watch_assignment()
        self._tasks.spawn(waiting, "assignment")
        self._tasks.spawn(agent_log.keep_small(context.files.log), "agent.log")
        context.vitals.start(self._tasks, context.address, member.workers.pids)
        context.snapshots.start(self._tasks, member)
        self._tasks.spawn(context.history.keep(member.samples), "history")
        self._tasks.spawn(context.journal.keep_written(), "journal")
        self._tasks.spawn(context.ballot.keep_written(), "term")
        claim(context, member)
        operators = await serve_operators(context, member, Relay(context.node, context.peers, self._tasks))
        log.info("agent of %s for %s, peers on port %d", context.node, context.spec.job, context.peers.port)
        try:
            await self.life.finished.wait()
            await member.workers.engine.dismiss(outcome(context))
            self.keeper = await keeping.keep(context.files, context.spec, self.life, member.workers.engine)
            # Whoever reads the end needs no engine, which would hold the memory of its waiting process.
            kept = self.keeper.engine if self.keeper is not None else None
            await asyncio.gather(self._wind_down(), member.workers.end_engine(kept))
        finally:
            operators.close()
            listener.close()
            await self.close()

    def listen(self, port: int) -> Listener:
        """Serve the other agents, and note at which port; a port that is taken is replaced by a free one."""
        context = self.context
        endpoint = [split_endpoint(context.spec.endpoint, 0)[0]] if context.spec.endpoint else []
        listener = listen(
            context.files, port, self._accept, self._nodes, [context.address, *endpoint], context.spec.ports
        )
        context.peers.listen_at(context.address, listener.port)
        return listener

    def _nodes(self) -> int:
        """Return how many nodes the job has, or may have."""
        spec = self.context.spec
        return max(spec.max_nodes, len(spec.nodes), len(self.context.peers.members))

    async def _wind_down(self) -> None:
        """Wait until members and operators have read the end, and hooks have reported it."""
        coordinator, life = self.member.role.coordinator, self.life
        if coordinator is not None:
            await coordinator.flushed(LINGER_S)
        await self.context.logs.end()
        self.context.history.save()
        self.context.journal.end()
        await life.until_unwatched(LINGER_S)
        coordinator = self.member.role.coordinator
        if coordinator is not None and not life.at_once.is_set():
            at_once = self._tasks.spawn(life.at_once.wait(), "at_once")
            hooks = self._tasks.spawn(coordinator.hooks.finish(), "the last hooks")
            await asyncio.wait((at_once, hooks), return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """End everything that this agent has started, except an engine that is kept."""
        await self.member.close(self.keeper.engine if self.keeper is not None else None)
        # All channels are closed at the same time, so those that do not answer share one deadline.
        channels = (*self._peers, *self.life.operators)
        await asyncio.gather(*(channel.close() for channel in channels), return_exceptions=True)
        await self._tasks.close()
        await self.context.runtime.close()
        self.context.snapshots.close()
        self._background.close()
        await self.context.logs.stop()
        self.context.history.save()
        with contextlib.suppress(asyncio.TimeoutError):
            saving = (self.context.ballot.save(), self.context.journal.sync())
            await asyncio.wait_for(asyncio.gather(*saving, return_exceptions=True), SYNC_S)
        self.context.journal.close()

    def _interrupted(self, name: str) -> None:
        """End at a signal without waiting for operators; where Slurm ends the allocation, stop the job first."""
        preempted = slurm_ending() if name == "SIGTERM" and not self._preempted else ""
        if not preempted:
            self.life.finish(f"the agent got {name}", linger=False)
            return
        self._preempted = True
        self._tasks.spawn(self._stop_job(preempted), "the end of the allocation")

    async def _stop_job(self, preempted: str) -> None:
        try:
            await self.member.link.ask("stop", {"operator": "slurm", "preempted": preempted})
        except Problem as problem:
            self.life.finish(f"{preempted}: {problem.message}", linger=False)

    async def watch_assignment(self) -> None:
        """End an agent that has had neither a coordinator nor an operator for long."""
        alone_since = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            if self.member.role.is_held or self.member.link.channel is not None or self.life.operators:
                alone_since = time.monotonic()
            alone_s = time.monotonic() - alone_since
            patience_s = GIVEN_UP_S if self.life.was_attended else ASSIGN_TIMEOUT_S
            if alone_s > (ABANDONED_S if self.context.ballot.view.term else patience_s):
                self.life.finish(f"neither a coordinator nor an operator for {alone_s:.0f} s")
                return

    # Other agents

    async def _accept(self, peer: peers.Certified, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = peer.name
        channel = Channel(reader, writer)
        channel.handler = self.member.handler(name, channel, peer.issued_ns)
        self._peers.add(channel)
        try:
            await channel.run()
        finally:
            self._peers.discard(channel)
            coordinator = self.member.role.coordinator
            if coordinator is not None and coordinator.lost_channel(name, channel) and channel.ended:
                self._tasks.spawn(self._check_dead(name), f"check {name}")

    async def _check_dead(self, name: str) -> None:
        """Declare a node dead whose connection has ended as soon as nothing listens there any more.

        Otherwise the missing heartbeat decides: that connections are refused proves nothing by itself.
        """
        for pause in DEAD_CHECKS_S:
            await asyncio.sleep(pause)
            coordinator = self.member.role.coordinator
            if name not in self.context.peers.members or coordinator is None or name in coordinator.connected:
                return
            if await self.context.peers.is_dead(name):
                coordinator.take(inputs.AgentDead(name, f"{AGENT_DIED} (connection refused)", alone=True))
                return


def main(job: str, torchrun: int | None = None) -> int:
    """Run the agent of a job on this node; returns the exit code. `torchrun`: a wire to the workers' torchrun."""
    agent_log.begin()
    raise_open_files()
    files = paths.Home.from_environment().job(job)
    lock = paths.lock_agent(files)
    if lock is None:
        log.error("an agent for %s is already running here", job)
        return 1

    if not end_all_marked(files.root, LEFT_S):
        log.warning("processes that an earlier agent's workers started do not end")
    # Processes that workers have started, and those that outlive their engine, become our children: we end them.
    adopt_orphans()

    try:
        asyncio.run(live(files, lock, torchrun))
    except NoFreePort as error:
        log.error("%s", error)
        return 1
    except Exception:
        log.exception("the agent failed")
        return 1
    return 0


async def live(files: paths.JobFiles, lock: int, torchrun: int | None) -> None:
    """Serve a job to its end, then each next one that takes over its engine."""
    engine: EngineLink | None = None
    while True:
        agent = Agent(files, torchrun, engine)
        try:
            await agent.run()
        finally:
            paths.unlock_agent(files, lock)
        if agent.keeper is None:
            return
        order = await agent.keeper.wait()
        agent.keeper.close()
        engine = agent.keeper.engine
        if order is None:
            await engine.close()
            return
        log.info("the next job, %s, takes over", order.job)
        files = files.home.job(order.job)
        if not await keeping.hand_over(engine, files, order):
            engine = None
        next_lock = paths.lock_agent(files)
        if next_lock is None:
            raise Problem("already_running", f"an agent for {files.name} is already running here")
        lock = next_lock


def claim(context: Context, member: MemberLoop) -> None:
    """Coordinate a job that has not begun, where this node has the job's endpoint."""
    port = context.spec.coordinator_port
    if context.spec.endpoint and port and context.peers.port == port and not context.journal.records:
        own = {"node": context.node, "address": context.address, "port": port}
        member.role.assign({"term": FIRST_TERM, "coordinator": own, "members": {}})


class Waiting:
    """What this node waits for, as its torchrun reports it; a wait beyond torch's own join_timeout ends the agent."""

    def __init__(self, context: Context, member: MemberLoop) -> None:
        self._context = context
        self._member = member
        self._reported: dict[str, float] = {}
        """When each text was last reported."""
        self._since: float | None = None

    async def watch(self) -> None:
        """Look until cancelled, or until the wait is too long."""
        patience = self._context.spec.join_timeout
        while True:
            await asyncio.sleep(LOOK_S)
            now = clocks.now()
            text, ends = self._look()
            self._reported = {each: when for each, when in self._reported.items() if text and now - when < AGAIN_S}
            if text and text not in self._reported:
                self._reported[text] = now
                await self._member.workers.engine.remark(text)
            self._since = (now if self._since is None else self._since) if ends else None
            if self._since is not None and now - self._since > patience:
                self._context.life.finish(f"{patience:g} s (join_timeout) of {text}", linger=False)
                return

    def _look(self) -> tuple[str, bool]:
        """Return what is waited for, "" for nothing, and whether the node's own join_timeout limits that."""
        context, member = self._context, self._member
        if context.life.finished.is_set() or member.running is not None:
            return "", False
        if member.role.coordinator is not None:
            state = member.role.coordinator.state
            text = short_of(state, context.node)
            if not text and state.phase == s.FORMING and not holds_quorum(state, clocks.now()):
                text = f"waiting for nodes of the last group: {shortage(state)}"
            # The coordinator ends a job that has too few nodes, for all of them.
            return text, False
        if member.link.channel is None:
            return self._without_coordinator(), True
        return short_of(context.fold.state, context.node), False

    def _without_coordinator(self) -> str:
        view, trouble = self._context.ballot.view, self._member.election.trouble
        if not view.term:
            return f"waiting for {trouble or self._context.spec.endpoint}"
        who = "a coordinator" if view.coordinator in (None, view.me) else f"{view.coordinator}, the coordinator"
        return f"waiting for {who}" + (f": {trouble}" if trouble else "")


def short_of(state: s.State, me: str) -> str:
    """Say why a node has no workers, where that may last."""
    own = state.nodes.get(me)
    if own is not None and own.status in ("removed", "failed"):
        return f"left out ({own.reason}): waiting for `supervisor add {state.spec.job} --node {me}`"
    if own is not None and own.status == "spare":
        return "the group is full (--nnodes): standing by as a spare"
    if state.phase != s.FORMING:
        return ""
    here = [name for name, node in state.nodes.items() if node.status in ("ready", "running", "spare")]
    if len(here) < floor(state):
        return f"waiting for nodes: {floor(state)} are needed, connected: {' '.join(here) or 'none'}"
    return ""


def outcome(context: Context) -> dict[str, str]:
    """Return how the job ended for this node: state (succeeded, failed, stopped, removed or lost) and why."""
    state = context.fold.state
    node = state.nodes.get(context.node)
    if state.ended:
        return {"state": state.ended, "reason": state.failure or ""}
    if node is not None and node.status == "removed":
        return {"state": "removed", "reason": node.reason or ""}
    return {"state": "lost", "reason": context.life.reason}
