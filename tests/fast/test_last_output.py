"""The last output of a node's ranks: its way to another node, and what is shown of it once the node is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.agent import last_output
from remote_agent.agent.background import Background
from remote_agent.agent.last_output import END_BYTES, LastOutputKeeper
from remote_agent.agent.reports import read_report
from remote_agent.base.clocks import Clock
from remote_agent.base.paths import Home, JobFiles
from remote_agent.base.tasks import Tasks
from remote_agent.coordinator import inputs, replay
from remote_agent.coordinator.journal import Journal
from remote_agent.diagnose.incidents import incidents_in
from remote_agent.logs import LogStore
from remote_agent.wire import Answer, Items
from remote_agent.wire.gate import Misfit
from supervisor.wording.events import event_text
from tests.fast.journals import event
from tests.fast.log_files import append, log, until
from tests.fast.world import World, spec

MEMBERS = [{"node": name, "group_rank": at, "base_rank": at, "nproc": 1} for at, name in enumerate(("n1", "n2", "n3"))]


class Node:
    """One node's care for last output, connected to the others without a network."""

    def __init__(self, root: Path, name: str, nodes: dict[str, Node]) -> None:
        self.nodes = nodes
        self.files: JobFiles = Home(root / name).job("job")
        self.files.root.mkdir(parents=True)
        self.journal = Journal(self.files.events)
        self.logs = LogStore(self.files.root, live=True)
        self.running: int | None = 0
        self.is_cut = False
        self.reports: list[Any] = []
        self.sent: list[Answer] = []
        self.asked = 0
        self.tasks = Tasks()
        peers: Any = SimpleNamespace(members=nodes, ask=self._ask)
        self.background = Background(name, peers)
        self.background.connected = self._connected  # type: ignore[method-assign, assignment]
        self.care = LastOutputKeeper(self.files, name, self.background, peers, self.logs, self.journal)
        self.name = name
        nodes[name] = self

    async def _ask(self, name: str, op: str, args: Any) -> Any | None:
        other = self.nodes[name]
        self.asked += 1
        if other.is_cut or self.is_cut:
            return None
        answer = await other.care.requests[op](self.name, None, json.loads(json.dumps(args)))
        assert isinstance(answer, Answer)
        return json.loads(json.dumps(answer.data))

    @contextlib.asynccontextmanager
    async def _connected(self, name: str) -> AsyncIterator[Any]:
        sender = self.nodes[name]

        async def stream(op: str, args: Any) -> Items:
            items = await sender.care.requests[op](self.name, None, args)
            assert not isinstance(items, Answer)
            async with contextlib.aclosing(items):
                async for item in items:
                    sender.sent.append(item)
                    yield item

        yield SimpleNamespace(stream=stream)

    def note(self, kind: str, node: str | None = None, generation: int = 0, **detail: Any) -> None:
        """Write an event to this node's journal."""
        fields = {"type": kind, "node": node, "generation": generation, "detail": detail}
        record: Any = {**event(self.journal.last_seq + 1, fields), "term": 1}
        self.journal.append(record)

    def kept(self, name: str) -> dict[str, bytes]:
        """Return the ends that this node has of another node's files."""
        return {f"{place.rank} {place.name}": end.body for place, end in self.care._kept.get(name, {}).items()}


@contextlib.asynccontextmanager
async def three(root: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Node, Node, Node]]:
    """Three nodes with a rank each; n2 is the first that n1 asks."""
    monkeypatch.setattr(last_output, "LOOK_S", 0.01)
    nodes: dict[str, Node] = {}
    for name in ("n1", "n2", "n3"):
        Node(root, name, nodes)
    for node in nodes.values():
        await node.logs.start()
        node.note("generation_started", members=MEMBERS)
        member: Any = SimpleNamespace(
            running=node.running, shift_ns=0, report=lambda op, args, node=node: node.reports.append({op: args})
        )
        node.care.start(node.tasks, member)
    try:
        yield nodes["n1"], nodes["n2"], nodes["n3"]
    finally:
        for node in nodes.values():
            await node.tasks.close()
            await node.logs.stop()
            node.background.close()
            node.journal.close()


async def until_true(look: Any) -> None:
    async def check() -> bool:
        return bool(look())

    await until(check)


