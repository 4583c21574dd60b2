"""Stalls: the ranks that a live group waits for, and what those ranks are doing. Pure.

In: two pulses of each rank, some seconds apart (remote_agent.engine.inspect.pulse). Out: a Stall, or None.

**Missing output alone is no stall. Ranks must wait for others, and those must be idle: no processor time, no bytes, the
same stack; or they are stopped, hold the GIL, or have exited. A rank that computes, compiles or writes a file is waited
for, however long it takes.** Only one case needs no waiting ranks: all are idle while main threads wait for threads,
and one of those, or the script itself, has failed with an exception.

The kernel repeats an unanswered SYN for minutes while the caller only waits. Which node drops the packets is judged by
the other connections: an address that a third node has reached is not at fault.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from remote_agent.diagnose.categories import CATEGORIES
from remote_agent.diagnose.evidence import JobContext, name_nodes
from remote_agent.diagnose.flight import DEFAULT_GROUP, Parting, Record, from_rows, group_name, mismatch
from remote_agent.diagnose.hang.pulses import (
    IDLE,
    SCRIPT,
    STOPPED,
    UNRESPONSIVE,
    ChildrenPulse,
    EndedPart,
    Pulse,
    Wait,
    has_stepped,
    idleness,
    is_busy,
    is_stopped,
    is_working,
    lasting_wait,
    may_receive,
)
from remote_agent.diagnose.incidents import EvidenceLine, incident, missing_ranks
from remote_agent.text.names import name_ranks
from remote_agent.text.shapes import clip, fingerprint

if TYPE_CHECKING:
    from remote_agent.wire.documents import IncidentDocument, MissingRanks, SourceExcerpt

# A main thread can run on for a while with what a failed thread had prepared; a later stall has another cause.
LATE_S = 600.0
MESSAGE_CHARS = 80
# This limits the lines of each kind of evidence.
MAX_LINES = 12
# An incident keeps the lines of the script at this many places.
MAX_SOURCES = 3
# One sentence names at most this many addresses.
MAX_ENDS = 3

EXITED, BEHIND, UNANSWERED = "exited", "behind", "unanswered"


@dataclasses.dataclass(frozen=True)
class Unanswered:
    """The ranks whose connection attempts get no answer, and the connections of the other ranks."""

    attempts: Mapping[int, Sequence[str]]
    """The addresses that had not answered a rank in either pulse."""
    reached: Mapping[int, Sequence[str]]
    """The addresses to which a rank is connected."""
    addresses: Mapping[int, Sequence[str]]
    """The addresses of a node, by the rank that reports them."""

    @property
    def is_outside(self) -> bool:
        """Whether no node of the job has any of these addresses."""
        return not any(self._ranks_at(end) for ends in self.attempts.values() for end in ends)

    def _ranks_at(self, end: str) -> list[int]:
        """Return one rank of each node that has this address; every node has the address of docker0."""
        return [rank for rank, own in self.addresses.items() if _host(end) in own]

    def _owner(self, end: str, context: JobContext) -> str | None:
        ranks = self._ranks_at(end)
        return context.node_of(ranks[0]) if len(ranks) == 1 else None

    def suspects(self, context: JobContext) -> list[str]:
        """Return the nodes of which one drops the connections, in order."""
        sides = []
        for rank, end in ((rank, end) for rank, ends in self.attempts.items() for end in ends):
            here, there = context.node_of(rank), self._owner(end, context)
            third = {context.node_of(other) for other, ends in self.reached.items() if end in ends} - {here, there}
            sides.append({here} if third else {here, there})
        nodes = set.intersection(*sides) - {None} or set.union(*sides)
        return sorted(node for node in nodes if node)

    def text(self, context: JobContext) -> str:
        """Return the addresses with their nodes, and why they do not answer."""
        ends = list(dict.fromkeys(end for rank in sorted(self.attempts) for end in self.attempts[rank]))
        named = [f"{end} ({owner})" if (owner := self._owner(end, context)) else end for end in ends[:MAX_ENDS]]
        more = f" and {len(ends) - MAX_ENDS} more" if len(ends) > MAX_ENDS else ""
        nodes = self.suspects(context)
        between = "" if len(nodes) == 1 else ", or between them"
        drops = f"packets dropped by a firewall or route on {' or '.join(nodes)}{between}"
        why = "no node of the job has this address" if self.is_outside else drops
        return f"no answer from {', '.join(named)}{more}: {why}"

    def evidence(self, context: JobContext) -> Iterator[EvidenceLine]:
        """Yield a line for each rank whose attempts get no answer."""
        for rank, ends in sorted(self.attempts.items()):
            text = f"SYN sent, no answer: {', '.join(ends[:MAX_ENDS])}"
            yield EvidenceLine(context.node_of(rank), rank, None, None, text)


@dataclasses.dataclass(frozen=True)
class Stall:
    """A group that makes no progress."""

    kind: str
    """missing: some ranks never reached the collective; mismatch: ranks call different collectives; network: all
    reached it, none has finished; unanswered: ranks wait for a connection."""
    waits: Mapping[int, Wait]
    missing: Mapping[int, str]
    """The ranks at fault and why: stopped, unresponsive, idle, exited, behind, unanswered; empty for the network."""
    where: Mapping[int, str]
    """Where the missing ranks are, as far as known."""
    calls: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """The library functions that they called there."""
    failures: Mapping[int, EndedPart] = dataclasses.field(default_factory=dict)
    """By idle rank: the exception that ended its script or one of its threads (a pulse's `ended`)."""
    children: Mapping[int, list[ChildrenPulse]] = dataclasses.field(default_factory=dict)
    """What their child processes are doing."""
    ras: Sequence[str] = ()
    """What NCCL's RAS service reports."""
    sources: Mapping[str, SourceExcerpt] = dataclasses.field(default_factory=dict)
    """The lines of the script around the places in `where`: {first, text}."""
    parting: Parting | None = None
    """The first collective that ranks called differently."""
    finished: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """The last collective that each rank finished, if all of them wait for the same one."""
    unanswered: Unanswered | None = None
    """Connection attempts of waiting ranks that get no answer."""

    @property
    def first(self) -> Wait:
        """The longest wait of a rank that is not missing itself."""
        held = [wait for rank, wait in self.waits.items() if rank not in self.missing] or list(self.waits.values())
        return max(held, key=lambda wait: wait.age_s)

    @property
    def age_s(self) -> float:
        """The time for which it has lasted, as far as the ranks know: in a mismatch every rank waits for the others."""
        if not self.waits:
            return 0.0
        return max(wait.age_s for wait in self.waits.values()) if self.kind == "mismatch" else self.first.age_s


def find_stall(before: Mapping[int, Pulse], now: Mapping[int, Pulse], exited: frozenset[int]) -> Stall | None:
    """Return what holds these ranks up; `exited`: ranks that have succeeded while the others are running."""
    stall = _find_stall(before, now, exited)
    if stall is None:
        return None
    unanswered = _find_unanswered(before, now, stall.waits)
    if unanswered is not None and set(stall.missing) <= set(unanswered.attempts):
        missing = dict.fromkeys(unanswered.attempts, UNANSWERED) if unanswered.is_outside else {}
        stall = Stall("unanswered", stall.waits, missing, _places(missing, now), unanswered=unanswered)
    # The service reports the same on every node.
    ras = next((now[rank]["ras"] for rank in sorted(now) if now[rank]["ras"]), ())
    return dataclasses.replace(stall, ras=ras, sources=_sources(stall, now))


def _sources(stall: Stall, now: Mapping[int, Pulse]) -> dict[str, SourceExcerpt]:
    """Return the lines of the script by place, those of the missing ranks first."""
    sources: dict[str, SourceExcerpt] = {}
    for rank in sorted(stall.where, key=lambda rank: (rank not in stall.missing, rank)):
        # An agent of an older version sends no source.
        source = now[rank].get("source")
        if source and len(sources) < MAX_SOURCES:
            sources.setdefault(stall.where[rank], source)
    return sources


def _find_stall(before: Mapping[int, Pulse], now: Mapping[int, Pulse], exited: frozenset[int]) -> Stall | None:
    both = now.keys() & before.keys()
    waits = _waits(before, now)
    stopped = {rank: STOPPED for rank in both if is_stopped(before[rank], now[rank])}
    blockers = _all_blockers(waits, now, exited)
    # Ranks that wait for the same share one set.
    each = {id(held): held for held in blockers.values()}.values()
    wanted = {rank for held in each for rank in held}
    idle = {rank: how for rank in both - set(waits) if (how := idleness(before[rank], now[rank])) is not None}
    idle.update(dict.fromkeys(exited, EXITED))
    # On a slow network the last ranks still receive what the first ones already have.
    moving = {(wait.group, wait.seq) for rank, wait in waits.items() if may_receive(before[rank], now[rank])}
    # A rank that waits for others is held up itself; a rank that waits though nobody is missing is behind.
    behind = {rank for rank, wait in waits.items() if not blockers[rank] and (wait.group, wait.seq) not in moving}
    idle.update(dict.fromkeys(behind, BEHIND))
    # An idle rank may wait for a busy one invisibly, for example for a file lock.
    busy = {rank for rank in both - set(idle) - set(waits) if is_busy(before[rank], now[rank])}
    sure = {rank for held in each if held.isdisjoint(busy) for rank in held}
    missing = {rank: how for rank, how in idle.items() if rank in (sure if how == IDLE else wanted)}
    missing.update(stopped)
    if missing:
        if not stopped and not set(waits) - set(missing):
            return None
        age_s = max((wait.age_s for wait in waits.values()), default=0.0)
        return _missing(waits, missing, now, LATE_S + age_s)
    if waits:
        return _all_wait(waits, wanted, now) if set(waits) == set(now) and not moving else None
    orphaned = {rank: IDLE for rank in both if now[rank]["parked"] and now[rank]["ended"]}
    all_idle = both == now.keys() and all(idle.get(rank) == IDLE for rank in both)
    return _missing(waits, orphaned, now) if orphaned and all_idle else None


def awaited(
    before: Mapping[int, Pulse], now: Mapping[int, Pulse], exited: frozenset[int]
) -> dict[int, dict[int, Wait]]:
    """Return the ranks that others wait for and that wait for nobody, each with what the others wait for."""
    waits = _waits(before, now)
    waiting = waits.keys()
    held: dict[int, dict[int, Wait]] = {}
    for rank, ranks in _all_blockers(waits, now, exited).items():
        for blocker in ranks - waiting:
            held.setdefault(blocker, {})[rank] = waits[rank]
    return held


def _all_blockers(
    waits: Mapping[int, Wait], now: Mapping[int, Pulse], exited: frozenset[int]
) -> dict[int, AbstractSet[int]]:
    """Return the ranks that have not reached what each of these waits for; thousands may wait for the same."""
    known: dict[tuple[str, int], AbstractSet[int]] = {}
    blockers: dict[int, AbstractSet[int]] = {}
    for rank, wait in waits.items():
        key = wait.group, wait.seq
        if key not in known:
            known[key] = _blockers(wait, waits, now, exited)
        blockers[rank] = known[key] - {rank} if rank in known[key] else known[key]
    return blockers


def _waits(before: Mapping[int, Pulse], now: Mapping[int, Pulse]) -> dict[int, Wait]:
    """Return what each rank waited for in both pulses."""
    both = now.keys() & before.keys()
    waits = {rank: wait for rank in both if (wait := lasting_wait(before[rank], now[rank])) is not None}
    # A wait that only the stack shows counts as long as no rank makes steps.
    is_moving = any(has_stepped(before[rank], now[rank]) for rank in both)
    return {rank: wait for rank, wait in waits.items() if wait.group or not is_moving}


def _missing(
    waits: Mapping[int, Wait], missing: Mapping[int, str], now: Mapping[int, Pulse], late_s: float = math.inf
) -> Stall:
    """Return the stall of these missing ranks; an exception of a thread older than `late_s` is unrelated."""
    here = [rank for rank in missing if rank in now]
    failures = {rank: ended for rank in here if missing[rank] == IDLE and (ended := now[rank]["ended"])}
    # A script that has ended reaches no collective any more, however long ago that was.
    return Stall(
        "missing",
        waits,
        missing,
        _places(missing, now),
        calls={rank: now[rank]["calls"] for rank in here if now[rank]["calls"]},
        failures={
            rank: failure
            for rank, failure in failures.items()
            if failure["part"] == SCRIPT or failure["age_s"] <= late_s
        },
        children={rank: now[rank]["children"] for rank in here if now[rank]["children"]},
    )


def collectives(now: Mapping[int, Pulse]) -> int:
    """Return how many collectives the busiest group has begun."""
    return max((group["last"] for one in now.values() for group in one["groups"].values()), default=0)


def is_suspect(before: Mapping[int, Pulse], now: Mapping[int, Pulse]) -> bool:
    """Return whether the stacks of these ranks are worth a look: one of them waits, or all are idle."""
    both = now.keys() & before.keys()
    if _waits(before, now):
        return True
    return bool(both) and not any(is_working(before[rank], now[rank]) for rank in both)


def _all_wait(waits: Mapping[int, Wait], wanted: set[int], now: Mapping[int, Pulse]) -> Stall:
    """Return the stall in which every rank waits: for the same collective, or for different ones."""
    calls: dict[tuple[str, str, str], list[int]] = {}
    for rank, wait in waits.items():
        calls.setdefault((wait.group, wait.op, wait.sizes), []).append(rank)
    if len(calls) == 1 and not wanted:
        finished = {rank: done for rank, wait in waits.items() if (done := _finished(now[rank], wait.group))}
        return Stall("network", waits, {}, {}, finished=finished)
    fewest = min(len(ranks) for ranks in calls.values())
    odd = [ranks for ranks in calls.values() if len(ranks) == fewest]
    # If no side is smaller, it is unknown which one is wrong.
    ranks = odd[0] if len(odd) == 1 and len(calls) > 1 else []
    parting = mismatch({rank: _flight(one) for rank, one in now.items()})
    if parting is not None:
        ranks = list(parting.culprits) if parting.is_sure else []
    places = _places(dict.fromkeys(waits, ""), now)
    return Stall("mismatch", waits, dict.fromkeys(ranks, BEHIND), places, parting=parting)


def _finished(pulse: Pulse, group: str) -> str:
    """Return the last collective of a group that a rank has finished; "" if that is unknown."""
    own = _flight(pulse).get(group)
    return next((call.text for _, call in sorted(own.calls.items(), reverse=True) if call.done), "") if own else ""


def _flight(pulse: Pulse) -> Record:
    rows = {name: group["calls"] for name, group in pulse["groups"].items() if "calls" in group}
    # NCCL's calls are only queued: the main thread may have gone on to any line.
    where = {name: pulse["where"] if pulse["inside"] or name == group_name(name) else "" for name in rows}
    return from_rows(rows, where)


def _blockers(
    wait: Wait, waits: Mapping[int, Wait], now: Mapping[int, Pulse], exited: frozenset[int]
) -> AbstractSet[int]:
    """Return the ranks that have not reached what is waited for."""
    everyone = set(now) | exited
    if not wait.group:
        # The group is unknown: every rank that is not inside torch.distributed is missing.
        return everyone - waits.keys()
    listed = next((ranks for one in now.values() if (ranks := one["groups"].get(wait.group, {}).get("ranks"))), None)
    # The flight record of gloo does not list the members of a group: then they are the ranks that have used it.
    users = {other for other in now if wait.group in now[other]["groups"]}
    members = set(listed) if listed else everyone if group_name(wait.group) == DEFAULT_GROUP else users
    arrived = {other for other in users if now[other]["groups"][wait.group]["last"] >= wait.seq}
    return (members & everyone) - arrived


def _places(ranks: Mapping[int, str], now: Mapping[int, Pulse]) -> dict[int, str]:
    return {rank: str(now[rank]["where"]) for rank in sorted(ranks) if rank in now and now[rank]["where"]}


def missing_of(stall: Stall) -> MissingRanks:
    """Return the contract's `missing` object."""
    first = stall.first if stall.waits else None
    calls: dict[tuple[str, str, int | None], list[int]] = {}
    for rank, wait in sorted(stall.waits.items()):
        key = (group_name(wait.group), wait.op, wait.seq if wait.group else None)
        calls.setdefault(key, []).append(rank)
    return {
        **missing_ranks(
            first.op if first is not None else None,
            first.seq if first is not None and first.group else None,
            set(stall.waits) - set(stall.missing),
            stall.missing,
            stall.where.items(),
        ),
        "calls": [
            {"collective": op, "seq": seq, "group": group, "ranks": ranks} for (group, op, seq), ranks in calls.items()
        ],
        "sources": dict(stall.sources),
    }


def stall_incident(stall: Stall, context: JobContext) -> IncidentDocument:
    """Return the incident of a group that hangs; `context.now_ns`: since when.

    Its texts are true of the present and of the past, and hold no duration: they are also read later.
    """
    # A rank whose thread failed is the cause; other idle ranks may wait for it invisibly.
    ranks = tuple(sorted(stall.failures or stall.missing))
    named = ranks if stall.unanswered is None else tuple(stall.unanswered.attempts)
    failure = stall.failures[ranks[0]] if stall.failures else None
    nodes = context.nodes_of(named)
    culprit_nodes = sorted(nodes) if stall.unanswered is None else stall.unanswered.suspects(context)
    waiting = sorted(set(stall.waits) - set(named))
    category, scope, confidence = _classify(stall, ranks)
    subject = f"{name_ranks(named)}{name_nodes(sorted(nodes))}: " if named else ""
    waits = f"waiting in {call_text(stall.first)}" if stall.waits else ""
    consequence = "hang_no_output" if stall.failures else category
    kind, message = (failure["type"], failure["headline"]) if failure is not None else (stall.kind, "")
    return incident(
        context,
        time_ns=context.now_ns,
        category=category,
        scope=scope,
        confidence=confidence,
        summary=f"{subject}{_headline(stall, waiting, context)}",
        hint=_hint(stall),
        fingerprint=fingerprint(category, kind, "", message or " ".join(sorted(set(stall.where.values())))),
        ranks=ranks,
        node=culprit_nodes[0] if len(culprit_nodes) == 1 else None,
        evidence=_evidence(stall, context),
        traceback=failure["traceback"] if failure is not None else None,
        victims=[(waiting, consequence, waits)] if waiting and ranks else (),
        missing=missing_of(stall),
    )


def _evidence(stall: Stall, context: JobContext) -> Iterator[EvidenceLine]:
    """Yield the exceptions, then where each missing rank is, then what its child processes do."""
    for rank, failure in sorted(stall.failures.items())[:MAX_LINES]:
        name = "error.json" if failure["part"] == SCRIPT and failure["line"] is None else "stderr.log"
        file = f"generation_{context.generation}/rank_{rank}/{name}"
        yield EvidenceLine(context.node_of(rank), rank, file, failure["line"], clip(failure["headline"]))
    if stall.unanswered is not None:
        yield from itertools.islice(stall.unanswered.evidence(context), MAX_LINES)
    for rank, last in sorted(stall.finished.items())[:MAX_LINES]:
        text = f"in {call_text(stall.waits[rank])}; the last one that it finished is {last}"
        yield EvidenceLine(context.node_of(rank), rank, None, None, text)
    for rank, text in stall.parting.lines[:MAX_LINES] if stall.parting is not None else ():
        yield EvidenceLine(context.node_of(rank), rank, None, None, clip(text))
    for rank, how in sorted(stall.missing.items())[:MAX_LINES] if stall.parting is None else ():
        yield EvidenceLine(context.node_of(rank), rank, None, None, f"{how}: {stall.where.get(rank, 'no stack')}")
    for rank, kind in [(rank, kind) for rank, kinds in sorted(stall.children.items()) for kind in kinds][:MAX_LINES]:
        at = f" at {kind['where']}" if kind["where"] else ""
        text = f"{kind['count']} x child process {kind['name']} {kind['doing']}{at}"
        yield EvidenceLine(context.node_of(rank), rank, None, None, clip(text))
    for line in stall.ras:
        yield EvidenceLine(None, None, None, None, clip(f"NCCL RAS: {line}"))


def _classify(stall: Stall, ranks: Sequence[int]) -> tuple[str, str, str]:
    """Return category, scope and confidence."""
    states = set(stall.missing.values())
    scope = "one_rank" if len(ranks) == 1 else "several_or_all_ranks"
    if stall.kind == "network":
        return "hang_no_output", "outside_the_ranks", "supported"
    if stall.unanswered is not None:
        is_formed = all(stall.waits[rank].group for rank in stall.unanswered.attempts)
        category = "nccl_network" if is_formed else "rendezvous_timeout"
        return category, scope if ranks else "outside_the_ranks", "supported"
    if stall.failures:
        return "user_exception", scope, "supported"
    if stall.kind == "mismatch" or states == {EXITED}:
        return "collective_desync", scope, "established" if states == {EXITED} else "supported"
    return "hang_no_output", scope, "established" if states == {STOPPED} else "supported"


def call_text(wait: Wait) -> str:
    """Return the collective with its number, if that is known."""
    return f"{wait.op} {wait.seq}" if wait.group else wait.op


_STATES = {
    STOPPED: "stopped by a signal (SIGSTOP, SIGTSTP or a debugger)",
    UNRESPONSIVE: "holding the Python GIL, or with a stuck interpreter",
    IDLE: "idle",
    EXITED: "exited with code 0",
}


def _headline(stall: Stall, waiting: list[int], context: JobContext) -> str:
    if stall.kind == "network":
        return f"all {len(stall.waits)} ranks reached {call_text(stall.first)}, and none finished it"
    if stall.parting is not None:
        return stall.parting.headline
    if stall.kind == "mismatch":
        calls: dict[str, list[int]] = {}
        for rank, wait in stall.waits.items():
            calls.setdefault(call_text(wait), []).append(rank)
        places = "; ".join(f"{name_ranks(ranks)} in {call}" for call, ranks in sorted(calls.items()))
        return f"ranks waiting in different collectives: {places}"
    held = f"; {name_ranks(waiting)} waiting in {call_text(stall.first)}" if waiting and stall.waits else ""
    if stall.unanswered is not None:
        return f"{stall.unanswered.text(context)}{held}"
    states = sorted(set(stall.missing.values()))
    what = _failure_text(stall) or " or ".join(_STATES[one] if one in _STATES else _behind(stall) for one in states)
    where = sorted(set(stall.where.values()))
    at = f" at {', '.join(where[:3])}" if where and states != [EXITED] else ""
    called = sorted(set(stall.calls.values()))
    at += f" ({', '.join(called[:3])})" if at and called and BEHIND not in states and not stall.failures else ""
    return f"{what}{at}{held}"


def _failure_text(stall: Stall) -> str:
    """Return what failed with which exception; empty if nothing did."""
    failure = next(iter(stall.failures.values()), None)
    if failure is None:
        return ""
    place = f" in {failure['place']}" if failure["place"] else ""
    waiting = "Python waiting for its other threads" if failure["part"] == SCRIPT else "the main thread waiting"
    return f"{failure['part']} failed with {failure['headline'][:MESSAGE_CHARS]}{place}; {waiting}"


def gives_up_in(stall: Stall, age_s: float) -> float | None:
    """Return the seconds until the collective times out; None if that is unknown or already past."""
    timeout_s = stall.first.timeout_s if stall.waits else None
    return timeout_s - age_s if timeout_s is not None and timeout_s > age_s else None


def _behind(stall: Stall) -> str:
    wait = next(stall.waits[rank] for rank, state in stall.missing.items() if state == BEHIND)
    others = "which the others have finished" if wait.group else "which the others never reached"
    return f"waiting in {call_text(wait)}, {others},"


def _hint(stall: Stall) -> str:
    states = set(stall.missing.values())
    if STOPPED in states:
        return "kill -CONT resumes it; look for a debugger, a paused container or an operator who stopped it"
    if stall.kind in ("network", "unanswered"):
        return CATEGORIES["nccl_network"].hint
    if stall.kind == "mismatch" or EXITED in states:
        return CATEGORIES["collective_desync"].hint
    if any(failure["part"] == SCRIPT for failure in stall.failures.values()):
        return "a non-daemon thread keeps the process alive: start it with daemon=True, or end it in a finally block"
    if stall.failures:
        return (
            "an exception ends only its own thread: pass it to the main thread (Future.result, a sentinel in the "
            "queue), or end the process there (os._exit)"
        )
    if any("dataloader.py" in call for call in stall.calls.values()):
        return "its DataLoader workers deliver no data; `supervisor stacks` shows their stacks too"
    if UNRESPONSIVE in states and not stall.where:
        return "if py-spy is installed on the node, `supervisor stacks` shows where it holds the GIL"
    return "`supervisor stacks` shows the whole stack"


def _find_unanswered(
    before: Mapping[int, Pulse], now: Mapping[int, Pulse], waiting: Collection[int]
) -> Unanswered | None:
    """Return the attempts of these ranks that had no answer in either pulse; None: none to a node of the job.

    An address outside the job counts if other ranks are connected to its port inside: it is a wrong store address.
    """
    addresses = {rank: one["addresses"] for rank, one in now.items()}
    reached = {rank: one["reached"] for rank, one in now.items()}
    own = {address for listed in addresses.values() for address in listed}
    ports = {_port(end) for ends in reached.values() for end in ends if _host(end) in own}
    attempts = {}
    for rank in sorted(waiting):
        lasting = [end for end in now[rank]["unanswered"] if end in before[rank]["unanswered"]]
        ends = [end for end in lasting if _host(end) in own or _port(end) in ports]
        if ends:
            attempts[rank] = ends
    return Unanswered(attempts, reached, addresses) if attempts else None


def _host(end: str) -> str:
    return end.rpartition(":")[0].strip("[]")


def _port(end: str) -> str:
    return end.rpartition(":")[2]
