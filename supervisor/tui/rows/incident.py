"""One incident as lines: the culprit, what happens next, the traceback, the evidence, the consequences.

In: an incident object of the contract, a snapshot. Out: lines, and the log line that each one opens.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.text.names import RANK_LOG, count, name_ranks
from supervisor.tui.rows.hang import hang_rows
from supervisor.tui.rows.spans import EMPTY, Row, Span, clean, fit, wrap
from supervisor.wording import incidents, values
from supervisor.wording.incidents import category_text

if TYPE_CHECKING:
    from remote_agent.wire.documents import EvidenceEntry, IncidentDocument
    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import Snapshot


class LogPlace(NamedTuple):
    """A line of a log."""

    node: str
    generation: int
    rank: int
    stream: str
    line: int
    """Counted from 1, as editors do."""


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

    def section(self, title: str, note: str = "", role: str = "dim", *, unfolds: bool = False) -> None:
        """Begin a section; `unfolds`: its lines fold and unfold it."""
        if self.lines:
            self.add(EMPTY)
        self._section, self._number, self._unfolds = title, 0, unfolds
        rule = self.glyphs.rule
        head: list[Span] = [(f" {title} ", "accent")]
        used = len(title) + 2 + (len(note) + 2 if note else 0)
        head.append((rule * max(0, self.width - used - 1), "rule"))
        if note:
            head.append((f" {note} ", role))
        self.add(tuple(head))

    def add(self, row: Row, place: LogPlace | None = None) -> None:
        """Add a line."""
        self.lines.append(PageLine((self._section, self._number), row, place, self._unfolds))
        self._number += 1

    def prose(self, text: str, role: str, indent: int = 2) -> None:
        """Add text, wrapped."""
        for line in wrap(text, self.width - indent - 1):
            self.add(((" " * indent + line, role),))


def place_of(evidence: EvidenceEntry) -> LogPlace | None:
    """Where a piece of evidence stands, if it is in one of the logs that an agent serves."""
    log, line = RANK_LOG.search(evidence.get("file") or ""), evidence.get("line")
    if log is None:
        return None
    return LogPlace(evidence.get("node") or "", int(log[1]), int(log[2]), log[3], 1 if line is None else line)


def incident_lines(
    incident: IncidentDocument, snapshot: Snapshot, width: int, glyphs: Glyphs, *, unfolded: bool, now_s: float
) -> list[PageLine]:
    """The page of one incident; now_s: Unix time."""
    page = PageBuilder(width, glyphs)
    _culprit(page, incident, now_s)
    _missing(page, incident, snapshot)
    # Above the traceback, which may be longer than the screen.
    _next(page, incident, snapshot, now_s)
    _traceback(page, incident)
    _evidence(page, incident)
    _victims(page, incident, unfolded)
    return page.lines


def _culprit(page: PageBuilder, incident: IncidentDocument, now_s: float) -> None:
    confidence = clean(incident["confidence"])
    title = "hang" if incidents.is_hang(incident) else "first failure"
    page.section(title, f"confidence: {confidence}", "ok" if confidence == "established" else "warn")
    ranks, node = incident["culprit_ranks"], incident.get("culprit_node")
    more = "at least " if incident.get("at_least") else ""
    who = f"{more}{name_ranks(ranks)}" if ranks else f"node {clean(node)}" if node else "no rank"
    mark: Span = ("  ? ", "hung") if incidents.is_hang(incident) else ("  X ", "bad")
    spans: list[Span] = [mark, (who, "title")]
    if node and ranks:
        spans += [(" on ", "dim"), (clean(node), "title")]
    if how := clean(_exit(incident)):
        spans += [("   ", ""), (how, "bad")]
    spans.append((f"   {values.clock(incident.get('time'), millis=True)}", "dim"))
    if incident["category"] != "other":
        spans.append((f"   {clean(category_text(incident['category']))}", "dim"))
    page.add(tuple(spans))
    page.prose(incident["summary"], "bad", 4)
    if incident.get("state") != "over" and (text := incidents.standing(incident, now_s)):
        page.prose(text, "bad" if incidents.is_open(incident) else "ok", 4)


def _exit(incident: IncidentDocument) -> str:
    ended = incident["exit"]
    return ended["signal"] or (f"exit {ended['code']}" if ended["code"] is not None else "")


def _missing(page: PageBuilder, incident: IncidentDocument, snapshot: Snapshot) -> None:
    missing = incident.get("missing")
    if missing is None:
        return
    page.section("waiting and missing ranks")
    is_current = snapshot.generation == incident["generation"] and not snapshot.ended
    nodes = snapshot.nodes if is_current else ()
    for row in hang_rows(missing, nodes, page.width, page.glyphs, over=incident.get("ongoing") is False):
        page.add(row)


def _traceback(page: PageBuilder, incident: IncidentDocument) -> None:
    text = (incident.get("traceback") or "").rstrip()
    if not text:
        return
    page.section("traceback")
    lines = text.splitlines()
    for line in lines:
        last = line is lines[-1]
        for piece in wrap(line, page.width - 4):
            page.add(((f"   {piece}", "bad" if last else "text" if line.lstrip().startswith("File") else "dim"),))


def _evidence(page: PageBuilder, incident: IncidentDocument) -> None:
    evidence = incident["evidence"]
    if not evidence:
        return
    places = [place_of(entry) for entry in evidence]
    page.section("evidence", "enter: open the line in the log" if any(places) else "")
    for entry, place in zip(evidence, places, strict=True):
        where = f"r{entry.get('rank')}" if entry.get("rank") is not None else ""
        head = fit(f"{entry.get('node') or ''} {where}".strip(), 9, page.glyphs.more)
        name = PurePath(entry.get("file") or "").name or "-"
        at = fit(f"{name}:{entry.get('line')}" if entry.get("line") else name, 17, page.glyphs.more)
        mark = page.glyphs.pointer if place else " "
        row: Row = (
            (f" {mark} ", "key"),
            (head + " ", "tag"),
            (at + " ", "dim"),
            (clean(entry["text"]), "text"),
        )
        page.add(row, place)


def _victims(page: PageBuilder, incident: IncidentDocument, unfolded: bool) -> None:
    victims = incident["victims"]
    if not victims:
        return
    total = sum(len(entry["ranks"]) for entry in victims)
    page.section(f"failed as a consequence ({total})", "enter: fold" if unfolded else "enter: unfold", unfolds=True)
    for entry in victims:
        ranks, kind = entry["ranks"], clean(category_text(entry["category"]))
        page.add(((f"  {len(ranks):>4} x  ", "text"), (f"{kind}  ", "dim"), (name_ranks(ranks), "tag")))
        if unfolded:
            page.prose(entry["summary"], "dim", 10)


def _next(page: PageBuilder, incident: IncidentDocument, snapshot: Snapshot, now_s: float) -> None:
    if incidents.is_open(incident) or snapshot.ended:
        page.section("what happens next")
        page.prose(what_next(snapshot, now_s), "text")
    page.section("what you can do")
    if hint := incidents.advice(incident):
        page.prose(hint, "text")
    page.add((("  l ", "key"), ("open the log of the rank at fault", "dim")))
    if not snapshot.ended:
        page.add((("  x ", "key"), ("restart, remove or add a node, stop", "dim")))


def what_next(snapshot: Snapshot, now_s: float) -> str:
    """What the cluster does next, in one or two sentences."""
    if snapshot.ended:
        reason = f": {snapshot.failure}" if snapshot.failure else ""
        return f"The job has ended: {snapshot.state}, exit code {snapshot.exit_status}{reason}. q quits."
    if following := snapshot.next_step(now_s):
        return following
    left = (snapshot.max_restarts or 0) - snapshot.restarts
    return f"The job is {snapshot.condition}; {count(max(0, left), 'restart')} left of {snapshot.max_restarts or 0}."
