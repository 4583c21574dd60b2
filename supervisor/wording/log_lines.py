"""Rows of logs as lines: `node:rank| text`; folded `[0-3,5]| text` for ranks that printed the same.

In: rows, folds. Out: bytes; `[0-3,5]~| text` where the ranks' numbers differ and the first rank's are shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remote_agent.text.names import ranges
from supervisor.wording.values import cut_text, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from supervisor.logs.fold import Fold
    from supervisor.logs.rows import LogLine


def prefix_of(node: str, rank: int) -> bytes:
    """Return what is printed before each line of a rank."""
    return f"{one_line(node)}:{rank}| ".encode()


def begin_of(row: LogLine) -> bytes:
    """Return a row as it is printed, without its end."""
    return prefix_of(row.node, row.rank) + _one_line(row.text)


def _one_line(text: bytes) -> bytes:
    # A row is one line. If a node or a recording has more in it, none may look like the line of another rank.
    return text.replace(b"\n", b"\\n")


def line_of(row: LogLine) -> bytes:
    """Return a row as it is printed."""
    return begin_of(row) + _end_of(row)


def _end_of(row: LogLine) -> bytes:
    return f"{cut_text(row.cut)}\n".encode() if row.cut else b"\n"


def lines_of(folds: Iterable[Fold[LogLine]]) -> bytes:
    """Return folds as they are printed."""
    return b"".join(_lines(fold) for fold in folds)


def _lines(fold: Fold[LogLine]) -> bytes:
    if len(fold.records) == 1:
        return b"".join(map(line_of, fold.first_rows))
    prefix = f"[{ranges(fold.ranks)}]{'~' if fold.differs else ''}| ".encode()
    return b"".join(prefix + _one_line(row.text) + _end_of(row) for row in fold.first_rows)
