"""The lines of a recorded log that a filter keeps, record by record, as on the nodes.

In: the lines of one file, a filter. Out: those that are shown; RequestFailed for a pattern that cannot be.

Where lines are not in the recording, the line that says so is always kept: what they held is not known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from remote_agent.logs.filters import make_filter
from remote_agent.logs.rows import RecordReader
from remote_agent.wire import Problem
from supervisor.errors import RequestFailed

if TYPE_CHECKING:
    from supervisor.recording.form import File, Line
    from supervisor.recording.reading import Lines, Recording
    from supervisor.session.filters import Filter

LEVELS = ("D", "I", "W", "E")
RECORDS_PER_TURN = 1024
# As on a node.
RECORD_LIMIT = 512
RECORD_GAP_NS = 1_000_000_000


async def narrowed(recording: Recording, file: File, chosen: Filter) -> Lines:
    """Return the lines of one file that are shown; those of the newest filter are remembered."""
    if recording.narrowed_by != chosen:
        recording.narrowed_by, recording.narrowed = chosen, {}
    found = recording.narrowed.get(file)
    if found is None:
        lines = recording.lines(file)
        try:
            found = lines.only(await _kept(lines, chosen))
        except Problem as refused:
            raise RequestFailed(refused.message, refused.hint, refused.kind) from refused
        if recording.narrowed_by == chosen:
            recording.narrowed[file] = found
    return found


async def _kept(lines: Lines, chosen: Filter) -> list[Line]:
    patterns = make_filter(chosen.include, chosen.exclude)
    lowest = LEVELS.index(chosen.level[:1].upper()) if chosen.level else 0
    kept: list[Line] = []
    for number, record in enumerate(_records(lines)):
        if number % RECORDS_PER_TURN == 0:
            await asyncio.sleep(0)
        if record[0].level is None:
            kept += record
        elif max(LEVELS.index(line.level or "I") for line in record) >= lowest:
            kept += record if patterns.keeps(line.text for line in record) else []
    return kept


def _records(lines: Lines) -> Iterator[list[Line]]:
    """Yield lines with those that continue them; one that stands for what is not recorded is alone."""
    reader = RecordReader()
    record: list[Line] = []
    for line in lines.rows:
        continues = line.level is not None and reader.continues(line.text)
        after_gap = not record or record[-1].level is None or line.t_ns - record[-1].t_ns > RECORD_GAP_NS
        if record and (after_gap or not continues or len(record) >= RECORD_LIMIT):
            yield record
            record = []
        record.append(line)
    if record:
        yield record
