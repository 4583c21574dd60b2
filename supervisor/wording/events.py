"""Journal events as text: the one wording for `events`, headless output, the screen and reports. Pure.

In: events of the journal. Out: text without colour, one line an event; the rows of a journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from remote_agent.text.names import count, name_ranks, ranges, size_text
from remote_agent.wire.events import PHASE_EVENTS, PHASES, EventType, StopCause, label, phases_of
from supervisor.inventory.pattern import fold
from supervisor.wording.values import clock, duration, one_line, safe

if TYPE_CHECKING:
    from remote_agent.wire.documents import (
        AskedDetail,
        CoordinatorChangedDetail,
        EnvironmentSetDetail,
        EnvironmentStatus,
        EventHead,
        ExitStatus,
        GenerationRunningDetail,
        GenerationStartedDetail,
        GenerationStoppedDetail,
        HookDetail,
        IncidentDocument,
        JobDegradedDetail,
        JobEndedDetail,
        JobStartedDetail,
        JournalEvent,
        NodeJoinedDetail,
        NodeReadyDetail,
        PlacedReport,
        QuorumLostDetail,
        RankFailedDetail,
        RanksAssignedDetail,
        RestartRequestedDetail,
        SignalSentDetail,
        SnapshotEntry,
        SnapshotsChosenDetail,
        StartFacts,
        StopRequestedDetail,
        TreeChangedDetail,
        TreeSummary,
    )

# At the end of these phases, something other than the phase itself is reached.
_REACHED = {"imports": "init_process_group"}
TRACEBACK = ("Traceback (", "Original Traceback (")
# Paths of changed files that are named in one line.
MAX_PATHS = 4


class Cause(NamedTuple):
    """Why a generation stopped."""

    word: str
    """What the next generation began with, in a table."""
    text: str
    events: tuple[EventType, ...] = ()
    """The events with more details; the first of them that is known counts."""
    is_bad: bool = False
    """Something was wrong."""


CAUSES: Mapping[str, Cause] = {
    StopCause.FAILURE: Cause("failure", "a rank failed", (EventType.INCIDENT, EventType.RANK_FAILED), is_bad=True),
    StopCause.NODE_LOST: Cause(
        "node lost", "a node was lost", (EventType.INCIDENT, EventType.NODE_LOST, EventType.AGENT_LOST), is_bad=True
    ),
    StopCause.RESTART: Cause(
        "operator", "restart by an operator", (EventType.TREE_CHANGED, EventType.RESTART_REQUESTED)
    ),
    StopCause.REMOVED: Cause("removal", "a node was removed", (EventType.NODE_REMOVED,)),
    StopCause.ADDED: Cause("addition", "a node was added", (EventType.NODE_ADDED,)),
    StopCause.RETURNED: Cause("return", "a node returned", (EventType.NODE_READY,)),
    StopCause.JOINED: Cause("new node", "a node joined", (EventType.NODE_READY,)),
    StopCause.QUORUM: Cause("no quorum", "fewer than half of the nodes were reachable", is_bad=True),
    StopCause.PAUSED: Cause("pause", "the coordinator was paused"),
    StopCause.STOP: Cause("stop", "stop by an operator"),
}


# An event of these types has this role of the themes; any other event is a plain fact.
ROLES: Mapping[str, str] = {
    each: role
    for role, types in {
        "bad": (
            *(EventType.RANK_FAILED, EventType.INCIDENT, EventType.JOB_FAILED),
            *(EventType.NODE_LOST, EventType.NODE_FAILED, EventType.QUORUM_LOST),
        ),
        "warn": (
            *(EventType.AGENT_LOST, EventType.JOB_DEGRADED, EventType.COORDINATOR_PAUSED, EventType.JOB_STOPPED),
            *(EventType.STOP_REQUESTED, EventType.RESTART_REQUESTED, EventType.REMOVE_REQUESTED),
            *(
                EventType.GENERATION_STOPPED,
                EventType.NODE_CORDONED,
                EventType.SIGNAL_SENT,
                EventType.WARNING,
                EventType.SLOW,
            ),
            *(EventType.ENVIRONMENT_SET, EventType.TREE_CHANGED, EventType.HOOK_FAILED, EventType.METRICS_FAILED),
        ),
        "start": (EventType.GENERATION_PROPOSED, EventType.GENERATION_STARTED, EventType.RANKS_ASSIGNED),
        "ok": (
            *(EventType.GENERATION_RUNNING, EventType.FIRST_STEP, EventType.INCIDENT_HEALED, EventType.HANG_OVER),
            EventType.SLOW_OVER,
            *(EventType.NODE_JOINED, EventType.NODE_READY, EventType.NODE_ADDED),
        ),
        "done": (EventType.JOB_SUCCEEDED,),
        "off": (EventType.NODE_REMOVED,),
    }.items()
    for each in types
}

# The report's table of nodes and requests: events that change which nodes take part, and requests of operators.
MEMBERSHIP = (
    EventType.NODE_JOINED,
    EventType.NODE_ADDED,
    EventType.REMOVE_REQUESTED,
    EventType.NODE_REMOVED,
    EventType.NODE_LOST,
    EventType.NODE_FAILED,
    EventType.COORDINATOR_CHANGED,
    EventType.NODE_CORDONED,
    EventType.NODE_UNCORDONED,
    EventType.SIGNAL_SENT,
    EventType.ENVIRONMENT_SET,
    EventType.TREE_CHANGED,
    EventType.RESTART_REQUESTED,
    EventType.STOP_REQUESTED,
)


def cause_text(cause: object) -> str:
    """Return why a generation stopped; a cause that only a newer version knows is returned unchanged."""
    known = CAUSES.get(str(cause))
    return known.text if known else one_line(cause)


def still_there(read: Sequence[JournalEvent], events: Sequence[JournalEvent]) -> int:
    """Return how many of the events that were read a journal still has.

    Its end may have been replaced.
    """
    if not read or (len(events) >= len(read) and events[len(read) - 1] is read[-1]):
        return len(read)
    pairs = enumerate(zip(read, events, strict=False))
    return next((at for at, (one, other) in pairs if one is not other), min(len(read), len(events)))


class EventRows:
    """The events of a journal as people read them, a row each.

    An incident is one row: the verdict refines what was known of it while its group was stopping.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.rows: list[JournalEvent] = []
        self._read: list[JournalEvent] = []
        self._preliminary: dict[int | None, int] = {}
        """The row of each incident, by its number; it may still change."""

    def follow(self, events: Sequence[JournalEvent]) -> list[JournalEvent]:
        """Take the new events of a journal, or one that has changed; return those whose text is new."""
        same = still_there(self._read, events)
        if same < len(self._read):
            self._start()
            self._take(events[:same])
        return self._take(events[same:])

    def _take(self, events: Sequence[JournalEvent]) -> list[JournalEvent]:
        begin = len(self.rows)
        news: dict[int, JournalEvent] = {}
        for event in events:
            number = event["detail"].get("id") if event["type"] == EventType.INCIDENT else None
            at = self._preliminary.pop(number, None)
            if at is None:
                at = len(self.rows)
                self.rows.append(event)
                news[at] = event
            else:
                before = self.rows[at]
                self.rows[at] = {**event, "seq": before["seq"], "time": before["time"]}
                if at >= begin:
                    news[at] = self.rows[at]
                elif event["detail"].get("summary") != before["detail"].get("summary"):
                    news[at] = event  # it has its own time, so it is written below others
            if number is not None and event["detail"].get("preliminary"):
                self._preliminary[number] = at
        self._read += events
        return list(news.values())


