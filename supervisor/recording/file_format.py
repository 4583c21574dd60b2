"""The format of a recording, version 1: a zip file whose members are read one by one.

In: documents, lines of logs. Out: members of the file, and back.

    recording.json   {"format": "supervisor-recording", "version": 1, "job", "recorded_at", "supervisor", "logs",
                     "end_ns", "nccl", "nccl_nodes": {node: its answer to `nccl`, or null},
                     "hosts": [{"name", "state", "step", "text", "error", "hint", "hello", "engine"}]}
    events.jsonl     the journal, an event a line, as `supervisor events --json` prints it
    status.jsonl     {"t_ns", "whole", "changes"} a line: what changed in the status document (see
                     remote_agent.wire.status_diff), since the line before or, `whole`, since an empty one
    logs.jsonl       {"node", "generation", "rank", "stream", "size", "lines", "begin_ns", "member",
                     "error"} a line, one a file
    logs/…           [line, offset, t_ns, level, text] a line: the recorded lines of one file, in order, with gaps

Times are nanoseconds since the epoch by the coordinator's clock. Bytes that are not UTF-8 are lone surrogates.
"""

import datetime
import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypedDict

from remote_agent.wire.documents import (
    MAX_TIME_NS,
    Count,
    GenerationNumber,
    NcclNode,
    NcclSummary,
    RankNumber,
    StatusChanges,
    TimeNs,
)
from remote_agent.wire.gate import Misfit, Name, parse, reader
from supervisor.errors import UsageError
from supervisor.ssh.answers import EngineFacts, Hello

FORMAT = "supervisor-recording"
VERSION = 1
META, EVENTS, STATUSES, LOGS = "recording.json", "events.jsonl", "status.jsonl", "logs.jsonl"

MAX_NUMBER = 2**62


class RecordedHost(TypedDict):
    name: Name
    state: str
    step: str
    text: str
    error: str | None
    hint: str
    hello: Hello
    engine: EngineFacts


class _RecordingMeta(TypedDict):
    job: str
    end_ns: TimeNs
    nccl: NcclSummary | None
    hosts: list[RecordedHost]


class RecordingMeta(_RecordingMeta, total=False):
    nccl_nodes: dict[str, NcclNode | None]


class StatusRow(TypedDict):
    t_ns: TimeNs
    whole: bool
    changes: StatusChanges


class RecordedLog(TypedDict):
    node: Name
    generation: GenerationNumber
    rank: RankNumber
    stream: Name
    size: Count
    lines: Count
    begin_ns: TimeNs | None
    member: str | None
    error: str | None


read_meta = reader(RecordingMeta)
read_status_row = reader(StatusRow)
read_log = reader(RecordedLog)

# The key has the node, generation, rank and stream.
NodeStream = tuple[str, int, int, str]


class RecordingError(UsageError):
    """A file is not a recording that this version can read."""


class Line(NamedTuple):
    """One line of one file."""

    line: int
    offset: int
    t_ns: int
    level: str | None
    text: bytes


def line_json(line: Line) -> bytes:
    """Return one line of a log's member."""
    return json_line([*line[:4], line.text.decode("utf-8", "surrogateescape")])


def read_lines(blocks: Iterable[bytes]) -> Iterator[Line]:
    """Yield the lines of a log's member, which is given in blocks; raises Misfit."""
    last = -1
    for block in whole_lines(blocks):
        # Parsing one document is ten times as fast as parsing a hundred thousand.
        for row in parse(b"[%s]" % b",".join(block.splitlines())):
            line = _read_line(row)
            if line.line <= last:
                raise Misfit("is not in the order of its lines")
            last = line.line
            yield line


def _read_line(row: object) -> Line:
    # Checked by hand: there may be millions.
    match row:
        case [int(line), int(offset), int(t_ns), "D" | "I" | "W" | "E" | None as level, str(text)]:
            if not (0 <= line <= MAX_NUMBER and 0 <= offset <= MAX_NUMBER and abs(t_ns) <= MAX_TIME_NS):
                raise Misfit("has a number that is too large or below 0")
            try:
                return Line(line, offset, t_ns, level, text.encode("utf-8", "surrogateescape"))
            except UnicodeEncodeError as error:
                raise Misfit("has text that cannot be encoded") from error
    raise Misfit("is not a list of [line, offset, t_ns, level, text]")


def whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in blocks that end with a line."""
    rest: list[bytes] = []
    for block in blocks:
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join((*rest, block[:end]))
            rest = []
        rest.append(block[end:])
    if any(rest):
        yield b"".join(rest)


def json_line(document: object) -> bytes:
    """Return a document as one line of ASCII."""
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def read_time(time: str) -> int:
    """Return the nanoseconds of a time of the contract; raises ValueError."""
    moment = datetime.datetime.fromisoformat(time.replace("Z", "+00:00"))
    return int(moment.timestamp()) * 1_000_000_000 + moment.microsecond * 1000
