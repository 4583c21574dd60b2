"""The coordinator's shell: it feeds the pure state machine and carries out its commands.

In: reports of members, requests of operators, time. Out: orders to members, the journal, the status document; the
coordinator's role, which this node may have.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from remote_agent.agent import metrics
from remote_agent.agent.hooks import Hooks
from remote_agent.agent.last_output import MAX_LINES
from remote_agent.base import clocks
from remote_agent.base.tasks import Tasks
from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator import state as s
from remote_agent.coordinator.formation import holds_quorum, is_held
from remote_agent.coordinator.journal import chunks
from remote_agent.coordinator.machine import step
from remote_agent.coordinator.operator_requests import answer, read
from remote_agent.coordinator.output_watch import Losses, moved
from remote_agent.coordinator.status import document
from remote_agent.coordinator.views import is_short
from remote_agent.diagnose.incidents import iso_time
from remote_agent.text.shapes import clip
from remote_agent.wire import Answer, Args, Channel, NodeSpec, Problem, WireError
from remote_agent.wire.documents import read_last_output, read_placed, read_snapshots
from remote_agent.wire.events import (
    ENDED_EVENTS,
    HOST_NAME,
    INTERFACE,
    SNAPSHOT_LEFT_OUT,
    SNAPSHOT_NOTICES,
    EventType,
)
from remote_agent.wire.gate import Misfit

if TYPE_CHECKING:
    from remote_agent.agent.context import Context
    from remote_agent.diagnose.hang.pulses import Pulse
    from remote_agent.election.election import PeerRequest
    from remote_agent.wire.documents import EvidenceEntry, JournalEvent, SnapshotEntry, Status

log = logging.getLogger(__name__)

TICK_S = 0.25
HAND_OVER_TIMEOUT_S = 30.0


def _ranks(args: Mapping[str, Any]) -> tuple[tuple[int, int, int], ...]:
    return tuple((int(rank["rank"]), int(rank["local_rank"]), int(rank["pid"])) for rank in args["ranks"])


def _notice(args: Mapping[str, Any]) -> dict[str, str] | None:
    """Return a node's notice about its network; None for none, or for a malformed one."""
    notice = args.get("notice")
    if not isinstance(notice, dict) or notice.get("kind") not in (INTERFACE, HOST_NAME):
        return None
    return {"kind": notice["kind"], "message": clip(str(notice.get("message")))}


def _trees(args: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(digest) for digest in args.get("trees", ()))


def _age_s(report: Mapping[str, Any]) -> float:
    """Return how long ago something was that has a corrected time."""
    return max(0.0, (time.time_ns() - int(report["t_ns"])) / 1e9)


def _pulses(args: Mapping[str, Any]) -> dict[int, Pulse]:
    """Return a node's pulses by rank, each with the node's clock, by which its timestamps are corrected."""
    clock = clocks.Clock.from_report(args)
    ranks: Mapping[str, Pulse] = args["ranks"]
    return {int(rank): {**pulse, "clock": clock} for rank, pulse in ranks.items()}


def _snapshots(args: Mapping[str, Any]) -> tuple[SnapshotEntry, ...]:
    """Return the snapshots that a node reports; none if the report is malformed."""
    try:
        return tuple(read_snapshots(args.get("snapshots") or []))
    except Misfit as misfit:
        log.warning("snapshots: %s", misfit)
        return ()


def _node_warning(node: str, args: Mapping[str, Any]) -> inputs.NodeWarning:
    kind = str(args.get("kind"))
    return inputs.NodeWarning(
        node, kind if kind in SNAPSHOT_NOTICES else SNAPSHOT_LEFT_OUT, clip(str(args.get("message")))
    )


def _last_output(node: str, generation: int, args: Mapping[str, Any]) -> inputs.LastOutput:
    """Return what a node has of a lost node's output; raises Misfit for what no agent of ours reports."""
    report = read_last_output(args)
    evidence: list[EvidenceEntry] = [
        {**line, "node": node, "text": clip(line["text"])} for line in report["evidence"][:MAX_LINES]
    ]
    return inputs.LastOutput(node, generation, report["of"], tuple(report["ranks"]), tuple(evidence))


