"""Reads a recording: checks it as a whole when it is opened, and loads a log when it is shown.

In: a file; a time and a selection of logs, asked as the nodes are asked. Out: events, statuses and log lines by time,
windows, pages, hits; one clear error for a file that is not a recording.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import struct
import zipfile
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_agent.history import pyramid, samples
from remote_agent.text.patterns import LINE_S, Pattern, TooLong, compile_pattern, make_filter
from remote_agent.text.rows import RecordReader
from remote_agent.wire import Answer, Problem
from remote_agent.wire.answers import MAX_ROWS
from remote_agent.wire.documents import Count, parse_event
from remote_agent.wire.gate import Misfit, parse, record
from remote_agent.wire.status_diff import merge
from supervisor.errors import RequestFailed
from supervisor.link.view import HostView
from supervisor.logs.rows import LogLine
from supervisor.logs.selection import ALL, RecordFilter
from supervisor.recording import file_format
from supervisor.recording.file_format import Line, NodeStream, RecordingError

if TYPE_CHECKING:
    from remote_agent.wire import Args
    from remote_agent.wire.answers import LogWindow
    from remote_agent.wire.documents import Status
    from supervisor.logs.selection import Selection

# Memory for logs, and of a row besides its text; the least recently used log is dropped first.
HELD_BYTES = 512 * 1024 * 1024
ROW_COST = 250
# A member may be that many times larger than it is in the file, or unpack to the free size; text is rarely above 20.
RATIO = 50
FREE_BYTES = 8 * 1024 * 1024
BLOCK = 1024 * 1024
# The history has a sample of the states this often; this many states are read before the screen has a turn.
EVERY_NS = 2_000_000_000
STATUSES_PER_TURN = 64
# The library raises these for a damaged file.
_BROKEN_FILE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, struct.error, ValueError, OverflowError)
_ENCRYPTED = 1
_HEAD = record({"format": str, "version": Count}, {"supervisor": str})


class Lines:
    """Recorded lines of one file, in order, with placeholders where lines are missing."""

    def __init__(self, rows: list[Line]) -> None:
        self.rows = rows
        self.numbers = array("q", [row.line for row in rows])
        self.times_ns = array("q", [row.t_ns for row in rows])
        """The time of each row; times never decrease, because the order of lines is certain."""
        self.size = sum(len(row.text) + ROW_COST for row in rows)

    def count_at(self, now_ns: int) -> int:
        """Return how many of the rows exist at a time."""
        return bisect_right(self.times_ns, now_ns)

    def total(self, now_ns: int) -> int:
        """Return how many lines the file has at a time, as far as they are recorded."""
        there = self.count_at(now_ns)
        return self.numbers[there - 1] + 1 if there else 0

    def window(self, first: int, last: int) -> Iterator[Line]:
        """Yield the lines from `first` up to `last`, with a placeholder for each that was not recorded."""
        at = bisect_left(self.numbers, first)
        for number in range(first, last):
            row = self.rows[at]
            if row.line == number:
                at += 1
                yield row
            else:
                yield Line(number, row.offset, row.t_ns, None, b"(not in the recording)")


def with_gaps(lines: Iterable[Line]) -> list[Line]:
    """Return the lines of one file, and one line for each gap, which says how many lines are missing."""
    rows: list[Line] = []
    expected = last_ns = 0
    for line in lines:
        last_ns = max(line.t_ns, last_ns)
        if line.line > expected:
            text = f"({line.line - expected:,} lines up to here are not in the recording)"
            rows.append(Line(line.line - 1, line.offset, last_ns, None, text.encode()))
        rows.append(line if line.t_ns == last_ns else line._replace(t_ns=last_ns))
        expected = line.line + 1
    return rows


class Recording:
    """The contents of a recording."""

    def __init__(self, path: Path, file: zipfile.ZipFile) -> None:
        self.path = path
        self._file = file
        self.meta = _meta(path, file)
        self.events = [parse_event(line) for line in _read(path, file, file_format.EVENTS).splitlines()]
        # The clock of a coordinator that took over may be behind; the order of the journal is certain.
        self.event_times_ns = list(accumulate((file_format.read_time(event["time"]) for event in self.events), max))
        self.status_times_ns: list[int] = []
        self._statuses: list[bytes] = []
        self._wholes: list[int] = []
        self._folded: tuple[int, Status] = (0, {})
        self._read_statuses(_read(path, file, file_format.STATUSES).splitlines())
        self.hosts = [
            HostView(host["name"], host["state"], host["step"], host["text"], host["error"], host["hint"])
            for host in self.meta["hosts"]
        ]
        logs = [file_format.read_log(parse(line)) for line in _read(path, file, file_format.LOGS).splitlines()]
        self.files: dict[NodeStream, file_format.RecordedLog] = {
            (one["node"], one["generation"], one["rank"], one["stream"]): one
            for one in logs
            if one["begin_ns"] is not None
        }
        if [event["seq"] for event in self.events] != list(range(1, len(self.events) + 1)):
            raise Misfit("the journal has gaps")
        self.job = self.meta["job"]
        self.begin_ns = min([*self.event_times_ns[:1], *self.status_times_ns[:1]], default=0)
        self.end_ns = max(self.meta["end_ns"], self.begin_ns)
        self._held: OrderedDict[tuple[NodeStream, RecordFilter], Lines] = OrderedDict()
        self._held_bytes = 0
        self._held_limit = min(HELD_BYTES, max(4 * FREE_BYTES, RATIO * path.stat().st_size))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read_statuses(self, lines: Iterable[bytes]) -> None:
        """Read all changes of the status, and check that each one follows from those before; raises Misfit."""
        status: Status = {}
        for number, line in enumerate(lines):
            row = file_format.read_status_row(parse(line))
            try:
                status = merge({} if row["whole"] else status, row["changes"])
            except KeyError as missing:
                raise Misfit(f"status.jsonl: change {number + 1} names node {missing}, which is not in it") from missing
            self.status_times_ns.append(max([row["t_ns"], *self.status_times_ns[-1:]]))
            self._statuses.append(file_format.json_line(row["changes"]))
            if row["whole"]:
                self._wholes.append(number)

    def status(self, count: int) -> Status:
        """Return the status after this many changes."""
        at, status = self._folded
        whole = bisect_left(self._wholes, count)
        start = self._wholes[whole - 1] if whole else 0
        if not start <= at <= count:
            at, status = start, {}
        for number in range(at, count):
            status = self.change(number, status)
        self._folded = (count, status)
        return status

    def change(self, number: int, before: Status) -> Status:
        """Return the status after one change, given the one before it."""
        whole = bisect_left(self._wholes, number)
        is_whole = number == 0 or self._wholes[whole : whole + 1] == [number]
        return merge({} if is_whole else before, json.loads(self._statuses[number]))

    def lines(self, file: NodeStream, chosen: RecordFilter = ALL) -> Lines:
        """Return the recorded lines of one file that pass a filter; raises RecordingError where they cannot be read."""
        lines = self._held.get((file, chosen))
        if lines is None:
            try:
                rows = (
                    _kept(self.lines(file).rows, chosen)
                    if chosen
                    else with_gaps(self._read_lines(str(self.files[file]["member"])))
                )
            except Misfit as error:
                raise _damaged(self.path, error) from error
            lines = self._held[file, chosen] = Lines(rows)
            self._held_bytes += lines.size
            while len(self._held) > 1 and self._held_bytes > self._held_limit:
                self._held_bytes -= self._held.popitem(last=False)[1].size
        self._held.move_to_end((file, chosen))
        return lines

    def _read_lines(self, member: str) -> Iterator[Line]:
        """Yield the lines of a member; raises RecordingError once they need more memory than all logs may use."""
        cost = 0
        with closing(_blocks(self.path, self._file, member, self._held_limit)) as blocks:
            for line in file_format.read_lines(blocks):
                cost += len(line.text) + ROW_COST
                if cost > self._held_limit:
                    raise _too_large(self.path, member)
                yield line


class RecordedHistory:
    """What ranks, nodes and GPUs did, from the recorded states; as an agent keeps it."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._start()

    def _start(self) -> None:
        self._nodes: dict[str, pyramid.History] = {}
        self._status: Status = {}
        self._added = 0
        self._next_ns = 0

    async def up_to(self, now_ns: int) -> Mapping[str, pyramid.History]:
        """Return the history of each node up to a time; the screen gets a turn while it is made."""
        times = self._recording.status_times_ns
        if self._added and times[self._added - 1] > now_ns:
            self._start()
        while self._added < len(times) and times[self._added] <= now_ns:
            self._status = self._recording.change(self._added, self._status)
            self._add(times[self._added])
            self._added += 1
            if self._added % STATUSES_PER_TURN == 0:
                await asyncio.sleep(0)
        return self._nodes

    def _add(self, t_ns: int) -> None:
        if t_ns < self._next_ns:
            return
        self._next_ns = t_ns + EVERY_NS
        for node in self._status.get("nodes", ()):
            values = dict(samples.of_node(node.get("vitals")))
            for rank in node.get("ranks", ()):
                if rank.get("state") == "running":
                    values.update(
                        samples.of_rank(rank["rank"], rank.get("step"), rank.get("progress"), rank.get("vitals"))
                    )
            self._nodes.setdefault(node["name"], pyramid.History()).add(t_ns / 1e9, values)


