"""Logs for tests: agents in this process over real files, recordings of one rank or many, and the log screen by keys.

In: what the ranks write. Out: what the feeds of the log screen need of a cluster; the rows of a log on the screen.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from textual.pilot import Pilot
from textual.widgets import Input

from remote_agent.logs import LogStore
from remote_agent.wire import Answer, ChannelClosed
from supervisor.link.tasks import cancel_all, each
from supervisor.logs import pages
from supervisor.logs.pages import Page
from supervisor.logs.reader import LogReader
from supervisor.logs.rows import Clocks, LineKey
from supervisor.logs.selection import LogQuery, RecordFilter, Selection
from supervisor.session import Session
from supervisor.tui.app import SupervisorApp
from supervisor.tui.logs.feed import LogFeed
from supervisor.tui.logs.finder import Finder
from supervisor.tui.screens.logs.screen import LogsScreen
from supervisor.tui.widgets.virtual_log import VirtualLog
from tests.screens import recorded
from tests.screens.screens import press, text_of, type_key, until

ALL = Selection(generation="all")


FILE = ("n1", 0, 0, "stdout")
ONE = Selection(0, [0], ("stdout",), ["n1"])


SECOND = 1_000_000_000


BEGIN = 1_795_169_000 * SECOND


@dataclasses.dataclass
class NodeLink:
    """A node whose agent is in this process: everything but the wire."""

    name: str
    store: LogStore
    root: Path
    stuck: bool = False
    can_be_asked: bool = True
    opened_at: float = 1.0
    is_malformed: bool = False
    active: bool = True
    opened: bool = True
    is_ours: bool = True
    reached_at: float | None = 1.0
    """None: the connection is lost."""

    @property
    def view(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.name)

    async def call(self, op: str, args: dict[str, Any], timeout_s: float) -> Answer:
        if self.stuck:
            await asyncio.wait_for(asyncio.Event().wait(), timeout_s)
        ask: Callable[..., Awaitable[Answer]] = getattr(self.store, op.removeprefix("log_"))
        return await ask(**args)

    async def stream(self, op: str, args: dict[str, Any]) -> AsyncGenerator[Answer, None]:
        while self.stuck:
            await asyncio.sleep(0.01)
        ask: Callable[..., AsyncGenerator[Answer, None]] = getattr(self.store, op.removeprefix("log_"))
        reached_at = self.reached_at
        async with aclosing(ask(**args)) as items:
            async for item in items:
                if self.reached_at != reached_at:
                    raise ChannelClosed("lost")
                yield item

    async def whole_stream(self, op: str, args: dict[str, Any], timeout_s: float) -> AsyncGenerator[Answer, None]:
        async for item in each(self.stream(op, args), timeout_s):
            yield item

    def write(self, rank: int, data: bytes) -> Path:
        path = self.root / "generation_0" / f"rank_{rank}" / "stdout.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)
        return path

    async def written(self, rank: int, data: bytes) -> Path:
        """Write, and wait until the agent has seen it."""
        path = self.write(rank, data)
        await self.seen(rank, path.stat().st_size)
        return path

    async def seen(self, rank: int, size: int) -> None:
        """Wait until the agent has seen that many bytes."""
        while (rank, size) not in [(file["rank"], file["size"]) for file in (await self.store.list()).data["files"]]:
            await asyncio.sleep(0.005)


class Cluster:
    """What the feeds and `session.logs` need of a session."""

    follows = True
    ended = False
    state = "running"

    def __init__(self) -> None:
        self.links: dict[str, NodeLink] = {}
        self.offsets_ms: dict[str, float] = {}

    async def wait_change(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    @property
    def status(self) -> dict[str, Any]:
        return {"nodes": [{"name": name, "clock_offset_ms": ms} for name, ms in self.offsets_ms.items()]}

    @property
    def session(self) -> Session:
        return cast("Session", self)

    @property
    def source(self) -> Session:
        return cast("Session", self)

    async def merged(self, selection: Selection, count: int, **bounds: Any) -> Page:
        # A node that does not answer at all is waited for in vain; one on a busy machine is not.
        patience_s = 0.2 if any(link.stuck for link in self.links.values()) else 60.0
        return await pages.merged(self.session, selection, count, patience_s=patience_s, **bounds)

    async def from_line(self, selection: Selection, key: LineKey, count: int) -> Page:
        return await pages.from_line(self.session, selection, key, count)

    def rows(self, query: LogQuery, clocks: Clocks | None = None) -> LogReader:
        return LogReader(self.session, query, clocks)


@asynccontextmanager
async def cluster_of(directory: Path, nodes: int = 1, bound: int = 0) -> AsyncIterator[tuple[Cluster, list[NodeLink]]]:
    """Start the agents of a cluster; yields it and its nodes."""
    cluster = Cluster()
    for number in range(1, nodes + 1):
        root = directory / f"n{number}"
        root.mkdir()
        link = cluster.links[f"n{number}"] = NodeLink(f"n{number}", LogStore(root, live=True, bound=bound), root)
        await link.store.start()
    try:
        yield cluster, [*cluster.links.values()]
    finally:
        for link in cluster.links.values():
            await link.store.stop()


def lines(count: int, name: str = "line") -> bytes:
    return b"".join(b"%s %d\n" % (name.encode(), number) for number in range(count))


def shown(feed: LogFeed) -> list[tuple[str, int]]:
    """Node and number of all lines that are here, in their order."""
    rows = [feed.line(index) for index in range(feed.count)]
    return [(row.node, row.line) for row in rows if row is not None]


def texts(feed: LogFeed) -> list[bytes]:
    rows = [feed.line(index) for index in range(feed.count)]
    return [row.text for row in rows if row is not None]


def yes() -> bool:
    return True


def no() -> bool:
    return False


def narrowed(cluster: Cluster, **parts: object) -> LogFeed:
    return LogFeed(cluster.source, dataclasses.replace(ALL, filter=RecordFilter(**parts)))  # type: ignore[arg-type]


async def search(finder: Finder) -> None:
    """Search until all that is there has been searched."""
    is_complete = asyncio.Event()
    searching = asyncio.ensure_future(finder.run(lambda: None, is_complete.set))
    await is_complete.wait()
    await cancel_all([searching])


async def load_all(feed: LogFeed) -> list[bytes]:
    """Scroll to both ends; returns all lines."""
    for _ in range(50):
        want = feed.missing(0, 0)
        want = feed.missing(feed.count - 1, feed.count - 1) if want is None else want
        if want is None:
            return texts(feed)
        await feed.load(want)
    raise AssertionError("it does not end")


def talking(lines: int = 3000) -> recorded.RecordedSession:
    """Two nodes, of which one rank has written a lot."""
    session = recorded.load("running_2x2")
    session.files = {}
    session.write(FILE, *(f"line {number:06d} ".encode() + b"x" * 200 for number in range(lines)))
    return session


def with_needles(lines: int, *places: int) -> recorded.RecordedSession:
    """One rank has written a lot, and in these lines what is looked for."""
    session = talking(lines)
    for at in places:
        session.files[FILE][at].text = b"a needle here"
    return session


def numbered(lines: int, *, wide: bool = False) -> recorded.RecordedSession:
    """One rank that writes a line a second, each longer than the screen is wide."""
    session = recorded.load("running_2x2")
    session.files = {}
    for number in range(lines):
        text = f"line {number:06d} " + ("漢字" * 40 if wide else "x" * 150) + f" end {number:06d}"
        session.write(FILE, text.encode(), t_ns=BEGIN + number * SECOND)
    return session


def stepping(ranks: int, steps: int) -> recorded.RecordedSession:
    """Many ranks that print one line a step, and all the same but for a number."""
    session = recorded.load("running_2x2")
    session.files = {}
    step(session, ranks, range(steps))
    return session


def step(session: recorded.RecordedSession, ranks: int, steps: range) -> None:
    """Let each rank print its line of these steps."""
    for number in steps:
        for rank in range(ranks):
            loss = "nan" if rank == 37 else f"1.{rank % 7}"
            file = (f"n{rank % 2 + 1}", 0, rank, "stdout")
            session.write(file, f"step {number} loss={loss}".encode(), t_ns=BEGIN + number * SECOND + rank)


def log_of(app: SupervisorApp) -> VirtualLog:
    """The log of the log screen."""
    screen = app.screen
    assert isinstance(screen, LogsScreen)
    return screen.view


def body(app: SupervisorApp) -> list[str]:
    """The rows of the log, without title, bars and scroll bar."""
    return [line.rstrip("│┃ ") for line in text_of(app).splitlines()[3:-2]]


async def open_stdout(app: SupervisorApp, pilot: Pilot[int]) -> VirtualLog:
    """The stdout of rank 0."""
    await press(app, pilot, "3", "enter", "s")
    log = log_of(app)
    assert log.feed is not None
    assert log.feed.selection.file is not None
    return log


async def answer(app: SupervisorApp, pilot: Pilot[int], key: str, text: str) -> str:
    """Type what a key asks for, as fast as a paste."""
    await press(app, pilot, key)
    # Where the machine stands still for seconds, keys that are typed ahead are handed on to what is there.
    await until(app, pilot, lambda: isinstance(app.focused, Input))
    for char in text:
        type_key(app, char)
    return await press(app, pilot, "enter")


async def see(app: SupervisorApp, pilot: Pilot[int], text: str) -> None:
    """Wait until a line of the log has this text."""
    await until(app, pilot, lambda: any(text in line for line in body(app)))


async def led_to(app: SupervisorApp, pilot: Pilot[int], line: int) -> None:
    """Wait until this line of the stdout of rank 0 is the one that is pointed at, and shown."""
    key = (0, 0, "stdout", line)
    await until(app, pilot, lambda: log_of(app).pointer == key and any(row.startswith("▸") for row in body(app)))