# Reports of members become inputs; timestamps of a member's clock are corrected first.
REPORTS: dict[str, Callable[[str, int, Mapping[str, Any]], inputs.Input]] = {
    "ready": lambda node, _, args: inputs.Ready(node, int(args["nproc"]), args.get("versions", {}), _trees(args)),
    "unfit": lambda node, _, args: inputs.Unfit(node, str(args["reason"])),
    "notice": lambda node, _, args: _node_warning(node, args),
    "held": lambda node, generation, args: inputs.Held(node, generation, _snapshots(args)),
    "placed": lambda node, generation, args: inputs.Placed(node, generation, read_placed(args)),
    "last_output": _last_output,
    "gone": lambda node, _, args: inputs.AgentDead(node, str(args["reason"])),
    "recorded": lambda node, generation, args: inputs.Recorded(node, generation, int(args["term"])),
    "prepared": lambda node, generation, args: inputs.Prepared(node, generation, int(args["port"])),
    "order_failed": lambda node, generation, args: inputs.OrderFailed(node, generation, str(args["message"])),
    "started": lambda node, generation, args: inputs.Started(
        node, generation, _ranks(args), _notice(args), None if args.get("cold") is None else clip(str(args["cold"]))
    ),
    "grouping": lambda node, generation, args: inputs.Grouping(node, generation, int(args["rank"])),
    "assigned": lambda node, generation, args: inputs.Assigned(node, generation, _ranks(args), int(args["world_size"])),
    "main": lambda node, generation, args: inputs.Main(node, generation, int(args["rank"])),
    "pulse": lambda node, generation, args: inputs.Pulses(node, generation, _pulses(args)),
}


