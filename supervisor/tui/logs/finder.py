"""A search in the logs of one view: the agents search, the hits are collected here in order of time.

In: a pattern, rows from the session, also later ones. Out: hits, and the next one from a line.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from remote_agent.text.patterns import compile_pattern, ignores_case
from remote_agent.wire import Problem, WireError
from supervisor.errors import SupervisorError, Unreachable
from supervisor.logs.rows import Clocks
from supervisor.tui.logs.row import LineKey

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from supervisor.logs.rows import LogLine
    from supervisor.logs.selection import Selection
    from supervisor.tui.source import SessionSource

HITS_KEPT: Final = 5000
# Further hits are fetched in batches of this size.
HITS_MORE: Final = 1000
SEARCH_DEADLINE: Final = 300.0

# New lines are searched this often, seconds.
LOOK_EVERY: Final = 1.0

# A hit has the time of arrival and the line.
Hit = tuple[int, LineKey]
BEGIN: Final[Hit] = (0, (0, 0, "", 0))


@dataclass
class KnownSpan:
    """The times between which all hits are known, if there are more than are kept."""

    low_ns: int
    high_ns: int
    is_first: bool = False
    """No hit lies before it."""
    is_last: bool = False
    """No hit lay after it at the last request."""


class Finder:
    """Hits of one search."""

    def __init__(
        self,
        source: SessionSource,
        selection: Selection,
        pattern: str,
        level: str | None = None,
        only: str | None = None,
        name: str = "",
        clocks: Clocks | None = None,
    ) -> None:
        self.text = pattern
        self.name = name or pattern or level or ""
        """The search in a word."""
        self.selection = selection
        self.ignore_case = ignores_case(pattern)
        self.pattern = compiled(pattern, self.ignore_case) if pattern else None
        self.hits: list[Hit] = []
        """In order of time: all hits, or those of `known_span`."""
        self.known_span: KnownSpan | None = None
        self.current = -1
        self.running = True
        """The search has not finished."""
        self.problem = ""
        self.looks = 0
        """The number of requests to the nodes."""
        self._keys: set[LineKey] = set()
        self._is_refused = False
        self._source = source
        self.level = level
        self._only = only
        """The only stream that is shown; None: all."""
        self._apart = 0
        self._reached: dict[str, int] = {}
        """By node: how far its files have been searched."""
        self._columns: dict[LineKey, int] = {}
        """The columns of hits in cut lines."""
        self.clocks = clocks or Clocks(source)
        """The clock offsets of all times here: the parts must meet, and a line is found by the time of its hit."""

    async def run(self, on_batch: Callable[[], None], near_ns: int | None) -> None:
        """Search, and continue with new lines until there are more hits than are kept or the job has ended."""
        await self.search(on_batch, near_ns)
        over = False
        while not over and self.known_span is None and not self._is_refused:
            await asyncio.sleep(LOOK_EVERY)
            over = self._source.ended
            await self._look(self._collect(on_batch, None), on_batch)

    async def search(self, on_batch: Callable[[], None], near_ns: int | None = 0) -> None:
        """Collect all hits, or if they are too many the next ones from `near_ns` on (None: the newest).

        `on_batch` is called after each batch.
        """
        note_apart = None if "nccl" in self.selection.streams else self._note_apart
        await self._look(self._collect(on_batch, near_ns, note_apart=note_apart), on_batch)

    async def go_on(self, direction: int, place: Hit | None, pointer: LineKey | None) -> Hit | None:
        """Request the hit that `step` does not know, wrapping around; None: there is a `problem`."""
        self.running = True
        await self._look(self._go_on(direction, place, pointer), lambda: None)
        return None if self.problem or self.current < 0 else self.hits[self.current]

    async def _go_on(self, direction: int, place: Hit | None, pointer: LineKey | None) -> None:
        if self._is_known(place, pointer):
            await self._extend(direction)
        else:
            await self._begin(None if place is None else place[0], direction)
        if self.step(direction, place, pointer) is None:
            # No hit on that side: wrap around to the first or last one.
            await self._begin(0 if direction > 0 else None, direction)
            self.step(direction, BEGIN if direction > 0 else None, None)

    def _search(self, **query: Any) -> AsyncGenerator[LogLine, None]:
        what = {"pattern": self.text, "ignore_case": self.ignore_case, "level": self.level or None}
        return self._source.search(self.selection, **what, clocks=self.clocks, **query)

    async def _look(self, work: Awaitable[None], on_batch: Callable[[], None]) -> None:
        count, problem, self.problem = len(self.hits), self.problem, ""
        self.looks += 1
        try:
            await asyncio.wait_for(work, SEARCH_DEADLINE)
        except asyncio.TimeoutError:
            self.problem = "the search timed out"
        except Unreachable as error:
            self.problem = error.message
        except SupervisorError as error:
            self.problem, self._is_refused = error.message, True
        except (WireError, OSError, ValueError) as error:
            self.problem = str(error) or type(error).__name__
        if self.running or problem != self.problem or count != len(self.hits):
            self.running = False
            on_batch()

    async def _collect(self, on_batch: Callable[[], None], begin_ns: int | None, **more: Any) -> None:
        """Search new lines; if there are too many hits, keep those near the current one, or from `begin_ns` on."""
        async with contextlib.aclosing(self._search(reached=self._reached, limit=HITS_KEPT, **more)) as rows:
            async for row in rows:
                if self._take(row) and len(self.hits) % 64 == 1:
                    on_batch()
                if len(self.hits) >= HITS_KEPT:
                    break
        if len(self.hits) >= HITS_KEPT:
            here = self.hits[self.current] if self.current >= 0 else None
            await self._begin(begin_ns if here is None else here[0], 1)
            self.current = self.hits.index(here) if here in self.hits else -1

    # --- more hits than are kept

    async def _begin(self, t_ns: int | None, way: int) -> None:
        """Load the hits from a time on, or before it; None: back from the end."""
        self.hits, self.current = [], -1
        self._keys.clear()
        self._columns.clear()
        if t_ns is None:
            self.known_span = KnownSpan(sys.maxsize, sys.maxsize, is_last=True)
            await self._extend(-1)
            self.known_span.high_ns = self.hits[-1][0] + 1 if self.hits else 0
        else:
            self.known_span = KnownSpan(t_ns, t_ns, is_first=t_ns == 0)
            await self._extend(way)

    async def _extend(self, way: int) -> None:
        """Load the next (1) or previous (-1) hits, if there are any."""
        span = self.known_span
        assert span is not None
        count, done = len(self.hits), way < 0 and span.is_first
        while not done and len(self.hits) == count:
            rows, edges_ns = await self._nearest(span, way)
            done = not edges_ns
            if way < 0:
                span.low_ns, span.is_first = max(edges_ns, default=0), done
            else:
                newest_ns = max((row.t_ns + 1 for row in rows), default=span.high_ns)
                span.high_ns, span.is_last = min(edges_ns, default=newest_ns), done
            for row in rows:
                # Beyond the edge, hits may be missing.
                if span.low_ns <= row.t_ns < span.high_ns:
                    self._take(row)

    async def _nearest(self, span: KnownSpan, way: int) -> tuple[list[LogLine], list[int]]:
        """Return the next hits on one side of a part, and the times beyond which nodes have more."""
        edges_ns: list[int] = []

        def note_span(since_ns: int | None, until_ns: int | None) -> None:
            edge_ns = since_ns if way < 0 else until_ns
            if edge_ns is not None:
                edges_ns.append(edge_ns)

        bound = {"until_ns": span.low_ns} if way < 0 else {"since_ns": span.high_ns}
        async with contextlib.aclosing(self._search(way=way, limit=HITS_MORE, note_span=note_span, **bound)) as rows:
            return [row async for row in rows], edges_ns

    def _is_known(self, place: Hit | None, pointer: LineKey | None) -> bool:
        """Return whether the hits next to the line that is read are known, or adjoin known ones."""
        span = self.known_span
        if span is None or self.is_at(pointer):
            return True
        if place is None:
            return span.is_last
        return span.low_ns <= place[0] and (place[0] <= span.high_ns or span.is_last)

    # --- hits

    def _note_apart(self, lines: int) -> None:
        self._apart += lines

    def _take(self, row: LogLine) -> bool:
        """Add a hit if its stream is shown and it is new."""
        if self._only not in (None, row.stream):
            return False
        key = (row.generation, row.rank, row.stream, row.line)
        if row.column >= 0:
            self._columns[key] = row.column
        return self.add(row.t_ns, key)

    def add(self, t_ns: int, key: LineKey) -> bool:
        """Add a hit, once; the current hit stays the current one."""
        if key in self._keys:
            return False
        self._keys.add(key)
        at = bisect.bisect(self.hits, (t_ns, key))
        self.hits.insert(at, (t_ns, key))
        if at <= self.current:
            self.current += 1
        return True

    def is_at(self, pointer: LineKey | None) -> bool:
        """Return whether this line is the current hit."""
        return self.current >= 0 and self.hits[self.current][1] == pointer

    def stand_at(self, pointer: LineKey | None) -> None:
        """Make this line the current hit, if it is one."""
        self.current = next((at for at, (_, key) in enumerate(self.hits) if key == pointer), -1)

    def step(self, direction: int, place: Hit | None, pointer: LineKey | None) -> Hit | None:
        """Return the next (1) or previous (-1) hit from the line that is read, or None if it is not known.

        pointer: the line of the current hit, if the reader is still there; place: None at the end of the log.
        """
        if not self.hits or not self._is_known(place, pointer):
            return None
        if self.is_at(pointer):
            at = self.current + direction
        elif place is None:
            at = len(self.hits) - 1
        else:
            at = bisect.bisect_left(self.hits, place) - (direction < 0)
        if self.known_span is not None and not 0 <= at < len(self.hits):
            return None
        self.current = at % len(self.hits)
        return self.hits[self.current]

    def begin_more(self) -> None:
        """Note that `go_on` will be called."""
        self.running = True

    def state_text(self) -> str:
        """Return the state of the search, shown behind the search text."""
        if self.problem:
            return self.problem
        if self.known_span is not None and self.running:
            return "searching"
        if not self.hits:
            nccl = f", but {self._apart:,} in NCCL's lines" if self._apart else ""
            return "searching" if self.running else f"not found{nccl}"
        many = self._many()
        if self.current < 0:
            return f"{many} found"
        column = self._columns.get(self.hits[self.current][1])
        where = f", column {column + 1:,}" if column is not None else ""
        return f"hit {self.current + 1:,} of {many}{where}"

    def _many(self) -> str:
        """Return the number of known hits, and which ones these are."""
        many, span = f"{len(self.hits):,}", self.known_span
        if span is None:
            return f"{many}+" if self.running else many
        if span.is_first and span.is_last:
            return many
        return f"the first {many}" if span.is_first else f"the last {many}" if span.is_last else f"{many} nearby"


def compiled(pattern: str, ignore_case: bool) -> re.Pattern[str]:
    """Return the pattern for highlighting; raises ValueError with what is wrong."""
    try:
        compile_pattern(pattern, ignore_case)
        return re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except Problem as refused:
        raise ValueError(f"pattern: {refused.message}") from refused
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"pattern: {error}") from error
