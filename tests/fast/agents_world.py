"""The network between simulated agents, their clock, and the promises that are checked after every step.

In: a job, a seed, faults. Out: AssertionError where two groups run or a journal has a gap.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator import state as s
from remote_agent.wire import JobSpec
from remote_agent.wire.events import EventType
from tests.fast.one_agent import TICK_S, Agent

# What goes over a connection; questions are asked anew each time.
CONNECTED = frozenset({"order", "report", "journal", "beat", "beaten", "moved"})


class Agents:
    """All agents of a job, the network between them, and the clock."""

    def __init__(self, job: JobSpec, seed: int = 0) -> None:
        self.job, self.now = job, 0.0
        self.chance = random.Random(seed)
        self.blocked: set[frozenset[str]] = set()
        self.frozen: set[str] = set()
        self.wires: dict[tuple[str, str], list[tuple[float, str, Any]]] = {}
        self.agents = {node.name: Agent(self, node.name) for node in job.nodes}
        first = next(iter(self.agents.values()))
        for agent in self.agents.values():
            agent.follow(1, first.name)
        first.role = replay.initial(job, first.name, self.now, first.disk)
        first.record(s.Emit(EventType.JOB_STARTED, -1, detail={"coordinator": first.name, "disk": first.disk}))
        first.feed(inputs.Joined(first.name, f"{first.name}-0", None, nproc=1, disk=first.disk))
        first.feed(inputs.Ready(first.name, 1))

    def reach(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self.blocked and not {one, other} & self.frozen

    def send(self, source: str, target: str, kind: str, args: Mapping[str, Any]) -> None:
        wire = self.wires.setdefault((source, target), [])
        at = self.now + self.chance.random() * 0.3
        wire.append((max(at, wire[-1][0]) if wire else at, kind, dict(args)))

    def forget(self, one: str, other: str) -> None:
        self.wires.pop((one, other), None)
        self.wires.pop((other, one), None)

    def pass_time(self, seconds: float) -> None:
        """Let time go by; the promises are checked after every step."""
        for _ in range(int(seconds / TICK_S)):
            self.now += TICK_S
            self.deliver()
            for agent in self.agents.values():
                if agent.alive and agent.name not in self.frozen:
                    agent.tick()
            self.tell_deaths()
            self.check()

    def deliver(self) -> None:
        names = [key for key, wire in self.wires.items() if wire]
        self.chance.shuffle(names)
        for source, target in names:
            wire = self.wires.get((source, target), [])
            while wire and wire[0][0] <= self.now:
                _, kind, args = wire[0]
                if kind in CONNECTED and not self.reach(source, target):
                    # TCP sends it again until the cut is healed or the connection given up.
                    break
                wire.pop(0)
                agent = self.agents[target]
                if agent.alive and self.reach(source, target):
                    agent.hear(source, kind, args)
                    if kind in ("report", "journal") and self.chance.random() < 0.1:
                        agent.hear(source, kind, args)

    def tell_deaths(self) -> None:
        for head in self.agents.values():
            for name in sorted(head.linked) if head.role is not None else ():
                other = self.agents[name]
                if self.reach(head.name, name) and (not other.alive or other.joined != head.name):
                    head.linked.discard(name)
                    if not other.alive:
                        head.feed(inputs.AgentDead(name, "its agent died"))

    def check(self) -> None:
        awake = [agent for name, agent in self.agents.items() if name not in self.frozen]
        running = {agent.running for agent in awake if agent.running is not None}
        assert len(running) <= 1, f"two groups at {self.now}: {running}"
        for agent in self.agents.values():
            assert [one["seq"] for one in agent.records] == list(range(1, len(agent.records) + 1)), agent.name

    # What happens

    def die(self, name: str) -> None:
        """The agent dies; what it has sent may still come."""
        agent = self.agents[name]
        if agent.alive:
            agent.leave()

    def boot(self, name: str) -> None:
        """An operator's supervisor starts the agent again, and introduces it to the newest coordinator it finds."""
        agent = self.agents[name]
        if not agent.alive:
            agent.boot(agent.view.term, agent.view.voted)
            heads = [other for other in self.agents.values() if other.alive and other.view.coordinator]
            newest = max(heads, key=lambda other: other.view.term, default=None)
            if newest is not None and newest.view.coordinator != name:
                agent.follow(newest.view.term, str(newest.view.coordinator))

    def split(self, side: set[str]) -> None:
        """Cut every link between that side and the rest."""
        self.blocked |= {frozenset((one, other)) for one in side for other in self.agents if other not in side}

    def freeze(self, name: str, seconds: float) -> None:
        """The node's machine, its workers too, stands still for a while."""
        self.frozen.add(name)
        self.pass_time(seconds)
        self.frozen.discard(name)

    def heal(self) -> None:
        self.blocked.clear()

    def heads(self) -> list[Agent]:
        return [agent for agent in self.agents.values() if agent.alive and agent.role is not None]

    def running(self) -> set[str]:
        return {agent.name for agent in self.agents.values() if agent.running is not None}
