"""Many ranks by time; identical lines of several ranks are shown once.

In: the rows of a feed. Out: the rows of the first rank of each fold, with the ranks that it stands for.

**Settled folds never change, and older rows fold among themselves: the line that is read keeps its position.**
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from remote_agent.text.names import ranges
from supervisor.logs.fold import WINDOW_NS, Fold, Folder
from supervisor.tui.logs.feed import LINES_KEPT, PAGE, LogFeed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from supervisor.logs.pages import Page
    from supervisor.logs.rows import Clocks, LineKey, LogLine
    from supervisor.logs.selection import Selection
    from supervisor.session import Session

# One request has this many rows: hundreds of them may be one line on the screen.
FOLD_PAGE: Final = 4096


class _Block(NamedTuple):
    """A fold on the screen."""

    fold: Fold[LogLine]
    who: str

    @property
    def height(self) -> int:
        """Its lines on the screen."""
        return len(self.fold.first_rows)


def _blocks(rows: Iterable[LogLine]) -> list[_Block]:
    folder: Folder[LogLine] = Folder()
    return [_block(fold) for fold in [*folder.feed(rows), *folder.rest()]]


def _block(fold: Fold[LogLine]) -> _Block:
    if len(fold.records) == 1:
        return _Block(fold, "")
    return _Block(fold, f"[{ranges(fold.ranks)}]{'~' if fold.differs else ''}")


def _height(blocks: Iterable[_Block]) -> int:
    return sum(block.height for block in blocks)


class FoldedFeed(LogFeed):
    """A feed that shows equal lines of several ranks once."""

    is_folded = True

    def __init__(self, source: Session, selection: Selection) -> None:
        super().__init__(source, selection)
        self._is_flooded = False
        """Whether more than one page arrived since the last refresh."""
        self._blocks: list[_Block] = []
        self._lines: list[tuple[_Block, int]] = []
        """By line: a block, and the number of its row."""

    @property
    def count(self) -> int:
        """The loaded lines, and one more for those before them."""
        return len(self._lines) + self._offset

    def _at(self, index: int) -> tuple[_Block, int] | None:
        """Return the block of a line, and the number of its row; None for the placeholder of older ones."""
        index -= self._offset
        return self._lines[index] if 0 <= index < len(self._lines) else None

    def line(self, index: int) -> LogLine | None:
        """Return one line, or None for the placeholder of older ones."""
        here = self._at(index)
        return None if here is None else self._rows[here[0].fold.first_rows[here[1]].key]

    def fold(self, index: int) -> Fold[LogLine] | None:
        """Return the lines for which this one stands, if they are of several ranks."""
        here = self._at(index)
        return here[0].fold if here is not None and here[0].who else None

    def who(self, index: int) -> str:
        """Return whose line it is: a rank's, or several."""
        here = self._at(index)
        return (here[0].who if here is not None else "") or super().who(index)

    def stands_ns(self, index: int) -> int:
        """Return the time of the first line of its record, by which it is sorted."""
        here = self._at(index)
        return here[0].fold.t_ns if here is not None else 0

    def index_of(self, key: LineKey) -> int | None:
        """Return the index of the line that shows this one, or None."""
        line = self._offset
        for block in self._blocks:
            for rows in block.fold.records:
                for at, row in enumerate(rows):
                    if row.key == key:
                        return line + at
            line += block.height
        return None

    def missing(self, first: int, last: int, *, ahead: bool = False) -> int | None:
        """Return older rows while few are loaded, or when their placeholder is in view; newer ones at the other end."""
        # Rows that pass a filter may be far back: they are searched for when there is room for them.
        few = len(self._order) < LINES_KEPT // 2 and (first <= 0 or not self.selection.filter)
        # The lines on the screen may stand for all rows that can be kept.
        wanted = few or (first <= 0 and last < self.count - 1)
        if self._offset and first <= PAGE // 4 and wanted:
            return 0
        if self.detached and last >= self.count - 1:
            return 1
        return None

    async def refresh(self, rows: int, following: Callable[[], bool]) -> None:
        """Load all new rows while the reader is `following`; otherwise learn only whether there are any."""
        clocks = self.clocks
        is_at_end = self._order and not self.detached and not self.selection.filter
        if is_at_end and following() and clocks is not None and not clocks.moved and self._until_ns is not None:
            last_ns = self._edge(-1)
            page = None
            if not self._is_flooded:
                page = await self._fetch(FOLD_PAGE, clocks, after_ns=self._until_ns)
            if page is None or page.more:
                # Only the newest page is loaded; the rows between are loaded on demand.
                page = await self._fetch(FOLD_PAGE, clocks)
                self._is_flooded = bool(page.more and page.rows and page.rows[0].t_ns > last_ns)
            if following() and set(self.absent) <= set(page.absent):
                self._note(page, at_end=True)
                if self._is_flooded:
                    self._replace(page)
                    return
                self.absent = tuple(page.absent)
                self._append(self._update(page.rows))
                self._until_ns = page.until_ns or self._until_ns
                return
        await super().refresh(rows, following)

    async def show_around(self, t_ns: int, rows: int, clocks: Clocks | None = None) -> None:
        """Replace the loaded rows by those around a time, as many as one answer holds: they may fold to a few lines."""
        await super().show_around(t_ns, max(rows, 3 * PAGE), clocks)

    async def _fetch(self, count: int, clocks: Clocks | None, **bounds: Any) -> Page:
        return await super()._fetch(count if count < PAGE else FOLD_PAGE, clocks, **bounds)

    async def _older(self) -> None:
        shifted, offset, here = self.shifted, self._offset, set(self._rows)
        await super()._older()
        fresh = [self._rows[key] for key in self._order if key not in here]
        older = _blocks(fresh)
        self._show(older + (self._left() if len(self._order) < len(here) + len(fresh) else self._blocks))
        self.shifted = shifted + _height(older) + self._offset - offset

    def _append(self, rows: list[LogLine]) -> None:
        if not rows:
            return
        shifted, offset, count = self.shifted, self._offset, len(self._order)
        super()._append(rows)
        left = self._left() if len(self._order) < count + len(rows) else self._blocks
        self.shifted = shifted + _height(left) - _height(self._blocks) + self._offset - offset
        # No row can join a fold that is older than two windows.
        settled = bisect_left(left, min(row.t_ns for row in rows) - 2 * WINDOW_NS, key=lambda block: block.fold.t_ns)
        again = {row.key for block in left[settled:] for row in block.fold.rows} | {row.key for row in rows}
        self._show(left[:settled] + _blocks(self._rows[key] for key in self._order if key in again))

    def _replace(self, page: Page, *, at_start: bool | None = None) -> None:
        super()._replace(page, at_start=at_start)
        self._show(_blocks(self._rows[key] for key in self._order))

    def _show(self, blocks: list[_Block]) -> None:
        self._blocks = blocks
        self._lines = [(block, at) for block in blocks for at in range(block.height)]

    def _left(self) -> list[_Block]:
        """Return the blocks that still have loaded rows."""
        left: list[_Block] = []
        # A fold without the rows of its first ranks moves behind the rows that may be loaded again.
        least_ns = self._edge(0)
        for block in self._blocks:
            records = [kept for rows in block.fold.records if (kept := [row for row in rows if row.key in self._rows])]
            if records == block.fold.records and block.fold.t_ns >= least_ns:
                left.append(block)
            elif records:
                fold: Fold[LogLine] = Fold(block.fold.key, max(block.fold.t_ns, least_ns))
                fold.records, fold.differs = records, block.fold.differs
                left.append(_block(fold))
        return left
