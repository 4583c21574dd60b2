"""Several agents with elections, leases and partitions around the pure state machines; time and network are told.

In: a job, moves. Out: whether ever two groups run, and what everybody knows. Links keep the order of messages, as TCP
does; between links all orders occur, and what crosses a cut is lost without anybody being told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from remote_agent.coordinator import inputs, policy, quorum, replay
from remote_agent.coordinator import state as s
from remote_agent.coordinator.formation import holds_quorum, is_held
from remote_agent.coordinator.journal import age
from remote_agent.coordinator.machine import step
from remote_agent.diagnose.incidents import iso_time
from remote_agent.election import member
from remote_agent.wire.events import EventType
from tests.fast.journals import check_readable

if TYPE_CHECKING:
    from tests.fast.agents_world import Agents

TICK_S = 0.25
ANSWER_S = 5.0
PAUSE_S = 1.0
LEAVE_S = 30.0
Record = Any


class Votes(quorum.Tally):
    """The votes for a candidate, whose own is the first, with the newest of the voters' journals."""

    def __init__(self, agent: Agent) -> None:
        super().__init__({agent.name: agent.disk}, age(agent.records), quorum.in_journal(agent.records))
        self.records = agent.records

    def take(self, name: str, disk: str, records: list[Record]) -> None:
        if age(records) > self.newest:
            self.records = records
        self.add(name, disk, age(records), quorum.in_journal(records))


@dataclasses.dataclass
class Candidacy:
    """A node that asks for votes: first whether it would get them, then for them."""

    term: int
    until: float
    votes: Votes
    sounding: bool = True


