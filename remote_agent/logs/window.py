"""Windows: the rows of one file that a screen shows.

In: a file, a line, a count. Out: rows with their text; only the blocks that hold them are read.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from remote_agent.logs.selection import BODY_LIMIT
from remote_agent.logs.slices import TimeSlice
from remote_agent.text.levels import LETTERS
from remote_agent.wire import Answer
from remote_agent.wire.answers import MAX_ROWS

if TYPE_CHECKING:
    from remote_agent.logs.logfile import LogFile
    from remote_agent.text.rows import Row
    from remote_agent.wire.answers import LogEntry, LogWindow

# A request waits this long for the index of a file that existed before this agent.
INDEX_WAIT_S = 1.0
# The end of a file can be shown without an index.
TAIL_WAIT_S = 0.02


def row_json(row: Row) -> LogEntry:
    """Return the wire form of a row, without its text."""
    answer: LogEntry = {"line": row.line, "offset": row.offset, "t_ns": row.t_ns, "level": LETTERS[row.level]}
    if row.upper:
        answer["t_upper"] = True
    if row.cut:
        answer["cut"] = row.cut
    return answer


def entry_of(file: LogFile, row: Row, t_ns: int) -> LogEntry:
    """Return a row with its file and the time that orders it."""
    entry = row_json(row)
    entry["generation"], entry["rank"], entry["stream"] = file.key
    entry["t_ns"] = t_ns
    return entry


async def index_until(file: LogFile, line: int | None, wait_s: float) -> bool:
    """Index up to a line (None: to the end), at most wait_s seconds; True when all of the file is indexed."""
    until = time.monotonic() + wait_s
    time_slice = TimeSlice()
    # A live file may be ahead of its index; one slice catches up unless it is flooded.
    more = file.absorb(time.time_ns())
    while more and (line is None or file.index.newlines <= line) and time.monotonic() < until:
        await time_slice.pause_if_over()
        more = file.absorb(time.time_ns())
    return not file.behind


async def window(file: LogFile, line: int, count: int, at_ns: int | None = None) -> Answer:
    """Return `count` rows from `line` on; a negative line counts from the end, or from the first line at `at_ns`."""
    count = max(0, min(count, MAX_ROWS))
    at = None
    if at_ns is not None:
        complete = await index_until(file, None, INDEX_WAIT_S)
        at = max(0, min(file.index.lines_before(at_ns), file.index.total_lines - 1))
        line = max(0, at + line)
    elif line < 0:
        complete = await index_until(file, None, TAIL_WAIT_S)
    else:
        complete = await index_until(file, line + count, INDEX_WAIT_S)
    # The version is read before the rows, so that the next answer shows that a file was replaced meanwhile.
    version = file.version
    if line < 0 and not complete:
        rows = _clip(file.last_lines(min(-line, MAX_ROWS), BODY_LIMIT)[:count])
        first = rows[0].line if rows else line
    else:
        first = max(file.index.first_line, file.index.total_lines + line if line < 0 else line)
        rows = await rows_from(file, first, count)
    data: LogWindow = {
        "line": first,
        "at": at,
        "first_line": file.index.first_line,
        "total_lines": file.index.total_lines,
        "size": file.size,
        "complete": complete,
        "version": version,
        "rows": [row_json(row) for row in rows],
    }
    return Answer(data, b"\n".join(row.text for row in rows))


async def rows_from(file: LogFile, line: int, count: int) -> list[Row]:
    """Return rows by number, as many as there are and as fit into one answer."""
    rows: list[Row] = []
    size = 0
    time_slice = TimeSlice()
    index, at = file.index, line
    while at < index.total_lines and len(rows) < count and size < BODY_LIMIT:
        # The block is found by its line, as blocks may be joined or dropped between two turns.
        block = index.block(max(0, index.blocks_of(at)))
        for row in file.rows_of(block, line, line + count):
            if rows and size + len(row.text) >= BODY_LIMIT:
                return rows
            rows.append(row)
            size += len(row.text) + 1
        at = block.line + block.lines
        await time_slice.pause_if_over()
    return rows


def _clip(rows: list[Row]) -> list[Row]:
    """Return the first rows that fit into one answer."""
    size = 0
    for number, row in enumerate(rows):
        size += len(row.text) + 1
        if number and size > BODY_LIMIT:
            return rows[:number]
    return rows
