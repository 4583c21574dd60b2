"""What is taken out of a log: a line or a record, all of it into a file, or into a pager.

In: the line that is read, the logs that are shown. Out: the clipboard, a dialog, a file, the user's pager.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from textual.app import SuspendNotSupported

from remote_agent.wire import WireError
from supervisor.errors import SupervisorError, why
from supervisor.tui import terminal, words
from supervisor.tui.logs import ansi, saving
from supervisor.tui.logs.feeds import RankFeed
from supervisor.tui.logs.saving import Form, Saving
from supervisor.tui.screens.dialogs import TextDialog
from supervisor.tui.screens.log_found import FoundLog
from supervisor.tui.screens.record import RecordDialog
from supervisor.tui.widgets.ask import Ask

if TYPE_CHECKING:
    from supervisor.tui.cells import Row
    from supervisor.tui.widgets.virtual_log import VirtualLog


# What a node, a link or a disk may raise.
PROBLEMS: Final = (SupervisorError, WireError, OSError, ValueError, asyncio.TimeoutError)
# The title of what is said while it lasts.
SAVING: Final = "one at a time"


class TakenLog(FoundLog):
    """A log of which something is taken."""

    saving: Saving | None = None

    def _parts(self, log: VirtualLog, room: int) -> list[tuple[int, Row]]:
        if self.saving is None:
            return super()._parts(log, room)
        return [(4, ((f"{self.saving.said()}, esc ends it", "mark"),)), *super()._parts(log, room)]

    def action_back(self) -> None:
        """End what is being saved first."""
        if self.saving is not None:
            self.workers.cancel_group(self, "save")
            self.tui.say("nothing is saved")
        else:
            super().action_back()

    def copied(self) -> str:
        """The whole line that a jump has led to, else the first one on the screen."""
        row = self._row_read()
        return ansi.plain(row.raw) if row is not None else ""

    def action_detail(self) -> None:
        """The whole record of the line that a jump has led to, else of the first one on the screen."""
        row = self._row_read()
        if row is not None and row.fold is not None:
            lines = (f"{each.node} r{each.rank}  {ansi.plain(each.raw)}" for each in row.fold.rows)
            title = f"{words.count(len(row.fold.records), 'rank')} alike  {words.clock_ns(row.t_ns)}"
            self.tui.push_screen(TextDialog(title, "\n".join(lines)))
        elif row is not None:
            self.tui.push_screen(RecordDialog(self.tui.source, row))

    # --- all of it

    def _begin_saving(self, *, colour: bool) -> Saving:
        log, feed, row = self.log_view, self.log_view.feed, self._row_read()
        only = feed.stream if isinstance(feed, RankFeed) else None
        form = Form(log.show_time, log.show_source, colour)
        self.saving = Saving(self.tui.source, self._selection(), only, form, row.key if row is not None else None)
        return self.saving

    def _end_saving(self) -> None:
        self.saving = None
        self.tui.unsay(SAVING)
        if self.tui.is_running:
            self._title()

    def _is_busy(self) -> bool:
        if self.saving is not None:
            self.tui.say(f"{self.saving.said()}; esc ends that", title=SAVING)
        return self.saving is not None

    def action_save(self) -> None:
        """Ask for a file, and write all lines of these logs into it."""
        if not self._is_busy():
            target = self.target
            who = f"rank{target.rank}" if target.rank is not None else target.node or "all"
            which = f"-gen{self.generation}" if self.generation is not None else ""
            path = saving.free_name(f"{self.tui.source.job}-{who}-{'-'.join(self.streams)}{which}")
            self.query_one(Ask).ask("save to", "a file that is not there yet", self._save_to, str(path))

    def _save_to(self, text: str) -> str:
        path = Path(text)
        try:
            path = path.expanduser()
            if path.exists():
                return "that file is there already"
            # Under its own name it is whole.
            file = _part(path).open("xb")
        except FileExistsError:
            return f"{_part(path)} is there already"
        except (OSError, RuntimeError, ValueError) as error:
            return f"{getattr(error, 'strerror', None) or error}"
        work = functools.partial(self._save, self._begin_saving(colour=False), file, path)
        self.run_worker(work, group="save")  # type: ignore[arg-type]
        return ""

    async def _save(self, save: Saving, file: IO[bytes], path: Path) -> None:
        done = False
        try:
            with file:
                await save.write(file)
            if path.exists():
                raise FileExistsError(f"{path} is there by now")
            _part(path).rename(path)
            done = True
        except PROBLEMS as error:
            self.tui.say(f"{path} is not written: {why(error)}", level="error")
        finally:
            self._end_saving()
            _part(path).unlink(missing_ok=True)
        if done:
            without = f"; without what {', '.join(sorted(save.absent))} had no time to send" if save.absent else ""
            said = f"{words.count(save.lines, 'line')} in {path}{without}"
            self.tui.say(said, title="saved", level="warning" if save.absent else "information", seconds=10)

    def action_pager(self) -> None:
        """Show all lines of these logs in the user's pager."""
        if self._is_busy():
            return
        try:
            command = terminal.pager()
        except LookupError as error:
            self.tui.say(str(error.args[0]), level="warning")
            return
        work = functools.partial(self._page, self._begin_saving(colour=True), command)
        self.run_worker(work, group="save")  # type: ignore[arg-type]

    async def _page(self, save: Saving, command: list[str]) -> None:
        try:
            with tempfile.NamedTemporaryFile(prefix=f"{self.tui.source.job}-", suffix=".log") as file:
                await save.write(file)
                file.flush()
                self._end_saving()
                place = [f"+{save.at}"] if Path(command[0]).name == "less" else []
                await terminal.lend(self.tui, [*command, *place, file.name])
        except SuspendNotSupported:
            self.tui.say("this terminal cannot be lent to a pager", level="warning")
        except PROBLEMS as error:
            self.tui.say(f"no pager: {why(error)}", level="error")
        finally:
            self._end_saving()


def _part(path: Path) -> Path:
    """Where a file is written until it is whole."""
    return path.with_name(f"{path.name}.part")
