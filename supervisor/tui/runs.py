"""The generations of a job, folded from its journal: why each began and ended, and how long each restart took.

In: event objects of the contract, in order. Out: one Run per generation, oldest first. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from supervisor.plain import phases_of, tree_text
from supervisor.tui.cells import entries
from supervisor.tui.words import clock
from supervisor.usage import part

if TYPE_CHECKING:
    from supervisor.tui.source import Json

# What made a group stop, in a word that also says why the next one began.
CAUSES: Final = {
    "failure": "failure",
    "node_lost": "node lost",
    "restart": "operator",
    "removed": "removal",
    "added": "addition",
    "returned": "return",
    "joined": "new node",
    "quorum": "no quorum",
    "paused": "pause",
    "stop": "stop",
}
_ENDS: Final = {
    "job_succeeded": ("every rank ended with 0", "done"),
    "job_failed": ("the job failed", "bad"),
    "job_stopped": ("an operator stopped the job", "warn"),
}


@dataclasses.dataclass
class Run:
    """One generation."""

    number: int
    began_at: str
    began_by: str
    """In a word: launch, failure, operator …"""
    because: str
    """In a sentence."""
    world_size: int | None
    nodes: tuple[str, ...]
    restarts: int
    """Charged so far."""
    env: dict[str, str]
    tree: str = ""
    """What is told of its work tree, "" where it is that of the launch."""
    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    """Milliseconds; empty until it runs."""
    ended_at: str = ""
    how: str = ""
    """How it ended, "" while it has not."""
    role: str = "text"

    @property
    def took_ms(self) -> float | None:
        """The whole restart in milliseconds."""
        return sum(self.phases.values()) if self.phases else None


class Runs:
    """The generations so far; every event is looked at once."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        """Oldest first."""
        self.taken = 0
        """Events so far."""
        self._versions: dict[str, Json] = {}
        self._cause = ""
        self._trees: dict[str, str] = {}
        """By digest: what the journal tells of work trees."""
        self._notes: dict[str, list[str]] = {}
        """What was told since the newest generation began, by type of event."""

    def follow(self, events: Sequence[Json]) -> None:
        """Take in what is new of a journal."""
        for event in events[self.taken :]:
            self._take(event)
        self.taken = len(events)

    def differing(self) -> list[tuple[str, dict[str, tuple[str, ...]]]]:
        """What nodes told of themselves, where it differs: fact, and the nodes by value, most nodes first."""
        found = []
        for name in dict.fromkeys(key for facts in self._versions.values() for key in facts):
            values: dict[str, list[str]] = {}
            for node, facts in self._versions.items():
                values.setdefault(str(facts.get(name)), []).append(node)
            if len(values) > 1:
                ordered = sorted(values.items(), key=lambda item: -len(item[1]))
                found.append((name, {value: tuple(nodes) for value, nodes in ordered}))
        return found

    def _take(self, event: Json) -> None:
        facts = part(event, "detail")
        kind = str(event.get("type"))
        if kind == "node_ready":
            self._versions[str(event.get("node"))] = part(facts, "versions")
        if kind == "tree_changed":
            self._trees[str(facts.get("digest"))] = f"{tree_text(facts)} at {clock(event.get('time'))}"
        teller = _NOTES.get(kind)
        if teller is not None:
            self._notes.setdefault(kind, []).append(teller(event, facts))
        if kind == "generation_started":
            self._started(event, facts)
        elif not self.runs:
            return
        elif kind == "generation_running":
            self.runs[-1].phases = phases_of(facts)
        elif kind == "generation_stopped":
            self._cause = str(facts.get("cause") or "")
            self.runs[-1].ended_at = str(event.get("time") or "")
            self._tell_end()
        elif kind in _ENDS:
            self._over(event, kind, facts)
        elif self.runs[-1].ended_at and teller is not None:
            # The verdict, and the nodes that it cost, come after the stop.
            self._tell_end()

    def _started(self, event: Json, facts: Json) -> None:
        members = [str(one.get("node")) for one in entries(facts.get("members")) if isinstance(one, dict)]
        last = self.runs[-1] if self.runs else None
        number = _int(event.get("generation"))
        self.runs.append(
            Run(
                number=len(self.runs) if number is None else number,
                began_at=str(event.get("time") or ""),
                began_by=CAUSES.get(self._cause, self._cause or "takeover") if last else "launch",
                because=f"after {last.how}" if last else "the job was launched",
                world_size=_int(facts.get("world_size")),
                nodes=tuple(members),
                restarts=_int(facts.get("restarts")) or 0,
                env=part(facts, "env"),
                tree=self._trees.get(str(facts.get("tree")), ""),
            )
        )
        self._cause, self._notes = "", {}

    def _tell_end(self) -> None:
        run = self.runs[-1]
        run.role = "bad" if self._cause in ("failure", "node_lost", "quorum") else "warn"
        told = next((self._notes[kind] for kind in _BY_CAUSE.get(self._cause, ()) if kind in self._notes), [])
        run.how = (
            "; ".join(told[-2:]) or _PLAIN.get(self._cause) or CAUSES.get(self._cause) or "its coordinator changed"
        )

    def _over(self, event: Json, kind: str, facts: Json) -> None:
        run = self.runs[-1]
        text, role = _ENDS[kind]
        run.ended_at = run.ended_at or str(event.get("time") or "")
        run.role = role
        if kind == "job_failed":
            text = str(facts.get("reason") or text)
        run.how = text


def _int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _named(word: str) -> Callable[[Json, Json], str]:
    def tell(event: Json, facts: Json) -> str:
        who = f" by {facts['operator']}" if facts.get("operator") else ""
        why = f": {facts['reason']}" if facts.get("reason") and not who and word != "removed" else ""
        return f"{event.get('node')} {word}{who}{why}"

    return tell


_NOTES: Final[dict[str, Callable[[Json, Json], str]]] = {
    "incident": lambda event, facts: str(facts.get("summary") or "a failure"),
    "rank_failed": lambda event, facts: f"rank {event.get('rank')} failed on {event.get('node')}",
    "restart_requested": lambda event, facts: f"restart by {facts.get('operator') or 'an operator'}",
    "tree_changed": lambda event, facts: f"work tree {tree_text(facts)}",
    "node_lost": _named("lost"),
    "agent_lost": _named("lost its agent"),
    "node_removed": _named("removed"),
    "node_added": _named("added"),
    "node_ready": _named("is ready"),
}
_BY_CAUSE: Final = {
    "failure": ("incident", "rank_failed"),
    "node_lost": ("incident", "node_lost", "agent_lost"),
    "restart": ("tree_changed", "restart_requested"),
    "removed": ("node_removed",),
    "added": ("node_added",),
    "returned": ("node_ready",),
    "joined": ("node_ready",),
}
_PLAIN: Final = {
    "failure": "a rank failed",
    "node_lost": "a node was lost",
    "removed": "a node is removed",
    "quorum": "less than half of the group was in reach",
    "paused": "the coordinator stood still",
    "stop": "an operator stops the job",
}


def bar(phases: dict[str, float], longest_ms: float, width: int) -> list[tuple[str, int]]:
    """Phases and the cells that each takes of a bar: the longest restart fills the width."""
    total = sum(phases.values())
    if total <= 0 or longest_ms <= 0:
        return []
    cells = max(1, round(width * total / longest_ms))
    found, sofar, used = [], 0.0, 0
    for name, value in phases.items():
        sofar += value
        upto = round(cells * sofar / total)
        found.append((name, upto - used))
        used = upto
    return [(name, size) for name, size in found if size]
