"""Feeds over real files: every line once and whole, whatever is written, cut short, replaced or stuck meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from remote_agent.logs import LogStore
from remote_agent.wire import Answer
from supervisor.errors import RequestFailed, Unreachable
from supervisor.logs import merge
from supervisor.logs.merge import Page
from supervisor.logs.rows import Clocks, LogLine
from supervisor.logs.search import search
from supervisor.logs.selection import Selection
from supervisor.session import Session
from supervisor.tui.logs import feeds
from supervisor.tui.logs.feeds import Jump, RankFeed
from supervisor.tui.logs.merged import MergedFeed
from supervisor.tui.source import Source

ALL = Selection(generation="all")


@dataclasses.dataclass
class NodeLink:
    """A node whose agent is in this process: everything but the wire."""

    name: str
    store: LogStore
    root: Path
    stuck: bool = False
    opened: bool = True
    opened_at: float = 1.0
    is_malformed: bool = False

    @property
    def view(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.name)

    async def call(self, op: str, args: dict[str, Any], timeout_s: float) -> Answer:
        answer: Awaitable[Answer] = asyncio.Event().wait() if self.stuck else self._answer(op, args)  # type: ignore[assignment]
        return await asyncio.wait_for(answer, timeout_s)

    async def _answer(self, op: str, args: dict[str, Any]) -> Answer:
        store = self.store
        ops: dict[str, Callable[..., Awaitable[Answer]]] = {
            "log_merged": store.merged, "log_window": store.window, "log_list": store.list, "log_read": store.read
        }  # fmt: skip
        return await ops[op](**args)

    async def stream(self, op: str, args: dict[str, Any]) -> AsyncGenerator[Answer, None]:
        if self.stuck:
            await asyncio.Event().wait()
        async for item in self.store.search(**args):
            yield item

    def write(self, rank: int, data: bytes, stream: str = "stdout") -> Path:
        path = self.root / "generation_0" / f"rank_{rank}" / f"{stream}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)
        return path

    async def written(self, rank: int, data: bytes, stream: str = "stdout") -> Path:
        """Write, and wait until the agent has seen it."""
        path = self.write(rank, data, stream)
        await self.seen(rank, path.stat().st_size, stream)
        return path

    async def seen(self, rank: int, size: int, stream: str = "stdout") -> None:
        """Wait until the agent has seen that many bytes."""
        while not any(
            (file["rank"], file["stream"], file["size"]) == (rank, stream, size)
            for file in (await self.store.list()).data["files"]
        ):
            await asyncio.sleep(0.005)


class Cluster:
    """What the feeds and `session.logs` need of a session."""

    def __init__(self) -> None:
        self.links: dict[str, NodeLink] = {}
        self.offsets_ms: dict[str, float] = {}

    @property
    def status(self) -> dict[str, Any]:
        return {"nodes": [{"name": name, "clock_offset_ms": ms} for name, ms in self.offsets_ms.items()]}

    @property
    def session(self) -> Session:
        return cast("Session", self)

    @property
    def source(self) -> Source:
        return cast("Source", self)

    async def merged(self, selection: Selection, count: int, **bounds: Any) -> Page:
        # A node that does not answer at all is waited for in vain; one on a busy machine is not.
        patience_s = 0.2 if any(link.stuck for link in self.links.values()) else 60.0
        return await merge.merged(self.session, selection, count, patience_s=patience_s, **bounds)

    def search(self, selection: Selection, **query: Any) -> AsyncGenerator[LogLine, None]:
        return search(self.session, selection, **query)

    def ahead_ns(self, node: str) -> int:
        return Clocks(self.session).ahead_ns(node)

    async def log(self, node: str, op: str, args: dict[str, Any]) -> Answer:
        return await self.links[node].call(op, args, 5.0)


def run(tmp_path: Path, scenario: Callable[..., Awaitable[None]], nodes: int = 1, bound: int = 0) -> None:
    """Play a scenario with the cluster and its first nodes."""

    async def all_of_it() -> None:
        cluster = Cluster()
        for number in range(1, nodes + 1):
            root = tmp_path / f"n{number}"
            root.mkdir()
            link = cluster.links[f"n{number}"] = NodeLink(f"n{number}", LogStore(root, live=True, bound=bound), root)
            await link.store.start()
        try:
            await scenario(cluster, *cluster.links.values())
        finally:
            for link in cluster.links.values():
                await link.store.stop()

    asyncio.run(all_of_it())


def lines(count: int, name: str = "line") -> bytes:
    return b"".join(b"%s %d\n" % (name.encode(), number) for number in range(count))


def shown(feed: MergedFeed | RankFeed) -> list[tuple[str, int]]:
    """Node and number of all lines that are here, in their order."""
    rows = [feed.row(index) for index in range(feed.count)]
    return [(row.node, row.line) for row in rows if row is not None]


def texts(feed: MergedFeed | RankFeed) -> list[bytes]:
    rows = [feed.row(index) for index in range(feed.count)]
    return [row.raw for row in rows if row is not None]


def yes() -> bool:
    return True


def no() -> bool:
    return False


async def load_all(feed: MergedFeed) -> None:
    """Scroll to both ends."""
    for _ in range(50):
        want = feed.missing(0, 0)
        want = feed.missing(feed.count - 1, feed.count - 1) if want is None else want
        if want is None:
            return
        await feed.load(want)
    raise AssertionError("it does not end")


def test_a_half_line_becomes_whole(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        feed = MergedFeed(cluster.source, ALL)
        await node.written(0, b"loading...")
        await feed.refresh(10, yes)
        assert texts(feed) == [b"loading..."]
        await node.written(0, b" done\nnext\n")
        await feed.refresh(10, no)
        assert texts(feed) == [b"loading... done"]
        await feed.refresh(10, yes)
        assert texts(feed) == [b"loading... done", b"next"]

    run(tmp_path, scenario)


@pytest.mark.parametrize("change_ms", [-0.02, 0.02, 50.0])
def test_offsets_that_change_between_two_pages_lose_nothing(tmp_path: Path, change_ms: float) -> None:
    async def scenario(cluster: Cluster, *nodes: NodeLink) -> None:
        for rank, node in enumerate(nodes):
            await node.written(rank, lines(2000))
        cluster.offsets_ms = {"n1": 0.1, "n2": -3.0}
        feed = MergedFeed(cluster.source, ALL)
        await feed.refresh(40, yes)
        cluster.offsets_ms["n1"] += change_ms
        await load_all(feed)
        for name in ("n1", "n2"):
            assert [line for node, line in shown(feed) if node == name] == list(range(2000))
        await feed.refresh(40, yes)
        assert len(shown(feed)) == (256 if change_ms > 10 else 4000), "a large change begins anew with the new times"

    run(tmp_path, scenario, 2)


def test_one_stream_shows_the_times_of_the_merged_log_and_is_found_by_them(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        await node.written(0, lines(1000))
        cluster.offsets_ms = {"n1": 5000.0}
        merged = MergedFeed(cluster.source, ALL)
        await merged.show_begin(300)
        rank = RankFeed(cluster.source, "n1", 0, 0, "stdout")
        meant = merged.row(200)
        assert meant is not None
        assert await rank.seek(Jump(meant.t_ns), 40) == 200
        assert rank.row(200) == meant
        assert rank.missing(190, 220) is None, "what is around it comes along"
        assert [await rank.seek(Jump(t_ns), 40) for t_ns in (1, 2 * meant.t_ns)] == [0, 999]

    run(tmp_path, scenario)


def test_from_the_begin_and_from_a_hit_every_line_follows(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        await node.written(0, lines(5000))
        feed = MergedFeed(cluster.source, ALL)
        await feed.show_begin(40)
        assert shown(feed)[0] == ("n1", 0)
        await load_all(feed)
        assert shown(feed) == [("n1", number) for number in range(5000)]
        row = feed.row(2500)
        assert row is not None
        await feed.show_around(row.t_ns, 40)
        assert feed.index_of(row.key) is not None
        assert len(shown(feed)) < 60, "a slow link brings a screen, not pages"
        await load_all(feed)
        assert shown(feed) == [("n1", number) for number in range(5000)]
        await feed.refresh(40, no)
        await node.written(0, lines(3))
        await feed.refresh(40, no)
        assert (feed.new_lines_text, feed.detached) == ("new lines below", True)
        await load_all(feed)
        assert len(shown(feed)) == 5003

    run(tmp_path, scenario)


def test_pages_that_an_answer_does_not_hold(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        await node.written(0, b"".join(b"%03d " % number + b"x" * 65_000 + b"\n" for number in range(100)))
        merged = MergedFeed(cluster.source, ALL)
        await merged.refresh(10, yes)
        assert 10 <= len(shown(merged)) < 100
        await load_all(merged)
        assert shown(merged) == [("n1", number) for number in range(100)]
        rank = RankFeed(cluster.source, "n1", 0, 0, "stdout")
        await rank.refresh(10, no)
        for _ in range(2):
            want = rank.missing(0, 99)
            assert want == 0
            await rank.load(want)
        assert rank.missing(0, 99) is None

    run(tmp_path, scenario)


def test_a_file_that_was_written_anew_shows_no_old_line(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        path = await node.written(0, lines(300, "old"))
        feed = RankFeed(cluster.source, "n1", 0, 0, "stdout")
        await feed.refresh(10, no)
        await feed.load(0)
        await node.seen(0, path.write_bytes(lines(400, "new")))
        await feed.refresh(10, no)
        assert feed.missing(0, 9) == 0
        await feed.load(0)
        assert texts(feed)[10] == b"new 10"

    run(tmp_path, scenario)


def test_memory_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "BYTES_KEPT", 200_000)
    monkeypatch.setattr("supervisor.tui.logs.merged.BYTES_KEPT", 200_000)

    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        await node.written(0, b"".join(b"%04d " % number + b"x" * 500 + b"\n" for number in range(3000)))
        merged = MergedFeed(cluster.source, ALL)
        await merged.refresh(10, yes)
        numbers: list[int] = []
        for _ in range(6):
            await merged.load(0)
            numbers = [number for _, number in shown(merged)]
            assert len(numbers) <= 2 * feeds.PAGE + 1
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert (numbers[0], merged.missing(0, 0), merged.detached) == (0, None, True)
        for _ in range(3):
            await merged.load(1)
        numbers = [number for _, number in shown(merged)]
        assert (len(numbers), numbers[-1] - numbers[0]) == (512, 511)
        rank = RankFeed(cluster.source, "n1", 0, 0, "stdout")
        await rank.refresh(10, no)
        for page in range(11):
            await rank.load(page)
        assert len(texts(rank)) == 2 * feeds.PAGE

    run(tmp_path, scenario)


def test_a_stuck_node_holds_nobody_up_and_its_rows_come_later(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, first: NodeLink, second: NodeLink) -> None:
        feed = MergedFeed(cluster.source, ALL)
        await first.written(0, lines(10))
        await second.written(1, lines(10))
        await feed.refresh(10, yes)
        second.stuck = True
        second.write(1, lines(200))
        await first.written(0, lines(10))
        await feed.refresh(10, yes)
        assert len(shown(feed)) == 30
        assert list(feed.absent) == ["n2"]
        with pytest.raises(Unreachable):
            await merge.merged(cluster.session, dataclasses.replace(ALL, nodes=["n2"]), 10, patience_s=0.1)
        found = search(cluster.session, ALL, pattern="line 9$")
        assert [(await found.__anext__()).node for _ in range(2)] == ["n1", "n1"], "while n2 says nothing"
        await found.aclose()
        second.stuck = False
        await second.written(1, b"the end\n")
        await feed.refresh(10, yes)
        assert list(feed.absent) == []
        await load_all(feed)
        for name, count in (("n1", 20), ("n2", 211)):
            assert [line for node, line in shown(feed) if node == name] == list(range(count))
        times = [row.t_ns for index in range(feed.count) if (row := feed.row(index)) is not None]
        assert all(before <= after for before, after in itertools.pairwise(times))

    run(tmp_path, scenario, 2)


def test_lines_that_the_node_has_dropped_are_one_and_the_others_stay_where_they_are(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        feed = RankFeed(cluster.source, "n1", 0, 0, "stdout")
        await node.written(0, b"%060d\n" % 7 * 30_000)
        await feed.refresh(20, lambda: True)
        await feed.load(feed.missing(20_000, 20_000) or 0)
        read = feed.row(20_000)
        assert read is not None
        path = await node.written(0, b"%060d\n" % 8 * 30_000)
        while path.stat().st_blocks * 512 > 3_000_000:
            await asyncio.sleep(0.01)
        await feed.refresh(20, lambda: False)
        gone = -feed.shifted
        assert gone > 10_000
        assert (feed.count, feed.index_of(read.key)) == (60_000 - gone, max(0, 20_000 - gone))
        while (want := feed.missing(0, 5)) is not None:
            await feed.load(want)
        assert b"were dropped here" in texts(feed)[0]
        assert feed.row(1) is not None
        assert sum(b"dropped" in text for text in texts(feed)) == 1

    run(tmp_path, scenario, bound=2_000_000)


def test_a_view_without_nccls_lines_knows_that_it_is(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        await node.written(0, b"step 1\nn1:7:9 [0] NCCL INFO Using network IB\nstep 2\n")
        for streams, wanted, apart in (
            (("stdout", "stderr"), [b"step 1", b"step 2"], True),
            (("nccl",), [b"n1:7:9 [0] NCCL INFO Using network IB"], False),
            (("stdout", "nccl"), [b"step 1", b"n1:7:9 [0] NCCL INFO Using network IB", b"step 2"], False),
        ):
            feed = MergedFeed(cluster.source, Selection(generation="all", streams=streams))
            await feed.refresh(20, lambda: True)
            assert (texts(feed), feed.hides_nccl) == (wanted, apart)

    run(tmp_path, scenario)


def test_an_agent_of_another_version_that_leaves_out_a_field_is_named(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        whole = node.store.merged

        async def merged(*args: Any, **more: Any) -> Answer:
            answer = await whole(*args, **more)
            return answer._replace(data={key: value for key, value in answer.data.items() if key != "since_ns"})

        node.store.merged = merged  # type: ignore[method-assign]
        await node.written(0, b"one\n")
        with pytest.raises(RequestFailed, match="n1: .* another supervisor: its agent does not send 'since_ns'"):
            await cluster.merged(ALL, 10)

    run(tmp_path, scenario)
