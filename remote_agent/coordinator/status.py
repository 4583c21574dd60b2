"""The status document of the contract.

In: the coordinator's State (live, or folded from the journal) and the nodes' heartbeats. Out: JSON data.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from remote_agent.coordinator import state as s
from remote_agent.coordinator import views
from remote_agent.wire.events import Condition, StopCause

if TYPE_CHECKING:
    from remote_agent.wire.documents import (
        GpuVitals,
        JobWarning,
        NodeFacts,
        NodeStatus,
        NodeVitals,
        RankFacts,
        RankProgress,
        RankStatus,
        RankVitals,
        SlowStatus,
        Status,
    )

# A rank without output for this long is called silent.
SILENT_AFTER_S = 60.0
# Starting ranks takes milliseconds.
START_S = 1.0
Vitals = TypeVar("Vitals", "NodeVitals", "GpuVitals", "RankVitals")
Facts = Mapping[str, "NodeFacts"]


def job_state(state: s.State) -> str:
    """Return the job's state as the contract names it."""
    if state.phase == s.ENDED:
        return state.ended or "running"
    if state.phase == s.RUNNING:
        return "running"
    if views.is_short(state):
        return "degraded"
    return "starting" if state.generation <= 0 and not state.marks.get("stop") else "restarting"


def condition(state: s.State) -> Condition:
    """Return what the job is doing: the only rule for every screen, document and report."""
    if state.phase == s.ENDED:
        # Without an end, the role is being handed over.
        return Condition(state.ended or Condition.RESTARTING)
    if state.cause == StopCause.STOP or (state.phase == s.STOPPING and views.is_last(state)):
        return Condition.STOPPING
    if state.phase == s.STOPPING:
        return Condition.RESTARTING
    if state.phase == s.RUNNING:
        return _condition_of_group(state)
    if views.is_short(state):
        return Condition.DEGRADED
    if state.generation > 0:
        return Condition.RESTARTING
    return Condition.IMPORTING if _waits_for_imports(state) else Condition.LAUNCHING


def _waits_for_imports(state: s.State) -> bool:
    """Return whether the first ranks were ordered a while ago: they wait until modules are loaded for all of them."""
    ordered = state.marks.get("go")
    # The journal alone does not show it.
    return state.phase == s.STARTING and ordered is not None and (state.ticked or ordered) - ordered > START_S


def _condition_of_group(state: s.State) -> Condition:
    incident = state.incident
    if incident is not None and incident.get("ongoing") and incident["generation"] == state.generation:
        return Condition.HUNG
    if _is_importing(state):
        return Condition.IMPORTING
    if len(state.members) < _wanted_nodes(state):
        return Condition.DEGRADED
    return Condition.SLOW if views.slow_status(state) else Condition.RUNNING


def _is_importing(state: s.State) -> bool:
    """Return whether the ranks of a running group have shown nothing yet, for as long as imports may take."""
    began, watch = state.marks.get("running"), state.watch
    # The journal alone does not show it.
    if began is None or (state.ticked or began) - began > SILENT_AFTER_S:
        return False
    has_progress = "process_group" in state.phases or state.stepped or watch.moved_at > began
    return not has_progress and not any(one["groups"] for one in watch.now.values())


def _wanted_nodes(state: s.State) -> int:
    """Return how many nodes the group would have if all were well; nodes that operators took out do not count."""
    wanted = [
        name
        for name, node in state.nodes.items()
        if name in state.members or not (node.cordoned or node.spec.spare or node.status == "removed")
    ]
    return min(state.spec.max_nodes, len(wanted))


