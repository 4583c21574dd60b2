"""What a change of membership would lead to, told before it is asked for: in the screen's question and by `--dry-run`.

In: the status document, the journal, the verb and its nodes. Out: a Plan; what cannot be told from them is said to be
unknown, never guessed. The rules are those of `remote_agent.formation`; the agents decide by them, not by a Plan.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from supervisor.plain import count

Json = Mapping[str, Any]
OPS: Final = ("restart", "remove", "add")
# A restart that lasts seconds on the nodes; finding a failure is not part of one that is asked for.
PHASES: Final = ("stop", "rendezvous", "spawn", "main")
Slot = tuple[str, int]
"""A node and a local rank."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The next group."""

    generation: int | None
    """The generation that it was made for: the agents refuse the request once that is over."""
    nodes: tuple[str, ...]
    """The nodes of the next group, in the order of their ranks."""
    facts: tuple[tuple[str, str], ...]
    """What to tell of it: a word and a sentence each."""

    def lines(self) -> list[str]:
        """The facts as text."""
        room = max((len(name) for name, _ in self.facts), default=0)
        return [f"{name:<{room}}  {text}" for name, text in self.facts]


def plan(op: str, names: Sequence[str], status: Json, events: Sequence[Json]) -> Plan:
    """Return what `op` (restart, remove, add) of these nodes leads to."""
    members = (one for one in _nodes(status) if one.get("group_rank") is not None and one.get("ranks"))
    before = sorted(members, key=_group_rank)
    after = _choose(op, names, status)
    old, new = _slots(before), _slots(after)
    facts = [
        ("World", f"{_size(old, before)} -> {_size(new, after)}"),
        ("Ranks", _moves(old, new, op)),
        ("Roles", _roles(op, names, status, before, after)),
        ("Minimum", _minimum(status, len(after))),
    ]
    kept = {str(one["name"]) for one in before}
    spares = [str(one["name"]) for one in after if one["name"] not in kept and one["name"] not in names]
    if spares:
        facts.append(("Joins", f"{', '.join(spares)}, which {'stands' if len(spares) == 1 else 'stand'} by"))
    facts += [("Lost", _lost_steps(status)), ("Downtime", _downtime(events))]
    number = status.get("generation")
    names_after = tuple(str(one["name"]) for one in after)
    return Plan(number if isinstance(number, int) else None, names_after, tuple(facts))


def _nodes(status: Json) -> list[Json]:
    return [one for one in status.get("nodes") or () if isinstance(one, Mapping) and one.get("name")]


def _group_rank(node: Json) -> int:
    return int(node["group_rank"])


def _nproc(node: Json) -> int:
    return int(node.get("nproc") or 0) or len(node.get("ranks") or ())


def _choose(op: str, names: Sequence[str], status: Json) -> list[Json]:
    """The nodes of the next group, as `formation.choose` takes them once these have left or come."""
    left = [one for one in _nodes(status) if not (op == "remove" and one["name"] in names)]
    known = {one["name"] for one in left}
    if op == "add":
        come = [dict(one, state="ready", spare=False) if one["name"] in names else one for one in left]
        left = [*come, *({"name": name, "state": "ready"} for name in names if name not in known)]
    members = {one["name"] for one in left if one.get("group_rank") is not None}
    regular = [one for one in left if one.get("state") in ("ready", "running")]
    standing_by = [one for one in left if one.get("state") == "spare" and not one.get("cordoned")]
    most = int(status.get("max_nodes") or len(left))
    if op == "add":
        most = max(most, len(members | set(names)))
    wanted = sum(one.get("state") != "removed" and not one.get("spare") for one in left)
    limit = min(most, max(wanted, int(status.get("min_nodes") or 0)))
    regular.sort(key=lambda one: one["name"] not in members)
    chosen = [one["name"] for one in regular[:most]]
    chosen += [one["name"] for one in standing_by[: max(0, limit - len(chosen))]]
    return [one for one in left if one["name"] in chosen]


