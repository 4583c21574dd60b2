"""What is taken out of a log: a line or a record, all of it into a file, or into a pager.

In: the line that is read, the logs that are shown. Out: the clipboard, a dialog, a file, the user's pager.
"""

from __future__ import annotations

from supervisor.tui import ansi, words
from supervisor.tui.screens.dialogs import TextDialog
from supervisor.tui.screens.log_found import FoundLog
from supervisor.tui.screens.record import RecordDialog


class TakenLog(FoundLog):
    """A log of which something is taken."""

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
