"""The coordinator's shell: it feeds the pure state machine and carries out its commands.

In: reports of members, requests of operators, time. Out: orders to members, the journal, the status document; the
coordinator's role, which this node may have.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from remote_agent.agent import metrics
from remote_agent.agent.file_requests import in_pieces
from remote_agent.agent.hooks import Hooks
from remote_agent.agent.reports import read_report
from remote_agent.base import clocks
from remote_agent.base.tasks import Tasks
from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator import state as s
from remote_agent.coordinator.formation import holds_quorum, is_expected, is_held
from remote_agent.coordinator.journal import chunks
from remote_agent.coordinator.machine import run
from remote_agent.coordinator.operator_requests import answer, read
from remote_agent.coordinator.output_watch import Losses, moved
from remote_agent.coordinator.policy import judged
from remote_agent.coordinator.status import document
from remote_agent.coordinator.views import is_short
from remote_agent.diagnose.incidents import iso_time
from remote_agent.election.member import is_too_high
from remote_agent.text.shapes import clip
from remote_agent.wire import Answer, Args, Channel, Items, NodeSpec, Problem, WireError, encode
from remote_agent.wire.agents import OPERATORS, SIGNALLED
from remote_agent.wire.documents import read_event, read_leader_lines, read_node_report, read_steps
from remote_agent.wire.events import ENDED_EVENTS, EventType
from remote_agent.wire.gate import Misfit, shape

if TYPE_CHECKING:
    from remote_agent.agent.context import Context
    from remote_agent.election.election import PeerRequest
    from remote_agent.wire.documents import (
        JournalEvent,
        NodeFacts,
        NodeReport,
        RankFacts,
        Status,
    )

log = logging.getLogger(__name__)

TICK_S = 0.25
HAND_OVER_TIMEOUT_S = 30.0
# Members learn of these with the next tick, together: of a thousand nodes that join, each would cost a message to all.
LATER = (EventType.NODE_READY, EventType.NODE_LOST, EventType.NODE_FAILED, EventType.AGENT_LOST)
# A member that does not read is dropped when it has this many notices to be sent: it joins again, and gets the journal.
MAX_WAITING = 4096


def _gpu_use(report: NodeReport) -> float | None:
    """Return how busy the GPUs of a node's ranks are, in percent."""
    own = {vitals.get("gpu") for one in report["ranks"].values() if (vitals := one.get("vitals"))}
    uses = [gpu.get("use") for gpu in (report.get("vitals") or {}).get("gpus", ()) if gpu.get("index") in own]
    known = [use for use in uses if use is not None]
    return sum(known) / len(known) if known else None


def _first_step_age(ranks: Mapping[str, RankFacts]) -> float | None:
    """Return how long ago the first of these ranks printed its first step; None: none has."""
    ages = [rank.get("first_step_age_s") for rank in ranks.values()]
    return max((age for age in ages if age is not None), default=None)


def as_known(report: Mapping[str, Any], clock: clocks.Clock) -> Any:
    """Return the NodeFacts of a node that has just reported this."""
    times = dict.fromkeys(("heard_at", "measured_at"), clocks.now())
    return {**report, "clock_offset_ms": clock.offset_ms, "clock_error_ms": clock.error_ms, **times}


def attached(records: Iterable[JournalEvent]) -> set[str]:
    """Return the operators who have attached, and not detached, according to a journal."""
    names: set[str] = set()
    for record in records:
        if record["type"] in (EventType.OPERATOR_ATTACHED, EventType.OPERATOR_DETACHED):
            # Of one operator these take turns.
            names ^= {str(record["detail"].get("operator"))}
    return names


class OwnNode(Protocol):
    """The member on the coordinator's own node: `MemberLoop`."""

    def order(self, op: str, args: Args) -> None: ...
    def facts(self) -> dict[str, Any]: ...
    def introduction(self) -> dict[str, Any]: ...


