"""A search in the logs of one view: the agents search, the hits are collected here in order of time.

In: a pattern, rows of a reader, also later ones. Out: at most HITS_KEPT hits, and the next one from a line.
"""

from __future__ import annotations

import bisect
import contextlib
import re
from typing import TYPE_CHECKING, Final

from remote_agent.text.patterns import compile_pattern, ignores_case
from remote_agent.wire import Problem, WireError
from supervisor.errors import SupervisorError
from supervisor.logs.rows import Clocks, LineKey
from supervisor.logs.selection import LogQuery

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.logs.rows import LogLine
    from supervisor.logs.selection import Selection
    from supervisor.session import Session

HITS_KEPT: Final = 5000

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
        """What was there when the search began has not been searched to its end."""
        self.problem = ""
        self._keys: set[LineKey] = set()
        self._source = source
        self.level = level
        self._query = LogQuery(selection, pattern, self.ignore_case, level)
        self.clocks = clocks or Clocks(source)
        """The clock offsets of all times here: a line is found by the time of its hit."""

    @property
    def _is_full(self) -> bool:
        return len(self.hits) >= HITS_KEPT

    async def run(self, on_change: Callable[[], None], on_complete: Callable[[], None]) -> None:
        """Collect the hits as they come, until there are as many as are kept or the job has ended.

        `on_complete` is called once all that was there has been searched.
        """

        def complete() -> None:
            if self.running:
                self.running = False
                on_complete()

        try:
            async with contextlib.aclosing(self._source.rows(self._query, self.clocks).live()) as batches:
                async for batch in batches:
                    fresh = [line for line in batch.lines if not self._is_full and self._take(line)]
                    if batch.is_caught_up or self._is_full:
                        complete()
                    if fresh:
                        on_change()
                    if self._is_full:
                        break
        except SupervisorError as error:
            self.problem = error.message
        except (WireError, OSError, ValueError) as error:
            self.problem = str(error) or type(error).__name__
        complete()
        on_change()

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
            return "searching" if self.running else "not found"
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
