"""What goes into a verdict and what comes out.

In: what each rank left behind, what is known of its node. Out: the incident of the contract.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from remote_agent.diagnose.exits import decode_exit
from remote_agent.diagnose.shapes import lines_of

# Ranks named one by one in a sentence; more are written as ranges.
_MAX_NODES_NAMED = 4


@dataclasses.dataclass(frozen=True)
class RankEvidence:
    """What one rank left behind. rank None: text that belongs to no rank (launcher, scheduler, kernel)."""

    rank: int | None
    node: str | None = None
    local_rank: int | None = None
    exit: Mapping[str, Any] | None = None
    """The engine's Exit, t_ns already corrected to the coordinator's clock. None: the rank lives, or nobody knows."""
    error: Mapping[str, Any] | None = None
    """{message, callstack, timestamp_ns} of error.json; the stamp is the node's own."""
    tail: str = ""
    """The last lines of stderr, or a whole log."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Paths by stream: stdout, stderr, nccl, error."""
    tail_line: int | None = None
    """Number of the tail's first line in its file, from 1; None: unknown."""
    places: Sequence[tuple[str | None, int | None]] = ()
    """File and number of each line of a tail that was put together from several files; else `files`, `tail_line`."""
    clock_shift_ns: int = 0
    """What turns a stamp of this node into one of the coordinator's clock."""
    when: Callable[[Sequence[str], int], tuple[int, int] | None] | None = None
    """Tells when a line was written, and within how many ns, where nobody saw how the process ended."""

    @classmethod
    def of_exit(
        cls,
        exit: Mapping[str, Any],  # noqa: A002  the engine's word
        node: str,
        files: Mapping[str, str] | None = None,
        clock_shift_ns: int = 0,
    ) -> RankEvidence:
        """Return the evidence in an engine's Exit, whose t_ns has been corrected by clock_shift_ns."""
        tail = str(exit.get("tail") or "")
        lines = exit.get("stderr_lines")
        first = None if lines is None else max(1, int(lines) - len(lines_of(tail)) + 1)
        places: list[tuple[str | None, int | None]] = []
        if exit.get("nccl"):
            known = files or {}
            said = lines_of(str(exit["nccl"]))
            own = [None if first is None else first + index for index in range(len(lines_of(tail)) if tail else 0)]
            places = [(known.get("nccl"), None)] * len(said) + [(known.get("stderr"), number) for number in own]
            tail = "\n".join([*said, *([tail] if tail else [])])
        return cls(
            rank=exit["rank"],
            node=node,
            local_rank=exit.get("local_rank"),
            exit=exit,
            error=exit.get("error"),
            tail=tail,
            files=files or {},
            tail_line=first,
            places=places,
            clock_shift_ns=clock_shift_ns,
        )

    def place(self, index: int) -> tuple[str | None, int | None]:
        """Return file and number of a line of the tail, counted from 0."""
        if self.places:
            return self.places[min(index, len(self.places) - 1)]
        return self.files.get("stderr"), None if self.tail_line is None else self.tail_line + index

    @property
    def stopped_by_us(self) -> bool:
        """True when the supervisor ended this rank."""
        return bool(self.exit and self.exit.get("stopped_by_us"))


@dataclasses.dataclass(frozen=True)
class Context:
    """What is known beside the ranks. Times are ns of the coordinator's clock."""

    generation: int = 0
    incident_id: int = 1
    world_size: int | None = None
    ranks_per_node: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    lost_nodes: Mapping[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    """By name: time of the last sign of life, reason. (The time of detection would be too late to order by.)"""
    now_ns: int | None = None
    hang: Mapping[str, Any] | None = None
    """The contract's `missing` of the hang that this group was in when it ended."""
    clock_error_ms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By node: how far its corrected stamps may be off."""
    host_notes: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """By node: lines of the kernel log, of the memory cgroup's counters and on free space, from around the failure."""

    def ranks_of(self, node: str) -> list[int]:
        """Return the ranks of a node, in order."""
        return sorted(self.ranks_per_node.get(node, ()))

    def node_of(self, rank: int) -> str | None:
        """Return the node of a rank, None where that is not known."""
        return next((name for name, ranks in self.ranks_per_node.items() if rank in ranks), None)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A line to look at; line counts from 1, None: unknown."""

    node: str | None
    rank: int | None
    file: str | None
    line: int | None
    text: str


@dataclasses.dataclass(frozen=True)
class Victims:
    """Ranks that suffered the same from the cause."""

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
    culprit_ranks: tuple[int, ...]
    culprit_node: str | None
    confidence: str
    summary: str
    evidence: tuple[Evidence, ...]
    traceback: str | None
    exit_code: int | None
    exit_signal: str | None
    hint: str
    victims: tuple[Victims, ...]
    missing: Mapping[str, Any] | None
    signature: str
    """The same for the same failure in another generation or on another rank."""

    def to_json(self) -> dict[str, Any]:
        """Return the incident object of the contract."""
        return {
            "id": self.id,
            "generation": self.generation,
            "time": None if self.time_ns is None else iso_time(self.time_ns),
            "category": self.category,
            "scope": self.scope,
            "culprit_ranks": list(self.culprit_ranks),
            "culprit_node": self.culprit_node,
            "confidence": self.confidence,
            "summary": self.summary,
            "evidence": [dataclasses.asdict(each) for each in self.evidence],
            "traceback": self.traceback,
            "exit": {"code": self.exit_code, "signal": self.exit_signal},
            "hint": self.hint,
            "victims": [{**dataclasses.asdict(each), "ranks": list(each.ranks)} for each in self.victims],
            "missing": None if self.missing is None else dict(self.missing),
        }


def iso_time(t_ns: int) -> str:
    """Return a time as 2026-11-20T10:00:00.123Z."""
    seconds, rest = divmod(t_ns, 1_000_000_000)
    stamp = datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc)
    return f"{stamp:%Y-%m-%dT%H:%M:%S}.{rest // 1_000_000:03d}Z"


def ranges(numbers: Iterable[int]) -> str:
    """Return `0-2,5` for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as people write them: rank 3, ranks 0-3,5."""
    return ("rank " if len(set(ranks)) == 1 else "ranks ") + ranges(ranks)


def name_nodes(nodes: Sequence[str | None]) -> str:
    """Return the nodes in parentheses, behind a blank; nothing when none is known."""
    known = list(dict.fromkeys(node for node in nodes if node))
    if not known:
        return ""
    return f" ({', '.join(known)})" if len(known) <= _MAX_NODES_NAMED else f" ({len(known)} nodes)"


def describe(incident: Incident) -> str:
    """Return the incident as a few lines for people: summary, exit, hint, victims."""
    lines = [incident.summary]
    if incident.exit_code is not None or incident.exit_signal is not None:
        lines.append(f"exit: {decode_exit(incident.exit_code, incident.exit_signal)}")
    if incident.hint:
        lines.append(f"hint: {incident.hint}")
    lines.extend(f"victims: {name_ranks(each.ranks)}: {each.summary}" for each in incident.victims if each.ranks)
    return "\n".join(lines)
