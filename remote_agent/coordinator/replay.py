"""The coordinator's state, from the job's description and from its journal.

In: JobSpec and journal records. Out: a State: for a new job, for a takeover, or for the status of a finished job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from remote_agent.coordinator import quorum
from remote_agent.coordinator import state as s
from remote_agent.diagnose.incidents import after_event
from remote_agent.snapshots.choice import Skipped
from remote_agent.wire import FIRST_TERM, JobSpec, NodeSpec
from remote_agent.wire.documents import time_ns
from remote_agent.wire.events import EventType, StopCause, phases_of

if TYPE_CHECKING:
    from remote_agent.coordinator.journal import Journal
    from remote_agent.wire.documents import (
        EnvironmentSetDetail,
        ExitStatus,
        GenerationRunningDetail,
        GenerationStartedDetail,
        JournalEvent,
        RanksAssignedDetail,
        SlowStatus,
        TreeChangedDetail,
    )


def initial(spec: JobSpec, me: str, now: float, disk: str = "") -> s.State:
    """Return the state of a job that has not begun; `disk`: which one this node has."""
    nodes, groups = _named(spec), quorum.first(me, disk)
    return s.State(spec=spec, me=me, term=FIRST_TERM, nodes=nodes, groups=groups, deadline=now + spec.join_timeout)


def _named(spec: JobSpec) -> dict[str, s.Node]:
    """Return the nodes that the description names; where nodes join by themselves, the journal alone names them."""
    return {} if spec.endpoint else {node.name: s.Node(node) for node in spec.nodes}


def take_over(
    spec: JobSpec, me: str, term: int, records: Iterable[JournalEvent], now: float, away_s: float = 0.0
) -> s.State:
    """Return the state for a new coordinator: the last group is to be stopped, where it ran, and formed again.

    `away_s`: seconds since the old coordinator was last heard.
    """
    state = fold(spec, records, me)
    if state.phase == s.ENDED:
        return replace(state, term=term)
    nodes = {name: _expected(node, now - away_s) for name, node in state.nodes.items()}
    # A group that was only proposed may have been started by its author.
    ran = state.phase in (s.PREPARING, s.STARTING, s.RUNNING)
    cause = state.cause or (StopCause.NODE_LOST if ran else None)
    waiting = frozenset(name for name in state.members if nodes[name].status != "removed") if ran else frozenset()
    return replace(
        state,
        term=term,
        nodes=nodes,
        phase=s.STOPPING if ran else s.FORMING,
        cause=cause,
        waiting=waiting,
        deadline=now + spec.node_timeout,
        marks={"cause": now - away_s, "stop": now} if ran else {},
    )


def _expected(node: s.Node, seen: float) -> s.Node:
    """Return a node that has not joined the new coordinator yet; one with an nproc has been connected before."""
    status = "connecting" if node.status in ("running", "ready", "spare", "draining", "connecting") else node.status
    return replace(node, status=status, seen=seen, incarnation="before" if node.nproc else "")


def fold(spec: JobSpec, records: Iterable[JournalEvent], me: str = "") -> s.State:
    """Return the state that the journal shows."""
    state = _empty(spec, me)
    for record in records:
        state = _apply(state, record)
    return state


class Fold:
    """The state that a node's own journal shows; a look costs as much as has come since the last one."""

    def __init__(self, spec: JobSpec, journal: Journal, me: str) -> None:
        self._journal = journal
        self._empty = self._state = _empty(spec, me)
        self._records: list[JournalEvent] = []
        self._count = 0

    @property
    def state(self) -> s.State:
        """What all records so far show."""
        records = self._journal.records
        if records is not self._records:
            self._records, self._count, self._state = records, 0, self._empty
        for record in records[self._count :]:
            self._state = _apply(self._state, record)
        self._count = len(records)
        return self._state


def _empty(spec: JobSpec, me: str) -> s.State:
    return s.State(spec=spec, me=me, term=0, nodes=_named(spec))


def _apply(state: s.State, record: JournalEvent) -> s.State:
    term = max(state.term, int(record.get("term", 0)))
    incident = after_event(state.incident, record)
    state = replace(state, term=term, incident=incident, groups=quorum.apply(state.groups, record))
    apply = FOLDS.get(record["type"])
    return state if apply is None else apply(state, record)


def _with_node(state: s.State, name: str, **changes: Any) -> s.State:
    node = state.nodes.get(name)
    if node is None:
        return state
    return replace(state, nodes={**state.nodes, name: replace(node, **changes)})


