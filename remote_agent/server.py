"""What supervisors ask of a node whose agent lives: beside its files, live state, stacks, the operator's verbs.

In: requests over the agent's unix socket. Out: answers, streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_agent import __version__, clocks, election, member, paths, restore
from remote_agent import state as s
from remote_agent.desk import Desk
from remote_agent.engine_link import nproc
from remote_agent.jobs import ENDED
from remote_agent.journal import Record, public
from remote_agent.signalling import ask_engine, signal_ranks
from remote_agent.status import document
from remote_agent.tree_desk import TreeDesk
from remote_agent.wire import Answer, Channel, Items, JobSpec, Problem

if TYPE_CHECKING:
    from remote_agent.agent import Agent

OPERATOR_VERBS = ("restart", "remove", "add", "stop", "cordon", "uncordon")
# What an operator who said that he only looks may ask. All else is refused him: it changes the job, or leaves a trace.
LOOKS = frozenset(
    (
        *("identity", "status", "watch", "events", "history", "incidents", "nccl", "stacks", "await_engine"),
        *("log_list", "log_read", "log_window", "log_merged", "log_follow", "log_search"),
    )
)
# `watch` sends at most this often, and at least that often.
WATCH_MIN_S = 0.1
WATCH_MAX_S = 1.0
# A document grows with its ranks, and ages change all the time: a link to the coordinator of many stays as free.
WATCH_RANK_S = 0.001


class AgentDesk(Desk):
    """A live agent, for one operator's connection."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent.files, agent.logs)
        self._agent = agent
        self._operator: dict[str, Any] | None = None
        self._trees = TreeDesk(agent.files.home, agent.spec.job)
        self.ops.update(
            {
                "identity": self.identity,
                "assign": self.assign,
                "await_engine": self.await_engine,
                "status": self.status,
                "watch": self.watch,
                "events": self.events,
                "promote": self.promote,
                "attach": self.attach,
                "stacks": self.stacks,
                "signal": self.signal,
                "keep": self.keep,
                "exit": self.exit,
                "over": self.over,
            }
        )

    @property
    def records(self) -> list[Record]:
        return self._agent.journal.records

    @property
    def spec(self) -> JobSpec:
        return self._agent.spec

    async def handle(self, op: str, args: dict[str, Any], body: bytes) -> Answer | Items:
        if op not in LOOKS and self._operator is not None and self._operator["mode"] == "watch":
            raise Problem("read_only", f"{op} refused: this operator is attached read-only")
        if op in OPERATOR_VERBS:
            return Answer(await self._to_coordinator(op, args))
        if op in self._trees.ops:
            return await self._tree(op, args, body)
        return await super().handle(op, args, body)

    async def _tree(self, op: str, args: dict[str, Any], body: bytes) -> Answer:
        """Take a newer work tree beside the one that the group runs from, and say that it is here; raises Problem."""
        agent = self._agent
        if agent.tree.name is None or args.get("tree") != agent.tree.name:
            raise Problem("not_synced", f"{agent.spec.job} does not run from a work tree {args.get('tree')}")
        answer = await self._trees.ops[op](args, body)
        if op == "tree_commit":
            agent.tree.look()
            agent.follower.tell_readiness()
        return Answer(answer)

    async def _to_coordinator(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        role = self._agent.role
        if role is not None:
            return role.status() if op == "status" else role.request(op, args)
        return (await self._agent.follower.forward(op, args)).data

    async def identity(self, args: dict[str, Any]) -> Answer:
        """Answer who this agent is and whom it follows."""
        agent, view = self._agent, self._agent.follower.member
        reachable = agent.role is not None or agent.follower.channel is not None
        role = "coordinator" if agent.role is not None else "member" if reachable else "waiting"
        code = Path(sys.argv[0])
        return Answer(
            {
                "job": agent.spec.job,
                "node": agent.node,
                "term": view.term,
                "role": role,
                "coordinator": view.coordinator,
                "coordinator_reachable": reachable,
                "live": True,
                "peer_port": agent.port,
                "last_seq": agent.journal.last_seq,
                "incarnation": agent.follower.incarnation,
                "members": agent.members,
                "version": __version__,
                # Of the very code that runs here; empty where it is no zipapp.
                "build": code.name.partition(".")[0] if code.suffix == ".pyz" else "",
            }
        )

    async def assign(self, args: dict[str, Any]) -> Answer:
        """Take the coordinator's name from the supervisor that launches."""
        await self._agent.assign(args)
        return Answer({})

    async def await_engine(self, args: dict[str, Any]) -> Answer:
        """Answer when the engine is up; raises Problem when it cannot be."""
        engine = self._agent.follower.engine
        await engine.ready.wait()
        return Answer({**engine.facts, "nproc": nproc(self._agent)})

    async def _document(self) -> dict[str, Any]:
        agent = self._agent
        extra = {"node": agent.node, "term": agent.follower.member.term, "last_seq": agent.journal.last_seq}
        try:
            found = await self._to_coordinator("status", {})
        except Problem as problem:
            state = self._orphaned(restore.fold(agent.spec, agent.journal.records, agent.node))
            found = document(state, {agent.node: agent.follower.facts()}, agent.follower.member.coordinator)
            plan = f"{problem.message}; {problem.hint}" if problem.hint else problem.message
            return {**found, **extra, "coordinator_reachable": False, "plan": plan}
        return {**found, **extra, "coordinator_reachable": True}

    def _orphaned(self, state: s.State) -> s.State:
        """What this node knows by itself of a job whose coordinator it cannot reach: nobody must take old for new."""
        agent, view = self._agent, self._agent.follower.member
        nodes = dict(state.nodes)
        if view.coordinator in nodes:
            reason = f"cannot be reached from {agent.node}"
            nodes[view.coordinator] = dataclasses.replace(nodes[view.coordinator], status="lost", reason=reason)
        state = dataclasses.replace(state, nodes=nodes)
        if state.phase == s.ENDED or state.generation < 0 or agent.follower.running is not None:
            return state
        return dataclasses.replace(state.with_killed(), phase=s.FORMING, alone_since=view.contact)

    async def status(self, args: dict[str, Any]) -> Answer:
        """Answer with the status document."""
        return Answer(await self._document())

    async def watch(self, args: dict[str, Any]) -> Items:
        """Stream the status document whenever it changed."""
        last: dict[str, Any] = {}
        sent = 0.0
        while True:
            role = self._agent.role
            wake = role.changed if role is not None else None
            found = await self._document()
            now = time.monotonic()
            if found != last or now - sent > WATCH_MAX_S:
                last, sent = found, now
                yield Answer({"status": found})
            if self._agent.finished and found["state"] in ENDED:
                return
            await asyncio.sleep(watch_pause(found["world_size"] or 0))
            with contextlib.suppress(asyncio.TimeoutError):
                waiting = wake.wait() if wake is not None else self._agent.journal.wait_change(WATCH_MAX_S)
                await asyncio.wait_for(waiting, WATCH_MAX_S)

    async def events(self, args: dict[str, Any]) -> Items:
        """Stream journal records after `since`; with `follow` until the job is over."""
        if not args.get("follow"):
            async for item in super().events(args):
                yield item
            return
        async for record in self._agent.journal.follow(int(args.get("since", 0))):
            yield Answer({"event": public(record)})

    async def promote(self, args: dict[str, Any]) -> Answer:
        """Let this node ask for votes, because an operator says so; raises Problem when it does not get them.

        `force`: also without the votes; then `given_up` are the nodes that the operator calls dead.
        """
        agent = self._agent
        if agent.role is None:
            given_up = args.get("given_up", ())
            refusal = await election.stand(agent.follower, given_up=given_up)
            if refusal and args.get("force"):
                refusal = await election.stand(agent.follower, force=True, given_up=given_up)
                if not refusal:
                    agent.give_up(given_up, str(args.get("operator", "")))
            if refusal:
                raise Problem("election", refusal)
        return Answer({"term": agent.follower.member.term, "coordinator": agent.node})

    async def stacks(self, args: dict[str, Any]) -> Answer:
        """Answer with the Python stacks of this node's live ranks."""
        return await ask_engine(self._agent, "stacks", {"ranks": args.get("ranks")})

    async def signal(self, args: dict[str, Any]) -> Answer:
        """Send a signal to ranks of this node; raises Problem."""
        return await signal_ranks(self._agent, args)

    async def keep(self, args: dict[str, Any]) -> Answer:
        """Save stacks and flight records of ranks beside their logs; raises Problem."""
        return await ask_engine(self._agent, "keep", {"ranks": args.get("ranks")})

    async def exit(self, args: dict[str, Any]) -> Answer:
        """End this agent: the launch it belongs to was given up."""
        agent = self._agent
        own = restore.fold(agent.spec, agent.journal.records).nodes.get(agent.node)
        needed = agent.follower.member.term and (own is None or own.status not in ("removed", "failed"))
        if needed and not agent.finished:
            raise Problem("running", "this job has a coordinator: stop it instead")
        self._agent.finish("its operator asked for it", linger=False)
        return Answer({})

    async def over(self, args: dict[str, Any]) -> Answer:
        """End this agent: the job ended while it was cut off, as files of other nodes tell; raises Problem.

        `term`, `seq`: of the journal with the end; it must be newer than ours.
        """
        agent = self._agent
        if agent.finished or not _is_alone(agent):
            raise Problem("running", f"{agent.node} hears of the end from its coordinator")
        if (int(args["term"]), int(args["seq"])) <= (agent.journal.last_term, agent.journal.last_seq):
            raise Problem("stale", f"the journal of {agent.node} is newer")
        agent.finish("the job ended while this node was cut off", linger=False)
        return Answer({})

    async def attach(self, args: dict[str, Any]) -> Answer:
        """Note an operator who looks, until this connection ends."""
        self._operator = {"operator": str(args["operator"]), "mode": str(args.get("mode", "watch"))}
        await self._note(came=True)
        return Answer({})

    async def _note(self, came: bool) -> None:
        if self._operator is not None:
            with contextlib.suppress(Problem):
                await self._to_coordinator("operator", {**self._operator, "came": came})

    async def left(self) -> None:
        """Note that the operator's connection ended."""
        await self._note(came=False)

    async def close(self) -> None:
        """Give back what a half-done sync holds."""
        await self._trees.leave()


def _is_alone(agent: Agent) -> bool:
    """Whether no coordinator's word counts here any more, nor our own as one that holds its group."""
    if agent.role is not None:
        return agent.role.is_short()
    return agent.follower.channel is None and member.lease_over(agent.follower.member, clocks.now())


def watch_pause(ranks: int) -> float:
    """Return the least seconds between two documents of a job of so many ranks."""
    return min(WATCH_MAX_S, max(WATCH_MIN_S, WATCH_RANK_S * ranks))


async def serve_operators(agent: Agent) -> asyncio.AbstractServer:
    """Answer supervisors on the job's unix socket."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        desk = AgentDesk(agent)
        channel = Channel(reader, writer, desk.handle)
        agent.operator_came(channel)
        try:
            await channel.run()
            await desk.left()
        finally:
            agent.operator_left(channel)
            await desk.close()

    return await paths.serve_unix(agent.files.sock, connected)