def document(state: s.State, facts: Facts, coordinator: str | None, now: float | None = None) -> Status:
    """Return the status document; facts by node: agent_pid, clock_offset_ms, clock_error_ms, generation, vitals,
    ranks {rank: {step, …}}.

    now: the age of vitals grows by the time since a node's `heard_at`.
    """
    median = _median_position(state, facts, now)
    slow = views.slow_status(state)
    ranks: dict[str, list[s.Rank]] = {}
    for rank in sorted(state.ranks.values(), key=lambda rank: rank.rank):
        ranks.setdefault(rank.node, []).append(rank)
    return {
        "job": state.spec.job,
        "state": job_state(state),
        "condition": str(condition(state)),
        "generation": state.generation,
        "restarts": state.restarts,
        "max_restarts": state.spec.max_restarts,
        "min_nodes": state.spec.min_nodes,
        "max_nodes": state.spec.max_nodes,
        "world_size": state.world_size or len(state.ranks),
        "coordinator": coordinator,
        "started_at": state.started_at,
        "phases": dict(state.phases),
        "nodes": [
            _node(state, node, facts.get(name, {}), ranks.get(name, []), median, now)
            for name, node in state.nodes.items()
        ],
        "incident": state.incident,
        "warnings": _warnings(state, slow),
        "slow": slow,
        "sampling": views.sampling(state),
        "failure": state.failure,
        "plan": _plan(state),
        "environment": {"env": dict(state.env), "from_generation": state.env_from} if state.env else None,
        "tree": views.tree_status(state),
        "snapshots": views.kept_snapshots(state),
        "script": {"kind": state.spec.kind, "script": state.spec.script, "args": list(state.spec.args)},
    }


def _warnings(state: s.State, slow: list[SlowStatus]) -> list[JobWarning]:
    """Return all warnings; slow ranks are among them for readers that know nothing else."""
    warnings: list[JobWarning] = [
        {"kind": kind, "node": node, "rank": rank, "message": message}
        for (node, rank, kind), message in state.warnings.items()
    ]
    for one in slow:
        rank = one["ranks"][0] if len(one["ranks"]) == 1 else None
        warnings.append({"kind": "slow", "node": one["node"], "rank": rank, "message": f"slow: {one['message']}"})
    return warnings


def _live(state: s.State, facts: NodeFacts) -> Mapping[str, RankFacts]:
    """Return what a node reports of its ranks; a heartbeat of an older generation does not count."""
    return facts.get("ranks", {}) if facts.get("generation") == state.generation else {}


def _late_s(reported_at: float | None, now: float | None) -> float:
    """Return how long ago the steps of a node's ranks (`heard_at`), or all else (`measured_at`), were reported."""
    return 0.0 if now is None or reported_at is None else max(0.0, now - reported_at)


def _position(state: s.State, live: RankFacts, late_s: float) -> float | None:
    """Return the step that a rank has reached by now: nodes report once a second, one after the other.

    A rank that has ended, or prints nothing any more, stays where it is.
    """
    step, age_s = live.get("step"), live.get("last_output_age_s") or 0.0
    goes_on = state.phase == s.RUNNING and age_s <= s.HEARTBEAT_S
    pace = (live.get("progress") or {}).get("steps_s") or 0.0
    return step + pace * min(late_s, s.HEARTBEAT_S) if step is not None and goes_on else step


def _median_position(state: s.State, facts: Facts, now: float | None) -> float | None:
    lives = [
        (live, _late_s(each.get("heard_at"), now)) for each in facts.values() for live in _live(state, each).values()
    ]
    positions = [position for live in lives if (position := _position(state, *live)) is not None]
    return statistics.median(positions) if positions else None


def _node(
    state: s.State,
    node: s.Node,
    facts: NodeFacts,
    ranks: list[s.Rank],
    median: float | None,
    now: float | None,
) -> NodeStatus:
    live = _live(state, facts)
    late_s, measured_s = _late_s(facts.get("heard_at"), now), _late_s(facts.get("measured_at"), now)
    return {
        "name": node.name,
        "address": node.spec.address,
        "state": node.status,
        "nproc": node.nproc,
        "spare": node.spec.spare,
        "cordoned": node.cordoned,
        "lacks_tree": node.lacks,
        "group_rank": state.members.get(node.name) if ranks else None,
        "reason": "; ".join(filter(None, (node.reason, _remark(node, facts.get("malformed"))))) or None,
        "agent_pid": facts.get("agent_pid") if node.connected or node.name == state.me else None,
        "clock_offset_ms": facts.get("clock_offset_ms"),
        "clock_error_ms": facts.get("clock_error_ms"),
        "vitals": _older_node(facts.get("vitals"), measured_s),
        "start": None if node.cold is None else {"warm": not node.cold, "why": node.cold},
        "standby": facts.get("standby"),
        "ranks": [_rank(state, rank, live.get(str(rank.rank), {}), median, late_s, measured_s) for rank in ranks],
    }


