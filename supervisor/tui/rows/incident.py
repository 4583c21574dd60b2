"""One incident as lines: the culprit, what happens next, the traceback, the evidence, the consequences.

In: an incident object of the contract, a job view. Out: lines, and the log line that each one opens; of a hang also its
picture: which ranks wait in which collective, who is missing, and the lines of the script where they are.
"""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING, Final, NamedTuple

from remote_agent.text.names import RANK_LOG, count, name_ranks, read_number
from remote_agent.text.rows import stream_of
from supervisor.tui.rows.spans import EMPTY, Row, Span, clean, fit, fit_row, row_width, wrap
from supervisor.wording import incidents, values
from supervisor.wording.stacks import numbered_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from remote_agent.wire.documents import EvidenceEntry, IncidentDocument, MissingRanks, SourceExcerpt, WaitingCall
    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import JobView, NodeRow
    from supervisor.wording.incidents import IncidentLine

# From this width on, the source has room beside the ranks.
BESIDE: Final = 100
# In a larger group nodes of which all ranks wait alike share one line.
MAX_SHOWN: Final = 64
# A line has this many ranks if the group is over and its nodes are no longer known.
_CHUNK: Final = 8
_INDENT: Final = "  "


class LogPlace(NamedTuple):
    """A line of a log."""

    node: str
    generation: int
    rank: int
    stream: str
    line: int
    """Counted from 1, as editors do."""
    line_stream: str
    """The stream to which the line belongs: NCCL may write its lines to any file."""


class PageLine(NamedTuple):
    """One line of the page."""

    key: tuple[str, int]
    row: Row
    place: LogPlace | None = None
    unfolds: bool = False


class PageBuilder:
    """Lines as they are added, section by section."""

    def __init__(self, width: int, glyphs: Glyphs) -> None:
        self.lines: list[PageLine] = []
        self.width = width
        self.glyphs = glyphs
        self._section = ""
        self._number = 0
        self._unfolds = False

    def section(self, title: str, note: str = "", *, unfolds: bool = False) -> None:
        """Begin a section; `unfolds`: its lines fold and unfold it."""
        if self.lines:
            self.add(EMPTY)
        self._section, self._number, self._unfolds = title, 0, unfolds
        rule = self.glyphs.rule
        head: list[Span] = [(f" {title} ", "accent")]
        used = len(title) + 2 + (len(note) + 2 if note else 0)
        head.append((rule * max(0, self.width - used - 1), "rule"))
        if note:
            head.append((f" {note} ", "dim"))
        self.add(tuple(head))

    def add(self, row: Row, place: LogPlace | None = None) -> None:
        """Add a line."""
        self.lines.append(PageLine((self._section, self._number), row, place, self._unfolds))
        self._number += 1

    def prose(self, text: str, role: str) -> None:
        """Add text, wrapped."""
        for line in wrap(text, self.width - 3):
            self.add(((_INDENT + line, role),))


def place_of(evidence: EvidenceEntry | None) -> LogPlace | None:
    """Return where a piece of evidence stands, if it is in one of the logs that an agent serves."""
    log = RANK_LOG.search(evidence.get("file") or "") if evidence is not None else None
    if evidence is None or log is None:
        return None
    line = evidence.get("line")
    stream = stream_of(log[3], evidence["text"].encode())
    return LogPlace(evidence.get("node") or "", int(log[1]), int(log[2]), log[3], 1 if line is None else line, stream)


def incident_page(
    incident: IncidentDocument,
    job_view: JobView,
    width: int,
    glyphs: Glyphs,
    *,
    unfolded: bool,
    now_s: float,
    why: bool = False,
) -> list[PageLine]:
    """Return the page of one incident; now_s: Unix time; why: with the claims that decided."""
    page = PageBuilder(width, glyphs)
    sections: dict[str, list[IncidentLine]] = collections.defaultdict(list)
    for line in incidents.incident_lines(incident, now_s, why=why):
        sections[line.section].append(line)
    state = sections["state"] if incident.get("state") != "over" else []
    title = "hang" if incidents.is_hang(incident) else "first failure"
    _section(page, title, [*sections[""], *state], values.clock(incident.get("time"), millis=True))
    _section(page, "why", sections["why"])
    _missing(page, incident, job_view)
    # The advice is above the traceback, which may be longer than the screen.
    _next(page, sections["hint"], incident, job_view, now_s)
    _section(page, "traceback", sections["traceback"])
    evidence = sections["evidence"]
    opens = any(place_of(line.place) for line in evidence)
    _section(page, "evidence", evidence, "enter: open the line in the log" if opens else "", is_cut=True)
    name = f"{incidents.VICTIMS} ({sum(len(entry['ranks']) for entry in incident['victims'])})"
    fold = "enter: fold" if unfolded else "enter: unfold"
    _section(page, name, sections[incidents.VICTIMS], fold, is_cut=not unfolded, unfolds=True)
    return page.lines


def _section(
    page: PageBuilder,
    title: str,
    lines: Sequence[IncidentLine],
    note: str = "",
    *,
    is_cut: bool = False,
    unfolds: bool = False,
) -> None:
    """Add a section, unless it is empty; is_cut: each of its lines takes one line of the page."""
    if lines:
        page.section(title, note, unfolds=unfolds)
    for line in lines:
        place = place_of(line.place)
        if is_cut:
            mark = page.glyphs.pointer if place else " "
            page.add(((f" {mark} ", "key"), (fit(line.text, page.width - 4, page.glyphs.more), line.role)), place)
        else:
            page.prose(line.text, line.role)


def _missing(page: PageBuilder, incident: IncidentDocument, job_view: JobView) -> None:
    missing = incident.get("missing")
    if missing is None:
        return
    page.section("waiting and missing ranks")
    is_current = job_view.generation == incident["generation"] and not job_view.ended
    nodes = job_view.nodes if is_current else ()
    for row in hang_rows(missing, nodes, page.width, page.glyphs, over=incident.get("ongoing") is False):
        page.add(row)


def _next(
    page: PageBuilder, hint: Sequence[IncidentLine], incident: IncidentDocument, job_view: JobView, now_s: float
) -> None:
    if incidents.is_open(incident) or job_view.ended:
        page.section("what happens next")
        page.prose(what_next(job_view, now_s), "text")
    page.section("what you can do")
    for line in hint:
        page.prose(line.text, line.role)
    page.add((("  l ", "key"), ("open the log of the rank at fault", "dim")))
    if not job_view.ended:
        page.add((("  x ", "key"), ("restart, remove or add a node, stop", "dim")))


def what_next(job_view: JobView, now_s: float) -> str:
    """Return what the cluster does next, in one or two sentences."""
    if job_view.ended:
        reason = f": {job_view.failure}" if job_view.failure else ""
        return f"The job has ended: {job_view.state}, exit code {job_view.exit_status}{reason}. q quits."
    if following := job_view.next_step(now_s):
        return following
    left = (job_view.max_restarts or 0) - job_view.restarts
    return f"The job is {job_view.condition}; {count(max(0, left), 'restart')} left of {job_view.max_restarts or 0}."


# --- the picture of a hang


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
