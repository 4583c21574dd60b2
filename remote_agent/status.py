"""The status document of the contract.

In: the coordinator's State (live, or folded from the journal) and what nodes said of their ranks. Out: JSON data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remote_agent import state as s
from remote_agent import watch
from remote_agent.formation import shortage

# A rank that has said nothing for this long is called silent.
SILENT_AFTER_S = 60.0
Facts = Mapping[str, Mapping[str, Any]]


def job_state(state: s.State) -> str:
    """Return the job's state in the contract's word."""
    if state.phase == s.ENDED:
        return state.ended or "running"
    if state.phase == s.RUNNING:
        return "running"
    if state.phase == s.FORMING and state.alone_since is not None:
        return "degraded"
    return "starting" if state.generation <= 0 and not state.marks.get("stop") else "restarting"


def document(state: s.State, facts: Facts, coordinator: str | None) -> dict[str, Any]:
    """Return `status --json`; facts by node: agent_pid, clock_offset_ms, generation, ranks {rank: {step, …}}."""
    return {
        "job": state.spec.job,
        "state": job_state(state),
        "generation": state.generation,
        "restarts": state.restarts,
        "max_restarts": state.spec.max_restarts,
        "min_nodes": state.spec.min_nodes,
        "max_nodes": state.spec.max_nodes,
        "world_size": state.world_size or len(state.ranks),
        "coordinator": coordinator,
        "started_at": state.started_at,
        "nodes": [_node(state, node, facts.get(name, {})) for name, node in state.nodes.items()],
        "incident": state.incident,
        "failure": state.failure,
        "plan": _plan(state),
        "script": {"kind": state.spec.kind, "script": state.spec.script, "args": list(state.spec.args)},
    }


def _node(state: s.State, node: s.Node, facts: Mapping[str, Any]) -> dict[str, Any]:
    # A heartbeat of the generation before says nothing of the ranks of this one.
    live: Mapping[str, Any] = facts.get("ranks", {}) if facts.get("generation") == state.generation else {}
    ranks = [rank for rank in state.ranks.values() if rank.node == node.name]
    return {
        "name": node.name,
        "address": node.spec.address,
        "state": node.status,
        "nproc": node.nproc,
        "spare": node.spec.spare,
        "cordoned": node.cordoned,
        "group_rank": state.members.index(node.name) if node.name in state.members and ranks else None,
        "reason": node.reason or ("cordoned" if node.cordoned else None),
        "agent_pid": facts.get("agent_pid") if node.connected or node.name == state.me else None,
        "clock_offset_ms": facts.get("clock_offset_ms"),
        "ranks": [_rank(state, rank, live.get(str(rank.rank), {})) for rank in sorted(ranks, key=_number)],
    }


def _number(rank: s.Rank) -> int:
    return rank.rank


def _rank(state: s.State, rank: s.Rank, live: Mapping[str, Any]) -> dict[str, Any]:
    age = live.get("last_output_age_s")
    told = state.watch.told if state.phase == s.RUNNING else None
    # Where it is known who holds the group up, those who wait are not the silent ones.
    quiet = rank.rank in told["missing"]["missing"] if told is not None else age is not None and age > SILENT_AFTER_S
    silent = rank.state == "running" and quiet
    return {
        "rank": rank.rank,
        "local_rank": rank.local_rank,
        "pid": rank.pid,
        "state": "silent" if silent else rank.state,
        "exit_code": rank.code,
        "signal": rank.signal,
        "step": live.get("step"),
        "last_output_age_s": age,
    }


def _plan(state: s.State) -> str | None:
    """Say what happens next, where that is not obvious from the state."""
    if state.phase == s.STOPPING:
        waits = " ".join(sorted(state.waiting))
        return f"stopping generation {state.generation} ({state.cause}); waiting for {waits}"
    if state.phase == s.FORMING and state.alone_since is not None:
        return f"waiting for nodes: {shortage(state)}; bring one back or add one"
    if state.phase in (s.PREPARING, s.STARTING):
        return f"starting generation {state.generation} on {' '.join(state.members)}{_meeting(state)}"
    if (hang := watch.plan(state)) is not None:
        return hang
    strangers = (state.world_size or 0) - len(state.ranks)
    if state.phase == s.RUNNING and strangers > 0:
        return f"{strangers} of {state.world_size} ranks are not ours: other agents of torch joined{_meeting(state)}"
    return None


def _meeting(state: s.State) -> str:
    """Say where torch's agents meet, for those who want to join."""
    if state.rendezvous is None:
        return ""
    joining = state.rendezvous
    return f" (--rdzv-backend {joining['backend']} --rdzv-endpoint {joining['endpoint']} --rdzv-id {joining['run_id']})"
