"""Tables of nodes and ranks, and events of the journal, as rows of exact width: pure functions.

In: `model.JobView`, events, a width, glyphs. Out: rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from remote_agent.text.names import ranges
from remote_agent.wire.events import LIVE_RANKS, EventType, label
from supervisor.tui import looks
from supervisor.tui.rows.spans import Row, Span, add_span, clean, fit, fit_row, row_width, width_of, wrap
from supervisor.wording import usage, values
from supervisor.wording.events import ROLES, event_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from remote_agent.wire.documents import JournalEvent
    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import JobView, NodeRow, RankRow

T = TypeVar("T")


# Roles have these glyphs; some types of events have another one.
_OF_ROLE: Final = {"bad": "X", "warn": "!", "start": "~", "ok": "+", "done": "+", "off": "."}
_OF_TYPE: Final[dict[str, str]] = {
    EventType.INCIDENT: "!",
    EventType.AGENT_LOST: "-",
    EventType.RESTART_REQUESTED: "~",
    EventType.REMOVE_REQUESTED: "~",
    EventType.GENERATION_STOPPED: "~",
    EventType.ENVIRONMENT_SET: "~",
    EventType.TREE_CHANGED: "~",
}


@dataclasses.dataclass(frozen=True)
class Column(Generic[T]):
    """One column of a table."""

    name: str
    width: int
    """Cells; 0: what is left."""
    cell: Callable[[T], Row]
    """Its content."""
    keep: float = 0
    """Columns with the lowest number go first where there is no room; 9 always stays."""
    at_right: bool = False
    value: Callable[[T], float | str | None] | None = None
    """The value by which it is sorted, if that is not its text; None: unknown."""

    def text(self, item: T) -> str:
        """Return its content, without roles."""
        return "".join(text for text, _ in self.cell(item)).strip()

    def rank(self, item: T) -> tuple[Any, ...] | None:
        """Return what it is sorted by; None: unknown."""
        value = self.text(item) if self.value is None else self.value(item)
        if isinstance(value, str):
            # n2 comes before n10.
            parts = re.split(r"(\d+)", value)
            return None if value in ("", "-") else tuple((1, int(p), "") if p.isdecimal() else (0, 0, p) for p in parts)
        return None if value is None else (value,)


@dataclasses.dataclass(frozen=True)
class SortOrder:
    """The column by which a table is sorted; "": in its own order."""

    column: str = ""
    falling: bool = False

    def sorted(self, items: Sequence[T], columns: Sequence[Column[T]]) -> list[T]:
        """Return the items in order, those of which nothing is known last."""
        # The column for remarks has no name, and is not sorted by.
        column = next((each for each in columns if each.name == self.column != ""), None)
        if column is None:
            return list(items)
        ranked = [(column.rank(item), item) for item in items]
        known = sorted(
            ((key, item) for key, item in ranked if key is not None), key=itemgetter(0), reverse=self.falling
        )
        return [*(item for _, item in known), *(item for key, item in ranked if key is None)]

    def next(self, names: Sequence[str]) -> SortOrder:
        """Return the order by the next of these columns, and at last the table's own."""
        at = names.index(self.column) + 1 if self.column in names else 0
        return SortOrder(names[at], names[at] in FALLING) if at < len(names) else SortOrder()

    def of(self, name: str) -> SortOrder:
        """Return the order after a click on a column's name: by it, then the other way round."""
        return SortOrder(name, not self.falling) if name == self.column else SortOrder(name, name in FALLING)


# In these columns the greatest values are of interest.
FALLING: Final = {"output", *(column.name for column in (*usage.NODE_COLUMNS, *usage.RANK_COLUMNS) if column.falling)}


def matching(items: Sequence[T], columns: Sequence[Column[T]], needle: str) -> list[T]:
    """Return the items of which a cell has this text, upper or lower case."""
    wanted = needle.casefold()
    return [item for item in items if any(wanted in column.text(item).casefold() for column in columns)]


