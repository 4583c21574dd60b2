"""How the traffic and the processor time of a job grow with its hosts: N hosts with 8 ranks each, in one process.

In: the agents' own code, a clock that only the simulation moves, a network in memory that carries real frames. Out: a
Report: for each thing that happens to the job, what its coordinator and one of its members had to do; of a scene that
does not end, its seed and the state of every member.

The agents on the first host (the coordinator) and on the last one (the member) are whole, except for their engines.
The others are whole but for their connection to the coordinator, which reads each frame that is the same for all of
them once, and for their journals, which have no files. Nothing is encrypted, and no garbage is collected meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import heapq
import inspect
import json
import logging
import os
import random
import re
import secrets
import selectors
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

from remote_agent.agent.agent import Agent
from remote_agent.agent.context import Context, Life
from remote_agent.agent.coordinator_shell import Coordinator
from remote_agent.agent.member_loop import MemberLoop
from remote_agent.agent.requests import AgentRequests
from remote_agent.agent.tree_requests import JobTree
from remote_agent.base import clocks
from remote_agent.base.paths import Home, JobFiles
from remote_agent.base.tasks import CANCEL_AGAIN_S, Tasks
from remote_agent.coordinator import replay
from remote_agent.coordinator.journal import Journal
from remote_agent.election import peers
from remote_agent.election.ballot import Ballot
from remote_agent.election.member import Member
from remote_agent.wire import FIRST_TERM, Answer, Args, Channel, ChannelClosed, Frame, Handler, JobSpec, NodeSpec
from remote_agent.wire.channel import CallFailed, refuse
from remote_agent.wire.documents import WINDOW_S
from remote_agent.wire.events import EventType
from remote_agent.wire.frames import LENGTHS_BYTES, decode, encode, sizes
from supervisor.inventory import load
from supervisor.link.hub import Hub
from supervisor.logs.pages import Part, rows_before
from supervisor.logs.rows import LogLine
from supervisor.ssh.answers import read_answer
from supervisor.tui import looks, model
from supervisor.tui.rows.tables import SortOrder, node_columns, rank_columns
from supervisor.tui.rows.tables import Table as Grid
from tests.bench.report import NEVER, Report, Table

if TYPE_CHECKING:
    from remote_agent.wire.answers import SampledRanks
    from remote_agent.wire.documents import RankWindow

RANKS = 8
HOSTS = tuple(int(hosts) for hosts in os.environ.get("SUPERVISOR_SCALE_HOSTS", "64,256,1000").split(","))
# A scenario that takes more of the processor than this is given up.
LIMIT_S = float(os.environ.get("SUPERVISOR_SCALE_LIMIT_S", "60"))
# A task that has been cancelled as often as this does not end.
CANCELS = 20
# Whatever hosts do at once in a real job, they do within this time.
SPREAD_S = 0.5
# Ranks have formed their process group by then.
STEPS_AFTER_S = 3.0
OPERATORS = 3
# How long ranks wait until it is a hang, and how many collectives a pulse tells of.
PATIENCE_S = 4.0
CAME = 128
# A screen has this many rows, and has fetched as many of the log from each node.
ROWS_SHOWN = 48
ROWS_OF_A_NODE = 256
EPOCH_NS = 1_800_000_000 * 10**9
MEMORY = Path("/dev/shm")
PORT = 7000
_CONNECT = inspect.signature(peers.connect)
_OP = re.compile(rb'"op":"(\w+)"')
_host: contextvars.ContextVar[str] = contextvars.ContextVar("host", default="")
"""The host whose work is done."""


TRACEBACK = """Traceback (most recent call last):
  File "/home/user/job/train.py", line 212, in <module>
    main()
  File "/home/user/job/train.py", line 97, in main
    loss = step(model, next(batches))
"""


class TooLong(Exception):
    """A scenario has taken more of the processor than it may."""


class Stuck(AssertionError):
    """Nothing will ever happen again, or not what was waited for."""


class _Jump(selectors.SelectSelector):
    """A selector that lets the time pass instead of waiting."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("nothing will ever happen again")
        self.now += max(0.0, timeout)
        return []


class _Charging:
    """A handle whose processor time is charged to the host of its context."""

    def _run(self) -> None:
        handle: Any = self
        run: Any = super()
        handle._loop.charge(handle._context.get(_host, ""), run._run)


class _Handle(_Charging, asyncio.Handle):
    """Such a handle."""