def _slots(nodes: Iterable[Json]) -> list[Slot]:
    return [(str(one["name"]), local) for one in nodes for local in range(_nproc(one))]


def _size(slots: Sequence[Slot], nodes: Sequence[Json]) -> str:
    unknown = [str(one["name"]) for one in nodes if not _nproc(one)]
    more = f" and those of {', '.join(unknown)}" if unknown else ""
    return f"{count(len(slots), 'rank')}{more} on {count(len(nodes), 'node')}"


def _moves(old: Sequence[Slot], new: Sequence[Slot], op: str) -> str:
    numbers = {slot: rank for rank, slot in enumerate(new)}
    moved = [(rank, numbers[slot]) for rank, slot in enumerate(old) if numbers.get(slot, rank) != rank]
    runs: list[tuple[int, int, int]] = []
    for rank, there in moved:
        if runs and rank == runs[-1][1] + 1 and there - rank == runs[-1][2]:
            runs[-1] = (runs[-1][0], rank, runs[-1][2])
        else:
            runs.append((rank, rank, there - rank))
    said = ", ".join(f"{_range(a, b)} -> {_range(a + by, b + by)}" for a, b, by in runs[:6])
    if not said:
        return "all keep their numbers" if op != "remove" else "those that stay keep their numbers"
    return said + (f", and {len(runs) - 6} more runs" if len(runs) > 6 else "")


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _roles(op: str, names: Sequence[str], status: Json, before: Sequence[Json], after: Sequence[Json]) -> str:
    said = []
    coordinator = str(status.get("coordinator") or "")
    if op == "remove" and coordinator in names:
        heirs = (one["name"] for one in _nodes(status) if one.get("state") in ("ready", "running", "spare"))
        heir = next((str(name) for name in heirs if name not in names), None)
        said.append(f"the coordinator moves from {coordinator} to {heir or 'nobody: it is refused'}")
    elif coordinator:
        said.append(f"{coordinator} keeps the coordinator")
    first, then = (str(nodes[0]["name"]) if nodes else "" for nodes in (before, after))
    if first and then:
        said.append(f"rank 0 moves from {first} to {then}" if first != then else f"rank 0 stays on {first}")
    return "; ".join(said) or "not known"


def _minimum(status: Json, count: int) -> str:
    least = status.get("min_nodes")
    if not isinstance(least, int):
        return "not known"
    if not count:
        return "no node is left: it is refused, or waits for one"
    if count >= least:
        return f"min_nodes is {least}: kept"
    return f"below min_nodes ({least}): what an operator removes is not waited for"


def _lost_steps(status: Json) -> str:
    """What is done again: from the last snapshot on that any rank has told of in its lines."""
    ranks = [rank for node in _nodes(status) for rank in node.get("ranks") or ()]
    steps = [rank["step"] for rank in ranks if isinstance(rank.get("step"), int)]
    told = [(rank.get("progress") or {}).get("saved") for rank in ranks]
    saved = [step for step in told if isinstance(step, int)]
    if not steps:
        return "not known: no rank has told of a step yet"
    if not saved:
        return f"not known: at step {max(steps):,}, and no rank has told of a snapshot"
    lost = count(max(0, max(steps) - max(saved)), "step")
    return f"{lost}: at step {max(steps):,}; the last snapshot that a rank told of is of step {max(saved):,}"


def _downtime(events: Sequence[Json]) -> str:
    times = []
    for event in events:
        detail = event.get("detail") or {}
        if event.get("type") == "generation_running" and (event.get("generation") or 0) > 0:
            parts = [detail.get(phase) for phase in PHASES]
            times.append(sum(part for part in parts if isinstance(part, (int, float))) / 1000)
    if not times:
        return "not known: this job has not restarted yet"
    return f"about {statistics.median(times):.1f} s, as {count(len(times), 'restart')} of this job before"
