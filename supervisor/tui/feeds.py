"""What a log view shows, fetched page by page: one stream of one rank, or many ranks merged by time.

In: windows of rows asked from the session. Out: rows by index; None where a page has yet to come.

Both feeds hold a bounded number of rows whatever the size of the files.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from remote_agent.wire import Answer
    from supervisor.session.folding import Fold
    from supervisor.session.logs import Clocks, Page, Row, Selection
    from supervisor.tui.source import Source

PAGE: Final = 256
# 64 pages of 256 rows of 100 bytes are 1.6 MB; a row may have 64 KiB.
PAGES_KEPT: Final = 64
MERGED_KEPT: Final = 20_000
BYTES_KEPT: Final = 32 * 1024 * 1024
# So many rows stay, whatever their size: what is on the screen and around it.
LEAST_KEPT: Final = 2 * PAGE

Key = tuple[int, int, str, int]


@dataclasses.dataclass(frozen=True)
class LogRow:
    """One line of one stream of one rank."""

    node: str
    generation: int
    rank: int
    stream: str
    line: int
    t_ns: int
    level: str
    raw: bytes
    who: str = ""
    """Whom it stands for, where that is not one rank."""
    fold: Fold[LogRow] | None = None
    """All that it stands for."""

    @property
    def text(self) -> bytes:
        """What it says, for whoever folds it."""
        return self.raw

    def is_at(self, key: Key | None) -> bool:
        """Whether this is the line, or stands for it."""
        return self.key == key or (
            key is not None and self.fold is not None and any(row.key == key for row in self.fold.rows)
        )

    def is_any_of(self, keys: Collection[Key]) -> bool:
        """Whether it is one of these lines, or stands for one."""
        return self.key in keys or (self.fold is not None and any(row.key in keys for row in self.fold.rows))

    @property
    def key(self) -> Key:
        """What makes it the same line again."""
        return (self.generation, self.rank, self.stream, self.line)


_LEVELS: Final = {"error": "error", "e": "error", "warn": "warn", "warning": "warn", "w": "warn"}


def level_of(word: object) -> str:
    """An agent's level as `error`, `warn` or nothing."""
    return _LEVELS.get(str(word or "").lower(), "")


class Feed(Protocol):
    """What a log view needs of its lines."""

    shifted: int
    """Rows that were put above the others since the view last looked."""

    @property
    def count(self) -> int:
        """Lines there are."""

    def row(self, index: int) -> LogRow | None:
        """One line, or None while it is not here."""

    def index_of(self, key: Key) -> int | None:
        """Where a line is, or None where that is not known."""

    def missing(self, first: int, last: int) -> int | None:
        """Something to load for these lines, first things first; None when all are here."""

    async def load(self, want: int) -> None:
        """Load what `missing` named."""

    async def refresh(self, rows: int, following: Callable[[], bool]) -> None:
        """Learn how many lines there are; while the reader is `following`, also the last `rows` of them."""