class Table(Generic[T]):
    """Columns laid out for one width."""

    def __init__(self, columns: Sequence[Column[T]], width: int, glyphs: Glyphs) -> None:
        self.width = width
        self.glyphs = glyphs
        chosen = list(columns)
        while chosen and self._needs(chosen) > width:
            weakest = min(chosen, key=lambda column: column.keep)
            if weakest.keep >= 9:
                break
            chosen.remove(weakest)
        self.columns = chosen
        self._rest = max(0, width - self._needs(chosen, rest=0))

    @staticmethod
    def _needs(columns: Sequence[Column[T]], rest: int = 14) -> int:
        return 1 + sum((column.width or rest) + 2 for column in columns) - 2

    def head(self, order: SortOrder | None = None) -> Row:
        """Return the names of the columns; that of the order is marked."""
        by = "" if order is None else order.column
        mark = "" if order is None else self.glyphs.falling if order.falling else self.glyphs.rising

        def cell(column: Column[T]) -> Row:
            if not by or column.name != by:
                return ((column.name, "head"),)
            return (
                (fit(column.name, min(width_of(column.name), (column.width or 99) - 1)), "accent"),
                (mark, "accent"),
            )

        return self._lay(cell)

    def column_at(self, x: int) -> str:
        """Return the name of the column at a cell of a row; "" where there is none."""
        begin = 1
        for column in self.columns:
            width = column.width or self._rest
            if begin <= x < begin + width:
                return column.name
            begin += width + 2
        return ""

    def row(self, item: T, *, faded: bool = False, marked: bool = False) -> Row:
        """Return one row; faded if the facts are old."""
        row = self._lay(lambda column: column.cell(item))
        row = tuple((text, "off") for text, _ in row) if faded else row
        return ((self.glyphs.mark, "mark"), *row[1:]) if marked else row

    def _lay(self, cell: Callable[[Column[T]], Row]) -> Row:
        spans: list[Span] = [(" ", "")]
        for index, column in enumerate(self.columns):
            if index:
                spans.append(("  ", ""))
            row = [(clean(text), role) for text, role in cell(column)]
            width = column.width or self._rest
            if column.at_right and (missing := width - row_width(row)) > 0:
                spans += [(" " * missing, ""), *row]
            else:
                spans += fit_row(row, width, self.glyphs.more)
        return tuple(spans)


def state_cell(look: looks.Look, glyphs: Glyphs, stale: bool) -> Row:
    """Return glyph and word of a state; `-` for the glyph of an old one."""
    return ((f"{'-' if stale else glyphs.of(look)} {look.word}", "off" if stale else look.role),)


def step_text(step: int | None) -> str:
    """Return a training step."""
    return "-" if step is None else f"{step:,}"


def node_columns(
    glyphs: Glyphs, stale: bool, ranks_width: int, name_width: int, vitals: Sequence[Column[NodeRow]] = ()
) -> list[Column[NodeRow]]:
    """Return the columns of the node table; `ranks_width`: cells for one glyph per rank, 0 for none."""
    columns: list[Column[NodeRow]] = [
        Column("state", 12, lambda node: state_cell(node.look, glyphs, stale), 9, value=lambda node: node.look.word),
        Column("node", name_width, lambda node: ((node.name, "text"),), 9),
    ]
    if ranks_width:
        columns.append(Column("ranks", ranks_width, lambda node: tuple(glyph_spans(node.ranks, glyphs, stale)), 8))
    else:
        columns.append(Column("ranks", 5, lambda node: ((_running(node), "text"),), 6, at_right=True))
    columns += [
        Column("step", 9, _node_step, 7, at_right=True, value=lambda node: node.train_step),
        Column("output", 6, _output, 5, at_right=True, value=lambda node: node.output_age_s),
        *vitals,
        Column("link", 10, _link, 4),
        Column("clock", 8, _node_clock, 2, at_right=True, value=lambda node: node.clock_offset_ms),
        Column("address", 15, lambda node: ((node.address, "dim"),), 1),
        Column("", 0, _why, 3),
    ]
    return columns