def load(path: Path) -> Recording:
    """Open a recording; raises RecordingError."""
    try:
        file = zipfile.ZipFile(path)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror or error}") from error
    except _BROKEN_FILE as error:
        with path.open("rb") as begin:
            if begin.read(4) == b"PK\x03\x04":
                raise _damaged(path, error) from error
        raise RecordingError(f"{path}: not a recording", "`supervisor record` makes one") from error
    try:
        return Recording(path, file)
    except RecordingError:
        file.close()
        raise
    except Misfit as error:
        file.close()
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> RecordingError:
    return RecordingError(f"{path}: the recording is cut short or damaged ({error})", "copy it, or record it, again")


def _meta(path: Path, file: zipfile.ZipFile) -> file_format.RecordingMeta:
    """Return what the recording says about itself; raises RecordingError, Misfit."""
    if file_format.META not in file.namelist():
        raise RecordingError(f"{path}: not a recording", "`supervisor record` makes one")
    meta = parse(_read(path, file, file_format.META))
    head = _HEAD(meta)
    if head["format"] != file_format.FORMAT:
        raise RecordingError(f"{path}: not a recording", "`supervisor record` makes one")
    if head["version"] > file_format.VERSION:
        raise RecordingError(
            f"{path}: written by supervisor {head.get('supervisor')}, in format {head['version']}; "
            f"this version reads up to format {file_format.VERSION}",
            "install a newer supervisor",
        )
    return file_format.read_meta(meta)


