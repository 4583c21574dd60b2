"""The generations of a job, folded from its journal: why each began and ended, and how long each restart took.

In: event objects of the contract, in order. Out: one Run per generation, oldest first. Pure.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from remote_agent.text.names import by_value
from remote_agent.wire.events import PHASE_EVENTS, EventType, phases_of
from supervisor.wording.events import CAUSES, cause_text, starts_text, still_there, tree_text
from supervisor.wording.values import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from remote_agent.wire.documents import (
        AskedDetail,
        GenerationRunningDetail,
        GenerationStartedDetail,
        JournalEvent,
    )


_ENDS: Final[dict[str, tuple[str, str]]] = {
    EventType.JOB_SUCCEEDED: ("all ranks succeeded", "done"),
    EventType.JOB_FAILED: ("the job failed", "bad"),
    EventType.JOB_STOPPED: ("stopped by an operator", "warn"),
}


@dataclasses.dataclass
class Run:
    """One generation."""

    number: int
    began_at: str
    began_by: str
    """The cause in a word: launch, failure, operator …"""
    because: str
    """The cause in a sentence."""
    world_size: int | None
    nodes: tuple[str, ...]
    restarts: int
    """Restarts charged so far."""
    env: dict[str, str]
    tree: str = ""
    """Its work tree, in words; "" for that of the launch."""
    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    """Milliseconds; empty until it runs."""
    starts: str = ""
    """Whether its ranks were started warm, in words; "" where no node says."""
    ended_at: str = ""
    how: str = ""
    """How it ended, "" while it has not."""
    role: str = "text"

    @property
    def took_ms(self) -> float | None:
        """The whole restart in milliseconds."""
        return sum(self.phases.values()) if self.phases else None


class Runs:
    """The generations so far; each event is read once."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.runs: list[Run] = []
        """Oldest first."""
        self._read: list[JournalEvent] = []
        self._versions: dict[str, dict[str, str]] = {}
        self._cause = ""
        self._trees: dict[str, str] = {}
        """By digest: a work tree in words."""
        self._notes: dict[str, list[str]] = {}
        """By type of event: notes since the newest generation began."""

    def follow(self, events: Sequence[JournalEvent]) -> None:
        """Read the new events of a journal, or one that has changed."""
        if still_there(self._read, events) < len(self._read):
            self._start()
        for event in events[len(self._read) :]:
            self._take(event)
            self._read.append(event)

    def differing(self) -> list[tuple[str, dict[str, tuple[str, ...]]]]:
        """Return the facts in which nodes differ: the fact, and the nodes by value, most nodes first."""
        differing = []
        for name in dict.fromkeys(key for facts in self._versions.values() for key in facts):
            ordered = by_value((node, str(facts.get(name))) for node, facts in self._versions.items())
            if len(ordered) > 1:
                differing.append((name, {value: tuple(nodes) for value, nodes in ordered}))
        return differing

    def _take(self, event: JournalEvent) -> None:
        facts, kind = event["detail"], event["type"]
        if kind == EventType.NODE_READY:
            self._versions[str(event["node"])] = facts.get("versions") or {}
        if kind == EventType.TREE_CHANGED:
            self._trees[str(facts.get("digest"))] = f"{tree_text(facts)} at {clock(event.get('time'))}"
        note = _NOTES.get(kind)
        if note is not None and not facts.get("preliminary"):
            self._notes.setdefault(kind, []).append(note(event, facts))
        if kind == EventType.GENERATION_STARTED:
            self._started(event, facts)
        elif not self.runs:
            return
        elif kind in PHASE_EVENTS:
            self._running(facts)
        elif kind == EventType.GENERATION_STOPPED:
            self._cause = facts.get("cause") or ""
            self.runs[-1].ended_at = event["time"]
            self._note_end()
        elif kind in _ENDS:
            self._over(event, kind, facts)
        elif self.runs[-1].ended_at and note is not None:
            # The incident and the lost nodes follow the stop.
            self._note_end()

    def _started(self, event: JournalEvent, facts: GenerationStartedDetail) -> None:
        last = self.runs[-1] if self.runs else None
        self.runs.append(
            Run(
                number=event["generation"],
                began_at=event["time"],
                began_by=self._word() if last else "launch",
                because=f"after {last.how}" if last else "the job was launched",
                world_size=facts.get("world_size"),
                nodes=tuple(one["node"] for one in facts["members"]),
                restarts=facts["restarts"],
                env=facts.get("env") or {},
                tree=self._trees.get(str(facts.get("tree")), ""),
            )
        )
        self._cause, self._notes = "", {}

    def _running(self, facts: GenerationRunningDetail) -> None:
        run = self.runs[-1]
        run.phases = {**run.phases, **phases_of(facts)}
        run.starts = starts_text(facts["starts"]) if facts.get("starts") else run.starts

    def _word(self) -> str:
        known = CAUSES.get(self._cause)
        return known.word if known else self._cause or "takeover"

    def _note_end(self) -> None:
        run = self.runs[-1]
        cause = CAUSES.get(self._cause)
        run.role = "bad" if cause is not None and cause.is_bad else "warn"
        kinds = cause.events if cause is not None else ()
        notes = next((self._notes[kind] for kind in kinds if kind in self._notes), [])
        run.how = "; ".join(notes[-2:]) or cause_text(self._cause) or "its coordinator changed"

    def _over(self, event: JournalEvent, kind: str, facts: AskedDetail) -> None:
        run = self.runs[-1]
        text, role = _ENDS[kind]
        run.ended_at = run.ended_at or event["time"]
        run.role = role
        if kind == EventType.JOB_FAILED:
            text = str(facts.get("reason") or text)
        run.how = text


def _node_note(word: str) -> Callable[[JournalEvent, Any], str]:
    def note(event: JournalEvent, facts: AskedDetail) -> str:
        who = f" by {facts['operator']}" if facts.get("operator") else ""
        why = f": {facts['reason']}" if facts.get("reason") and not who and word != "removed" else ""
        return f"{event.get('node')} {word}{who}{why}"

    return note


_NOTES: Final[dict[str, Callable[[JournalEvent, Any], str]]] = {
    EventType.INCIDENT: lambda event, facts: str(facts.get("summary") or "a failure"),
    EventType.RANK_FAILED: lambda event, facts: f"rank {event.get('rank')} failed on {event.get('node')}",
    EventType.RESTART_REQUESTED: lambda event, facts: f"restart by {facts.get('operator') or 'an operator'}",
    EventType.TREE_CHANGED: lambda event, facts: f"work tree {tree_text(facts)}",
    EventType.NODE_LOST: _node_note("lost"),
    EventType.AGENT_LOST: _node_note("lost its agent"),
    EventType.NODE_REMOVED: _node_note("removed"),
    EventType.NODE_ADDED: _node_note("added"),
    EventType.NODE_READY: _node_note("is ready"),
}


def bar(phases: dict[str, float], longest_ms: float, width: int) -> list[tuple[str, int]]:
    """Return the phases with their cells in a bar; the longest restart fills the width."""
    total = sum(phases.values())
    if total <= 0 or longest_ms <= 0:
        return []
    cells = max(1, round(width * total / longest_ms))
    parts, elapsed, used = [], 0.0, 0
    for name, value in phases.items():
        elapsed += value
        end = round(cells * elapsed / total)
        parts.append((name, end - used))
        used = end
    return [(name, size) for name, size in parts if size]