def _node_joined(state: s.State, record: JournalEvent) -> s.State:
    spec = NodeSpec.from_json(record["detail"]["spec"])
    return replace(state, nodes={**state.nodes, spec.name: s.Node(spec)})


def _node_ready(state: s.State, record: JournalEvent) -> s.State:
    node = state.nodes.get(str(record["node"]))
    spare = record["detail"].get("spare", node is not None and node.spec.spare)
    status = "spare" if spare else "ready"
    return _with_node(state, str(record["node"]), status=status, reason=None, nproc=record["detail"]["nproc"])


def _node_lost(state: s.State, record: JournalEvent) -> s.State:
    reason = str(record["detail"].get("reason"))
    status = str(record["detail"]["status"])
    node, said = str(record["node"]), tuple((rank, text) for rank, text in record["detail"].get("said") or ())
    return _with_node(state.with_killed(node), node, status=status, reason=reason, said=said)


def _node_added(state: s.State, record: JournalEvent) -> s.State:
    spec = NodeSpec.from_json(record["detail"]["spec"])
    known = state.nodes.get(spec.name, s.Node(spec))
    node = replace(known, spec=spec, status="ready", reason=None, nproc=record["detail"]["nproc"], cordoned=False)
    nodes = {**state.nodes, spec.name: node}
    room = max(state.spec.max_nodes, sum(one.status in ("ready", "running") for one in nodes.values()))
    return replace(state, nodes=nodes, spec=replace(state.spec, max_nodes=room))


def _node_cordoned(state: s.State, record: JournalEvent) -> s.State:
    on = record["type"] == EventType.NODE_CORDONED
    return _with_node(state, str(record["node"]), cordoned=on, status=str(record["detail"]["status"]))


def _generation_proposed(state: s.State, record: JournalEvent) -> s.State:
    members = s.ranked(name for name in record["detail"]["members"] if name in state.nodes)
    for name in members:
        state = _with_node(state, name, status="running", reason=None)
    return replace(state, phase=s.PREPARING, generation=record["generation"], members=members, ranks={}, phases={})


def _generation_started(state: s.State, record: JournalEvent) -> s.State:
    detail: GenerationStartedDetail = record["detail"]
    members = [member for member in detail["members"] if member["node"] in state.nodes]
    ranks: dict[int, s.Rank] = {}
    names = {member["node"] for member in members}
    for name, node in state.nodes.items():
        if node.status == "ready" and name not in names:
            state = _with_node(state, name, status="spare")
        elif node.status == "removed" and name not in names and node.revoked_ns < node.removed_ns:
            state = _with_node(state, name, revoked_ns=time_ns(record["time"]))
    for member in members:
        state = _with_node(state, member["node"], status="running", reason=None, nproc=member["nproc"])
        for local_rank in range(member["nproc"]):
            number = member["base_rank"] + local_rank
            ranks[number] = s.Rank(number, member["node"], local_rank)
    return replace(
        state,
        phase=s.STARTING,
        generation=record["generation"],
        members=s.ranked(member["node"] for member in members),
        ranks=ranks,
        restarts=detail["restarts"],
        fingerprint=detail.get("fingerprint"),
        suspects=tuple(detail.get("suspects", ())),
        rendezvous=detail.get("rendezvous"),
        world_size=None,
    )


def _ranks_assigned(state: s.State, record: JournalEvent) -> s.State:
    ranks = {number: rank for number, rank in state.ranks.items() if rank.node != record["node"]}
    detail: RanksAssignedDetail = record["detail"]
    for number, local_rank, pid in detail["ranks"]:
        ranks[number] = s.Rank(number, str(record["node"]), local_rank, pid)
    return replace(state, ranks=ranks, world_size=detail["world_size"])


def _generation_running(state: s.State, record: JournalEvent) -> s.State:
    detail: GenerationRunningDetail = record["detail"]
    pids = detail.get("pids", {})
    ranks = {
        number: replace(
            rank, pid=pids.get(str(number), rank.pid), state="running" if rank.state == "starting" else rank.state
        )
        for number, rank in state.ranks.items()
    }
    for name, start in detail.get("starts", {}).items():
        if name in state.nodes:
            state = _with_node(state, name, cold=start["why"])
    return _phases(replace(state, phase=s.RUNNING, ranks=ranks, watch=s.Watch()), record)


