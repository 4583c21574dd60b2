"""A small world around the pure coordinator: members that obey orders, messages that wait, time that is told."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

from remote_agent.coordinator import inputs, policy, replay
from remote_agent.coordinator import state as s
from remote_agent.coordinator.machine import step
from remote_agent.wire import JobSpec, NodeSpec
from remote_agent.wire.events import EventType
from tests.fast.journals import check_readable


def spec(nodes: int = 3, *, spares: int = 0, nproc: int = 2, **changes: Any) -> JobSpec:
    """Return a job on n1, n2, …; the last `spares` of them are spares."""
    regular = nodes - spares
    found = tuple(
        NodeSpec(f"n{number}", f"10.0.0.{number}", str(nproc), spare=number > regular) for number in range(1, nodes + 1)
    )
    defaults: Any = {"min_nodes": regular, "max_nodes": regular, "max_restarts": 3}
    return JobSpec(job="test-job", script="train.py", nodes=found, **{**defaults, **changes})


@dataclasses.dataclass
class Machine:
    """One node: what its agent would say."""

    name: str
    nproc: int = 2
    connected: bool = False
    running: int | None = None
    lives: int = 0
    ranks: tuple[int, ...] = ()
    tree: str | None = None
    """From which work tree its ranks were told to start."""
    stuck: bool = False
    """It does not carry out orders to stop, and says nothing of a start."""
    broken: str = ""
    """Why no workers can be started on it."""
    cannot_open: str = ""
    """Why it cannot open a store."""
    notice: dict[str, str] | None = None
    """What it says about its network when it starts workers."""
    snapshots: list[Any] = dataclasses.field(default_factory=list)
    """What it keeps."""
    in_place: tuple[str, ...] = ()
    """The ids of what its ranks would resume from."""
    skipped: Any = ()
    """Between which times it was told that snapshots do not count."""
    cannot_place: str = ""
    """Why it cannot put a snapshot in place."""


class World:
    """The coordinator on n1 and its members; `deliver` lets one waiting message through, `settle` all of them."""

    def __init__(self, job: JobSpec, *, start: bool = True) -> None:
        self.now = 0.0
        self.wall_ns = 0
        self.machines = {node.name: Machine(node.name, int(node.nproc_per_node)) for node in job.nodes}
        self.state = replay.initial(job, "n1", self.now)
        self.events: list[s.Emit] = []
        self.replies: list[s.Reply] = []
        self.heirs: list[str] = []
        self.dropped: list[str] = []
        self.verdicts: list[s.Judge] = []
        """Those that were ordered."""
        self.judges = True
        """Whether they are made, and at once."""
        self.orders: dict[str, deque[s.Send]] = {name: deque() for name in self.machines}
        self.reports: dict[str, deque[inputs.Input]] = {name: deque() for name in self.machines}
        if start:
            for name in self.machines:
                self.join(name)
            self.settle()

    # What happens

    def feed(self, event: inputs.Input) -> None:
        self.state, commands = step(self.state, event, self.now, self.wall_ns)
        for command in commands:
            if isinstance(command, s.Emit):
                self.take(command)
            elif isinstance(command, s.Reply):
                self.replies.append(command)
            elif isinstance(command, s.HandOver):
                self.heirs.append(command.node)
            elif isinstance(command, s.Drop):
                self.dropped.append(command.node)
                self.machines[command.node].connected = False
            elif isinstance(command, s.Send) and self.machines[command.node].connected:
                self.orders[command.node].append(command)
        for command in commands:
            if isinstance(command, s.Judge):
                self.verdicts.append(command)
                if self.judges:
                    self.feed(policy.judged(command))

    def take(self, fact: s.Emit) -> None:
        check_readable(fact)
        self.events.append(fact)
        if fact.type is EventType.GENERATION_PROPOSED:
            for name, machine in self.machines.items():
                if machine.connected:
                    self.reports[name].append(inputs.Recorded(name, fact.generation, self.state.term))

    def join(self, name: str) -> None:
        machine = self.machines[name]
        if not machine.connected:
            machine.connected = True
            self.feed(inputs.Joined(name, f"{name}-{machine.lives}", machine.running, nproc=machine.nproc))
            self.feed(inputs.Ready(name, machine.nproc))

    def die(self, name: str) -> None:
        """The node's agent dies, its workers with it, and what it had to say is lost."""
        machine = self.machines[name]
        machine.connected, machine.running, machine.lives = False, None, machine.lives + 1
        self.orders[name].clear()
        self.reports[name].clear()
        self.feed(inputs.AgentDead(name, "its agent died"))

    def fail(
        self, rank: int, message: str = "ValueError: bad", signal: str | None = None, code: int | None = 1
    ) -> None:
        """A rank fails by itself, if it runs."""
        for machine in self.machines.values():
            if rank in machine.ranks and machine.running is not None:
                ended = self.exit(machine, rank, code=None if signal else code, signal=signal)
                ended["error"] = (
                    {"message": message, "callstack": "", "timestamp_ns": 1} if code and not signal else None
                )
                self.reports[machine.name].append(inputs.Exited(machine.name, machine.running, ended))

    def finish(self) -> None:
        """Every rank exits with 0."""
        for machine in self.machines.values():
            for rank in machine.ranks if machine.running is not None else ():
                ended = self.exit(machine, rank, code=0)
                self.reports[machine.name].append(inputs.Exited(machine.name, machine.running or 0, ended))

    def exit(self, machine: Machine, rank: int, **how: Any) -> Any:
        base = {
            "rank": rank,
            "local_rank": rank - machine.ranks[0],
            "pid": 1000 + rank,
            "t_ns": int(self.now * 1e9) + rank,
        }
        return {**base, "code": None, "signal": None, "stopped_by_us": False, "error": None, "tail": "", **how}

    def pass_time(self, seconds: float) -> None:
        """Let time go by in steps; connected nodes keep their heartbeats."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            for name, machine in self.machines.items():
                if machine.connected:
                    self.feed(inputs.Heartbeat(name))
            self.feed(inputs.Tick())

    # Messages

    def sent(self, name: str, op: str) -> bool:
        """Whether such an order waits for the node."""
        return any(order.op == op for order in self.orders[name])

    def waiting(self) -> list[tuple[str, str]]:
        """Return the queues that hold something."""
        queues = [("order", name) for name, queue in self.orders.items() if queue]
        return queues + [("report", name) for name, queue in self.reports.items() if queue]

    def deliver(self, kind: str, name: str) -> None:
        """Let the first message of one queue through."""
        if kind == "report":
            self.feed(self.reports[name].popleft())
        else:
            self._obey(self.machines[name], self.orders[name].popleft())

    def settle(self) -> None:
        """Deliver until nothing waits."""
        for _ in range(10_000):
            queues = self.waiting()
            if not queues:
                return
            self.deliver(*queues[0])
        raise AssertionError("the messages never end")

    def _obey(self, machine: Machine, order: s.Send) -> None:
        say, args, name = self.reports[machine.name], order.args, machine.name
        if order.op == "prepare":
            opened = inputs.Prepared(name, args["generation"], 29500)
            failed = inputs.OrderFailed(name, args["generation"], machine.cannot_open)
            say.append(failed if machine.cannot_open else opened)
        elif order.op == "snapshots":
            say.append(inputs.Held(name, args["generation"], tuple(machine.snapshots)))
        elif order.op == "restore":
            self._restore(machine, order)
        elif order.op == "go":
            assert machine.running is None, f"{name} is told to start while it runs generation {machine.running}"
            machine.running, machine.tree = args["generation"], args.get("tree")
            machine.ranks = tuple(range(args["base_rank"], args["base_rank"] + args["local_world_size"]))
            if machine.broken:
                machine.ranks = ()
                say.append(inputs.OrderFailed(name, args["generation"], machine.broken))
            if machine.stuck or machine.broken:
                return
            started = tuple((rank, local, 1000 + rank) for local, rank in enumerate(machine.ranks))
            say.append(inputs.Started(name, args["generation"], started, machine.notice))
            say.extend(inputs.Main(name, args["generation"], rank) for rank in machine.ranks)
        elif order.op == "stop" and not machine.stuck:
            exits: tuple[Any, ...] = ()
            if machine.running is not None and machine.running <= args["generation"]:
                exits = tuple(self.exit(machine, rank, signal="SIGTERM", stopped_by_us=True) for rank in machine.ranks)
                machine.running = None
            say.append(inputs.Idle(name, args["generation"], exits))
        elif order.op in ("leave", "end"):
            machine.connected, machine.running = False, None

    def _restore(self, machine: Machine, order: s.Send) -> None:
        """Put snapshots in place, from the holders that the order names."""
        chosen = order.args["snapshots"]
        report: Any = {"ids": [one["id"] for one in chosen], "seconds": 0.5, "bytes": 0, "placed": {}}
        if machine.cannot_place:
            report["problem"] = machine.cannot_place
        else:
            machine.in_place, machine.skipped = tuple(report["ids"]), order.args["skipped"]
            missing = [one for one in chosen if one["id"] not in {kept["id"] for kept in machine.snapshots}]
            report["placed"] = {one["id"]: one["holders"][0] for one in missing}
        self.reports[machine.name].append(inputs.Placed(machine.name, order.args["generation"], report))

    # What is seen

    @property
    def world_size(self) -> int:
        return len(self.state.ranks)

    def types(self) -> list[str]:
        return [event.type for event in self.events]

    def records(self) -> list[Any]:
        """Return the events as journal records."""
        at = {"time": "2026-01-01T00:00:00.000Z", "term": 1}
        return [{"seq": seq, **at, **dataclasses.asdict(event)} for seq, event in enumerate(self.events, 1)]

    def last(self, kind: str) -> s.Emit:
        return next(event for event in reversed(self.events) if event.type == kind)