def _remark(node: s.Node, malformed: str | None) -> str | None:
    """Return what is to be said of a node beside the reason for its state."""
    if malformed:
        return f"malformed report: {malformed}"
    return "cordoned" if node.cordoned and "cordoned" not in (node.reason or "") else None


def _older_node(vitals: NodeVitals | None, late_s: float) -> NodeVitals | None:
    """Return the vitals of a node and its GPUs with their present age."""
    older = None if vitals is None else _older(vitals, late_s)
    return {**older, "gpus": [_older(gpu, late_s) for gpu in older["gpus"]]} if older and "gpus" in older else older


def _older(vitals: Vitals, late_s: float) -> Vitals:
    return {**vitals, "age_s": round((vitals.get("age_s") or 0.0) + late_s, 1)} if late_s else vitals


def _rank(
    state: s.State, rank: s.Rank, live: RankFacts, median: float | None, late_s: float, measured_s: float
) -> RankStatus:
    age = live.get("last_output_age_s")
    age = None if age is None else round(age + late_s, 2)
    hang = state.watch.hang if state.phase == s.RUNNING else None
    # If the missing ranks are known, the ranks that wait for them do not count as silent.
    is_late = rank.rank in hang["missing"]["missing"] if hang is not None else age is not None and age > SILENT_AFTER_S
    silent = rank.state == "running" and is_late
    return {
        "rank": rank.rank,
        "local_rank": rank.local_rank,
        "pid": rank.pid,
        "state": "silent" if silent else rank.state,
        "exit_code": rank.code,
        "signal": rank.signal,
        "step": live.get("step"),
        "last_output_age_s": age,
        "progress": _progress(state, live, median, late_s),
        "vitals": _older(vitals, measured_s) if (vitals := live.get("vitals")) is not None else None,
    }


def _progress(state: s.State, live: RankFacts, median: float | None, late_s: float) -> RankProgress | None:
    """Return what its node reports of a rank's progress, and lag, the whole steps behind the ranks' median."""
    position, progress = _position(state, live, late_s), live.get("progress") or {}
    if position is None and all(value is None for value in progress.values()):
        return None
    behind = None if position is None or median is None else max(0, int(round(median - position, 3)))
    return {**progress, "lag": behind}


def _plan(state: s.State) -> str | None:
    """Say what happens next, where that is not obvious from the state."""
    if state.phase == s.STOPPING:
        waits = " ".join(sorted(state.waiting))
        cause = str(state.cause).replace("_", " ")
        return f"stopping generation {state.generation} ({cause}); waiting for {waits}"
    if views.is_short(state):
        return f"waiting for nodes: {views.shortage(state)}; bring one back or add one"
    if state.phase in (s.PREPARING, s.STARTING):
        where = f"{' '.join(state.members)}{_meeting(state)}"
        return f"starting generation {state.generation} on {where}{views.origin(state)}"
    strangers = (state.world_size or 0) - len(state.ranks)
    if state.phase == s.RUNNING and strangers > 0:
        return f"{strangers} of {state.world_size} ranks are outside HOSTS: other torch agents joined{_meeting(state)}"
    if condition(state) is Condition.DEGRADED:
        running = f"waiting for nodes: {len(state.members)} of {_wanted_nodes(state)} run"
        return "; ".join([running, *views.left_out(state, "failed", "lost")])
    return None


def _meeting(state: s.State) -> str:
    """Return where torch's agents meet, for a torchrun that is to join."""
    if state.rendezvous is None:
        return ""
    joining = state.rendezvous
    return f" (--rdzv-backend {joining['backend']} --rdzv-endpoint {joining['endpoint']} --rdzv-id {joining['run_id']})"