def _phases(state: s.State, record: JournalEvent) -> s.State:
    return replace(state, phases={**state.phases, **phases_of(record["detail"])})


def _rank_failed(state: s.State, record: JournalEvent) -> s.State:
    rank = None if record["rank"] is None else state.ranks.get(record["rank"])
    if rank is None or record["generation"] != state.generation:
        return state
    ended: ExitStatus = record["detail"]["exit"]
    failed = replace(rank, state="failed", code=ended["code"], signal=ended["signal"])
    return replace(state, ranks={**state.ranks, rank.rank: failed})


def _none_running(state: s.State) -> s.State:
    for name, node in state.nodes.items():
        if node.status == "running":
            state = _with_node(state, name, status="ready")
    return state


def _environment_set(state: s.State, record: JournalEvent) -> s.State:
    detail: EnvironmentSetDetail = record["detail"]
    return replace(state, env=detail["env"], env_from=detail["from_generation"])


def _tree_changed(state: s.State, record: JournalEvent) -> s.State:
    detail: TreeChangedDetail = record["detail"]
    trees = tuple(s.Version(digest, since_ns) for digest, since_ns in detail["trees"])
    return replace(state, trees=trees, fingerprint=None)


def _warning(state: s.State, record: JournalEvent) -> s.State:
    detail = record["detail"]
    key = (str(record["node"]), record["rank"], str(detail.get("kind", "nan")))
    return replace(state, warnings={**state.warnings, key: str(detail["message"])})


def _with_slow(state: s.State, status: SlowStatus | None) -> s.State:
    return replace(state, watch=s.Watch(slow=s.SlowWatch(status=status)))


def _ended(state: s.State, record: JournalEvent) -> s.State:
    how = record["type"].split("_", 1)[1]
    ranks = state.ranks
    if how == "succeeded":
        ranks = {number: replace(rank, state="succeeded", code=0) for number, rank in ranks.items()}
    failure = record["detail"].get("reason") if how == "failed" else None
    return replace(_none_running(state), phase=s.ENDED, ended=how, ranks=ranks, failure=failure)


FOLDS: dict[str, Callable[[s.State, JournalEvent], s.State]] = {
    EventType.JOB_STARTED: lambda state, record: replace(state, started_at=record["time"]),
    EventType.NODE_JOINED: _node_joined,
    EventType.NODE_READY: _node_ready,
    EventType.NODE_LOST: _node_lost,
    EventType.NODE_FAILED: _node_lost,
    EventType.NODE_REMOVED: lambda state, record: _with_node(
        state,
        str(record["node"]),
        status="removed",
        reason=record["detail"].get("reason"),
        removed_ns=time_ns(record["time"]),
    ),
    EventType.NODE_ADDED: _node_added,
    EventType.NODE_CORDONED: _node_cordoned,
    EventType.NODE_UNCORDONED: _node_cordoned,
    EventType.GENERATION_PROPOSED: _generation_proposed,
    EventType.GENERATION_STARTED: _generation_started,
    EventType.RANKS_ASSIGNED: _ranks_assigned,
    EventType.GENERATION_RUNNING: _generation_running,
    EventType.PROCESS_GROUP_UP: _phases,
    EventType.FIRST_STEP: _phases,
    EventType.RANK_FAILED: _rank_failed,
    EventType.GENERATION_STOPPED: lambda state, _: replace(_none_running(state.with_killed()), phase=s.FORMING),
    EventType.STOP_REQUESTED: lambda state, record: replace(
        state, cause=StopCause.STOP, preempted=str(record["detail"].get("reason") or "")
    ),
    EventType.ENVIRONMENT_SET: _environment_set,
    EventType.TREE_CHANGED: _tree_changed,
    EventType.RESTART_REQUESTED: lambda state, record: replace(
        state, resume_from=str(record["detail"].get("snapshot") or "")
    ),
    EventType.SNAPSHOTS_CHOSEN: lambda state, record: replace(
        state, resume_from="", skipped=Skipped.noted(record["detail"])
    ),
    EventType.INCIDENT: lambda state, record: replace(state, incidents=record["detail"]["id"]),
    EventType.WARNING: _warning,
    EventType.SLOW: lambda state, record: _with_slow(state, record["detail"]),
    EventType.SLOW_OVER: lambda state, _: _with_slow(state, None),
    EventType.JOB_SUCCEEDED: _ended,
    EventType.JOB_FAILED: _ended,
    EventType.JOB_STOPPED: _ended,
}
