"""The coordinator's shell: it feeds the pure state machine and carries its commands out.

In: what members report, what operators ask, time. Out: orders to members, the journal, the status document.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from remote_agent import clocks, inputs, metrics
from remote_agent import state as s
from remote_agent.beats import Losses, moved
from remote_agent.coordinator import step
from remote_agent.diagnose import iso_time
from remote_agent.formation import is_held
from remote_agent.hooks import Hooks
from remote_agent.journal import chunks
from remote_agent.operator_requests import answer, refuse_unready
from remote_agent.status import document
from remote_agent.tasks import Tasks
from remote_agent.wire import Channel, NodeSpec, Problem, WireError

if TYPE_CHECKING:
    from remote_agent.agent import Agent

log = logging.getLogger(__name__)

TICK_S = 0.25
HAND_OVER_TIMEOUT_S = 30.0


def _ranks(args: Mapping[str, Any]) -> tuple[tuple[int, int, int], ...]:
    return tuple((int(rank["rank"]), int(rank["local_rank"]), int(rank["pid"])) for rank in args["ranks"])


def _trees(args: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(digest) for digest in args.get("trees", ()))


def _pulses(args: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return a node's pulses by rank, each with the node's clock, by which its stamps are put right."""
    clock = clocks.Clock.of(args)
    return {int(rank): {**pulse, "clock": clock} for rank, pulse in args["ranks"].items()}


