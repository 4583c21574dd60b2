"""One incident as lines: the culprit, what comes next, the traceback, the evidence, the victims folded.

In: an incident object of the contract, a snapshot. Out: lines, and what each one leads to.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from supervisor import plain
from supervisor.tui import words
from supervisor.tui.cells import EMPTY, Row, Span, clean, entries, fit, whole_numbers
from supervisor.tui.textflow import wrap

if TYPE_CHECKING:
    from supervisor.tui.model import Snapshot
    from supervisor.tui.source import Json
    from supervisor.tui.words import Glyphs


class Place(NamedTuple):
    """A line of a log."""

    node: str
    generation: int
    rank: int
    stream: str
    line: int
    """Counted from 1, as editors do."""


class Line(NamedTuple):
    """One line of the page."""

    key: tuple[str, int]
    row: Row
    place: Place | None = None
    unfolds: bool = False


class Page:
    """Lines as they are added, section by section."""

    def __init__(self, width: int, glyphs: Glyphs) -> None:
        self.lines: list[Line] = []
        self.width = width
        self.glyphs = glyphs
        self._section = ""
        self._number = 0

    def section(self, title: str, note: str = "", role: str = "dim") -> None:
        """Begin a section."""
        if self.lines:
            self.add(EMPTY)
        self._section, self._number = title, 0
        rule = self.glyphs.rule
        head: list[Span] = [(f" {title} ", "accent")]
        used = len(title) + 2 + (len(note) + 2 if note else 0)
        head.append((rule * max(0, self.width - used - 1), "rule"))
        if note:
            head.append((f" {note} ", role))
        self.add(tuple(head))

    def add(self, row: Row, place: Place | None = None, unfolds: bool = False) -> None:
        """Add a line."""
        self.lines.append(Line((self._section, self._number), row, place, unfolds))
        self._number += 1

    def prose(self, text: str, role: str, indent: int = 2) -> None:
        """Add text, wrapped."""
        for line in wrap(text, self.width - indent - 1):
            self.add(((" " * indent + line, role),))


def place_of(evidence: Json, generation: int) -> Place | None:
    """Where a piece of evidence stands, if it is in one of the logs that an agent serves."""
    path = PurePath(str(evidence.get("file") or ""))
    rank, line = evidence.get("rank"), evidence.get("line")
    if not isinstance(rank, int) or path.name not in ("stdout.log", "stderr.log", "nccl.log"):
        return None
    for part in path.parts:
        if part.startswith("generation_") and part[11:].isdigit():
            generation = int(part[11:])
    return Place(str(evidence.get("node") or ""), generation, rank, path.stem, line if isinstance(line, int) else 1)


def incident_lines(incident: Json, snapshot: Snapshot, width: int, glyphs: Glyphs, *, unfolded: bool) -> list[Line]:
    """The page of one incident."""
    page = Page(width, glyphs)
    generation = incident.get("generation") if isinstance(incident.get("generation"), int) else 0
    _culprit(page, incident)
    # Before the traceback, which may be longer than the screen.
    _next(page, incident, snapshot)
    _missing(page, incident)
    _traceback(page, incident)
    _evidence(page, incident, int(generation or 0))
    _victims(page, incident, unfolded)
    return page.lines


def _culprit(page: Page, incident: Json) -> None:
    confidence = clean(incident.get("confidence") or "unknown")
    page.section("first failure", f"confidence: {confidence}", "ok" if confidence == "established" else "warn")
    ranks = whole_numbers(incident.get("culprit_ranks"))
    who = f"rank {plain.ranges(ranks)}" if ranks else "no single rank"
    node = incident.get("culprit_node")
    spans: list[Span] = [("  X ", "bad"), (who, "title")]
    if node:
        spans += [(" on ", "dim"), (clean(node), "title")]
    spans += [
        ("   ", ""),
        (clean(_exit(incident)), "bad"),
        (f"   {words.clock(incident.get('time'), millis=True)}", "dim"),
    ]
    spans.append((f"   {clean(incident.get('category') or 'other').replace('_', ' ')}", "dim"))
    page.add(tuple(spans))
    page.prose(str(incident.get("summary") or "no summary"), "bad", 4)


def _exit(incident: Json) -> str:
    ended = incident.get("exit")
    if not isinstance(ended, dict):
        return ""
    return str(ended.get("signal") or (f"exit {ended['code']}" if ended.get("code") is not None else ""))


def _missing(page: Page, incident: Json) -> None:
    missing = incident.get("missing")
    if not isinstance(missing, dict):
        return
    page.section("who did not come")
    absent = whole_numbers(missing.get("missing"))
    waiting = whole_numbers(missing.get("waiting"))
    what = f"{missing.get('collective') or 'collective'} {missing.get('seq') or ''}".strip()
    page.prose(f"{what}: {words.count(len(waiting), 'rank')} waited, rank {plain.ranges(absent)} did not come", "text")
    stacks = missing.get("stacks")
    for rank, stack in stacks.items() if isinstance(stacks, dict) else ():
        page.prose(f"rank {rank} was in {stack}", "dim", 4)


def _traceback(page: Page, incident: Json) -> None:
    text = str(incident.get("traceback") or "").rstrip()
    if not text:
        return
    page.section("traceback")
    lines = text.splitlines()
    for line in lines:
        last = line is lines[-1]
        for piece in wrap(line, page.width - 4):
            page.add(((f"   {piece}", "bad" if last else "text" if line.lstrip().startswith("File") else "dim"),))


def _evidence(page: Page, incident: Json, generation: int) -> None:
    found: list[Any] = [entry for entry in entries(incident.get("evidence")) if isinstance(entry, dict)]
    if not found:
        return
    page.section("evidence", "enter: its line in the log")
    for entry in found:
        place = place_of(entry, generation)
        where = f"r{entry.get('rank')}" if entry.get("rank") is not None else ""
        head = fit(f"{entry.get('node') or ''} {where}".strip(), 9, page.glyphs.more)
        name = PurePath(str(entry.get("file") or "")).name or "-"
        at = fit(f"{name}:{entry.get('line')}" if entry.get("line") else name, 17, page.glyphs.more)
        mark = page.glyphs.pointer if place else " "
        row: Row = (
            (f" {mark} ", "key"),
            (head + " ", "tag"),
            (at + " ", "dim"),
            (clean(entry.get("text") or ""), "text"),
        )
        page.add(row, place)


def _victims(page: Page, incident: Json, unfolded: bool) -> None:
    victims = [entry for entry in entries(incident.get("victims")) if isinstance(entry, dict)]
    if not victims:
        return
    total = sum(len(whole_numbers(entry.get("ranks"))) for entry in victims)
    page.section(f"victims ({total})", "enter: fold" if unfolded else "enter: unfold")
    for entry in victims:
        ranks = whole_numbers(entry.get("ranks"))
        kind = clean(entry.get("category") or "other").replace("_", " ")
        page.add(
            ((f"  {len(ranks):>4} x  ", "text"), (f"{kind}  ", "dim"), (f"rank {plain.ranges(ranks)}", "tag")),
            unfolds=True,
        )
        if unfolded:
            page.prose(str(entry.get("summary") or ""), "dim", 10)


def _next(page: Page, incident: Json, snapshot: Snapshot) -> None:
    page.section("what happens next")
    page.prose(what_next(incident, snapshot), "text")
    page.section("what you can do")
    if incident.get("hint"):
        page.prose(str(incident["hint"]), "text")
    page.add((("  l ", "key"), ("the log of the rank that failed first", "dim")))
    if not snapshot.ended:
        page.add((("  x ", "key"), ("restart, remove or add a node, stop", "dim")))


def what_next(incident: Json, snapshot: Snapshot) -> str:
    """What the cluster does about it, in one or two sentences."""
    if snapshot.ended:
        reason = f": {snapshot.failure}" if snapshot.failure else ""
        return f"The job is over, {snapshot.state} with exit status {snapshot.exit_status}{reason}. q quits."
    if snapshot.plan:
        return snapshot.plan
    later = snapshot.generation is not None and isinstance(incident.get("generation"), int)
    if later and snapshot.generation is not None and snapshot.generation > int(incident["generation"]):
        return f"The group was restarted: generation {snapshot.generation} is {snapshot.state}."
    left = (snapshot.max_restarts or 0) - snapshot.restarts
    return f"The job is {snapshot.state}; {words.count(max(0, left), 'restart')} left of {snapshot.max_restarts or 0}."
