"""The requests that supervisors make to a live agent: live state, stacks, and the verbs that change the job.

In: requests over the agent's unix socket. Out: answers, streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_agent import __version__
from remote_agent.agent.file_requests import JobRequests, in_pieces
from remote_agent.agent.tree_requests import TreeRequests
from remote_agent.base import clocks
from remote_agent.base.streams import serve_unix
from remote_agent.base.tasks import within
from remote_agent.coordinator import state as s
from remote_agent.coordinator.journal import public
from remote_agent.coordinator.operator_requests import VERBS
from remote_agent.coordinator.status import document
from remote_agent.election import authorities, member
from remote_agent.wire import Answer, Args, CallFailed, Channel, Items, Problem, WireError
from remote_agent.wire.events import ENDED_STATES
from remote_agent.wire.status_pieces import pieces

if TYPE_CHECKING:
    from remote_agent.agent.context import Context, Life
    from remote_agent.agent.member_loop import MemberLoop
    from remote_agent.agent.relay import Relay
    from remote_agent.wire.documents import Status

# The requests of an operator who is attached read-only, and of another node for an operator. All others are refused:
# they change the job, or leave a trace.
LOOKS = frozenset(
    (
        *("identity", "status", "watch", "events", "incidents", "job_files", "nccl", "series", "stacks", "why"),
        *("await_engine", "log_list", "log_read", "log_merged", "log_follow", "log_rows"),
        *("snapshot_files", "snapshot_read"),
    )
)
# `watch` sends at most this often, and at least that often.
WATCH_MIN_S = 0.1
WATCH_MAX_S = 1.0
# The pause grows with the ranks, as the document does: a large job does not use more of the link than a small one.
WATCH_RANK_S = 0.001
# With more ranks, one who can read them gets the steps alone, and all else when it changes, or after a longer pause.
LARGE_RANKS = 1000
LARGE_RANK_S = 0.00025
WHOLE_RANK_S = 0.00125
# An agent whose job is over asks its operators this often for a sign of life, and waits this long for it.
ASK_S = 5.0
ANSWER_S = 10.0

log = logging.getLogger(__name__)


class AgentRequests(JobRequests):
    """A live agent, for one operator's connection, or without `relay` for another node's."""

    def __init__(self, context: Context, member_loop: MemberLoop, relay: Relay | None = None) -> None:
        super().__init__(context.files, context.spec, context.logs, context.history, lambda: context.journal.records)
        self._context = context
        self._member = member_loop
        self.is_for_node = relay is None
        self._operator: dict[str, str] | None = None
        self._trees = TreeRequests(context.files.home, context.spec.job)
        self.ops.update(
            identity=self.identity,
            assign=self.assign,
            introduce=self.introduce,
            await_engine=self.await_engine,
            make=self.make,
            status=self.status,
            watch=self.watch,
            events=self.events,
            promote=self.promote,
            attach=self.attach,
            stacks=self.stacks,
            why=self.why,
            signal=self.signal,
            keep=self.keep,
            exit=self.exit,
            over=self.over,
            trust=self.trust,
        )
        if relay is not None:
            self.ops["relay"] = relay.answers

    async def handle(self, op: str, args: Args, body: bytes) -> Answer | Items:
        # The node to which a request is passed on refuses what is not in LOOKS.
        if op not in LOOKS and op != "relay" and self._operator is not None and self._operator["mode"] == "watch":
            raise Problem("read_only", f"{op} refused: this operator is attached read-only")
        if op in VERBS:
            return Answer(await self._member.link.ask(op, args))
        if op in self._trees.ops:
            return await self._tree(op, args, body)
        return await super().handle(op, args, body)

    async def _tree(self, op: str, args: Args, body: bytes) -> Answer:
        """Keep a newer work tree next to the one from which the group runs, and report it; raises Problem."""
        tree = self._context.tree
        if tree.name is None or args.get("tree") != tree.name:
            raise Problem("not_synced", f"{self.spec.job} does not run from a work tree {args.get('tree')}")
        answer = await self._trees.ops[op](args, body)
        if op == "tree_commit":
            tree.look()
            await self._member.report_readiness()
        return Answer(answer)

    async def identity(self, args: Args) -> Answer:
        """Answer who this agent is and which coordinator it follows."""
        context, is_coordinator = self._context, self._member.role.is_held
        view = context.ballot.view
        reachable = is_coordinator or self._member.link.channel is not None
        role = "coordinator" if is_coordinator else "member" if reachable else "waiting"
        code = Path(sys.argv[0])
        return Answer(
            {
                "job": context.spec.job,
                "node": context.node,
                "term": view.term,
                "journal_term": context.journal.last_term,
                "role": role,
                "coordinator": view.coordinator,
                "coordinator_reachable": reachable,
                "live": True,
                "joining": self._is_joining(),
                "peer_port": context.peers.port,
                "last_seq": context.journal.last_seq,
                "incarnation": self._member.workers.incarnation,
                "members": context.peers.members,
                **self.basis(),
                "version": __version__,
                # The build names the running code; it is empty outside of a zipapp.
                "build": code.name.partition(".")[0] if code.suffix == ".pyz" else "",
            }
        )

    def _is_joining(self) -> bool:
        """Return whether this agent is of a removed or new node that has not been admitted yet."""
        context = self._context
        if context.life.finished.is_set():
            return False
        if not context.ballot.view.term:
            return True
        records = context.journal.records
        heard = [record["seq"] for record in records if record["node"] == context.node]
        return self._is_out() and (not heard or heard[-1] <= self._member.born_seq)

    def _is_out(self) -> bool:
        """Return whether the journal says that this node was removed from the job."""
        own = self._context.fold.state.nodes.get(self._context.node)
        return own is not None and own.status in ("removed", "failed")

    async def trust(self, args: Args) -> Answer:
        """Trust further authorities that the operator has made; the next connection counts. Raises Problem."""
        authorities.add(self.files.ca, str(args["ca"]))
        return Answer(self.basis())

    async def assign(self, args: Args) -> Answer:
        """Accept the coordinator that the launching supervisor names."""
        self._member.role.assign(args)
        return Answer({})

    async def introduce(self, args: Args) -> Answer:
        """Learn where the other agents listen: those that came back have other ports than this node knows."""
        self._context.peers.learn(args["members"], certain=True)
        return Answer({})

    async def make(self, args: Args) -> Items:
        """Make what the ranks need here, and stream what is being done; raises Problem.

        `tree`: for this version of the work tree, else for what is in place. It is known as ready afterwards.
        """
        context, version = self._context, str(args.get("tree") or "")
        runtime = context.runtime
        doing = asyncio.ensure_future(runtime.make(version))
        try:
            last = ""
            while not doing.done():
                runtime.changed.clear()
                said = runtime.saying(version)
                if said != last:
                    last = said
                    yield Answer({"said": said})
                changed = asyncio.ensure_future(runtime.changed.wait())
                await asyncio.wait({doing, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            await doing
        finally:
            doing.cancel()
        context.tree.look()
        await self._member.report_readiness()

    async def await_engine(self, args: Args) -> Answer:
        """Answer when the engine is up; raises Problem when it cannot be."""
        engine = self._member.workers.engine
        await engine.ready.wait()
        return Answer({**engine.facts, "nproc": self._member.workers.nproc()})

    async def _document(self) -> Status:
        context, view = self._context, self._context.ballot.view
        term, last_seq = context.journal.age
        extra: Status = {"node": context.node, "term": view.term, "journal_term": term, "last_seq": last_seq}
        try:
            status = await self._member.link.status()
        except Problem as problem:
            state = self._without_coordinator(context.fold.state)
            own: dict[str, Any] = {context.node: self._member.facts()}
            status = document(state, own, view.coordinator)
            plan = f"{problem.message}; {problem.hint}" if problem.hint else problem.message
            return {**status, **extra, "coordinator_reachable": False, "plan": plan}
        return {**status, **extra, "coordinator_reachable": True}

    def _without_coordinator(self, state: s.State) -> s.State:
        """Return what this node itself knows of a job whose coordinator is out of reach: no fact that may be old."""
        view = self._context.ballot.view
        nodes = dict(state.nodes)
        if view.coordinator in nodes:
            reason = f"cannot be reached from {self._context.node}"
            nodes[view.coordinator] = dataclasses.replace(nodes[view.coordinator], status="lost", reason=reason)
        state = dataclasses.replace(state, nodes=nodes)
        if state.phase == s.ENDED or state.generation < 0 or self._member.running is not None:
            return state
        return dataclasses.replace(state.with_killed(), phase=s.FORMING, alone_since=view.contact)

    async def status(self, args: Args) -> Answer | Items:
        """Answer with the status document; `pieces`: as a stream of its pieces."""
        status = await self._document()
        return in_pieces(status) if args.get("pieces") else Answer(status)

    async def watch(self, args: Args) -> Items:
        """Stream the status document whenever it changed; `steps`: of a large job in pieces, and mostly the steps."""
        last: object = None
        sent = 0.0
        while True:
            coordinator = self._member.role.coordinator
            changed = coordinator.changed if coordinator is not None else None
            status = await self._document()
            now, size = time.monotonic(), max(status["world_size"] or 0, len(status["nodes"]))
            is_large = size > LARGE_RANKS and bool(args.get("steps"))
            seen = essence(status) if is_large else status
            if seen != last or now - sent > (WHOLE_RANK_S * size if is_large else WATCH_MAX_S):
                last, sent = seen, now
                for piece in pieces(status) if args.get("steps") else ({"status": status},):
                    yield Answer(piece)
            elif is_large:
                yield Answer({"steps": steps_of(status), "generation": status["generation"]})
            if self._context.life.finished.is_set() and status["state"] in ENDED_STATES:
                return
            await asyncio.sleep(watch_pause(size))
            with contextlib.suppress(asyncio.TimeoutError):
                waiting = changed.wait() if changed is not None else self._context.journal.wait_change(WATCH_MAX_S)
                await asyncio.wait_for(waiting, WATCH_MAX_S)

    async def events(self, args: Args) -> Items:
        """Stream journal records after `since`; with `follow` until the job is over."""
        if not args.get("follow"):
            async for item in super().events(args):
                yield item
            return
        async for record in self._context.journal.follow(int(args.get("since", 0))):
            yield Answer({"event": public(record)})

    async def promote(self, args: Args) -> Answer:
        """Let this node ask for votes, because an operator asks for it; raises Problem when it does not get them.

        `force`: also without votes; then `given_up` are the nodes that the operator declares dead. A coordinator that
        waits for too many nodes continues without those (`went_on`).
        """
        role, election = self._member.role, self._member.election
        given_up = args.get("given_up", ())
        if not role.is_held:
            refusal = await election.stand(given_up=given_up)
            if refusal and args.get("force"):
                refusal = await election.stand(force=True, given_up=given_up)
            if refusal:
                raise Problem("election", refusal)
        went_on = role.is_short()
        role.give_up(given_up)
        term = self._context.ballot.view.term
        return Answer({"term": term, "coordinator": self._context.node, "went_on": went_on})

    async def stacks(self, args: Args) -> Answer:
        """Answer with the Python stacks of this node's live ranks."""
        return await self._ask_engine("stacks", {"ranks": args.get("ranks")})

    async def why(self, args: Args) -> Answer:
        """Sample this node's ranks, and answer with what their time went to."""
        sampling = self._member.workers.sampling
        generation, windows = await sampling.ask()
        return Answer({"generation": generation, "windows": windows, "off": sampling.off})

    async def signal(self, args: Args) -> Answer:
        """Send a signal to ranks of this node, by the pids that the operator saw; raises Problem."""
        pids, name = args["pids"], str(args["signal"])
        refused = (await self._ask_engine("signal", {"pids": pids, "signal": name})).data["refused"]
        sent = sorted(int(rank) for rank in pids if rank not in refused)
        if sent:
            fact = {"ranks": sent, "signal": name, "operator": args.get("operator")}
            # The signal is sent whether or not the coordinator can be reached.
            with contextlib.suppress(Problem):
                await self._member.link.ask("signalled", fact)
        return Answer({"refused": refused})

    async def keep(self, args: Args) -> Answer:
        """Save stacks and flight records of ranks next to their logs; raises Problem."""
        return await self._ask_engine("keep", {"ranks": args.get("ranks")})

    async def _ask_engine(self, op: str, args: Args) -> Answer:
        """Return the engine's answer; raises Problem when it does not answer."""
        try:
            return Answer(await self._member.workers.engine.call(op, args))
        except (WireError, asyncio.TimeoutError) as error:
            raise Problem("engine", f"the engine on {self._context.node} did not answer: {error}") from error

    async def exit(self, args: Args) -> Answer:
        """End this agent: the launch it belongs to was given up."""
        context = self._context
        needed = context.ballot.view.term and not self._is_out()
        if needed and not context.life.finished.is_set():
            raise Problem("running", "this job has a coordinator: stop it instead")
        context.life.finish("its operator asked for it", linger=False)
        return Answer({})

    async def over(self, args: Args) -> Answer:
        """End this agent: the job ended while it was cut off, as files of other nodes show; raises Problem.

        `term`, `seq`: of the journal with the end; it must be newer than ours.
        """
        context = self._context
        if context.life.finished.is_set() or not self._is_alone():
            raise Problem("running", f"{context.node} learns of the end from its coordinator")
        if (int(args["term"]), int(args["seq"])) <= (context.journal.last_term, context.journal.last_seq):
            raise Problem("stale", f"the journal of {context.node} is newer")
        context.life.finish("the job ended while this node was cut off", linger=False)
        return Answer({})

    def _is_alone(self) -> bool:
        """Return whether this node has no coordinator any more, and is not one that holds its group."""
        coordinator = self._member.role.coordinator
        if coordinator is not None:
            return coordinator.is_short()
        return self._member.link.channel is None and member.lease_over(self._context.ballot.view, clocks.now())

    async def attach(self, args: Args) -> Answer:
        """Note an operator, until this connection ends."""
        self._operator = {"operator": str(args["operator"]), "mode": str(args.get("mode", "watch"))}
        await self._member.note_operator(self, **self._operator)
        return Answer({})

    async def look(self, node: str, channel: Channel | None, args: Args) -> Answer | Items:
        """Answer another node, for an operator who is connected there; raises Problem."""
        op, other = str(args["op"]), self._context.fold.state.nodes.get(node)
        if op not in LOOKS or (other is not None and other.status == "removed"):
            raise Problem("refused", f"{self._context.node} does not answer {op[:40]!r} to {node}")
        return await self.handle(op, args["args"], b"")

    @property
    def is_attended(self) -> bool:
        """Whether an operator has attached on this connection."""
        return self._operator is not None

    async def close(self) -> None:
        """Give back what a half-done sync holds."""
        await self._trees.leave()


