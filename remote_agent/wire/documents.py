"""The types of documents that cross wires and files: events, incidents, status, snapshots, NCCL facts.

In: JSON. Out: `read_event`, `read_status` …: the same documents, whose fields have the types declared here; `Misfit`
for anything else. Fields that only a newer version knows stay, as long as they are plain JSON.

The annotations are evaluated (see wire/gate.py), so they are written as Python 3.9 understands them.
"""

import datetime
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Optional, TypedDict, Union

from remote_agent.wire.events import PHASES, EventType
from remote_agent.wire.gate import (
    Misfit,
    Name,
    Shape,
    anything,
    fields,
    name,
    number,
    parse,
    reader,
    record,
    row,
    shape,
    text,
    whole,
)

STREAMS = ("stdout", "stderr", "nccl")
Severity = Literal["error", "warning", "info"]
# No job has as many ranks: a damaged number must not become a list of that length.
MAX_RANKS = 1 << 17
# Times are between the years 1684 and 2255; anything beyond is no time. A machine without a clock starts in 1970.
MAX_TIME_NS = 9_000_000_000 * 1_000_000_000
_MOMENT = re.compile(r"(?:1[6-9]|2\d)\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{3}(?:\d{3})?)?Z")


def moment(value: object) -> str:
    """Return a time as 2026-11-20T10:00:00.123Z; raises Misfit."""
    time = text(value)
    try:
        if _MOMENT.fullmatch(time) is None:
            raise ValueError
        datetime.datetime.fromisoformat(time[:-1])
    except ValueError as error:
        raise Misfit("is not a time") from error
    return time


def time_ns(time: str) -> int:
    """Return the nanoseconds since the epoch of a time of a document, to its millisecond."""
    stamp = datetime.datetime.fromisoformat(time.replace("Z", "+00:00"))
    return round(stamp.timestamp() * 1000) * 1_000_000


# JSON has no such numbers, so a rank's figures have them as words.
NOT_FINITE = ("nan", "-nan", "inf", "-inf")


def _measured(value: object) -> Optional[float]:
    """Return a number that is shown, null for one that is too large or not finite; raises Misfit."""
    if value is None or value in NOT_FINITE:
        return None
    return number(value) if isinstance(value, bool) or not isinstance(value, (int, float)) else anything(value)


def _figure(value: object) -> Union[float, str, None]:
    """Return what a rank printed, a number or a word of NOT_FINITE; raises Misfit."""
    return text(value) if value in NOT_FINITE else _measured(value)


def by_rank(kind: Any) -> Shape:
    """Return the shape of an object with values of that type by rank, whose keys are decimal numbers."""

    def read(value: object) -> dict[str, Any]:
        values: dict[str, Any] = shape(dict[str, kind])(value)
        for rank in values:
            if not (rank.isascii() and rank.isdecimal() and len(rank) < 8 and int(rank) < MAX_RANKS):
                raise Misfit(f"{rank[:20]} is not a rank")
        return values

    return read


Count = Annotated[int, whole(0)]
RankNumber = Annotated[int, whole(0, MAX_RANKS - 1)]
TimeNs = Annotated[int, whole(-MAX_TIME_NS, MAX_TIME_NS)]
GenerationNumber = Annotated[int, whole(-1)]
ExitCode = Annotated[int, whole(-(1 << 31), 1 << 32)]
IsoTime = Annotated[str, moment]
Measured = Annotated[Optional[float], _measured]
Figure = Annotated[Union[float, str, None], _figure]

# --- incidents

ExitStatus = TypedDict("ExitStatus", {"code": Optional[ExitCode], "signal": Optional[str]})
SourceExcerpt = TypedDict("SourceExcerpt", {"first": Annotated[int, whole(1)], "text": str})
WaitingCall = TypedDict(
    "WaitingCall", {"collective": str, "seq": Optional[int], "group": str, "ranks": list[RankNumber]}
)
VictimsEntry = TypedDict("VictimsEntry", {"ranks": list[RankNumber], "category": str, "summary": str})


class EvidenceEntry(TypedDict):
    node: Optional[Name]
    rank: Optional[RankNumber]
    file: Optional[str]
    line: Optional[int]
    text: str


