"""One record of a log whole: a traceback and not one line of it, with where and when it was written.

In: a line on the screen, windows of its file. Out: facts, and the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from remote_agent.logs.rows import RecordReader
from supervisor.plain import count
from supervisor.tui import words
from supervisor.tui.logs import ansi

if TYPE_CHECKING:
    from remote_agent.wire import Answer
    from supervisor.tui.logs.log_row import LogRow
    from supervisor.tui.source import Source

# Lines before and behind that are asked for: of most records, then of the longest that the nodes keep together.
FEW: Final = (32, 96)
MANY: Final = (515, 512)
# So many lines before a line tell whether it continues a record.
CONTEXT: Final = 3
# As on the nodes: what comes this much later is a record of its own.
GAP_NS: Final = 1_000_000_000


class Line(NamedTuple):
    """One line of the record."""

    line: int
    offset: int
    t_ns: int
    is_late: bool
    """It came at that time at the latest."""
    cut: int
    """So many bytes of it are not here."""
    text: bytes


class Record(NamedTuple):
    """What is told of it, and what it says."""

    facts: list[str]
    text: str


def extent(lines: Sequence[Line], at: int) -> tuple[int, int]:
    """Where the record of line `at` of these begins and ends."""
    reader = RecordReader()
    begins: list[int] = []
    for number, line in enumerate(lines):
        continues = reader.continues(line.text) and number > 0
        if not continues or line.t_ns - lines[number - 1].t_ns > GAP_NS:
            begins.append(number)
    return max(begin for begin in begins if begin <= at), min((b for b in begins if b > at), default=len(lines))


async def fetch(source: Source, row: LogRow) -> Record:
    """Return the record that a line belongs to; raises SupervisorError and what a broken link raises."""
    place = {"generation": row.generation, "rank": row.rank, "stream": row.stream}
    ahead_ns = source.ahead_ns(row.node)
    found: list[Line] = []
    for before, behind in (FEW, MANY):
        first = max(0, row.line - before)
        args = {**place, "line": first, "count": row.line - first + behind}
        answer = await source.log(row.node, "log_window", args)
        lines = _lines(answer, ahead_ns)
        at = next((number for number, line in enumerate(lines) if line.line == row.line), None)
        if at is None:
            break
        begin, end = extent(lines, at)
        found = lines[begin:end]
        is_first = first <= int(answer.data.get("first_line") or 0)
        is_last = lines[-1].line + 1 >= int(answer.data.get("total_lines") or 0)
        if (begin >= CONTEXT or is_first) and (end < len(lines) or is_last):
            break
    if not found:
        return alone(row)
    return Record(facts(source.job, row, found), "\n".join(ansi.plain(line.text) for line in found))


def _lines(answer: Answer, ahead_ns: int) -> list[Line]:
    return [
        Line(
            int(entry["line"]),
            int(entry.get("offset") or 0),
            int(entry.get("t_ns") or 0) - ahead_ns,
            bool(entry.get("t_upper")),
            int(entry.get("cut") or 0),
            text,
        )
        for entry, text in zip(answer.data.get("rows") or [], answer.body.split(b"\n"), strict=False)
    ]


def alone(row: LogRow) -> Record:
    """The line without the others, as long as it is all that is known."""
    return Record([f"line {row.line + 1:,} of {_file(row)}", f"came {words.stamp_ns(row.t_ns)}"], ansi.plain(row.raw))


def facts(job: str, row: LogRow, lines: Sequence[Line]) -> list[str]:
    """Where it stands, when it came, and what of it is not here."""
    first, last = lines[0], lines[-1]
    numbers = f"line {first.line + 1:,}" if first is last else f"lines {first.line + 1:,} to {last.line + 1:,}"
    until = f" to {words.stamp_ns(last.t_ns)[11:]}" if last.t_ns - first.t_ns > 10**6 else ""
    told = [
        f"{numbers} of {_file(row)}, from byte {first.offset:,}",
        f"came {words.stamp_ns(first.t_ns)}{until}" + (" at the latest" if first.is_late or last.is_late else ""),
    ]
    cut = sum(line.cut for line in lines)
    if cut:
        where = f"--rank {row.rank} --stream {row.stream} --generation {row.generation} --raw"
        told.append(f"{count(cut, 'byte')} more are on {row.node}: supervisor logs {job} {where}")
    return told


def _file(row: LogRow) -> str:
    return f"generation_{row.generation}/rank_{row.rank}/{row.stream}.log on {row.node}"
