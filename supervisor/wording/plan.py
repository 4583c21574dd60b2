"""What a change of the group leads to, as text: for the screen's question and for `--dry-run`.

In: the status document, the journal, the verb and its nodes. Out: a Plan. The coordinator's own state machine says what
follows; what cannot be known is called unknown.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from remote_agent.coordinator.preview import Preview, preview
from remote_agent.snapshots.choice import NOTHING_SKIPPED, Skipped, choose, slot_of
from remote_agent.text.names import count
from remote_agent.wire.events import EventType
from supervisor.wording.events import phases_by_generation, snapshot_step
from supervisor.wording.values import one_line

if TYPE_CHECKING:
    from remote_agent.coordinator.state import State
    from remote_agent.wire.documents import JournalEvent, SnapshotStatus, Status

# At most this many runs of ranks with new numbers are listed.
MAX_RUNS: Final = 6
# At most this many snapshots of one step are named.
MAX_PATHS: Final = 4


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


def plan(op: str, names: Sequence[str], status: Status, events: Sequence[JournalEvent], snapshot: str = "") -> Plan:
    """Return what `op` (restart, remove, add) of these nodes leads to; `snapshot`: from which the group resumes."""
    seen = preview(status, op, names)
    before, after = seen.before, seen.after
    facts = [
        ("Refused", f"{no.message}; {no.hint}" if no.hint else no.message) for no in seen.replies if not no.accepted
    ]
    facts += [
        ("World", f"{_size(before, tuple(before.members))} -> {_size(after, seen.members)}"),
        ("Ranks", _moves(before, after, op)),
        ("Roles", _roles(seen)),
        ("Minimum", _minimum(status, len(seen.members))),
    ]
    joining = [name for name in seen.members if name not in before.members and name not in names]
    if joining:
        facts.append(("Joins", f"{', '.join(joining)} ({'spare' if len(joining) == 1 else 'spares'})"))
    facts += [("Lost", _lost_steps(status, events, snapshot)), ("Downtime", _downtime(events))]
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
        first, then = next(iter(seen.before.members)), seen.members[0]
        roles.append(f"rank 0 stays on {first}" if first == then else f"rank 0 moves from {first} to {then}")
    return "; ".join(roles) or "unknown"


def _minimum(status: Status, members: int) -> str:
    least = status.get("min_nodes")
    if least is None:
        return "unknown"
    if not members:
        return f"too few nodes for a group (min_nodes is {least})"
    if members >= least:
        return f"min_nodes is {least}: still met"
    return f"below min_nodes ({least}): the job does not wait for removed nodes"


def _lost_steps(status: Status, events: Sequence[JournalEvent], snapshot: str) -> str:
    """Return which steps are repeated: those since the snapshots that nodes keep, or the last that a rank reported."""
    ranks = [rank for node in status.get("nodes") or () for rank in node.get("ranks") or ()]
    steps = [step for rank in ranks if (step := rank.get("step")) is not None]
    kept = status.get("snapshots") or ()
    named = next((one for one in kept if one["id"] == snapshot), None)
    if snapshot and named is None:
        return f"unknown: no node has snapshot {snapshot}"
    noted = next((each for each in reversed(events) if each["type"] == EventType.SNAPSHOTS_CHOSEN), None)
    chosen = choose(kept, Skipped.noted(noted["detail"]) if noted else NOTHING_SKIPPED, named)
    if named is not None or any(one["step"] is not None for one in chosen):
        return _resumes(chosen, kept, named, max(steps, default=None))
    saved = [step for rank in ranks if (step := (rank.get("progress") or {}).get("saved")) is not None]
    if not steps:
        return "unknown: no rank has reported a step yet"
    if not saved:
        return f"unknown: at step {max(steps):,}, and no rank has reported a snapshot"
    lost = count(max(0, max(steps) - max(saved)), "step")
    return f"{lost}: at step {max(steps):,}; last snapshot: step {max(saved):,}"


def _resumes(
    chosen: Sequence[SnapshotStatus], kept: Sequence[SnapshotStatus], named: SnapshotStatus | None, at_step: int | None
) -> str:
    """Return from which steps the series resume, how many steps that loses, and which series cannot."""
    newest_first = sorted(chosen, key=lambda one: -1 if one["step"] is None else one["step"], reverse=True)
    paths: dict[str, list[str]] = {}
    for one in newest_first:
        step = snapshot_step(one)
        paths.setdefault(f"step {step}" if step else "an unknown step", []).append(one_line(one["path"]))
    text = "resumes from " + ", ".join(f"{step} ({_some(names)})" for step, names in paths.items())
    base = named or newest_first[0]
    if at_step is None:
        text += ", no rank has reported a step yet"
    elif base["step"] is not None:
        about = "" if base.get("exact", True) else "about "
        text += f", {about}{count(max(0, at_step - base['step']), 'step')} lost"
    slots = {slot_of(one["path"]) for one in chosen}
    hidden = {slot: one["path"] for one in kept if (slot := slot_of(one["path"])) not in slots}
    if hidden:
        text += f"; {_some([one_line(path) for path in hidden.values()])} {'is' if len(hidden) == 1 else 'are'} hidden:"
        text += " no version is old enough"
    return text


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_PATHS} more" if len(names) > MAX_PATHS else ""
    return ", ".join(names[:MAX_PATHS]) + more


def _downtime(events: Sequence[JournalEvent]) -> str:
    # A restart that somebody asks for has no failure to detect.
    times = [
        sum(value for name, value in phases.items() if name != "detect") / 1000
        for generation, phases in phases_by_generation(events).items()
        if generation > 0
    ]
    if not times:
        return "unknown: this job has not restarted yet"
    return f"about {statistics.median(times):.1f} s (from {count(len(times), 'earlier restart')})"
