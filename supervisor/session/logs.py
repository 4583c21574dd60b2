"""Log text of all nodes, put together by time of arrival: windows, pages, whole dumps.

In: log_* answers of the nodes that hold the files. Out: rows in the order in which they were written.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from remote_agent.wire import Answer, CallFailed, WireError
from supervisor.errors import RequestFailed, Unreachable, why
from supervisor.session.filters import ALL, Filter
from supervisor.session.parts import Ends, Part, back, ends_of, forth, part_of
from supervisor.session.streams import files_of
from supervisor.session.tasks import cancel_all

if TYPE_CHECKING:
    from supervisor.session.link import Link
    from supervisor.session.session import Session

# Rows in one request of a dump: about 400 kB. The nodes give no more than this at once.
WINDOW_ROWS = 4096
READ_SIZE = 1024 * 1024
# How long a node may take to answer where it may have to read a file to its end first, seconds.
READ_DEADLINE = 60.0
# Longest wait for one node's rows where those of the others are wanted without them, seconds.
PATIENCE = 2.5
# Times on two sets of clocks are the same within this, milliseconds.
SAME_MS = 5.0


@dataclass(frozen=True)
class Selection:
    """Which log files are meant, and which of their records."""

    generation: int | str | None = None
    """A number, "all", or None: the newest (and, where followed, all later ones)."""
    ranks: list[int] | None = None
    streams: tuple[str, ...] = ("stdout", "stderr")
    """Of a line, as the nodes tell it: one of NCCL is of its stream wherever it stands. Where followed: of a file."""
    nodes: list[str] | None = None
    filter: Filter = ALL

    def args(self) -> dict[str, Any]:
        """Return the files in the words of the log_* requests."""
        return {"generation": self.generation, "ranks": self.ranks, "streams": list(self.streams)}


class Row(NamedTuple):
    """One line of one file; `t_ns`: its arrival, by the coordinator's clock."""

    node: str
    generation: int
    rank: int
    stream: str
    line: int
    offset: int
    t_ns: int
    level: str | None
    text: bytes
    cut: int = 0
    """So many bytes of the line follow its text."""
    column: int = -1
    """Of a hit in a line whose text is cut: how many characters stand before it."""
    half: bool = False
    """Its line is still being written; a page of merged rows tells."""


class HasStatus(Protocol):
    """A session, or what stands for one."""

    @property
    def status(self) -> dict[str, Any]:
        """The newest status document, or {}."""


class Clocks:
    """Puts times of the nodes on the coordinator's clock, by the offsets in the status of one moment.

    Offsets are measured again and again: what lies before a row is asked with the clocks that the row was made with.
    """

    def __init__(self, session: HasStatus) -> None:
        self._session = session
        self._ahead_ns = self._newest()

    def _newest(self) -> dict[str, int]:
        nodes = self._session.status.get("nodes", ())
        return {node["name"]: int(float(node.get("clock_offset_ms") or 0.0) * 1e6) for node in nodes}

    @property
    def moved(self) -> bool:
        """By the newest status, times would differ so much that the order of rows would be wrong."""
        return any(abs(ns - self.ahead_ns(node)) > SAME_MS * 1e6 for node, ns in self._newest().items())

    def ahead_ns(self, node: str) -> int:
        """Return by how much the node's clock is ahead of the coordinator's."""
        return self._ahead_ns.get(node, 0)

    def at(self, node: str, t_ns: int | None) -> int | None:
        """Return what the node's clock shows at a time of the coordinator's."""
        return None if t_ns is None else t_ns + self.ahead_ns(node)

    def back(self, node: str, t_ns: int | None) -> int | None:
        """Return the coordinator's time at a time of the node's."""
        return None if t_ns is None else t_ns - self.ahead_ns(node)

    def rows(self, node: str, answer: Answer) -> list[Row]:
        """Return the rows of a log_merged or log_search answer, with their texts."""
        found = answer.data.get("rows")
        if not found:
            return []
        texts = answer.body.split(b"\n")
        return [
            self.row(node, row["generation"], row["rank"], row["stream"], row, text)
            for row, text in zip(found, texts, strict=True)
        ]

    def row(self, node: str, generation: int, rank: int, stream: str, row: dict[str, Any], text: bytes) -> Row:
        """Return one row of a node."""
        t_ns = int(row.get("t_ns") or 0) - self.ahead_ns(node)
        line, offset, cut, column = int(row["line"]), int(row["offset"]), row.get("cut", 0), row.get("column", -1)
        more = (int(cut), int(column), bool(row.get("half")))
        return Row(node, generation, rank, stream, line, offset, t_ns, row.get("level"), text, *more)


def clock_error_ms(status: dict[str, Any], names: list[str] | None) -> float | None:
    """Return within how many ms lines of different nodes are in the order of their times; None: one node, or unknown.

    Each node's time is right within its own error: of two, the errors add.
    """
    nodes = [node for node in status.get("nodes", ()) if names is None or node["name"] in names]
    errors = sorted(float(node["clock_error_ms"]) for node in nodes if node.get("clock_error_ms") is not None)
    return sum(errors[-2:]) if len(errors) > 1 else None


