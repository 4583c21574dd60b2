"""What a log view shows, fetched page by page: one stream of one rank, or many ranks merged by time.

In: windows of rows asked from the session. Out: rows by index; None where a page has yet to come.

Both feeds hold a bounded number of rows whatever the size of the files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from supervisor.tui.logs.log_row import Key, LogRow, level_of
from supervisor.tui.logs.news import News

if TYPE_CHECKING:
    from remote_agent.wire import Answer
    from supervisor.tui.source import Source

PAGE: Final = 256
# 64 pages of 256 rows of 100 bytes are 1.6 MB; a row may have 64 KiB.
PAGES_KEPT: Final = 64
BYTES_KEPT: Final = 32 * 1024 * 1024
# So many rows stay, whatever their size: what is on the screen and around it.
LEAST_KEPT: Final = 2 * PAGE


class Feed(Protocol):
    """What a log view needs of its lines."""

    shifted: int
    """Rows that were put above the others since the view last looked."""
    news: News
    """What came since the reader left the end."""

    def forget_news(self) -> None:
        """The reader returns to the end: what comes from now on is new."""

    @property
    def count(self) -> int:
        """Lines there are."""

    def row(self, index: int) -> LogRow | None:
        """One line, or None while it is not here."""

    def index_of(self, key: Key) -> int | None:
        """Where a line is, or None where that is not known."""

    def missing(self, first: int, last: int, *, ahead: bool = False) -> int | None:
        """Something to load for these lines, first things first; None when all are here.

        ahead: nobody looks at them yet; more than what they need may come along.
        """

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
        self.news = News()
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

    def missing(self, first: int, last: int, *, ahead: bool = False) -> int | None:
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
        answer = await self._window(-count, count)
        end = self._total if answer.data.get("complete", True) else None
        self.news.take({self.node: {(self.generation, self.rank, self.stream): end}}, at_end=following())

    def forget_news(self) -> None:
        """The reader returns to the end: what comes from now on is new."""
        self.news.forget()

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
        place = (self.node, self.generation, self.rank, self.stream, number)
        page[number] = LogRow(*place, t_ns, level, raw, cut=int(entry.get("cut") or 0))
        self._bytes += len(raw)

    def _forget(self, number: int) -> None:
        old = self._pages.get(number // PAGE, {}).pop(number, None)
        self._bytes -= len(old.raw) if old is not None else 0
