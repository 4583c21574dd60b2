"""Writes a recording: the journal, the status at every change, and excerpts of the logs.

In: a session, and its status by time if it was followed; incidents, a limit of the logs.
Out: a recording that only its owner may read; no file if it could not be finished.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import tempfile
import time
import zipfile
import zlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from remote_agent.diagnose.incidents import incidents_in
from remote_agent.text.names import RANK_LOG
from remote_agent.wire.events import ENDED_STATES
from remote_agent.wire.status_diff import changes, merge
from supervisor import __version__
from supervisor.errors import RequestFailed, SupervisorError, Unreachable, UsageError
from supervisor.link.tasks import cancel_all
from supervisor.logs import files as log_files
from supervisor.logs.rows import Clocks, now_ns
from supervisor.recording import file_format, redact
from supervisor.recording.file_format import Line, NodeStream, RecordedHost, RecordedLog, StatusRow
from supervisor.wording.values import cut_text

if TYPE_CHECKING:
    from remote_agent.wire import Answer
    from remote_agent.wire.answers import LogEntry, LogWindow
    from remote_agent.wire.documents import HistoryItem, IncidentDocument, Status
    from supervisor.link.host_link import HostLink
    from supervisor.session import Session
    from supervisor.ssh.answers import EngineFacts, LogFileEntry

# This many files are requested at once, and excerpts from this size on are buffered on the disk.
AT_ONCE = 8
HELD_BYTES = 4 * 1024 * 1024
CHUNK = 1024 * 1024
ENGINE_DEADLINE = 5.0


def check_free(path: Path) -> None:
    """Raise UsageError for an existing file: it may be the only recording of another job."""
    if path.exists():
        raise UsageError(f"{path} exists", "name another file, or remove this one")


async def write(session: Session, path: Path, *, limit: Limit, seen: Iterable[Seen] = ()) -> tuple[int, list[str]]:
    """Write a recording; returns the number of events, and the reasons why logs are missing.

    `limit`: how much of the logs; `seen`: the status by time from `statuses.watch`. Raises Unreachable, RequestFailed,
    UsageError if the file exists.
    """
    check_free(path)
    history = await session.stream("history")
    status: Status = session.status if session.ended else await session.call("status")
    session.set_status(status)  # it has the clock offsets of the nodes
    events = await session.journal()
    times = {event["seq"]: file_format.read_time(event["time"]) for event in events}
    last_ns = max(times.values(), default=0)
    end_ns = last_ns if status.get("state") in ENDED_STATES else max(last_ns, now_ns(session))
    states = list(status_rows(history, times, seen, (end_ns, status)))
    meta = {
        "format": file_format.FORMAT,
        "version": file_format.VERSION,
        "job": session.job,
        "recorded_at": now_ns(session),
        "supervisor": __version__,
        "logs": limit._asdict(),
        "end_ns": max(end_ns, states[-1]["t_ns"]),
        "nccl": (await session.call("incidents")).get("nccl"),
        "nccl_nodes": await session.nccl_documents(status),
        "hosts": await host_facts(session),
    }
    wanted = await excerpts(session, incidents_in(events), limit) if limit.a_file != 0 else {}
    with _private(path) as draft, zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(file_format.META, file_format.json_line(redact.document(meta)))
        file.writestr(file_format.EVENTS, b"".join(file_format.json_line(redact.document(event)) for event in events))
        file.writestr(file_format.STATUSES, b"".join(map(file_format.json_line, states)))
        index = await _write_logs(file, wanted)
        file.writestr(file_format.LOGS, b"".join(map(file_format.json_line, index)))
    return len(events), sorted({str(one["error"]) for one in index if one["error"]})


async def host_facts(session: Session) -> list[RecordedHost]:
    """Return the hosts of the job: the state of each connection, and the facts that each host reports."""
    engines = await asyncio.gather(*(_engine(session.links[name]) for name in session.hosts))
    return [
        {"name": view.name, "state": view.state, "step": view.step, "text": view.text, "error": view.error,
         "hint": view.hint, "hello": view.hello, "engine": engine}
        for view, engine in zip(session.hosts.values(), engines, strict=True)
    ]  # fmt: skip


async def _engine(link: HostLink) -> EngineFacts:
    """Return the facts about torch on the host, {} without a live agent."""
    facts: EngineFacts | None = (
        await link.try_call("await_engine", timeout_s=ENGINE_DEADLINE) if link.view.live or link.through else None
    )
    return link.view.engine if facts is None else facts


async def _write_logs(file: zipfile.ZipFile, wanted: Mapping[file_format.NodeStream, Excerpt]) -> list[RecordedLog]:
    """Write the excerpts, a few at once; returns their index."""
    room = asyncio.Semaphore(AT_ONCE)
    writing = asyncio.Lock()

    async def one(key: file_format.NodeStream, excerpt: Excerpt) -> RecordedLog:
        node, generation, rank, stream = key
        member = f"logs/{node}/generation_{generation}/rank_{rank}/{stream}.jsonl"
        async with room:
            with tempfile.SpooledTemporaryFile(HELD_BYTES) as held:
                begin_ns, error = await _collect(excerpt, held)
                if begin_ns is not None:
                    async with writing:
                        await _copy(held, file, member)
        return {
            "node": node,
            "generation": generation,
            "rank": rank,
            "stream": stream,
            "size": excerpt.size,
            "lines": excerpt.total,
            "begin_ns": begin_ns,
            "member": member if begin_ns is not None else None,
            "error": error,
        }

    tasks = [asyncio.ensure_future(one(key, excerpt)) for key, excerpt in wanted.items()]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)


async def _collect(excerpt: Excerpt, held: IO[bytes]) -> tuple[int | None, str | None]:
    """Write the lines of an excerpt; returns the time of the first line, and the error if some are missing."""
    begin_ns: int | None = None
    try:
        async with aclosing(excerpt.batches()) as batches:
            async for lines in batches:
                if lines and begin_ns is None:
                    begin_ns = lines[0].t_ns
                held.write(b"".join(map(file_format.line_json, lines)))
    except (RequestFailed, Unreachable) as error:
        # If a node is lost now, only the rest of its logs is missing.
        return begin_ns, error.message
    return begin_ns, None


async def _copy(held: IO[bytes], file: zipfile.ZipFile, member: str) -> None:
    held.seek(0)
    with file.open(member, "w", force_zip64=True) as out:
        while data := held.read(CHUNK):
            out.write(data)
            # The links get a turn in between.
            await asyncio.sleep(0)


@contextmanager
def _private(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that only its owner may read; it gets its name when it is complete."""
    draft: Path | None = None
    try:
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        draft = Path(name)
        with os.fdopen(number, "wb") as file:
            yield file
        draft.rename(path)
    except OSError as error:
        raise SupervisorError(f"{path}: {error.strerror or error}") from error
    finally:
        if draft is not None:
            draft.unlink(missing_ok=True)


