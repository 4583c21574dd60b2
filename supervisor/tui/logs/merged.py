"""Many ranks merged by time of arrival, page by page, all of their lines or those that a filter keeps.

In: pages of rows asked from the session. Out: all that is shown from a first row to a last one, and more on demand.

With a filter, pages may be empty: then the feed goes by the times between which the nodes have looked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from supervisor.session.logs import Clocks
from supervisor.session.streams import STREAMS
from supervisor.tui.logs.feeds import BYTES_KEPT, LEAST_KEPT, PAGE
from supervisor.tui.logs.log_row import Key, LogRow, taken
from supervisor.tui.logs.news import Look, News

if TYPE_CHECKING:
    from supervisor.session.logs import Page, Row, Selection
    from supervisor.tui.source import Source

MERGED_KEPT: Final = 20_000
# Rows of a look at the end.
WINDOW: Final = 64
# Later than every line.
LATEST_NS: Final = 1 << 62
EVER: Final = (0, LATEST_NS)
# How long the rows nearest to a time are looked for at once, seconds.
NEAR_S: Final = 5.0
# A line that came so much later than the one of its number is of a file that was written anew.
ANEW_NS: Final = 1_000_000_000


class MergedFeed:
    """Many ranks by time of arrival: all rows from a first to a last one, and more as far as somebody looks."""

    def __init__(self, source: Source, selection: Selection) -> None:
        self._source = source
        self.selection = selection
        self.shifted = 0
        self.detached = False
        """There are newer rows than the last one here."""
        self.news = News()
        self._look: Look | None = None
        self._is_far = False
        """More newer rows wait than a look at the end brings."""
        self.absent: tuple[str, ...] = ()
        """Nodes whose rows may be missing among these."""
        self.apart = False
        """Lines of NCCL were left out: they are of a stream that was not asked for."""
        self._rows: dict[Key, LogRow] = {}
        self._order: list[Key] = []
        self._bytes = 0
        self._at_start = False
        self._clocks: Clocks | None = None
        """What the times of these rows were made with."""
        self._beyond = (0, 0)
        self.passed = self.looked_at = 0
        """So many rows are here, of so many lines between the first and the last time."""
        self._since_ns = 0
        self._until_ns: int | None = None
        """With a filter: between these times all that passes is here; None: not known."""

    @property
    def clocks(self) -> Clocks | None:
        """What the times of these rows were made with; None: there have been none yet."""
        return self._clocks

    @property
    def count(self) -> int:
        """Lines there are here, and one more for those before them."""
        return len(self._order) + self._offset

    @property
    def beyond(self) -> tuple[int, int]:
        """About how many lines of this view come before those that are here, and behind them, when last told."""
        before, behind = self._beyond
        return 0 if self._at_start else before, behind if self.detached else 0

    @property
    def _offset(self) -> int:
        return int(not self._at_start and self._clocks is not None)

    def row(self, index: int) -> LogRow | None:
        """One line, or None for the place of older ones."""
        index -= self._offset
        return self._rows[self._order[index]] if 0 <= index < len(self._order) else None

    def index_of(self, key: Key) -> int | None:
        """Where a line is, or None."""
        return self._order.index(key) + self._offset if key in self._rows else None

    def missing(self, first: int, last: int, *, ahead: bool = False) -> int | None:
        """Older rows, once their place comes into view; newer ones at the other end."""
        if self._offset and first <= (PAGE // 4 if ahead else 0):
            return 0
        if self.detached and last >= self.count - 1:
            return 1
        return None

    async def load(self, want: int) -> None:
        """Load older (0) or newer (1) rows."""
        await (self._newer() if want else self._older())

    @property
    def is_whole(self) -> bool:
        """All there is, from the first line to the last one, has been looked at."""
        return self._at_start and not self.detached

    async def refresh(self, rows: int, following: Callable[[], bool]) -> None:
        """While the reader is `following`, the newest rows; else only whether there are any."""
        if self.selection.filter:
            await self._refresh_filtered(rows, following)
            return
        renew = not self._order or (following() and self._clocks is not None and self._clocks.moved)
        # Where more waits than a window holds, the number is all that is new.
        is_far = self.detached and self._is_far and not following()
        count = 1 if is_far else max(PAGE if renew else WINDOW, rows)
        page = await self._fetch(count, None if renew else self._clocks, counted=self._span())
        self._note(page, at_end=following())
        if not self._order:
            self._replace(page)
            self._measure(page.counted - len(page.rows), len(page.rows), 0)
            return
        self._measure(page.before, page.counted, page.behind)
        joined = not page.more or not page.rows or page.rows[0].t_ns <= self._edge(-1)
        fresh = self._update(page.rows)
        if not following():
            self.detached, self._is_far = bool(fresh), not joined
            if self.news.by_row or self.apart:
                await self._count_rows(rows)
            return
        if renew or self.detached or not joined or not set(self.absent) <= set(page.absent):
            # More came than one window holds, or somebody is back: what lies between is loaded when it is looked for.
            self._replace(page)
        else:
            self.absent = tuple(page.absent)
            self._append(fresh)

    def forget_news(self) -> None:
        """The reader returns to the end: what comes from now on is new."""
        self.news.forget()
        self._look = None

    def _note(self, page: Page, *, at_end: bool) -> None:
        """Learn from a page of the newest rows how many lines there are; at_end: the reader follows."""
        # NCCL's lines stand in the script's files, too.
        streams = self.selection.streams
        self.news.by_row = bool(self.selection.filter) or ("nccl" in streams and len(streams) < len(STREAMS))
        self.news.take(page.ends, at_end=at_end)
        if page.until_ns is not None and (at_end or self._look is None):
            self._look = Look(page.until_ns, page.clocks)

    def _measure(self, before: int, between: int, behind: int) -> None:
        """Learn how many lines, shown or not, came before the first time, up to the last one, and behind it."""
        # A record's lines may have come later than the last time; they have been looked at all the same.
        self.passed = len(self._order)
        self.looked_at = max(self.passed, between)
        share = (self.count - self._offset) / max(1, self.looked_at)
        self._beyond = round(before * share), round(behind * share)

    async def _count_rows(self, rows: int, counted: tuple[int, int] = EVER) -> Page | None:
        """Look at what came since the last look, shown or left out, at nothing twice, by the clocks of then."""
        look, news = self._look, self.news
        if look is None or news.is_full:
            return None
        if news.by_row:
            page = await self._fetch(max(PAGE, rows), look.clocks, after_ns=look.until_ns, counted=counted)
        else:
            # Among the script's lines there are few of NCCL.
            left_out = dataclasses.replace(self.selection, streams=("nccl",))
            page = await self._source.merged(left_out, PAGE * 4, clocks=look.clocks, after_ns=look.until_ns)
        if self._look is not look:
            # The reader has been at the end meanwhile.
            return None
        if news.by_row:
            news.take(page.ends, at_end=False)
        news.add(taken(row) for row in page.rows)
        news.is_behind = page.more or news.is_full
        self._look = Look(page.until_ns or look.until_ns, look.clocks)
        return page

    async def _refresh_filtered(self, rows: int, following: Callable[[], bool]) -> None:
        """Look at what came since the last look, and at nothing twice: what passes may be far back."""
        if not following():
            await self._count_filtered(rows)
            return
        count = max(PAGE, rows)
        moved = self._clocks is not None and self._clocks.moved
        until_ns = self._until_ns
        if self._clocks is None or self.detached or moved or until_ns is None:
            await self._replace_by_end(count, None, following)
            return
        page = await self._fetch(count, self._clocks, after_ns=until_ns, counted=self._span())
        self._measure(page.before, page.counted, page.behind)
        fresh = self._update(page.rows, all_times=True)
        if not following():
            # What is not put here now is looked at again.
            self.detached = bool(fresh)
        elif (page.more and len(page.rows) >= count) or not set(self.absent) <= set(page.absent):
            await self._replace_by_end(count, self._clocks, following)
        else:
            self.absent = tuple(page.absent)
            self._append(fresh)
            self._until_ns = page.until_ns
            self._note(page, at_end=True)

    async def _replace_by_end(self, count: int, clocks: Clocks | None, following: Callable[[], bool]) -> None:
        page = await self._fetch(count, clocks, counted=EVER)
        self._note(page, at_end=following())
        if following() or not self._order:
            self._replace(page)

    async def _count_filtered(self, rows: int) -> None:
        """Learn how many rows came that pass, and of how many lines those that are here are."""
        if self._look is None:
            is_first = self._clocks is None
            page = await self._fetch(max(PAGE, rows) if is_first else 1, self._clocks, counted=EVER)
            self._note(page, at_end=False)
            if is_first:
                self._replace(page)
        found = await self._count_rows(rows, self._span())
        if found is not None:
            self._measure(found.before, found.counted, found.behind)
            self.detached = bool(self._update(found.rows, all_times=True)) or self.detached

    async def show_begin(self, rows: int) -> None:
        """Replace what is here by the oldest rows."""
        page = await self._fetch(max(rows, PAGE), self._steady(), after_ns=0, counted=EVER)
        self._replace(page, at_start=True)
        if not self.selection.filter:
            self._measure(0, len(page.rows), page.counted - len(page.rows))

    async def show_around(
        self, t_ns: int, rows: int, pages: tuple[Page, Page] | None = None, clocks: Clocks | None = None
    ) -> None:
        """Replace what is here by the rows around a time, a third of them before it: a screen and no more.

        What a link holds that has rested is some 14 kB: each doubling of that takes a round trip. pages: those rows,
        where they are known. clocks: what the time was made with, as lines of a burst are nanoseconds apart.
        """
        clocks = clocks or self._steady() or Clocks(self._source)
        before, after = pages or await asyncio.gather(
            self._fetch(rows // 3 + 1, clocks, before_ns=t_ns),
            self._fetch(rows, clocks, after_ns=t_ns, counted=(t_ns, LATEST_NS)),
        )
        absent = sorted({*before.absent, *after.absent})
        # Of each file the last row before that time may come along, from before all that is here.
        later = [row for row in after.rows if row.t_ns >= t_ns]
        both = after._replace(rows=before.rows + later, absent=absent, since_ns=before.since_ns)
        self._replace(both, at_start=not before.more)
        if not (self.selection.filter or pages):
            self._measure(after.before - len(before.rows), len(both.rows), after.counted - len(later))
        end = time.monotonic() + NEAR_S
        while not self._order and not self.is_whole and time.monotonic() < end:
            # Nothing near it passes the filter.
            if not self._at_start:
                await self._older()
            if self.detached:
                await self._newer()

    def _steady(self) -> Clocks | None:
        """Return the clocks of the rows that are here, unless these are wrong by now."""
        return None if self._clocks is None or self._clocks.moved else self._clocks

    async def _older(self) -> None:
        page = await self._fetch(PAGE * 2, self._clocks, before_ns=self._begin_ns())
        older = self._update(page.rows, all_times=True)
        self._since_ns = page.since_ns
        before = self.count
        self._order[:0] = [row.key for row in older]
        self._hold(older)
        self._at_start = not page.more
        self.shifted += self.count - before
        self._note_absent(page)
        kept = self._within_bounds(self._order)
        if kept < len(self._order):
            if self.selection.filter:
                self._until_ns = self._edge(kept)
            self._drop(self._order[kept:])
            del self._order[kept:]
            self.detached = True

    async def _newer(self) -> None:
        last_ns = self._end_ns()
        page = await self._fetch(PAGE, self._clocks, after_ns=last_ns)
        fresh = self._update(page.rows)
        if self.selection.filter:
            self._until_ns = page.until_ns or last_ns
        elif not fresh and page.more:
            page = await self._fetch(PAGE, self._clocks, after_ns=last_ns + 1)
            fresh = self._update(page.rows)
        self._append(fresh)
        self._note_absent(page)
        self.detached = page.more

    async def _fetch(self, count: int, clocks: Clocks | None, **bounds: Any) -> Page:
        page = await self._source.merged(self.selection, count, clocks=clocks, **bounds)
        self.apart = self.apart or bool(page.apart and "nccl" not in self.selection.streams)
        return page

    def _begin_ns(self) -> int:
        return self._since_ns if self.selection.filter else self._edge(0)

    def _end_ns(self) -> int:
        """Return a time before which all rows are here."""
        if self.selection.filter and self._until_ns is not None:
            return self._until_ns
        return self._edge(-1) if self._order else 0

    def _span(self) -> tuple[int, int]:
        """Return the times between which all that is shown is here."""
        if self.selection.filter:
            return self._since_ns, self._until_ns or self._since_ns
        return (self._edge(0), self._edge(-1) + 1) if self._order else EVER

    def _edge(self, number: int) -> int:
        return self._rows[self._order[number]].t_ns

    def _update(self, rows: Iterable[Row], *, all_times: bool = False) -> list[LogRow]:
        """Take what has changed in rows that are here, a half line that is whole now; return those that are not here.

        What a page of rare rows, or without a node, has from before all that is here comes with its turn.
        """
        fresh: list[LogRow] = []
        is_any = all_times or self._at_start or not (self._order or self.selection.filter)
        start_ns = 0 if is_any else self._begin_ns()
        for each in rows:
            row = taken(each)
            old = self._rows.get(row.key)
            if old is None:
                if row.t_ns >= start_ns:
                    fresh.append(row)
            elif row.t_ns > old.t_ns + ANEW_NS:
                fresh.append(row)
            elif old.raw != row.raw:
                self._rows[row.key] = dataclasses.replace(old, level=row.level, raw=row.raw)
                self._bytes += len(row.raw) - len(old.raw)
        return fresh

    def _note_absent(self, page: Page) -> None:
        self.absent = tuple(sorted({*self.absent, *page.absent}))

    def _hold(self, rows: Iterable[LogRow]) -> None:
        for row in rows:
            self._rows[row.key] = row
            self._bytes += len(row.raw)

    def _drop(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._bytes -= len(self._rows.pop(key).raw)

    def _within_bounds(self, keys: Iterable[Key]) -> int:
        """Return how many rows may stay, if they go from the other end."""
        if len(self._order) <= MERGED_KEPT and self._bytes <= BYTES_KEPT:
            return len(self._order)
        size = 0
        for number, key in enumerate(keys):
            size += len(self._rows[key].raw)
            if number >= MERGED_KEPT or (size > BYTES_KEPT and number >= LEAST_KEPT):
                return number
        return len(self._order)

    def _append(self, rows: list[LogRow]) -> None:
        again = {row.key for row in rows if row.key in self._rows}
        if again:
            self._drop(again)
            self._order = [key for key in self._order if key not in again]
            self.shifted -= len(again)
        late = bool(rows and self._order and rows[0].t_ns < self._edge(-1))
        self._hold(rows)
        self._order.extend(row.key for row in rows)
        if late:
            # A node was slower than the others to tell.
            self._order.sort(key=lambda key: self._rows[key].t_ns)
        extra = len(self._order) - self._within_bounds(reversed(self._order))
        if extra > 0:
            before = self._offset
            self._drop(self._order[:extra])
            del self._order[:extra]
            self._at_start = False
            # More of that time may have been there.
            self._since_ns = self._edge(0) + 1
            self.shifted += self._offset - before - extra

    def _replace(self, page: Page, *, at_start: bool | None = None) -> None:
        """Show these rows alone: the newest ones, or others where it is known whether they are the first."""
        rows = [taken(row) for row in page.rows]
        self._rows, self._bytes = {}, 0
        self._hold(rows)
        self._order = list(self._rows)
        self._at_start = not page.more if at_start is None else at_start
        self.detached, self._is_far = page.more if at_start is not None else False, False
        self.absent, self._clocks = tuple(page.absent), page.clocks
        self._since_ns, self.passed, self.looked_at, self.shifted = page.since_ns, 0, 0, 0
        self._until_ns = page.until_ns