async def lists_none_of(node: Node, rank: int) -> bool:
    return all(file["rank"] != rank for file in (await node.logs.list()).data["files"])


async def test_last_words_outlive_their_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with three(tmp_path, monkeypatch) as (n1, n2, n3):
        out = log(n1.files.root)
        append(out, b"begin\n" + b"x" * END_BYTES + b"\nstep=1\n")
        log(n1.files.root, 0, "stderr").touch()
        # Not a rank that the journal gives to n1.
        append(log(n1.files.root, rank=1), b"forged\n")
        await until_true(lambda: n2.kept("n1").get("0 stdout.log", b"").endswith(b"step=1\n"))
        assert len(n2.kept("n1")["0 stdout.log"]) == END_BYTES
        # Only what is new is sent, to one node alone, and nothing while nothing is written.
        count = len(n1.sent)
        append(out, b"step=2\n")
        await until_true(lambda: n2.kept("n1")["0 stdout.log"].endswith(b"step=1\nstep=2\n"))
        assert [piece.body for piece in n1.sent[count:]] == [b"step=2\n"]
        assert not n3.kept("n1")
        (out.parent / "error.json").write_text(json.dumps({"message": {"message": "ValueError: bad batch"}}))
        await until_true(lambda: "0 error.json" in n2.kept("n1"))

        n1.is_cut = True
        for node in (n2, n3):
            node.note("node_lost", "n1", status="lost", reason="gone")
        await until_true(lambda: n2.reports)
        assert not n3.reports
        (report,) = (one["last_output"] for one in n2.reports)
        assert (report["of"], report["generation"], report["ranks"]) == ("n1", 0, [0])
        texts = [(line["file"], line["line"], line["text"]) for line in report["evidence"]]
        assert texts == [
            ("generation_0/rank_0/stdout.log", 3, "last output on n1: step=2"),
            ("generation_0/rank_0/error.json", None, "last output on n1: ValueError: bad batch"),
        ]
        copy = n2.files.rank(0, 0) / "stdout.log"
        head, *rest = copy.read_text().splitlines()
        assert head == (
            "supervisor: rank 0 wrote this on n1, which was lost at 2026-11-20 10:03:51 UTC; "
            f"n2 has the last 14 of {out.stat().st_size:,} bytes of its stdout.log, "
            "without the output of its last 0.01 s"
        )
        assert rest == ["step=1", "step=2"]
        # It is served like a log, and is no progress of a rank of n2.
        await n2.logs.read(0, 0, "stdout", 0, 1)
        assert (await n2.logs.merged(0, [0], count=1)).body == b"step=2"

        # Back with its disk: its own log is the one that counts.
        n1.is_cut = False
        n2.note("node_ready", "n1", nproc=1)
        await until(lambda: lists_none_of(n2, rank=0))
        assert not copy.parent.exists()
        assert out.exists()


async def test_a_copy_is_not_followed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with three(tmp_path, monkeypatch) as (n1, n2, _):
        followed: list[bytes] = []

        async def follow() -> None:
            async for piece in n2.logs.follow(generation="all", start="begin"):
                followed[len(followed) :] = [piece.body]

        append(log(n1.files.root), b"step=2\n")
        own = log(n2.files.root, rank=1)
        append(own, b"own\n")
        following = asyncio.ensure_future(follow())
        await until_true(lambda: followed == [b"own\n"] and n2.kept("n1"))
        n1.is_cut = True
        n2.note("node_lost", "n1", status="lost", reason="gone")
        await until_true(lambda: n2.reports)
        append(own, b"more\n")
        await until_true(lambda: len(followed) > 1)
        assert followed == [b"own\n", b"more\n"]
        following.cancel()
        past = [piece.body async for piece in n2.logs.follow(generation="all", ranks=[0], start="begin", past=True)]
        assert b"step=2" in b"".join(past)
        # Steps of rank 0 are none of a rank here.
        assert 0 not in n2.logs.progress(0)


