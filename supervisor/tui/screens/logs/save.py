"""The log that is shown, saved in a file as `supervisor logs` prints it.

In: the log that is shown, the name of a new file. Out: the file, the progress.
"""

from __future__ import annotations

import asyncio
import functools
import os
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from remote_agent.text.names import count
from remote_agent.wire import WireError
from supervisor.errors import RequestFailed, SupervisorError, why
from supervisor.logs.fold import Folder
from supervisor.wording.log_lines import line_of, lines_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.logs.pages import Page
    from supervisor.logs.rows import LogLine
    from supervisor.tui.logs.feed import LogFeed
    from supervisor.tui.rows.spans import Row
    from supervisor.tui.screens.logs.shown import ShownLog
    from supervisor.tui.shell import Level, Shell
    from supervisor.tui.widgets.ask import Ask

# One request asks for this many rows, about 400 kB.
ROWS: Final = 4096
# A page is awaited this long, seconds.
DEADLINE: Final = 60.0


class LogSave:
    """Saves the lines that exist when it begins, one file at a time."""

    def __init__(self, shell: Shell, shown: ShownLog, ask: Ask, show_title: Callable[[], None]) -> None:
        self._saved: int | None = None
        """How many lines have been saved; None while no file is written."""
        self._shell = shell
        self._shown = shown
        self._ask = ask
        self._show_title = show_title

    def title_parts(self) -> list[tuple[int, Row]]:
        """Return the progress, for the title."""
        return [] if self._saved is None else [(4, ((f"{count(self._saved, 'line')} saved, esc cancels", "mark"),))]

    def cancel(self) -> bool:
        """Stop saving, and delete the file; return whether there was one."""
        if self._saved is None:
            return False
        self._shown.view.workers.cancel_group(self._shown.view, "save")
        self._shell.say("canceled; no file was written")
        return True

    def action_save(self) -> None:
        """Ask for a file name, and save this log there."""
        if self._saved is not None:
            self._shell.say("a log is being saved; esc cancels it")
            return
        target, generation = self._shown.target, self._shown.generation
        who = f"rank{target.rank}" if target.rank is not None else target.node or "all"
        which = f"-gen{generation}" if generation is not None else ""
        name = f"{self._shell.source.job}-{who}-{'-'.join(self._shown.streams)}{which}.log"
        self._ask.ask("save to", "a new file", self._save_to, name)

    def _save_to(self, text: str) -> str:
        """Begin to save the log; return why the file cannot be created, or ""."""
        view = self._shown.view
        if view.feed is None:
            return "no log is open yet"
        try:
            path = Path(text).expanduser().absolute()
            file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")  # noqa: SIM115
        except FileExistsError:
            return "that file exists already"
        except (OSError, RuntimeError, ValueError) as error:
            return f"{getattr(error, 'strerror', None) or error}"
        self._saved = 0
        view.run_worker(functools.partial(self._save, view.feed, file, path), group="save")  # type: ignore[arg-type]
        return ""

    async def _save(self, feed: LogFeed, file: IO[bytes], path: Path) -> None:
        is_saved = False
        try:
            with file:
                absent = await self._write(feed, file)
            is_saved = True
            missing = f"; lines of {', '.join(sorted(absent))} may be missing" if absent else ""
            level: Level = "warning" if absent else "information"
            text = f"{count(self._saved or 0, 'line')} in {path}{missing}"
            self._shell.say(text, title="saved", level=level, seconds=10)
        except (SupervisorError, WireError, OSError, ValueError, asyncio.TimeoutError) as error:
            self._shell.say(f"{path} was not written: {why(error)}", level="error")
        finally:
            if not is_saved:
                path.unlink(missing_ok=True)
            self._saved = None
            if self._shell.app.is_running:
                self._show_title()

    async def _write(self, feed: LogFeed, file: IO[bytes]) -> set[str]:
        """Write the log page by page; return the nodes whose lines may be missing."""
        folder: Folder[LogLine] | None = Folder() if feed.is_folded else None
        newest = page = await self._page(feed, 1)
        until_ns = max(newest.rows[-1].t_ns if newest.rows else 0, newest.until_ns or 0)
        absent, after_ns, is_more = set(newest.absent), 0, True
        while is_more and after_ns <= until_ns:
            page = await self._page(feed, ROWS, clocks=newest.clocks, after_ns=after_ns)
            rows = [row for row in page.rows if after_ns <= row.t_ns <= until_ns]
            lines = b"".join(map(line_of, rows)) if folder is None else lines_of(folder.feed(rows))
            # A slow disk must not block the screen.
            await asyncio.to_thread(file.write, lines)
            self._saved = (self._saved or 0) + len(rows)
            absent.update(page.absent)
            # With a filter a page may be empty, and the search has still advanced.
            asked_ns, after_ns = after_ns, max(page.rows[-1].t_ns + 1 if page.rows else 0, page.until_ns or 0)
            is_more = page.more
            if is_more and after_ns <= asked_ns:
                raise RequestFailed("a node is still indexing files that are older than its agent", "try again")
        if folder is not None:
            await asyncio.to_thread(file.write, lines_of(folder.rest()))
        return absent

    async def _page(self, feed: LogFeed, rows: int, **bounds: Any) -> Page:
        return await asyncio.wait_for(self._shell.source.merged(feed.selection, rows, **bounds), DEADLINE)
