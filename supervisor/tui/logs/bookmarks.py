"""Bookmarks: lines of a job's logs that somebody wants to find again.

In: rows, a view. Out: marks in order of time, the next one from where one reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from supervisor.session.logs import Selection
    from supervisor.tui.logs.log_row import Key, LogRow

KEPT: Final = 512


class Mark(NamedTuple):
    """One line, by its number: where it lies in its file does not change."""

    t_ns: int
    generation: int
    rank: int
    stream: str
    line: int
    node: str

    @property
    def key(self) -> Key:
        """What makes it the same line again."""
        return (self.generation, self.rank, self.stream, self.line)

    def is_in(self, selection: Selection) -> bool:
        """Whether a view of these logs has the line."""
        return (
            selection.generation in (None, "all", self.generation)
            and (selection.ranks is None or self.rank in selection.ranks)
            and (selection.nodes is None or self.node in selection.nodes)
            and (self.stream in selection.streams or "nccl" in selection.streams)
        )


def read(kept: Iterable[Any]) -> list[Mark]:
    """The marks of a file; what is none is left out."""
    kinds = [int, int, int, str, int, str]
    return [Mark(*one) for one in kept if isinstance(one, list) and [type(part) for part in one] == kinds][:KEPT]


def toggled(marks: list[Mark], row: LogRow) -> list[Mark]:
    """The marks with one more at this line, or without the one that is there."""
    mark = Mark(row.t_ns, row.generation, row.rank, row.stream, row.line, row.node)
    left = [one for one in marks if one.key != mark.key]
    return left if len(left) < len(marks) else sorted([*marks, mark])[-KEPT:]


def beside(marks: list[Mark], here: tuple[int, Key], direction: int) -> Mark | None:
    """The next (1) or previous (-1) mark from a line, and around the ends."""
    placed = sorted((mark.t_ns, mark.key, mark) for mark in marks)
    if direction > 0:
        return next((mark for t_ns, key, mark in placed if (t_ns, key) > here), placed[0][2] if placed else None)
    return next((mark for t_ns, key, mark in placed[::-1] if (t_ns, key) < here), placed[-1][2] if placed else None)
