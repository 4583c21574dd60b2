"""Who holds a living group up: the ranks that others wait for, and what those ranks are doing. Pure.

In: two pulses of each rank, some seconds apart (remote_agent.engine_pulse). Out: a Stall, or None when all is well.

**Silence alone is no stall. Ranks must wait for others, and those must do nothing: no processor time, no bytes, the
same stack; or they are stopped, hold Python's lock, or have left. Who computes, compiles or writes a file is waited
for, however long it takes.** One thing needs no others: that all do nothing while main threads wait for threads, and
one of those, or the script itself, has ended with an exception.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from remote_agent.diagnose.dials import Dials, find_dials
from remote_agent.diagnose.hints import HINTS
from remote_agent.diagnose.model import Context, Evidence, Incident, Victims, name_nodes, name_ranks
from remote_agent.diagnose.pulse import (
    DEAF,
    INERT,
    SCRIPT,
    STOPPED,
    Pulse,
    Wait,
    idleness,
    is_busy,
    is_stopped,
    lasting,
    may_receive,
    steps,
    works,
)
from remote_agent.diagnose.shapes import clip, signature

# A main thread can go on for a while with what a thread had prepared before its end; a stall that comes later than this
# has another cause.
LATE_S = 600.0
MESSAGE_CHARS = 80
# Of each kind of evidence.
MAX_LINES = 12

LEFT, BEHIND, UNANSWERED = "left", "behind", "unanswered"


@dataclasses.dataclass(frozen=True)
class Stall:
    """A group that does not get on."""

    kind: str
    """missing: some ranks do not come; mismatch: they call different collectives; network: all came, none is done;
    unanswered: who does not get on waits for a connection."""
    waits: Mapping[int, Wait]
    missing: Mapping[int, str]
    """The ranks to look at: stopped, deaf, inert, left or behind; empty for a network's stall."""
    where: Mapping[int, str]
    """Where the missing ranks are, as far as they tell."""
    calls: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """The libraries' functions that they have called there."""
    ended: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Of those that do nothing: the exceptions that ended their script or a thread of theirs before (engine_pulse)."""
    children: Mapping[int, list[Mapping[str, Any]]] = dataclasses.field(default_factory=dict)
    """What the processes below them are doing."""
    ras: Sequence[str] = ()
    """What NCCL's own service complains of."""
    dials: Dials | None = None
    """Connections that those who do not get on have dialled in vain."""

    @property
    def first(self) -> Wait:
        """The wait that has lasted longest, of the ranks that are held up."""
        held = [wait for rank, wait in self.waits.items() if rank not in self.missing] or list(self.waits.values())
        return max(held, key=lambda wait: wait.age_s)


def find_stall(before: Mapping[int, Pulse], now: Mapping[int, Pulse], left: frozenset[int]) -> Stall | None:
    """Return what holds these ranks up; `left`: ranks that have ended well, while the others go on."""
    found = _find_stall(before, now, left)
    if found is None:
        return None
    dials = find_dials(before, now, found.waits)
    if dials is not None and set(found.missing) <= set(dials.silent):
        missing = dict.fromkeys(dials.silent, UNANSWERED) if dials.is_lost else {}
        found = Stall("unanswered", found.waits, missing, _places(missing, now), dials=dials)
    # The same on each node: one asked is all asked.
    said = next((now[rank]["ras"] for rank in sorted(now) if now[rank]["ras"]), ())
    return dataclasses.replace(found, ras=said)


def _find_stall(before: Mapping[int, Pulse], now: Mapping[int, Pulse], left: frozenset[int]) -> Stall | None:
    both = now.keys() & before.keys()
    waits = _waits(before, now)
    stopped = {rank: STOPPED for rank in both if is_stopped(before[rank], now[rank])}
    blockers = {rank: _blockers(rank, wait, waits, now, left) for rank, wait in waits.items()}
    wanted = {rank for held in blockers.values() for rank in held}
    idle = {rank: how for rank in both - set(waits) if (how := idleness(before[rank], now[rank])) is not None}
    idle.update(dict.fromkeys(left, LEFT))
    # On a slow network the last ones still receive what the first ones have.
    moving = {(wait.group, wait.seq) for rank, wait in waits.items() if may_receive(before[rank], now[rank])}
    # Who waits for somebody is held up itself; who waits although nobody is missing is behind.
    behind = {rank for rank, wait in waits.items() if not blockers[rank] and (wait.group, wait.seq) not in moving}
    idle.update(dict.fromkeys(behind, BEHIND))
    # While one that has not come is busy, another one may wait for it in a way that nobody sees, at a file's lock.
    busy = {rank for rank in both - set(idle) - set(waits) if is_busy(before[rank], now[rank])}
    sure = {rank for held in blockers.values() if held.isdisjoint(busy) for rank in held}
    missing = {rank: how for rank, how in idle.items() if rank in (sure if how == INERT else wanted)}
    missing.update(stopped)
    if missing:
        if not stopped and not set(waits) - set(missing):
            return None
        age_s = max((wait.age_s for wait in waits.values()), default=0.0)
        return _missing(waits, missing, now, LATE_S + age_s)
    if waits:
        return _all_wait(waits, wanted, now) if set(waits) == set(now) and not moving else None
    orphaned = {rank: INERT for rank in both if now[rank]["parked"] and now[rank]["ended"]}
    all_idle = both == now.keys() and all(idle.get(rank) == INERT for rank in both)
    return _missing(waits, orphaned, now) if orphaned and all_idle else None


