"""Bookmarks: lines of a job's logs to find again.

In: rows, a selection of logs. Out: bookmarks in order of time; the next one from a line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from supervisor.logs.selection import Selection
    from supervisor.tui.logs.row import LineKey, LogRow

KEPT: Final = 512


class Bookmark(NamedTuple):
    """One line, by its number in its file."""

    t_ns: int
    generation: int
    rank: int
    stream: str
    line: int
    node: str

    @property
    def key(self) -> LineKey:
        """Identifies the line."""
        return (self.generation, self.rank, self.stream, self.line)

    def is_in(self, selection: Selection) -> bool:
        """Return whether a view of these logs contains the line."""
        return (
            selection.generation in (None, "all", self.generation)
            and (selection.ranks is None or self.rank in selection.ranks)
            and (selection.nodes is None or self.node in selection.nodes)
            and (self.stream in selection.streams or "nccl" in selection.streams)
        )


def read(kept: Iterable[Any]) -> list[Bookmark]:
    """Return the bookmarks of a preferences file, without invalid entries."""
    kinds = [int, int, int, str, int, str]
    return [Bookmark(*one) for one in kept if isinstance(one, list) and [type(part) for part in one] == kinds][:KEPT]


def toggled(marks: list[Bookmark], row: LogRow) -> list[Bookmark]:
    """Return the bookmarks with this line added, or removed if it was there."""
    mark = Bookmark(row.t_ns, row.generation, row.rank, row.stream, row.line, row.node)
    others = [one for one in marks if one.key != mark.key]
    return others if len(others) < len(marks) else sorted([*marks, mark])[-KEPT:]


def neighbour(marks: list[Bookmark], here: tuple[int, LineKey], direction: int) -> Bookmark | None:
    """Return the next (1) or previous (-1) bookmark from a line; wraps around."""
    placed = sorted((mark.t_ns, mark.key, mark) for mark in marks)
    if direction > 0:
        return next((mark for t_ns, key, mark in placed if (t_ns, key) > here), placed[0][2] if placed else None)
    return next((mark for t_ns, key, mark in placed[::-1] if (t_ns, key) < here), placed[-1][2] if placed else None)