def event_line(event: JournalEvent) -> str:
    """Return an event in one line: local time, type, generation, node and rank, text."""
    return line(event, event_text(event))


def line(event: EventHead, text: str, *, utc: bool = False) -> str:
    """Return the line of an event whose text is known already."""
    group = "" if event["generation"] < 0 else f"g{event['generation']}"
    time = clock(event.get("time"), millis=True, utc=utc)
    return f"{time} {label(event.get('type')):<20} {group:<4} {place(event):<14} {text}".rstrip()


def place(event: EventHead) -> str:
    """Return the node and rank of an event: `n2 rank 5`, `n2` or nothing."""
    rank = "" if event.get("rank") is None else f"rank {event['rank']}"
    return " ".join(part for part in (one_line(event.get("node") or ""), rank) if part)


def event_text(event: JournalEvent) -> str:
    """Return the text of an event without its type and place."""
    detail = event.get("detail") or {}
    text = _TEXTS.get(str(event.get("type")), _unknown)
    return one_line(text(detail))


def outcome_line(event: JournalEvent) -> str:
    """Return how a request ended, in one line."""
    if event.get("type") == EventType.GENERATION_RUNNING:
        return f"generation {event.get('generation')} running: {_running(event['detail'])}"
    text = event_text(event)
    node = f" {one_line(event['node'])}" if event.get("node") else ""
    return f"{label(event.get('type'))}{node}" + (f": {text}" if text else "")


