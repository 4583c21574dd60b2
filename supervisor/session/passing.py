"""The records of all nodes that a filter keeps: those that are there, and those that come.

In: log_merged of each node, asked again and again from where it has looked to. Out: rows by arrival, each once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from supervisor.errors import Unreachable
from supervisor.session import logs
from supervisor.session.follow import LAST_WAIT, File, wanted_links

if TYPE_CHECKING:
    from supervisor.session.logs import Clocks, Page, Row, Selection
    from supervisor.session.session import Session

# How often the nodes are asked while nothing comes, seconds.
LOOK = 0.5


class Passing:
    """What one reader has been given."""

    def __init__(self, session: Session, selection: Selection, since_ns: int = 0) -> None:
        self._session = session
        self._selection = selection
        self._since_ns = since_ns
        self._reached: dict[str, int] = {}
        """By node: what came before that time has been given."""
        self._told: dict[tuple[str, File], int] = {}
        """By node and file: the last line that was given."""
        self._half: dict[tuple[str, File], Row] = {}
        """Lines that were still being written when they were looked at last."""
        self._clocks: Clocks | None = None

    async def there(self, generation: int | str, *, last: bool) -> AsyncGenerator[list[Row], None]:
        """Yield what is there of one generation, or of all; raises Unreachable, RequestFailed.

        last: nothing that comes is wanted, so that a line that is still being written is given as it is.
        """
        selection = dataclasses.replace(self._selection, generation=generation)
        after_ns, more = self._since_ns, True
        names = [link.view.name for link in logs.sources(self._session, selection.nodes)]
        while more:
            page = await self._page(selection, after_ns)
            # Not known: a node is reading files that were there before its agent.
            more = page.more or page.until_ns is None
            after_ns = page.until_ns or after_ns
            yield self._new(page, 0, last=last)
        for name in names:
            self._reached[name] = after_ns

    async def coming(self, oldest: int) -> AsyncGenerator[list[Row], None]:
        """Yield what comes until the job is over and all is given; generations before `oldest` are left out."""
        session = self._session
        over_since: float | None = None
        while True:
            if session.ended and over_since is None:
                over_since = time.monotonic()
            names = [link.view.name for link in wanted_links(session, self._selection) if not link.missing]
            pages = await asyncio.gather(*map(self._look, names))
            rows = [row for page in pages if page for row in self._new(page, oldest, last=over_since is not None)]
            yield sorted(rows, key=lambda row: row.t_ns)
            if any(page is not None and page.more for page in pages):
                continue
            if over_since is not None and (None not in pages or time.monotonic() - over_since > LAST_WAIT):
                yield list(self._half.values())
                return
            await session.wait_change(LOOK)
            await asyncio.sleep(LOOK / 2)  # at most four looks a second, however fast the job changes

    async def _look(self, name: str) -> Page | None:
        """Return what one node has beyond where it was asked to; None when it does not answer."""
        wanted = self._selection.generation
        generation = "all" if wanted is None else wanted
        selection = dataclasses.replace(self._selection, generation=generation, nodes=[name])
        after_ns = self._reached.get(name, self._since_ns)
        try:
            page = await self._page(selection, after_ns)
        except Unreachable:
            return None
        if page.until_ns is not None:
            self._reached[name] = page.until_ns
        return page

    async def _page(self, selection: Selection, after_ns: int) -> Page:
        # By the same clocks always: where a node has looked to is told by them.
        page = await logs.merged(self._session, selection, logs.WINDOW_ROWS, after_ns=after_ns, clocks=self._clocks)
        self._clocks = page.clocks
        return page

    def _new(self, page: Page, oldest: int, *, last: bool) -> list[Row]:
        """Return the rows that have not been given; a line that is still being written waits for its end."""
        rows: list[Row] = []
        for row in page.rows:
            file = (row.node, (row.generation, row.rank, row.stream))
            if row.generation < oldest or row.line <= self._told.get(file, -1):
                continue
            self._half.pop(file, None)
            if row.half and not last:
                self._half[file] = row
            else:
                self._told[file] = row.line
                rows.append(row)
        return rows
