"""Lines of a level as they come: the nodes know the levels, so they are asked again and again.

In: log_list and log_search of each node. Out: rows that have come since the last look, in order of arrival, each once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from supervisor.errors import Unreachable
from supervisor.session import logs
from supervisor.session.follow import LAST_WAIT, wanted_links
from supervisor.session.search import search

if TYPE_CHECKING:
    from supervisor.session.logs import Row, Selection
    from supervisor.session.session import Session

# How often the nodes are asked, seconds.
LOOK = 0.5
# A line gets its time when the node reads it, which may be late; what is found twice is told once.
OVERLAP_NS = 30_000_000_000


def now_ns(session: Session) -> int:
    """Return what the coordinator's clock shows, as far as the links tell; rows carry its times."""
    clocks = logs.Clocks(session)
    for link in session.opened_links():
        ahead_of_us_ms = float(link.view.hello.get("clock_offset_ms") or 0.0)
        return time.time_ns() + int(ahead_of_us_ms * 1e6) - clocks.ahead_ns(link.view.name)
    return time.time_ns()


class _Node:
    """What has been told of one node."""

    def __init__(self, session: Session, name: str, selection: Selection, oldest: int, query: dict[str, Any]) -> None:
        self._session = session
        self._name = name
        self._selection = selection
        self._query = query
        self._oldest = oldest
        """Older generations have been told to their end."""
        self._told: dict[tuple[int, int, str], int] = {}
        """By file: the last line that was told."""

    async def look(self) -> list[Row] | None:
        """Return the new rows, None when the node does not answer: then the next look brings all."""
        session, selection = self._session, self._selection
        begun_ns = now_ns(session)
        rows: list[Row] = []
        try:
            # A generation that begins while we look has ended the one before: what that wrote is all there next time.
            there = {int(file["generation"]) for file in await logs.files(session, [self._name])}
            for generation in sorted(there):
                if generation >= self._oldest and selection.generation in (None, "all", generation):
                    only = dataclasses.replace(selection, generation=generation, nodes=[self._name])
                    rows += [row async for row in search(session, only, **self._query)]
        except Unreachable:
            return None
        new = [row for row in rows if row.line > self._told.get((row.generation, row.rank, row.stream), -1)]
        self._told.update({(row.generation, row.rank, row.stream): row.line for row in new})
        self._oldest = max(there, default=self._oldest)
        self._query["since_ns"] = max(self._query["since_ns"] or 0, begun_ns - OVERLAP_NS)
        return new


async def hits(
    session: Session, selection: Selection, oldest: int, query: dict[str, Any]
) -> AsyncGenerator[list[Row], None]:
    """Yield what each look brings, until the job is over and all is told; the first look begins at query's since_ns.

    `query`: pattern, ignore_case, level and since_ns of logs.search. Generations before `oldest` are left out. Raises
    RequestFailed. The session must be attached or fed.
    """
    nodes: dict[str, _Node] = {}
    over_since: float | None = None
    while True:
        if session.ended and over_since is None:
            over_since = time.monotonic()
        names = [link.view.name for link in wanted_links(session, selection) if not link.missing]
        for name in names:
            nodes.setdefault(name, _Node(session, name, selection, oldest, dict(query)))
        looks = await asyncio.gather(*(nodes[name].look() for name in names))
        yield sorted((row for rows in looks for row in rows or ()), key=lambda row: (row.t_ns, row.rank, row.stream))
        if over_since is not None and (None not in looks or time.monotonic() - over_since > LAST_WAIT):
            return
        await session.wait_change(LOOK)
        await asyncio.sleep(LOOK / 2)  # at most four looks a second, however fast the job changes
