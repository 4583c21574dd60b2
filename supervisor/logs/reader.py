"""The logs of all nodes, those lines that are there and those that come, over lost links, until all has been read.

In: log_follow or log_rows of each node. Out: chunks of bytes, or rows that are looked for or pass a filter.

**Every byte of a file comes once and in order, and so does every row; a request after a lost link names how far the
one before it came.** Where bytes are gone from the node's disk, a line says so in their place.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.wire import Answer, Args, CallFailed, WireError
from remote_agent.wire.answers import LogKey
from remote_agent.wire.events import ENDED_STATES
from supervisor.errors import RequestFailed, Unreachable
from supervisor.link.tasks import cancel_all, within
from supervisor.logs.files import READ_DEADLINE, Failure, is_own, leave_out, operator_errors, sources
from supervisor.logs.rows import Clocks, LogLine

if TYPE_CHECKING:
    from remote_agent.wire.answers import LogChunk, LogEntry, LogPage
    from supervisor.link.host_link import HostLink
    from supervisor.link.hub import Hub
    from supervisor.logs.selection import LogQuery, Selection
    from supervisor.ssh.answers import LogFileEntry

# Answers (a chunk has at most 64 KiB) that wait for a slow reader before the nodes are no longer read.
BACKLOG = 128
# An unreachable host is awaited this long once the job is over, seconds.
LAST_WAIT = 10.0
# A connected host may send nothing for this long once the job is over: it may have gigabytes to index, seconds.
STUCK_WAIT = 60.0
# Once the job is over and nothing comes for this long, a host is asked for the rest, seconds.
LAST_LOOK = 3.0
RETRY = 0.5
# Nodes that have joined are looked for this often, seconds.
LOOK = 1.0

Positions = dict[LogKey, int]
"""The next byte, or line, of each file."""


class Chunk(NamedTuple):
    """Consecutive bytes of one file: whole lines, except of a long line, or where the file ends without a newline."""

    node: str
    generation: int
    rank: int
    stream: str
    offset: int
    t_ns: int
    data: bytes


class _NodeReader:
    """Reads one stream of log answers from one node, and resumes it after a lost link."""

    def __init__(
        self, hub: Hub, link: HostLink, op: str, args: Args, positions: Positions, queue: asyncio.Queue[_Item]
    ) -> None:
        self._hub = hub
        self._link = link
        self._op = op
        self._args = args
        self._positions = positions
        self._queue = queue
        self._has_read = False
        self.is_behind = op == "log_rows"
        """What the node had when it was asked has yet to be read."""
        self._moved_at = time.monotonic()
        """The time when something came, or the job was not over."""

    async def run(self) -> None:
        """Put all answers into the queue, then None: the job is over and all is read, or the host is out of reach."""
        try:
            await self._run()
        finally:
            self._note_caught_up()

    def _note_caught_up(self) -> None:
        self.is_behind = False
        with contextlib.suppress(asyncio.QueueFull):
            # It wakes a reader that waits; one that does not wait looks at the task.
            self._queue.put_nowait(None)

    @property
    def is_awaited(self) -> bool:
        """True until a node that can be asked has given what it had, or failed."""
        return self.is_behind and self._link.reached_at is not None

    async def _run(self) -> None:
        reading = asyncio.ensure_future(self._read_all())
        try:
            while not (reading.done() or self._is_stuck()):
                await asyncio.wait((reading,), timeout=RETRY)
                if not reading.done() and self._is_quiet():
                    # An agent that was cut off does not know that the job is over.
                    await cancel_all((reading,))
                    if await self._read_rest():
                        return
                    reading = asyncio.ensure_future(self._read_all())
            if reading.done():
                reading.result()
            else:
                self._warn()
        finally:
            await cancel_all((reading,))

    def _is_over(self) -> bool:
        return self._hub.ended or self._hub.state in ENDED_STATES

    def _is_stuck(self) -> bool:
        """Return True when the job is over and nothing has come for long, though there is room for it."""
        now = time.monotonic()
        # What was there ends by itself: a search in large files may find nothing for long.
        if not self._is_over() or self._queue.full() or self.is_awaited:
            self._moved_at = now
        return now - self._moved_at > (STUCK_WAIT if self._link.opened else LAST_WAIT)

    def _is_quiet(self) -> bool:
        return self._link.opened and self._is_over() and time.monotonic() - self._moved_at > LAST_LOOK

    async def _read_rest(self) -> bool:
        """Read what there still is; returns False when that fails."""
        try:
            await self._read({"past": True})
        except (CallFailed, WireError, asyncio.TimeoutError):
            return False
        return True

    async def _read_all(self) -> None:
        read_at: float | None = None
        while True:
            over = self._is_over()
            reached_at = self._link.reached_at
            if reached_at is not None and read_at != reached_at:
                try:
                    await self._read_on()
                except CallFailed as refused:
                    if refused.kind in ("pattern", "usage", "version"):
                        raise RequestFailed(refused.message, refused.hint, refused.kind) from refused
                except (WireError, asyncio.TimeoutError):
                    # Another host may answer for this one, and still not reach it.
                    await asyncio.sleep(RETRY)
                else:
                    read_at = reached_at
                    continue
            elif over and reached_at is not None:
                return
            elif over and (self._link.missing or not self._link.active):
                self._warn()
                return
            elif over:
                self._link.connect()
            await self._hub.wait_change(RETRY)

    def _warn(self) -> None:
        if self._has_read:
            name = self._link.view.name
            self._hub.notice(f"{name}: unreachable; the end of its log is missing here", "warning", name)

    async def _read_on(self) -> None:
        """Read what is there, and then what comes, until all is read."""
        if self.is_behind:
            try:
                await self._read({"past": True, "whole": True})
            finally:
                # A node that fails holds nobody up.
                self._note_caught_up()
        await self._read({"past": False})

    async def _read(self, how: Args) -> None:
        args = {**self._args, **how, "after": [[*file, at] for file, at in self._positions.items()]}
        link, op = self._link, self._op
        async with aclosing(
            link.whole_stream(op, args, timeout_s=READ_DEADLINE) if how["past"] else link.stream(op, args)
        ) as items:
            async for answer in items:
                await self._take(answer)

    async def _take(self, answer: Answer) -> None:
        data: LogPage = answer.data
        if "first" in data:
            # From here on the request names its generation and its positions itself.
            self._args |= {"first": data["first"], "start": "begin"}
        if answer.body or data.get("rows") or data.get("apart"):
            await self._queue.put((self._link.view.name, answer))
            self._has_read = True
            self._moved_at = time.monotonic()
        self._positions.update(_positions(answer))


_Item = tuple[str, Answer] | None
"""A node and its answer; None: nothing has come for a while, or a reader has given all."""


def _positions(answer: Answer) -> Positions:
    """Return the positions that a reader has reached with an answer."""
    chunk: LogChunk = answer.data
    page: LogPage = answer.data
    positions: Positions = {}
    if "offset" in chunk:
        positions[_file(chunk)] = chunk.get("dropped") or chunk["offset"] + len(answer.body)
    for row in page.get("rows", ()):
        positions[_file(row)] = row["line"] + 1
    for generation, rank, stream, at in page.get("after", ()):
        positions[LogKey(generation, rank, stream)] = at
    return positions


def _file(entry: LogChunk | LogEntry | LogFileEntry) -> LogKey:
    return LogKey(entry["generation"], entry["rank"], entry["stream"])


def _wanted_links(hub: Hub, selection: Selection) -> list[HostLink]:
    """Return the links to the job's nodes that the selection includes."""
    return [
        link for name, link in hub.links.items() if link.active and (selection.nodes is None or name in selection.nodes)
    ]