class _MissingRanks(TypedDict):
    collective: Optional[str]
    seq: Optional[int]
    waiting: list[RankNumber]
    missing: list[RankNumber]
    stacks: dict[str, str]


class MissingRanks(_MissingRanks, total=False):
    """The ranks for which a collective waits; `stacks` are places by rank, `sources` are by place."""

    calls: list[WaitingCall]
    sources: dict[str, SourceExcerpt]


class _Incident(TypedDict):
    id: Count
    generation: GenerationNumber
    time: Optional[IsoTime]
    category: str
    scope: str
    culprit_ranks: list[RankNumber]
    culprit_node: Optional[Name]
    confidence: str
    summary: str
    evidence: list[EvidenceEntry]
    traceback: Optional[str]
    exit: ExitStatus
    hint: str
    victims: list[VictimsEntry]
    missing: Optional[MissingRanks]


class IncidentDocument(_Incident, total=False):
    fingerprint: str
    at_least: bool
    why: list[str]
    state: str
    ended_at: Optional[IsoTime]
    over: Optional[str]
    ongoing: bool
    preliminary: bool
    times_out_at: Optional[IsoTime]
    restarts_at: Optional[IsoTime]


# --- snapshots


class _Snapshot(TypedDict):
    id: Name
    path: str
    bytes: Count
    time_ns: TimeNs
    step: Optional[Count]


class SnapshotEntry(_Snapshot, total=False):
    exact: bool
    """The snapshot itself names its step; else it is what ranks had printed when it was saved."""


class OfferedSnapshot(SnapshotEntry):
    holders: list[Name]
    """The connected nodes that have it, members of the group first."""


class SnapshotStatus(SnapshotEntry, total=False):
    nodes: list[Name]
    skipped: bool


class PlacedReport(TypedDict, total=False):
    seconds: float
    bytes: Count
    placed: dict[str, Optional[Name]]
    """The node from which each snapshot came, null for the member's own copy."""
    aside: list[str]


class PlacedAnswer(PlacedReport, total=False):
    ids: list[Name]
    problem: str


read_snapshots = reader(list[SnapshotEntry])
read_placed = reader(PlacedAnswer, "ids", "seconds", "bytes", "placed", "aside")

# --- the journal


class EventHead(TypedDict):
    seq: Annotated[int, whole(1)]
    time: IsoTime
    type: str
    generation: GenerationNumber
    node: Optional[Name]
    rank: Optional[RankNumber]


class _JournalEvent(EventHead):
    detail: Annotated[Any, record({})]


class JournalEvent(_JournalEvent, total=False):
    """One event. `type` is a string: a newer agent may know more types than we do.

    A reader of `detail` names the type that it has according to `_DETAILS`.
    """

    term: Count
    """The term, which only agents use."""


AskedDetail = TypedDict("AskedDetail", {"operator": Optional[str], "reason": Optional[str]}, total=False)
"""The fields that every detail may have: the operator who asked for it, and the reason."""
_NodeReady = TypedDict("_NodeReady", {"nproc": RankNumber})
_NodeLost = TypedDict("_NodeLost", {"status": str})
StartFacts = TypedDict("StartFacts", {"warm": bool, "why": str})
GenerationProposedDetail = TypedDict("GenerationProposedDetail", {"members": dict[str, str], "disk": str})
"""The disk of each member, and of the coordinator."""
GroupMember = TypedDict("GroupMember", {"node": Name, "base_rank": RankNumber, "nproc": RankNumber})
Meeting = TypedDict("Meeting", {"backend": str, "endpoint": str, "run_id": str})


class OrderedMeeting(Meeting):
    """How torch's agents form a group; conf: torchrun's K=V,…; is_ours: one of our engines serves the store."""

    conf: str
    nnodes: str
    is_ours: bool
    local_addr: str


class NodeReadyDetail(_NodeReady, total=False):
    spare: bool
    returned: bool
    versions: dict[str, str]


SaidLines = list[Annotated[list[Any], row(RankNumber, str)]]
"""A rank, and the last line that it has printed."""
LeaderLines = TypedDict("LeaderLines", {"node": Name, "said": SaidLines})
"""The last lines of the coordinator's own ranks, in its answer to a heartbeat."""
read_leader_lines = reader(LeaderLines)