def phases_by_generation(events: Iterable[JournalEvent]) -> dict[int, dict[str, float]]:
    """Return what the start of each generation was spent on, in milliseconds by phase, in order."""
    phases: dict[int, dict[str, float]] = {}
    for event in events:
        if event.get("type") in PHASE_EVENTS:
            phases.setdefault(int(event["generation"]), {}).update(phases_of(event.get("detail") or {}))
    return phases


def start_text(generation: object, phases: Mapping[str, float]) -> str:
    """Return how long a start took up to the last phase that was seen: `restart 4.2 s to first step`; "" for none."""
    if not phases:
        return ""
    last = [name for name in PHASES if name in phases][-1]
    total = duration(sum(phases.values()) / 1000)
    return f"{'restart' if generation else 'start'} {total} to {_REACHED.get(last, phase_name(last))}"


def phases_text(phases: Mapping[str, float]) -> str:
    """Return phases as `stop 0.21, imports 3.10`, without what took less than 5 ms."""
    return ", ".join(f"{phase_name(name)} {value / 1000:.2f}" for name, value in phases.items() if value >= 5)


def phase_name(phase: str) -> str:
    """Return a phase in plain words."""
    return phase.replace("_", " ")


def variables(environment: EnvironmentSetDetail | EnvironmentStatus) -> str:
    """Return the environment that operators have set: `NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=NET`."""
    env = environment.get("env") or {}
    return " ".join(f"{name}={value}" for name, value in sorted(env.items())) or "as launched"


def tree_change(detail: TreeSummary) -> str:
    """Return what changed in a work tree: `3 files, 12.0 kB: train.py, model.py, lib/a.py`."""
    number = int(detail.get("files") or 0)
    paths = [one_line(path) for path in detail.get("paths") or ()][:MAX_PATHS]
    more = ", …" if number > len(paths) else ""
    return f"{count(number, 'file')}, {size_text(int(detail.get('bytes') or 0))}: {', '.join(paths)}{more}"


def tree_text(detail: TreeChangedDetail) -> str:
    """Return which work tree new groups start from, and who asked for it, or why."""
    digest = one_line(str(detail.get("digest") or "")[:8])
    tree = f"back to {digest}" if detail.get("rollback") else f"{digest}, {tree_change(detail)}"
    without = f"; without {' '.join(map(one_line, detail['without']))}" if detail.get("without") else ""
    if detail.get("reason"):
        return f"{tree}: {one_line(detail['reason'])}"
    return f"{tree}{without}; {_asked(detail)}"


def exit_text(end: ExitStatus) -> str:
    """Return `exit 1` or `killed by SIGKILL`."""
    if end.get("signal"):
        return f"killed by {end['signal']}"
    return f"exit {end['code']}" if end.get("code") is not None else "ended"


def _asked(detail: AskedDetail) -> str:
    return f"by {detail.get('operator') or 'an operator'}"


def _reason(detail: AskedDetail) -> str:
    return str(detail.get("reason") or "")


def _operator(detail: AskedDetail) -> str:
    return str(detail.get("operator") or "")


def snapshots_text(detail: SnapshotsChosenDetail) -> str:
    """Return from what a group resumes, and where that had to be put in place."""
    named = [snapshot_text(one) for one in detail.get("snapshots") or ()]
    placed = detail.get("placed") or {}
    brought = [_placed(str(node), one) for node, one in placed.items()]
    return "resumes from " + ", ".join(named) + "".join(f"; {text}" for text in brought if text)


def snapshot_text(snapshot: SnapshotEntry) -> str:
    """Return which snapshot it is: `snapshot.pt, step 760`."""
    step = snapshot_step(snapshot)
    return f"{one_line(snapshot.get('path'))}" + (f", step {step}" if step else "")


