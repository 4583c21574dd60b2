"""A search in the logs behind one view: run by the agents, hits collected here, stepped through in order of time.

In: a pattern, rows from the session, also of what comes later. Out: hits and where the next one is.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from remote_agent.logs.pattern import compile_pattern, ignores_case
from remote_agent.wire import Problem, WireError
from supervisor.errors import SupervisorError, Unreachable

if TYPE_CHECKING:
    from supervisor.session.logs import Page, Selection
    from supervisor.tui.source import Source

HITS_KEPT: Final = 5000
SEARCH_DEADLINE: Final = 300.0

# What comes is asked for so often, seconds.
LOOK_EVERY: Final = 1.0

Key = tuple[int, int, str, int]
# Time of arrival and line.
Place = tuple[int, Key]


class Finder:
    """Hits of one search."""

    def __init__(
        self,
        source: Source,
        selection: Selection,
        pattern: str,
        level: str | None = None,
        only: str | None = None,
        name: str = "",
    ) -> None:
        self.text = pattern
        self.name = name or pattern or level or ""
        """What is looked for, in a word."""
        self.selection = selection
        self.ignore_case = ignores_case(pattern)
        self.pattern = compiled(pattern, self.ignore_case) if pattern else None
        self.hits: list[Place] = []
        """In order."""
        self.current = -1
        self.running = True
        """Not all that was there has been searched."""
        self.problem = ""
        self.looks = 0
        """How often the nodes have been asked."""
        self._keys: set[Key] = set()
        self._is_refused = False
        self._source = source
        self.level = level
        self._only = only
        """The one file whose lines are shown."""
        self._apart = 0
        self._reached: dict[str, int] = {}
        """By node: what it had by then has been searched."""
        self._columns: dict[Key, int] = {}
        """Of hits in lines whose text is cut."""
        self._pages: list[Page] = []

    def pages(self, key: Key) -> tuple[Page, Page] | None:
        """What lies before and behind the first hit, once, if that is this line and its node has sent it along."""
        pages, self._pages = self._pages, []
        rows = [row for page in pages for row in page.rows]
        here = any((row.generation, row.rank, row.stream, row.line) == key for row in rows)
        return (pages[0], pages[1]) if here and len(pages) == 2 else None

    async def run(self, found: Callable[[], None], around: int, near_ns: int | None) -> None:
        """Search, and go on in what comes, until enough is found or the job is over."""
        await self.search(found, around, near_ns)
        over = False
        while not over and len(self.hits) < HITS_KEPT and not self._is_refused:
            await asyncio.sleep(LOOK_EVERY)
            over = self._source.ended
            await self._look(self._query, found)

    async def search(self, found: Callable[[], None], around: int = 0, near_ns: int | None = 0) -> None:
        """Collect the hits there are; `found` is called whenever there are more.

        around: so many rows at the first hit from `near_ns` on, None: at the newest, are wanted with them (`pages`).
        """
        first: dict[str, Any] = {"around": around, "near_ns": near_ns, "note_page": self._note_page} if around else {}
        if "nccl" not in self.selection.streams:
            first["note_apart"] = self._note_apart
        await self._look({**self._query, **first}, found)

    @property
    def _query(self) -> dict[str, Any]:
        query: dict[str, Any] = {"pattern": self.text, "ignore_case": self.ignore_case, "limit": HITS_KEPT}
        if self.level:
            query["level"] = self.level
        return {**query, "reached": self._reached}

    async def _look(self, query: dict[str, Any], found: Callable[[], None]) -> None:
        count, problem, self.problem = len(self.hits), self.problem, ""
        self.looks += 1
        try:
            await asyncio.wait_for(self._collect(query, found), SEARCH_DEADLINE)
        except asyncio.TimeoutError:
            self.problem = "the search takes too long"
        except Unreachable as error:
            self.problem = error.message
        except SupervisorError as error:
            self.problem, self._is_refused = error.message, True
        except (WireError, OSError, ValueError) as error:
            self.problem = str(error) or type(error).__name__
        if self.running or problem != self.problem or count != len(self.hits):
            self.running = False
            found()

    async def _collect(self, query: dict[str, Any], found: Callable[[], None]) -> None:
        async with contextlib.aclosing(self._source.search(self.selection, **query)) as rows:
            async for row in rows:
                if self._only not in (None, row.stream):
                    continue
                key = (row.generation, row.rank, row.stream, row.line)
                if row.column >= 0:
                    self._columns[key] = row.column
                if self.add(row.t_ns, key) and len(self.hits) % 64 == 1:
                    found()
                if len(self.hits) >= HITS_KEPT:
                    return

    def _note_apart(self, lines: int) -> None:
        self._apart += lines

    def _note_page(self, page: Page) -> None:
        self._pages.append(page)

    def add(self, t_ns: int, key: Key) -> bool:
        """Take a hit, once; the current one stays the current one."""
        if key in self._keys:
            return False
        self._keys.add(key)
        at = bisect.bisect(self.hits, (t_ns, key))
        self.hits.insert(at, (t_ns, key))
        if at <= self.current:
            self.current += 1
        return True

    def step(self, direction: int, place: Place | None, pointer: Key | None) -> Place | None:
        """The next (1) or previous (-1) hit from the line that is read: the current hit if that is the `pointer`.

        place: None at the end, where the newest hit is the nearest one.
        """
        if not self.hits:
            return None
        if self.current >= 0 and self.hits[self.current][1] == pointer:
            at = self.current + direction
        elif place is None:
            at = -1
        else:
            at = bisect.bisect_left(self.hits, place) - (direction < 0)
        self.current = at % len(self.hits)
        return self.hits[self.current]

    def said(self) -> str:
        """How the search stands."""
        name = self.name
        if self.problem:
            return f"{name}: {self.problem}"
        if not self.hits:
            nccl = f", but in {self._apart:,} lines of NCCL" if self._apart else ""
            return f"{name}: searching" if self.running else f"{name}: not found{nccl}"
        many = f"{len(self.hits):,}{'+' if self.running or len(self.hits) >= HITS_KEPT else ''}"
        if self.current < 0:
            return f"{name}: {many} found"
        column = self._columns.get(self.hits[self.current][1])
        where = f", column {column + 1:,} of its line" if column is not None else ""
        return f"{name}: hit {self.current + 1:,} of {many}{where}"


def compiled(pattern: str, ignore_case: bool) -> re.Pattern[str]:
    """The pattern for highlighting; raises ValueError with what is wrong."""
    try:
        compile_pattern(pattern, ignore_case)
        return re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except Problem as refused:
        raise ValueError(f"pattern: {refused.message}") from refused
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"pattern: {error}") from error
