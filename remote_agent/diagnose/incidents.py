"""Incidents: the result of a verdict, and what a journal records of them.

In: the fields of one failure; journal records. Out: the contract's incident objects.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.text.shapes import clip
from remote_agent.wire.events import ENDED_EVENTS, EventType, label

if TYPE_CHECKING:
    from remote_agent.diagnose.evidence import JobContext
    from remote_agent.wire.documents import EvidenceEntry, ExitStatus, IncidentDocument, JournalEvent, MissingRanks

OPEN, HEALED, OVER = "open", "healed", "over"
# Of a lost node's ranks, so many show their last line.
MAX_LAST_LINES = 12
# These events end an incident or a hang.
_CHANGES = frozenset({EventType.HANG_OVER, EventType.GENERATION_STOPPED, EventType.INCIDENT_HEALED, *ENDED_EVENTS})


class EvidenceLine(NamedTuple):
    """A line that shows the failure; `line` counts from 1, None: unknown."""

    node: str | None
    rank: int | None
    file: str | None
    line: int | None
    text: str


def incident(
    context: JobContext,
    *,
    time_ns: int | None,
    category: str,
    scope: str,
    confidence: str,
    summary: str,
    hint: str,
    fingerprint: str,
    ranks: Iterable[int] = (),
    node: str | None = None,
    at_least: bool = False,
    evidence: Iterable[EvidenceLine] = (),
    traceback: str | None = None,
    exit_: ExitStatus | None = None,
    victims: Iterable[tuple[Sequence[int], str, str]] = (),
    missing: MissingRanks | None = None,
    why: Sequence[str] = (),
) -> IncidentDocument:
    """Return the contract's object of one failure: nobody else makes one.

    fingerprint: equal for the same failure in another generation or on another rank; at_least: further ranks may be
    affected like these, but were stopped before they could show it; victims: ranks, category and summary of those
    that failed alike as a consequence; why: the claims that decided, in order, and the rule; empty for a hang.
    """
    lines: list[EvidenceEntry] = [
        {"node": one.node, "rank": one.rank, "file": one.file, "line": one.line, "text": one.text} for one in evidence
    ]
    return {
        "id": context.incident_id, "generation": context.generation,
        "time": None if time_ns is None else iso_time(time_ns), "category": category, "scope": scope,
        "culprit_ranks": sorted(ranks), "culprit_node": node, "at_least": at_least, "confidence": confidence,
        "summary": clip(summary), "evidence": lines, "traceback": traceback,
        "exit": exit_ or {"code": None, "signal": None}, "hint": hint,
        "victims": [{"ranks": sorted(own), "category": kind, "summary": text} for own, kind, text in victims],
        "missing": missing, "why": list(why), "fingerprint": fingerprint,
    }  # fmt: skip


def missing_ranks(
    collective: str | None,
    seq: int | None,
    waiting: Iterable[int],
    missing: Iterable[int],
    stacks: Iterable[tuple[int, str]] = (),
) -> MissingRanks:
    """Return the contract's object of the ranks for which a collective waits; stacks: the places of some."""
    places = {str(rank): place for rank, place in stacks}
    return {
        "collective": collective, "seq": seq, "waiting": sorted(waiting), "missing": sorted(missing), "stacks": places,
    }  # fmt: skip


def last_lines(node: str, said: Iterable[tuple[int, str]]) -> list[EvidenceEntry]:
    """Return as evidence what the ranks of a lost node had printed last; said: rank and line."""
    return [
        {"node": node, "rank": rank, "file": None, "line": None, "text": f"last output on {node}: {text}"}
        for rank, text in itertools.islice(said, MAX_LAST_LINES)
    ]


def incidents_in(records: Iterable[JournalEvent]) -> list[IncidentDocument]:
    """Return the incidents of a journal, each as it stands after the last record (see `after_event`)."""
    incidents: list[IncidentDocument] = []
    for record in records:
        incidents = incidents_after(incidents, record)
    return incidents


def incidents_after(incidents: list[IncidentDocument], record: JournalEvent) -> list[IncidentDocument]:
    """Return the incidents of a journal after one more record; the same list where it changes nothing."""
    if record["type"] in _CHANGES:
        return [after_event(each, record) or each for each in incidents]
    new = after_event(None, record)
    return incidents if new is None else [*(each for each in incidents if each["id"] != new["id"]), new]


def after_event(incident: IncidentDocument | None, record: JournalEvent) -> IncidentDocument | None:
    """Return the newest incident of a job after one more record of its journal (type, generation, time, detail).

    state: `open` until a group has made a step again, or has run for a minute without showing one (`healed`), or the
    job ends (`over`); ended_at: when that was; over: why.
    A hang also has `ongoing`: false once its ranks made progress again, or were stopped. One whose group is still being
    stopped has `preliminary`; a record with the same id replaces it.
    """
    kind, detail = record["type"], record["detail"]
    if kind == EventType.INCIDENT:
        found: IncidentDocument = detail
        opened: IncidentDocument = {**found, "state": OPEN, "ended_at": None, "over": None}
        opened.pop("fingerprint", None)
        return opened
    if incident is None or kind not in _CHANGES or incident["state"] != OPEN:
        return incident
    changed = incident.copy()
    if incident.get("ongoing"):
        changed.update({"ongoing": False, "over": detail.get("reason") or detail.get("cause")})
    changed.pop("preliminary", None)
    if kind != EventType.GENERATION_STOPPED:
        healed = kind in (EventType.HANG_OVER, EventType.INCIDENT_HEALED, EventType.JOB_SUCCEEDED)
        why = detail.get("reason") if kind == EventType.INCIDENT_HEALED else label(kind)
        changed["state"], changed["ended_at"] = HEALED if healed else OVER, record["time"]
        changed["over"] = changed["over"] or why
    return changed


def iso_time(t_ns: int) -> str:
    """Return a time as 2026-11-20T10:00:00.123Z."""
    seconds, rest = divmod(t_ns, 1_000_000_000)
    stamp = datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc)
    return f"{stamp:%Y-%m-%dT%H:%M:%S}.{rest // 1_000_000:03d}Z"
