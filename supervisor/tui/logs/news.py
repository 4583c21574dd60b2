"""How much has come below what the reader of a log has had in reach.

In: how many lines each file has, as the nodes tell it; rows that pass a filter, or that are left out; rows that have
been in view. Out: a number of lines.

By numbers of lines alone: times of several nodes, the part of the log that is loaded and where a search leads to change
nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from supervisor.session.logs import Clocks
    from supervisor.session.parts import Ends, File
    from supervisor.tui.logs.log_row import Key, LogRow

# So many rows that pass are counted one by one.
MOST: Final = 20_000


class Look(NamedTuple):
    """Up to which time what came since the reader left the end has been looked at, and by which clocks."""

    until_ns: int
    clocks: Clocks


class News:
    """Lines that came since the reader left the end, of each file those behind what has been in view since."""

    def __init__(self) -> None:
        self.by_row = False
        """Of all lines few are shown: these are counted, as they are looked at; else those that are left out are."""
        self.is_behind = False
        """There are more of them to look at."""
        self._nodes: set[str] = set()
        self._silent: set[str] = set()
        self._reach: dict[File, int | None] = {}
        """The first line that is out of reach; None: of a file that has yet to be read to its end."""
        self._ends: dict[File, int] = {}
        self._seen_ns: dict[File, int] = {}
        """When the newest line came that has been in view."""
        self._before_ns: dict[File, int] = {}
        """Of a file that was written anew: up to this time lines that have been in view are of what it was before."""
        self._waiting: dict[Key, None] = {}

    @property
    def lines(self) -> int:
        """How many."""
        if self.by_row:
            return len(self._waiting)
        every = sum(max(0, end - self._from(file)) for file, end in self._ends.items())
        return max(0, every - len(self._waiting))

    @property
    def or_more(self) -> bool:
        """There may be more: a node does not tell, or not all has been looked at."""
        return bool(self._silent) or (self.by_row and self.is_behind)

    @property
    def or_fewer(self) -> bool:
        """There may be fewer: not all that is left out has been looked at."""
        return self.is_behind and not self.or_more

    def tells(self, node: str) -> bool:
        """Whether a node told of its files when they last were asked."""
        return node in self._nodes and node not in self._silent

    @property
    def is_full(self) -> bool:
        """No more rows are counted."""
        return len(self._waiting) >= MOST

    def forget(self) -> None:
        """The reader returns to the end: what is there when the nodes next tell of it is in his reach."""
        self._nodes.clear()
        self._silent.clear()
        self._reach.clear()
        self._ends.clear()
        self._seen_ns.clear()
        self._before_ns.clear()
        self._waiting.clear()
        self.is_behind = False

    def take(self, ends: Mapping[str, Ends], *, at_end: bool) -> None:
        """Learn how many lines there are; at_end: the reader follows, and has them all in reach."""
        for node, files in ends.items():
            # Of a node that tells of its files for the first time nobody knows what of them is new.
            is_known = node in self._nodes
            for file, end in files.items():
                reach = self._reach.setdefault(file, 0 if is_known else None)
                if end is None:
                    continue
                if at_end or reach is None:
                    self._reach[file] = end
                elif end < self._ends.get(file, 0):
                    # Written anew: what waited of it is gone, all it has now is new.
                    self._reach[file] = 0
                    self._before_ns[file] = self._seen_ns.get(file, 0)
                    self._waiting = {key: None for key in self._waiting if key[:3] != file}
                self._ends[file] = end
        self._nodes |= ends.keys()
        self._silent = self._nodes - ends.keys()
        if at_end:
            self._waiting.clear()
            self.is_behind = False

    def add(self, rows: Iterable[LogRow]) -> None:
        """Count those of these rows that came since: what they are of has been told by `take`."""
        for row in rows:
            reach = self._reach.get(row.key[:3])
            if reach is not None and row.line >= reach:
                self._waiting[row.key] = None

    def read(self, rows: Iterable[LogRow], *, at_end: bool) -> None:
        """Note what has been in view; at_end: the last line there is here, and with it all the others."""
        every = (row for shown in rows for row in (shown.fold.rows if shown.fold is not None else (shown,)))
        moved = [self._is_raised(row.key[:3], row.line + 1) for row in every if self._is_there(row)]
        if at_end:
            moved += [self._is_raised(file, end) for file, end in self._ends.items()]
        if (at_end or any(moved)) and self._waiting:
            self._waiting = {key: None for key in self._waiting if not at_end and key[3] >= self._from(key[:3])}

    def _is_there(self, row: LogRow) -> bool:
        """Note that a line is in view; False where its file was written anew since."""
        file = row.key[:3]
        if row.t_ns <= self._before_ns.get(file, -1):
            return False
        self._seen_ns[file] = max(row.t_ns, self._seen_ns.get(file, 0))
        return True

    def _is_raised(self, file: File, reach: int) -> bool:
        """Note how far a file is in reach; False where it was before."""
        known = self._reach.get(file)
        if known is None or known >= reach:
            return False
        self._reach[file] = reach
        return True

    def _from(self, file: File) -> int:
        return self._reach.get(file) or 0
