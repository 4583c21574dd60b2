"""Incidents as text: the cause of a failure, its victims and evidence, and what to do. Pure.

In: incident documents. Out: text without colour, one fact a line; display names of categories and confidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from remote_agent.text.names import name_ranks
from supervisor.wording.events import exit_text
from supervisor.wording.values import clock, one_line, or_dash, safe

if TYPE_CHECKING:
    from supervisor.wording.events import Document


CATEGORIES: Mapping[str, str] = {
    "user_exception": "exception in the script",
    "cuda_oom": "CUDA out of memory",
    "cuda_error": "CUDA error",
    "host_oom_kill": "killed by the host's OOM killer",
    "segfault": "segmentation fault",
    "sigabrt": "abort",
    "bus_error_shm": "bus error (shared memory)",
    "nccl_timeout_watchdog": "NCCL timeout (watchdog)",
    "nccl_system_error": "NCCL system error",
    "nccl_remote_error": "NCCL error on another rank",
    "nccl_version_mismatch": "NCCL version mismatch",
    "nccl_network": "NCCL network error",
    "rendezvous_timeout": "rendezvous timeout",
    "port_in_use": "port in use",
    "hang_no_output": "hang",
    "collective_desync": "collective mismatch",
    "gloo_connection_reset": "Gloo connection reset",
    "nan_loss": "NaN loss",
    "disk_full": "disk full",
    "permission_import_missing_module": "missing module or permission",
    "signal_preempted": "stopped by a signal",
    "dataloader_worker_killed": "DataLoader worker killed",
    "checkpoint_corrupt": "corrupt checkpoint",
    "torch_version_mismatch": "torch version mismatch",
    "node_lost": "node lost",
    "other": "other",
}


def category_text(category: object) -> str:
    """Return the display name of a category; an unknown one with spaces for underscores."""
    return CATEGORIES.get(str(category or "other")) or one_line(category).replace("_", " ")


def incident_lines(incident: Document, *, traceback: bool = True, utc: bool = False) -> list[str]:
    """Return an incident in lines: summary, cause, evidence, traceback, victims, hint."""
    generation = or_dash(incident.get("generation"))
    lines = [
        f"incident {incident.get('id')}  generation {generation}  {clock(incident.get('time'), millis=True, utc=utc)}",
        f"  {one_line(incident.get('summary'))}",
        f"  {category_text(incident.get('category'))}, {incident.get('confidence') or 'unknown'}; {_culprit(incident)}",
    ]
    end: Document = incident.get("exit") or {}
    if end.get("code") is not None or end.get("signal"):
        lines.append(f"  exit: {exit_text(end)}")
    lines += _missing(incident.get("missing"))
    for proof in incident.get("evidence") or ():
        lines.append(f"  evidence: {_place(proof)}: {one_line(proof.get('text'))}")
    if traceback and incident.get("traceback"):
        lines.append("  traceback:")
        lines += [f"    {line}" for line in safe(incident["traceback"]).rstrip("\n").splitlines()]
    for victim in incident.get("victims") or ():
        ranks, category = victim.get("ranks") or (), category_text(victim.get("category"))
        lines.append(f"  victims: {name_ranks(ranks)}: {category}: {one_line(victim.get('summary'))}")
    if incident.get("over"):
        lines.append(f"  over: {one_line(incident['over'])}")
    elif incident.get("hint"):
        lines.append(f"  hint: {one_line(incident['hint'])}")
    return lines


def _culprit(incident: Document) -> str:
    ranks = incident.get("culprit_ranks") or ()
    node = incident.get("culprit_node")
    where = f" on {one_line(node)}" if node else ""
    return f"culprit: {name_ranks(ranks)}{where}" if ranks or node else "no culprit named"


def _missing(missing: Document | None) -> list[str]:
    if not missing:
        return []
    what = f"{missing.get('collective') or 'collective'} {missing.get('seq') or ''}".strip()
    absent, waiting = (
        name_ranks(missing.get("missing") or ()),
        name_ranks(missing.get("waiting") or ()),
    )
    lines = [f"  missing in {what}: {absent}; waiting: {waiting}"]
    return lines + [f"    rank {rank}: {one_line(text)}" for rank, text in (missing.get("stacks") or {}).items()]


def _place(proof: Document) -> str:
    parts = [one_line(proof[key]) for key in ("node", "file") if proof.get(key)]
    if proof.get("rank") is not None:
        parts.insert(1 if proof.get("node") else 0, f"rank {proof['rank']}")
    line = f":{proof['line']}" if proof.get("line") is not None else ""
    return (" ".join(parts) or "?") + line