class NodeLostDetail(_NodeLost, AskedDetail, total=False):
    alive_ns: Optional[TimeNs]
    said: SaidLines
    """The last line of each of its ranks, as far as it had reported any."""


def _members(value: object) -> list[GroupMember]:
    members: list[GroupMember] = shape(list[GroupMember])(value)
    if sum(member["nproc"] for member in members) > MAX_RANKS:
        raise Misfit(f"is a group of more than {MAX_RANKS} ranks")
    return members


class _GenerationStarted(TypedDict):
    members: Annotated[list[GroupMember], _members]
    restarts: Count


class GenerationStartedDetail(_GenerationStarted, total=False):
    world_size: Optional[Count]
    fingerprint: Optional[str]
    suspects: list[Name]
    rendezvous: Optional[Meeting]
    env: dict[str, str]
    tree: Any


class RanksAssignedDetail(TypedDict):
    ranks: list[Annotated[list[int], row(RankNumber, RankNumber, int)]]
    """Rank, local rank, pid each."""
    world_size: Optional[Count]


class GenerationRunningDetail(TypedDict, total=False):
    """It has phases too, which `phases_of` reads."""

    world_size: Optional[Count]
    pids: dict[str, Optional[int]]
    starts: dict[str, StartFacts]


_TIMES = (Optional[TimeNs],) * 3


class GenerationStoppedDetail(TypedDict, total=False):
    cause: Optional[str]
    stop_ms: Optional[float]
    left: list[Annotated[list[Any], row(RankNumber, TimeNs, Optional[TimeNs])]]
    """Rank, time_ns, over_ns each."""
    stopped: list[Annotated[list[Any], row(RankNumber, TimeNs, Optional[ExitCode], Optional[str], *_TIMES)]]
    """Rank, time_ns, code, signal, raised_ns, over_ns, asked_ns each."""
    clocks: dict[str, Annotated[list[int], row(int, int)]]
    """The shift and the error of each node's clock, in nanoseconds."""


_RankFailed = TypedDict("_RankFailed", {"exit": ExitStatus})


class RankFailedDetail(_RankFailed, total=False):
    local_rank: Optional[RankNumber]
    pid: Optional[int]
    sent: Optional[str]
    time_ns: Optional[TimeNs]
    shift_ns: int
    raised_ns: Optional[TimeNs]
    over_ns: Optional[TimeNs]
    notes: list[str]
    message: Any


EnvironmentSetDetail = TypedDict("EnvironmentSetDetail", {"env": dict[str, str], "from_generation": GenerationNumber})
_TREE = Annotated[list[Any], row(str, TimeNs)]


class _TreeChanged(TypedDict):
    trees: Annotated[list[Any], row(_TREE, _TREE)]
    """Digest and time of the one before, and of the new one."""


TreeSummary = TypedDict("TreeSummary", {"files": Count, "bytes": Count, "paths": list[str]}, total=False)
"""How many files of a work tree are changed, new or removed, and some of their paths."""


class TreeChangedDetail(_TreeChanged, AskedDetail, TreeSummary, total=False):
    rollback: bool
    digest: str
    without: list[str]


class _SnapshotsChosen(TypedDict):
    snapshots: list[SnapshotEntry]
    skipped: list[Annotated[list[int], row(TimeNs, TimeNs)]]


class SnapshotsChosenDetail(_SnapshotsChosen, total=False):
    placed: dict[str, PlacedReport]


_NodeAddress = TypedDict("_NodeAddress", {"name": Name, "address": str})


class JoinedSpec(_NodeAddress, total=False):
    """What `NodeSpec.from_json` reads of a node that has joined."""

    nproc_per_node: str
    spare: bool
    env: dict[str, str]


class JobStartedDetail(AskedDetail, total=False):
    script: str
    args: list[str]
    nodes: list[Name]


class JobDegradedDetail(AskedDetail, total=False):
    ready: Count
    needed: Count


class JobEndedDetail(AskedDetail, total=False):
    restarts: Optional[Count]
    untold: list[Name]


NodeJoinedDetail = TypedDict("NodeJoinedDetail", {"spec": JoinedSpec})


class NodeAddedDetail(NodeJoinedDetail):
    nproc: RankNumber


CoordinatorChangedDetail = TypedDict("CoordinatorChangedDetail", {"former": Optional[Name], "term": Count}, total=False)
QuorumLostDetail = TypedDict("QuorumLostDetail", {"held": list[Name], "members": list[Name]}, total=False)


