"""From what the coordinator knows of a stopped group to the verdict.

In: State with exits and lost nodes. Out: the contract's incident, and its fingerprint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remote_agent.diagnose import Context, Incident, RankEvidence, Victims, verdict

if TYPE_CHECKING:
    from remote_agent.state import State


def judge(state: State, number: int, now_ns: int) -> tuple[dict[str, Any], str]:
    """Return the incident of the generation that has just stopped, and what it is recognised by."""
    evidence = [
        RankEvidence.of_exit(ended, ended["node"], _files(state.generation, rank), int(ended.get("shift_ns", 0)))
        for rank, ended in sorted(state.exits.items())
    ]
    evidence += [
        RankEvidence(rank=None, node=node, tail=f"{node} could not obey: {said}")
        for node, said in state.troubles.items()
    ]
    host_notes: dict[str, list[str]] = {}
    clock_error_ms: dict[str, float] = {}
    for ended in state.exits.values():
        clock_error_ms[ended["node"]] = ended.get("clock_error_ns", 0) / 1e6
        host_notes.setdefault(ended["node"], []).extend(ended.get("notes", ()))
    context = Context(
        generation=state.generation,
        incident_id=number,
        world_size=len(state.ranks),
        ranks_per_node=state.ranks_per_node(),
        lost_nodes=state.lost,
        now_ns=now_ns,
        host_notes=host_notes,
        clock_error_ms=clock_error_ms,
        hang=state.watch.told["missing"] if state.watch.told is not None else None,
    )
    incident = verdict(evidence, context)
    return incident.to_json(), incident.signature


def preempted(state: State, number: int, now_ns: int) -> tuple[dict[str, Any], str]:
    """Return the incident of a job whose allocation is ended, and what it is recognised by."""
    ranks = tuple(sorted(state.ranks))
    incident = Incident(
        id=number,
        generation=state.generation,
        time_ns=now_ns,
        category="signal_preempted",
        scope="outside_the_ranks",
        culprit_ranks=(),
        culprit_node=None,
        confidence="established",
        summary=f"preempted: {state.preempted}",
        evidence=(),
        traceback=None,
        exit_code=None,
        exit_signal=None,
        hint="ask for more time, or let the scheduler requeue the job: the script resumes from its snapshot",
        victims=(Victims(ranks, "signal_preempted", "stopped with the allocation"),) if ranks else (),
        missing=None,
        signature="signal_preempted|allocation",
    )
    return incident.to_json(), incident.signature


def _files(generation: int, rank: int) -> dict[str, str]:
    """Name a rank's files relative to the job's directory, which is the same on every node."""
    base = f"generation_{generation}/rank_{rank}"
    return {
        "stdout": f"{base}/stdout.log",
        "stderr": f"{base}/stderr.log",
        "nccl": f"{base}/nccl.log",
        "error": f"{base}/error.json",
    }