def rank_columns(
    glyphs: Glyphs, stale: bool, name_width: int, vitals: Sequence[Column[RankRow]] = ()
) -> list[Column[RankRow]]:
    """Return the columns of the rank table."""
    return [
        Column("state", 11, lambda rank: state_cell(rank.look, glyphs, stale), 9, value=lambda rank: rank.look.word),
        Column("rank", 5, lambda rank: ((str(rank.rank), "text"),), 9, at_right=True),
        Column("node", name_width, lambda rank: ((rank.node, "text"),), 8),
        Column("local", 5, lambda rank: ((str(rank.local_rank), "dim"),), 2, at_right=True),
        Column("step", 9, _rank_step, 7, at_right=True, value=lambda rank: rank.step),
        Column("output", 6, _output, 5, at_right=True, value=lambda rank: rank.output_age_s),
        Column("pid", 8, lambda rank: ((str(rank.pid or "-"), "dim"),), 3, at_right=True),
        *vitals,
        Column("", 0, lambda rank: ((rank.outcome, rank.look.role),), 4),
    ]


def _node_step(node: NodeRow) -> Row:
    return ((step_text(node.train_step), "text"),)


def _output(item: NodeRow | RankRow) -> Row:
    return ((values.age(item.output_age_s), "dim"),)


def _node_clock(node: NodeRow) -> Row:
    return ((_offset(node.clock_offset_ms), "dim"),)


def _rank_step(rank: RankRow) -> Row:
    return ((step_text(rank.step), "text"),)


def _why(node: NodeRow) -> Row:
    bad = node.state in ("failed", "lost") or (node.host.state in ("failed", "lost") and not node.left)
    reason = node.why if bad or (node.state in ("connecting", "removed") and not node.left) else node.reason
    return ((reason, "warn" if bad else "dim"),)


def _link(node: NodeRow) -> Row:
    word = "-" if node.left else {"up": "ok", "": "-"}.get(node.host.state, node.host.state)
    return ((word, "dim" if word in ("ok", "-") else "warn"),)


def _running(node: NodeRow) -> str:
    alive = sum(rank.state in LIVE_RANKS for rank in node.ranks)
    return f"{alive}/{len(node.ranks)}" if node.ranks else "-"


def _offset(offset_ms: float | None) -> str:
    return "-" if offset_ms is None else f"{offset_ms:+.1f}ms"


def glyph_spans(ranks: Sequence[RankRow], glyphs: Glyphs, stale: bool) -> list[Span]:
    """Return one glyph per rank, in the colour of its state; neighbours of one look share a span."""
    spans: list[Span] = []
    for rank in ranks:
        add_span(spans, "-" if stale else glyphs.of(rank.look), "off" if stale else rank.look.role)
    return spans


def legend(glyphs: Glyphs, ranks: Iterable[RankRow]) -> Row:
    """Return the meaning of the glyphs that occur."""
    spans: list[Span] = []
    present = {rank.look for rank in ranks}
    for state, look in looks.RANKS.items():
        words = [look.word] if look in present else []
        if state == "killed" and looks.VICTIM in present:
            words.insert(0, "failed as a consequence")
        if word := " or ".join(words):
            spans += [("  " if spans else "", ""), (glyphs.of(look), look.role), (f" {word}", "dim")]
    return tuple(spans)


