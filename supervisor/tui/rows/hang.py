"""The picture of a hang: which ranks wait in which collective, who is missing, and the lines of the script it is at.

In: the `missing` object of an incident, the nodes of the group. Out: rows; side by side where there is room.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from remote_agent.text.names import count, name_ranks, read_number
from supervisor.tui.rows.spans import EMPTY, Row, Span, clean, fit_row, row_width, wrap
from supervisor.wording.stacks import numbered_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from remote_agent.wire.documents import MissingRanks, SourceExcerpt, WaitingCall
    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import NodeRow

# From this many cells on the source has room beside the ranks.
BESIDE: Final = 100
# In a larger group nodes of which all ranks wait alike share one line.
MAX_SHOWN: Final = 64
# Ranks of a line if the group is over and its nodes are no longer known.
_CHUNK: Final = 8
_INDENT: Final = "  "


def hang_rows(missing: MissingRanks, nodes: Sequence[NodeRow], width: int, glyphs: Glyphs, *, over: bool) -> list[Row]:
    """Return the picture; `nodes`: those of the group, none where they are not known; `over`: the hang has ended."""
    sources = list((missing.get("sources") or {}).items())
    beside = bool(sources) and width >= BESIDE
    ranks = _queues(missing, _places(missing, nodes), width * 9 // 20 if beside else width, glyphs, over)
    code = [row for place, source in sources for row in _source(missing, place, source, glyphs)]
    if not beside:
        return [*ranks, *code]
    left = max((row_width(row) for row in ranks), default=0) + len(_INDENT)
    rows = itertools.zip_longest(ranks, code, fillvalue=EMPTY)
    return [(*fit_row(one, left, glyphs.more), *other) for one, other in rows]


def _places(missing: MissingRanks, nodes: Sequence[NodeRow]) -> Mapping[str, Sequence[int]]:
    """Return the ranks by node, or by the first of some where the nodes are not known."""
    called = {rank for call in _calls(missing) for rank in call["ranks"]}
    everyone = sorted(called.union(missing["waiting"], missing["missing"]))
    placed = {clean(node.name): [rank.rank for rank in node.ranks] for node in nodes if node.ranks}
    if set(everyone) <= {rank for ranks in placed.values() for rank in ranks}:
        return placed
    chunks = (everyone[at : at + _CHUNK] for at in range(0, len(everyone), _CHUNK))
    return {f"r{chunk[0]}": chunk for chunk in chunks}


def _calls(missing: MissingRanks) -> list[WaitingCall]:
    """Return what the ranks wait in; an agent of an older version reports one collective for all."""
    name, waiting = missing["collective"] or "collective", missing["waiting"]
    one: WaitingCall = {"collective": name, "seq": missing["seq"], "group": "0", "ranks": waiting}
    return missing.get("calls") or ([one] if waiting else [])


def _call_text(call: WaitingCall) -> str:
    group = f" of group {clean(call['group'])}" if call["group"] not in ("", "0") else ""
    return f"{clean(call['collective'])} {'' if call['seq'] is None else call['seq']}".rstrip() + group


def _queues(
    missing: MissingRanks, places: Mapping[str, Sequence[int]], width: int, glyphs: Glyphs, over: bool
) -> list[Row]:
    rows: list[Row] = []
    absent = set(missing["missing"])
    calls = _calls(missing)
    for call in calls:
        ranks = call["ranks"]
        verb = ("was", "were") if over else ("is", "are")
        text = f"{count(len(ranks), 'rank')} {verb[len(ranks) != 1]} waiting"
        rows.append(((_INDENT + _call_text(call), "title"), (f": {text}", "text")))
        rows += _strips(set(ranks), absent, places, width, glyphs)
    waits = {rank for call in calls for rank in call["ranks"]}
    late = sorted(absent - waits)
    if late:
        never = f"never reached {'it' if len(calls) == 1 else 'any of these'}" if calls else "missing"
        rows.append(((_INDENT + glyphs.missing + " ", "hung"), (f"{name_ranks(late)} {never}", "hung")))
    for place, ranks in _by_place(missing).items():
        if place not in (missing.get("sources") or {}):
            rows += [((_INDENT * 2 + line, "dim"),) for line in wrap(f"{name_ranks(ranks)} at {place}", width - 5)]
    return rows


def _by_place(missing: MissingRanks) -> dict[str, list[int]]:
    """Return the ranks by the place at which they are."""
    places: dict[str, list[int]] = {}
    for rank, place in missing["stacks"].items():
        if rank.isdecimal():
            places.setdefault(clean(place), []).append(read_number(rank))
    return places


def _strips(
    waiting: set[int], absent: set[int], places: Mapping[str, Sequence[int]], width: int, glyphs: Glyphs
) -> list[Row]:
    """Return a glyph for each rank, node by node, as many nodes in a line as fit."""
    alike = [name for name, ranks in places.items() if waiting.issuperset(ranks)]
    is_large = sum(len(ranks) for ranks in places.values()) > MAX_SHOWN
    names = [name for name in places if not (is_large and name in alike)]
    strips = [((f"{name} ", "dim"), *_strip(places[name], waiting, absent, glyphs)) for name in names]
    rows: list[Row] = []
    for strip in strips:
        if rows and row_width(rows[-1]) + 2 + row_width(strip) < width:
            rows[-1] = (*rows[-1], ("  ", ""), *strip)
        else:
            rows.append(((_INDENT * 2, ""), *strip))
    if is_large and alike:
        ranks = sum(len(places[name]) for name in alike)
        more = f"{'and ' if rows else 'all '}{count(ranks, 'rank')}{' of other nodes' if rows else ''}"
        rows.append(((_INDENT * 2 + glyphs.waits + " ", "ok"), (more, "dim")))
    return rows


def _strip(ranks: Sequence[int], waiting: set[int], absent: set[int], glyphs: Glyphs) -> list[Span]:
    def look(rank: int) -> Span:
        if rank in waiting:
            return glyphs.waits, "bad" if rank in absent else "ok"
        return (glyphs.missing, "hung") if rank in absent else (glyphs.elsewhere, "dim")

    looks = itertools.groupby(look(rank) for rank in ranks)
    return [(glyph * len(list(same)), role) for (glyph, role), same in looks]


def _source(missing: MissingRanks, place: str, source: SourceExcerpt, glyphs: Glyphs) -> list[Row]:
    """Return the lines of the script around a place, with the ranks that are there."""
    ranks = _by_place(missing).get(clean(place), [])
    rows: list[Row] = [((f"{_INDENT}{name_ranks(ranks)} at ", "dim"), (clean(place), "title"))]
    for number, text, here in numbered_source(place, source):
        mark = glyphs.pointer if here else " "
        head = f"{_INDENT}{mark} {number}  "
        rows.append(((head, "hung" if here else "dim"), (clean(text), "text" if here else "dim")))
    return rows