# --- the status by time

# Steps and ages change constantly: they are recorded this often, seconds, and less often with many ranks.
SHORTEST = 5.0
RANKS_A_SECOND = 16
# A whole document is written after this many rows, so that a seek need not read all rows before it.
WHOLE_EVERY = 64

Seen = tuple[int, bytes]
"""A time, and a status document, packed."""


async def watch(session: Session, stop: asyncio.Event) -> list[Seen]:
    """Return the status of a session by time, until the job is over or `stop` is set."""
    seen: list[Seen] = []
    version, before, due = -1, None, 0.0
    while not session.ended and not stop.is_set():
        status, now = session.status, time.monotonic()
        lasting = _lasting(status)
        if status and (lasting != before or now >= due):
            seen.append((now_ns(session), zlib.compress(json.dumps(redact.document(status)).encode())))
            before, due = lasting, now + max(SHORTEST, (status.get("world_size") or 0) / RANKS_A_SECOND)
        version = await session.wait_change(1.0, version)
    return seen


def _lasting(status: Status) -> object:
    """Return the parts of the status that do not change constantly."""
    ranks = [
        (node["name"], node.get("state"), [(rank["rank"], rank.get("state")) for rank in node.get("ranks", ())])
        for node in status.get("nodes", ())
    ]
    known = (status.get("state"), status.get("condition"), status.get("generation"), status.get("plan"))
    if (incident := status.get("incident")) is None:
        return *known, ranks
    more = (incident.get("state"), incident.get("ongoing"), incident.get("preliminary"), incident["summary"])
    return *known, incident["id"], *more, ranks


def status_rows(
    history: Iterable[HistoryItem], times: Mapping[int, int], seen: Iterable[Seen], last: tuple[int, Status]
) -> Iterator[StatusRow]:
    """Yield the rows of `history` (by the `times` of its records), of the statuses `seen`, and of the `last` one."""
    before: Status = {}
    before_ns = number = 0
    moments = heapq.merge(_replayed(history, times), _unpacked(seen), key=lambda moment: moment[0])
    for t_ns, status in chain(moments, [(last[0], redact.document(last[1]))]):
        whole = number % WHOLE_EVERY == 0
        delta = changes({} if whole else before, status)
        if delta and status != before:
            before, before_ns, number = merge({} if whole else before, delta), max(before_ns, t_ns), number + 1
            yield {"t_ns": before_ns, "whole": whole, "changes": delta}


def _replayed(history: Iterable[HistoryItem], times: Mapping[int, int]) -> Iterator[tuple[int, Status]]:
    status: Status = {}
    t_ns = 0
    for item in history:
        status = merge(status, redact.document(item["changes"]))
        # A coordinator that took over may have a clock that is behind. Changes after the last event are left out.
        t_ns = max(t_ns, times.get(item["seq"], 0))
        if item["seq"] in times:
            yield t_ns, status


def _unpacked(seen: Iterable[Seen]) -> Iterator[tuple[int, Status]]:
    for t_ns, packed in seen:
        yield t_ns, json.loads(zlib.decompress(packed))


# --- excerpts of the logs

