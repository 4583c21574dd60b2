"""What a change of the group leads to, as text: for the screen's question and for `--dry-run`.

In: the status document, the journal, the verb and its nodes. Out: a Plan. The coordinator's own state machine says what
follows; what cannot be known is called unknown.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from remote_agent.coordinator.preview import Preview, preview
from remote_agent.text.names import count
from supervisor.wording.events import phases_by_generation

if TYPE_CHECKING:
    from remote_agent.coordinator.state import State

Json = Mapping[str, Any]
# Runs of ranks with new numbers that are listed.
MAX_RUNS: Final = 6


@dataclasses.dataclass(frozen=True)
class Plan:
    """The next group."""

    generation: int | None
    """The generation for which the plan was made: agents refuse the request once that is over."""
    nodes: tuple[str, ...]
    """The nodes of the next group, in the order of their ranks."""
    facts: tuple[tuple[str, str], ...]
    """A title and a sentence each."""

    def lines(self) -> list[str]:
        """Return the facts as text."""
        room = max((len(title) for title, _ in self.facts), default=0)
        return [f"{title:<{room}}  {text}" for title, text in self.facts]


def plan(op: str, names: Sequence[str], status: Json, events: Sequence[Json], snapshot: str = "") -> Plan:
    """Return what `op` (restart, remove, add) of these nodes leads to; `snapshot`: from which the group resumes."""
    seen = preview(status, op, names)
    before, after = seen.before, seen.after
    facts = [
        ("Refused", f"{no.message}; {no.hint}" if no.hint else no.message) for no in seen.replies if not no.accepted
    ]
    facts += [
        ("World", f"{_size(before, before.members)} -> {_size(after, seen.members)}"),
        ("Ranks", _moves(before, after, op)),
        ("Roles", _roles(seen)),
        ("Minimum", _minimum(status, len(seen.members))),
    ]
    joining = [name for name in seen.members if name not in before.members and name not in names]
    if joining:
        facts.append(("Joins", f"{', '.join(joining)} ({'spare' if len(joining) == 1 else 'spares'})"))
    facts += [("Lost", _lost_steps(status, snapshot)), ("Downtime", _downtime(events))]
    return Plan(status.get("generation"), seen.members, tuple(facts))


def _size(state: State, members: Sequence[str]) -> str:
    if not members:
        return "no group"
    unknown = [name for name in members if not state.nodes[name].nproc]
    more = f" and those of {', '.join(unknown)}" if unknown else ""
    return f"{count(len(state.ranks), 'rank')}{more} on {count(len(members), 'node')}"


def _moves(before: State, after: State, op: str) -> str:
    """Return which ranks get other numbers, as runs of neighbours."""
    numbers = {(rank.node, rank.local_rank): rank.rank for rank in after.ranks.values()}
    runs: list[tuple[int, int, int]] = []
    for rank in sorted(before.ranks):
        there = numbers.get((before.ranks[rank].node, before.ranks[rank].local_rank), rank)
        if runs and rank == runs[-1][1] + 1 and there - rank == runs[-1][2]:
            runs[-1] = (runs[-1][0], rank, there - rank)
        elif there != rank:
            runs.append((rank, rank, there - rank))
    if not runs:
        return "all keep their numbers" if op != "remove" else "those that stay keep their numbers"
    text = ", ".join(f"{_range(first, last)} -> {_range(first + by, last + by)}" for first, last, by in runs[:MAX_RUNS])
    return text + (f", and {len(runs) - MAX_RUNS} more runs" if len(runs) > MAX_RUNS else "")


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _roles(seen: Preview) -> str:
    roles = []
    old, new = seen.before.me, seen.after.me
    if old:
        roles.append(f"{old} stays the coordinator" if old == new else f"the coordinator moves from {old} to {new}")
    if seen.before.members and seen.members:
        first, then = seen.before.members[0], seen.members[0]
        roles.append(f"rank 0 stays on {first}" if first == then else f"rank 0 moves from {first} to {then}")
    return "; ".join(roles) or "unknown"


def _minimum(status: Json, members: int) -> str:
    least = status.get("min_nodes")
    if least is None:
        return "unknown"
    if not members:
        return f"too few nodes for a group (min_nodes is {least})"
    if members >= least:
        return f"min_nodes is {least}: still met"
    return f"below min_nodes ({least}): the job does not wait for removed nodes"


def _lost_steps(status: Json, snapshot: str) -> str:
    """Return which steps are repeated: all since the snapshot that nodes keep, or the last that a rank has reported."""
    ranks = [rank for node in status.get("nodes") or () for rank in node.get("ranks") or ()]
    steps = [rank["step"] for rank in ranks if rank.get("step") is not None]
    named = status.get("snapshots") or ()
    kept = [one for one in named if (one["id"] == snapshot if snapshot else not one.get("skipped"))]
    if snapshot and not kept:
        return f"not known: no node has snapshot {snapshot}"
    if kept and kept[-1].get("step") is not None:
        step, path = kept[-1]["step"], kept[-1]["path"]
        lost = f"{count(max(0, max(steps) - step), 'step')} lost" if steps else "no rank has reported a step yet"
        return f"resumes from step {step:,} ({path}), {lost}"
    saved = [step for rank in ranks if (step := (rank.get("progress") or {}).get("saved")) is not None]
    if not steps:
        return "unknown: no rank has reported a step yet"
    if not saved:
        return f"unknown: at step {max(steps):,}, and no rank has reported a snapshot"
    lost = count(max(0, max(steps) - max(saved)), "step")
    return f"{lost}: at step {max(steps):,}; last snapshot: step {max(saved):,}"


def _downtime(events: Sequence[Json]) -> str:
    # A restart that somebody asks for has no failure to detect.
    times = [
        sum(value for name, value in phases.items() if name != "detect") / 1000
        for generation, phases in phases_by_generation(events).items()
        if generation > 0
    ]
    if not times:
        return "unknown: this job has not restarted yet"
    return f"about {statistics.median(times):.1f} s (from {count(len(times), 'earlier restart')})"
