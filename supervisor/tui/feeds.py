"""What a log view shows, fetched page by page: one stream of one rank, or many ranks merged by time.

In: windows of rows asked from the session. Out: rows by index; None where a page has yet to come.

Both feeds hold a bounded number of rows whatever the size of the files.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from supervisor.session.logs import Selection
    from supervisor.tui.source import Source

PAGE: Final = 256
# 64 pages of 256 rows of 100 bytes are 1.6 MB.
PAGES_KEPT: Final = 64
MERGED_KEPT: Final = 20_000


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

    @property
    def key(self) -> tuple[int, int, str, int]:
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

    def missing(self, first: int, last: int) -> int | None:
        """Something to load for these lines, first things first; None when all are here."""

    async def load(self, want: int) -> None:
        """Load what `missing` named."""

    async def refresh(self, rows: int, follow: bool) -> None:
        """Learn how many lines there are; with `follow` also the last `rows` of them."""


class RankFeed:
    """One stream of one rank of one generation, by line number."""

    def __init__(self, source: Source, node: str, generation: int, rank: int, stream: str) -> None:
        self._source = source
        self.node = node
        self.generation = generation
        self.rank = rank
        self.stream = stream
        self.shifted = 0
        self._total = 0
        self._size = -1
        self._pages: OrderedDict[int, dict[int, LogRow]] = OrderedDict()

    @property
    def count(self) -> int:
        """Lines there are."""
        return self._total

    def row(self, index: int) -> LogRow | None:
        """One line, or None while it is not here."""
        return self._pages.get(index // PAGE, {}).get(index)

    def missing(self, first: int, last: int) -> int | None:
        """The page to load next, so that lines `first` to `last` are here, then the page after them."""
        first, last = max(0, first), min(last, self._total - 1)
        for index in range(first, last + 1):
            if self.row(index) is None:
                return index // PAGE
        return None

    async def load(self, want: int) -> None:
        """Load one page."""
        await self._window(want * PAGE, PAGE)

    async def refresh(self, rows: int, follow: bool) -> None:
        """Learn how many lines there are; with `follow` also the last ones."""
        count = max(1, rows) if follow else 1
        await self._window(-count, count)

    async def _window(self, line: int, count: int) -> None:
        where = {"generation": self.generation, "rank": self.rank, "stream": self.stream}
        answer = await self._source.log(self.node, "log_window", {**where, "line": line, "count": count})
        total, size = int(answer.data.get("total_lines") or 0), int(answer.data.get("size") or 0)
        if total < self._total:
            self._pages.clear()
        elif size != self._size and self._total:
            # The last line may have grown since.
            self._pages.get((self._total - 1) // PAGE, {}).pop(self._total - 1, None)
        self._total, self._size = total, size
        rows = answer.data.get("rows") or []
        for entry, raw in zip(rows, answer.body.split(b"\n"), strict=False):
            self._keep(entry, raw)
        while len(self._pages) > PAGES_KEPT:
            self._pages.popitem(last=False)

    def _keep(self, entry: dict[str, Any], raw: bytes) -> None:
        number = int(entry["line"])
        page = self._pages.setdefault(number // PAGE, {})
        self._pages.move_to_end(number // PAGE)
        t_ns, level = int(entry.get("t_ns") or 0), level_of(entry.get("level"))
        page[number] = LogRow(self.node, self.generation, self.rank, self.stream, number, t_ns, level, raw)


class MergedFeed:
    """Many ranks by time of arrival: the newest rows, and older ones as far as somebody has looked."""

    def __init__(self, source: Source, selection: Selection) -> None:
        self._source = source
        self.selection = selection
        self.shifted = 0
        self.detached = False
        """Newer rows than the last one here have been dropped, or were never asked for."""
        self.unseen = 0
        """So many newer rows wait."""
        self.more_unseen = False
        """And more than that: the window that counts them was full."""
        self._rows: list[LogRow] = []
        self._at_start = False
        self._known: set[tuple[int, int, str, int]] = set()

    @property
    def count(self) -> int:
        """Lines there are here, and one more for those before them."""
        return len(self._rows) + (not self._at_start and bool(self._rows))

    @property
    def _offset(self) -> int:
        return int(not self._at_start and bool(self._rows))

    def row(self, index: int) -> LogRow | None:
        """One line, or None for the place of older ones."""
        index -= self._offset
        return self._rows[index] if 0 <= index < len(self._rows) else None

    def index_of(self, key: tuple[int, int, str, int]) -> int | None:
        """Where a line is, or None."""
        if key not in self._known:
            return None
        return next((i + self._offset for i, row in enumerate(self._rows) if row.key == key), None)

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

    async def refresh(self, rows: int, follow: bool) -> None:
        """With `follow`, the newest rows; without, only whether there are any."""
        if self.detached and self.more_unseen and not follow:
            # More than one window holds wait already: counting on tells nothing new.
            return
        count = max(PAGE, rows) if not self._rows else max(64, rows)
        fresh = await self._fetch(count, None)
        new = [row for row in fresh if row.key not in self._known]
        joined = len(new) < len(fresh) or not self._rows
        if not follow and self._rows:
            self.unseen, self.more_unseen = len(new), not joined
            self.detached = bool(new)
            return
        self.unseen, self.more_unseen = 0, False
        if not joined or self.detached:
            # More came than one window holds: what lies between is loaded again when somebody scrolls there.
            self._replace(fresh, count)
            return
        if not self._rows:
            self._at_start = len(fresh) < count
        self._append(new)

    async def show_begin(self, rows: int) -> None:
        """Replace what is here by the oldest rows."""
        chosen = self.selection
        firsts = [
            int(file["first_ns"])
            for file in await self._source.log_files()
            if file.get("first_ns")
            and chosen.generation in ("all", None, file["generation"])
            and (chosen.ranks is None or file["rank"] in chosen.ranks)
            and (chosen.nodes is None or file["node"] in chosen.nodes)
            and file["stream"] in chosen.streams
        ]
        if firsts:
            await self.show_around(min(firsts), rows)

    async def show_around(self, t_ns: int, rows: int) -> None:
        """Replace what is here by the rows around a time."""
        before = await self._fetch(PAGE, t_ns + 1)
        after = await self._after(t_ns, max(rows, 64))
        known = {row.key for row in before}
        self._replace([*before, *(row for row in after if row.key not in known)], PAGE)
        self._at_start = len(before) < PAGE
        self.detached = True

    async def _older(self) -> None:
        first = self._rows[0]
        # Rows of the same nanosecond may lie on both sides of the cut: ask once more for them, and drop the known.
        fetched = await self._fetch(PAGE * 2, first.t_ns + 1)
        older = [row for row in fetched if row.key not in self._known]
        before = self.count
        self._rows[:0] = older
        self._known.update(row.key for row in older)
        self._at_start = len(fetched) < PAGE * 2 or not older
        self.shifted += self.count - before
        if len(self._rows) > MERGED_KEPT:
            self._drop_from(MERGED_KEPT)

    async def _newer(self) -> None:
        last = self._rows[-1]
        fresh = [row for row in await self._after(last.t_ns, PAGE) if row.key not in self._known]
        self._append(fresh)
        if not fresh:
            self.detached = False

    async def _after(self, t_ns: int, rows: int) -> list[LogRow]:
        """Rows from a time on. The agents answer `before` only: look for an end that is near enough."""
        span = 1_000_000_000
        found: list[LogRow] = []
        newest = await self._fetch(1, None)
        end = newest[-1].t_ns if newest else t_ns
        for _ in range(12):
            stop = min(t_ns + span, end)
            fetched = await self._fetch(PAGE * 2, stop + 1)
            found = [row for row in fetched if row.t_ns >= t_ns]
            whole = len(found) < len(fetched) or len(fetched) < PAGE * 2
            if whole and (len(found) >= rows or stop >= end):
                break
            span = span * 4 if whole else max(1_000_000, span // 3)
        return found

    async def _fetch(self, count: int, before_ns: int | None) -> list[LogRow]:
        rows = await self._source.merged(self.selection, count, before_ns)
        return [
            LogRow(row.node, row.generation, row.rank, row.stream, row.line, row.t_ns, level_of(row.level), row.text)
            for row in rows
        ]

    def _append(self, rows: list[LogRow]) -> None:
        self._rows.extend(rows)
        self._known.update(row.key for row in rows)
        extra = len(self._rows) - MERGED_KEPT
        if extra > 0:
            before = self._offset
            self._known.difference_update(row.key for row in self._rows[:extra])
            del self._rows[:extra]
            self._at_start = False
            self.shifted += self._offset - before - extra

    def _drop_from(self, index: int) -> None:
        self._known.difference_update(row.key for row in self._rows[index:])
        del self._rows[index:]
        self.detached = True

    def _replace(self, rows: list[LogRow], asked: int) -> None:
        self._rows = list(rows)
        self._known = {row.key for row in rows}
        self._at_start = len(rows) < asked
        self.detached = False
        self.shifted = 0