def _env(args: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the variables that an operator sets: name and value, None to let go of it."""
    return {str(name): None if value is None else str(value) for name, value in dict(args.get("env") or {}).items()}


# What members report, as events; those that carry stamps of the member's clock are corrected first.
REPORTS: dict[str, Callable[[str, int, Mapping[str, Any]], inputs.Input]] = {
    "ready": lambda node, _, args: inputs.Ready(node, int(args["nproc"]), args.get("versions", {}), _trees(args)),
    "unfit": lambda node, _, args: inputs.Unfit(node, str(args["reason"])),
    "gone": lambda node, _, args: inputs.Gone(node, str(args["reason"])),
    "prepared": lambda node, generation, args: inputs.Prepared(node, generation, int(args["port"])),
    "order_failed": lambda node, generation, args: inputs.OrderFailed(node, generation, str(args["message"])),
    "started": lambda node, generation, args: inputs.Started(node, generation, _ranks(args)),
    "assigned": lambda node, generation, args: inputs.Assigned(node, generation, _ranks(args), int(args["world_size"])),
    "main": lambda node, generation, args: inputs.Main(node, generation, int(args["rank"])),
    "pulse": lambda node, generation, args: inputs.Pulses(node, generation, _pulses(args)),
}


class Outbox:
    """What one member still has to be sent, in order."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.queue: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self.sending: asyncio.Task[None] | None = None

    def put(self, op: str, args: dict[str, Any]) -> None:
        """Add a notice."""
        self.queue.put_nowait((op, args))

    async def run(self) -> None:
        """Send notices until the wire ends; one that cannot be sent ends it, as nothing may be left out."""
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


class Role:
    """The coordinator of the job, in this agent."""

    def __init__(self, agent: Agent, state: s.State) -> None:
        self._agent = agent
        self.state = state
        self.facts: dict[str, dict[str, Any]] = {}
        self._clocks: defaultdict[str, clocks.Clock] = defaultdict(clocks.Clock)
        """By node: what to add to its time to get ours, and how far that may be wrong."""
        self._losses = Losses()
        self.changed = asyncio.Event()
        self._outboxes: dict[str, Outbox] = {}
        self._moved: dict[str, Any] | None = None
        """What all are told while the role is handed over, also those who come back meanwhile."""
        self._operators: dict[str, int] = {}
        self.hooks = Hooks(agent.spec, agent.workdir, self.record)
        self._tasks = Tasks()

    def start(self, absent: dict[str, str]) -> None:
        """Begin; absent: nodes that never came up, with the reason."""
        self.hooks.start(self._agent.journal.records)
        if not self._agent.journal.records:
            self._record(s.Emit("job_started", -1, detail=self._description()))
        for name, reason in absent.items():
            self.feed(inputs.Unfit(name, reason))
        self._tasks.spawn(self._tick(), "coordinator tick")
        port = self._agent.spec.metrics_port
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

    def is_short(self) -> bool:
        """Whether too few nodes are here: the others may have another coordinator by now."""
        return self.state.phase == s.FORMING and self.state.alone_since is not None

    def misses_some(self) -> bool:
        """Whether a node of the job is not here, or silent: it may follow another coordinator by now."""
        for name, node in self.state.nodes.items():
            silent = node.incarnation and not is_held(self.state, name, clocks.now())
            if node.status == "lost" or (silent and node.status not in ("removed", "failed")):
                return True
        return False

    def feed(self, event: inputs.Input) -> s.Reply | None:
        """Take one event in and carry the commands out; returns the reply to an operator, if it was a request."""
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
                self._tasks.spawn(self._hand_over(command.node), "hand over")
            else:
                reply = command
        if commands or not isinstance(event, (inputs.Tick, inputs.Beat)):
            self._wake()
        return reply

    def request(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """Carry out an operator's request; raises Problem when it is refused."""
        if op == "operator":
            self._count_operator(args)
            return {}
        if op == "signalled":
            detail = {key: args.get(key) for key in ("ranks", "signal", "operator")}
            self.record("signal_sent", str(args.get("node")), **detail)
            return {}
        expected = args.get("if_generation")
        if expected is not None and not args.get("later") and expected != self.state.generation:
            raise Problem("stale", f"generation {expected} is over: the job is in generation {self.state.generation}")
        seq = self._agent.journal.last_seq
        asked = self._events(op, args)
        # Without a pause between them: all of them are one stop of the group.
        replies = [(name, self.feed(event)) for name, event in asked]
        return {**answer(replies), "seq": seq}

    def _events(self, op: str, args: dict[str, Any]) -> list[tuple[str, inputs.Input]]:
        """Return what is asked for, node by node where several are named; raises Problem."""
        operator = str(args.get("operator", ""))
        if op == "restart":
            later, without = bool(args.get("later")), tuple(str(name) for name in args.get("without", ()))
            tree, told = str(args.get("tree") or ""), args.get("told") or {}
            return [("", inputs.Restart(operator, _env(args), later, tree, told, without))]
        if op == "stop":
            return [("", inputs.Stop(bool(args.get("kill")), operator, str(args.get("preempted") or "")))]
        names = [str(name) for name in args.get("nodes") or [args.get("node", "")]]
        if op in ("cordon", "uncordon"):
            return [(name, inputs.Cordon(name, op == "cordon", operator)) for name in names]
        if op == "remove":
            # Our own last: with it the role goes.
            return [
                (name, inputs.Remove(name, operator)) for name in sorted(names, key=lambda one: one == self._agent.node)
            ]
        specs = {name: node.spec for name, node in self.state.nodes.items()}
        given = [NodeSpec(**spec) for spec in args.get("specs") or [args.get("spec")] if spec is not None]
        specs.update({spec.name: spec for spec in given})
        for name in names:
            if name not in specs:
                raise Problem("unknown_node", f"no node {name!r} in this job")
        if len(names) > 1 and not args.get("late"):
            refuse_unready(self.state, names)
        return [(name, inputs.Add(specs[name], operator)) for name in names]

    def _count_operator(self, args: dict[str, Any]) -> None:
        """Note who looks: one event when an operator comes, one when its last connection has gone."""
        name, came = str(args["operator"]), bool(args["came"])
        count = self._operators.get(name, 0) + (1 if came else -1)
        self._operators[name] = max(0, count)
        if came and count == 1:
            self.record("operator_attached", operator=name, mode=args.get("mode"))
        elif not came and count == 0:
            self.record("operator_detached", operator=name)

    def status(self) -> dict[str, Any]:
        """Return the status document."""
        own = {self._agent.node: {"clock_offset_ms": 0.0, "clock_error_ms": 0.0, **self._agent.follower.facts()}}
        return document(self.state, {**self.facts, **own}, self._agent.node, clocks.now())

    # What members say

    def join(self, node: str, channel: Channel, args: dict[str, Any]) -> None:
        """Take a member's connection in: first its journal, then what it says of itself, then orders."""
        self._forget(node)
        outbox = Outbox(channel)
        reset, records = self._agent.journal.missing(args["journal"])
        for chunk in chunks(records):
            outbox.put("journal", {"records": chunk, "reset": reset})
            reset = False
        outbox.put("members", {"members": self._agent.members})
        if self._moved is not None:
            outbox.put("moved", self._moved)
        self._outboxes[node] = outbox
        outbox.sending = self._tasks.spawn(outbox.run(), f"orders for {node}")
        self.hear_join(node, args)

    def hear_join(self, node: str, args: dict[str, Any]) -> None:
        """Take in what a member says of itself when it joins."""
        if node not in self.state.nodes:
            self._meet(NodeSpec(name=node, address=str(args.get("address", ""))))
        ready: dict[str, Any] = next((one["args"] for one in args.get("reports", ()) if one["op"] == "ready"), {})
        self._clocks[node] = clocks.Clock.of(args)
        nproc, incarnation, reason = ready.get("nproc"), str(args["incarnation"]), str(args["reason"])
        self.feed(inputs.Joined(node, incarnation, args.get("running"), reason, nproc, _trees(ready)))
        for report in args.get("reports", ()):
            self.hear(node, report["op"], report["args"])

    def _meet(self, spec: NodeSpec) -> None:
        """Take a node in that the job's description does not name."""
        new = s.Node(spec)
        if self.state.spec.endpoint:
            self.record("node_joined", spec.name, spec=dataclasses.asdict(spec))
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
        """Send nothing more on a member's connection; returns what was left to send."""
        outbox = self._outboxes.pop(node, None)
        if outbox is not None and outbox.sending is not None:
            outbox.sending.cancel()
        return outbox

    def hear(self, node: str, op: str, args: dict[str, Any]) -> None:
        """Take a member's report in."""
        if op in REPORTS:
            self.feed(REPORTS[op](node, int(args.get("generation", -1)), args))
        elif op == "exited":
            ended = self._clocks[node].corrected(args["exit"])
            age = max(0.0, (time.time_ns() - int(ended["t_ns"])) / 1e9)
            self.feed(inputs.Exited(node, int(args["generation"]), ended, age))
        elif op == "idle":
            exits = tuple(self._clocks[node].corrected(ended) for ended in args["exits"])
            self.feed(inputs.Idle(node, int(args["generation"]), exits))

    def beat(self, node: str, args: dict[str, Any]) -> None:
        """Take a heartbeat in."""
        clock = self._clocks[node] = clocks.Clock.of(args)
        ranks = args.get("ranks", {})
        facts = {"agent_pid": args.get("agent_pid"), "ranks": ranks, **clock.status()}
        before = self.facts.get(node, {}).get("ranks", {})
        vitals = {"vitals": args.get("vitals"), "heard_at": clocks.now()}
        self.facts[node] = {**facts, **vitals, "generation": args.get("generation")}
        stepped = any(rank.get("step") is not None for rank in ranks.values())
        current = args.get("generation") == self.state.generation
        told = self._losses.read(self.state.generation, ranks) if current else {}
        on = current and moved(before, ranks)
        self.feed(inputs.Beat(node, float(args.get("heard_age", 0.0)), stepped and current, on, told))
        self._wake()

    # What goes out

    def record(self, kind: str, node: str | None = None, **detail: Any) -> None:
        """Write a fact that the state machine does not know of, such as an operator who looks."""
        self._record(s.Emit(kind, self.state.generation, node, detail=detail))

    def _record(self, emit: s.Emit) -> None:
        journal = self._agent.journal
        now = iso_time(time.time_ns())
        record = {
            "seq": journal.last_seq + 1,
            "time": now,
            "type": emit.type,
            "generation": emit.generation,
            "node": emit.node,
            "rank": emit.rank,
            "detail": dict(emit.detail),
            "term": self.state.term,
        }
        if emit.type == "job_started":
            self.state = dataclasses.replace(self.state, started_at=now)
        journal.append(record)
        for outbox in self._outboxes.values():
            outbox.put("journal", {"records": [record], "reset": False})
        self.hooks.hear(record)

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

    def _send(self, node: str, op: str, args: dict[str, Any]) -> None:
        if node == self._agent.node:
            self._agent.follower.order(op, args)
        elif node in self._outboxes:
            self._outboxes[node].put("order", {"op": op, "args": args, "term": self.state.term})

    def _drop(self, node: str) -> None:
        outbox = self._forget(node)
        if outbox is not None:
            self._tasks.spawn(outbox.channel.close(), f"drop {node}")

    def tell(self, op: str, args: dict[str, Any]) -> None:
        """Send every member a notice."""
        for outbox in self._outboxes.values():
            outbox.put(op, args)

    async def _hand_over(self, heir: str) -> None:
        """Name the heir to all, and let it ask for votes once it has the whole journal."""
        self._moved = {"heir": heir, "term": self.state.term}
        self.tell("moved", self._moved)
        outbox = self._outboxes.get(heir)
        if outbox is not None:
            try:
                # The heir needs the whole journal, the others its name: else they refuse it their votes.
                await self.flushed(HAND_OVER_TIMEOUT_S)
                await outbox.channel.call("take_over", {"term": self.state.term}, timeout=HAND_OVER_TIMEOUT_S)
            except (WireError, Problem, asyncio.TimeoutError) as error:
                # The others elect one of themselves once we are gone.
                log.warning("%s did not take over: %s", heir, error)
        self._agent.finish("it was removed from the job", linger=False)

    async def flushed(self, timeout: float) -> None:
        """Wait until every member has been sent all, for at most that long."""
        joins = [outbox.queue.join() for outbox in self._outboxes.values()]
        try:
            await asyncio.wait_for(asyncio.gather(*joins), timeout)
        except asyncio.TimeoutError:
            log.warning("some members did not take everything")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.feed(inputs.Beat(self._agent.node))
                self.feed(inputs.Tick())
            except Exception:
                log.exception("coordinator tick")

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
