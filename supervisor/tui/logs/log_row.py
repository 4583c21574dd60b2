"""One line of a log as the screens know it.

In: rows of the session. Out: a LogRow, and the key that makes it the same line again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from supervisor.session.folding import Fold
    from supervisor.session.logs import Row

Key = tuple[int, int, str, int]


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
    raw: bytes
    who: str = ""
    """Whom it stands for, where that is not one rank."""
    fold: Fold[LogRow] | None = None
    """All that it stands for."""
    cut: int = 0
    """So many bytes of it are not here."""
    stands_ns: int = 0
    """The time at which it stands among the others, where that is not when it came."""

    @property
    def shown_ns(self) -> int:
        """The time that is shown with it: in a view it never goes back from one line to the next."""
        return self.stands_ns or self.t_ns

    @property
    def text(self) -> bytes:
        """What it says, for whoever folds it."""
        return self.raw

    def is_at(self, key: Key | None) -> bool:
        """Whether this is the line, or stands for it."""
        return self.key == key or (
            key is not None and self.fold is not None and any(row.key == key for row in self.fold.rows)
        )

    def is_any_of(self, keys: Collection[Key]) -> bool:
        """Whether it is one of these lines, or stands for one."""
        return self.key in keys or (self.fold is not None and any(row.key in keys for row in self.fold.rows))

    @property
    def key(self) -> Key:
        """What makes it the same line again."""
        return (self.generation, self.rank, self.stream, self.line)


_LEVELS: Final = {"error": "error", "e": "error", "warn": "warn", "warning": "warn", "w": "warn"}


def level_of(word: object) -> str:
    """An agent's level as `error`, `warn` or nothing."""
    return _LEVELS.get(str(word or "").lower(), "")


def taken(row: Row) -> LogRow:
    """A row of a page or of a hit."""
    place = (row.node, row.generation, row.rank, row.stream, row.line)
    return LogRow(*place, row.t_ns, level_of(row.level), row.text, cut=row.cut)
