"""Find the coordinator, or become it.

In: a node that has lost its coordinator; requests for votes. Out: a coordinator for which enough nodes of every group
that may have formed have voted.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Protocol, Union

from remote_agent.base import clocks
from remote_agent.coordinator import policy, quorum
from remote_agent.coordinator.journal import Journal, chunks
from remote_agent.election import member
from remote_agent.wire import Answer, Args, Channel, Items, Problem

if TYPE_CHECKING:
    from remote_agent.base.tasks import Tasks
    from remote_agent.coordinator.replay import Fold
    from remote_agent.election.ballot import Ballot
    from remote_agent.election.peers import Peers

log = logging.getLogger(__name__)

SUCCESSOR_PAUSES_S = (0.1, 0.3, 1.0, 2.0)
ELECTION_PAUSE_S = 1.0
# Of more than OFTEN nodes, one waits twice as long after each election that it has lost, up to this: where many ask at
# once, none gets its answers in time.
LONGEST_PAUSE_S = 30.0
# Who looks for a coordinator asks this many others at a time, chosen by chance: asking all takes a thousand nodes a
# million handshakes a round.
ASKED_AROUND = 3
# With more nodes than this, each asks only this often, and only twice as long after it has heard from its coordinator:
# all would ask at once, while nobody knows the next one, and their handshakes would keep a candidate from its votes.
OFTEN, SELDOM_S = 32, 5.0
# A candidate that has asked us keeps those that come after it in the succession waiting for this long, once, and longer
# by this for each node that it asks.
FIRST_S, FIRST_NODE_S = 3.0, 0.02
# What looks lost is given up once no answer has come for this long: one with a newer journal may still change it, and a
# host without power answers nothing for seconds.
LOST_S = 1.0
PeerRequest = Callable[[str, "Channel | None", Args], Awaitable[Union[Answer, Items]]]
"""Answers one request of another agent: its node, the connection, the arguments."""


class Role(Protocol):
    """The coordinator's role on this node: `CoordinatorRole` of agent.coordinator_shell."""

    @property
    def is_held(self) -> bool: ...
    @property
    def connected(self) -> frozenset[str]: ...
    def needs_term_above(self, term: int) -> bool: ...
    def take(self, term: int, former: str) -> None: ...
    def renew(self, term: int) -> None: ...