def snapshot_step(snapshot: SnapshotEntry) -> str:
    """Return a snapshot's step: `760`; `~760` where it is what ranks had printed; "" if it is unknown."""
    step = snapshot.get("step")
    return "" if step is None else f"{step:,}" if snapshot.get("exact", True) else f"~{step:,}"


def _placed(node: str, report: PlacedReport) -> str:
    sources = fold(sorted({str(source) for source in (report.get("placed") or {}).values() if source}))
    took = f"{size_text(int(report.get('bytes') or 0))} in {duration(float(report.get('seconds') or 0))}"
    parts = [f"from {sources}, {took}"] if sources else ["from its own copy"] if report.get("placed") else []
    parts += [f"hid {one_line(text)}" for text in report.get("aside") or ()]
    return f"{one_line(node)} {', '.join(parts)}" if parts else ""


def _restart_requested(detail: RestartRequestedDetail) -> str:
    return _asked(detail) + (f", from snapshot {detail['snapshot']}" if detail.get("snapshot") else "")


def _started(detail: JobStartedDetail) -> str:
    nodes = fold(map(str, detail.get("nodes") or ()))
    return f"{detail.get('script')}" + (f" on {nodes}" if nodes else "")


def _succeeded(detail: JobEndedDetail) -> str:
    restarts = detail.get("restarts")
    return "all ranks succeeded" + (f" · {count(int(restarts), 'restart')}" if restarts else "")


def _degraded(detail: JobDegradedDetail) -> str:
    return _reason(detail) or f"{detail.get('ready', '?')} nodes ready, {detail.get('needed', '?')} needed"


def _joined(detail: NodeJoinedDetail) -> str:
    return detail["spec"]["address"]


def _ready(detail: NodeReadyDetail) -> str:
    words = (("returned", detail.get("returned")), ("spare", detail.get("spare")))
    return ", ".join([count(detail["nproc"], "rank"), *(word for word, holds in words if holds)])


def _stop_requested(detail: StopRequestedDetail) -> str:
    kill = ", without the grace period" if detail.get("kill") else ""
    return f"{_asked(detail)}{kill}" + (f": {detail['reason']}" if detail.get("reason") else "")


def _taken_over(detail: CoordinatorChangedDetail) -> str:
    return (f"took over from {detail['former']}, " if detail.get("former") else "") + f"term {detail.get('term')}"


def _quorum(detail: QuorumLostDetail) -> str:
    return f"{len(detail.get('held') or ())} of {count(len(detail.get('members') or ()), 'node')} reachable"


def _forming(detail: GenerationStartedDetail) -> str:
    nodes = fold(str(member.get("node")) for member in detail.get("members") or ())
    meeting = detail.get("rendezvous")
    where = ""
    if meeting is not None:
        where = f", {meeting.get('backend')} rendezvous at {meeting.get('endpoint')}, id {meeting.get('run_id')}"
    return f"world size {detail.get('world_size')} on {nodes}{where}"


def _assigned(detail: RanksAssignedDetail) -> str:
    ranks = ranges(int(rank[0]) for rank in detail.get("ranks") or ())
    return f"torch assigned ranks {ranks} of {detail.get('world_size')}"


def _running(detail: GenerationRunningDetail) -> str:
    phases = phases_of(detail)
    text = f"world size {detail.get('world_size')}"
    if not phases:
        return text
    parts = phases_text(phases)
    took = f"{text}, {duration(sum(phases.values()) / 1000)}" + (f" ({parts})" if parts else "")
    return f"{took}; {starts_text(detail['starts'])}" if detail.get("starts") else took


def starts_text(starts: Mapping[str, StartFacts]) -> str:
    """Return how nodes started their ranks: `warm`, or `cold on n1 n2: the waiting process has died`."""
    nodes: dict[str, list[str]] = {}
    for name, start in starts.items():
        if not start["warm"]:
            nodes.setdefault(str(start["why"]), []).append(name)
    cold = "; ".join(f"cold on {fold(names)}: {why}" for why, names in nodes.items())
    return cold or "warm"


def _stopped(detail: GenerationStoppedDetail) -> str:
    cause = str(detail.get("cause") or "")
    took = detail.get("stop_ms")
    return cause_text(cause) + (f"; stopped in {duration(took / 1000)}" if took is not None else "")