class Agent:
    """One node's agent: the shell's part in a few lines, the rest is the code under test."""

    def __init__(self, world: Agents, name: str) -> None:
        self.world, self.name = world, name
        self.records: list[Record] = []
        self.lives = 0
        self.disks = 0
        self.folded: tuple[int, list[str]] = (-1, [])
        self.boot(0, None)

    def boot(self, term: int, voted: str | None) -> None:
        """Start anew; term and vote survive on disk."""
        world = self.world
        self.alive = True
        self.view = member.Member(self.name, world.job.node_timeout, term, voted, contact=world.now)
        self.role: s.State | None = None
        self.linked: set[str] = set()
        """Who is connected to us while we coordinate."""
        self.joined: str | None = None
        self.former = ""
        """The coordinator that it followed last."""
        self.unanswered: float | None = None
        """When the heartbeat was sent whose answer is awaited."""
        self.echo = (world.now, world.now)
        """The coordinator's clock in its last answer, and when that came."""
        self.running: tuple[int, int] | None = None
        self.generation = -1
        self.ranks: tuple[int, ...] = ()
        self.candidacy: Candidacy | None = None
        self.pause = 0.0
        self.leaving: tuple[int, float] | None = None
        """It has handed over: from which record on it waits for a group without it, until when it keeps the role."""

    @property
    def disk(self) -> str:
        return f"{self.name}.{self.disks}"

    def lose_disk(self) -> None:
        """Forget everything, while the agent is dead."""
        self.records, self.folded, self.disks = [], (-1, []), self.disks + 1
        self.view = member.Member(self.name, self.world.job.node_timeout)

    def base(self) -> list[str]:
        if self.folded[0] == len(self.records):
            return self.folded[1]
        self.folded = len(self.records), policy.succession(replay.fold(self.world.job, self.records))
        return self.folded[1]

    def follow(self, term: int, node: str) -> None:
        self.view, accepted = member.accept(self.view, term, node, self.world.now)
        if accepted and node != self.name:
            self.former = node
            self.role, self.linked = None, set()
            if self.joined != node:
                self.joined = None

    def feed(self, event: inputs.Input) -> None:
        if self.role is None:
            return
        self.role, commands = step(self.role, event, self.world.now)
        for command in commands:
            self.carry_out(command)

    def carry_out(self, command: s.Command) -> None:
        if self.role is None:
            return
        if isinstance(command, s.Emit):
            self.record(command)
        elif isinstance(command, s.Send):
            order = {"op": command.op, "args": dict(command.args), "term": self.role.term}
            if command.node == self.name:
                self.obey(order)
            elif command.node in self.linked:
                self.world.send(self.name, command.node, "order", order)
        elif isinstance(command, s.Drop):
            self.linked.discard(command.node)
        elif isinstance(command, s.Judge):
            self.world.send(self.name, self.name, "report", {"event": policy.judged(command)})
        elif isinstance(command, s.HandOver):
            for name in self.linked:
                self.world.send(self.name, name, "moved", {"successor": command.node})
            self.world.send(self.name, command.node, "take_over", {})
            self.view = dataclasses.replace(self.view, successor=command.node, coordinator=None)
            self.leaving = len(self.records), self.world.now + LEAVE_S

    def record(self, emit: s.Emit) -> None:
        assert self.role is not None
        check_readable(emit)
        now = iso_time(int(self.world.now * 1e9))
        found: Record = {
            "seq": len(self.records) + 1, "time": now, "type": emit.type, "generation": emit.generation,
            "node": emit.node, "rank": emit.rank, "detail": dict(emit.detail), "term": self.role.term,
        }  # fmt: skip
        self.records.append(found)
        if emit.type is EventType.GENERATION_PROPOSED:
            self.acknowledge(self.name, found)
        for name in self.linked:
            self.world.send(self.name, name, "journal", found)

    def acknowledge(self, head: str, proposal: Mapping[str, Any]) -> None:
        """Say that a proposal is on disk."""
        event = inputs.Recorded(self.name, proposal["generation"], proposal["term"])
        self.world.send(self.name, head, "report", {"event": event})

    def say(self, event: inputs.Input) -> None:
        if self.role is not None:
            self.feed(event)
        elif self.joined is not None:
            self.world.send(self.name, self.joined, "report", {"event": event})

    def obey(self, order: Mapping[str, Any]) -> None:
        op, args, name = order["op"], order["args"], self.name
        if op == "prepare" and args["generation"] >= self.generation:
            self.say(inputs.Prepared(name, args["generation"], 1))
        elif op == "go" and args["generation"] >= self.generation and self.running is None:
            generation = args["generation"]
            assert generation > self.generation, "RESTART_COUNT goes back"
            self.generation, self.running = generation, (order["term"], generation)
            self.ranks = tuple(range(args["base_rank"], args["base_rank"] + args["local_world_size"]))
            self.say(inputs.Started(name, generation, tuple((rank, 0, 1) for rank in self.ranks)))
            for rank in self.ranks:
                self.say(inputs.Main(name, generation, rank))
        elif op == "stop":
            self.stop(args["generation"])
        elif op in ("leave", "end"):
            self.leave()

    def stop(self, generation: int) -> None:
        if self.running is not None and self.running[1] <= generation:
            self.running = None
        self.say(inputs.Idle(self.name, generation))

    def leave(self) -> None:
        self.alive, self.running, self.role, self.joined = False, None, None, None
        self.lives += 1

    # Time

    def tick(self) -> None:
        world, now = self.world, self.world.now
        if self.leaving is not None:
            formed = any(one["type"] == "generation_started" for one in self.records[self.leaving[0] :])
            if formed:
                self.leave()
                return
            if now > self.leaving[1]:
                self.role, self.linked = None, set()
        if self.role is not None:
            self.view = member.renew_lease(self.view, now)
            self.feed(inputs.Heartbeat(self.name))
            self.feed(inputs.Tick())
            self.look_for_rivals()
            return
        if self.running is not None and self.view.term and member.lease_over(self.view, now):
            self.stop(self.running[1])
        self.seek()
        if self.joined is not None and self.unanswered is None:
            answered, came = self.echo
            times = {"sent": now, "heard_age": now - self.view.contact, "answered": answered, "since": now - came}
            world.send(self.name, self.joined, "beat", times)
            self.unanswered = now
        if self.candidacy is not None and now > self.candidacy.until:
            order = self.base()
            place = order.index(self.name) if self.name in order else 0
            self.candidacy, self.pause = None, now + PAUSE_S * (1 + place)
        if self.candidacy is None and now > self.pause and member.leaderless(self.view, now):
            order = [name for name in self.base() if name != self.view.coordinator]
            if member.election_due(self.view, order, now):
                self.stand()

    def look_for_rivals(self) -> None:
        role, now = self.role, self.world.now
        if role is not None and not all(
            node.connected and is_held(role, name, now) for name, node in role.nodes.items()
        ):
            self.ask_around()

    def seek(self) -> None:
        world, head = self.world, self.view.coordinator
        if self.joined is not None:
            since = world.now if self.unanswered is None else self.unanswered
            over = self.joined != head or world.now - since > world.job.node_timeout
            if not over and (world.agents[self.joined].alive or not world.reach(self.name, self.joined)):
                return
            self.joined = None
        if head is not None and world.reach(self.name, head):
            other = world.agents[head]
            if not other.alive:
                self.view = member.refused(self.view, world.now)
            elif other.role is not None:
                other.admit(self)
        if self.joined is None:
            self.ask_around()

    def ask_around(self) -> None:
        for name in self.world.agents:
            if name != self.name and name not in self.linked:
                self.world.send(self.name, name, "who", {"term": self.view.term})

    def admit(self, other: Agent) -> None:
        """Take a member in: its connection is made, so that nothing of the former one comes any more."""
        assert self.role is not None
        if other.view.term > self.role.term:
            self.renew(other.view.term)
            return
        self.world.forget(self.name, other.name)
        self.linked.add(other.name)
        other.joined, other.view = self.name, member.renew_lease(other.view, self.world.now)
        other.records, other.folded = list(self.records), (-1, [])
        other.unanswered, other.echo = None, (self.world.now, self.world.now)
        incarnation = f"{other.name}-{other.lives}"
        running = other.running[1] if other.running else None
        self.feed(inputs.Joined(other.name, incarnation, running, nproc=1, disk=other.disk))
        self.feed(inputs.Ready(other.name, 1))
        if self.records and self.records[-1]["type"] == "generation_proposed":
            other.acknowledge(self.name, self.records[-1])

    def renew(self, term: int) -> None:
        """Ask for a newer term while in charge; at once, as the others stand still."""
        assert self.role is not None
        if self.view.coordinator != self.name or not holds_quorum(self.role, self.world.now):
            return
        view, reason = member.vote(self.view, term + 1, self.name, self.world.now)
        if reason:
            return
        self.view = view
        votes = Votes(self)
        for name, other in self.world.agents.items():
            reached = name != self.name and other.alive and self.world.reach(self.name, name)
            if reached and other.give_vote(term + 1, self.name, sounding=False):
                votes.take(name, other.disk, other.records)
        if votes.lacking() is None:
            self.follow(term + 1, self.name)
            self.role = dataclasses.replace(self.role, term=term + 1)
            self.announce()

    def announce(self) -> None:
        for name in self.world.agents:
            if name != self.name:
                self.world.send(self.name, name, "announce", {"term": self.view.term, "coordinator": self.name})

    # Votes

    def stand(self) -> None:
        self.candidacy = Candidacy(self.view.term + 1, self.world.now + ANSWER_S, Votes(self))
        self.poll()

    def poll(self) -> None:
        candidacy = self.candidacy
        assert candidacy is not None
        candidacy.votes = Votes(self)
        for name in self.world.agents:
            if name != self.name:
                self.world.send(self.name, name, "vote", {"term": candidacy.term, "sounding": candidacy.sounding})
        self.count()

    def count(self) -> None:
        candidacy = self.candidacy
        if candidacy is None or candidacy.votes.lacking() is not None:
            return
        if candidacy.sounding:
            self.view, reason = member.vote(self.view, candidacy.term, self.name, self.world.now)
            if reason:
                self.candidacy = None
                return
            candidacy.sounding = False
            self.poll()
        elif self.view.term == candidacy.term and self.view.voted == self.name:
            self.records, self.folded = list(candidacy.votes.records), (-1, [])
            self.take_role(candidacy.term)

    def take_role(self, term: int) -> None:
        self.candidacy = None
        away_s = self.world.now - self.view.contact
        self.role = replay.take_over(self.world.job, self.name, term, self.records, self.world.now, away_s)
        self.follow(term, self.name)
        self.joined, self.linked = None, set()
        if self.former in self.role.nodes and self.role.nodes[self.former].status != "removed":
            # Its lease was over before anybody could vote: its workers are gone.
            self.feed(inputs.AgentDead(self.former, "it was the coordinator"))
        running = self.running[1] if self.running else None
        self.feed(inputs.Joined(self.name, f"{self.name}-{self.lives}", running, nproc=1, disk=self.disk))
        self.feed(inputs.Ready(self.name, 1))
        self.announce()

    def give_vote(self, term: int, candidate: str, *, sounding: bool) -> bool:
        if self.role is not None and self.view.coordinator == self.name:
            return False
        view, reason = member.vote(self.view, term, candidate, self.world.now)
        if not reason and not sounding:
            self.view = view
        return not reason

    def hear(self, source: str, kind: str, args: Mapping[str, Any]) -> None:
        """Take one message in."""
        send = self.world.send
        if kind in ("vote", "voted"):
            self.hear_vote(source, kind, args)
        elif kind == "who":
            if self.role is not None and args["term"] > self.role.term:
                self.renew(args["term"])
            send(self.name, source, "iam", {"term": self.view.term, "coordinator": self.view.coordinator})
        elif kind == "iam":
            if args["coordinator"] and member.is_news(self.view, args["term"], args["coordinator"]):
                self.follow(args["term"], args["coordinator"])
        elif kind == "announce":
            self.follow(args["term"], args["coordinator"])
        elif kind in ("report", "beat"):
            self.hear_member(source, kind, args)
        elif source == self.view.coordinator and source == self.joined:
            self.hear_coordinator(source, kind, args)
        elif kind == "take_over" and self.view.successor == self.name and self.role is None:
            self.stand()

    def hear_member(self, source: str, kind: str, args: Mapping[str, Any]) -> None:
        if self.role is None or source not in {self.name, *self.linked}:
            return
        if kind == "report":
            self.feed(args["event"])
        else:
            delay = self.world.now - args["answered"] - args["since"]
            self.feed(inputs.Heartbeat(source, args["heard_age"] + delay))
            self.world.send(self.name, source, "beaten", {**args, "now": self.world.now})

    def hear_vote(self, source: str, kind: str, args: Mapping[str, Any]) -> None:
        send = self.world.send
        if kind == "vote":
            granted = self.give_vote(args["term"], source, sounding=args["sounding"])
            answer = {**args, "granted": granted, "disk": self.disk, "records": list(self.records)}
            send(self.name, source, "voted", answer)
        elif kind == "voted":
            mine = self.candidacy
            if mine and args["granted"] and (mine.term, mine.sounding) == (args["term"], args["sounding"]):
                mine.votes.take(source, args["disk"], args["records"])
                self.count()

    def hear_coordinator(self, source: str, kind: str, args: Mapping[str, Any]) -> None:
        if kind == "order":
            if args["term"] > self.view.term:
                self.follow(args["term"], source)
            if args["term"] == self.view.term:
                self.obey(args)
        elif kind == "journal":
            if args["seq"] == len(self.records) + 1:
                self.records.append(dict(args))
                if args["type"] == "generation_proposed":
                    self.acknowledge(source, args)
        elif kind == "beaten":
            self.view = member.renew_lease(self.view, args["sent"])
            self.unanswered, self.echo = None, (args["now"], self.world.now)
        elif kind == "moved":
            self.view = dataclasses.replace(self.view, successor=args["successor"])
        elif kind == "take_over" and self.role is None:
            self.stand()
