"""A search in the logs of one view: the agents search, the hits are collected here in order of time.

In: a pattern, rows from the session, also later ones. Out: at most HITS_KEPT hits, and the next one from a line.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import re
from typing import TYPE_CHECKING, Any, Final

from remote_agent.text.patterns import compile_pattern, ignores_case
from remote_agent.wire import Problem, WireError
from supervisor.errors import SupervisorError, Unreachable
from supervisor.logs.rows import Clocks, LineKey

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from supervisor.logs.rows import LogLine
    from supervisor.logs.selection import Selection
    from supervisor.session import Session

HITS_KEPT: Final = 5000
SEARCH_DEADLINE: Final = 300.0

# New lines are searched this often, seconds.
LOOK_EVERY: Final = 1.0

# A hit has the time of arrival and the line.
Hit = tuple[int, LineKey]


class Finder:
    """Hits of one search."""

    def __init__(
        self,
        source: Session,
        selection: Selection,
        pattern: str,
        level: str | None = None,
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
        """In order of time: all hits, or the first ones that were found."""
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
        self._apart = 0
        self._reached: dict[str, int] = {}
        """By node: how far its files have been searched."""
        self.clocks = clocks or Clocks(source)
        """The clock offsets of all times here: a line is found by the time of its hit."""

    @property
    def _is_full(self) -> bool:
        return len(self.hits) >= HITS_KEPT

    async def run(self, on_batch: Callable[[], None]) -> None:
        """Search, and continue with new lines until there are as many hits as are kept or the job has ended."""
        await self.search(on_batch)
        over = False
        while not (over or self._is_full or self._is_refused):
            await asyncio.sleep(LOOK_EVERY)
            over = self._source.ended
            await self._look(self._collect(on_batch), on_batch)

    async def search(self, on_batch: Callable[[], None]) -> None:
        """Collect the hits; `on_batch` is called after each batch."""
        note_apart = None if "nccl" in self.selection.streams else self._note_apart
        await self._look(self._collect(on_batch, note_apart=note_apart), on_batch)

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

    async def _collect(self, on_batch: Callable[[], None], **more: Any) -> None:
        """Search what has not been searched, until there are as many hits as are kept."""
        what = {"pattern": self.text, "ignore_case": self.ignore_case, "level": self.level or None}
        rows = self._source.search(self.selection, **what, clocks=self.clocks, reached=self._reached, **more)
        async with contextlib.aclosing(rows):
            async for row in rows:
                if self._take(row) and len(self.hits) % 64 == 1:
                    on_batch()
                if self._is_full:
                    break

    def _note_apart(self, lines: int) -> None:
        self._apart += lines

    def _take(self, row: LogLine) -> bool:
        """Add a hit if it is new; the current hit stays the current one."""
        hit = row.t_ns, row.key
        if hit[1] in self._keys:
            return False
        self._keys.add(hit[1])
        at = bisect.bisect(self.hits, hit)
        self.hits.insert(at, hit)
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
        """Return the next (1) or previous (-1) hit from the line that is read, or None if there is none yet.

        pointer: the line of the current hit, if the reader is still there; place: None at the end of the log.
        """
        if not self.hits:
            return None
        if self.is_at(pointer):
            at = self.current + direction
        elif place is None:
            at = len(self.hits) - 1
        else:
            at = bisect.bisect_left(self.hits, place) - (direction < 0)
        self.current = at % len(self.hits)
        return self.hits[self.current]

    def state_text(self) -> str:
        """Return the state of the search, shown behind the search text."""
        if self.problem:
            return self.problem
        if not self.hits:
            nccl = f", but {self._apart:,} in NCCL's lines" if self._apart else ""
            return "searching" if self.running else f"not found{nccl}"
        many = f"{len(self.hits):,}{'+' if self.running or self._is_full else ''}"
        return f"hit {self.current + 1:,} of {many}" if self.current >= 0 else f"{many} hits"


def compiled(pattern: str, ignore_case: bool) -> re.Pattern[str]:
    """Return the pattern for highlighting; raises ValueError with what is wrong."""
    try:
        compile_pattern(pattern, ignore_case)
        return re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except Problem as refused:
        raise ValueError(f"pattern: {refused.message}") from refused
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"pattern: {error}") from error