def sources(session: Session, nodes: list[str] | None) -> list[Link]:
    """Return the links that serve logs now; raises RequestFailed for an unknown node, Unreachable for none."""
    for name in nodes or ():
        if name not in session.links:
            raise RequestFailed(f"no host {name!r} in the inventory", "its hosts: " + " ".join(session.links))
    links = [link for name, link in session.links.items() if link.opened and (nodes is None or name in nodes)]
    if not links:
        raise session.unreachable()
    return links


async def ask(session: Session, node: str, op: str, args: dict[str, Any], timeout_s: float = 30.0) -> Answer:
    """Send one request to one node; raises Unreachable, RequestFailed."""
    link = session.links.get(node)
    if link is None:
        raise RequestFailed(f"no host {node!r} in the inventory")
    try:
        return await link.call(op, args, timeout_s=timeout_s)
    except CallFailed as refused:
        raise RequestFailed(refused.message, refused.hint, refused.kind) from refused
    except (WireError, asyncio.TimeoutError) as broken:
        raise Unreachable(f"{node}: {why(broken)}") from broken


async def files(session: Session, nodes: list[str] | None = None) -> list[dict[str, Any]]:
    """Return every log file on every reachable node, with `node` added, in order of generation and rank."""
    links = sources(session, nodes)

    async def one(link: Link) -> list[dict[str, Any]]:
        answer = await ask(session, link.view.name, "log_list", {})
        return [{**entry, "node": link.view.name} for entry in answer.data["files"]]

    found = await asyncio.gather(*(one(link) for link in links))
    return sorted(
        (entry for part in found for entry in part), key=lambda file: (file["generation"], file["rank"], file["stream"])
    )


def select(found: list[dict[str, Any]], selection: Selection) -> list[dict[str, Any]]:
    """Return the files that the selection means; generation None: the newest of all."""
    generation = selection.generation
    if generation is None:
        generation = max((file["generation"] for file in found), default=0)
    return [
        file
        for file in found
        if generation in ("all", file["generation"])
        and file["stream"] in files_of(selection.streams)
        and (selection.ranks is None or file["rank"] in selection.ranks)
    ]


class Page(NamedTuple):
    """Rows of all nodes by arrival, oldest first: all there are between the first and the last one."""

    rows: list[Row]
    more: bool
    """There are rows beyond the outermost one."""
    absent: list[str]
    """Nodes whose rows are missing: they are out of reach, or did not answer in time."""
    clocks: Clocks
    """What the times were made with; the next page is asked with the same."""
    apart: int = 0
    """So many lines among these are left out: they are of a stream that was not asked for."""
    since_ns: int = 0
    until_ns: int | None = None
    """All that is wanted between these times is here; None: not known."""
    counted: int = 0
    """So many lines, wanted or not, came between the times that were asked for."""
    ends: dict[str, Ends] = {}  # noqa: RUF012  never changed
    """With `counted`: how many lines the files have, by node that tells it."""
    before: int = 0
    behind: int = 0
    """With `counted`: so many lines, wanted or not, came before those times, and behind them."""


async def merged(
    session: Session,
    selection: Selection,
    count: int,
    *,
    before_ns: int | None = None,
    after_ns: int | None = None,
    counted: tuple[int, int] | None = None,
    clocks: Clocks | None = None,
    patience_s: float | None = None,
) -> Page:
    """Return about the last `count` rows of all nodes before a time, or the first ones from a time on.

    Rows of one time are never parted: what lies beyond the outermost row is the next page. With a filter there may be
    fewer than there are, even none, and from a time on also the last ones before it. `patience_s`: who has not
    answered by then is left out. Raises Unreachable, RequestFailed.
    """
    args = {**selection.args(), **selection.filter.args(), "count": count}
    if selection.generation is None:
        args["generation"] = newest(await files(session, selection.nodes))
    clocks = clocks or Clocks(session)

    async def one(name: str) -> Part | Unreachable:
        times: dict[str, Any] = {"before_ns": clocks.at(name, before_ns), "after_ns": clocks.at(name, after_ns)}
        if counted is not None:
            times["counted"] = [clocks.at(name, t_ns) for t_ns in counted]
        try:
            answer = await ask(session, name, "log_merged", {**args, **times}, patience_s or READ_DEADLINE)
        except Unreachable as error:
            return error
        try:
            return part_of(clocks, name, answer)
        except KeyError as missing:
            message = f"{name}: the job was started by another supervisor: its agent does not tell {missing}"
            raise RequestFailed(message, "use the one that started it", "version") from missing

    names = [link.view.name for link in sources(session, selection.nodes)]
    answers = dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))
    failed = {name: answer for name, answer in answers.items() if isinstance(answer, Unreachable)}
    if failed and (patience_s is None or len(failed) == len(answers)):
        raise next(iter(failed.values()))
    parts = [answer for answer in answers.values() if not isinstance(answer, Unreachable)]
    rows, more, since_ns, until_ns = forth(parts, count, after_ns) if after_ns is not None else back(parts, count)
    absent = sorted([*failed, *lost(session, selection.nodes)])
    sums = (sum(part.apart for part in parts), since_ns, until_ns, sum(part.counted for part in parts))
    beyond = sum(part.before for part in parts), sum(part.behind for part in parts)
    return Page(rows, more, absent, clocks, *sums, ends_of(answers), *beyond)