def node_lines(node: NodeRow, job_view: JobView, width: int) -> list[Row]:
    """Return the facts of one node, with a hint if something is wrong."""
    role = "coordinator" if node.name == job_view.coordinator else "member" if node.ranks else "not in the group"
    facts = [("role", role, "text"), ("state", f"{node.look.word}  {node.reason}".strip(), node.look.role)]
    host = node.host
    link = {"up": "ok"}.get(host.state, host.state or "not connected")
    doing = host.text if host.state == "up" and host.text else f"{host.step} {host.text}".strip()
    facts.append(("link", f"{link}  {doing}".strip(), "text" if host.state == "up" else "warn"))
    if host.error:
        facts.append(("why", host.error, "bad"))
    if host.hint:
        facts.append(("fix", host.hint, "text"))
    if node.address:
        offset = "" if node.clock_offset_ms is None else f"   clock {_offset(node.clock_offset_ms)}"
        facts.append(("address", f"{node.address}{offset}", "dim"))
    if node.ranks:
        facts.append(("ranks", ranges([rank.rank for rank in node.ranks]), "text"))
        by_state = attrgetter("state")
        for state, odd in itertools.groupby(sorted((r for r in node.ranks if r.has_problem), key=by_state), by_state):
            numbers = ranges([rank.rank for rank in odd])
            facts.append(("", f"{looks.RANKS[state].word}: {numbers}", looks.RANKS[state].role))
    return fact_lines(facts, width)


def fact_lines(facts: Iterable[tuple[str, str, str]], width: int) -> list[Row]:
    """Return facts as name, text and role, wrapped."""
    lines: list[Row] = []
    for name, text, role in facts:
        for number, line in enumerate(wrap(text, max(20, width - 12))):
            lines.append(((f"  {name if number == 0 else '':<9}", "dim"), (line, role)))
    return lines


def flow(head: Row, facts: Iterable[Row], width: int) -> list[Row]:
    """Return facts behind a head, side by side; on another line where there is no room."""
    start: Row = head
    lines: list[Row] = []
    for fact in facts:
        if lines and row_width(lines[-1]) + 3 + row_width(fact) <= width:
            lines[-1] = (*lines[-1], ("   ", "dim"), *fact)
        else:
            lines.append((*start, *fact))
            start = ((" " * row_width(head), "dim"),)
    return lines or [head]


def fit_parts(parts: Sequence[tuple[int, Row]], room: int, more: str, *, gap: int = 3, least: int = 1) -> Row:
    """Return parts side by side; if not all fit, those with the lowest number are dropped, down to `least` parts."""
    left = list(parts)
    while len(left) > least and sum(row_width(row) + gap for _, row in left) - gap > room:
        left.remove(min(left, key=lambda part: part[0]))
    spans: list[Span] = []
    for _, row in left:
        spans += [(" " * gap if spans else "", ""), *row]
    return tuple(spans) if row_width(spans) <= room else fit_row(spans, max(0, room), more)


def name_width(nodes: Sequence[NodeRow]) -> int:
    """Return the cells for a column of node names."""
    return max(4, min(20, max([_cells_of(node.name) for node in nodes], default=4)))


@functools.lru_cache(maxsize=1024)
def _cells_of(name: str) -> int:
    return width_of(clean(name))


def event_row(event: JournalEvent, glyphs: Glyphs, width: int, *, wide: bool = False) -> Row:
    """Return one event; `wide` adds number and generation."""
    kind = str(event.get("type") or "?")
    role = ROLES.get(kind, "dim")
    mark = _OF_TYPE.get(kind) or _OF_ROLE.get(role, glyphs.dot)
    spans = [(f" {values.clock(event.get('time'), millis=wide and width >= 100)} ", "time"), (f"{mark} ", role)]
    if wide:
        number = f"g{event['generation']}" if event["generation"] >= 0 else ""
        spans.append((fit(number, 4, glyphs.more), "dim"))
    place = " ".join(
        part
        for part in (str(event.get("node") or ""), "" if event.get("rank") is None else f"r{event['rank']}")
        if part
    )
    room = 10 if width < 100 else 16
    spans.append((fit(place, room, glyphs.more) + " ", "tag"))
    loud = role if role in ("bad", "warn", "done") else "text"
    spans.append((fit(label(kind), 19, glyphs.more) + " ", loud))
    spans.append((clean(event_text(event)), "bad" if role == "bad" else "dim"))
    return tuple(spans)