def watch_pause(ranks: int) -> float:
    """Return the least number of seconds between two documents of a job with this many ranks."""
    return max(min(WATCH_MAX_S, max(WATCH_MIN_S, WATCH_RANK_S * ranks)), LARGE_RANK_S * ranks)


def essence(status: Status) -> object:
    """Return what an operator sees at once when it changes: all but how far ranks are, and what they use."""
    states = [
        (node["name"], node["state"], node["reason"], node["group_rank"], [rank["state"] for rank in node["ranks"]])
        for node in status["nodes"]
    ]
    return {**status, "nodes": states, "last_seq": 0}


def steps_of(status: Status) -> dict[str, list[object]]:
    """Return step, age of the last output and lag of each rank."""
    return {
        str(rank["rank"]): [rank["step"], rank["last_output_age_s"], (rank["progress"] or {}).get("lag")]
        for node in status["nodes"]
        for rank in node["ranks"]
    }


async def _let_silent_go(life: Life, channel: Channel) -> None:
    """Once the agent ends, wait for this operator only while somebody answers.

    A connection cut without a word stays open here for as long as TCP tries to reach the other side.
    """
    await life.finished.wait()
    while await _is_alive(channel):
        await within(channel.closed, ASK_S)
    if channel.closed.is_set():
        return
    log.info("an operator has not answered for %.0f s: not waiting for it", ANSWER_S)
    life.detach(channel)
    await channel.close()


async def _is_alive(channel: Channel) -> bool:
    """Return whether the other side answers: a supervisor refuses every request, which is a sign of life."""
    try:
        await channel.call("identity", timeout=ANSWER_S)
    except CallFailed:
        return True
    except (WireError, asyncio.TimeoutError):
        return False
    return True


async def serve_operators(context: Context, member_loop: MemberLoop, relay: Relay) -> asyncio.AbstractServer:
    """Answer supervisors on the job's unix socket, and those of other nodes through these."""
    member_loop.serve("look", AgentRequests(context, member_loop).look)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests = AgentRequests(context, member_loop, relay)
        channel = Channel(reader, writer, requests.handle)
        context.life.attach(channel)
        watch = asyncio.ensure_future(_let_silent_go(context.life, channel))
        try:
            await channel.run()
            if requests.is_attended:
                await member_loop.note_operator(requests)
        finally:
            watch.cancel()
            context.life.detach(channel)
            await requests.close()

    return await serve_unix(context.files.sock, connected)
