"""A record in full, such as a traceback, with what is known of it.

In: the line that is read. Out: a dialog.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

from remote_agent.text.names import count
from remote_agent.text.rows import stream_of
from remote_agent.wire import WireError
from supervisor.errors import SupervisorError, why
from supervisor.logs.selection import Selection
from supervisor.tui.dialogs.base import TextDialog
from supervisor.tui.logs import ansi
from supervisor.tui.rows.spans import clean, wrap
from supervisor.wording import values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.logs.rows import Clocks, LogLine
    from supervisor.session import Session
    from supervisor.tui.rows.spans import Row

# A record is awaited this long, seconds.
RECORD_DEADLINE: Final = 10.0


class RecordDetail(NamedTuple):
    """Facts about a record, and its text."""

    facts: list[str]
    text: str


async def fetch_record(source: Session, row: LogLine, clocks: Clocks | None) -> RecordDetail:
    """Return the record of a line; raises SupervisorError and the errors of a broken link.

    clocks: the offsets by which the line's time was computed. All lines of a record have the time of its first one.
    """
    selection = Selection(row.generation, [row.rank], (stream_of(row.stream, row.text),), [row.node])
    page = await source.merged(selection, 1, before_ns=row.t_ns + 1, clocks=clocks)
    lines = [line for line in page.rows if line.key[:3] == row.key[:3]]
    if row.line not in [line.line for line in lines]:
        return _alone(row)
    return RecordDetail(_facts(source.job, lines), "\n".join(ansi.plain(line.text) for line in lines))


def _alone(row: LogLine) -> RecordDetail:
    """Return a record of this line only, until the others are loaded."""
    return RecordDetail(
        [f"line {row.line + 1:,} of {_file(row)}", f"arrived {values.date_ns(row.t_ns, millis=True)}"],
        ansi.plain(row.text),
    )


def _facts(job: str, lines: Sequence[LogLine]) -> list[str]:
    """Return file, lines and time of a record, and how to get what is not loaded."""
    first, last = lines[0], lines[-1]
    numbers = f"line {first.line + 1:,}" if first is last else f"lines {first.line + 1:,} to {last.line + 1:,}"
    facts = [
        f"{numbers} of {_file(first)}, from byte {first.offset:,}",
        f"arrived {values.date_ns(first.t_ns, millis=True)}",
    ]
    cut = sum(line.cut for line in lines)
    if cut:
        where = f"--rank {first.rank} --stream {first.stream} --generation {first.generation} --raw"
        facts.append(f"{count(cut, 'byte')} more on {first.node}: supervisor logs {job} {where}")
    return facts


def _file(row: LogLine) -> str:
    return f"generation_{row.generation}/rank_{row.rank}/{row.stream}.log on {row.node}"


class RecordDialog(TextDialog):
    """Facts about a record, and its text."""

    def __init__(self, source: Session, row: LogLine, clocks: Clocks | None) -> None:
        record = _alone(row)
        super().__init__(f"{row.node} rank {row.rank}  {row.stream} line {row.line + 1}", record.text)
        self._facts = record.facts
        self._source = source
        self._row = row
        self._clocks = clocks

    def on_mount(self) -> None:
        """Request the whole record."""
        self.run_worker(self._load(), exit_on_error=False)

    async def _load(self) -> None:
        try:
            record = await asyncio.wait_for(fetch_record(self._source, self._row, self._clocks), RECORD_DEADLINE)
        except (SupervisorError, WireError, OSError, KeyError, TypeError, ValueError, asyncio.TimeoutError) as error:
            self._facts = [*self._facts, f"cannot load the lines around it: {why(error)}"]
        else:
            self._facts, self._text = record
        self.lay_out()

    def rows(self) -> Sequence[Row]:
        """Return the facts, then the text."""
        facts: list[Row] = [((line, "dim"),) for fact in self._facts for line in wrap(clean(fact), self.inner_width)]
        return [*facts, (), *super().rows()]
