"""A record in full, such as a traceback, with what is known of it.

In: the line that is read. Out: a dialog.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

from remote_agent.text.names import count
from remote_agent.text.rows import RecordReader
from remote_agent.wire import WireError
from supervisor.errors import SupervisorError, why
from supervisor.tui.dialogs.base import TextDialog
from supervisor.tui.logs import ansi
from supervisor.tui.rows.spans import clean, wrap
from supervisor.wording import values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remote_agent.wire import Answer
    from supervisor.logs.rows import LogLine
    from supervisor.session import Session
    from supervisor.tui.rows.spans import Row

# A record is awaited this long, seconds.
RECORD_DEADLINE: Final = 10.0
# Lines are requested before and behind: enough for most records, then for the longest that the nodes keep together.
FEW: Final = (32, 96)
MANY: Final = (515, 512)
# Whether a line continues a record depends on this many lines before it.
CONTEXT: Final = 3


class RecordLine(NamedTuple):
    """One line of the record."""

    line: int
    offset: int
    t_ns: int
    is_late: bool
    """It arrived at that time at the latest."""
    cut: int
    """Bytes of it that are not loaded."""
    text: bytes


class RecordDetail(NamedTuple):
    """Facts about a record, and its text."""

    facts: list[str]
    text: str


def _extent(lines: Sequence[RecordLine], at: int) -> tuple[int, int]:
    """Return where the record that contains line `at` begins and ends."""
    reader = RecordReader()
    begins = [number for number, line in enumerate(lines) if reader.begins(line.text, line.t_ns)]
    return max(begin for begin in begins if begin <= at), min((b for b in begins if b > at), default=len(lines))


async def fetch_record(source: Session, row: LogLine) -> RecordDetail:
    """Return the record of a line; raises SupervisorError and the errors of a broken link."""
    place = {"generation": row.generation, "rank": row.rank, "stream": row.stream}
    ahead_ns = source.ahead_ns(row.node)
    record: list[RecordLine] = []
    for before, behind in (FEW, MANY):
        first = max(0, row.line - before)
        args = {**place, "line": first, "count": row.line - first + behind}
        answer = await source.log(row.node, "log_window", args)
        lines = _lines(answer, ahead_ns)
        at = next((number for number, line in enumerate(lines) if line.line == row.line), None)
        if at is None:
            break
        begin, end = _extent(lines, at)
        record = lines[begin:end]
        is_first = first <= int(answer.data.get("first_line") or 0)
        is_last = lines[-1].line + 1 >= int(answer.data.get("total_lines") or 0)
        if (begin >= CONTEXT or is_first) and (end < len(lines) or is_last):
            break
    if not record:
        return _alone(row)
    return RecordDetail(_facts(source.job, row, record), "\n".join(ansi.plain(line.text) for line in record))


def _lines(answer: Answer, ahead_ns: int) -> list[RecordLine]:
    return [
        RecordLine(
            int(entry["line"]),
            int(entry.get("offset") or 0),
            int(entry.get("t_ns") or 0) - ahead_ns,
            bool(entry.get("t_upper")),
            int(entry.get("cut") or 0),
            text,
        )
        for entry, text in zip(answer.data.get("rows") or [], answer.body.split(b"\n"), strict=False)
    ]


def _alone(row: LogLine) -> RecordDetail:
    """Return a record of this line only, until the others are loaded."""
    return RecordDetail(
        [f"line {row.line + 1:,} of {_file(row)}", f"arrived {values.date_ns(row.t_ns, millis=True)}"],
        ansi.plain(row.text),
    )


def _facts(job: str, row: LogLine, lines: Sequence[RecordLine]) -> list[str]:
    """Return file, lines and times of a record, and how to get what is not loaded."""
    first, last = lines[0], lines[-1]
    numbers = f"line {first.line + 1:,}" if first is last else f"lines {first.line + 1:,} to {last.line + 1:,}"
    until = f" to {values.date_ns(last.t_ns, millis=True)[11:]}" if last.t_ns - first.t_ns > 10**6 else ""
    at_latest = " at the latest" if first.is_late or last.is_late else ""
    facts = [
        f"{numbers} of {_file(row)}, from byte {first.offset:,}",
        f"arrived {values.date_ns(first.t_ns, millis=True)}{until}{at_latest}",
    ]
    cut = sum(line.cut for line in lines)
    if cut:
        where = f"--rank {row.rank} --stream {row.stream} --generation {row.generation} --raw"
        facts.append(f"{count(cut, 'byte')} more on {row.node}: supervisor logs {job} {where}")
    return facts


def _file(row: LogLine) -> str:
    return f"generation_{row.generation}/rank_{row.rank}/{row.stream}.log on {row.node}"


class RecordDialog(TextDialog):
    """Facts about a record, and its text."""

    def __init__(self, source: Session, row: LogLine) -> None:
        record = _alone(row)
        super().__init__(f"{row.node} rank {row.rank}  {row.stream} line {row.line + 1}", record.text)
        self._facts = record.facts
        self._source = source
        self._row = row

    def on_mount(self) -> None:
        """Request the whole record."""
        self.run_worker(self._load(), exit_on_error=False)

    async def _load(self) -> None:
        try:
            record = await asyncio.wait_for(fetch_record(self._source, self._row), RECORD_DEADLINE)
        except (SupervisorError, WireError, OSError, KeyError, TypeError, ValueError, asyncio.TimeoutError) as error:
            self._facts = [*self._facts, f"cannot load the lines around it: {why(error)}"]
        else:
            self._facts, self._text = record
        self.lay_out()

    def rows(self) -> Sequence[Row]:
        """Return the facts, then the text."""
        facts: list[Row] = [((line, "dim"),) for fact in self._facts for line in wrap(clean(fact), self.inner_width)]
        return [*facts, (), *super().rows()]