def _waits(before: Mapping[int, Pulse], now: Mapping[int, Pulse]) -> dict[int, Wait]:
    """Return what each rank has waited for in both pulses."""
    both = now.keys() & before.keys()
    found = {rank: wait for rank in both if (wait := lasting(before[rank], now[rank])) is not None}
    # What the stack alone tells counts as long as no rank makes steps.
    is_moving = any(steps(before[rank], now[rank]) for rank in both)
    return {rank: wait for rank, wait in found.items() if wait.group or not is_moving}


def _missing(
    waits: Mapping[int, Wait], missing: Mapping[int, str], now: Mapping[int, Pulse], late_s: float = math.inf
) -> Stall:
    """Return the stall that these ranks make; a thread's exception older than `late_s` has nothing to do with it."""
    here = [rank for rank in missing if rank in now]
    parts = {rank: now[rank]["ended"] for rank in here if missing[rank] == INERT and now[rank]["ended"]}
    # A script that is over comes to nothing any more, however long ago it ended.
    return Stall(
        "missing",
        waits,
        missing,
        _places(missing, now),
        calls={rank: now[rank]["calls"] for rank in here if now[rank]["calls"]},
        ended={rank: part for rank, part in parts.items() if part["part"] == SCRIPT or part["age_s"] <= late_s},
        children={rank: now[rank]["children"] for rank in here if now[rank]["children"]},
    )


def collectives(now: Mapping[int, Pulse]) -> int:
    """Return how many collectives the busiest group has begun."""
    return max((group["last"] for one in now.values() for group in one["groups"].values()), default=0)


def is_suspect(before: Mapping[int, Pulse], now: Mapping[int, Pulse]) -> bool:
    """Tell whether these ranks give reason to look at their stacks: one waits, or all do nothing."""
    both = now.keys() & before.keys()
    if _waits(before, now):
        return True
    return bool(both) and not any(works(before[rank], now[rank]) for rank in both)


def _all_wait(waits: Mapping[int, Wait], wanted: set[int], now: Mapping[int, Pulse]) -> Stall:
    """Every rank waits: for the same, and then it is the network's; or for different things."""
    calls: dict[tuple[str, str, str], list[int]] = {}
    for rank, wait in waits.items():
        calls.setdefault((wait.group, wait.op, wait.sizes), []).append(rank)
    if len(calls) == 1 and not wanted:
        return Stall("network", waits, {}, {})
    fewest = min(len(ranks) for ranks in calls.values())
    odd = [ranks for ranks in calls.values() if len(ranks) == fewest]
    # Where no side is the smaller one, nobody can say who is wrong.
    ranks = odd[0] if len(odd) == 1 and len(calls) > 1 else []
    return Stall("mismatch", waits, dict.fromkeys(ranks, BEHIND), _places(dict.fromkeys(waits, ""), now))


def _blockers(
    rank: int, wait: Wait, waits: Mapping[int, Wait], now: Mapping[int, Pulse], left: frozenset[int]
) -> set[int]:
    """Return the ranks that have not come to where this one waits."""
    everyone = set(now) | left
    if not wait.group:
        # Nothing is known of a group: who is not in torch.distributed himself has not come.
        return {other for other in everyone if other != rank and other not in waits}
    said = next((ranks for one in now.values() if (ranks := one["groups"].get(wait.group, {}).get("ranks"))), None)
    # The record of gloo does not tell the members of a group: then they are those who have used it.
    users = {other for other in now if wait.group in now[other]["groups"]}
    members = set(said) if said else everyone if wait.group == "0" else users
    came = {other for other in users if now[other]["groups"][wait.group]["last"] >= wait.seq}
    return (members & everyone) - came - {rank}


