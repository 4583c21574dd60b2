"""All lines of the logs that are shown, as text: page by page, however many there are.

In: a selection, pages by time. Out: lines in a file; how far it is.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from supervisor.errors import RequestFailed
from supervisor.plain import cut_text
from supervisor.tui import ansi, words

if TYPE_CHECKING:
    from supervisor.session.logs import Page, Row, Selection
    from supervisor.tui.log_row import Key
    from supervisor.tui.source import Source

# Rows in one request: about 400 kB.
ROWS: Final = 4096
# A page that takes longer does not come, seconds.
DEADLINE: Final = 60.0


@dataclasses.dataclass(frozen=True)
class Form:
    """What stands in a line beside its text."""

    time: bool
    source: bool
    colour: bool = False

    def line(self, row: Row) -> bytes:
        """One line of the file."""
        text = ansi.coloured(row.text) if self.colour else ansi.plain(row.text)
        when = f"{words.stamp_ns(row.t_ns)} " if self.time else ""
        who = f"{row.node}:{row.rank}| " if self.source else ""
        return f"{when}{who}{text}{cut_text(row.cut) if row.cut else ''}\n".encode("utf-8", "replace")


class Saving:
    """One log on its way into a file: what there is when it begins."""

    def __init__(
        self, source: Source, selection: Selection, only: str | None, form: Form, wanted: Key | None = None
    ) -> None:
        self.lines = 0
        self.absent: set[str] = set()
        """Nodes whose lines may be missing."""
        self.at = 1
        """The number in the file of the line that is wanted, counted from 1."""
        self._wanted = wanted
        self._source = source
        self._selection = selection
        self._only = only
        """The one stream that is shown."""
        self._form = form
        self._share = 0.0

    def said(self) -> str:
        """How far it is."""
        return f"{self._share:.0%} saved, {words.count(self.lines, 'line')}"

    async def write(self, file: IO[bytes]) -> None:
        """Write all lines; raises SupervisorError, WireError, TimeoutError, OSError."""
        newest = await self._page(count=1)
        until_ns = max(newest.rows[-1].t_ns if newest.rows else 0, newest.until_ns or 0)
        first_ns = after_ns = 0
        while after_ns <= until_ns:
            page = await self._page(ROWS, clocks=newest.clocks, after_ns=after_ns)
            rows = [row for row in page.rows if after_ns <= row.t_ns <= until_ns and self._only in (None, row.stream)]
            # With a filter a page may be empty, and yet be a step further.
            asked_ns, after_ns = after_ns, max(page.rows[-1].t_ns + 1 if page.rows else 0, page.until_ns or 0)
            if page.more and after_ns <= asked_ns:
                raise RequestFailed("a node is still reading files that were there before its agent", "try again")
            first_ns = first_ns or (page.rows[0].t_ns if page.rows else after_ns)
            # Neither a slow disk nor many lines at once may hold the screen up.
            await asyncio.to_thread(self._write, file, rows)
            self._share = min(1.0, (after_ns - first_ns) / max(1, until_ns - first_ns))
            if not page.more:
                return

    async def _page(self, count: int, **bounds: Any) -> Page:
        page = await asyncio.wait_for(self._source.merged(self._selection, count, **bounds), DEADLINE)
        self.absent.update(page.absent)
        return page

    def _write(self, file: IO[bytes], rows: Iterable[Row]) -> None:
        for row in rows:
            self.lines += 1
            if (row.generation, row.rank, row.stream, row.line) == self._wanted:
                self.at = self.lines
            file.write(self._form.line(row))


def free_name(stem: str) -> Path:
    """A file of this name that is not there yet, in the working directory."""
    path = Path.cwd() / f"{stem}.log"
    number = 2
    while path.exists():
        path, number = path.with_name(f"{stem}-{number}.log"), number + 1
    return path
