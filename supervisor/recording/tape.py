"""The recorded logs, asked as the nodes are asked, at one time of the recording.

In: a recording, a time, a selection. Out: windows, pages by time, hits.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from remote_agent.logs.pattern import LINE_S, Pattern, TooLong, compile_pattern
from remote_agent.wire import Answer, Problem
from supervisor.errors import RequestFailed
from supervisor.recording.form import File
from supervisor.recording.narrowed import LEVELS, narrowed
from supervisor.recording.reading import Lines, Recording
from supervisor.session.logs import Row, Selection
from supervisor.session.parts import Ends

if TYPE_CHECKING:
    from supervisor.recording.form import Line

# As on a node: so many rows at once, at most.
MAX_ROWS = 4096
LINES_PER_TURN = 4096

# A file, its lines, and which of its rows: from, up to.
Span = tuple[File, Lines, int, int]


def window(recording: Recording, file: File, now_ns: int, args: Mapping[str, Any]) -> Answer:
    """Return `count` rows from `line` on, as log_window does; a negative line counts from the end."""
    lines = recording.lines(file) if file in recording.files else Lines()
    total, line = lines.total(now_ns), int(args["line"])
    at: int | None = None
    if args.get("at_ns") is not None:
        # The next line may come later in the recording.
        later = bisect_left(lines.times_ns, args["at_ns"])
        at = lines.numbers[later] if later < lines.there(now_ns) else max(0, total - 1)
        first = max(0, at + line)
    else:
        first = max(0, total + line) if line < 0 else line
    found = list(lines.window(first, min(total, first + min(int(args["count"]), MAX_ROWS))))
    there = lines.there(now_ns)
    data = {
        "line": first,
        "at": at,
        "total_lines": total,
        "size": lines.rows[there - 1].offset + len(lines.rows[there - 1].text) if there else 0,
        "complete": True,
        "rows": [{"line": row.line, "offset": row.offset, "t_ns": row.t_ns, "level": row.level} for row in found],
    }
    return Answer(data, b"\n".join(row.text for row in found))


def selected(recording: Recording, selection: Selection, now_ns: int) -> list[File]:
    """Return the selected files that have lines at that time; no generation: the newest that has."""
    begun = [file for file, one in recording.files.items() if one["begin_ns"] <= now_ns]
    newest = max((generation for _, generation, _, _ in begun), default=0)
    wanted = newest if selection.generation is None else selection.generation
    return [
        (node, generation, rank, stream)
        for node, generation, rank, stream in begun
        if wanted in ("all", generation)
        and stream in selection.streams
        and (selection.ranks is None or rank in selection.ranks)
        and (selection.nodes is None or node in selection.nodes)
    ]


async def _chosen(recording: Recording, selection: Selection, now_ns: int) -> list[tuple[File, Lines]]:
    """Return the selected files with their lines; the screen has its turn while they are read."""
    found = []
    for file in selected(recording, selection, now_ns):
        if not recording.is_held(file):
            await asyncio.sleep(0)
        lines = recording.lines(file)
        found.append((file, await narrowed(recording, file, selection.filter) if selection.filter else lines))
    return found


def counted(
    recording: Recording, selection: Selection, now_ns: int, since_ns: int, until_ns: int
) -> tuple[int, dict[str, Ends], int, int]:
    """Return how many lines came between two times, the files have now, came before and behind; whatever the filter."""
    between, ends = 0, {host.name: Ends() for host in recording.hosts}
    before = behind = 0
    for file in selected(recording, selection, now_ns):
        # Once: not all of them may be held at a time.
        lines = recording.lines(file)
        there = lines.there(now_ns)
        since, until = (bisect_left(lines.times_ns, t_ns, 0, there) for t_ns in (since_ns, until_ns))
        between, before, behind = between + until - since, before + since, behind + there - until
        ends.setdefault(file[0], {})[file[1:]] = lines.total(now_ns)
    return between, ends, before, behind


async def merged(
    recording: Recording, selection: Selection, count: int, now_ns: int, before_ns: int | None, after_ns: int | None
) -> tuple[list[Row], bool]:
    """Return the last rows before a time, or the first from a time on, and whether there are more beyond them.

    Rows of one time are never parted.
    """
    found: list[Row] = []
    files = await _chosen(recording, selection, now_ns)
    spans = list(_spans(files, now_ns, before_ns, after_ns))
    for file, lines, begin, end in _nearest(spans, count, forwards=after_ns is not None):
        found += [row_of(file, line) for line in lines.rows[begin:end]]
    found.sort(key=lambda row: row.t_ns)
    there = sum(end - begin for _, _, begin, end in spans)
    if after_ns is not None:
        end = min(count, len(found))
        while 0 < end < len(found) and found[end - 1].t_ns == found[end].t_ns:
            end += 1
        return found[:end], end < there
    begin = max(0, len(found) - count)
    while begin > 0 and found[begin - 1].t_ns == found[begin].t_ns:
        begin -= 1
    return found[begin:], len(found) - begin < there


def _spans(files: list[tuple[File, Lines]], now_ns: int, before_ns: int | None, after_ns: int | None) -> Iterator[Span]:
    """Yield the rows of each file that lie between the times."""
    for file, lines in files:
        begin = 0 if after_ns is None else bisect_left(lines.times_ns, after_ns)
        end = lines.there(now_ns)
        if before_ns is not None:
            end = min(end, bisect_left(lines.times_ns, before_ns))
        if begin < end:
            yield file, lines, begin, end


def _nearest(spans: list[Span], count: int, *, forwards: bool) -> Iterator[Span]:
    """Yield what may be among the first, or the last, `count` rows of all; of hundreds of files that is little of each.

    As many rows as there are files lie at or before the outermost row of that many files.
    """
    edges = [lines.times_ns[begin if forwards else end - 1] for _, lines, begin, end in spans]
    limit_ns = sorted(edges, reverse=not forwards)[count - 1] if 0 < count <= len(edges) else None
    for file, lines, first, last in spans:
        begin, end, times = first, last, lines.times_ns
        if forwards:
            end = min(end, bisect_right(times, times[min(begin + count, end) - 1]))
            end = end if limit_ns is None else min(end, bisect_right(times, limit_ns))
        else:
            begin = max(begin, bisect_left(times, times[max(end - count, begin)]))
            begin = begin if limit_ns is None else max(begin, bisect_left(times, limit_ns))
        if begin < end:
            yield file, lines, begin, end


def row_of(file: File, line: Line) -> Row:
    """Return a line as a row of a session."""
    return Row(*file, line.line, line.offset, line.t_ns, line.level, line.text)


def rows(file: File, lines: Lines) -> Iterator[Row]:
    """Yield all recorded lines of one file as rows."""
    return (row_of(file, line) for line in lines.rows)


def _matches(pattern: Pattern, text: bytes) -> bool:
    try:
        return pattern.matches(text)
    except TooLong:
        what = f"the pattern takes more than {LINE_S:g} s on one line"
        raise RequestFailed(what, "fewer * and + in it, or words between them", "pattern") from None


async def search(
    recording: Recording,
    selection: Selection,
    now_ns: int,
    *,
    pattern: str,
    ignore_case: bool = False,
    level: str | None = None,
    limit: int | None = None,
    **_beside: Any,
) -> AsyncGenerator[Row, None]:
    """Yield the rows that match, file by file; raises RequestFailed for a pattern that cannot be.

    `_beside`: what of a session's search makes no difference here.
    """
    try:
        compiled = compile_pattern(pattern, ignore_case)
    except Problem as refused:
        raise RequestFailed(refused.message, refused.hint, refused.kind) from refused
    lowest = LEVELS.index(level[:1].upper()) if level else 0
    hits = 0
    for file, lines in await _chosen(recording, selection, now_ns):
        for number, line in enumerate(lines.rows[: lines.there(now_ns)]):
            if number % LINES_PER_TURN == 0:
                await asyncio.sleep(0)
            if LEVELS.index(line.level or "I") >= lowest and _matches(compiled, line.text):
                yield row_of(file, line)
                hits += 1
                if hits == limit:
                    return


async def nearest(
    recording: Recording,
    selection: Selection,
    now_ns: int,
    *,
    way: int,
    limit: int,
    since_ns: int = 0,
    until_ns: int | None = None,
    note_span: Callable[[int | None, int | None], object] = lambda since_ns, until_ns: None,
    **query: Any,
) -> AsyncGenerator[Row, None]:
    """Yield about so many hits, the first ones from a time on (way 1) or the last ones before one (-1).

    `note_span` is told between which times none is missing.
    """
    end_ns = now_ns + 1 if until_ns is None else until_ns
    found = [row async for row in search(recording, selection, now_ns, **query) if since_ns <= row.t_ns < end_ns]
    found.sort(key=lambda row: row.t_ns)
    if len(found) > limit and way > 0:
        until_ns = end_ns = found[limit - 1].t_ns + 1
    elif len(found) > limit:
        since_ns = found[-limit].t_ns
    for row in found:
        if since_ns <= row.t_ns < end_ns:
            yield row
    note_span(since_ns or None, until_ns)
