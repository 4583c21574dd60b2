"""Which lines of the ranks' logs go into a recording: the end of every file, and what surrounds evidence.

In: a session, incidents, a limit. Out: each file with its lines, in order.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from supervisor.errors import Unreachable
from supervisor.recording import redact
from supervisor.recording.form import File, Line
from supervisor.session import logs

if TYPE_CHECKING:
    from remote_agent.wire import Answer
    from supervisor.session.session import Session

# Rows in one request.
ROWS = 1024
# Lines before and after a line of evidence.
AROUND = 200
ASK_DEADLINE = 60.0
# An agent may have to index a file of gigabytes before it can count its lines, seconds.
INDEX_DEADLINE = 300.0
# More than any file has.
BEYOND = 10**15

_PLACE = re.compile(r"generation_(\d+)/rank_(\d+)/(stdout|stderr|nccl)\.log\Z")


class Limit(NamedTuple):
    """How much of the logs is wanted, in bytes."""

    a_file: int | None = 1_000_000
    """Of the end of each file; None: all of it, 0: nothing of any."""
    in_all: int | None = 64_000_000
    """Of all files together: of many there is less of each."""

    def share(self, files: int) -> int | None:
        """Return how much of each of so many files is wanted."""
        if self.a_file is None or self.in_all is None:
            return self.a_file
        return min(self.a_file, self.in_all // max(1, files))


class Excerpt:
    """The lines of one file that are wanted; `limit`: bytes of its end, None for all."""

    def __init__(
        self, session: Session, clocks: logs.Clocks, file: Mapping[str, Any], limit: int | None, around: Iterable[int]
    ) -> None:
        self.size = int(file["size"])
        self.total = 0
        """Lines in the whole file; known once `parts` has begun."""
        self._session = session
        self._clocks = clocks
        self._node = str(file["node"])
        self._place = {key: file[key] for key in ("generation", "rank", "stream")}
        self._limit = limit
        self._around = sorted(around)

    async def parts(self) -> AsyncGenerator[list[Line], None]:
        """Yield the lines in order, many at a time; raises Unreachable, RequestFailed."""
        self.total = await self._count()
        if self._limit is None:
            async for part in self._range(0, self.total):
                yield part
            return
        tail: list[list[Line]] = []
        first = self.total
        while first > 0 and not self._is_enough(tail, self._limit):
            begin = max(0, first - ROWS)
            tail.append([line async for part in self._range(begin, first) for line in part])
            first = begin
        done = 0
        for line in self._around:
            begin, end = max(done, line - AROUND), min(first, line + AROUND)
            async for part in self._range(begin, end):
                yield part
            done = max(done, end)
        for lines in reversed(tail):
            yield lines

    def _is_enough(self, tail: list[list[Line]], limit: int) -> bool:
        first = next((lines[0] for lines in reversed(tail) if lines), None)
        return first is not None and self.size - first.offset >= limit

    async def _ask(self, line: int, count: int) -> Answer:
        args = {**self._place, "line": line, "count": count}
        return await logs.ask(self._session, self._node, "log_window", args, ASK_DEADLINE)

    async def _count(self) -> int:
        """Return how many lines there are; the node may have to read the file first, and says after a second."""
        end = time.monotonic() + INDEX_DEADLINE
        while time.monotonic() < end:
            found = (await self._ask(BEYOND, 0)).data
            if found.get("complete", True):
                return int(found["total_lines"])
        raise Unreachable(f"{self._node}: a log of {self.size} bytes is not indexed within {INDEX_DEADLINE:.0f} s")

    async def _range(self, begin: int, end: int) -> AsyncGenerator[list[Line], None]:
        while begin < end:
            answer = await self._ask(begin, min(ROWS, end - begin))
            rows = answer.data["rows"]
            if not rows:
                return
            texts = answer.body.split(b"\n")
            yield [self._line(row, text) for row, text in zip(rows, texts, strict=True)]
            begin = int(rows[-1]["line"]) + 1

    def _line(self, row: Mapping[str, Any], text: bytes) -> Line:
        t_ns = int(row.get("t_ns") or 0) - self._clocks.ahead_ns(self._node)
        said = redact.text(text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        return Line(int(row["line"]), int(row["offset"]), t_ns, row.get("level"), said)


async def excerpts(session: Session, incidents: Iterable[Mapping[str, Any]], limit: Limit) -> dict[File, Excerpt]:
    """Return the files of all nodes in reach, with what is wanted of each; raises Unreachable, RequestFailed."""
    clocks = logs.Clocks(session)
    wanted = evidence_lines(incidents)
    found: dict[File, Excerpt] = {}
    files = await logs.files(session)
    share = limit.share(sum(1 for file in files if file["size"]))
    for file in files:
        key = (str(file["node"]), int(file["generation"]), int(file["rank"]), str(file["stream"]))
        found[key] = Excerpt(session, clocks, file, share, wanted.get(key, ()))
    return found


def evidence_lines(incidents: Iterable[Mapping[str, Any]]) -> dict[File, list[int]]:
    """Return the lines, counted from 0, that incidents quote, by file."""
    lines: dict[File, list[int]] = {}
    for incident in incidents:
        for proof in incident.get("evidence") or ():
            place = _PLACE.search(str(proof.get("file") or ""))
            if place is not None and proof.get("node") and isinstance(proof.get("line"), int):
                key = (str(proof["node"]), int(place[1]), int(place[2]), place[3])
                lines.setdefault(key, []).append(proof["line"] - 1)
    return lines