class _Timer(_Charging, asyncio.TimerHandle):
    """The same for a timer."""


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer when nothing is ready."""

    def __init__(self) -> None:
        self.jump = _Jump()
        super().__init__(self.jump)
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.deadline = float("inf")
        self.failures: list[str] = []
        self.set_exception_handler(lambda loop, context: self.failures.append(str(context)))

    def time(self) -> float:
        return self.jump.now

    def charge(self, host: str, work: Callable[[], object]) -> None:
        """Run something, and charge its processor time to a host; raises TooLong."""
        begun = time.thread_time()
        work()
        ended = time.thread_time()
        self.spent[host] += ended - begun
        if ended > self.deadline:
            self.deadline = float("inf")
            raise TooLong

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        loop: Any = self
        loop._ready.append(_Handle(callback, args, self, context))
        return loop._ready[-1]

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        loop: Any = self
        timer: Any = _Timer(when, callback, args, self, context)
        heapq.heappush(loop._scheduled, timer)
        timer._scheduled = True
        return timer


@dataclass
class Traffic:
    """What one host has sent and received."""

    sent: float = 0
    sent_bytes: float = 0
    received: float = 0
    received_bytes: float = 0


class _Wire:
    """One end of a connection, in place of an asyncio.StreamWriter."""

    def __init__(self, network: Network, here: str, there: str) -> None:
        self._network, self.here, self.there = network, here, there
        self.deliver: Callable[[bytes], object] = lambda data: None
        """Takes what the other end has written."""
        self.finish: Callable[[], object] = lambda: None
        """Hears that the connection has ended."""
        self.peer = self
        self.is_over = False
        self.is_unused = False
        """Its first request is yet to be noted."""
        self.transport = self

    def write(self, data: bytes) -> None:
        if self.is_unused:
            self._network.asked[_op_of(data)] += 1
        self.is_unused = False
        if not self.is_over and self._network.carries(self.here, self.there, data):
            self.peer.deliver(data)

    async def drain(self) -> None:
        if self.is_over:
            raise ConnectionResetError

    def close(self) -> None:
        # A host without power says nothing any more, and hears nothing.
        for end in (self,) if self._network.is_dark(self.here, self.there) else (self, self.peer):
            if not end.is_over:
                end.is_over = True
                end.finish()
                self._network.wires[end.here].discard(end)

    abort = close

    async def wait_closed(self) -> None:
        """It is closed at once."""


def _op_of(data: bytes) -> str:
    """Return what a frame asks for."""
    text = data[LENGTHS_BYTES:][:80]
    if sizes(data[:LENGTHS_BYTES]).is_packed:
        text = zlib.decompressobj().decompress(data[LENGTHS_BYTES:], 80)
    found = _OP.search(text)
    return found[1].decode() if found else ""


class Network:
    """Connections between hosts: what is written arrives at once, unless a host has no power."""

    def __init__(self) -> None:
        self.agents: dict[str, Node] = {}
        """The agents that listen, by address."""
        self.traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self.asked: Counter[str] = Counter()
        """The connections by their first request."""
        self.wires: defaultdict[str, set[_Wire]] = defaultdict(set)
        self.whole: frozenset[str] = frozenset()
        """The hosts of which nothing is made cheaper."""
        self.dark: set[str] = set()
        """The hosts without power, by name and by address."""

    def is_dark(self, here: str, there: str) -> bool:
        """Return whether one of two hosts, by name or address, has no power."""
        return here in self.dark or there in self.dark

    def carries(self, here: str, there: str, data: bytes) -> bool:
        """Count the frames that one host sends to another; returns whether they arrive."""
        if self.is_dark(here, there):
            return False
        frames, at = 0, 0
        while at < len(data):
            size = sizes(data[at : at + LENGTHS_BYTES])
            at += LENGTHS_BYTES + size.header + size.body
            frames += 1
        self.traffic[here].sent += frames
        self.traffic[here].sent_bytes += len(data)
        self.traffic[there].received += frames
        self.traffic[there].received_bytes += len(data)
        return True

    def pair(self, here: str, there: str) -> tuple[_Wire, _Wire]:
        """Return both ends of a new connection."""
        ends = _Wire(self, here, there), _Wire(self, there, here)
        for end, other in zip(ends, reversed(ends), strict=True):
            end.peer = other
            self.wires[end.here].add(end)
        return ends

    async def connect(self, *args: Any, **kwargs: Any) -> Any:
        """Return a channel to a node, in place of peers.connect."""
        asked = _CONNECT.bind(*args, **kwargs).arguments
        here, address, handler = _host.get(), asked["address"], asked["handler"]
        if self.is_dark(here, address):
            await asyncio.sleep(peers.CONNECT_TIMEOUT_S)
            raise peers.PeerUnreachable(f"{address}: no answer")
        there = self.agents.get(address)
        if there is None:
            raise peers.PeerRefused(f"{address}: connection refused")
        wire, other = self.pair(here, there.name)
        wire.is_unused = True
        there.scope.copy().run(there.accept, here, other)
        if handler is not refuse and here not in self.whole:
            return Light(wire, handler)
        return Channel(read_from(wire), cast("Any", wire), handler)

    async def is_dead(self, address: str, port: int) -> bool:
        """Return whether nothing listens there, in place of peers.is_dead."""
        return address not in self.agents and address not in self.dark


def read_from(wire: _Wire) -> asyncio.StreamReader:
    """Return a reader of what arrives at one end of a connection."""
    reader = asyncio.StreamReader()
    wire.deliver, wire.finish = reader.feed_data, reader.feed_eof
    return reader


@functools.lru_cache(maxsize=512)
def _frame(data: bytes) -> Frame:
    size = sizes(data[:LENGTHS_BYTES])
    end = LENGTHS_BYTES + size.header
    return decode(size, data[LENGTHS_BYTES:end], data[end : end + size.body])


class Light:
    """A member's end of its connection to the coordinator: a Channel at a fraction of the cost."""

    def __init__(self, wire: _Wire, handler: Handler) -> None:
        self._wire, self._handler = wire, handler
        self.closed = asyncio.Event()
        self.ended = False
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._count = 0
        loop, scope = asyncio.get_running_loop(), contextvars.copy_context()
        wire.deliver = lambda data: loop.call_soon(self._take, data, context=scope)
        wire.finish = lambda: loop.call_soon(self._finish, context=scope)

    def _take(self, data: bytes) -> None:
        at = 0
        while at < len(data) and not self.closed.is_set():
            size = sizes(data[at : at + LENGTHS_BYTES])
            end = at + LENGTHS_BYTES + size.header + size.body
            header = _frame(data[at:end] if at or end < len(data) else data).header
            at = end
            if "re" not in header:
                self._handle(header["op"], header["args"])
            elif (future := self._calls.pop(header["re"], None)) is not None and not future.done():
                future.set_result(Answer(header.get("ok")))

    def _handle(self, op: str, args: Args) -> None:
        try:
            cast("Any", self._handler(op, args, b"")).send(None)
        except StopIteration:
            return
        raise AssertionError(f"what takes the notice {op} waits for something")

    def _finish(self) -> None:
        self.ended = True
        self.closed.set()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ChannelClosed("it is closed"))
                future.exception()

    async def run(self) -> None:
        try:
            await self.closed.wait()
        finally:
            self._wire.close()

    async def call(self, op: str, args: Mapping[str, object], timeout: float = 30.0) -> Answer:
        self._count += 1
        future = self._calls[self._count] = asyncio.get_running_loop().create_future()
        self._wire.write(encode({"id": self._count, "op": op, "args": args}))
        answer: Answer = await asyncio.wait_for(future, timeout)
        if answer.data is None:
            raise CallFailed("refused", op)
        return answer

    async def notify(self, op: str, args: Mapping[str, object]) -> None:
        self._wire.write(encode({"op": op, "args": args}))

    async def close(self) -> None:
        self._wire.close()