def _read(path: Path, file: zipfile.ZipFile, member: str) -> bytes:
    """Return the contents of a member; raises Misfit, RecordingError if they are far larger than it is in the file."""
    return b"".join(_blocks(path, file, member, max(FREE_BYTES, RATIO * _info(file, member).compress_size)))


def _blocks(path: Path, file: zipfile.ZipFile, member: str, limit: int) -> Generator[bytes, None, None]:
    """Yield the contents of a member as they are unpacked; raises Misfit, RecordingError beyond `limit` bytes."""
    info = _info(file, member)
    try:
        with file.open(info) as packed:
            while block := packed.read(BLOCK):
                limit -= len(block)
                if limit < 0:
                    raise _too_large(path, member)
                yield block
    except (*_BROKEN_FILE, OSError) as error:
        raise Misfit(f"{member} is damaged: {error}") from error


def _info(file: zipfile.ZipFile, member: str) -> zipfile.ZipInfo:
    if member not in file.NameToInfo:
        raise Misfit(f"{member} is missing")
    info = file.getinfo(member)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & _ENCRYPTED:
        raise Misfit(f"{member} does not have the form that `supervisor record` writes")
    return info


def _too_large(path: Path, member: str) -> RecordingError:
    return RecordingError(
        f"{path}: {member} in it is larger than any recording of this size",
        "it is damaged, or made to use up the memory; record the job again",
    )


# --- the logs at one time

LINES_PER_TURN = 4096

LEVELS = ("D", "I", "W", "E")


def window(recording: Recording, file: NodeStream, now_ns: int, args: Args) -> Answer:
    """Return `count` rows from `line` on, as log_window does; a negative line counts from the end."""
    lines = recording.lines(file) if file in recording.files else Lines([])
    total, line = lines.total(now_ns), int(args["line"])
    at: int | None = None
    if args.get("at_ns") is not None:
        # The next line may come later in the recording.
        later = bisect_left(lines.times_ns, args["at_ns"])
        at = lines.numbers[later] if later < lines.count_at(now_ns) else max(0, total - 1)
        first = max(0, at + line)
    else:
        first = max(0, total + line) if line < 0 else line
    rows = list(lines.window(first, min(total, first + min(int(args["count"]), MAX_ROWS))))
    there = lines.count_at(now_ns)
    data: LogWindow = {
        "line": first,
        "at": at,
        "total_lines": total,
        "size": lines.rows[there - 1].offset + len(lines.rows[there - 1].text) if there else 0,
        "complete": True,
        "rows": [{"line": row.line, "offset": row.offset, "t_ns": row.t_ns, "level": row.level} for row in rows],
    }
    return Answer(data, b"\n".join(row.text for row in rows))


