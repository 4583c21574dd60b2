"""The lines of a log view, loaded page by page: one stream of one rank here, many ranks merged by time in `merged`.

In: windows of rows requested from the session. Out: rows by index; None while a page is not loaded.

A feed holds a bounded number of rows whatever the size of the files.
"""

from __future__ import annotations

import abc
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from remote_agent.text.names import count
from remote_agent.wire.answers import LogKey
from supervisor.logs.rows import LineKey, LogLine
from supervisor.logs.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from remote_agent.wire.answers import LogEntry, LogWindow
    from supervisor.logs.fold import Fold
    from supervisor.logs.rows import Clocks
    from supervisor.session import Session


BOTH: Final[tuple[str, ...]] = ("stdout", "stderr")
PAGE: Final = 256
# 64 pages of 256 rows of 100 bytes are 1.6 MB; a row may have 64 KiB.
PAGES_KEPT: Final = 64
BYTES_KEPT: Final = 32 * 1024 * 1024
# This many rows are kept whatever their size: those on the screen and around it.
LEAST_KEPT: Final = 2 * PAGE


class Jump(NamedTuple):
    """A jump to a time (0: the beginning), or to the line with this key."""

    t_ns: int
    key: LineKey | None = None
    clocks: Clocks | None = None
    """The clock offsets with which the time was computed."""


class Feed(abc.ABC):
    """The lines of a log view."""

    selection: Selection
    """The files and records that it shows."""
    file: LogKey | None = None
    """The file that it shows; None if it merges several."""
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

    @property
    def is_whole(self) -> bool:
        """Whether everything from the first line to the last one has been read."""
        return True

    @property
    def has_returned_node(self) -> bool:
        """Whether one of the absent nodes answers again."""
        return False

    @property
    def last_line(self) -> int:
        """The number of the last line, counted from 1; 0 if the lines of the view are not numbered."""
        return 0

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """How many lines there are."""

    @property
    @abc.abstractmethod
    def new_lines_text(self) -> str:
        """What has arrived below the lines that have been in view, in words; "" if nothing has."""

    @abc.abstractmethod
    def line(self, index: int) -> LogLine | None:
        """Return one line, or None while it is not loaded."""

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

    @abc.abstractmethod
    def index_of(self, key: LineKey) -> int | None:
        """Return the index of a line, or None if it is not known."""

    @abc.abstractmethod
    def missing(self, first: int, last: int, *, ahead: bool = False) -> int | None:
        """Return what to load next for these lines, for `load`; None when all are loaded.

        ahead: they are not in view yet; a feed may load more than these.
        """

    @abc.abstractmethod
    async def load(self, want: int) -> None:
        """Load what `missing` returned."""

    @abc.abstractmethod
    async def refresh(self, rows: int, following: Callable[[], bool]) -> None:
        """Learn how many lines there are; while the reader is `following`, also load the last `rows` of them."""

    @abc.abstractmethod
    async def seek(self, jump: Jump, rows: int) -> int:
        """Load `rows` rows around the target; return the index of the line, or of the first one at that time."""

    @abc.abstractmethod
    def note_read(self, rows: Sequence[LogLine]) -> None:
        """Note which rows are in view: they are not new any more."""

    @abc.abstractmethod
    def forget_new_lines(self) -> None:
        """Count only later lines as new: the reader has returned to the end."""


