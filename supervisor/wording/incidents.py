"""Incidents as text: the cause of a failure, its consequences and evidence, its state, and what to do. Pure.

In: incident documents. Out: text without colour, one fact a line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remote_agent.diagnose.categories import CATEGORIES
from remote_agent.text.names import name_ranks
from supervisor.wording.events import cause_text, exit_text
from supervisor.wording.stacks import numbered_source
from supervisor.wording.values import clock, elapsed, local_time, one_line, or_dash, safe

if TYPE_CHECKING:
    from remote_agent.wire.documents import EvidenceEntry, IncidentDocument, MissingRanks


def category_text(category: object) -> str:
    """Return the display name of a category; an unknown one with spaces for underscores."""
    known = CATEGORIES.get(str(category or "other"))
    return known.name if known else one_line(category).replace("_", " ")


def is_hang(incident: IncidentDocument) -> bool:
    """Return whether an incident of a job is a hang: its ranks waited, and none had failed."""
    return "ongoing" in incident


def is_open(incident: IncidentDocument) -> bool:
    """Return whether the job has not recovered from an incident, and has not ended."""
    return incident.get("state") == "open"


def advice(incident: IncidentDocument) -> str:
    """Return what to do about an incident; nothing about a hang that has ended."""
    return "" if is_hang(incident) and not incident["ongoing"] else str(incident.get("hint") or "")


def culprit(incident: IncidentDocument) -> str:
    """Return the ranks, or the node, that an incident began with: `rank 3 on n2`; "" where none is named."""
    ranks, node = incident.get("culprit_ranks") or (), incident.get("culprit_node")
    where = f" on {one_line(node)}" if node else ""
    more = "at least " if incident.get("at_least") else ""
    return f"{more}{name_ranks(ranks)}{where}" if ranks else f"node {one_line(node)}" if node else ""


def standing(incident: IncidentDocument, now_s: float | None = None, *, utc: bool = False) -> str:
    """Return what has become of an incident: `healed 12 s ago: training resumed after 143 s`.

    now_s: Unix time, for a screen that counts; without it the text has times of day. "" for a failure that is open,
    and for a document of `diagnose`.
    """
    state = incident.get("state")
    if incident.get("ongoing"):
        began = incident.get("time")
        # A screen shows the timeout on a line of its own.
        since = f"since {clock(began, utc=utc)}{_times_out(incident, None, utc)}"
        return f"hung for {_ago(began, now_s)}" if now_s else f"hung {since}"
    if incident.get("preliminary"):
        return "preliminary: the group is still stopping"
    why = f": {cause_text(incident['over'])}" if incident.get("over") else ""
    if state not in ("healed", "over"):
        return f"hang ended{why}" if why else ""
    ended = incident.get("ended_at")
    if now_s:
        return f"{state} {_ago(ended, now_s)} ago{why}"
    return f"{state} at {clock(ended, utc=utc)}{why}"


def healed_note(incident: IncidentDocument, now_s: float) -> str:
    """Return the last incident of a job that recovered, in a few words: `healed 12 s ago: rank 3 on n2, hang`."""
    # Without a category, how the rank ended says more than the category's name.
    is_known = incident.get("category") not in (None, "other")
    what = category_text(incident["category"]) if is_known else exit_text(incident["exit"])
    facts = ", ".join(part for part in (culprit(incident), what) if part)
    return f"healed {_ago(incident.get('ended_at'), now_s)} ago: {facts}"


def hang_step(incident: IncidentDocument, now_s: float | None = None) -> str:
    """Return what happens next in a hang that lasts; now_s as in `standing`."""
    if incident.get("restarts_at"):
        return f"the group restarts {_at(incident['restarts_at'], now_s)} if the hang lasts"
    # A screen has keys for that.
    advice = "" if now_s else "; `supervisor restart` starts the group again from its snapshot"
    return f"waiting for you{_times_out(incident, now_s)}{advice}"


def _times_out(incident: IncidentDocument, now_s: float | None, utc: bool = False) -> str:
    at = incident.get("times_out_at")
    return f"; torch times out {_at(at, now_s, utc)}" if at else ""


def _at(stamp: object, now_s: float | None, utc: bool = False) -> str:
    """Return a time that is to come: `in 29 min 5 s (18:22)`, or without now_s `at 18:22:11`."""
    time = local_time(stamp)
    if now_s is None or time is None:
        return f"at {clock(stamp, utc=utc)}"
    return f"in {elapsed(time.timestamp() - now_s)} ({time:%H:%M})"


def _ago(stamp: object, now_s: float) -> str:
    time = local_time(stamp)
    return "-" if time is None else elapsed(now_s - time.timestamp())


def why_lines(incident: IncidentDocument) -> list[str]:
    """Return the claims that decided, in order, and the rule by which they did."""
    hang = "it is a hang: see what the ranks wait in" if is_hang(incident) else "it is not recorded what decided"
    return [one_line(line) for line in incident.get("why") or ()] or [hang]


def incident_lines(
    incident: IncidentDocument, *, traceback: bool = True, utc: bool = False, why: bool = False
) -> list[str]:
    """Return an incident in lines: summary, cause, evidence, traceback, consequences, hint; why: the claims, too."""
    at = incident.get("time")
    # A text without a time is not of a generation of ours either.
    when = f"  generation {or_dash(incident.get('generation'))}  {clock(at, millis=True, utc=utc)}" if at else ""
    named = f"culprit: {who}" if (who := culprit(incident)) else "no culprit named"
    lines = [
        f"incident {incident.get('id')}{when}",
        f"  {one_line(incident.get('summary'))}",
        f"  {category_text(incident.get('category'))}, {incident.get('confidence') or 'unknown'}; {named}",
    ]
    end = incident["exit"]
    if end.get("code") is not None or end.get("signal"):
        lines.append(f"  exit: {exit_text(end)}")
    lines += ["  why:", *(f"    {line}" for line in why_lines(incident))] if why else []
    lines += _missing(incident.get("missing"))
    for proof in incident.get("evidence") or ():
        lines.append(f"  evidence: {_place(proof)}: {one_line(proof.get('text'))}")
    if traceback and incident.get("traceback"):
        lines.append("  traceback:")
        lines += [f"    {line}" for line in safe(incident["traceback"]).rstrip("\n").splitlines()]
    for victim in incident.get("victims") or ():
        ranks, category = victim.get("ranks") or (), category_text(victim.get("category"))
        lines.append(f"  failed as a consequence: {name_ranks(ranks)}: {category}: {one_line(victim.get('summary'))}")
    if now := standing(incident, utc=utc):
        lines.append(f"  state: {now}")
    if hint := advice(incident):
        lines.append(f"  hint: {one_line(hint)}")
    return lines


def _missing(missing: MissingRanks | None) -> list[str]:
    if not missing:
        return []
    what = f"{missing.get('collective') or 'collective'} {missing.get('seq') or ''}".strip()
    absent, waiting = (
        name_ranks(missing.get("missing") or ()),
        name_ranks(missing.get("waiting") or ()),
    )
    lines = [f"  missing in {what}: {absent}; waiting: {waiting}"]
    sources = dict(missing.get("sources") or {})
    for rank, place in (missing.get("stacks") or {}).items():
        lines.append(f"    rank {rank}: {one_line(place)}")
        if source := sources.pop(place, None):
            marked = ((">" if here else " ", number, text) for number, text, here in numbered_source(place, source))
            lines += [f"      {mark} {number}  {safe(text)}".rstrip() for mark, number, text in marked]
    return lines


def _place(proof: EvidenceEntry) -> str:
    parts = [one_line(part) for part in (proof.get("node"), proof.get("file")) if part]
    if proof.get("rank") is not None:
        parts.insert(1 if proof.get("node") else 0, f"rank {proof['rank']}")
    line = f":{proof['line']}" if proof.get("line") is not None else ""
    return (" ".join(parts) or "?") + line
