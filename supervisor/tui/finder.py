"""A search in the logs behind one view: run by the agents, hits collected here, stepped through in order of time.

In: a pattern, rows from the session. Out: hits and where the next one is.
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
from supervisor.errors import SupervisorError

if TYPE_CHECKING:
    from supervisor.session.logs import Page, Selection
    from supervisor.tui.source import Source

HITS_KEPT: Final = 5000
SEARCH_DEADLINE: Final = 300.0

Key = tuple[int, int, str, int]


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
        self.hits: list[tuple[int, Key]] = []
        """Time of arrival and line, in order."""
        self.current = -1
        self.running = True
        self.problem = ""
        self._source = source
        self.level = level
        self._only = only
        """The one file whose lines are shown."""
        self._apart = 0
        self._pages: list[Page] = []

    def pages(self, key: Key) -> tuple[Page, Page] | None:
        """What lies before and behind the first hit, once, if that is this line and its node has sent it along."""
        pages, self._pages = self._pages, []
        rows = [row for page in pages for row in page.rows]
        here = any((row.generation, row.rank, row.stream, row.line) == key for row in rows)
        return (pages[0], pages[1]) if here and len(pages) == 2 else None

    async def run(self, found: Callable[[], None], around: int = 0, near_ns: int | None = None) -> None:
        """Collect hits until all is searched or enough are found; `found` is called whenever there are more.

        around: so many rows at the first hit from `near_ns` on are wanted with them (`pages`).
        """
        query: dict[str, Any] = {"pattern": self.text, "ignore_case": self.ignore_case, "limit": HITS_KEPT}
        if around:
            query |= {"around": around, "near_ns": near_ns or 0, "note_page": self._note_page}
        if "nccl" not in self.selection.streams:
            query["note_apart"] = self._note_apart
        if self.level:
            query["level"] = self.level
        try:
            await asyncio.wait_for(self._collect(query, found), SEARCH_DEADLINE)
        except asyncio.TimeoutError:
            self.problem = "the search takes too long"
        except SupervisorError as error:
            self.problem = error.message
        except (WireError, OSError, ValueError) as error:
            self.problem = str(error) or type(error).__name__
        finally:
            self.running = False
            found()

    async def _collect(self, query: dict[str, Any], found: Callable[[], None]) -> None:
        async with contextlib.aclosing(self._source.search(self.selection, **query)) as rows:
            async for row in rows:
                if self._only not in (None, row.stream):
                    continue
                self.add(row.t_ns, (row.generation, row.rank, row.stream, row.line))
                if len(self.hits) % 64 == 1:
                    found()
                if len(self.hits) >= HITS_KEPT:
                    return

    def _note_apart(self, lines: int) -> None:
        self._apart += lines

    def _note_page(self, page: Page) -> None:
        self._pages.append(page)

    def add(self, t_ns: int, key: Key) -> None:
        """Take a hit; the current one stays the current one."""
        at = bisect.bisect(self.hits, (t_ns, key))
        self.hits.insert(at, (t_ns, key))
        if at <= self.current:
            self.current += 1

    def step(self, direction: int, t_ns: int | None) -> tuple[int, Key] | None:
        """The next (1) or previous (-1) hit; the first step begins at the time that is on the screen."""
        if not self.hits:
            return None
        if self.current < 0:
            at = bisect.bisect_left(self.hits, (t_ns or 0, (-1, -1, "", -1)))
            self.current = at % len(self.hits) if direction > 0 else (at - 1) % len(self.hits)
        else:
            self.current = (self.current + direction) % len(self.hits)
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
        return f"{name}: hit {self.current + 1:,} of {many}"


def compiled(pattern: str, ignore_case: bool) -> re.Pattern[str]:
    """The pattern for highlighting; raises ValueError with what is wrong."""
    try:
        compile_pattern(pattern, ignore_case)
        return re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except Problem as refused:
        raise ValueError(f"pattern: {refused.message}") from refused
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"pattern: {error}") from error
