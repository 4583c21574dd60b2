"""A failure with its verdict, as lines for people. Pure.

In: incident documents. Out: text without colour, one fact a line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from supervisor import plain

if TYPE_CHECKING:
    from supervisor.plain import Document


def incident_lines(incident: Document, *, traceback: bool = True) -> list[str]:
    """Return a failure with its verdict: culprit, victims folded, evidence, traceback, what to do."""
    generation = plain.or_dash(incident.get("generation"))
    lines = [
        f"incident {incident.get('id')}  generation {generation}  {plain.clock(incident.get('time'))}",
        f"  {plain.one_line(incident.get('summary'))}",
        f"  {plain.or_dash(incident.get('category'))}, {incident.get('confidence') or 'unknown'}; {_culprit(incident)}",
    ]
    end: Document = incident.get("exit") or {}
    if end.get("code") is not None or end.get("signal"):
        lines.append(f"  exit: {plain.exit_text(end)}")
    lines += _missing(incident.get("missing"))
    for proof in incident.get("evidence") or ():
        lines.append(f"  evidence: {_place(proof)}: {plain.one_line(proof.get('text'))}")
    if traceback and incident.get("traceback"):
        lines.append("  traceback:")
        lines += [f"    {line}" for line in plain.safe(incident["traceback"]).rstrip("\n").splitlines()]
    for victim in incident.get("victims") or ():
        ranks = victim.get("ranks") or ()
        lines.append(
            f"  victims: {plain.rank_words(ranks)}: {victim.get('category')}: {plain.one_line(victim.get('summary'))}"
        )
    if incident.get("over"):
        lines.append(f"  over: {plain.one_line(incident['over'])}")
    elif incident.get("hint"):
        lines.append(f"  hint: {plain.one_line(incident['hint'])}")
    return lines


def _culprit(incident: Document) -> str:
    ranks = incident.get("culprit_ranks") or ()
    node = incident.get("culprit_node")
    where = f" on {plain.one_line(node)}" if node else ""
    return f"culprit: {plain.rank_words(ranks)}{where}" if ranks or node else "no culprit named"


def _missing(missing: Document | None) -> list[str]:
    if not missing:
        return []
    what = f"{missing.get('collective') or 'collective'} {missing.get('seq') or ''}".strip()
    absent, waiting = plain.rank_words(missing.get("missing") or ()), plain.rank_words(missing.get("waiting") or ())
    lines = [f"  missing in {what}: {absent}; waiting: {waiting}"]
    return lines + [f"    rank {rank}: {plain.one_line(text)}" for rank, text in (missing.get("stacks") or {}).items()]


def _place(proof: Document) -> str:
    parts = [plain.one_line(proof[key]) for key in ("node", "file") if proof.get(key)]
    if proof.get("rank") is not None:
        parts.insert(1 if proof.get("node") else 0, f"rank {proof['rank']}")
    line = f":{proof['line']}" if proof.get("line") is not None else ""
    return (" ".join(parts) or "?") + line
