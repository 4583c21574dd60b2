"""A job as the agents told it, played back: the documents and log bytes of the contract, behind the session's face.

In: documents of tests/screens/data, or the same made for many ranks. Out: what `tui.source.SessionSource` asks for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import heapq
import itertools
import json
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from remote_agent.history import samples
from remote_agent.history.pyramid import History
from remote_agent.text.patterns import make_filter
from remote_agent.text.rows import RecordReader
from supervisor.errors import LaunchFailed, RequestFailed, SupervisorError, Unreachable
from supervisor.history import Series, SeriesQuery, merge
from supervisor.link.view import HostView, Notice
from supervisor.logs.pages import Page
from supervisor.logs.reader import Batch
from supervisor.logs.rows import Clocks, LineKey, LogLine
from supervisor.logs.selection import LogQuery, Selection
from supervisor.nccl import Fabric
from supervisor.ssh.forward import Forward

DATA = Path(__file__).parent / "data"
File = tuple[str, int, int, str]
"""Node, generation, rank, stream."""


@dataclasses.dataclass
class Line:
    """One recorded line."""

    t_ns: int
    level: str | None
    text: bytes


def of_histories(wanted: SeriesQuery, nodes: Mapping[str, History]) -> Series:
    """Return what the agents of these nodes would answer."""
    chosen = {name: one for name, one in nodes.items() if wanted.nodes is None or name in wanted.nodes}
    return merge(wanted, {name: one.spans(*wanted[:4]) for name, one in chosen.items()})


_Session: Any = object
"""What stands in for a Session may go wherever one does."""


class RecordedSession(_Session):  # type: ignore[misc]
    """A session whose cluster is a recording; requests are kept in `requests`."""

    def __init__(self, job: str = "train-k3f9") -> None:
        self.job = job
        self.hosts: dict[str, HostView] = {}
        self.status: Any = {}
        self.status_age_s = 0.2
        self.events: list[Any] = []
        self.incidents: list[Any] = []
        self.notices: list[Notice] = []
        self.launching = False
        self.failure: SupervisorError | None = None
        self.ended = False
        self.made_s: float | None = None
        self.version = 1
        self.files: dict[File, list[Line]] = {}
        self.requests: list[tuple[str, Any]] = []
        self.refusal: RequestFailed | None = None
        self.answer: Any | None = None
        self.forwarded: list[Forward] = []
        self.listening = {6006}
        """The ports of the nodes on which a program listens."""
        self.python_stacks: dict[str, str] = {}
        self.log_calls = 0
        self.latency_s = 0.0
        self.unread: set[str] = set()
        """Nodes whose lines never came, as they were lost before."""
        self.cancelled = False
        self.fabric = Fabric()
        self.past: dict[str, History] = {}
        """By node."""
        change = {"digest": "b" * 64, "files": 3, "bytes": 12_000, "paths": ["train.py", "model.py", "lib/data.py"]}
        self.changes: Any = {"change": change, "tree": {"digest": "a" * 64, "previous": None}, "place": "/home/me/work"}

    async def __aenter__(self) -> RecordedSession:
        return self

    async def __aexit__(self, *problem: object) -> None:
        return None

    def touch(self, **changes: Any) -> None:
        """Play a newer state."""
        for name, value in changes.items():
            setattr(self, name, value)
        self.version += 1

    def write(self, file: File, *texts: bytes, t_ns: int | None = None, level: str | None = None) -> None:
        """Let a rank write lines."""
        lines = self.files.setdefault(file, [])
        for text in texts:
            last = max((line.t_ns for lines in self.files.values() for line in lines[-1:]), default=0)
            lines.append(Line(t_ns if t_ns is not None else last + 1_000_000, level, text))

    async def request(self, verb: str, **args: Any) -> Any:
        """Accept, or refuse as told to."""
        self.requests.append((verb, args))
        if self.refusal is not None:
            raise self.refusal
        return self.answer or {"accepted": True, "message": f"{verb} accepted", "generation": 3, "seq": 40}

    program: Sequence[str] = ("true",)
    """What a shell on a node is here."""

    async def shell(self, terminal: Any, node: str, rank: int | None) -> None:
        """Run a program on the terminal, as if it were the node's."""
        self.requests.append(("shell", {"node": node, "rank": rank}))
        await terminal.run(self.program)

    async def forward(self, node: str, port: int, local: int | None) -> Forward:
        """Forward a port, as far as the screen sees it."""
        self.requests.append(("forward", {"node": node, "port": port, "local": local}))
        if self.refusal is not None:
            raise self.refusal
        forward = Forward(node, port, connect=asyncio.Event().wait)  # type: ignore[arg-type]
        forward.local, forward.is_answered, forward.is_open = local or port + 1000, port in self.listening, True
        self.forwarded.append(forward)
        return forward

    @property
    def forwards(self) -> list[Forward]:
        """Those that are open."""
        return [forward for forward in self.forwarded if forward.is_open]

    async def series(self, wanted: SeriesQuery) -> Series:
        """The history of the recording."""
        return of_histories(wanted, self.past)

    def ask_user(self) -> int:
        return 0

    async def edited(self) -> Any:
        """What a session would say of the work tree."""
        return self.changes

    async def stacks(self, ranks: list[int] | None) -> Any:
        """The stacks of the recording, of these ranks; the rest of them cannot be reached."""
        asked = [str(row["rank"]) for node in self.status["nodes"] for row in node["ranks"]] if ranks is None else ranks
        wanted = [str(rank) for rank in asked]
        found = {rank: text for rank, text in self.python_stacks.items() if rank in wanted}
        missing = {rank: "n2: no answer in time" for rank in wanted if rank not in found}
        return {"stacks": found, "unreachable": missing, "children": {}, "notes": {}}

    async def nccl(self) -> Fabric:
        """What the nodes would answer."""
        return self.fabric

    async def cancel_launch(self) -> None:
        """Give up."""
        self.cancelled = True
        self.launching = False
        self.failure = SupervisorError("the launch was interrupted")

    async def _delay(self) -> None:
        self.log_calls += 1
        if self.latency_s:
            await asyncio.sleep(self.latency_s)

    def _rows(self, selection: Selection) -> list[list[LogLine]]:
        newest = max((file[1] for file in self.files), default=0)
        wanted = newest if selection.generation is None else selection.generation
        parts = []
        for (node, generation, rank, stream), lines in self.files.items():
            chosen = wanted in ("all", generation) and stream in selection.streams
            chosen = chosen and (selection.ranks is None or rank in selection.ranks)
            if chosen and (selection.nodes is None or node in selection.nodes):
                reader, t_ns, part = RecordReader(), 0, []
                for at, line in enumerate(lines):
                    t_ns = line.t_ns if reader.begins(line.text, line.t_ns) else t_ns
                    part.append(LogLine(node, generation, rank, stream, at, at * 80, t_ns, line.level, line.text))
                parts.append(part)
        return parts

    async def from_line(self, selection: Selection, key: LineKey, count: int) -> Page:
        """The lines of one file around one of them."""
        page = await self.merged(dataclasses.replace(selection, generation=key[0], ranks=[key[1]]), 1 << 30)
        rows = [row for row in page.rows if row.key[:3] == key[:3]]
        begun = {row.t_ns for row in rows if row.line < key[3] - count // 3}
        whole = [row for row in rows if row.t_ns not in begun]
        rows = whole[:count] if whole and whole[0].line <= key[3] else rows[: key[3] + count]
        return page._replace(rows=rows, more=True)

    async def merged(
        self,
        selection: Selection,
        count: int,
        *,
        before_ns: int | None = None,
        after_ns: int | None = None,
        clocks: Clocks | None = None,
    ) -> Page:
        """The last rows by time, or the first ones."""
        await self._delay()
        nodes = selection.nodes or self.hosts
        absent = sorted(name for name, host in self.hosts.items() if host.state == "lost" and name in nodes)
        if selection.nodes and set(selection.nodes) <= set(absent):
            raise Unreachable(f"{selection.nodes[0]}: no link")
        parts = [part for part in self._rows(selection) if not part or part[0].node not in self.unread]
        every = list(heapq.merge(*parts, key=lambda row: (row.t_ns, row.rank, row.stream, row.line)))
        passes = make_filter(selection.filter.include, selection.filter.exclude)
        levels = {"": ("", "warn", "error"), "warn": ("warn", "error"), "error": ("error",)}[selection.filter.level]
        rows = [row for row in every if passes.keeps([row.text]) and row.mark in levels]
        if after_ns is not None:
            rows = [row for row in rows if row.t_ns >= after_ns]
        elif before_ns is not None:
            rows = [row for row in rows if row.t_ns < before_ns]
        start, end = (0, count) if after_ns is not None else (max(0, len(rows) - count), len(rows))
        # Rows of one time are never separated.
        while 0 < start < len(rows) and rows[start - 1].t_ns == rows[start].t_ns:
            start -= 1
        while 0 < end < len(rows) and rows[end - 1].t_ns == rows[end].t_ns:
            end += 1
        chosen = rows[start:end]
        more, newest_ns = len(chosen) < len(rows), every[-1].t_ns + 1 if every else 0
        span = (chosen[0].t_ns if more else 0, newest_ns if before_ns is None else before_ns)
        if after_ns is not None:
            span = (after_ns, chosen[-1].t_ns + 1 if more else newest_ns)
        return Page(chosen, more, absent, clocks or Clocks(self), 0, *span, len(every) if selection.file else None)

    def rows(self, query: LogQuery, clocks: Clocks | None = None) -> Any:
        """Rows that match, file by file, and those that come."""
        return SimpleNamespace(live=lambda: self._live(query))

    async def _live(self, query: LogQuery) -> AsyncGenerator[Batch, None]:
        await self._delay()
        given: set[LineKey] = set()
        while True:
            over, hits = self.ended, [row for row in self._hits(query) if row.key not in given]
            given.update(row.key for row in hits)
            yield Batch(hits, is_caught_up=True)
            if over:
                return
            await asyncio.sleep(0.05)

    def _hits(self, query: LogQuery) -> Iterator[LogLine]:
        pattern = re.compile((query.pattern or "").encode(), re.IGNORECASE if query.ignore_case else 0)
        passes = make_filter(query.files.filter.include, query.files.filter.exclude)
        for row in itertools.chain.from_iterable(self._rows(query.files)):
            if passes.keeps([row.text]) and pattern.search(row.text) and query.level in (None, row.level):
                # A hit has the time of its own line.
                yield row._replace(t_ns=self.files[row.node, row.generation, row.rank, row.stream][row.line].t_ns)


def load(name: str) -> RecordedSession:
    """A recording of tests/screens/data."""
    data = json.loads((DATA / f"{name}.json").read_text())
    session = RecordedSession(data.get("status", {}).get("job", "train-k3f9"))
    session.status = data.get("status", {})
    session.hosts = {entry["name"]: HostView(**entry) for entry in data["hosts"]}
    session.events = data.get("events", [])
    session.incidents = data.get("incidents", [])
    session.launching = data.get("launching", False)
    session.ended = session.status.get("state") in ("succeeded", "failed", "stopped")
    if not session.status:
        session.status_age_s = float("inf")
    if "failure" in data:
        session.failure = LaunchFailed(data["failure"]["message"], hint=data["failure"]["hint"])
    for entry in data.get("logs", ()):
        file = (entry["node"], entry["generation"], entry["rank"], entry["stream"])
        lines = session.files.setdefault(file, [])
        lines += [Line(line[0], line[1], line[2].encode()) for line in entry["lines"]]
    return session


def many(nodes: int, per_node: int) -> RecordedSession:
    """A running job of any size, as its coordinator describes it."""
    session = RecordedSession("llama-7b")
    entries = []
    for at in range(nodes):
        name = f"n{at:03d}"
        session.hosts[name] = HostView(name, "up", "ready", "", live=True)
        ranks = [
            {
                "rank": at * per_node + local, "local_rank": local, "pid": 4000 + at * per_node + local,
                "state": "running", "exit_code": None, "signal": None, "step": 18240 - (at * 7 + local) % 3,
                "last_output_age_s": ((at * 5 + local * 3) % 40) / 10,
            }
            for local in range(per_node)
        ]  # fmt: skip
        entries.append({
            "name": name, "address": f"10.0.{at // 250}.{at % 250 + 1}", "state": "running", "group_rank": at,
            "reason": None, "agent_pid": 900 + at, "clock_offset_ms": (at % 9 - 4) / 10, "ranks": ranks,
        })  # fmt: skip
    session.status = {
        "job": "llama-7b", "state": "running", "generation": 1, "restarts": 0, "max_restarts": 3,
        "min_nodes": nodes - 1, "max_nodes": nodes, "world_size": nodes * per_node, "coordinator": "n000",
        "started_at": "2026-11-20T10:00:00.123Z", "nodes": entries, "incident": None, "failure": None, "plan": None,
        "script": {"kind": "script", "script": "train_gpt.py", "args": ["--steps", "500000"]},
    }  # fmt: skip
    return session


GIB = 1 << 30


def slow_rank(since: str) -> Any:
    """Return what a status says of rank 5 on n002, which sleeps."""
    return {
        "node": "n002", "ranks": [5], "since": since, "share": 0.47, "phase": "script",
        "place": {"file": "train.py", "line": 52, "function": "log_metrics"},
        "cause": {"kind": "sleeps", "share": 0.4, "by": None, "pid": None}, "limits": None,
        "message": "the others wait 47% of the time for it: train.py:52 in log_metrics, where it sleeps",
    }  # fmt: skip


def trained(session: RecordedSession, now_s: float, seconds: int = 600) -> RecordedSession:
    """The same measured job with its history: a failure and a restart in the middle, and rank 5 slow at the end."""

    def moment(before_s: float) -> str:
        return datetime.datetime.fromtimestamp(now_s - before_s, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

    session.status["started_at"] = moment(seconds)
    if len(session.status["nodes"]) == 4:
        session.status.update(condition="slow", slow=[slow_rank(moment(seconds * 0.15))])
    half = seconds / 2
    names = [node["name"] for node in session.status["nodes"]]
    world = {
        "world_size": sum(len(node["ranks"]) for node in session.status["nodes"]),
        "members": [{"node": name} for name in names],
        "restarts": 0,
    }
    facts: list[tuple[float, str, int, Any]] = [
        (seconds - 4, "generation_started", 0, world),
        (seconds - 4, "generation_running", 0, {**world, "spawn": 200.0}),
        (seconds - 10, "first_step", 0, {"imports": 4800.0, "first_step": 900.0}),
        (half + 1, "generation_stopped", 0, {"cause": "failure"}),
        (half, "incident", 0, {"summary": "rank 5 failed", "category": "python"}),
        (half, "generation_started", 1, world),
        (half - 4, "generation_running", 1, {**world, "detect": 100.0, "stop": 3000.0, "spawn": 200.0}),
        (half - 12, "first_step", 1, {"imports": 6000.0, "first_step": 2000.0}),
    ]
    if session.status.get("slow"):
        facts.append((seconds * 0.15, "slow", 1, dict(session.status["slow"][0])))
    session.events = [
        {"seq": seq, "time": moment(before), "type": kind, "generation": generation, "node": None, "rank": None,
         "detail": detail} for seq, (before, kind, generation, detail) in enumerate(facts, 1)
    ]  # fmt: skip
    step = 0
    for node in session.status["nodes"]:
        history = session.past[node["name"]] = History()
        for second in range(0, seconds, 2):
            if 0 <= second - half < 12:
                continue
            step = int(second * 1.3) - (40 if second > half else 0)
            found = dict(samples.of_node(node["vitals"]))
            for rank in node["ranks"]:
                pace = 0.4 if rank["rank"] == 5 and second > seconds * 0.8 else 1.3
                own: Any = {**rank["progress"], "loss": 0.5 + 9 / (1 + second / 30), "steps_s": pace}
                found.update(samples.of_rank(rank["rank"], step, own))
                found.update({("input", rank["rank"]): 0.07, ("checkpoint", rank["rank"]): 0.03})
            history.add(now_s - seconds + second, found)
        for rank in node["ranks"]:
            rank["step"], rank["progress"]["total"] = step, 2000
            rank["progress"]["steps_s"] = 1.3
    return session


def measured(session: RecordedSession, *, gpus: bool = True) -> RecordedSession:
    """The same job with what its nodes and ranks use; the last node was measured a minute ago."""
    nodes = session.status["nodes"]
    for at, node in enumerate(nodes):
        age_s = 61.0 if node is nodes[-1] else 1.2
        devices = [
            {
                "index": each, "age_s": age_s, "name": "NVIDIA H100 80GB HBM3", "use": 97 - (at * 3 + each * 5) % 13,
                "mem_used": (60 + (at + each * 3) % 17) * GIB, "mem_total": 80 * GIB, "temp": 58 + (at + each) % 15,
                "power": 620.5 + (at * 7 + each * 11) % 70, "power_limit": 700, "clock": 1980, "ecc": 0, "xid": None,
            }
            for each in range(len(node["ranks"]) if gpus else 0)
        ]  # fmt: skip
        if devices and at == 1:
            devices[1].update(ecc=1, xid=79, use=None)
        node["vitals"] = {
            "age_s": age_s, "every_s": 3.0, "cpu": 12.5 + at % 9, "mem_used": (200 + at) * GIB, "mem_total": 2048 * GIB,
            "disk_free": 5 * GIB * 200, "disk_total": 2000 * GIB, "shm_free": 900 * GIB, "shm_total": 1024 * GIB,
            "net_in": 1.2e9 + at * 1e7, "net_out": 8e8, "gpus": devices,
        }  # fmt: skip
        for local, rank in enumerate(node["ranks"]):
            own = {"age_s": age_s, "cpu": 99.0 + local * 30, "rss": (3 + local) * GIB, "gpu": local if gpus else None}
            lag = 7 if rank["rank"] == 2 else 0
            loss = 1.8831 + (rank["rank"] * 7 % 10) / 1e4
            progress = {"loss": loss, "rate": 96021.0 + rank["rank"], "unit": "tok/s", "steps_s": 2.5, "lag": lag}
            rank.update(vitals=own, progress=progress)
    return session