def _incident(detail: IncidentDocument) -> str:
    # The words are in front because the end of a long line may be cut off, and the final verdict often says the same.
    return f"{'so far: ' if detail.get('preliminary') else ''}{detail.get('summary') or ''}"


def _rank_failed(detail: RankFailedDetail) -> str:
    message = detail.get("message")
    if isinstance(message, Mapping):
        message = message.get("message", "")
    lines = [line.strip() for line in safe(message or "").splitlines() if line.strip()]
    end = exit_text(detail["exit"])
    if not lines:
        return end
    # The message of an error that wraps another's traceback ends with the cause.
    return f"{end}: {lines[-1] if any(line.startswith(TRACEBACK) for line in lines) else lines[0]}"


def _environment(detail: EnvironmentSetDetail) -> str:
    return f"{variables(detail)}, from generation {detail.get('from_generation')} on"


def _signal(detail: SignalSentDetail) -> str:
    ranks = name_ranks([int(rank) for rank in detail.get("ranks") or ()])
    return f"{detail.get('signal')} to {ranks}, {_asked(detail)}"


def _hook(detail: HookDetail) -> str:
    return _reason(detail) or f"hook {detail.get('hook')} ({detail.get('event')})"


def _unknown(detail: Mapping[str, object]) -> str:
    """Return the details of an event that a newer agent wrote."""
    return " ".join(f"{key}={one_line(value)}" for key, value in detail.items() if not isinstance(value, (dict, list)))


_TEXTS: Mapping[str, Callable[[Any], str]] = {
    EventType.JOB_STARTED: _started,
    EventType.JOB_DEGRADED: _degraded,
    EventType.JOB_SUCCEEDED: _succeeded,
    EventType.JOB_FAILED: _reason,
    EventType.JOB_STOPPED: _reason,
    EventType.NODE_JOINED: _joined,
    EventType.NODE_READY: _ready,
    EventType.NODE_ADDED: _asked,
    EventType.NODE_LOST: _reason,
    EventType.NODE_FAILED: _reason,
    EventType.NODE_REMOVED: _reason,
    EventType.NODE_CORDONED: _asked,
    EventType.NODE_UNCORDONED: _asked,
    EventType.AGENT_LOST: _reason,
    EventType.COORDINATOR_CHANGED: _taken_over,
    EventType.COORDINATOR_PAUSED: _reason,
    EventType.QUORUM_LOST: _quorum,
    EventType.GENERATION_PROPOSED: lambda detail: "with " + " ".join(detail.get("members") or ()),
    EventType.GENERATION_STARTED: _forming,
    EventType.RANKS_ASSIGNED: _assigned,
    EventType.GENERATION_RUNNING: _running,
    EventType.PROCESS_GROUP_UP: lambda detail: phases_text(phases_of(detail)),
    EventType.FIRST_STEP: lambda detail: phases_text(phases_of(detail)),
    EventType.GENERATION_STOPPED: _stopped,
    EventType.RANK_FAILED: _rank_failed,
    EventType.INCIDENT: _incident,
    EventType.INCIDENT_HEALED: _reason,
    EventType.HANG_OVER: _reason,
    EventType.WARNING: lambda detail: str(detail.get("message") or ""),
    EventType.SLOW: lambda detail: str(detail.get("message") or ""),
    EventType.SLOW_OVER: _reason,
    EventType.RESTART_REQUESTED: _restart_requested,
    EventType.REMOVE_REQUESTED: _asked,
    EventType.STOP_REQUESTED: _stop_requested,
    EventType.ENVIRONMENT_SET: _environment,
    EventType.TREE_CHANGED: tree_text,
    EventType.SNAPSHOTS_CHOSEN: snapshots_text,
    EventType.SIGNAL_SENT: _signal,
    EventType.OPERATOR_ATTACHED: lambda detail: ", ".join(
        str(detail[key]) for key in ("operator", "mode") if detail.get(key)
    ),
    EventType.OPERATOR_DETACHED: _operator,
    EventType.HOOK_DELIVERED: _hook,
    EventType.HOOK_FAILED: _hook,
    EventType.METRICS_FAILED: _reason,
}