def lost(session: Session, nodes: list[str] | None) -> list[str]:
    """Return the nodes that have been in reach and are not now."""
    links = session.links.items()
    return [name for name, link in links if link.opened_at and not link.opened and (nodes is None or name in nodes)]


def newest(found: list[dict[str, Any]]) -> int:
    """Return the newest generation that has files anywhere: a node that was removed only has older ones."""
    return max((int(file["generation"]) for file in found), default=0)


async def _pages(session: Session, file: dict[str, Any]) -> AsyncGenerator[Answer, None]:
    """Yield all windows of one file; the next one is on its way while one is read."""
    place = {key: file[key] for key in ("generation", "rank", "stream")}

    def fetch(line: int) -> asyncio.Task[Answer]:
        args = {**place, "line": line, "count": WINDOW_ROWS}
        return asyncio.ensure_future(ask(session, file["node"], "log_window", args, READ_DEADLINE))

    coming = fetch(0)
    try:
        while True:
            answer = await coming
            rows = answer.data["rows"]
            if not rows:
                return
            line = int(rows[-1]["line"]) + 1
            total = answer.data.get("total_lines")
            if answer.data.get("complete", True) and total is not None and line >= int(total):
                yield answer
                return
            coming = fetch(line)
            yield answer
    finally:
        await cancel_all([coming])


async def _windows(session: Session, clocks: Clocks, file: dict[str, Any]) -> AsyncGenerator[tuple[int, Row], None]:
    """Yield all rows of one file with what orders them; a traceback stays together."""
    when_ns = 0
    indented = False
    name, generation, rank, stream = file["node"], file["generation"], file["rank"], file["stream"]
    pages = _pages(session, file)
    try:
        async for answer in pages:
            for entry, text in zip(answer.data["rows"], answer.body.split(b"\n"), strict=True):
                row = clocks.row(name, generation, rank, stream, entry, text)
                continues = text[:1] in (b" ", b"\t")
                if not (continues or indented) or not when_ns:
                    when_ns = max(when_ns, row.t_ns)
                indented = continues
                yield when_ns, row
    finally:
        await pages.aclose()


async def dump(session: Session, selection: Selection) -> AsyncGenerator[Row, None]:
    """Yield all rows of the files that may hold the streams selected, by arrival, one window per file in memory."""
    found = select(await files(session, selection.nodes), selection)
    clocks = Clocks(session)
    streams = [_windows(session, clocks, file) for file in found if file.get("size") != 0]
    try:
        firsts = await asyncio.gather(*(_next(stream) for stream in streams))
        heap = [(first[0], number, first[1]) for number, first in enumerate(firsts) if first is not None]
        heapq.heapify(heap)
        while heap:
            _, number, row = heap[0]
            yield row
            following = await _next(streams[number])
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (following[0], number, following[1]))
    finally:
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[tuple[int, Row], None]) -> tuple[int, Row] | None:
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None


Asking = Callable[[str, str, dict[str, Any]], Awaitable[Answer]]
"""A log request to a node: its name, the request, its arguments."""


async def read_rest(asking: Asking, row: Row) -> AsyncGenerator[bytes, None]:
    """Yield what of a row's line follows its text."""
    place = {"generation": row.generation, "rank": row.rank, "stream": row.stream}
    offset = row.offset + len(row.text)
    end = offset + row.cut
    while offset < end:
        wish = {**place, "offset": offset, "length": min(READ_SIZE, end - offset)}
        answer = await asking(row.node, "log_read", wish)
        if not answer.body or int(answer.data["offset"]) > offset:
            # It was dropped, or written anew, meanwhile.
            return
        yield answer.body
        offset += len(answer.body)


async def read_raw(
    session: Session, file: dict[str, Any], note_dropped: Callable[[int], None], *, follow: bool = False
) -> AsyncGenerator[bytes, None]:
    """Yield the very bytes of one file; `follow`: until the job is over.

    `note_dropped` is told of bytes that are gone from the node's disk.
    """
    place = {key: file[key] for key in ("generation", "rank", "stream")}
    offset = 0
    while True:
        over = session.ended
        wish = {**place, "offset": offset, "length": READ_SIZE}
        try:
            answer = await ask(session, file["node"], "log_read", wish, READ_DEADLINE)
        except Unreachable:
            if not follow or over:
                raise
            # The link is made anew, and the bytes wait on the node.
            await session.wait_change(0.5)
            continue
        if int(answer.data["offset"]) > offset:
            note_dropped(int(answer.data["offset"]) - offset)
            offset = int(answer.data["offset"])
        if answer.body:
            yield answer.body
            offset += len(answer.body)
        elif not follow or over:
            return
        else:
            await session.wait_change(0.5)