class Election:
    """Elections as one node takes part in them."""

    def __init__(self, fold: Fold, journal: Journal, ballot: Ballot, peers: Peers, role: Role, tasks: Tasks) -> None:
        self._fold = fold
        self._me = ballot.view.me
        self._journal = journal
        self._ballot = ballot
        self._peers = peers
        self._role = role
        self._tasks = tasks
        self.standing = asyncio.Lock()
        """Held while this node asks for votes."""
        self.trouble = ""
        """What keeps this node from a coordinator, as last seen."""
        self._running: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._refusal = ""
        self._asked_at = 0.0
        self._lost = 0
        """How many elections this node has lost since it last followed a coordinator."""
        self._stood: dict[str, float] = {}
        """Who has asked whether it would get our vote, and when first."""
        ballot.on_change(self._follow_another)
        self.requests: dict[str, PeerRequest] = {
            "vote": self._on_vote,
            "who": self._on_who,
            "announce": self._on_announcement,
            "take_over": self._on_take_over,
        }

    def _follow_another(self, _coordinator: str) -> None:
        self._stood.clear()
        self._lost = 0

    def note_trouble(self, text: str) -> None:
        """Note what keeps this node from a coordinator; "" for nothing."""
        self.trouble = text

    def _succession(self) -> list[str]:
        return policy.succession(self._fold.state)

    # Questions

    async def ask_around(self) -> None:
        """Ask the others for a newer coordinator; one of an older term then renews its term."""
        view, now = self._ballot.view, clocks.now()
        heard_at = view.contact if view.coordinator not in (None, self._me) else 0.0
        if len(self._peers.members) > OFTEN and now < SELDOM_S + max(self._asked_at, heard_at + SELDOM_S):
            return
        self._asked_at = now
        # The nodes that are connected to us follow us.
        known = self._role.connected
        others = [name for name in self._peers.members if name not in {self._me, view.coordinator, *known}]
        others = random.sample(others, min(ASKED_AROUND, len(others)))
        question = {"term": view.term, "where": self._peers.members.get(self._me)}
        asking = [self._peers.ask(name, "who", question) for name in others]
        for answer in await asyncio.gather(self._ask_endpoint(known), *asking):
            # A node that voted knows the term, but maybe not the winner.
            if answer and answer["coordinator"]:
                term, coordinator = answer["term"], answer["coordinator"]
                if member.is_news(self._ballot.view, term, coordinator):
                    self._peers.learn(answer["members"])
                    self._ballot.follow(term, coordinator)

    async def _ask_endpoint(self, connected: frozenset[str]) -> Args | None:
        """Ask at the job's endpoint, where it has one; a coordinator announces itself there instead."""
        if self._peers.is_endpoint({self._me, *connected}):
            return None
        if self._role.is_held:
            await self._peers.ask_endpoint("announce", self._announcement())
            return None
        view = self._ballot.view
        args = {"term": view.term, "where": self._peers.members[self._me]}
        answer, trouble = await self._peers.ask_endpoint("who", args)
        if not view.term:
            coordinator = answer and answer["coordinator"]
            self.note_trouble("" if coordinator else trouble or f"{self._peers.endpoint}: no coordinator there yet")
        if answer:
            # After a restart of all agents the old addresses are wrong; the endpoint learns new ones from questions.
            self._peers.learn({name: where for name, where in answer["members"].items() if name != self._me})
        return answer

    def _announcement(self) -> Args:
        return {"term": self._ballot.view.term, "coordinator": self._me, "members": self._peers.members}

    def announce(self) -> None:
        """Make all other nodes follow this one."""
        for name in self._peers.members:
            if name != self._me:
                self._tasks.spawn(self._peers.ask(name, "announce", self._announcement()), "announce")

    # Candidates

    def stand_if_due(self, now: float) -> None:
        """Start an election in the background, if one is due and it is this node's turn."""
        view = self._ballot.view
        running = self._running is not None and not self._running.done()
        if running or now <= self._not_before or not member.leaderless(view, now):
            return
        candidates = [name for name in self._succession() if name != view.coordinator]
        if member.election_due(view, candidates, now) and not self._first_before(self._me, now):
            self._running = self._tasks.spawn(self._try(), "election")

    async def _try(self) -> None:
        """Ask for votes; without them not again for a while, and not in step with another candidate."""
        order = self._succession()
        place = order.index(self._me) if self._me in order else 0
        try:
            refusal = await self.stand()
            if refusal:
                hint = "if they are dead: `supervisor promote` continues without them"
                self.note_trouble(f"not elected: {refusal}; {hint}")
            if refusal and refusal != self._refusal:
                log.info("not elected: %s", refusal)
            self._refusal = refusal
        finally:
            self._lost += 1
            pause_s = ELECTION_PAUSE_S
            if len(self._peers.members) > OFTEN:
                pause_s = random.uniform(0.5, 1.0) * min(LONGEST_PAUSE_S, pause_s * 2**self._lost)
            self._not_before = clocks.now() + pause_s + member.stagger_s(place, len(order))

    async def stand(self, force: bool = False, given_up: Collection[str] = ()) -> str:
        """Ask for votes and take the role with enough of them; returns "" or why not.

        `force`: take it in any case. `given_up`: nodes that an operator has declared dead; they are not asked.
        """
        async with self.standing:
            if self._role.is_held:
                return ""
            if not force and self._is_removed():
                return f"{self._me} was removed from the job"
            return await self._stand(force, given_up)

    def _is_removed(self) -> bool:
        """Return whether an operator removed this node: it votes until a group without it has formed but leads none."""
        own = self._fold.state.nodes.get(self._me)
        return own is not None and own.status == "removed"

    async def inherit(self) -> str:
        """Take the role that its holder hands over; returns "" or why not."""
        refusal = await self.stand()
        for pause_s in SUCCESSOR_PAUSES_S:
            if not refusal:
                break
            # Another member may not know the successor yet.
            await asyncio.sleep(pause_s)
            refusal = await self.stand()
        return refusal

    async def _stand(self, force: bool, given_up: Collection[str]) -> str:
        view = self._ballot.view
        if not member.leaderless(view, clocks.now()):
            return f"{view.coordinator} is in charge"
        term = view.term + 1
        if not force:
            # A sounding leaves no trace: a node that cannot win must not raise everybody's term.
            refusal = (await self._poll(term, sounding=True, given_up=given_up))[1]
            if refusal:
                return refusal
        refusal = await self._ballot.vote(term, self._me)
        if refusal:
            return refusal
        answers, refusal = await self._poll(term, sounding=False, given_up=given_up)
        view = self._ballot.view
        if view.term != term or view.voted != self._me:
            return "another candidate was first"
        if refusal and not force:
            return refusal
        # The voter with the newest journal may know more than we do.
        newest = max(answers, key=lambda answer: tuple(answer["newest"]), default=None)
        records = newest["records"] if newest is not None else []
        if newest is not None and records and not self._journal.take(records, reset=newest["reset"]):
            return "its journal has changed meanwhile"
        self._role.take(term, self._ballot.former)
        self.announce()
        return ""

    async def renew(self, term: int) -> None:
        """Raise our own term as coordinator above one that an unsuccessful candidate has left behind."""
        if not self._is_coordinator() or term < self._ballot.view.term:
            return
        if await self._ballot.vote(term + 1, self._me):
            return
        _, refusal = await self._poll(term + 1, sounding=False)
        if refusal or not self._ballot.follow(term + 1, self._me):
            log.warning("term %d: %s", term + 1, refusal)
            return
        self._role.renew(term + 1)
        self.announce()

    def renew_beyond(self, term: int) -> None:
        """Renew our term as coordinator if a node is in a newer one: otherwise it cannot follow us.

        We do so only while we hold our group: otherwise the newer term may be that of another coordinator.
        """
        if self._role.needs_term_above(term):
            self._tasks.spawn(self.renew(term), "renew the term")

    async def _poll(self, term: int, *, sounding: bool, given_up: Collection[str] = ()) -> tuple[list[Args], str]:
        """Ask for votes (`sounding`: whether they would be given); returns the granting answers and "" or why not.

        The votes are counted by the groups of the newest journal among the voters: ours may be old.
        """
        request = {"term": term, "candidate": self._me, "sounding": sounding, "journal": self._journal.tail()}
        request["where"] = self._peers.members.get(self._me)
        names = [name for name in self._peers.members if name != self._me and name not in given_up]
        asked = {asyncio.ensure_future(self._peers.ask(name, "vote", request)): name for name in names}
        granted: list[Args] = []
        refused: list[str] = []
        groups = quorum.in_journal(self._journal.records)
        tally = quorum.Tally({self._me: self._ballot.disk}, self._journal.age, groups)
        waiting = set(asked)
        try:
            # A host without power answers nothing for seconds: a quorum does not wait for it.
            while waiting and tally.lacking(given_up) is not None:
                is_lost = tally.is_lost([asked[task] for task in waiting], given_up)
                done, waiting = await asyncio.wait(
                    waiting, timeout=LOST_S if is_lost else None, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for task in done:
                    answer, name = task.result(), asked[task]
                    if not answer or not answer["granted"]:
                        refused.append(f"{name}: {answer['reason'] if answer else 'no answer'}")
                        continue
                    if answer["newest"][0] >= term:
                        refused.append(f"{name}: its journal is of term {answer['newest'][0]}")
                        continue
                    granted.append(answer)
                    groups = tuple(quorum.Group.from_json(group) for group in answer["groups"])
                    tally.add(name, answer["disk"], tuple(answer["newest"]), groups)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        lacking = tally.lacking(given_up)
        if lacking is None:
            return granted, ""
        reasons = "; ".join(sorted(refused))
        return granted, f"votes of {' '.join(sorted(tally.votes))}; needed: {lacking.needed} ({reasons})"

    # Requests of other nodes

    async def _on_vote(self, node: str, channel: Channel | None, args: Args) -> Items:
        # The certificate shows which node asks: no node can ask for another one.
        if args["candidate"] != node:
            raise Problem("bad_request", f"{node} asks for a vote for another node")
        self._learn(node, args)
        return self._answer_candidate(args)

    def _learn(self, node: str, args: Args) -> None:
        """Note where a node that asks us listens: it may have come back with another port."""
        if args.get("where"):
            self._peers.learn({node: args["where"]}, certain=True)

    async def _answer_candidate(self, args: Args) -> Items:
        """Answer a request for a vote, with the groups of our journal; a granted one also with its newer records."""
        refusal = f"{self._me} is the coordinator" if self._is_coordinator() else ""
        if not refusal and args["sounding"]:
            first = self._first_before(args["candidate"], clocks.now())
            refusal = f"{first} asks too, and comes first" if first else ""
        if not refusal:
            refusal = await self._ballot.vote(args["term"], args["candidate"], sounding=args["sounding"])
        answer = {"granted": not refusal, "reason": refusal, "disk": self._ballot.disk}
        if refusal:
            yield Answer(answer)
            return
        groups = [group.to_json() for group in quorum.in_journal(self._journal.records)]
        answer.update(newest=self._journal.age, groups=groups)
        if args["sounding"]:
            yield Answer(answer)
            return
        theirs = args["journal"]
        reset, seq = self._journal.lacks(theirs)
        records = self._journal.since(seq)
        if self._journal.age <= (theirs["term"], theirs["seq"]):
            records = []
        for chunk in chunks(records):
            yield Answer({**answer, "reset": reset, "records": chunk})

    def _first_before(self, candidate: str, now: float) -> str:
        """Return who has asked us a moment ago and comes before a candidate in the succession, "" for nobody.

        Without this, many candidates that begin together would share the votes. It is no promise: those are the votes.
        """
        places = {name: place for place, name in enumerate(self._succession())}
        patience_s = FIRST_S + FIRST_NODE_S * len(self._peers.members)
        recent = [name for name, at in self._stood.items() if now - at < patience_s and name in places]
        first = min(recent, key=places.__getitem__, default="")
        self._stood.setdefault(candidate, now)
        return first if first and places[first] < places.get(candidate, len(places)) else ""

    def _is_coordinator(self) -> bool:
        """Return whether this node is the coordinator, and has not named a successor."""
        return self._role.is_held and self._ballot.view.coordinator == self._me

    async def _on_who(self, node: str, channel: Channel | None, args: Args) -> Answer:
        self._learn(node, args)
        self.renew_beyond(args["term"])
        view = self._ballot.view
        return Answer({"term": view.term, "coordinator": view.coordinator, "members": self._peers.members})

    async def _on_announcement(self, node: str, channel: Channel | None, args: Args) -> Answer:
        if args["coordinator"] != node:
            raise Problem("bad_request", f"{node} announces another node")
        self._peers.learn(args["members"])
        self._ballot.follow(args["term"], node)
        return Answer({})

    async def _on_take_over(self, node: str, channel: Channel | None, args: Args) -> Answer:
        refusal = await self.inherit() if node == self._handed_over_by() else f"{node} is not the coordinator"
        if refusal:
            raise Problem("election", refusal)
        return Answer({})

    def _handed_over_by(self) -> str | None:
        """Return the coordinator that has named this node its successor."""
        view = self._ballot.view
        return view.coordinator if view.successor == self._me else None