class Engine:
    """A node's engine that starts nothing: it says what one with 8 ranks says."""

    replaceable = is_superseded = has_served = False
    has_started = True
    problem, runs_in = None, ""
    facts = versions = {"torch": "2.13.0", "cuda": "12.9", "nccl": "2.27.5", "python": "3.11.7"}  # noqa: RUF012
    standby = {"state": "ready", "pid": 4242, "modules": 1930, "mb": 612}  # noqa: RUF012

    def __init__(self, job: Job, number: int, notice: Any) -> None:
        self.job, self._notice = job, notice
        # By the golden ratio, any few nodes are spread over the whole time.
        self.pace_s = 0.02 + SPREAD_S * (number * 0.618034 % 1.0)
        self.ready, self.ended = asyncio.Event(), asyncio.Event()
        self.ranks: list[dict[str, int]] = []
        self.generation = -1
        self.begun = 0.0
        self._sampled = 0
        self._tasks = Tasks()

    async def run(self) -> str:
        self.ready.set()
        await self.ended.wait()
        return "closed"

    async def renew(self, lease_s: float) -> None:
        """Its lease never ends."""

    async def close(self) -> None:
        self.ended.set()
        await self._tasks.close()

    def nproc(self, asked: str) -> int:
        return int(asked)

    async def call(self, op: str, args: Args, timeout: float = 30.0) -> Any:
        """Answer an order."""
        await asyncio.sleep(self.pace_s)
        if op == "prepare":
            return {"port": 29500}
        if op == "go":
            self.generation = int(args["generation"])
            first, self.begun = int(args["base_rank"]), clocks.now()
            each = range(int(args["local_world_size"]))
            self.ranks = [{"rank": first + one, "local_rank": one, "pid": 5000 + first + one} for one in each]
            self._tasks.spawn(self._begin(int(args["generation"])), "begin")
            return {"ranks": self.ranks, "notice": None, "cold": ""}
        if op == "pulse":
            return {"ranks": {str(one["rank"]): _pulse(self.job, one["rank"]) for one in self.ranks}}
        if op == "sample":
            return self._windows(int(args["shift_ns"]))
        exits = [{**_exit(rank), "t_ns": time.time_ns(), "asked_ns": time.time_ns()} for rank in self.ranks]
        self.ranks = []
        for one in exits:
            await self._notice("exited", {"generation": int(args["generation"]), "exit": one})
        return {"exits": exits}

    def _windows(self, shift_ns: int) -> SampledRanks:
        """Return the window that has just ended, as a rank has it that trains."""
        ended = int((time.time_ns() + shift_ns) / 1e9 / WINDOW_S) - 1
        if ended <= self._sampled:
            return {"windows": {}, "off": {}}
        self._sampled = ended
        return {"windows": {str(ended): {str(one["rank"]): _window() for one in self.ranks}}, "off": {}}

    async def fail(self, error: str) -> None:
        """Report that all ranks have failed, each with this exception."""
        await asyncio.sleep(self.pace_s)
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            message = error.format(rank=rank["rank"])
            trace = TRACEBACK + message
            failed = {"code": 1, "signal": None, "stopped_by_us": False, "tail": trace, "t_ns": time.time_ns()}
            document = {"message": message, "callstack": trace, "timestamp_ns": time.time_ns()}
            one = {**_exit(rank), **failed, "error": document, "asked_ns": None}
            await self._notice("exited", {"generation": self.generation, "exit": one})

    async def _begin(self, generation: int) -> None:
        await asyncio.sleep(0.1)
        for op in ("main", "grouping", "grouped"):
            for rank in list(self.ranks):
                about = {"generation": generation, "rank": rank["rank"]}
                times = {"grouping": {}, "main": {"t_ns": time.time_ns()}}
                await self._notice(op, {**about, **times.get(op, {"t_ns": time.time_ns(), "took_s": 0.31})})
            await asyncio.sleep(self.pace_s)


def _exit(rank: Mapping[str, int]) -> dict[str, Any]:
    """Return how a rank ends that is stopped."""
    how: dict[str, Any] = {
        "code": None,
        "signal": "SIGTERM",
        "core": False,
        "sent": None,
        "stopped_by_us": True,
        "notes": [],
    }
    said = {"text": f"step=1200 rank={rank['rank']} loss=2.3471 lr=0.0003 tok/s=96,021", "line": 1200}
    left = {"error": None, "tail": "", "stderr_lines": 12, "said": said, "nccl": ""}
    return {**rank, **how, **left, "over_ns": None}


def _window() -> RankWindow:
    """Return a window of a rank that trains and computes alone for most of its time."""
    shares = {"forward": 3.1, "backward": 4.2, "optimizer": 0.9, "wait": 1.1, "input": 0.4, "script": 0.3}
    sites = [(phase, "train.py", f"{phase}_step", 40 + at, each) for at, (phase, each) in enumerate(shares.items())]
    return {"looks": 195, "phases": {phase: (each, 0.9 * each) for phase, each in shares.items()}, "disk_s": 0.0,
            "delay_s": 0.02, "throttled_s": 0.0, "faults": 0, "cuda": False, "taken": None, "sites": sites,
            "links": [(f"10.0.0.{end}", f"10.0.1.{end}", 9.4, 0.25) for end in (1, 2)]}  # fmt: skip