class RestartRequestedDetail(AskedDetail, total=False):
    snapshot: Optional[Name]


class StopRequestedDetail(AskedDetail, total=False):
    kill: bool


class SignalSentDetail(AskedDetail, total=False):
    ranks: Optional[list[RankNumber]]
    signal: Optional[str]


_Hook = TypedDict("_Hook", {"hook": Count, "of": Count})
_Warning = TypedDict("_Warning", {"message": str})


class HookDetail(_Hook, AskedDetail, total=False):
    event: str


# --- what the time of ranks goes to (engine/sampler.py)

TakenBy = TypedDict("TakenBy", {"name": str, "pid": Count, "share": float})
"""The busiest other process on a rank's processor, and its share of one."""
RankWindow = TypedDict(
    "RankWindow",
    {"looks": Count, "phases": dict[str, Annotated[tuple[float, float], row(float, float)]], "disk_s": float,
     "delay_s": float, "throttled_s": float, "faults": Count, "cuda": bool, "taken": Optional[TakenBy],
     "sites": list[Annotated[tuple[str, str, str, int, float], row(Name, Name, Name, Count, float)]],
     "links": list[Annotated[tuple[str, str, float, float], row(Name, Name, float, float)]]},
)  # fmt: skip
"""What a rank's main thread did in one window, in seconds.

looks: how often it was seen; phases: by phase, the time and that of the processor; disk_s, delay_s, throttled_s: the
time in which it waited for the disk, for a processor, and because of its cgroup's limit; faults: pages that were read
from disk; sites: phase, file, function, line and time of the places with the most time; links: of TCP between machines,
both addresses, Gbit/s at which it delivers, and the share of the time in which bytes wait to be sent.
"""
WINDOW_S = 10.0
"""How long a window is: number N begins at N times this, in seconds of the coordinator's clock since the epoch."""
SLOW_OFF = "--no-slow, or slow = false"
"""Why no rank of a job is sampled."""
SlowPlace = TypedDict("SlowPlace", {"file": str, "line": Count, "function": str})
SlowCause = TypedDict("SlowCause", {"kind": str, "share": float, "by": Optional[str], "pid": Optional[Count]})
SlowStatus = TypedDict(
    "SlowStatus",
    {"node": Optional[Name], "ranks": list[RankNumber], "since": str, "share": float, "phase": str,
     "place": Optional[SlowPlace], "cause": Optional[SlowCause], "limits": Optional[str], "message": str},
)  # fmt: skip
SlowOverDetail = TypedDict("SlowOverDetail", {"ranks": list[RankNumber], "seconds": float, "reason": str})
Sampling = TypedDict("Sampling", {"state": str, "reason": Optional[str]})
"""Whether ranks are sampled: on or off; why not, or not always."""


def _detail(kind: Any = AskedDetail, /, **optional: Any) -> Shape:
    own, others = fields(kind)
    return record(own, {**AskedDetail.__annotations__, **others, **optional})


