"""One record of a log over the screen: to read whole, and to copy.

In: a line, the session. Out: its record as soon as its node has sent it; until then the line.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from remote_agent.wire import WireError
from supervisor.errors import SupervisorError, why
from supervisor.tui.cells import clean
from supervisor.tui.logs import record
from supervisor.tui.screens.dialogs import TextDialog
from supervisor.tui.textflow import wrap
from supervisor.tui.widgets.picker import Picker

if TYPE_CHECKING:
    from supervisor.tui.cells import Row
    from supervisor.tui.logs.log_row import LogRow
    from supervisor.tui.source import Source

# A record that takes longer does not come, seconds.
DEADLINE: Final = 10.0


class RecordDialog(TextDialog):
    """What is known of a record, and its text."""

    def __init__(self, source: Source, row: LogRow) -> None:
        known = record.alone(row)
        super().__init__(f"{row.node} rank {row.rank}  {row.stream} line {row.line + 1}", known.text)
        self._facts = known.facts
        self._source = source
        self._row = row

    def on_mount(self) -> None:
        """Ask for all of it."""
        self.run_worker(self._load(), exit_on_error=False)

    async def _load(self) -> None:
        try:
            found = await asyncio.wait_for(record.fetch(self._source, self._row), DEADLINE)
        except (SupervisorError, WireError, OSError, KeyError, TypeError, ValueError, asyncio.TimeoutError) as error:
            self._facts = [*self._facts, f"the lines around it do not come: {why(error)}"]
        else:
            self._facts, self._text = found
        self.lay_out()

    def lay_out(self) -> None:
        """Facts, then the text; what is selected stays selected."""
        width = self.inner_width
        rows: list[Row] = [((line, "dim"),) for fact in self._facts for line in wrap(clean(fact), width)]
        rows += [(), *(((line, "text"),) for line in wrap(self._text, width))]
        picker = self.query_one(Picker)
        picker.styles.height = min(len(rows), max(3, self.app.size.height - 6))
        picker.show(range(len(rows)), lambda index: rows[index])