class Notice:
    """A notice for members, encoded once for all of them."""

    def __init__(self, op: str, args: Args) -> None:
        self.op, self.args = op, args

    @functools.cached_property
    def frame(self) -> bytes:
        """Its bytes on the wire; raises ProtocolError."""
        return encode({"op": self.op, "args": self.args})


class Outbox:
    """The notices that one member has yet to be sent, in order."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.lacks: tuple[bool, int] | None = None
        """The records that it has yet to be sent: whether they replace its own, and after which number they begin."""
        self.queue: asyncio.Queue[Notice] = asyncio.Queue()
        self.sending: asyncio.Task[None] | None = None

    def put(self, notice: Notice) -> None:
        """Add a notice."""
        self.queue.put_nowait(notice)

    async def run(self) -> None:
        """Send notices until the wire ends; one that cannot be sent ends it, because none may be skipped."""
        while True:
            notice = await self.queue.get()
            try:
                await self.channel.send_encoded(notice.frame)
            except WireError as error:
                log.info("%s: %s", notice.op, error)
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
        self.facts: dict[str, NodeFacts] = {}
        self._malformed: defaultdict[str, dict[str, str]] = defaultdict(dict)
        """By node and kind of report: what the newest one has that no report of ours has."""
        self._clocks: defaultdict[str, clocks.Clock] = defaultdict(clocks.Clock)
        """The time to add to a node's clock to get ours, and how far it may be wrong."""
        self._losses = Losses()
        self.changed = asyncio.Event()
        self._arrived: list[inputs.Input] = []
        """Reports that came in this turn of the loop; the state machine takes them together."""
        self._arrived_at = 0.0
        self._beats: list[tuple[float, int, inputs.Heartbeat]] = []
        """Heartbeats since the last tick, when each came, and in which generation."""
        self._unsent: list[JournalEvent] = []
        """Records that are written, and not in any outbox yet."""
        self._outboxes: dict[str, Outbox] = {}
        self._joined: set[str] = set()
        """Nodes that have joined since the last tick: they get the addresses of all nodes, others what has changed."""
        self._addresses: dict[str, Args] = {}
        """The addresses that the members have been sent."""
        self._missing: tuple[int, dict[tuple[bool, int], list[Notice]]] = 0, {}
        """The number of records, and the notices that bring a member that lacks some of them up to it."""
        self._moved: Notice | None = None
        """The notice of a hand-over, for all members, also for those that reconnect meanwhile."""
        self._operators = attached(self._journal.records)
        """The operators who are attached according to the journal."""
        self._attached: dict[str, Mapping[str, str]] = {}
        """By node: the operators who are attached there, each with the mode."""
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
        self._arrived, self._beats = [], []
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
        self._take_arrived()
        return self._run((event,), clocks.now())

    def take(self, event: inputs.Input) -> None:
        """Take a member's report, together with all others that are here already: at 1,000 nodes each costs as much
        as all.
        """
        self._arrived.append(event)
        if len(self._arrived) == 1:
            self._arrived_at = clocks.now()
            asyncio.get_running_loop().call_soon(self._take_arrived)

    def _take_arrived(self) -> None:
        events, self._arrived = self._arrived, []
        if not events:
            return
        try:
            # A lease begins when something came, not when it is read.
            self._run(events, self._arrived_at)
        except Exception:
            if len(events) > 1:
                # One of them must not cost the others theirs.
                for event in events:
                    self._arrived = [event]
                    self._take_arrived()
                return
            log.exception("%s", type(events[0]).__name__)

    def _run(self, events: Sequence[inputs.Input], now: float) -> s.Reply | None:
        self.state, commands = run(self.state, events, now, time.time_ns())
        reply: s.Reply | None = None
        for command in commands:
            if isinstance(command, s.Emit):
                self._record(command)
                continue
            self._send_records()
            if isinstance(command, s.Send):
                self._send(command.node, command.op, dict(command.args))
            elif isinstance(command, s.Drop):
                self._drop(command.node)
            elif isinstance(command, s.HandOver):
                self._retire(command.node)
            elif isinstance(command, s.Judge):
                self._tasks.spawn(self._judge(command), "verdict")
            else:
                reply = command
        if any(one["type"] not in LATER for one in self._unsent):
            self._send_records()
        if commands or not isinstance(events[-1], inputs.Tick):
            self._wake()
        return reply

    async def _judge(self, order: s.Judge) -> None:
        try:
            verdict = await asyncio.to_thread(judged, order)
        except Exception:
            log.exception("the verdict failed; the group is restarted without one")
            nothing = dataclasses.replace(order.state, exits={}, troubles={})
            verdict = judged(dataclasses.replace(order, state=nothing))
        self.feed(verdict)

    def request(self, node: str, op: str, args: Args) -> Any:
        """Answer a request that a node passes on for an operator; raises Problem when it is refused, Misfit."""
        if op == "operators":
            self._note_operators(node, shape(OPERATORS)(args))
            return {}
        if op == "signalled":
            self._note_signal(node, SIGNALLED(args))
            return {}
        self._take_arrived()
        seq = self._journal.last_seq
        # There is no pause between the inputs, so that several removals stop the group once.
        replies = [(name, self.feed(event)) for name, event in read(op, args, self.state)]
        return {**answer(replies), "seq": seq}

    def _note_signal(self, node: str, args: Args) -> None:
        """Note what a node reports about its own ranks; who asked it for that, it could invent."""
        ranks = [rank for rank in args["ranks"] if rank in self.state.ranks and self.state.ranks[rank].node == node]
        if not ranks:
            raise Problem("bad_request", f"{node} does not have these ranks")
        # Those are known who are attached to this very node, and what it says itself.
        operator = str(args.get("operator"))
        is_known = node == self._me or self._attached.get(self._me, {}).get(operator) == "control"
        sent = {"ranks": ranks, "signal": args["signal"], "operator": args.get("operator") if is_known else None}
        self.record(EventType.SIGNAL_SENT, node, **sent)

    def _note_operators(self, node: str, names: Mapping[str, str]) -> None:
        """Note who is attached at a node: one event for an operator's first node, one for the end of the last."""
        self._attached[node] = names
        self._compare_operators()

    def _compare_operators(self) -> None:
        now = {name: mode for names in self._attached.values() for name, mode in names.items()}
        for name in now.keys() - self._operators:
            self._operators.add(name)
            self.record(EventType.OPERATOR_ATTACHED, operator=name, mode=now[name])
        if any(is_expected(node) for node in self.state.nodes.values()):
            # They may be attached at a node that has not joined this coordinator yet.
            return
        for name in self._operators - now.keys():
            self._operators.discard(name)
            self.record(EventType.OPERATOR_DETACHED, operator=name)

    def status(self) -> Status:
        """Return the status document."""
        self._take_arrived()
        known = {**self.facts, self._me: as_known(self._own.facts(), clocks.Clock(0, 0))}
        return document(self.state, known, self._me, clocks.now())

    # Reports of members

    def join(self, node: str, channel: Channel, args: Args) -> None:
        """Take a member's connection: it gets the journal first, then orders."""
        self._take_arrived()
        self._forget(node)
        outbox = self._outboxes[node] = Outbox(channel)
        outbox.lacks = self._journal.lacks(args["journal"])
        if self._moved is not None:
            self._put(node, self._moved)
        self._joined.add(node)
        outbox.sending = self._tasks.spawn(outbox.run(), f"orders for {node}")
        self.hear_join(node, args)

    def hear_join(self, node: str, args: Args) -> None:
        """Take the facts that a member reports about itself when it joins."""
        if node not in self.state.nodes:
            self._take_in(NodeSpec(name=node, address=args["address"]))
        self._malformed.pop(node, None)
        self._clocks[node] = clocks.Clock.from_report(args)
        reports = [(report["op"], report["args"]) for report in args.get("reports", ())]
        events = [event for op, each in reports if (event := self._read(node, op, each)) is not None]
        ready = next((event for event in events if isinstance(event, inputs.Ready)), None)
        nproc, trees = (None, ()) if ready is None else (ready.nproc, ready.trees)
        self.take(
            inputs.Joined(
                node,
                args["incarnation"],
                args.get("running"),
                args["reason"],
                nproc,
                trees,
                args["disk"],
                clocks.Echo.delay(args),
            )
        )
        for event in events:
            self.take(event)
        self._note_operators(node, args.get("operators", {}))

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
        event = self._read(node, op, args)
        if event is not None:
            self.take(event)

    def _read(self, node: str, op: str, args: Args) -> inputs.Input | None:
        """Return a member's report as an input; None for a malformed one, which is noted as a fault of that node."""
        try:
            event = read_report(node, op, args, self._clocks[node])
        except Misfit as misfit:
            self._note_malformed(node, op, misfit)
            return None
        self._malformed[node].pop(op, None)
        return event

    def _note_malformed(self, node: str, op: str, misfit: Misfit) -> None:
        if self._malformed[node].get(op) != str(misfit):
            log.warning("%s sent a malformed report: %s", node, misfit)
        self._malformed[node][op] = clip(str(misfit))

    def beat(self, node: str, args: Args) -> None:
        """Take a heartbeat: the lease counts also where the facts in it are malformed."""
        came, clock = clocks.now(), clocks.Clock.from_report(args)
        self._clocks[node] = clock
        age_s = max(0.0, args.get("heard_age", 0.0)) + clocks.Echo.delay(args)
        beat = inputs.Heartbeat(node, age_s)
        try:
            if "facts" in args:
                beat = self._read_facts(node, age_s, clock, args["facts"])
            elif "steps" in args:
                beat = self._read_steps(node, age_s, args["steps"])
            self._malformed[node].pop("beat", None)
        except Misfit as misfit:
            self._note_malformed(node, "beat", misfit)
        wrong = next(iter(self._malformed[node].values()), "")
        if wrong != self.facts.get(node, {}).get("malformed", ""):
            self.facts[node] = {**self.facts.get(node, {}), "malformed": wrong}
        self._beats.append((came, self.state.generation, beat))

    def _read_facts(self, node: str, age_s: float, clock: clocks.Clock, args: object) -> inputs.Heartbeat:
        """Take all facts about a node; raises Misfit."""
        report = read_node_report(args)
        before, ranks = self.facts.get(node, {}).get("ranks", {}), report["ranks"]
        kept = tuple(report["snapshots"]) if "snapshots" in report else None
        self.facts[node] = as_known(report, clock)
        if report["generation"] != self.state.generation:
            return inputs.Heartbeat(node, age_s, snapshots=kept)
        stepped = any(rank.get("step") is not None for rank in ranks.values())
        warnings = self._losses.read(self.state.generation, ranks)
        first, use = _first_step_age(ranks), _gpu_use(report)
        said = tuple((int(rank), clip(text)) for rank, one in ranks.items() if (text := one.get("said")))
        return inputs.Heartbeat(node, age_s, stepped, moved(before, ranks), warnings, first, kept, said, use)

    def _read_steps(self, node: str, age_s: float, args: object) -> inputs.Heartbeat:
        """Take the steps of a node's ranks, while all else is as it was; raises Misfit."""
        steps, known = read_steps(args), self.facts.get(node)
        if known is None or known.get("generation") != steps["generation"]:
            return inputs.Heartbeat(node, age_s)
        before = known.get("ranks", {})
        ranks: dict[str, RankFacts] = {
            rank: {**before.get(rank, {}), "step": step, "last_output_age_s": age}
            for rank, (step, age) in steps["ranks"].items()
        }
        self.facts[node] = {**known, "ranks": ranks, "heard_at": clocks.now()}
        current = steps["generation"] == self.state.generation
        stepped = current and any(step is not None for step, _ in steps["ranks"].values())
        return inputs.Heartbeat(node, age_s, stepped, current and moved(before, ranks))

    # Journal and orders

    def record(self, kind: EventType, node: str | None = None, **detail: Any) -> None:
        """Write a fact that the state machine does not know of, such as an operator's connection."""
        self._record(s.Emit(kind, self.state.generation, node, detail=detail))
        self._send_records()

    def _record(self, emit: s.Emit) -> None:
        now = iso_time(time.time_ns())
        record: JournalEvent = {**emit.record(self._journal.last_seq + 1, now), "term": self.state.term}
        try:
            read_event(record)
        except Misfit as misfit:
            # Nobody could read the journal from here on.
            log.error("%s is not written: %s", emit.type, misfit)
            return
        if emit.type is EventType.JOB_STARTED:
            self.state = dataclasses.replace(self.state, started_at=now)
        self._journal.append(record)
        if emit.type is EventType.GENERATION_PROPOSED:
            self._tasks.spawn(self._secure(emit.generation), "write the proposal")
        self._unsent.append(record)
        self.hooks.receive(record)
        if emit.type in (EventType.NODE_LOST, EventType.NODE_REMOVED) and emit.node is not None:
            self.facts.pop(emit.node, None)
            if self._attached.pop(emit.node, None):
                self._compare_operators()

    def _send_records(self) -> None:
        """Give all members what has been written since the last time, encoded once."""
        records, self._unsent = self._unsent, []
        if records:
            self.notify_all("journal", {"records": records, "reset": False, "more": False})

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
            self._put(node, Notice("order", {"op": op, "args": args, "term": self.state.term}))

    def _catch_up(self, outbox: Outbox) -> None:
        """Give a member the records that it lacks; those who lack the same get the same bytes."""
        if outbox.lacks is None:
            return
        (reset, since), outbox.lacks = outbox.lacks, None
        last = self._journal.last_seq
        if self._missing[0] != last:
            self._missing = last, {}
        known = self._missing[1]
        if (reset, since) not in known:
            pieces = list(chunks(self._journal.since(since)))
            known[reset, since] = [
                Notice("journal", {"records": piece, "reset": reset, "more": reset and left > 0})
                for left, piece in zip(reversed(range(len(pieces))), pieces)
            ]
        for notice in known[reset, since]:
            outbox.put(notice)

    def _put(self, node: str, notice: Notice) -> None:
        outbox = self._outboxes[node]
        if notice.op == "journal" and outbox.lacks is not None:
            # It gets these records with those before them.
            return
        self._catch_up(outbox)
        if outbox.queue.qsize() < MAX_WAITING:
            outbox.put(notice)
        else:
            log.warning("%s does not read what it is sent", node)
            self._drop(node)

    def _drop(self, node: str) -> None:
        outbox = self._forget(node)
        if outbox is not None:
            self._tasks.spawn(outbox.channel.close(), f"drop {node}")

    def notify_all(self, op: str, args: Args) -> None:
        """Send every member a notice."""
        notice = Notice(op, args)
        for node in list(self._outboxes):
            self._put(node, notice)

    def _send_addresses(self) -> None:
        """Give those who have joined all addresses, and the others those that have changed."""
        members, joined = self._context.peers.members, self._joined
        news = {name: where for name, where in members.items() if self._addresses.get(name) != where}
        if not news and not joined:
            return
        self._addresses, self._joined = dict(members), set()
        whole, changes = Notice("members", {"members": self._addresses}), Notice("members", {"members": news})
        for node in list(self._outboxes):
            if node in joined:
                self._put(node, whole)
            elif news:
                self._put(node, changes)

    async def hand_over(self, successor: str) -> None:
        """Name the successor to all, and let it ask for votes once it has the whole journal."""
        self._moved = Notice("moved", {"successor": successor, "term": self.state.term})
        self.notify_all(self._moved.op, self._moved.args)
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
        self._send_records()
        for outbox in self._outboxes.values():
            self._catch_up(outbox)
        joins = [outbox.queue.join() for outbox in self._outboxes.values()]
        try:
            await asyncio.wait_for(asyncio.gather(*joins), timeout)
        except asyncio.TimeoutError:
            log.warning("some members have not been sent everything")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._take_arrived()
                self._send_records()
                for outbox in self._outboxes.values():
                    self._catch_up(outbox)
                self._send_addresses()
                now = clocks.now()
                self._run((*self._heartbeats(now), inputs.Heartbeat(self._me), inputs.Tick()), now)
                # The last node that was awaited may have joined.
                self._compare_operators()
            except Exception:
                log.exception("coordinator tick")

    def _heartbeats(self, now: float) -> list[inputs.Heartbeat]:
        """Return the heartbeats since the last tick, each with the age that it has by now."""
        beats, self._beats = self._beats, []
        if beats:
            self._wake()
        aged = []
        for came, generation, beat in beats:
            # What it says of the ranks may be of a group that has ended meanwhile.
            lease = inputs.Heartbeat(beat.node, beat.heard_age, snapshots=beat.snapshots)
            known = beat if generation == self.state.generation else lease
            first = known.first_step_age and known.first_step_age + now - came
            aged.append(dataclasses.replace(known, heard_age=known.heard_age + now - came, first_step_age=first))
        return aged

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
        self._said: tuple[str, tuple[tuple[int, str], ...]] = "", ()
        """The coordinator's node, and what its ranks have printed last."""
        context.ballot.on_change(self._drop_if_moved)
        self.requests: dict[str, PeerRequest] = {
            "join": self._on_join,
            "report": self._on_report,
            "beat": self._on_heartbeat,
            "time": self._on_time,
            "request": self._on_request,
            "status": self._on_status,
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

    def note_said(self, answer: object) -> None:
        """Remember the last lines of the coordinator's own ranks, for an incident after its host is lost."""
        with contextlib.suppress(Misfit):
            lines = read_leader_lines(answer)
            self._said = lines["node"], tuple((rank, clip(text)) for rank, text in lines["said"])

    def needs_term_above(self, term: int) -> bool:
        """Return whether this coordinator holds its group, in an older term than that."""
        state = self.coordinator.state if self.coordinator is not None else None
        newer = state is not None and state.term < term and not is_too_high(self._context.ballot.view, term)
        return state is not None and newer and holds_quorum(state, clocks.now())

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
            said = self._said[1] if self._said[0] == former else ()
            coordinator.feed(inputs.AgentDead(former, "it was the coordinator, and is gone", said=said))
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
        coordinator, term = self._held(), args["term"]
        if term > coordinator.state.term:
            older = coordinator.state.term
            raise Problem("stale", f"{self._context.node} coordinates term {older}, {node} is in {term}")
        assert channel is not None
        self._context.peers.learn({node: {"address": args["address"], "port": args["port"]}}, certain=True)
        coordinator.join(node, channel, args)
        return Answer({})

    async def _on_report(self, node: str, channel: Channel | None, args: Args) -> Answer:
        self._held().receive(node, args["op"], args["args"])
        return Answer({})

    async def _on_heartbeat(self, node: str, channel: Channel | None, args: Args) -> Answer:
        received_ns, held = time.time_ns(), self._held()
        held.beat(node, args)
        times = {"received_ns": received_ns, "answered_ns": time.time_ns(), "now": clocks.now()}
        me = self._context.node
        return Answer({**times, "node": me, "said": held.state.nodes[me].said})

    async def _on_time(self, node: str, channel: Channel | None, args: Args) -> Answer:
        self._held()
        return Answer({"received_ns": time.time_ns(), "answered_ns": time.time_ns(), "now": clocks.now()})

    async def _on_status(self, node: str, channel: Channel | None, args: Args) -> Items:
        return in_pieces(self._held().status())

    async def _on_request(self, node: str, channel: Channel | None, args: Args) -> Answer:
        return Answer(self._held().request(node, args["op"], args["args"]))