_PHASES = dict.fromkeys(PHASES, Optional[float])
_CORDONED, _ENDED, _HOOK = _detail(_NodeLost), _detail(JobEndedDetail), _detail(HookDetail)
_DETAILS: Mapping[str, Shape] = {
    EventType.JOB_STARTED: _detail(JobStartedDetail),
    EventType.JOB_DEGRADED: _detail(JobDegradedDetail),
    EventType.JOB_SUCCEEDED: _ENDED,
    EventType.JOB_FAILED: _ENDED,
    EventType.JOB_STOPPED: _ENDED,
    EventType.NODE_JOINED: _detail(NodeJoinedDetail),
    EventType.NODE_READY: _detail(NodeReadyDetail),
    EventType.NODE_ADDED: _detail(NodeAddedDetail),
    EventType.NODE_LOST: _detail(NodeLostDetail),
    EventType.NODE_FAILED: _detail(NodeLostDetail),
    EventType.NODE_CORDONED: _CORDONED,
    EventType.NODE_UNCORDONED: _CORDONED,
    EventType.COORDINATOR_CHANGED: _detail(CoordinatorChangedDetail),
    EventType.QUORUM_LOST: _detail(QuorumLostDetail),
    EventType.GENERATION_PROPOSED: _detail(GenerationProposedDetail),
    EventType.GENERATION_STARTED: _detail(GenerationStartedDetail),
    EventType.RANKS_ASSIGNED: _detail(RanksAssignedDetail),
    EventType.GENERATION_RUNNING: _detail(GenerationRunningDetail, **_PHASES),
    EventType.PROCESS_GROUP_UP: _detail(**_PHASES),
    EventType.FIRST_STEP: _detail(**_PHASES),
    EventType.GENERATION_STOPPED: _detail(GenerationStoppedDetail),
    EventType.RANK_FAILED: _detail(RankFailedDetail),
    EventType.INCIDENT: shape(IncidentDocument),
    EventType.WARNING: _detail(_Warning, kind=str),
    EventType.SLOW: _detail(SlowStatus),
    EventType.SLOW_OVER: _detail(SlowOverDetail),
    EventType.ENVIRONMENT_SET: _detail(EnvironmentSetDetail),
    EventType.TREE_CHANGED: _detail(TreeChangedDetail),
    EventType.RESTART_REQUESTED: _detail(RestartRequestedDetail),
    EventType.STOP_REQUESTED: _detail(StopRequestedDetail),
    EventType.SNAPSHOTS_CHOSEN: _detail(SnapshotsChosenDetail),
    EventType.SIGNAL_SENT: _detail(SignalSentDetail),
    EventType.OPERATOR_ATTACHED: _detail(mode=Optional[str]),
    EventType.HOOK_DELIVERED: _HOOK,
    EventType.HOOK_FAILED: _HOOK,
}
_ANY_DETAIL = _detail()
# These are facts about one node.
_OF_NODE = frozenset(
    {
        EventType.NODE_READY,
        EventType.NODE_LOST,
        EventType.NODE_FAILED,
        EventType.NODE_REMOVED,
        EventType.NODE_CORDONED,
        EventType.NODE_UNCORDONED,
        EventType.RANKS_ASSIGNED,
        EventType.RANK_FAILED,
    }
)
_read_any = reader(JournalEvent)


def read_event(value: object) -> JournalEvent:
    """Return an event of the journal, also of a type that only a newer version knows; raises Misfit."""
    event = _read_any(value)
    kind = event["type"]
    try:
        event["detail"] = _DETAILS.get(kind, _ANY_DETAIL)(event["detail"])
    except Misfit as wrong:
        raise wrong.inside("detail") from wrong
    if kind in _OF_NODE:
        name(event["node"])
    if kind == EventType.RANK_FAILED:
        shape(RankNumber)(event["rank"])
    return event


def parse_event(line: Union[str, bytes]) -> JournalEvent:
    """Return the event in a line of a journal; raises Misfit."""
    return read_event(parse(line))


# --- the status

GpuVitals = TypedDict(
    "GpuVitals",
    {"age_s": Measured, "use": Measured, "mem_used": Measured, "mem_total": Measured, "temp": Measured,
     "power": Measured, "power_limit": Measured, "clock": Measured, "ecc": Measured, "xid": Measured,
     "index": Optional[Count], "name": Optional[str]},
    total=False,
)  # fmt: skip
NodeVitals = TypedDict(
    "NodeVitals",
    {"age_s": Measured, "every_s": Measured, "cpu": Measured, "mem_used": Measured, "mem_total": Measured,
     "disk_free": Measured, "disk_total": Measured, "shm_free": Measured, "shm_total": Measured, "net_in": Measured,
     "net_out": Measured, "gpus": list[GpuVitals]},
    total=False,
)  # fmt: skip


def is_old(vitals: NodeVitals) -> bool:
    """Return whether more than three measurements are missing, so that these are not known any more."""
    age, every = vitals.get("age_s"), vitals.get("every_s")
    return age is None or every is None or age > 3 * every


RankVitals = TypedDict(
    "RankVitals", {"age_s": Measured, "cpu": Measured, "rss": Measured, "gpu": Optional[Count]}, total=False
)
RankProgress = TypedDict(
    "RankProgress",
    {"age_s": Measured, "rate": Measured, "steps_s": Measured, "lag": Measured, "loss": Figure, "lr": Figure,
     "grad_norm": Figure, "unit": Optional[str], "total": Optional[int], "saved": Optional[int]},
    total=False,
)  # fmt: skip
_RankStatus = TypedDict("_RankStatus", {"rank": RankNumber})
_NodeStatus = TypedDict("_NodeStatus", {"name": Name})
_StandbyStatus = TypedDict("_StandbyStatus", {"state": str})