class RankFeed(Feed):
    """One stream of one rank of one generation, by line number."""

    def __init__(self, source: Session, node: str, generation: int, rank: int, stream: str) -> None:
        self._source = source
        self.node = node
        self.file = LogKey(generation, rank, stream)
        # All lines of the file, also those of NCCL.
        self.selection = Selection(generation, [rank], tuple(dict.fromkeys((stream, "nccl"))), [node])
        self._ahead_ns = source.ahead_ns(node)
        self._first = 0
        """The first line there is: earlier ones were deleted on the node."""
        self._total = 0
        self._read: int | None = None
        """The first line that has not been in reach of the reader; None until the file is read to its end."""
        self._size = -1
        self._version: object = None
        self._bytes = 0
        self._pages: OrderedDict[int, dict[int, LogLine]] = OrderedDict()

    @property
    def count(self) -> int:
        return self._total - self._first

    @property
    def last_line(self) -> int:
        """The number of the last line, counted from 1."""
        return self._total

    @property
    def new_lines(self) -> int:
        """How many lines are below those that have been in view."""
        return 0 if self._read is None else max(0, self._total - self._read)

    @property
    def new_lines_text(self) -> str:
        """The same in words: `+12 lines`."""
        return f"+{count(self.new_lines, 'line')}" if self.new_lines else ""

    def index_of(self, key: LineKey) -> int:
        """Return the index of a line."""
        return max(0, key[3] - self._first)

    def line(self, index: int) -> LogLine | None:
        return self._row(index + self._first)

    def _row(self, line: int) -> LogLine | None:
        return self._pages.get(line // PAGE, {}).get(line)

    def missing(self, first: int, last: int, *, ahead: bool = False) -> int | None:
        """Return the page to load next, so that lines `first` to `last` are loaded."""
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
        """Learn how many lines there are; while the reader is `following`, also load the last ones."""
        lines = max(1, rows) if following() else 1
        window = await self._window(-lines, lines)
        if following() or self._read is None:
            self._read = self._total if window.get("complete", True) else self._read
        elif self._total < self._read:
            # The file was rewritten.
            self._read = 0

    def note_read(self, rows: Sequence[LogLine]) -> None:
        if self._read is not None:
            self._read = max(self._read, rows[-1].line + 1)

    def forget_new_lines(self) -> None:
        self._read = None

    async def seek(self, jump: Jump, rows: int) -> int:
        """Return the index of the first line at a time or later, or of the last line; load the rows around it."""
        if not jump.t_ns:
            return 0
        window = await self._window(-(rows // 3), rows, at_ns=jump.t_ns + self._ahead_ns)
        return max(0, (window["at"] or 0) - self._first)

    async def _window(self, line: int, count: int, **at: int) -> LogWindow:
        generation, rank, stream = self.file or (0, 0, "")
        where = {"generation": generation, "rank": rank, "stream": stream}
        answer = await self._source.log(self.node, "log_window", {**where, "line": line, "count": count, **at})
        window: LogWindow = answer.data
        total, size, version = window["total_lines"] or 0, window["size"], window.get("version")
        if total < self._total or version != self._version:
            self._pages.clear()
            self._bytes = 0
        begin = window.get("first_line", 0)
        if begin != self._first:
            # This line stands for the deleted ones.
            self._forget(begin)
            self.shifted -= begin - self._first
            self._first = begin
        if size != self._size and self._total:
            # The last line may have grown.
            self._forget(self._total - 1)
        self._total, self._size, self._version = total, size, version
        for entry, raw in zip(window["rows"], answer.body.split(b"\n"), strict=False):
            self._keep(entry, raw)
        while len(self._pages) > PAGES_KEPT or (self._bytes > BYTES_KEPT and len(self._pages) * PAGE > LEAST_KEPT):
            _, page = self._pages.popitem(last=False)
            self._bytes -= sum(len(row.text) for row in page.values())
        return window

    def _keep(self, entry: LogEntry, raw: bytes) -> None:
        number = entry["line"]
        self._forget(number)
        page = self._pages.setdefault(number // PAGE, {})
        self._pages.move_to_end(number // PAGE)
        t_ns, more = (entry.get("t_ns") or 0) - self._ahead_ns, (entry.get("level"), raw, entry.get("cut", 0))
        page[number] = LogLine(self.node, *(self.file or (0, 0, "")), number, entry["offset"], t_ns, *more)
        self._bytes += len(raw)

    def _forget(self, number: int) -> None:
        old = self._pages.get(number // PAGE, {}).pop(number, None)
        self._bytes -= len(old.text) if old is not None else 0
