"""How the panes of the map share a terminal: pure arithmetic, the same for the same job and size.

In: cells and lines, how many nodes and ranks. Out: the height of every pane; 0 hides it.
"""

from __future__ import annotations

import dataclasses
from typing import Final

WIDE: Final = 120
# A title, column names and two rows; a title and three lines.
EVENTS_MIN: Final = 4
LOG_MIN: Final = 4
LOG_GOOD: Final = 7


@dataclasses.dataclass(frozen=True)
class MapLayout:
    """Heights of the panes, in lines with their titles."""

    nodes: int = 0
    ranks: int = 0
    """The table of ranks: below the nodes, or beside them where `beside` is set."""
    beside: bool = False
    grid: int = 0
    """The heat map, where the tables cannot show all."""
    per_node: bool = False
    """The heat map has one glyph per node."""
    events: int = 0
    log: int = 0


def map_layout(width: int, body: int, nodes: int, ranks: int, grid_lines: int, grid_lines_per_node: int) -> MapLayout:
    """The layout for a body of `body` lines; all of them are given out."""
    table = max(nodes, 1) + 2
    if table + EVENTS_MIN <= body and table <= max(8, body * 3 // 5):
        return _small_job(width, body, table, ranks)
    return _big_job(body, nodes, grid_lines, grid_lines_per_node)


def _small_job(width: int, body: int, table: int, ranks: int) -> MapLayout:
    band, below, beside = table, 0, False
    rank_table = ranks + 2
    if width >= WIDE and ranks:
        beside = True
        band = max(table, min(rank_table, body // 3))
    elif ranks and band + rank_table + EVENTS_MIN + LOG_MIN <= body:
        below = rank_table
    rest = body - band - below
    events, log = _share(rest)
    return MapLayout(nodes=band, ranks=band if beside else below, beside=beside, events=events, log=log)


def _big_job(body: int, nodes: int, grid_lines: int, grid_lines_per_node: int) -> MapLayout:
    room = body - EVENTS_MIN
    per_node = grid_lines + 1 > room
    grid = min((grid_lines_per_node if per_node else grid_lines) + 1, room)
    rest = body - grid
    table = min(nodes + 2, (rest - EVENTS_MIN - LOG_MIN) * 3 // 5)
    if table < 6:
        table = 0
    events, log = _share(rest - table)
    return MapLayout(nodes=table, grid=grid, per_node=per_node, events=events, log=log)


def _share(rest: int) -> tuple[int, int]:
    """Events and log share what is left: the log gets more of it, and nothing where it would be a sliver."""
    if rest < EVENTS_MIN + LOG_MIN:
        return rest, 0
    log = max(LOG_MIN, rest - EVENTS_MIN if rest < EVENTS_MIN + LOG_GOOD else rest * 3 // 5)
    return rest - log, log