class RankStatus(_RankStatus, total=False):
    local_rank: Optional[RankNumber]
    pid: Optional[int]
    state: str
    exit_code: Optional[ExitCode]
    signal: Optional[str]
    step: Optional[int]
    last_output_age_s: Optional[float]
    progress: Optional[RankProgress]
    vitals: Optional[RankVitals]


class StandbyStatus(_StandbyStatus, total=False):
    pid: Optional[int]
    why: str
    modules: Count
    mb: Count
    left_out: list[str]


class NodeStatus(_NodeStatus, total=False):
    address: str
    state: str
    nproc: RankNumber
    spare: bool
    cordoned: bool
    lacks_tree: bool
    group_rank: Optional[Count]
    reason: Optional[str]
    agent_pid: Optional[int]
    clock_offset_ms: Optional[float]
    clock_error_ms: Optional[float]
    vitals: Optional[NodeVitals]
    start: Optional[StartFacts]
    standby: Optional[StandbyStatus]
    ranks: list[RankStatus]


_DECIMAL = re.compile(r"[+-]?\d{1,15}(?:\.\d{1,15})?(?:[eE][+-]?\d{1,3})?")


def _decimal(value: object) -> str:
    """Return the text of a decimal number, as a rank has printed it; raises Misfit."""
    if _DECIMAL.fullmatch(text(value)) is None:
        raise Misfit("is not a number")
    return text(value)


class RankFacts(TypedDict, total=False):
    """What an agent reports of a rank with its heartbeat."""

    step: Optional[int]
    last_output_age_s: Optional[float]
    first_step_age_s: Optional[float]
    said: Optional[str]
    """The last line that it has printed."""
    warning: Optional[str]
    losses: list[Annotated[list[Any], row(int, Annotated[str, _decimal])]]
    """Step and loss of some steps since the last heartbeat."""
    progress: Optional[RankProgress]
    vitals: Optional[RankVitals]


ErrorDocument = TypedDict("ErrorDocument", {"message": str, "callstack": Optional[str], "timestamp_ns": TimeNs})
LastLine = TypedDict("LastLine", {"text": str, "line": Optional[int]})


class RankExit(TypedDict, total=False):
    """How a rank ended, as its engine reports it, and what it left."""

    rank: RankNumber
    local_rank: Optional[RankNumber]
    pid: Optional[int]
    code: Optional[ExitCode]
    """Exit status; None when a signal ended it."""
    signal: Optional[str]
    core: bool
    t_ns: Optional[TimeNs]
    over_ns: Optional[TimeNs]
    """The time when its script was over."""
    asked_ns: Optional[TimeNs]
    """The time when we asked it to end."""
    sent: Optional[str]
    stopped_by_us: bool
    notes: list[str]
    error: Optional[ErrorDocument]
    tail: str
    stderr_lines: Optional[int]
    said: Optional[LastLine]
    """The last line of stdout."""
    nccl: str
    node: str
    shift_ns: int
    """The correction that `t_ns` contains."""
    clock_error_ns: int


class NodeReport(TypedDict, total=False):
    """What an agent reports of its node with its heartbeat."""

    generation: GenerationNumber
    agent_pid: Optional[int]
    vitals: Optional[NodeVitals]
    standby: Optional[StandbyStatus]
    ranks: Annotated[dict[str, RankFacts], by_rank(RankFacts)]
    snapshots: list[SnapshotEntry]


class NodeFacts(NodeReport, total=False):
    """What the coordinator knows of a node; heard_at: when it was reported, by the coordinator's clock."""

    clock_offset_ms: Optional[float]
    clock_error_ms: Optional[float]
    heard_at: float
    measured_at: float
    """When all of it was reported: of a large job, most heartbeats have steps only."""
    malformed: str
    """What its newest report has that no report of ours has; its facts are the last ones that could be read."""