async def test_a_copy_stays_without_its_nodes_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with three(tmp_path, monkeypatch) as (n1, n2, _):
        out = log(n1.files.root)
        append(out, b"short\n")
        await until_true(lambda: n2.kept("n1"))
        n1.is_cut = True
        n2.note("node_lost", "n1", status="lost", reason="gone")
        await until_true(lambda: n2.reports)
        n2.note("node_ready", "n1", nproc=1)
        asked = n2.asked
        await until_true(lambda: n2.asked > asked + 1)
        assert n2.care._returned == {"n1"}
        os.rename(out.parent, tmp_path / "the disk")
        n1.is_cut = False
        await until_true(lambda: not n2.care._returned)
        text = (n2.files.rank(0, 0) / "stdout.log").read_text()
        assert "n2 has 6 bytes of its stdout.log, without the output of its last 0.01 s\nshort\n" in text


async def test_another_node_takes_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with three(tmp_path, monkeypatch) as (n1, n2, n3):
        append(log(n1.files.root), b"said\n")
        await until_true(lambda: n2.kept("n1"))
        n2.is_cut = True
        n1.note("node_lost", "n2", status="lost", reason="gone")
        await until_true(lambda: n3.kept("n1") == {"0 stdout.log": b"said\n"})


def lost_node(world: World) -> inputs.LastOutput:
    line: Any = {"node": "n3", "rank": 2, "file": "generation_0/rank_2/stdout.log", "line": 9, "text": "step=7"}
    return inputs.LastOutput("n3", 0, "n2", (2, 3), (line,))


@pytest.mark.parametrize("late", [False, True])
def test_the_last_output_of_a_lost_node_is_evidence_of_its_incident_whenever_it_arrives(late: bool) -> None:
    world = World(spec(3, min_nodes=2))
    output = lost_node(world)
    world.die("n2")
    if not late:
        world.feed(output)
    world.settle()
    if late:
        # The next group runs already.
        assert world.state.generation == 1
        world.feed(output)
    assert [kind for kind in world.types() if kind in ("incident", "last_output")] == ["incident", "last_output"]
    told = world.last("last_output")
    assert (told.node, told.generation) == ("n2", 0)
    assert (
        event_text(told.record(1, "2026-01-01T00:00:00Z"))
        == "n3 keeps the last output of ranks 2-3: see logs --generation"
    )
    (incident,) = incidents_in(world.records())
    assert incident["evidence"][-1] == output.evidence[0]
    # A coordinator that takes over knows it, too.
    folded = replay.fold(world.state.spec, world.records())
    assert folded.incident == world.state.incident
    world.feed(inputs.LastOutput("n3", 7, "n2", (2,), output.evidence))
    world.feed(inputs.LastOutput("n3", 0, "n9", (2,), output.evidence))
    assert world.types().count("last_output") == 1


def test_a_report_of_last_output_is_checked_where_it_arrives() -> None:
    line = {"node": "n1", "rank": 0, "file": None, "line": None, "text": "x" * 9999}
    report = {"generation": 0, "of": "n2", "ranks": [0], "evidence": [line] * 99}
    read = read_report("n3", "last_output", report, Clock())
    assert isinstance(read, inputs.LastOutput)
    assert len(read.evidence) == 12
    assert (read.evidence[0]["node"], len(read.evidence[0]["text"])) == ("n3", 240)
    with pytest.raises(Misfit):
        read_report("n3", "last_output", {**report, "evidence": "all"}, Clock())


async def test_however_many_nodes_have_sent_their_output_here_only_some_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with three(tmp_path, monkeypatch) as (n1, _, _):

        @contextlib.asynccontextmanager
        async def connected(name: str) -> AsyncIterator[Any]:
            async def stream(op: str, args: Any) -> Items:
                yield Answer({"generation": 0, "rank": 0, "name": "stdout.log", "begin": 0}, name.encode())

            yield SimpleNamespace(stream=stream)

        n1.background.connected = connected  # type: ignore[method-assign, assignment]
        names = [f"m{number}" for number in range(20)]
        for name in names:
            answer = await n1.care.requests["last_output_offer"](name, None, {})
            assert isinstance(answer, Answer)
            assert answer.data == {"takes": True}
            await until(partial(_is_kept, n1, name))
        kept = [name for name in names if n1.kept(name)]
        assert kept == names[-len(kept) :]
        assert len(kept) <= 2 * last_output.MAX_NODES


async def _is_kept(node: Node, name: str) -> bool:
    return bool(node.kept(name))
