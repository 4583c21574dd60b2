"""The log of all nodes as it grows: every byte once, over lost links, until the job is over and all is sent.

In: log_follow of each node; log_list and log_read for what a lost link left out.
Out: chunks of whole lines, in the order in which they arrive here.

**A chunk never overlaps another one of its file, and leaves no hole behind itself**; where bytes are gone from the
node's disk, a line says so in their place.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, NamedTuple

from remote_agent.logs.rows import dropped_text
from remote_agent.wire import Answer, CallFailed, WireError
from supervisor.session.logs import READ_DEADLINE, READ_SIZE, Selection
from supervisor.session.tasks import cancel_all
from supervisor.session.view import ENDED_STATES

if TYPE_CHECKING:
    from supervisor.session.link import Link
    from supervisor.session.session import Session

# Chunks (at most 64 KiB each) that wait for a slow reader before the nodes are no longer read.
BACKLOG = 128
# How long the text of a host that cannot be reached is waited for when the job is over, seconds.
LAST_WAIT = 10.0
# How long a host that is reached may give nothing when the job is over: it may have gigabytes to index, seconds.
STUCK_WAIT = 60.0
# How long nothing comes once the job is over before a host is asked whether there is more, seconds.
LAST_LOOK = 3.0
RETRY = 0.5
# How often nodes that have joined meanwhile are looked for, seconds.
LOOK = 1.0

# A file: generation, rank, stream. What has been passed on, in bytes, by node and file.
File = tuple[int, int, str]
Seen = dict[str, dict[File, int]]


class Chunk(NamedTuple):
    """Consecutive bytes of one file; whole lines but where the file itself ends or rests without a newline."""

    node: str
    generation: int
    rank: int
    stream: str
    offset: int
    t_ns: int
    data: bytes


class Follower:
    """Follows one node's files for one reader."""

    def __init__(
        self,
        session: Session,
        link: Link,
        selection: Selection,
        start: str,
        oldest: int | None,
        queue: asyncio.Queue[Chunk | None],
    ) -> None:
        self._session = session
        self._link = link
        self._selection = selection
        self._start = start
        self._queue = queue
        self.seen: dict[File, int] = {}
        """Up to where each file has been passed on."""
        self._base: dict[File, int] = {}
        """How large the files were that were there before us, where only what comes is wanted."""
        self._oldest = oldest
        """Without a generation in the selection: the first one that is wanted; None: not known yet."""
        self._moved_at = time.monotonic()
        """When something was passed on, or the job was not over."""

    async def run(self) -> None:
        """Pass all on until the job is over, or the host is out of reach then; then None."""
        passing = asyncio.ensure_future(self._pass_all())
        try:
            has_all = False
            while not (passing.done() or has_all or self._is_stuck()):
                await asyncio.wait((passing,), timeout=RETRY)
                has_all = await self._has_all()
            if passing.done():
                passing.result()
            elif not has_all:
                self._warn()
        finally:
            await cancel_all((passing,))
        await self._queue.put(None)

    def _is_over(self) -> bool:
        return self._session.ended or self._session.state in ENDED_STATES

    def _is_stuck(self) -> bool:
        """Tell whether the job is over and nothing has come for long, though there is a reader for it."""
        now = time.monotonic()
        if not self._is_over() or self._queue.full():
            self._moved_at = now
        return now - self._moved_at > (STUCK_WAIT if self._link.opened else LAST_WAIT)

    async def _has_all(self) -> bool:
        """Tell whether the job is over and nothing is left: an agent that was cut off does not know that it is over."""
        if not self._link.opened or not self._is_over() or time.monotonic() - self._moved_at < LAST_LOOK:
            return False
        try:
            files = (await self._link.call("log_list", timeout_s=LAST_LOOK)).data["files"]
        except (CallFailed, WireError, asyncio.TimeoutError):
            return False
        return all(int(entry["size"]) <= self._position(key) for entry in files if self._wants(key := _file(entry)))

    async def _pass_all(self) -> None:
        session, link = self._session, self._link
        sent_all_of = 0.0
        while True:
            over = self._is_over()
            if link.opened and sent_all_of != link.opened_at:
                with contextlib.suppress(CallFailed, WireError, asyncio.TimeoutError):
                    opened_at = link.opened_at
                    await self._once()
                    sent_all_of = opened_at
                    continue
            elif over and link.opened:
                return
            elif over and (link.missing or not link.active):
                self._warn()
                return
            await session.wait_change(RETRY)

    def _warn(self) -> None:
        if self.seen:
            name = self._link.view.name
            self._session.notice(f"{name}: out of reach; the end of its log is not shown here", "warning", name)

    async def _once(self) -> None:
        """Follow until the stream ends, then fetch what it may have left out."""
        if self._start == "end" or self._oldest is None:
            await self._look_around()
        # What comes after a lost link is fetched from where we were, not from the beginning.
        first, self._start = self._start, "resume"
        if first == "resume":
            await self._catch_up()
        start = "begin" if first == "begin" else "end"
        stream = self._link.stream("log_follow", {**self._selection.args(), "start": start})
        try:
            async for answer in stream:
                await self._take(answer)
        finally:
            await stream.aclose()
        await self._catch_up()

    async def _look_around(self) -> None:
        """Learn which generation is the newest and, where only what comes is wanted, what is there already."""
        files = (await self._link.call("log_list")).data["files"]
        if self._start == "end":
            self._base = {_file(entry): int(entry["size"]) for entry in files}
        if self._oldest is None:
            self._oldest = max((int(entry["generation"]) for entry in files), default=0)

    async def _take(self, answer: Answer) -> None:
        entry = answer.data
        key, offset, data = _file(entry), int(entry["offset"]), answer.body
        end = int(entry.get("dropped") or 0) or offset + len(data)
        if not self._wants(key):
            return
        if entry.get("replaced"):
            self.seen[key] = offset
        elif key not in self.seen:
            # At the end means: the line that is being written now is given whole.
            self.seen[key] = min(offset, self._base.get(key, 0))
        if offset > self.seen[key]:
            await self._fill(key, offset)
        seen = self.seen[key]
        if end <= seen:
            return
        if not entry.get("dropped"):
            data = data[max(0, seen - offset) :]
        await self._pass_on(key, max(seen, offset), int(entry.get("t_ns") or 0), data, end)

    async def _catch_up(self) -> None:
        for entry in (await self._link.call("log_list")).data["files"]:
            key = _file(entry)
            if self._wants(key) and int(entry["size"]) > self._position(key):
                await self._fill(key, int(entry["size"]))

    def _position(self, key: File) -> int:
        return self.seen.get(key, self._base.get(key, 0))

    def _wants(self, key: File) -> bool:
        selection = self._selection
        generation, rank, stream = key
        if stream not in selection.streams or (selection.ranks is not None and rank not in selection.ranks):
            return False
        if selection.generation is None:
            return generation >= (self._oldest or 0)
        return selection.generation in ("all", generation)

    async def _fill(self, key: File, until: int) -> None:
        """Fetch one file from where we are to `until`."""
        generation, rank, stream = key
        place = {"generation": generation, "rank": rank, "stream": stream}
        while (offset := self._position(key)) < until:
            length = min(READ_SIZE, until - offset)
            wish = {**place, "offset": offset, "length": length}
            answer = await self._link.call("log_read", wish, timeout_s=READ_DEADLINE)
            data, begin = answer.body, int(answer.data["offset"])
            if begin > offset:
                await self._pass_on(key, offset, 0, dropped_text(begin - offset) + b"\n", begin)
                continue
            if not data:
                return
            if offset + len(data) < until:
                # A line is not torn only because a request ends within it.
                data = data[: data.rfind(b"\n") + 1] or data
            await self._pass_on(key, offset, 0, data, offset + len(data))

    async def _pass_on(self, key: File, offset: int, t_ns: int, data: bytes, end: int) -> None:
        await self._queue.put(Chunk(self._link.view.name, *key, offset, t_ns, data))
        self._moved_at = time.monotonic()
        self.seen[key] = end