read_node_report = reader(NodeReport, "generation", "ranks")
_STEP = Annotated[list[Any], row(Optional[int], Optional[float])]
Steps = TypedDict("Steps", {"generation": GenerationNumber, "ranks": Annotated[dict[str, list[Any]], by_rank(_STEP)]})
"""By rank: its step, and the age of its last output."""
read_steps = reader(Steps)


class JobWarning(TypedDict):
    kind: str
    node: Optional[Name]
    rank: Optional[RankNumber]
    message: str


_Environment = TypedDict("_Environment", {"env": dict[str, str]})
_Script = TypedDict("_Script", {"script": Optional[str]})
_TreeVersion = TypedDict("_TreeVersion", {"digest": str})


class EnvironmentStatus(_Environment, total=False):
    from_generation: GenerationNumber


class ScriptStatus(_Script, total=False):
    kind: str
    args: list[str]


class TreeVersion(_TreeVersion, total=False):
    since_ns: Optional[TimeNs]


class _TreeStatus(TypedDict):
    previous: Optional[TreeVersion]


class TreeStatus(TreeVersion, _TreeStatus, total=False):
    name: str


class EditedChange(TreeSummary):
    digest: str


class EditedTree(TypedDict):
    """What has been edited since the group's work tree, and that tree."""

    change: Optional[EditedChange]
    tree: TreeStatus
    place: str
    """The directory of the files, in words that say whether the job was launched from it."""


class Status(TypedDict, total=False):
    """The status of a job; it has no fields before the job has answered."""

    job: str
    state: str
    condition: str
    generation: GenerationNumber
    restarts: Count
    max_restarts: Count
    min_nodes: Count
    max_nodes: Count
    world_size: Optional[Count]
    coordinator: Optional[Name]
    started_at: Optional[IsoTime]
    phases: dict[str, Optional[float]]
    nodes: list[NodeStatus]
    incident: Optional[IncidentDocument]
    warnings: list[JobWarning]
    slow: list[SlowStatus]
    sampling: Sampling
    failure: Optional[str]
    plan: Optional[str]
    environment: Optional[EnvironmentStatus]
    snapshots: list[SnapshotStatus]
    tree: Optional[TreeStatus]
    script: Optional[ScriptStatus]
    term: Count
    journal_term: Count
    last_seq: Count
    node: Optional[Name]
    coordinator_reachable: Optional[bool]


read_status = reader(Status, "job", "state", "generation", "nodes")

# --- the reply to a request that changes the job

_Outcome = TypedDict("_Outcome", {"accepted": bool, "message": str})


class ReplyEntry(_Outcome, total=False):
    """The outcome for one node or rank."""

    hint: str


class RequestReply(_Outcome, total=False):
    generation: GenerationNumber
    seq: Count
    """The number of the last event before it."""
    nodes: dict[str, ReplyEntry]
    ranks: dict[str, ReplyEntry]
    """Added by a supervisor, as the next one."""
    hint: str


# --- NCCL's facts

NcclSummary = TypedDict(
    "NcclSummary",
    {"versions": list[str], "networks": list[str], "interfaces": list[str], "transports": list[str],
     "nranks": Optional[Count], "nodes": Optional[Count], "channels": Optional[Count], "nvls": Optional[bool],
     "warnings": list[str]},
    total=False,
)  # fmt: skip
_NcclNode = TypedDict("_NcclNode", {"generation": GenerationNumber})


class NcclGroup(TypedDict):
    ranks: list[RankNumber]
    facts: Annotated[dict[str, Any], record({}, {"env": dict[str, str]})]
    """The facts of diagnose/nccl.py."""


class NcclOutput(TypedDict, total=False):
    groups: list[NcclGroup]
    comms: list[Annotated[list[Any], row(RankNumber, str, int, int)]]
    """Rank, communicator, rank in it, its size each."""
    links: list[Annotated[list[Any], row(RankNumber, str, int, int, str, int)]]
    """Rank, communicator, from, to, transport, channels each."""
    warnings: list[Annotated[list[Any], row(RankNumber, str, Any)]]
    """Rank, text, count each."""


class NcclNode(_NcclNode, NcclOutput, total=False):
    stamp: str


Diagnosis = TypedDict("Diagnosis", {"incidents": list[IncidentDocument], "nccl": Optional[NcclSummary]})
"""What `diagnose` finds in files."""
read_nccl_node = reader(NcclNode)