def _places(ranks: Mapping[int, str], now: Mapping[int, Pulse]) -> dict[int, str]:
    return {rank: str(now[rank]["where"]) for rank in sorted(ranks) if rank in now and now[rank]["where"]}


def missing_of(stall: Stall) -> dict[str, Any]:
    """Return the contract's `missing` object."""
    first = stall.first if stall.waits else None
    return {
        "collective": first.op if first is not None else None,
        "seq": first.seq if first is not None and first.group else None,
        "waiting": sorted(set(stall.waits) - set(stall.missing)),
        "missing": sorted(stall.missing),
        "stacks": {str(rank): place for rank, place in stall.where.items()},
    }


def stall_incident(stall: Stall, age_s: float, context: Context) -> Incident:
    """Return the incident of a group that hangs; `age_s`: for how long already."""
    # Whose thread ended is the cause; who else does nothing may wait for that one in a way that nobody sees.
    ranks = tuple(sorted(stall.ended or stall.missing))
    named = ranks if stall.dials is None else tuple(stall.dials.silent)
    part = stall.ended[ranks[0]] if stall.ended else None
    nodes = {name for name in context.ranks_per_node for rank in named if rank in context.ranks_of(name)}
    guilty = nodes if stall.dials is None else set(stall.dials.blamed(context))
    waiting = sorted(set(stall.waits) - set(named))
    category, scope, confidence = _kind_of(stall, ranks)
    headline = _headline(stall, waiting, age_s, context)
    subject = f"{name_ranks(named)}{name_nodes(sorted(nodes))}: " if named else ""
    waits = f"waits in {_call(stall.first)}" if stall.waits else ""
    suffered = "hang_no_output" if stall.ended else category
    kind, message = (part["type"], part["headline"]) if part is not None else (stall.kind, "")
    return Incident(
        id=context.incident_id,
        generation=context.generation,
        time_ns=context.now_ns,
        category=category,
        scope=scope,
        culprit_ranks=ranks,
        culprit_node=guilty.pop() if len(guilty) == 1 else None,
        confidence=confidence,
        summary=clip(f"{subject}{headline}"),
        evidence=tuple(_evidence(stall, context)),
        traceback=part["traceback"] if part is not None else None,
        exit_code=None,
        exit_signal=None,
        hint=_hint(stall),
        victims=(Victims(tuple(waiting), suffered, waits),) if waiting and ranks else (),
        missing=missing_of(stall),
        signature=signature(category, kind, "", message or " ".join(sorted(set(stall.where.values())))),
    )


def _evidence(stall: Stall, context: Context) -> Iterator[Evidence]:
    """Yield the exceptions, then where each missing rank is, then what the processes below it do."""
    for rank, part in sorted(stall.ended.items())[:MAX_LINES]:
        name = "error.json" if part["part"] == SCRIPT and part["line"] is None else "stderr.log"
        file = f"generation_{context.generation}/rank_{rank}/{name}"
        yield Evidence(context.node_of(rank), rank, file, part["line"], clip(part["headline"]))
    if stall.dials is not None:
        yield from itertools.islice(stall.dials.evidence(context), MAX_LINES)
    for rank, how in sorted(stall.missing.items())[:MAX_LINES]:
        yield Evidence(context.node_of(rank), rank, None, None, f"{how}: {stall.where.get(rank, 'no stack')}")
    for rank, kind in [(rank, kind) for rank, kinds in sorted(stall.children.items()) for kind in kinds][:MAX_LINES]:
        at = f" at {kind['where']}" if kind["where"] else ""
        text = f"{kind['count']} x child process {kind['name']} {kind['doing']}{at}"
        yield Evidence(context.node_of(rank), rank, None, None, clip(text))
    for line in stall.ras:
        yield Evidence(None, None, None, None, clip(f"NCCL RAS: {line}"))


def _kind_of(stall: Stall, ranks: Sequence[int]) -> tuple[str, str, str]:
    """Return category, scope and confidence."""
    ways = set(stall.missing.values())
    scope = "one_rank" if len(ranks) == 1 else "several_or_all_ranks"
    if stall.kind == "network":
        return "hang_no_output", "outside_the_ranks", "supported"
    if stall.dials is not None:
        is_formed = all(stall.waits[rank].group for rank in stall.dials.silent)
        category = "nccl_network" if is_formed else "rendezvous_timeout"
        return category, scope if ranks else "outside_the_ranks", "supported"
    if stall.ended:
        return "user_exception", scope, "supported"
    if stall.kind == "mismatch" or ways == {LEFT}:
        return "collective_desync", scope, "established" if ways == {LEFT} else "supported"
    return "hang_no_output", scope, "established" if ways == {STOPPED} else "supported"


