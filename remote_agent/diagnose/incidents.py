"""Incidents: the result of a verdict, and what a journal records of them.

In: the fields of one failure; journal records. Out: the contract's incident objects.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable
from typing import TYPE_CHECKING

from remote_agent.wire.events import ENDED_EVENTS, EventType, label

if TYPE_CHECKING:
    from remote_agent.wire.documents import IncidentDocument, JournalEvent, MissingRanks

OPEN, HEALED, OVER = "open", "healed", "over"
# These events end an incident or a hang, or add to it.
_CHANGES = frozenset(
    {EventType.LAST_OUTPUT, EventType.HANG_OVER, EventType.GENERATION_STOPPED, EventType.INCIDENT_HEALED, *ENDED_EVENTS}
)


@dataclasses.dataclass(frozen=True)
class EvidenceLine:
    """A line that shows the failure; `line` counts from 1, None: unknown."""

    node: str | None
    rank: int | None
    file: str | None
    line: int | None
    text: str


@dataclasses.dataclass(frozen=True)
class Victims:
    """Ranks that failed alike as a consequence."""

    ranks: tuple[int, ...]
    category: str
    summary: str


@dataclasses.dataclass(frozen=True)
class Incident:
    """One failure with its verdict. `to_json` is the contract's object."""

    id: int
    generation: int
    time_ns: int | None
    category: str
    scope: str
    confidence: str
    summary: str
    hint: str
    fingerprint: str
    """Equal for the same failure in another generation or on another rank."""
    culprit_ranks: tuple[int, ...] = ()
    culprit_node: str | None = None
    evidence: tuple[EvidenceLine, ...] = ()
    traceback: str | None = None
    exit_code: int | None = None
    exit_signal: str | None = None
    victims: tuple[Victims, ...] = ()
    missing: MissingRanks | None = None
    at_least: bool = False
    """Further ranks may be affected like the culprits: they were stopped before they could show it."""
    why: tuple[str, ...] = ()
    """The claims that decided, in order, and the rule; empty for a hang."""

    def to_json(self) -> IncidentDocument:
        """Return the incident object of the contract."""
        return {
            "id": self.id,
            "generation": self.generation,
            "time": None if self.time_ns is None else iso_time(self.time_ns),
            "category": self.category,
            "scope": self.scope,
            "culprit_ranks": list(self.culprit_ranks),
            "culprit_node": self.culprit_node,
            "at_least": self.at_least,
            "confidence": self.confidence,
            "summary": self.summary,
            "evidence": [
                {"node": one.node, "rank": one.rank, "file": one.file, "line": one.line, "text": one.text}
                for one in self.evidence
            ],
            "traceback": self.traceback,
            "exit": {"code": self.exit_code, "signal": self.exit_signal},
            "hint": self.hint,
            "victims": [
                {"ranks": list(one.ranks), "category": one.category, "summary": one.summary} for one in self.victims
            ],
            "missing": None if self.missing is None else self.missing.copy(),
            "why": list(self.why),
        }


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
        "collective": collective,
        "seq": seq,
        "waiting": sorted(waiting),
        "missing": sorted(missing),
        "stacks": places,
    }


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
    The last output of a lost node's ranks becomes evidence of the failure of that generation, whenever it arrives.
    A hang also has `ongoing`: false once its ranks made progress again, or were stopped. One whose group is still being
    stopped has `preliminary`; a record with the same id replaces it.
    """
    kind, detail = record["type"], record["detail"]
    if kind == EventType.INCIDENT:
        found: IncidentDocument = detail
        opened: IncidentDocument = {**found, "state": OPEN, "ended_at": None, "over": None}
        opened.pop("fingerprint", None)
        return opened
    if incident is not None and kind == EventType.LAST_OUTPUT:
        is_its_own = incident["generation"] == record["generation"] and "ongoing" not in incident
        lines = [each for each in detail["evidence"] if each not in incident["evidence"]] if is_its_own else []
        return {**incident, "evidence": [*incident["evidence"], *lines]}
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
