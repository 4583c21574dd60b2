"""One line of a log.

In: rows of the session. Out: LogRow, and the key that identifies the line.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from supervisor.logs.fold import Fold
    from supervisor.logs.rows import LogLine

LineKey = tuple[int, int, str, int]


@dataclasses.dataclass(frozen=True)
class LogRow:
    """One line of one stream of one rank."""

    node: str
    generation: int
    rank: int
    stream: str
    line: int
    t_ns: int
    level: str
    text: bytes
    who: str = ""
    """The ranks that it stands for, in words, if they are several."""
    fold: Fold[LogRow] | None = None
    """The lines that it stands for."""
    cut: int = 0
    """Bytes of it that are not loaded."""
    stands_ns: int = 0
    """The time by which it is sorted, if that is not the time of arrival."""

    @property
    def shown_ns(self) -> int:
        """The time that is shown, by which the lines of a view are sorted."""
        return self.stands_ns or self.t_ns

    def is_at(self, key: LineKey | None) -> bool:
        """Return whether this is the line, or stands for it."""
        return self.key == key or (
            key is not None and self.fold is not None and any(row.key == key for row in self.fold.rows)
        )

    @property
    def key(self) -> LineKey:
        """Identifies the line."""
        return (self.generation, self.rank, self.stream, self.line)


_LEVELS: Final = {"error": "error", "e": "error", "warn": "warn", "warning": "warn", "w": "warn"}


def level_of(word: object) -> str:
    """Return an agent's level as `error`, `warn` or nothing."""
    return _LEVELS.get(str(word or "").lower(), "")


def taken(row: LogLine) -> LogRow:
    """Return a row of a page or of a hit."""
    place = (row.node, row.generation, row.rank, row.stream, row.line)
    return LogRow(*place, row.t_ns, level_of(row.level), row.text, cut=row.cut)