def _file(entry: dict[str, Any]) -> File:
    return (int(entry["generation"]), int(entry["rank"]), str(entry["stream"]))


def wanted_links(session: Session, selection: Selection) -> list[Link]:
    """Return the links to the job's nodes, as far as the selection means them."""
    return [
        link
        for name, link in session.links.items()
        if link.active and (selection.nodes is None or name in selection.nodes)
    ]


async def follow(
    session: Session,
    selection: Selection,
    start: str = "end",
    seen: Seen | None = None,
    oldest: int | None = None,
) -> AsyncGenerator[Chunk, None]:
    """Yield chunks of all nodes until the job is over and all is sent; closing it ends the requests.

    `start`: begin, end, or resume, which goes on from `seen` (by node and file). `oldest`: the first generation that
    is wanted where the selection names none (default: each node's newest). The session must be attached or fed.
    """
    queue: asyncio.Queue[Chunk | None] = asyncio.Queue(BACKLOG)
    running: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            for link in wanted_links(session, selection):
                name = link.view.name
                if name not in running:
                    follower = Follower(session, link, selection, start, oldest, queue)
                    follower.seen.update((seen or {}).get(name, {}))
                    running[name] = asyncio.ensure_future(follower.run())
            if queue.empty():
                getter = asyncio.ensure_future(queue.get())
                try:
                    await asyncio.wait((getter,), timeout=LOOK)
                    chunk = getter.result() if getter.done() else None
                finally:
                    getter.cancel()
                if chunk is not None:
                    yield chunk
            while not queue.empty():
                chunk = queue.get_nowait()
                if chunk is not None:
                    yield chunk
            if all(task.done() for task in running.values()) and queue.empty():
                break
        for task in running.values():
            task.result()
    finally:
        await cancel_all(running.values())