# One request has this many rows.
ROWS = 1024
# This many lines before and after a line of evidence are recorded.
AROUND = 200
ASK_DEADLINE = 60.0
# An agent may take this long to index a file of gigabytes and count its lines, seconds.
INDEX_DEADLINE = 300.0
# No file has this many lines.
BEYOND = 10**15


class Limit(NamedTuple):
    """How much of the logs to record, in bytes."""

    a_file: int | None = 1_000_000
    """The bytes at the end of each file; None: the whole file, 0: no logs."""
    in_all: int | None = 64_000_000
    """The bytes of all files together, in equal shares."""

    def share(self, files: int) -> int | None:
        """Return the share of each of this many files."""
        if self.a_file is None or self.in_all is None:
            return self.a_file
        return min(self.a_file, self.in_all // max(1, files))


class Excerpt:
    """The lines to record of one file; `limit`: bytes at its end, None for all."""

    def __init__(
        self, session: Session, clocks: Clocks, file: LogFileEntry, limit: int | None, around: Iterable[int]
    ) -> None:
        self.size = file["size"]
        self.total = 0
        """Lines in the whole file; known once `batches` has begun."""
        self._session = session
        self._clocks = clocks
        self._node = str(file["node"])
        self._place = {"generation": file["generation"], "rank": file["rank"], "stream": file["stream"]}
        self._limit = limit
        self._around = sorted(around)

    async def batches(self) -> AsyncGenerator[list[Line], None]:
        """Yield the lines in order, in batches; raises Unreachable, RequestFailed."""
        self.total = await self._count()
        if self._limit is None:
            async for lines in self._range(0, self.total):
                yield lines
            return
        tail: list[list[Line]] = []
        first = self.total
        while first > 0 and not self._is_enough(tail, self._limit):
            begin = max(0, first - ROWS)
            tail.append([line async for lines in self._range(begin, first) for line in lines])
            first = begin
        done = 0
        for line in self._around:
            begin, end = max(done, line - AROUND), min(first, line + AROUND)
            async for lines in self._range(begin, end):
                yield lines
            done = max(done, end)
        for lines in reversed(tail):
            yield lines

    def _is_enough(self, tail: list[list[Line]], limit: int) -> bool:
        first = next((lines[0] for lines in reversed(tail) if lines), None)
        return first is not None and self.size - first.offset >= limit

    async def _ask(self, line: int, count: int) -> Answer:
        args = {**self._place, "line": line, "count": count}
        return await log_files.ask(self._session, self._node, "log_window", args, ASK_DEADLINE)

    async def _count(self) -> int:
        """Return the number of lines; the node may have to index the file first, and answers after a second."""
        end = time.monotonic() + INDEX_DEADLINE
        while time.monotonic() < end:
            window: LogWindow = (await self._ask(BEYOND, 0)).data
            if window.get("complete", True):
                return window["total_lines"] or 0
        raise Unreachable(f"{self._node}: a log of {self.size} bytes was not indexed within {INDEX_DEADLINE:.0f} s")

    async def _range(self, begin: int, end: int) -> AsyncGenerator[list[Line], None]:
        while begin < end:
            answer = await self._ask(begin, min(ROWS, end - begin))
            window: LogWindow = answer.data
            rows = window["rows"]
            if not rows:
                return
            texts = answer.body.split(b"\n")
            yield [self._line(row, text) for row, text in zip(rows, texts, strict=True)]
            begin = rows[-1]["line"] + 1

    def _line(self, row: LogEntry, text: bytes) -> Line:
        t_ns = (row.get("t_ns") or 0) - self._clocks.ahead_ns(self._node)
        redacted = redact.text(text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        mark = cut_text(row["cut"]).encode() if row.get("cut") else b""
        return Line(row["line"], row["offset"], t_ns, row.get("level"), redacted + mark)


async def excerpts(session: Session, incidents: Iterable[IncidentDocument], limit: Limit) -> dict[NodeStream, Excerpt]:
    """Return the files of all reachable nodes with the excerpt of each; raises Unreachable, RequestFailed."""
    clocks = Clocks(session)
    wanted = evidence_lines(incidents)
    result: dict[NodeStream, Excerpt] = {}
    files = await log_files.files(session)
    share = limit.share(sum(1 for file in files if file["size"]))
    for file in files:
        key = (str(file["node"]), int(file["generation"]), int(file["rank"]), str(file["stream"]))
        result[key] = Excerpt(session, clocks, file, share, wanted.get(key, ()))
    return result


def evidence_lines(incidents: Iterable[IncidentDocument]) -> dict[NodeStream, list[int]]:
    """Return the lines, counted from 0, that incidents quote, by file."""
    lines: dict[NodeStream, list[int]] = {}
    for incident in incidents:
        for proof in incident.get("evidence") or ():
            place = RANK_LOG.search(str(proof.get("file") or ""))
            if place is not None and proof["node"] and proof["line"] is not None:
                key = (proof["node"], int(place[1]), int(place[2]), place[3])
                lines.setdefault(key, []).append(proof["line"] - 1)
    return lines