def _first_step_age(ranks: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return how long ago the first of these ranks printed its first step; None: none has."""
    ages = [rank.get("first_step_age_s") for rank in ranks.values()]
    return max((float(age) for age in ages if age is not None), default=None)


class OwnNode(Protocol):
    """The member on the coordinator's own node: `MemberLoop`."""

    def order(self, op: str, args: Args) -> None: ...
    def facts(self) -> dict[str, Any]: ...
    def introduction(self) -> dict[str, Any]: ...


class Outbox:
    """The notices that one member has yet to be sent, in order."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.queue: asyncio.Queue[tuple[str, Args]] = asyncio.Queue()
        self.sending: asyncio.Task[None] | None = None

    def put(self, op: str, args: Args) -> None:
        """Add a notice."""
        self.queue.put_nowait((op, args))

    async def run(self) -> None:
        """Send notices until the wire ends; one that cannot be sent ends it, because none may be skipped."""
        while True:
            op, args = await self.queue.get()
            try:
                await self.channel.notify(op, args)
            except WireError as error:
                log.info("%s: %s", op, error)
                await self.channel.close()
                return
            finally:
                self.queue.task_done()


class Coordinator:
    """The coordinator of the job, in this agent."""

    def __init__(self, context: Context, own: OwnNode, state: s.State, retire: Callable[[str], None]) -> None:
        """Take the role; `retire` is called with the successor when this node is removed."""
        self._context = context
        self._retire = retire
        self._journal = context.journal
        self._me = context.node
        self._own = own
        self.state = state
        self.facts: dict[str, Any] = {}
        self._clocks: defaultdict[str, clocks.Clock] = defaultdict(clocks.Clock)
        """The time to add to a node's clock to get ours, and how far it may be wrong."""
        self._losses = Losses()
        self.changed = asyncio.Event()
        self._outboxes: dict[str, Outbox] = {}
        self._moved: dict[str, Any] | None = None
        """The notice of a hand-over, for all members, also for those that reconnect meanwhile."""
        self._operators: dict[str, int] = {}
        self.hooks = Hooks(context.spec, context.workdir, self.record)
        self._tasks = Tasks()

    def start(self, absent: dict[str, str]) -> None:
        """Begin; `absent`: nodes that never came up, with the reason."""
        self.hooks.start(self._journal.records)
        if not self._journal.records:
            author = {"coordinator": self._me, "disk": self._context.ballot.disk}
            self._record(s.Emit(EventType.JOB_STARTED, -1, detail={**self._description(), **author}))
        for name, reason in absent.items():
            self.feed(inputs.Unfit(name, reason))
        self._tasks.spawn(self._tick(), "coordinator tick")
        port = self._context.spec.metrics_port
        if port:
            self._tasks.spawn(metrics.serve(port, self.status, self.record), "metrics")

    async def close(self) -> None:
        """Stop acting as the coordinator."""
        await self.hooks.close()
        await self._tasks.close()

    @property
    def connected(self) -> frozenset[str]:
        """The members that have a connection to us."""
        return frozenset(self._outboxes)

    def set_term(self, term: int) -> None:
        """Continue in a newer term."""
        self.state = dataclasses.replace(self.state, term=term)

    def is_short(self) -> bool:
        """Return whether too few nodes are connected: the others may have another coordinator by now."""
        return is_short(self.state)

    def misses_nodes(self) -> bool:
        """Return whether a node of the job is lost or silent: it may follow another coordinator by now."""
        for name, node in self.state.nodes.items():
            silent = node.incarnation and not is_held(self.state, name, clocks.now())
            if node.status == "lost" or (silent and node.status not in ("removed", "failed")):
                return True
        return False

    def feed(self, event: inputs.Input) -> s.Reply | None:
        """Take one input and carry out the commands; returns the reply to an operator, if it was a request."""
        self.state, commands = step(self.state, event, clocks.now(), time.time_ns())
        reply: s.Reply | None = None
        for command in commands:
            if isinstance(command, s.Emit):
                self._record(command)
            elif isinstance(command, s.Send):
                self._send(command.node, command.op, dict(command.args))
            elif isinstance(command, s.Drop):
                self._drop(command.node)
            elif isinstance(command, s.HandOver):
                self._retire(command.node)
            else:
                reply = command
        if commands or not isinstance(event, (inputs.Tick, inputs.Heartbeat)):
            self._wake()
        return reply

    def request(self, op: str, args: Args) -> Any:
        """Answer an operator's request; raises Problem when it is refused."""
        if op == "status":
            return self.status()
        if op == "operator":
            self._count_operator(args)
            return {}
        if op == "signalled":
            detail = {key: args.get(key) for key in ("ranks", "signal", "operator")}
            self.record(EventType.SIGNAL_SENT, str(args.get("node")), **detail)
            return {}
        seq = self._journal.last_seq
        # There is no pause between the inputs, so that several removals stop the group once.
        replies = [(name, self.feed(event)) for name, event in read(op, args, self.state)]
        return {**answer(replies), "seq": seq}

    def _count_operator(self, args: Args) -> None:
        """Note an operator: one event for its first connection, one when its last connection has ended."""
        name, came = str(args["operator"]), bool(args["came"])
        count = self._operators.get(name, 0) + (1 if came else -1)
        self._operators[name] = max(0, count)
        if came and count == 1:
            self.record(EventType.OPERATOR_ATTACHED, operator=name, mode=args.get("mode"))
        elif not came and count == 0:
            self.record(EventType.OPERATOR_DETACHED, operator=name)

    def status(self) -> Status:
        """Return the status document."""
        own: dict[str, Any] = {self._me: {"clock_offset_ms": 0.0, "clock_error_ms": 0.0, **self._own.facts()}}
        return document(self.state, {**self.facts, **own}, self._me, clocks.now())

    # Reports of members

    def join(self, node: str, channel: Channel, args: Args) -> None:
        """Take a member's connection: it gets the journal first, then orders."""
        self._forget(node)
        outbox = Outbox(channel)
        reset, records = self._journal.missing(args["journal"])
        pieces = list(chunks(records))
        for left, piece in zip(reversed(range(len(pieces))), pieces):
            outbox.put("journal", {"records": piece, "reset": reset, "more": reset and left > 0})
        outbox.put("members", {"members": self._context.peers.members})
        if self._moved is not None:
            outbox.put("moved", self._moved)
        self._outboxes[node] = outbox
        outbox.sending = self._tasks.spawn(outbox.run(), f"orders for {node}")
        self.hear_join(node, args)

    def hear_join(self, node: str, args: Args) -> None:
        """Take the facts that a member reports about itself when it joins."""
        if node not in self.state.nodes:
            self._take_in(NodeSpec(name=node, address=str(args.get("address", ""))))
        ready: dict[str, Any] = next((one["args"] for one in args.get("reports", ()) if one["op"] == "ready"), {})
        self._clocks[node] = clocks.Clock.from_report(args)
        nproc, incarnation, reason = ready.get("nproc"), str(args["incarnation"]), str(args["reason"])
        running, disk = args.get("running"), str(args["disk"])
        delay = clocks.Echo.delay(args)
        self.feed(inputs.Joined(node, incarnation, running, reason, nproc, _trees(ready), disk, delay))
        for report in args.get("reports", ()):
            self.receive(node, report["op"], report["args"])

    def _take_in(self, spec: NodeSpec) -> None:
        """Take in a node that the job's description does not name."""
        new = s.Node(spec)
        if self.state.spec.endpoint:
            self.record(EventType.NODE_JOINED, spec.name, spec=dataclasses.asdict(spec))
        else:
            new = s.Node(spec, status="removed", reason="not in the group: add it")
        self.state = dataclasses.replace(self.state, nodes={**self.state.nodes, spec.name: new})

    def lost_channel(self, node: str, channel: Channel) -> bool:
        """Forget a member's connection; returns whether it was the current one."""
        outbox = self._outboxes.get(node)
        if outbox is None or outbox.channel is not channel:
            return False
        self._forget(node)
        return True

    def _forget(self, node: str) -> Outbox | None:
        """Send nothing more on a member's connection; returns what was still to be sent."""
        outbox = self._outboxes.pop(node, None)
        if outbox is not None and outbox.sending is not None:
            outbox.sending.cancel()
        return outbox

    def receive(self, node: str, op: str, args: Args) -> None:
        """Take a member's report."""
        if op in REPORTS:
            self.feed(REPORTS[op](node, int(args.get("generation", -1)), args))
        elif op == "exited":
            ended = self._clocks[node].corrected(args["exit"])
            self.feed(inputs.Exited(node, int(args["generation"]), ended, _age_s(ended)))
        elif op == "grouped":
            age_s = _age_s(self._clocks[node].corrected({"t_ns": int(args["t_ns"])}))
            self.feed(inputs.Grouped(node, int(args["generation"]), int(args["rank"]), float(args["took_s"]), age_s))
        elif op == "idle":
            exits = tuple(self._clocks[node].corrected(ended) for ended in args["exits"])
            self.feed(inputs.Idle(node, int(args["generation"]), exits))

    def beat(self, node: str, args: Args) -> None:
        """Take a heartbeat."""
        clock = self._clocks[node] = clocks.Clock.from_report(args)
        ranks = args.get("ranks", {})
        facts = {"agent_pid": args.get("agent_pid"), "ranks": ranks, **clock.status()}
        before = self.facts.get(node, {}).get("ranks", {})
        vitals = {"vitals": args.get("vitals"), "standby": args.get("standby"), "heard_at": clocks.now()}
        self.facts[node] = {**facts, **vitals, "generation": args.get("generation")}
        stepped = any(rank.get("step") is not None for rank in ranks.values())
        current = args.get("generation") == self.state.generation
        warnings = self._losses.read(self.state.generation, ranks) if current else {}
        progressed = current and moved(before, ranks)
        heard_age = float(args.get("heard_age", 0.0)) + clocks.Echo.delay(args)
        first = _first_step_age(ranks) if current else None
        kept = _snapshots(args) if "snapshots" in args else None
        self.feed(inputs.Heartbeat(node, heard_age, stepped and current, progressed, warnings, first, kept))
        self._wake()

    # Journal and orders

    def record(self, kind: EventType, node: str | None = None, **detail: Any) -> None:
        """Write a fact that the state machine does not know of, such as an operator's connection."""
        self._record(s.Emit(kind, self.state.generation, node, detail=detail))

    def _record(self, emit: s.Emit) -> None:
        now = iso_time(time.time_ns())
        record: JournalEvent = {**emit.record(self._journal.last_seq + 1, now), "term": self.state.term}
        if emit.type is EventType.JOB_STARTED:
            self.state = dataclasses.replace(self.state, started_at=now)
        self._journal.append(record)
        if emit.type is EventType.GENERATION_PROPOSED:
            self._tasks.spawn(self._secure(emit.generation), "write the proposal")
        for outbox in self._outboxes.values():
            outbox.put("journal", {"records": [record], "reset": False, "more": False})
        self.hooks.receive(record)

    async def _secure(self, generation: int) -> None:
        """Count this node among those that have the proposal on disk, once it has."""
        term = self.state.term
        try:
            await self._context.ballot.secure(self._journal)
        except OSError as error:
            log.warning("generation %d: %s", generation, error)
            return
        self.feed(inputs.Recorded(self._me, generation, term))

    def _description(self) -> dict[str, Any]:
        spec = self.state.spec
        return {
            "script": spec.script,
            "args": list(spec.args),
            "kind": spec.kind,
            "nodes": [node.name for node in spec.nodes],
            "min_nodes": spec.min_nodes,
            "max_nodes": spec.max_nodes,
            "max_restarts": spec.max_restarts,
        }

    def _send(self, node: str, op: str, args: Args) -> None:
        if node == self._me:
            self._own.order(op, args)
        elif node in self._outboxes:
            self._outboxes[node].put("order", {"op": op, "args": args, "term": self.state.term})

    def _drop(self, node: str) -> None:
        outbox = self._forget(node)
        if outbox is not None:
            self._tasks.spawn(outbox.channel.close(), f"drop {node}")

    def notify_all(self, op: str, args: Args) -> None:
        """Send every member a notice."""
        for outbox in self._outboxes.values():
            outbox.put(op, args)

    async def hand_over(self, successor: str) -> None:
        """Name the successor to all, and let it ask for votes once it has the whole journal."""
        self._moved = {"successor": successor, "term": self.state.term}
        self.notify_all("moved", self._moved)
        outbox = self._outboxes.get(successor)
        if outbox is not None:
            try:
                # The successor needs the whole journal, and the others its name; otherwise they refuse it their votes.
                await self.flushed(HAND_OVER_TIMEOUT_S)
                await outbox.channel.call("take_over", {"term": self.state.term}, timeout=HAND_OVER_TIMEOUT_S)
            except (WireError, Problem, asyncio.TimeoutError) as error:
                # The others elect one of themselves.
                log.warning("%s did not take over: %s", successor, error)

    async def flushed(self, timeout: float) -> None:
        """Wait until every member has been sent everything, for at most that long."""
        joins = [outbox.queue.join() for outbox in self._outboxes.values()]
        try:
            await asyncio.wait_for(asyncio.gather(*joins), timeout)
        except asyncio.TimeoutError:
            log.warning("some members have not been sent everything")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.feed(inputs.Heartbeat(self._me))
                self.feed(inputs.Tick())
            except Exception:
                log.exception("coordinator tick")

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class CoordinatorRole:
    """The coordinator's role on this node: vacant, or held by a `Coordinator`."""

    def __init__(self, context: Context, own: OwnNode, tasks: Tasks) -> None:
        self._context = context
        self._own = own
        self._tasks = tasks
        self.coordinator: Coordinator | None = None
        context.ballot.on_change(self._drop_if_moved)
        self.requests: dict[str, PeerRequest] = {
            "join": self._on_join,
            "report": self._on_report,
            "beat": self._on_heartbeat,
            "time": self._on_time,
            "request": self._on_request,
        }

    @property
    def is_held(self) -> bool:
        """Whether this node is the coordinator."""
        return self.coordinator is not None

    @property
    def connected(self) -> frozenset[str]:
        """The nodes that are connected to this coordinator."""
        return self.coordinator.connected if self.coordinator is not None else frozenset()

    def is_short(self) -> bool:
        """Return whether this node is the coordinator, and waits for nodes."""
        return self.coordinator is not None and self.coordinator.is_short()

    def give_up(self, nodes: Iterable[str]) -> None:
        """Continue without these nodes, where they are out of reach: an operator declares them dead."""
        if self.coordinator is not None:
            for name in nodes:
                self.coordinator.feed(inputs.GivenUp(name))

    def needs_term_above(self, term: int) -> bool:
        """Return whether this coordinator holds its group, in an older term than that."""
        state = self.coordinator.state if self.coordinator is not None else None
        return state is not None and term > state.term and holds_quorum(state, clocks.now())

    def assign(self, args: Args) -> None:
        """Accept the coordinator that a launch names; raises Problem when this job has another one already."""
        context, named = self._context, args["coordinator"]
        me, records = context.node, context.journal.records
        if named["node"] == me and not self.is_held and records:
            raise Problem("stale", f"this job has begun: {me} needs votes to coordinate it")
        where = {"address": named["address"], "port": named["port"]}
        own = {"address": context.address, "port": context.peers.port}
        context.peers.learn({**args["members"], named["node"]: where, me: own}, certain=True)
        if not context.ballot.follow(int(args["term"]), named["node"]):
            raise Problem("stale", f"this job is in term {context.ballot.view.term} already")
        if named["node"] == me and not self.is_held:
            state = replay.initial(context.spec, me, clocks.now(), context.ballot.disk)
            coordinator = self._begin(state, dict(args.get("absent") or {}))
            coordinator.hear_join(me, self._own.introduction())

    def take(self, term: int, former: str) -> None:
        """Become the coordinator of that term, after `former`: this node has the votes."""
        context, now = self._context, clocks.now()
        me, ballot = context.node, context.ballot
        away_s = now - ballot.view.contact
        state = replay.take_over(context.spec, me, term, context.journal.records, now, away_s)
        ballot.follow(term, me)
        coordinator = self._begin(state, {})
        if state.phase != s.ENDED:
            # Only nodes that do not know of the job's end are notified; the others ended with the same journal.
            coordinator.record(EventType.COORDINATOR_CHANGED, me, former=former or None, term=term)
        if former in state.nodes and state.nodes[former].status != "removed":
            coordinator.feed(inputs.AgentDead(former, "it was the coordinator, and is gone"))
        coordinator.hear_join(me, self._own.introduction())

    def _begin(self, state: s.State, absent: dict[str, str]) -> Coordinator:
        self.coordinator = coordinator = Coordinator(self._context, self._own, state, self._retire)
        coordinator.start(absent)
        return coordinator

    def _retire(self, successor: str) -> None:
        """Give up the role at once, so that the other node takes over."""
        self._context.ballot.name_successor(successor)
        self._tasks.spawn(self._hand_over(successor), "hand over")

    async def _hand_over(self, successor: str) -> None:
        """Give the role away, and end this agent once a group has formed without it: it may need this node's vote."""
        journal = self._context.journal
        if self.coordinator is not None:
            await self.coordinator.hand_over(successor)
        await self.close()
        async for record in journal.follow(journal.last_seq):
            if record["type"] in (EventType.GENERATION_STARTED, *ENDED_EVENTS):
                break
        self._context.life.finish("it was removed from the job", linger=False)

    def renew(self, term: int) -> None:
        """Stay the coordinator, in a newer term."""
        if self.coordinator is not None:
            self.coordinator.set_term(term)

    def _drop_if_moved(self, coordinator: str) -> None:
        if coordinator != self._context.node and self.is_held:
            log.warning("%s is the coordinator now", coordinator)
            self._tasks.spawn(self.close(), "drop the role")

    async def close(self) -> None:
        """Stop being the coordinator."""
        coordinator, self.coordinator = self.coordinator, None
        if coordinator is not None:
            await coordinator.close()

    def _held(self) -> Coordinator:
        """Return the coordinator; raises Problem."""
        if self.coordinator is None:
            raise Problem("not_coordinator", f"{self._context.node} is not the coordinator")
        return self.coordinator

    async def _on_join(self, node: str, channel: Channel | None, args: Args) -> Answer:
        coordinator, term = self._held(), int(args["term"])
        if term > coordinator.state.term:
            older = coordinator.state.term
            raise Problem("stale", f"{self._context.node} coordinates term {older}, {node} is in {term}")
        assert channel is not None
        self._context.peers.learn({node: {"address": args["address"], "port": args["port"]}}, certain=True)
        coordinator.join(node, channel, args)
        coordinator.notify_all("members", {"members": self._context.peers.members})
        return Answer({})

    async def _on_report(self, node: str, channel: Channel | None, args: Args) -> Answer:
        self._held().receive(node, args["op"], args["args"])
        return Answer({})

    async def _on_heartbeat(self, node: str, channel: Channel | None, args: Args) -> Answer:
        received_ns = time.time_ns()
        self._held().beat(node, args)
        return Answer({"received_ns": received_ns, "answered_ns": time.time_ns(), "now": clocks.now()})

    async def _on_time(self, node: str, channel: Channel | None, args: Args) -> Answer:
        self._held()
        return Answer({"received_ns": time.time_ns(), "answered_ns": time.time_ns(), "now": clocks.now()})

    async def _on_request(self, node: str, channel: Channel | None, args: Args) -> Answer:
        return Answer(self._held().request(args["op"], args["args"]))