async def _read_nodes(
    hub: Hub, selection: Selection, make: Callable[[HostLink, asyncio.Queue[_Item]], _NodeReader]
) -> AsyncGenerator[tuple[_Item, bool], None]:
    """Yield the answers of all nodes, also of those that join, until the job is over and all is read.

    With each, whether the nodes have given all that they had when they were asked.
    """
    queue: asyncio.Queue[_Item] = asyncio.Queue(BACKLOG)
    readers: list[_NodeReader] = []
    running: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            for link in _wanted_links(hub, selection):
                if link.view.name not in running:
                    readers.append(make(link, queue))
                    running[link.view.name] = asyncio.ensure_future(readers[-1].run())
            ended = [task for task in running.values() if task.done()]
            leave_out(hub, _failures(running), len(running))
            if len(ended) == len(running) and queue.empty():
                return
            item = None
            with contextlib.suppress(asyncio.TimeoutError):
                item = await within(queue.get(), LOOK)
            yield item, queue.empty() and not any(reader.is_awaited for reader in readers)
    finally:
        await cancel_all(running.values())


def _failures(running: Mapping[str, asyncio.Task[None]]) -> dict[str, Failure]:
    """Return what ended readers failed with, by node; raises what is not one node's own."""
    failed: dict[str, Failure] = {}
    for name, task in running.items():
        error = task.exception() if task.done() else None
        if isinstance(error, RequestFailed) and is_own(error):
            failed[name] = error
        elif error is not None:
            raise error
    return failed