def _pulse(job: Job, rank: int) -> dict[str, Any]:
    """Return the pulse of a rank that computes, or that waits for the first one, as NCCL's flight record has it."""
    now = clocks.now()
    count, waits = int((job.hang_at or now) * 40), job.hang_at is not None and rank > 0
    # The first rank has not called the collective in which the others wait.
    count -= job.hang_at is not None and not waits
    called = [25_000 * one + rank % 7 for one in range(CAME)]
    came = {"first": count - CAME, "t_us": int(count / 40 * 1e6), "later_us": called}
    # The members of the first group are not listed: they are all ranks.
    group: dict[str, Any] = {"ranks": None, "last": count, "came": {**came, "done_us": called}}
    if waits and job.hang_at is not None:
        group.update(
            seq=count, op="all_reduce", sizes="[[[4194304]], [\"BFloat16\"]]", age_s=round(now - job.hang_at, 1),
            timeout_s=600.0, backend="nccl", calls=[],
        )  # fmt: skip
    moved = job.hang_at or now
    where = {"stack": "5e1c9a7d20b4f386", "where": "train.py:88 in step", "calls": "backward of _tensor.py"}
    return {
        "t": now, "state": "S" if job.hang_at else "R", "cpu_s": round(0.9 * moved, 2), "io": int(moved), "net": None,
        "sleeps": int(moved), "deaf": False, **where, "script": [["train.py", 120, "main"], ["train.py", 88, "step"]],
        "parked": False, "over": False, "inside": None, "frame": None, "groups": {"0/nccl": group}, "source": None,
        "ended": None, "children": [], "ras": [], "unanswered": [], "reached": [], "addresses": [],
    }  # fmt: skip