def _call(wait: Wait) -> str:
    return f"{wait.op} {wait.seq}" if wait.group else wait.op


_BACKENDS = {"nccl": "NCCL"}
_DOES = {
    STOPPED: "is stopped by a signal (SIGSTOP, SIGTSTP or a debugger)",
    DEAF: "holds Python's lock (GIL), or its interpreter is stuck",
    INERT: "does nothing",
    LEFT: "has left: it exited with code 0",
}


def _headline(stall: Stall, waiting: list[int], age_s: float, context: Context) -> str:
    since = f"for {age_s:.0f} s"
    ends = _time_left(stall, age_s)
    verb = "waits" if len(waiting) == 1 else "wait"
    held = f", while {name_ranks(waiting)} {verb} in {_call(stall.first)}" if waiting and stall.waits else ""
    if stall.dials is not None:
        return stall.dials.text(context, f"{since}{held}{ends}")
    if stall.kind == "network":
        come = "all have come, none gets on"
        return f"all {len(stall.waits)} ranks have waited in {_call(stall.first)} {since}: {come}{ends}"
    if stall.kind == "mismatch":
        calls: dict[str, list[int]] = {}
        for rank, wait in stall.waits.items():
            calls.setdefault(_call(wait), []).append(rank)
        said = "; ".join(f"{name_ranks(ranks)} in {call}" for call, ranks in sorted(calls.items()))
        return f"the ranks wait in different collectives {since}{ends}: {said}"
    ways = sorted(set(stall.missing.values()))
    does = _ended(stall) or " or ".join(_DOES[way] if way in _DOES else _behind(stall) for way in ways)
    places = sorted(set(stall.where.values()))
    at = f" at {', '.join(places[:3])}" if places and ways != [LEFT] else ""
    called = sorted(set(stall.calls.values()))
    at += f" ({', '.join(called[:3])})" if at and called and BEHIND not in ways and not stall.ended else ""
    return f"{does}{at} {since}{held}{ends}"


def _ended(stall: Stall) -> str:
    """Say what ended with which exception; empty where nothing did."""
    part = next(iter(stall.ended.values()), None)
    if part is None:
        return ""
    place = f" in {part['place']}" if part["place"] else ""
    waits = "Python waits for its other threads" if part["part"] == SCRIPT else "the main thread waits"
    return f"{part['part']} ended with {part['headline'][:MESSAGE_CHARS]}{place}; {waits}"


def _time_left(stall: Stall, age_s: float) -> str:
    """Say when torch gives up by itself, where that is known."""
    timeout_s = gives_up_in(stall, age_s)
    if timeout_s is None:
        return ""
    minutes, seconds = divmod(int(timeout_s), 60)
    hours = f"{minutes // 60}:" if minutes >= 60 else ""
    backend = _BACKENDS.get(stall.first.backend, stall.first.backend) or "torch"
    return f" ({backend} timeout in {hours}{minutes % 60:02d}:{seconds:02d})"


def gives_up_in(stall: Stall, age_s: float) -> float | None:
    """Return after how many seconds the collective times out; None where that is not known, or should have been."""
    timeout_s = stall.first.timeout_s if stall.waits else None
    return timeout_s - age_s if timeout_s is not None and timeout_s > age_s else None


def _behind(stall: Stall) -> str:
    wait = next(stall.waits[rank] for rank, way in stall.missing.items() if way == BEHIND)
    others = "which the others have finished" if wait.group else "to which the others do not come"
    return f"waits in {_call(wait)}, {others},"


def _hint(stall: Stall) -> str:
    ways = set(stall.missing.values())
    if STOPPED in ways:
        return "kill -CONT lets it go on; look for a debugger, a suspended container or an operator"
    if stall.kind in ("network", "unanswered"):
        return HINTS["nccl_network"]
    if stall.kind == "mismatch" or LEFT in ways:
        return HINTS["collective_desync"]
    if any(part["part"] == SCRIPT for part in stall.ended.values()):
        return (
            "a thread that is no daemon keeps its process alive: daemon=True lets it end, or end the thread (finally)"
        )
    if stall.ended:
        return (
            "an exception ends its thread alone: hand it to the main thread (Future.result, a sentinel in the queue), "
            "or end the process there (os._exit)"
        )
    if any("dataloader.py" in call for call in stall.calls.values()):
        return "its DataLoader's workers deliver nothing: see what they do; `supervisor stacks` shows their stacks too"
    if DEAF in ways and not stall.where:
        return "where py-spy is installed on the node, `supervisor stacks` shows where it holds the lock"
    return "`supervisor stacks` shows the whole stack"
