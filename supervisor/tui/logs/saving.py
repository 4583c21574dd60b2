"""All lines of the logs that are shown, as text: page by page, however many there are.

In: a selection, pages by time. Out: lines in a file; how far it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from supervisor.errors import RequestFailed, Unreachable
from supervisor.plain import cut_text
from supervisor.session.logs import read_rest
from supervisor.tui import words
from supervisor.tui.logs import ansi
from supervisor.tui.logs.merged import LATEST_NS

if TYPE_CHECKING:
    from remote_agent.wire import Answer
    from supervisor.session.logs import Page, Row, Selection
    from supervisor.tui.logs.log_row import Key
    from supervisor.tui.source import Source

# Rows in one request: about 400 kB.
ROWS: Final = 4096
# A page, or the rest of a line, that takes longer does not come, seconds.
DEADLINE: Final = 60.0


@dataclasses.dataclass(frozen=True)
class Form:
    """What stands in a line beside its text."""

    time: bool
    source: bool
    colour: bool = False

    def line(self, row: Row) -> bytes:
        """One line of the file; its end is not there where its text is cut."""
        when = f"{words.stamp_ns(row.t_ns)} " if self.time else ""
        who = f"{row.node}:{row.rank}| " if self.source else ""
        return f"{when}{who}".encode("utf-8", "replace") + self.text(row.text) + (b"" if row.cut else b"\n")

    def text(self, raw: bytes) -> bytes:
        """What a line says, or a part of it."""
        return (ansi.coloured(raw) if self.colour else ansi.plain(raw)).encode("utf-8", "replace")


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
        # Most lines of a job may have come at one moment: how far it is goes by them, not by time.
        newest = await self._page(count=1, counted=(0, LATEST_NS))
        until_ns = max(newest.rows[-1].t_ns if newest.rows else 0, newest.until_ns or 0)
        after_ns = 0
        while after_ns <= until_ns:
            page = await self._page(ROWS, clocks=newest.clocks, after_ns=after_ns, counted=(0, after_ns))
            rows = [row for row in page.rows if after_ns <= row.t_ns <= until_ns and self._only in (None, row.stream)]
            # With a filter a page may be empty, and yet be a step further.
            asked_ns, after_ns = after_ns, max(page.rows[-1].t_ns + 1 if page.rows else 0, page.until_ns or 0)
            if page.more and after_ns <= asked_ns:
                raise RequestFailed("a node is still reading files that were there before its agent", "try again")
            # Nodes may come and go meanwhile.
            share = min(1.0, (page.counted + len(rows)) / max(1, newest.counted))
            self._share = max(self._share, share)
            await self._put(file, rows)
            if not page.more:
                return

    async def _page(self, count: int, **bounds: Any) -> Page:
        page = await asyncio.wait_for(self._source.merged(self._selection, count, **bounds), DEADLINE)
        self.absent.update(page.absent)
        return page

    async def _log(self, node: str, op: str, wish: dict[str, Any]) -> Answer:
        return await asyncio.wait_for(self._source.log(node, op, wish), DEADLINE)

    async def _put(self, file: IO[bytes], rows: list[Row]) -> None:
        """Write lines, each whole; neither a slow disk nor many lines at once may hold the screen up."""
        begin = 0
        for end, row in enumerate(rows, 1):
            if row.cut:
                await asyncio.to_thread(self._write, file, rows[begin:end])
                await self._put_rest(file, row)
                begin = end
        await asyncio.to_thread(self._write, file, rows[begin:])

    async def _put_rest(self, file: IO[bytes], row: Row) -> None:
        """Write what follows the text of a line, and say how much of it does not come."""
        missing, held = row.cut, b""
        with contextlib.suppress(Unreachable, asyncio.TimeoutError):
            async with contextlib.aclosing(read_rest(self._log, row)) as parts:
                async for part in parts:
                    missing -= len(part)
                    held += part
                    end = ansi.parted(held) if missing else len(held)
                    await asyncio.to_thread(file.write, self._form.text(held[:end].replace(b"\r", b" ")))
                    held = held[end:]
        if missing:
            self.absent.add(row.node)
        end_text = cut_text(missing + len(held)) if missing else ""
        await asyncio.to_thread(file.write, f"{end_text}\n".encode())

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