async def follow(
    hub: Hub, selection: Selection, start: str = "end", first: int | None = None
) -> AsyncGenerator[Chunk, None]:
    """Yield chunks of all nodes until the job is over and all is sent; closing it ends the requests.

    `start`: begin or end. `first`: the first generation wanted where the selection names none (default: each node's
    newest). The hub must be kept up to date.
    """

    def make(link: HostLink, queue: asyncio.Queue[_Item]) -> _NodeReader:
        return _NodeReader(hub, link, "log_follow", {**selection.args(), "start": start, "first": first}, {}, queue)

    async with aclosing(_read_nodes(hub, selection, make)) as items:
        async for item, _ in items:
            if item is None:
                continue
            node, answer = item
            data: LogChunk = answer.data
            yield Chunk(node, *_file(data), data["offset"], data.get("t_ns") or 0, answer.body)


class Batch(NamedTuple):
    """Rows of one node."""

    lines: list[LogLine]
    is_caught_up: bool
    """All that the nodes that can be asked had when they were asked has been given."""


class LogReader:
    """The rows of one reader: those that are there, by time over all nodes, and those that come."""

    def __init__(self, hub: Hub, query: LogQuery, clocks: Clocks | None = None) -> None:
        self._hub = hub
        self._query = query
        self._clocks = clocks or Clocks(hub)
        self._positions: dict[str, Positions] = {}
        self.apart = 0
        """How many lines were left out because they belong to a stream that was not asked for."""

    async def existing(self, first: int | None = None, *, whole: bool = False) -> AsyncGenerator[LogLine, None]:
        """Yield the rows that are there, by time; raises Unreachable, RequestFailed if no node gives them.

        A node that fails is left out from there on.
        `first`: the first generation wanted where the selection names none. `whole`: lines and records that are still
        being written are left to `live`.
        """
        links = sources(self._hub, self._query.files.nodes)
        streams = [self._of_node(link, first, whole=whole) for link in links]
        failed: dict[str, Failure] = {}

        async def following(number: int) -> LogLine | None:
            try:
                return await anext(streams[number], None)
            except (Unreachable, RequestFailed) as error:
                if not is_own(error):
                    raise
                failed[links[number].view.name] = error
                return None

        heads = [asyncio.ensure_future(following(number)) for number in range(len(streams))]
        try:
            heap: list[tuple[int, int, LogLine]] = []
            for number, head in enumerate(await asyncio.gather(*heads)):
                if head is not None:
                    heap.append((head.t_ns, number, head))
            heapq.heapify(heap)
            while heap:
                _, number, row = heap[0]
                yield row
                head = await following(number)
                if head is None:
                    heapq.heappop(heap)
                else:
                    heapq.heapreplace(heap, (head.t_ns, number, head))
            leave_out(self._hub, failed, len(links))
        finally:
            # A stream that is still read cannot be closed.
            await cancel_all(heads)
            for stream in streams:
                await stream.aclose()

    async def _of_node(self, link: HostLink, first: int | None, *, whole: bool) -> AsyncGenerator[LogLine, None]:
        name = link.view.name
        positions = self._positions.setdefault(name, {})
        args = {**self._request(name), "first": first, "past": True, "whole": whole}
        try:
            with operator_errors(name):
                async with aclosing(link.whole_stream("log_rows", args, timeout_s=READ_DEADLINE)) as answers:
                    async for answer in answers:
                        for row in self._rows(name, answer):
                            yield row
                        positions.update(_positions(answer))
        except Unreachable:
            # `live` resumes where a lost link left off; a host whose answer nobody can read ends no other's log.
            if not whole and not link.is_malformed:
                raise

    async def live(self, first: int | None = None) -> AsyncGenerator[Batch, None]:
        """Yield the rows that come after those of `existing`, or all, until the job is over and all is read.

        Raises RequestFailed. The hub must be kept up to date.
        """
        was_caught_up = False

        def make(link: HostLink, queue: asyncio.Queue[_Item]) -> _NodeReader:
            name = link.view.name
            args = {**self._request(name), "first": first}
            return _NodeReader(self._hub, link, "log_rows", args, self._positions.get(name, {}), queue)

        async with aclosing(_read_nodes(self._hub, self._query.files, make)) as items:
            async for item, is_caught_up in items:
                if item is not None or is_caught_up != was_caught_up:
                    yield Batch(self._rows(*item) if item is not None else [], is_caught_up)
                was_caught_up = is_caught_up

    def _request(self, name: str) -> Args:
        return {**self._query.args(), "since_ns": self._clocks.at(name, self._query.since_ns)}

    def _rows(self, name: str, answer: Answer) -> list[LogLine]:
        self.apart += answer.data.get("apart", 0)
        return self._clocks.rows(name, answer)
