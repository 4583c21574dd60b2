"""The logs of all nodes as they grow, over lost links, until the job is over and everything has been read.

In: log_follow or log_rows of each node. Out: chunks of bytes, or rows that pass a filter.

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
from supervisor.errors import RequestFailed, Unreachable, why
from supervisor.link.tasks import cancel_all, within
from supervisor.logs.files import READ_DEADLINE, Failure, files, is_own, leave_out, sources
from supervisor.logs.rows import Clocks, LogLine

if TYPE_CHECKING:
    from remote_agent.wire.answers import LogChunk, LogEntry, LogPage
    from supervisor.link.host_link import HostLink
    from supervisor.link.hub import Hub
    from supervisor.logs.selection import Selection
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
        self._moved_at = time.monotonic()
        """The time when something came, or the job was not over."""

    async def run(self) -> None:
        """Put all answers into the queue, then None: the job is over and all is read, or the host is out of reach."""
        try:
            await self._run()
        finally:
            with contextlib.suppress(asyncio.QueueFull):
                # It wakes a reader that waits; one that does not wait looks at the task.
                self._queue.put_nowait(None)

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
        if not self._is_over() or self._queue.full():
            self._moved_at = now
        return now - self._moved_at > (STUCK_WAIT if self._link.opened else LAST_WAIT)

    def _is_quiet(self) -> bool:
        return self._link.opened and self._is_over() and time.monotonic() - self._moved_at > LAST_LOOK

    async def _read_rest(self) -> bool:
        """Read what there still is; returns False when that fails."""
        try:
            await self._read(past=True)
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
                    await self._read(past=False)
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

    async def _read(self, *, past: bool) -> None:
        after = [[*file, at] for file, at in self._positions.items()]
        args = {**self._args, "after": after, "past": past}
        link, op = self._link, self._op
        async with aclosing(
            link.whole_stream(op, args, timeout_s=READ_DEADLINE) if past else link.stream(op, args)
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
"""A node and its answer; None: a reader has ended."""


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
) -> AsyncGenerator[tuple[str, Answer], None]:
    """Yield the answers of all nodes, also of those that join, until the job is over and all is read."""
    queue: asyncio.Queue[_Item] = asyncio.Queue(BACKLOG)
    running: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            for link in _wanted_links(hub, selection):
                if link.view.name not in running:
                    running[link.view.name] = asyncio.ensure_future(make(link, queue).run())
            ended = [task for task in running.values() if task.done()]
            leave_out(hub, _failures(running), len(running))
            if len(ended) == len(running) and queue.empty():
                return
            with contextlib.suppress(asyncio.TimeoutError):
                item = await within(queue.get(), LOOK)
                if item is not None:
                    yield item
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

    owners = await _owners(hub, selection)
    async with aclosing(_read_nodes(hub, selection, make)) as items:
        async for node, answer in items:
            data: LogChunk = answer.data
            if owners.get(_file(data), node) == node:
                yield Chunk(node, *_file(data), data["offset"], data.get("t_ns") or 0, answer.body)


async def _owners(hub: Hub, selection: Selection) -> dict[LogKey, str]:
    """Return the node of each file that is there: another node may have a copy of it, which is not read as well."""
    with contextlib.suppress(Unreachable, RequestFailed):
        found = await files(hub, selection.nodes)
        return {_file(entry): entry["node"] for entry in found if not entry.get("copy")}
    return {}


class RowReader:
    """The rows of one reader: first those that are there, by time over all nodes, then those that come.

    Rows pass if their line matches `pattern` and has the `level`, and if their record passes the selection's filter.
    `exact`: with all bytes of their lines, also those that a terminal overwrites.
    """

    def __init__(
        self,
        hub: Hub,
        selection: Selection,
        *,
        pattern: str | None = None,
        ignore_case: bool = False,
        level: str | None = None,
        since_ns: int | None = None,
        note_apart: Callable[[int], object] | None = None,
        clocks: Clocks | None = None,
        exact: bool = False,
    ) -> None:
        self._hub = hub
        self._selection = selection
        self._args = {**selection.args(), "pattern": pattern, "ignore_case": ignore_case, "level": level}
        if selection.filter:
            self._args["shown"] = selection.filter.args()
        if exact:
            self._args["exact"] = True
        self._since_ns = since_ns
        self._note_apart = note_apart
        self._clocks = clocks or Clocks(hub)
        self._positions: dict[str, Positions] = {}

    async def existing(self, first: int | None = None, *, whole: bool = False) -> AsyncGenerator[LogLine, None]:
        """Yield the rows that are there, by time; raises Unreachable, RequestFailed if no node gives them.

        A node that fails is left out from there on.
        `first`: the first generation wanted where the selection names none. `whole`: lines and records that are still
        being written are left to `new`.
        """
        links = sources(self._hub, self._selection.nodes)
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
            async with aclosing(link.whole_stream("log_rows", args, timeout_s=READ_DEADLINE)) as answers:
                async for answer in answers:
                    for row in self._rows(name, answer):
                        yield row
                    positions.update(_positions(answer))
        except CallFailed as refused:
            raise RequestFailed(refused.message, refused.hint, refused.kind) from refused
        except (WireError, asyncio.TimeoutError) as broken:
            # `new` resumes where a lost link left off; a host whose answer nobody can read ends no other's log.
            if not whole and not link.is_malformed:
                raise Unreachable(f"{name}: {why(broken)}") from broken

    async def new(self, first: int | None = None) -> AsyncGenerator[list[LogLine], None]:
        """Yield the rows that come after those of `existing`, until the job is over and all is read.

        Raises RequestFailed. The hub must be kept up to date.
        """

        def make(link: HostLink, queue: asyncio.Queue[_Item]) -> _NodeReader:
            name = link.view.name
            args = {**self._request(name), "first": first}
            return _NodeReader(self._hub, link, "log_rows", args, self._positions.get(name, {}), queue)

        async with aclosing(_read_nodes(self._hub, self._selection, make)) as items:
            async for node, answer in items:
                yield self._rows(node, answer)

    def _request(self, name: str) -> Args:
        return {**self._args, "since_ns": self._clocks.at(name, self._since_ns)}

    def _rows(self, name: str, answer: Answer) -> list[LogLine]:
        apart = int(answer.data.get("apart") or 0)
        if apart and self._note_apart is not None:
            self._note_apart(apart)
        return self._clocks.rows(name, answer)
