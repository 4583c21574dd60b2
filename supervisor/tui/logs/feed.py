"""The lines of a log view, loaded page by page and ordered by time: all of them, or those that pass a filter.

In: pages of lines from the session. Out: all lines from a first one to a last one, and more on demand.

A feed holds a bounded number of lines whatever the size of the files. With a filter, pages may be empty; the feed then
uses the times between which the nodes have searched.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from supervisor.logs.rows import Clocks, LineKey, LogLine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from supervisor.logs.fold import Fold
    from supervisor.logs.pages import Page
    from supervisor.logs.selection import Selection
    from supervisor.session import Session

BOTH: Final[tuple[str, ...]] = ("stdout", "stderr")
PAGE: Final = 256
LINES_KEPT: Final = 20_000
BYTES_KEPT: Final = 32 * 1024 * 1024
# This many rows are kept whatever their size: those on the screen and around it.
LEAST_KEPT: Final = 2 * PAGE
# A look at the end reads this many rows.
WINDOW: Final = 64
LATEST_NS: Final = 1 << 62
# The rows nearest to a time are searched for this long, seconds.
NEAR_S: Final = 5.0
# A line that arrives this much later than the known line with its number belongs to a rewritten file.
ANEW_NS: Final = 1_000_000_000
# The lines of a file that is still being indexed are this close together: what is indexed later is not new.
SAME_NS: Final = 1_000_000


class Jump(NamedTuple):
    """A jump to a time (0: the beginning), or to the line with this key: by its number if the time is LATEST_NS."""

    t_ns: int
    key: LineKey | None = None
    clocks: Clocks | None = None
    """The clock offsets with which the time was computed."""


class LogFeed:
    """Lines of one rank or many by time of arrival: all from a first one to a last one, and more on demand."""

    is_folded = False
    """Equal lines of several ranks are shown once."""
    hides_nccl = False
    """Lines of NCCL were left out because their stream is not selected."""
    detached = False
    """Whether there are newer rows than the last one loaded."""
    absent: Sequence[str] = ()
    """Nodes whose rows may be missing."""
    clocks: Clocks | None = None
    """The clock offsets with which the times of the rows were computed; None before the first rows."""
    shifted = 0
    """Rows inserted above the others since the view last looked."""
    last_line = 0
    """How many lines the file has, if all are of one file; 0: unknown."""

    def __init__(self, source: Session, selection: Selection) -> None:
        self._source = source
        self.selection = selection
        """The files and records that it shows."""
        self._is_far = False
        """Whether more newer rows wait than one request for the end returns."""
        self._has_new_lines = False
        self._read_ns: int | None = None
        """The time of the newest line when the reader was at the end; None: unknown."""
        self._absent_now: frozenset[str] = frozenset()
        """Nodes that did not answer the last request for the end."""
        self._searched: tuple[int, Clocks] | None = None
        """The time up to which new lines were searched with a filter, and by which clocks."""
        self._rows: dict[LineKey, LogLine] = {}
        self._order: list[LineKey] = []
        self._bytes = 0
        self._at_start = False
        self._since_ns = 0
        self._until_ns: int | None = None
        """All rows between these times are loaded, as far as they pass the filter; None: unknown.

        A node that answered before another one did may have read rows since that are older than the other's newest.
        """

    @property
    def count(self) -> int:
        """The loaded lines, and one more for those before them."""
        return len(self._order) + self._offset

    @property
    def _offset(self) -> int:
        return int(not self._at_start and self.clocks is not None)

    def line(self, index: int) -> LogLine | None:
        """Return one line, or None for the placeholder of older ones."""
        index -= self._offset
        return self._rows[self._order[index]] if 0 <= index < len(self._order) else None

    def fold(self, index: int) -> Fold[LogLine] | None:
        """Return the lines for which this one stands, if they are of several ranks."""
        return None

    def who(self, index: int) -> str:
        """Return whose line it is: a rank's, or several."""
        line = self.line(index)
        return f"{line.node} r{line.rank}" if line is not None else ""

    def stands_ns(self, index: int) -> int:
        """Return the time that is shown for a line, by which the lines are sorted; 0 while it is not loaded."""
        line = self.line(index)
        return line.t_ns if line is not None else 0

    def is_at(self, index: int, key: LineKey | None) -> bool:
        """Return whether this is the line, or stands for it."""
        line, fold = self.line(index), self.fold(index)
        return line is not None and (line.key == key or (fold is not None and any(row.key == key for row in fold.rows)))

    def take_shift(self) -> int:
        """Return by how many rows the lines have moved since the last call."""
        shift, self.shifted = self.shifted, 0
        return shift

    def index_of(self, key: LineKey) -> int | None:
        """Return the index of a line, or None."""
        return self._order.index(key) + self._offset if key in self._rows else None

    def missing(self, first: int, last: int, *, ahead: bool = False) -> int | None:
        """Return what to load next for these lines, for `load`; None when all are loaded.

        That is older rows when their placeholder comes into view, newer ones at the other end. ahead: they are not in
        view yet.
        """
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
        """Whether all lines, from the first one to the last one, have been read."""
        return self._at_start and not self.detached

    async def refresh(self, rows: int, following: Callable[[], bool]) -> None:
        """Load the newest rows while the reader is `following`; otherwise learn only whether there are any."""
        if self.selection.filter:
            await self._refresh_filtered(rows, following)
            return
        renew = not self._order or (following() and self.clocks is not None and self.clocks.moved)
        # If more rows wait than a window holds, only the newest one matters.
        is_far = self.detached and self._is_far and not following()
        count = 1 if is_far else max(PAGE if renew else WINDOW, rows)
        page = await self._fetch(count, None if renew else self.clocks)
        self._note(page, at_end=following())
        if not self._order:
            self._replace(page)
            return
        joined = not page.more or not page.rows or page.rows[0].t_ns <= self._edge(-1)
        fresh = self._update(page.rows)
        if not following():
            self.detached, self._is_far = bool(fresh), not joined
            return
        if renew or self.detached or not joined or not set(self.absent) <= set(page.absent):
            # More arrived than one window holds, or a node is back: the rows between are loaded on demand.
            self._replace(page)
        else:
            self.absent = tuple(page.absent)
            self._append(fresh)
            self._until_ns = page.until_ns or self._until_ns

    @property
    def new_lines_text(self) -> str:
        """Whether lines have arrived below those that have been in view, in words."""
        return "new lines below" if self._has_new_lines else ""

    def note_read(self, rows: Sequence[LogLine]) -> None:
        """Note which rows are in view; at the end of the log nothing is new any more."""
        if not self.detached and self.line(self.count - 1) == rows[-1]:
            self._has_new_lines, self._read_ns = False, self._edge(-1)

    def forget_new_lines(self) -> None:
        """Count only later lines as new: the reader has returned to the end."""
        self._has_new_lines, self._read_ns, self._searched = False, None, None

    @property
    def has_returned_node(self) -> bool:
        """Whether one of the absent nodes answers again."""
        return not self._absent_now.issuperset(self.absent)

    def _note(self, page: Page, *, at_end: bool) -> None:
        """Learn from a page which nodes answer and whether a row is new; at_end: the reader follows."""
        self._absent_now = frozenset(page.absent)
        if page.until_ns is not None and (at_end or self._searched is None):
            self._searched = (page.until_ns, page.clocks)
        newest_ns = page.rows[-1].t_ns if page.rows else 0
        if at_end or self._read_ns is None:
            self._read_ns = max(newest_ns, self._read_ns or 0)
        self._has_new_lines = not at_end and (newest_ns > self._read_ns + SAME_NS or self._has_new_lines)

    async def _refresh_filtered(self, rows: int, following: Callable[[], bool]) -> None:
        """Read what arrived since the last refresh, and nothing twice: rows that pass may be far back."""
        if not following():
            await self._search_new_lines(rows)
            return
        count = max(PAGE, rows)
        moved = self.clocks is not None and self.clocks.moved
        until_ns = self._until_ns
        if self.clocks is None or self.detached or moved or until_ns is None:
            await self._replace_by_end(count, None, following)
            return
        page = await self._fetch(count, self.clocks, after_ns=until_ns)
        fresh = self._update(page.rows, all_times=True)
        if not following():
            # These rows are read again later.
            self.detached = bool(fresh)
        elif (page.more and len(page.rows) >= count) or not set(self.absent) <= set(page.absent):
            await self._replace_by_end(count, self.clocks, following)
        else:
            self.absent = tuple(page.absent)
            self._append(fresh)
            self._until_ns = page.until_ns
            self._note(page, at_end=True)

    async def _replace_by_end(self, count: int, clocks: Clocks | None, following: Callable[[], bool]) -> None:
        page = await self._fetch(count, clocks)
        self._note(page, at_end=following())
        if following() or not self._order:
            self._replace(page)

    async def _search_new_lines(self, rows: int) -> None:
        """Search whether a new line passes the filter."""
        if self._searched is None:
            is_first = self.clocks is None
            page = await self._fetch(max(PAGE, rows) if is_first else 1, self.clocks)
            self._note(page, at_end=False)
            if is_first:
                self._replace(page)
        if self._searched is not None:
            searched = until_ns, clocks = self._searched
            page = await self._fetch(max(PAGE, rows), clocks, after_ns=until_ns)
            if self._searched is not searched:
                # The reader has been at the end meanwhile.
                return
            self._searched = page.until_ns or until_ns, clocks
            self._note(page, at_end=False)
            self.detached = bool(self._update(page.rows, all_times=True)) or self.detached

    async def seek(self, jump: Jump, rows: int) -> int:
        """Load the rows around the target; return the index of the line, or of the first one at that time."""
        t_ns, key, clocks = jump
        if key is not None and t_ns == LATEST_NS:
            t_ns = await self._show_line(key, rows)
        else:
            await (self.show_around(t_ns, rows, clocks) if t_ns else self.show_begin(rows))
        index = self.index_of(key) if key is not None else None
        if index is not None:
            return index
        later = (at for at in range(self.count) if (row := self.line(at)) is not None and row.t_ns >= t_ns)
        return next(later, max(0, self.count - 1))

    async def _show_line(self, key: LineKey, rows: int) -> int:
        """Replace the loaded rows by those around a line, and return its time; by the last ones if there is none."""
        page = await self._source.from_line(self.selection, key, rows)
        t_ns = next((row.t_ns for row in page.rows if row.line >= key[3]), LATEST_NS)
        if self.selection.file != key[:3] or t_ns == LATEST_NS:
            await self.show_around(t_ns, rows, page.clocks)
        else:
            self._replace(page, at_start=not page.rows[0].line)
        return t_ns

    async def show_begin(self, rows: int) -> None:
        """Replace the loaded rows by the oldest ones."""
        page = await self._fetch(max(rows, PAGE), self._steady(), after_ns=0)
        self._replace(page, at_start=True)

    async def show_around(self, t_ns: int, rows: int, clocks: Clocks | None = None) -> None:
        """Replace the loaded rows by those around a time, a third of them before it: one screen and no more.

        An idle link carries about 14 kB at once; each doubling takes a round trip. clocks: the offsets with which the
        time was computed, as lines of a burst are nanoseconds apart.
        """
        clocks = clocks or self._steady() or Clocks(self._source)
        before, after = await asyncio.gather(
            self._fetch(rows // 3 + 1, clocks, before_ns=t_ns),
            self._fetch(rows, clocks, after_ns=t_ns),
        )
        absent = sorted({*before.absent, *after.absent})
        # The last row of each file before that time may be included, from before the loaded range.
        later = [row for row in after.rows if row.t_ns >= t_ns]
        both = after._replace(rows=before.rows + later, absent=absent, since_ns=before.since_ns)
        self._replace(both, at_start=not before.more)
        end = time.monotonic() + NEAR_S
        while not self._order and not self.is_whole and time.monotonic() < end:
            # No row near that time passes the filter.
            if not self._at_start:
                await self._older()
            if self.detached:
                await self._newer()

    def _steady(self) -> Clocks | None:
        """Return the clocks of the loaded rows, unless they are outdated."""
        return None if self.clocks is None or self.clocks.moved else self.clocks

    async def _older(self) -> None:
        page = await self._fetch(PAGE * 2, self.clocks, before_ns=self._begin_ns())
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
        page = await self._fetch(PAGE, self.clocks, after_ns=last_ns)
        fresh = self._update(page.rows)
        if self.selection.filter:
            self._until_ns = page.until_ns or last_ns
        elif not fresh and page.more:
            page = await self._fetch(PAGE, self.clocks, after_ns=last_ns + 1)
            fresh = self._update(page.rows)
        self._append(fresh)
        self._note_absent(page)
        self.detached = page.more

    async def _fetch(self, count: int, clocks: Clocks | None, **bounds: Any) -> Page:
        page = await self._source.merged(self.selection, count, clocks=clocks, **bounds)
        self.hides_nccl = self.hides_nccl or bool(page.apart and "nccl" not in self.selection.streams)
        if self.selection.file is not None:
            self.last_line = page.lines or 0
        return page

    def _begin_ns(self) -> int:
        return self._since_ns if self.selection.filter else self._edge(0)

    def _end_ns(self) -> int:
        """Return a time before which all rows are loaded."""
        if self.selection.filter and self._until_ns is not None:
            return self._until_ns
        return self._edge(-1) if self._order else 0

    def _edge(self, number: int) -> int:
        return self._rows[self._order[number]].t_ns

    def _update(self, rows: Iterable[LogLine], *, all_times: bool = False) -> list[LogLine]:
        """Update loaded rows that have changed, such as a line that is complete now; return the others.

        Rows from before the loaded range, as pages with rare rows or without a node have them, are loaded later.
        """
        fresh: list[LogLine] = []
        is_any = all_times or self._at_start or not (self._order or self.selection.filter)
        start_ns = 0 if is_any else self._begin_ns()
        for row in rows:
            old = self._rows.get(row.key)
            if old is None:
                if row.t_ns >= start_ns:
                    fresh.append(row)
            elif row.t_ns > old.t_ns + ANEW_NS:
                fresh.append(row)
            elif old.text != row.text:
                self._rows[row.key] = row._replace(t_ns=old.t_ns)
                self._bytes += len(row.text) - len(old.text)
        return fresh

    def _note_absent(self, page: Page) -> None:
        self.absent = tuple(sorted({*self.absent, *page.absent}))

    def _hold(self, rows: Iterable[LogLine]) -> None:
        for row in rows:
            self._rows[row.key] = row
            self._bytes += len(row.text)

    def _drop(self, keys: Iterable[LineKey]) -> None:
        for key in keys:
            self._bytes -= len(self._rows.pop(key).text)

    def _within_bounds(self, keys: Iterable[LineKey]) -> int:
        """Return how many rows may stay when the others are dropped from the far end."""
        if len(self._order) <= LINES_KEPT and self._bytes <= BYTES_KEPT:
            return len(self._order)
        size = 0
        for number, key in enumerate(keys):
            size += len(self._rows[key].text)
            if number >= LINES_KEPT or (size > BYTES_KEPT and number >= LEAST_KEPT):
                return number
        return len(self._order)

    def _append(self, rows: list[LogLine]) -> None:
        again = {row.key for row in rows if row.key in self._rows}
        if again:
            self._drop(again)
            self._order = [key for key in self._order if key not in again]
            self.shifted -= len(again)
        late = bool(rows and self._order and rows[0].t_ns < self._edge(-1))
        self._hold(rows)
        self._order.extend(row.key for row in rows)
        if late:
            # One node answered later than the others.
            self._order.sort(key=lambda key: self._rows[key].t_ns)
        extra = len(self._order) - self._within_bounds(reversed(self._order))
        if extra > 0:
            before = self._offset
            self._drop(self._order[:extra])
            del self._order[:extra]
            self._at_start = False
            # More rows with that time may have existed.
            self._since_ns = self._edge(0) + 1
            self.shifted += self._offset - before - extra

    def _replace(self, page: Page, *, at_start: bool | None = None) -> None:
        """Replace the loaded rows; at_start: they begin with the first row of all; None: they are the newest."""
        self._rows, self._bytes = {}, 0
        self._hold(page.rows)
        self._order = list(self._rows)
        self._at_start = not page.more if at_start is None else at_start
        self.detached, self._is_far = page.more if at_start is not None else False, False
        self.absent, self.clocks = tuple(page.absent), page.clocks
        self._since_ns, self.shifted = page.since_ns, 0
        self._until_ns = page.until_ns