class Nothing:
    """A part of an agent that has nothing to do here."""

    requests: Mapping[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None

    async def finish(self, generation: int) -> None:
        """There is no log to finish."""


class Usage(Nothing):
    """What the ranks of one node print, and what they and the node use: its logs and its vitals."""

    def __init__(self, node: Node, number: int) -> None:
        self._node = node
        self._random = random.Random(number)

    def progress(self, generation: int) -> dict[int, dict[str, Any]]:
        """Return what ranks print that make two steps a second."""
        engine, any_of = self._node.engine, self._random.random
        step = int(2 * ((engine.job.hang_at or clocks.now()) - engine.begun - STEPS_AFTER_S))
        if step < 1:
            return {}
        now = time.time_ns()
        return {
            rank["rank"]: {
                "step": step, "total": 100_000, "last_output_ns": now - int(5e8 * any_of()), "said": None,
                "warning": None,
                "first_step_ns": now - step * 500_000_000, "saved": step // 500 * 500,
                "loss": 2 + (31 * rank["rank"] + 17 * step) % 1000 / 1000, "lr": 0.0003,
                "grad_norm": round(any_of(), 4), "rate": round(96_000 + 1000 * any_of(), 1), "unit": "tok/s",
                "steps_s": round(2 + 0.1 * any_of(), 3),
            }
            for rank in engine.ranks
        }  # fmt: skip

    def take_losses(self, generation: int) -> dict[int, list[tuple[int, str]]]:
        """Return the losses since the last call."""
        seen = self.progress(generation).items()
        return {rank: [(one["step"], f"{one['loss']:.4f}")] for rank, one in seen}

    def report(self, workers: Mapping[int, int]) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
        """Return what a node with eight GPUs uses."""
        any_of, gb = self._random.random, 1 << 30
        gpus = [
            {"age_s": 0.4, "index": number, "name": "NVIDIA H100 80GB HBM3", "use": round(90 + 9 * any_of()),
             "mem_used": int(71 * gb + gb * any_of()), "mem_total": 80 * gb, "temp": round(50 + 9 * any_of()),
             "power": round(600 + 90 * any_of(), 1), "power_limit": 700.0, "clock": 1980, "ecc": 0, "xid": None}
            for number in range(RANKS)
        ]  # fmt: skip
        node = {
            "age_s": 0.4, "every_s": 2.0, "cpu": round(20 + 9 * any_of(), 1), "mem_used": int(300 * gb * any_of()),
            "mem_total": 2048 * gb, "disk_free": int(900 * gb * any_of()), "disk_total": 3500 * gb,
            "shm_free": 1000 * gb, "shm_total": 1024 * gb, "net_in": int(9e8 * any_of()),
            "net_out": int(9e8 * any_of()), "gpus": gpus,
        }  # fmt: skip
        ranks = {
            rank: {
                "age_s": 0.4,
                "cpu": round(99 + any_of(), 1),
                "rss": int(9 * gb + gb * any_of()),
                "gpu": rank % RANKS,
            }
            for rank in workers
        }
        return node, ranks


class MemoryJournal(Journal):
    """A journal without a file."""

    def _write(self, records: Sequence[Any]) -> None:
        """Nothing is written."""

    def _replace(self, records: Sequence[Any]) -> None:
        """Nothing is written."""

    async def sync(self) -> None:
        """Nothing is written."""


class SharedFold(replay.Fold):
    """What a journal shows, looked up once for all nodes that have the same one."""

    known: dict[tuple[int, int], Any]

    @property
    def state(self) -> Any:
        at = self._journal.age
        if at not in self.known:
            self.known[at] = super().state
        return self.known[at]


class FewPeers(peers.Peers):
    """The other agents, whose addresses all nodes share: one copy for each would be N * N."""

    def learn(self, members: Mapping[str, Any], *, certain: bool = False) -> None:
        """All addresses are known."""


def address_of(name: str) -> str:
    """Return the address of a host, by its name, which is n and its number."""
    number = int(name[1:])
    return f"10.20.{number // 256}.{number % 256}"


class Node(Agent):
    """An agent of the simulation; one that comes back has the journal and the disk of the one before."""

    def __init__(self, job: Job, number: int, before: Node | None = None) -> None:
        self.name = f"n{number}"
        self.scope = contextvars.copy_context()
        self.scope.run(_host.set, self.name)
        self._tasks, self._peers = Tasks(), set()
        self._network = job.network
        whole, spec = self.name in job.network.whole, job.spec
        files = JobFiles(Home(job.folder), self.name)
        if whole:
            files.root.mkdir(parents=True, exist_ok=True)
        journal = before.context.journal if before else (Journal if whole else MemoryJournal)(files.events)
        fold = (replay.Fold if whole else SharedFold)(spec, journal, self.name)
        if isinstance(fold, SharedFold):
            fold.known = job.folds
        others = (peers.Peers if whole else FewPeers)(files, self.name, "", self._tasks)
        others.members = job.members if isinstance(others, FewPeers) else dict(job.members)
        me = Member(me=self.name, node_timeout=spec.node_timeout, contact=clocks.now())
        ballot = Ballot(files.term, me)
        if before is not None:
            ballot.disk, ballot.view = before.context.ballot.disk, replace(me, term=before.context.ballot.view.term)
        usage, nothing = cast("Any", Usage(self, number)), cast("Any", Nothing())
        self.context = Context(
            files=files, spec=spec, node=self.name, life=Life(), journal=journal, fold=fold, logs=usage,
            history=nothing, tree=JobTree(files.home, None), runtime=nothing, vitals=usage, peers=others,
            ballot=ballot, snapshots=nothing,
        )  # fmt: skip
        self.member = MemberLoop(self.context, lambda notice: cast("Any", Engine(job, number, notice)))

    @property
    def engine(self) -> Engine:
        """The engine, which starts nothing."""
        return cast("Engine", self.member.workers.engine)

    def begin(self, members: Mapping[str, Args] | None = None) -> None:
        """Listen, and take part; `members`: under the first of them as the coordinator, as a launch names it."""
        self._network.agents[address_of(self.name)] = self
        self.member.start()
        if members is not None:
            named = {"node": "n1", **members["n1"]}
            self.member.role.assign({"term": FIRST_TERM, "coordinator": named, "members": members})

    def accept(self, name: str, wire: _Wire) -> None:
        """Serve a connection of another node."""
        self._tasks.spawn(self._accept(_peer(name), read_from(wire), cast("Any", wire)), "a connection")

    def request(self, op: str) -> None:
        """Ask the coordinator for something, as an operator does."""
        self.scope.copy().run(self._tasks.spawn, self.member.link.ask(op, {"operator": "operator1"}), op)

    def attend(self, wire: _Wire) -> None:
        """Serve an operator's connection."""
        channel = Channel(read_from(wire), cast("Any", wire), AgentRequests(self.context, self.member).handle)
        self._tasks.spawn(channel.run(), "an operator")

    def state(self) -> str:
        """Return its part in the job, for whoever must see why nothing happens."""
        view, member, now = self.context.ballot.view, self.member, clocks.now()
        role, election = member.role.coordinator, member.election
        part = "coordinator" if role is not None else "candidate" if election.standing.locked() else "member"
        return " ".join((
            f"{self.name}: {part} in term {view.term}, voted for {view.voted}, follows {view.coordinator},",
            f"heard {now - view.contact:.1f} s ago, {'connected' if member.link.channel else 'not connected'},",
            f"runs {member.running}, journal {self.context.journal.age},",
            f"phase {role.state.phase} without {sorted(role.state.waiting)}," if role is not None else "",
            f"waits for {election.trouble or 'nothing'}",
        ))  # fmt: skip

    async def die(self) -> None:
        """End at once: the kernel closes all connections."""
        self._network.agents.pop(address_of(self.name), None)
        for wire in list(self._network.wires[self.name]):
            wire.close()
        await self.member.close()
        await self._tasks.close()


def _peer(name: str) -> Any:
    """Return whom the certificate of a node names."""
    certified = getattr(peers, "Certified", None)
    return certified(name, EPOCH_NS) if certified else name


@dataclass
class Figures:
    """What one scenario took: messages and bytes by host, processor seconds by host."""

    virtual_s: float
    traffic: Mapping[str, Traffic]
    spent: Mapping[str, float]
    asked: Mapping[str, int]
    """The new connections by their first request."""
    elected_s: float = 0.0

    def per_second(self) -> Figures:
        """Return what a second took."""
        each = self.virtual_s
        traffic = {
            host: Traffic(*(value / each for value in astuple(one)))  # a second's share is no whole number
            for host, one in self.traffic.items()
        }
        return Figures(1.0, traffic, {host: spent / each for host, spent in self.spent.items()}, self.asked)


class Log(logging.Handler):
    """The errors that agents log: there must be none."""

    def __init__(self, failures: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._failures = failures

    def emit(self, record: logging.LogRecord) -> None:
        self._failures.append(logging.Formatter().format(record))


class Job:
    """A job on simulated hosts."""

    elected_s = 0.0
    """How long it has taken until there was another coordinator."""
    hang_at: float | None = None
    """The time since which the first rank has not moved."""

    def __init__(self, hosts: int, folder: Path, *, tells_members: bool = True, seed: int | None = None) -> None:
        """`tells_members`: whether the coordinator tells all nodes where each new one listens.

        `seed`: of what nodes leave to chance, None for another one each time; the order of sets is not in it.
        """
        self.hosts, self.folder, self._tells_members = hosts, folder, tells_members
        self.seed = secrets.randbelow(10**9) if seed is None else seed
        self._chance = random.getstate()
        names = [f"n{number}" for number in range(1, hosts + 1)]
        nodes = tuple(NodeSpec(name, address_of(name), str(RANKS)) for name in names)
        self.spec = JobSpec(
            "scale", "train.py", nodes, min_nodes=hosts, max_nodes=hosts, max_restarts=9, hang_after=0.0, standby="off"
        )
        self.members: dict[str, Args] = {name: {"address": address_of(name), "port": PORT} for name in names}
        self.folds: dict[tuple[int, int], Any] = {}
        self.network = Network()
        self.network.whole = frozenset((names[0], names[-1]))
        self.loop = _Loop()
        self.nodes: dict[str, Node] = {}
        self._patches = contextlib.ExitStack()
        self._log = Log(self.loop.failures)

    def __enter__(self) -> Job:
        loop = self.loop
        asyncio.set_event_loop(loop)
        gc.collect()
        gc.disable()
        random.seed(self.seed)
        for place, name, value in (
            (clocks, "now", loop.time),
            (time, "monotonic", loop.time),
            (time, "time_ns", lambda: EPOCH_NS + int(loop.time() * 1e9)),
            (asyncio, "to_thread", _here),
            (peers, "connect", self.network.connect),
            (peers, "is_dead", self.network.is_dead),
        ):
            self._patches.enter_context(mock.patch.object(place, name, value))
        log = logging.getLogger("remote_agent")
        self._patches.enter_context(mock.patch.object(log, "handlers", [self._log]))
        self._patches.enter_context(mock.patch.object(log, "propagate", False))
        if not self._tells_members:
            self._patches.enter_context(mock.patch.object(Coordinator, "notify_all", _without_members))
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.deadline = time.thread_time() + LIMIT_S
        try:
            self.loop.run_until_complete(self._end())
        finally:
            for node in self.nodes.values():
                node.context.journal.close()
            self.loop.close()
            asyncio.set_event_loop(None)
            self._patches.close()
            random.setstate(self._chance)
            gc.enable()
            gc.collect()

    async def _end(self) -> None:
        """Cancel all tasks until there are none; raises Stuck.

        Once is not enough before Python 3.12, as `Tasks` says: a member whose wait has ended in this very moment keeps
        on looking for its coordinator. Nothing else takes time here, so that it would do so for ever.
        """
        left: set[asyncio.Task[Any]] = set()
        for _ in range(CANCELS):
            left = asyncio.all_tasks() - {cast("Any", asyncio.current_task())}
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
        raise Stuck(f"cancelled {CANCELS} times, and still there: {left}")

    def states(self) -> str:
        """Return the seed, and the state of every member that has power."""
        alive = [node.state() for node in self.nodes.values() if address_of(node.name) in self.network.agents]
        waiting = Counter(task.get_name() for task in asyncio.all_tasks(self.loop))
        tasks = ", ".join(f"{count} x {name}" for name, count in waiting.most_common() if not name.startswith("Task-"))
        return "\n".join([f"{self.hosts} hosts, seed {self.seed}, {self.loop.time():.2f} s", *alive, f"tasks: {tasks}"])

    # What happens

    def measure(self, act: Callable[[], Coroutine[Any, Any, None]]) -> Figures:
        """Let something happen, and return what it took; raises TooLong, Stuck."""
        loop, network = self.loop, self.network
        network.traffic.clear()
        network.asked.clear()
        loop.spent.clear()
        begun = loop.time()
        loop.deadline = time.thread_time() + LIMIT_S
        loop.run_until_complete(act())
        loop.deadline = float("inf")
        # The node looks at its journal when it asks who is next.
        last = self.nodes[f"n{self.hosts}"]
        loop.charge(last.name, lambda: last.context.fold.state)
        assert not loop.failures, loop.failures[0]
        return Figures(
            loop.time() - begun, dict(network.traffic), dict(loop.spent), dict(network.asked), self.elected_s
        )

    async def until(self, happens: Callable[[], bool], patience_s: float = 600.0) -> None:
        """Wait until something has happened; raises Stuck."""
        end = self.loop.time() + patience_s
        while not happens():
            if self.loop.time() > end:
                raise Stuck(f"it has not happened within {patience_s:g} s")
            await asyncio.sleep(0.05)

    async def up(self) -> None:
        """Launch the job, until all ranks have formed their process group."""
        for number in range(1, self.hosts + 1):
            node = self.nodes[f"n{number}"] = Node(self, number)
            # The last one, which is measured, comes in the middle.
            later = SPREAD_S * (0.5 if number == self.hosts else (number - 1) / self.hosts)
            self.loop.call_later(later, node.begin, self.members, context=node.scope.copy())
        await self._until_event(EventType.PROCESS_GROUP_UP)

    async def quiet(self, virtual_s: float = 10.0) -> None:
        """Let some time pass."""
        await asyncio.sleep(virtual_s)

    async def pulses(self) -> None:
        """Have the coordinator ask all ranks what they do, twice."""
        role = self._watch_hangs(PATIENCE_S)
        for _ in range(2):
            asked = role.state.watch.asked_at
            await self.until(lambda asked=asked: role.state.watch.asked_at > asked)  # type: ignore[misc]
            await self.until(lambda: not role.state.watch.asked)
        self._watch_hangs(0.0)

    async def hang(self) -> None:
        """Let all ranks wait for the first one, until the coordinator tells it."""
        self.hang_at = self.loop.time()
        self._watch_hangs(PATIENCE_S)
        await self._until_event(EventType.INCIDENT)
        self.hang_at = None
        await self._until_event(EventType.HANG_OVER)
        self._watch_hangs(0.0)

    def _watch_hangs(self, patience_s: float) -> Coordinator:
        role = self.nodes["n1"].member.role.coordinator
        assert role is not None
        role.state = replace(role.state, spec=replace(role.state.spec, hang_after=patience_s))
        return role

    async def lose(self, names: Sequence[str]) -> None:
        """Let agents die, until the others wait for them."""
        await asyncio.gather(*(self.nodes[name].die() for name in names))
        await self._until_event(EventType.JOB_DEGRADED)

    async def back(self, names: Sequence[str]) -> None:
        """Start agents again, those that live at once, until all ranks have formed their process group."""
        alive = [self.nodes[name] for name in names if address_of(name) in self.network.agents]
        await asyncio.gather(*(node.die() for node in alive))
        for place, name in enumerate(names):
            before = self.nodes[name]
            node = self.nodes[name] = Node(self, int(name[1:]), before)
            self.loop.call_later(SPREAD_S * place / len(names), node.begin, context=node.scope.copy())
        await self._until_event(EventType.PROCESS_GROUP_UP)

    async def cut(self, count: int) -> None:
        """Take the power of the first hosts, the coordinator's among them, until all others follow one of theirs."""
        names = [f"n{number}" for number in range(1, count + 1)]
        self.network.dark.update(names, map(address_of, names))
        await asyncio.gather(*(self.nodes[name].die() for name in names))
        others = [node.member.role for name, node in self.nodes.items() if name not in names]
        begun = self.loop.time()
        await self.until(lambda: any(role.is_held for role in others))
        self.elected_s = self.loop.time() - begun
        await self.until(lambda: any(len(role.connected) == len(others) - 1 for role in others))

    async def restart(self) -> None:
        """Restart as an operator asks for it."""
        self.nodes["n1"].request("restart")
        await self._until_event(EventType.PROCESS_GROUP_UP)

    async def fail(self, error: str) -> None:
        """Let all ranks fail, until the next group has formed its process group."""
        failing = [node.engine.fail(error) for node in self.nodes.values()]
        await asyncio.gather(*failing, self._until_event(EventType.PROCESS_GROUP_UP))

    async def watched(self, operators: int = OPERATORS, virtual_s: float = 4.0) -> None:
        """Let some time pass while operators watch the job through the coordinator's node."""
        coordinator = self.nodes["n1"]
        watching = [
            asyncio.ensure_future(self._watch(f"operator{number}", coordinator)) for number in range(1, operators + 1)
        ]
        await asyncio.sleep(virtual_s)
        for one in watching:
            one.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    async def _watch(self, operator: str, coordinator: Node) -> None:
        _host.set(operator)
        wire, other = self.network.pair(operator, coordinator.name)
        coordinator.scope.copy().run(coordinator.attend, other)
        channel = Channel(read_from(wire), cast("Any", wire))
        running = asyncio.ensure_future(channel.run())
        try:
            await channel.call("attach", {"operator": operator, "mode": "watch"})
            async for _ in channel.stream("watch", {"steps": True}):
                pass
        finally:
            wire.close()
            await running

    async def look(self) -> None:
        """Do with one document, and one page of the log, what an operator's screen does."""
        role = self.nodes["n1"].member.role.coordinator
        assert role is not None
        status = json.loads(json.dumps(role.status()))
        inventory = self.folder / "hosts.toml"
        hosts = (f"[[hosts]]\nname = '{name}'\naddress = '{address_of(name)}'\n" for name in self.nodes)
        inventory.write_text("".join(hosts))
        hub = Hub(load(inventory), "scale")
        hub.set_status(status)
        view = model.take(cast("Any", hub))
        nodes, ranks = node_columns(looks.Glyphs(), False, RANKS, 6), rank_columns(looks.Glyphs(), False, 6)
        line = LogLine("", 0, 0, "stdout", 0, 0, 0, None, b"step=1200 loss=2.3471")
        fetched = range(0, 1000 * ROWS_OF_A_NODE, 1000)
        parts = [
            Part([line._replace(node=name, t_ns=place + later) for later in fetched], True, 0, 0, 10**9, None)
            for place, name in enumerate(self.nodes)
        ]
        answer, by_step = Answer({"status": status}), SortOrder("step", falling=True)

        def shown(items: Sequence[Any], columns: Sequence[Any]) -> None:
            grid = Grid(columns, 160, looks.Glyphs())
            for item in by_step.sorted(items, columns)[:ROWS_SHOWN]:
                grid.row(item)

        works: dict[str, Callable[[], object]] = {
            "check": lambda: read_answer("n1", "watch", answer),
            "take in": lambda: hub.set_status(status),
            "view": lambda: model.take(cast("Any", hub)),
            "nodes": lambda: shown(view.nodes, nodes),
            "ranks": lambda: shown(view.ranks, ranks),
            "log": lambda: rows_before(parts, 10),
        }
        for name, work in works.items():
            self.loop.charge(name, work)

    async def stop(self) -> None:
        """End the job, until all agents know."""
        self.nodes["n1"].request("stop")
        await self.until(lambda: all(node.context.life.finished.is_set() for node in self.nodes.values()))

    async def _until_event(self, kind: EventType) -> None:
        """Wait for a new record in the coordinator's journal."""
        journal = self.nodes["n1"].context.journal
        since = journal.last_seq
        await self.until(lambda: any(record["type"] == kind for record in journal.since(since)))


_notify_all = Coordinator.notify_all


def _without_members(coordinator: Coordinator, op: str, args: Args) -> None:
    if op != "members":
        _notify_all(coordinator, op, args)


async def _here(function: Callable[..., Any], *args: Any) -> Any:
    """Run something at once, in place of asyncio.to_thread."""
    return function(*args)


# What is measured


Act = Callable[["Job"], Coroutine[Any, Any, None]]
_LOOK = "an operator's screen"
SCENES: dict[str, Act] = {
    "all join, until they train": Job.up,
    "a quiet second": Job.quiet,
    "two rounds of pulses": Job.pulses,
    "a hang, until it is told and over": Job.hang,
    "a node is lost, until the others wait": lambda job: job.lose(["n3"]),
    "a second of waiting": lambda job: job.quiet(4.0),
    "the node is back, until they train": lambda job: job.back(["n3"]),
    "a restart, until they train": Job.restart,
    "all ranks fail alike, until they train": lambda job: job.fail("KeyError: 'labels'"),
    "all ranks fail differently, until they train": lambda job: job.fail("ValueError: bad sample {rank} of {rank}"),
    f"a second with {OPERATORS} operators": Job.watched,
    _LOOK: Job.look,
    "half of the nodes lost and back": lambda job: job.back([f"n{number}" for number in range(2, job.hosts, 2)]),
    "the end": Job.stop,
}
MANY = 32
ELECTIONS: dict[str, Act] = {
    "the coordinator loses its power": lambda job: job.cut(1),
    f"so do {MANY} hosts, as far as the others are more than half": lambda job: job.cut(min(MANY, job.hosts // 2 - 1)),
}
Run = dict[str, "Figures | None"]
"""By scene; None: it was given up."""


def simulate(hosts: int, scenes: Mapping[str, Act], **how: Any) -> Run:
    """Return what each scene took, in turn, up to the first that is given up; raises Stuck. `how`: see Job."""
    run: Run = {}
    with (
        tempfile.TemporaryDirectory(prefix="scale-", dir=MEMORY if MEMORY.is_dir() else None) as folder,
        Job(hosts, Path(folder), **how) as job,
    ):
        for name, act in scenes.items():
            try:
                figures = job.measure(lambda act=act: act(job))  # type: ignore[misc]
                run[name] = figures.per_second() if "second" in name else figures
            except TooLong:
                print(f"{name}: given up after {LIMIT_S:g} s of the processor\n{job.states()}", file=sys.stderr)
                run[name] = None
                return run
            except Stuck as stuck:
                raise Stuck("\n".join([f"{name}: {stuck}", *job.loop.failures[:1], job.states()])) from stuck
    return run


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _bytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB" if value >= 1e5 else f"{value / 1e3:,.1f} kB"


def _time(value: float) -> str:
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:,.1f} ms"


Read = Callable[[Figures, str], float]
"""Reads one figure; the name is that of the last host."""


def _operators(name: str) -> Read:
    return lambda figures, last: sum(
        getattr(one, name) for host, one in figures.traffic.items() if host.startswith("operator")
    )


def _coordinator(name: str, other_way: str) -> Read:
    """Its traffic with operators does not count."""
    operators = _operators(other_way)
    return lambda figures, last: getattr(figures.traffic.get("n1", Traffic()), name) - operators(figures, last)


def _asked(op: str) -> Read:
    return lambda figures, last: figures.asked.get(op, 0)


def _spent(host: str) -> Read:
    return lambda figures, last: figures.spent.get(host, 0.0)


def _member(name: str) -> Read:
    return lambda figures, last: float(getattr(figures.traffic.get(last, Traffic()), name))


TABLES: tuple[tuple[str, Read, Callable[[float], str]], ...] = (
    ("messages to the coordinator", _coordinator("received", "sent"), _count),
    ("bytes to the coordinator", _coordinator("received_bytes", "sent_bytes"), _bytes),
    ("messages from the coordinator", _coordinator("sent", "received"), _count),
    ("bytes from the coordinator", _coordinator("sent_bytes", "received_bytes"), _bytes),
    ("processor time of the coordinator", _spent("n1"), _time),
    ("messages to one member", _member("received"), _count),
    ("bytes to one member", _member("received_bytes"), _bytes),
    ("processor time of one member", lambda figures, last: figures.spent.get(last, 0.0), _time),
    ("new connections", lambda figures, last: sum(figures.asked.values()), _count),
    (f"bytes to {OPERATORS} operators", _operators("received_bytes"), _bytes),
)


ROWS: tuple[tuple[str, Read, Callable[[float], str]], ...] = (
    ("virtual seconds until there is a coordinator", lambda figures, last: figures.elected_s, _time),
    ("virtual seconds until all others follow it", lambda figures, last: figures.virtual_s, _time),
    ("messages", lambda figures, last: sum(one.sent for one in figures.traffic.values()), _count),
    ("bytes", lambda figures, last: sum(one.sent_bytes for one in figures.traffic.values()), _bytes),
    ("new connections", lambda figures, last: sum(figures.asked.values()), _count),
    *((f"of these: {op}", _asked(op), _count) for op in ("who", "vote", "announce", "time")),
    ("processor time of a node", lambda figures, last: sum(figures.spent.values()) / int(last[1:]), _time),
)
SCREEN = (
    ("check of a document", "check"),
    ("taking it in", "take in"),
    ("what all screens show", "view"),
    (f"{ROWS_SHOWN} nodes by their steps", "nodes"),
    (f"{ROWS_SHOWN} ranks by their steps", "ranks"),
    (f"the last 10 lines of all, {ROWS_OF_A_NODE} of each node", "log"),
)
Runs = Mapping[int, Run]
NOTES = (
    f"{RANKS} ranks on each host; growth: how much faster the figure grows than the number of hosts",
    "no encryption, no garbage collection; scenes of some seconds are divided by them",
)


def _row(label: str, scene: str, read: Read, text: Callable[[float], str], runs: Runs) -> tuple[str, ...]:
    """Return one figure of one scene for each number of hosts, with its growth."""
    row, before, fewer = [label], 0.0, 0
    for hosts, run in runs.items():
        value = _figure(scene, read, hosts, run)
        given_up = f"> {LIMIT_S:.0f} s" if scene in run else NEVER
        row.append(given_up if value is None else text(value))
        if fewer:
            row.append(f"x {value / before * fewer / hosts:.2f}" if value and before else NEVER)
        before, fewer = value or 0.0, hosts
    return tuple(row)


def _figure(scene: str, read: Read, hosts: int, run: Run) -> float | None:
    """Return one figure; None where there is none."""
    figures = run.get(scene)
    return None if figures is None else read(figures, f"n{hosts}")


def tables(runs: Runs) -> Iterator[Table]:
    """Yield a table for each figure, and one for each election."""
    head = [cell for hosts in runs for cell in (f"{hosts} hosts", "growth")]
    del head[1]
    for title, read, text in TABLES:
        # Most scenes have no operator, or no new connection.
        some = [scene for scene in SCENES if any(_figure(scene, read, *each) for each in runs.items())]
        seen = [scene for scene in some if scene != _LOOK]
        yield Table(title, ("", *head), tuple(_row(scene, scene, read, text, runs) for scene in seen))
    rows = tuple(_row(label, _LOOK, _spent(name), _time, runs) for label, name in SCREEN)
    yield Table("processor time of an operator's side", ("", *head), rows)
    for title in ELECTIONS:
        rows = tuple(_row(label, title, read, text, runs) for label, read, text in ROWS)
        yield Table(title, ("", *head), rows, NOTES if title == [*ELECTIONS][-1] else ())


def _simulate_all(hosts: int) -> Run:
    """Return what all scenes took, each of those after one that is given up in a new job."""
    joined, *others = SCENES
    run: Run = {}
    tells_members = True
    for group in ({name: SCENES[name] for name in others}, *({name: act} for name, act in ELECTIONS.items())):
        left = group
        while left:
            found = simulate(hosts, {joined: Job.up, **left}, tells_members=tells_members)
            run.setdefault(joined, found[joined])
            if found[joined] is None and not tells_members:
                return run
            # Where joining takes too long, the others go on without its largest part.
            tells_members = found.pop(joined) is not None and tells_members
            run.update(found)
            left = {name: act for name, act in left.items() if name not in found}
    return run


def run() -> Report:
    """Simulate jobs of several sizes."""
    runs = {hosts: _simulate_all(hosts) for hosts in HOSTS}
    # By hosts, scene and figure; of what was given up there is nothing.
    data = {
        hosts: {
            scene: {
                label: _figure(scene, read, hosts, run) for label, read, _ in (ROWS if scene in ELECTIONS else TABLES)
            }
            for scene in run
        }
        for hosts, run in runs.items()
    }
    return Report("scale", tuple(tables(runs)), {"hosts": data})
