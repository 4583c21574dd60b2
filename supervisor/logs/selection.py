"""Which log lines a reader wants: files by generation, rank and stream, and records by patterns and level.

In: what was typed. Out: the arguments of log requests; lines sorted by the stream they belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from remote_agent.text.rows import NCCL_MARK, stream_of
from remote_agent.wire.answers import LogKey
from remote_agent.wire.documents import STREAMS

LEVELS: Final = ("", "warn", "error")


@dataclass(frozen=True)
class RecordFilter:
    """Keeps records with a line that matches `include`, none that matches `exclude`, and one that has the level."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    level: str = ""

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude or self.level)

    def args(self) -> dict[str, object]:
        """Return the filter as arguments of a log request; what is not set is left out."""
        named = {"include": list(self.include), "exclude": list(self.exclude), "level": self.level}
        return {name: value for name, value in named.items() if value}


ALL = RecordFilter()


@dataclass(frozen=True)
class Selection:
    """The log files that are wanted, and the wanted records of them."""

    generation: int | str | None = None
    """A number, "all", or None: the newest (and all later ones where the log is followed)."""
    ranks: list[int] | None = None
    streams: tuple[str, ...] = ("stdout", "stderr")
    """Streams of lines: a line of NCCL belongs to nccl in any file. For `reader.follow`: streams of files."""
    nodes: list[str] | None = None
    filter: RecordFilter = ALL

    @property
    def file(self) -> LogKey | None:
        """The one file that has all these lines; None if they may be in several, or are only some of its records."""
        if not isinstance(self.generation, int) or self.ranks is None or self.filter:
            return None
        # Lines of NCCL may be in any file.
        is_one = len(self.ranks) == len(self.streams) == 1 and self.streams != ("nccl",)
        return LogKey(self.generation, self.ranks[0], self.streams[0]) if is_one else None

    def args(self) -> dict[str, object]:
        """Return the files as arguments of a log request."""
        return {"generation": self.generation, "ranks": self.ranks, "streams": list(self.streams)}


@dataclass(frozen=True)
class LogQuery:
    """The rows that are wanted: of records that pass the filter of the files, those that match and have the level."""

    files: Selection
    pattern: str | None = None
    ignore_case: bool = False
    level: str | None = None
    """The least level of a line; that of records is in `files.filter`."""
    since_ns: int | None = None
    exact: bool = False
    """With all bytes of each line, also those that a terminal overwrites."""

    def args(self) -> dict[str, object]:
        """Return the arguments of a log request, but for the time, which depends on the node's clock."""
        args = {**self.files.args(), "pattern": self.pattern, "ignore_case": self.ignore_case, "level": self.level}
        if self.files.filter:
            args["shown"] = self.files.filter.args()
        return {**args, "exact": True} if self.exact else args


def files_of(streams: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files that may hold lines of these streams: without NCCL_DEBUG_FILE, NCCL writes to stdout."""
    return STREAMS if "nccl" in streams else streams


class StreamFilter:
    """Keeps the lines of some streams, and reports once that lines of NCCL are left out."""

    def __init__(self, streams: tuple[str, ...], say: Callable[[], None]) -> None:
        self._streams = streams
        self._say: Callable[[], None] | None = say if "nccl" not in streams else None

    def holds(self, stream: str, text: bytes) -> bool:
        """Return True for a line that is kept."""
        return stream_of(stream, text) in self._streams or self.note(1)

    def lines(self, stream: str, lines: bytes) -> bytes:
        """Return those of these lines that are kept."""
        if stream in self._streams and ("nccl" in self._streams or NCCL_MARK not in lines):
            return lines
        return b"".join(b"%s\n" % line for line in lines[:-1].split(b"\n") if self.holds(stream, line))

    def note(self, apart: int) -> bool:
        """Report lines that were left out, once; returns False."""
        if apart and self._say is not None:
            self._say()
            self._say = None
        return False