class RankFeed:
    """One stream of one rank of one generation, by line number."""

    def __init__(self, source: Source, node: str, generation: int, rank: int, stream: str) -> None:
        self._source = source
        self.node = node
        self.generation = generation
        self.rank = rank
        self.stream = stream
        self.shifted = 0
        self._ahead_ns = source.ahead_ns(node)
        self._first = 0
        """The first line there is: those before it are gone from the node's disk."""
        self._total = 0
        self._size = -1
        self._version: object = None
        self._bytes = 0
        self._pages: OrderedDict[int, dict[int, LogRow]] = OrderedDict()

    @property
    def count(self) -> int:
        """Lines there are."""
        return self._total - self._first

    @property
    def end(self) -> int:
        """The number of the last line, counted from 1."""
        return self._total

    def index_of(self, key: Key) -> int:
        """Where a line is."""
        return max(0, key[3] - self._first)

    def row(self, index: int) -> LogRow | None:
        """One line, or None while it is not here."""
        return self._row(index + self._first)

    def _row(self, line: int) -> LogRow | None:
        return self._pages.get(line // PAGE, {}).get(line)

    def missing(self, first: int, last: int) -> int | None:
        """The page to load next, so that lines `first` to `last` are here, then the page after them."""
        first, last = max(0, first), min(last, self.count - 1)
        for line in range(first + self._first, last + self._first + 1):
            if self._row(line) is None:
                return line // PAGE
        return None

    async def load(self, want: int) -> None:
        """Load one page, or as much of it as one answer holds."""
        first, end = max(self._first, want * PAGE), (want + 1) * PAGE
        first = next((line for line in range(first, end) if self._row(line) is None), first)
        await self._window(first, end - first)

    async def refresh(self, rows: int, following: Callable[[], bool]) -> None:
        """Learn how many lines there are; while the reader is `following`, also the last ones."""
        count = max(1, rows) if following() else 1
        await self._window(-count, count)

    async def find_time(self, t_ns: int, rows: int) -> int:
        """Return where the first line is that came then or later, else the last one; load as many rows around it."""
        answer = await self._window(-(rows // 3), rows, at_ns=t_ns + self._ahead_ns)
        return max(0, int(answer.data.get("at") or 0) - self._first)

    async def _window(self, line: int, count: int, **at: int) -> Answer:
        where = {"generation": self.generation, "rank": self.rank, "stream": self.stream}
        answer = await self._source.log(self.node, "log_window", {**where, "line": line, "count": count, **at})
        total, size = int(answer.data.get("total_lines") or 0), int(answer.data.get("size") or 0)
        version = answer.data.get("version")
        if total < self._total or version != self._version:
            self._pages.clear()
            self._bytes = 0
        begin = int(answer.data.get("first_line") or 0)
        if begin != self._first:
            # The line there stands for all that are gone now.
            self._forget(begin)
            self.shifted -= begin - self._first
            self._first = begin
        if size != self._size and self._total:
            # The last line may have grown since.
            self._forget(self._total - 1)
        self._total, self._size, self._version = total, size, version
        rows = answer.data.get("rows") or []
        for entry, raw in zip(rows, answer.body.split(b"\n"), strict=False):
            self._keep(entry, raw)
        while len(self._pages) > PAGES_KEPT or (self._bytes > BYTES_KEPT and len(self._pages) * PAGE > LEAST_KEPT):
            _, page = self._pages.popitem(last=False)
            self._bytes -= sum(len(row.raw) for row in page.values())
        return answer

    def _keep(self, entry: dict[str, Any], raw: bytes) -> None:
        number = int(entry["line"])
        self._forget(number)
        page = self._pages.setdefault(number // PAGE, {})
        self._pages.move_to_end(number // PAGE)
        t_ns, level = int(entry.get("t_ns") or 0) - self._ahead_ns, level_of(entry.get("level"))
        page[number] = LogRow(self.node, self.generation, self.rank, self.stream, number, t_ns, level, raw)
        self._bytes += len(raw)

    def _forget(self, number: int) -> None:
        old = self._pages.get(number // PAGE, {}).pop(number, None)
        self._bytes -= len(old.raw) if old is not None else 0


class MergedFeed:
    """Many ranks by time of arrival: all rows from a first to a last one, and more as far as somebody looks."""

    def __init__(self, source: Source, selection: Selection) -> None:
        self._source = source
        self.selection = selection
        self.shifted = 0
        self.detached = False
        """There are newer rows than the last one here."""
        self.unseen = 0
        """So many newer rows wait."""
        self.more_unseen = False
        """And more than that: the window that counts them was full."""
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

    @property
    def count(self) -> int:
        """Lines there are here, and one more for those before them."""
        return len(self._order) + self._offset

    @property
    def _offset(self) -> int:
        return int(not self._at_start and bool(self._order))

    def row(self, index: int) -> LogRow | None:
        """One line, or None for the place of older ones."""
        index -= self._offset
        return self._rows[self._order[index]] if 0 <= index < len(self._order) else None

    def index_of(self, key: Key) -> int | None:
        """Where a line is, or None."""
        return self._order.index(key) + self._offset if key in self._rows else None

    def missing(self, first: int, last: int) -> int | None:
        """Older rows, once their place comes into view; newer ones at the other end."""
        if self._offset and first <= PAGE // 4:
            return 0
        if self.detached and last >= self.count - 1:
            return 1
        return None

    async def load(self, want: int) -> None:
        """Load older (0) or newer (1) rows."""
        if want == 0:
            await self._older()
        else:
            await self._newer()

    async def refresh(self, rows: int, following: Callable[[], bool]) -> None:
        """While the reader is `following`, the newest rows; else only whether there are any."""
        if self.detached and self.more_unseen and not following():
            # More than one window holds wait already: counting on tells nothing new.
            return
        renew = not self._order or (following() and self._clocks is not None and self._clocks.moved)
        page = await self._fetch(max(PAGE if renew else 64, rows), None if renew else self._clocks)
        if not self._order:
            self._replace(page)
            return
        joined = not page.more or not page.rows or page.rows[0].t_ns <= self._edge(-1)
        fresh = self._update(page.rows)
        if not following():
            self.unseen, self.more_unseen = len(fresh), not joined
            self.detached = bool(fresh)
            return
        self.unseen, self.more_unseen = 0, False
        if renew or self.detached or not joined or not set(self.absent) <= set(page.absent):
            # More came than one window holds, or somebody is back: what lies between is loaded when it is looked for.
            self._replace(page)
        else:
            self.absent = tuple(page.absent)
            self._append(fresh)

    async def show_begin(self, rows: int) -> None:
        """Replace what is here by the oldest rows."""
        self._replace(await self._fetch(max(rows, PAGE), None, after_ns=0), at_start=True)

    async def show_around(self, t_ns: int, rows: int, pages: tuple[Page, Page] | None = None) -> None:
        """Replace what is here by the rows around a time, a third of them before it: a screen and no more.

        What a link holds that has rested is some 14 kB: each doubling of that takes a round trip. pages: those rows,
        where they are known.
        """
        # At once, with the clocks of this moment for both.
        before, after = pages or await asyncio.gather(
            self._fetch(rows // 3 + 1, None, before_ns=t_ns), self._fetch(rows, None, after_ns=t_ns)
        )
        absent = sorted({*before.absent, *after.absent})
        both = after._replace(rows=before.rows + after.rows, absent=absent)
        self._replace(both, at_start=not before.more)

    async def _older(self) -> None:
        page = await self._fetch(PAGE * 2, self._clocks, before_ns=self._edge(0))
        older = self._update(page.rows, all_times=True)
        before = self.count
        self._order[:0] = [row.key for row in older]
        self._hold(older)
        self._at_start = not page.more
        self.shifted += self.count - before
        self._note_absent(page)
        kept = self._within_bounds(self._order)
        if kept < len(self._order):
            self._drop(self._order[kept:])
            del self._order[kept:]
            self.detached = True

    async def _newer(self) -> None:
        last_ns = self._edge(-1)
        page = await self._fetch(PAGE, self._clocks, after_ns=last_ns)
        fresh = self._update(page.rows)
        if not fresh and page.more:
            page = await self._fetch(PAGE, self._clocks, after_ns=last_ns + 1)
            fresh = self._update(page.rows)
        self._append(fresh)
        self._note_absent(page)
        self.detached = page.more

    async def _fetch(self, count: int, clocks: Clocks | None, **bounds: int) -> Page:
        page = await self._source.merged(self.selection, count, clocks=clocks, **bounds)
        self.apart = self.apart or bool(page.apart and "nccl" not in self.selection.streams)
        return page

    def _edge(self, number: int) -> int:
        return self._rows[self._order[number]].t_ns

    def _update(self, rows: Iterable[Row], *, all_times: bool = False) -> list[LogRow]:
        """Take what has changed in rows that are here, a half line that is whole now; return those that are not here.

        A page that lacks a node reaches further back: what it has from before the first row here comes with its turn.
        """
        fresh: list[LogRow] = []
        start = None if all_times or self._at_start or not self._order else self._edge(0)
        for each in rows:
            row = _log_row(each)
            old = self._rows.get(row.key)
            if old is None:
                if start is None or row.t_ns >= start:
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
            self.shifted += self._offset - before - extra

    def _replace(self, page: Page, *, at_start: bool | None = None) -> None:
        """Show these rows alone: the newest ones, or others where it is known whether they are the first."""
        rows = [_log_row(row) for row in page.rows]
        self._rows, self._bytes = {}, 0
        self._hold(rows)
        self._order = list(self._rows)
        self._at_start = not page.more if at_start is None else at_start
        self.detached = page.more if at_start is not None else False
        self.absent, self._clocks = tuple(page.absent), page.clocks
        self.unseen, self.more_unseen, self.shifted = 0, False, 0


def _log_row(row: Row) -> LogRow:
    return LogRow(row.node, row.generation, row.rank, row.stream, row.line, row.t_ns, level_of(row.level), row.text)