def selected(recording: Recording, selection: Selection, now_ns: int) -> list[NodeStream]:
    """Return the selected files with lines at that time; without a generation, those of the newest one."""
    begun = [file for file, one in recording.files.items() if (one["begin_ns"] or 0) <= now_ns]
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


async def chosen_lines(recording: Recording, selection: Selection, now_ns: int) -> dict[NodeStream, Lines]:
    """Return the lines of the selected files that pass the filter; the screen gets a turn after each file."""
    lines = {}
    for file in selected(recording, selection, now_ns):
        try:
            lines[file] = recording.lines(file, selection.filter)
        except Problem as refused:
            raise RequestFailed(refused.message, refused.hint, refused.kind) from refused
        await asyncio.sleep(0)
    return lines


def rows_between(
    files: Mapping[NodeStream, Lines], since_ns: int, until_ns: int, *, backwards: bool = False
) -> Iterator[LogLine]:
    """Yield the rows of all files from a time on and before another one, by time; backwards: newest first."""

    def of_file(file: NodeStream, lines: Lines) -> Iterator[LogLine]:
        places = range(bisect_left(lines.times_ns, since_ns), bisect_left(lines.times_ns, until_ns))
        for line in map(lines.rows.__getitem__, reversed(places) if backwards else places):
            yield LogLine(*file, line.line, line.offset, line.t_ns, line.level, line.text)

    sources = [of_file(file, lines) for file, lines in files.items()]
    return heapq.merge(*(sources[::-1] if backwards else sources), key=lambda row: row.t_ns, reverse=backwards)


async def merged(
    recording: Recording, selection: Selection, count: int, now_ns: int, before_ns: int | None, after_ns: int | None
) -> tuple[list[LogLine], bool]:
    """Return the last rows before a time, or the first from a time on, and whether there are more beyond them.

    Rows of one time are never separated.
    """
    files = await chosen_lines(recording, selection, now_ns)
    until_ns = now_ns + 1 if before_ns is None else min(now_ns + 1, before_ns)
    rows: list[LogLine] = []
    more = False
    for row in rows_between(files, after_ns or 0, until_ns, backwards=after_ns is None):
        more = len(rows) >= count and row.t_ns != rows[-1].t_ns
        if more:
            break
        rows.append(row)
    return (rows[::-1] if after_ns is None else rows), more


async def search(
    recording: Recording,
    selection: Selection,
    now_ns: int,
    *,
    pattern: str,
    ignore_case: bool = False,
    level: str | None = None,
    **_ignored: Any,
) -> AsyncGenerator[LogLine, None]:
    """Yield the rows that match, by time; raises RequestFailed for an invalid pattern.

    `_ignored`: arguments of a session's search that make no difference here.
    """
    try:
        compiled = compile_pattern(pattern, ignore_case)
    except Problem as refused:
        raise RequestFailed(refused.message, refused.hint, refused.kind) from refused
    lowest = LEVELS.index(level[:1].upper()) if level else 0
    files = await chosen_lines(recording, selection, now_ns)
    for number, row in enumerate(rows_between(files, 0, now_ns + 1)):
        if number % LINES_PER_TURN == 0:
            await asyncio.sleep(0)
        if LEVELS.index(row.level or "I") >= lowest and _matches(compiled, row.text):
            yield row


def _matches(pattern: Pattern, text: bytes) -> bool:
    try:
        return pattern.matches(text)
    except TooLong:
        what = f"the pattern takes more than {LINE_S:g} s on one line"
        raise RequestFailed(what, "use fewer * and + in it, or put words between them", "pattern") from None


def _kept(lines: list[Line], chosen: RecordFilter) -> list[Line]:
    """Return the lines of the records that pass, and those that stand for missing lines; raises Problem."""
    patterns = make_filter(chosen.include, chosen.exclude)
    lowest = LEVELS.index(chosen.level[:1].upper()) if chosen.level else 0
    kept: list[Line] = []
    for own in _records(lines):
        is_gap = own[0].level is None
        has_level = max(LEVELS.index(line.level or "I") for line in own) >= lowest
        if is_gap or (has_level and patterns.keeps(line.text for line in own)):
            kept += own
    return kept


def _records(lines: list[Line]) -> Iterator[list[Line]]:
    """Yield records; a line that stands for missing lines is its own record."""
    reader = RecordReader()
    record: list[Line] = []
    for line in lines:
        is_gap = line.level is None
        if is_gap:
            reader = RecordReader()
        if is_gap or reader.begins(line.text, line.t_ns):
            if record:
                yield record
            record = []
        record.append(line)
    if record:
        yield record
