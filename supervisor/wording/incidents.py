"""Incidents as text: the cause of a failure, its consequences and evidence, its state, and what to do. Pure.

In: incident documents. Out: lines, each with its section, its role and its place; text without colour.
"""

from __future__ import annotations

import itertools
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, NamedTuple

from remote_agent.diagnose.categories import CATEGORIES
from remote_agent.text.names import name_ranks
from supervisor.wording.events import cause_text, exit_text
from supervisor.wording.stacks import numbered_source
from supervisor.wording.values import clock, elapsed, local_time, one_line, or_dash, safe

if TYPE_CHECKING:
    from remote_agent.wire.documents import EvidenceEntry, IncidentDocument, MissingRanks


MISSING: Final = "missing"
VICTIMS: Final = "failed as a consequence"


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


class IncidentLine(NamedTuple):
    """One line of an incident; `place`: the evidence that it shows."""

    section: str
    text: str
    role: str = "text"
    place: EvidenceEntry | None = None


def incident_lines(
    incident: IncidentDocument, now_s: float | None = None, *, utc: bool = False, why: bool = False
) -> list[IncidentLine]:
    """Return an incident in lines, section by section; `""` is what it is; why: with the claims that decided.

    now_s: as in `standing`; a screen opens the files of the evidence, so it needs no more than their names.
    """
    named = f"culprit: {who}" if (who := culprit(incident)) else "no culprit named"
    kind, how = category_text(incident.get("category")), exit_text(incident["exit"])
    what = [
        f"{kind}, {incident.get('confidence') or 'unknown'}; {named}",
        *([f"exit: {how}"] if how != "ended" else []),
    ]
    unsaid = "it is a hang: see what the ranks wait in" if is_hang(incident) else "it is not recorded what decided"
    lines = [IncidentLine("", one_line(incident.get("summary")), "bad"), *(IncidentLine("", text) for text in what)]
    lines += [IncidentLine("why", one_line(claim)) for claim in incident.get("why") or [unsaid]] if why else []
    lines += [IncidentLine(MISSING, line) for line in _missing(incident.get("missing"))]
    for proof in incident.get("evidence") or ():
        place = _place(proof, is_short=now_s is not None)
        lines.append(IncidentLine("evidence", f"{place}: {one_line(proof.get('text'))}", place=proof))
    *frames, last = safe(incident.get("traceback") or "").rstrip().splitlines() or [""]
    lines += [IncidentLine("traceback", line, "text" if line.lstrip().startswith("File") else "dim") for line in frames]
    lines += [IncidentLine("traceback", last, "bad")] if last else []
    for victim in incident.get("victims") or ():
        ranks, category = name_ranks(victim.get("ranks") or ()), category_text(victim.get("category"))
        lines.append(IncidentLine(VICTIMS, f"{ranks}: {category}: {one_line(victim.get('summary'))}"))
    if now := standing(incident, now_s, utc=utc):
        lines.append(IncidentLine("state", now, "bad" if is_open(incident) else "ok"))
    # What to do about a hang is no news once it has ended.
    hint = incident.get("hint") if incident.get("ongoing") is not False else ""
    lines += [IncidentLine("hint", one_line(hint))] if hint else []
    return lines


def incident_text(
    incident: IncidentDocument, *, traceback: bool = True, utc: bool = False, why: bool = False
) -> list[str]:
    """Return an incident as plain lines, with a title."""
    at = incident.get("time")
    # A text without a time is not of a generation of ours either.
    when = f"  generation {or_dash(incident.get('generation'))}  {clock(at, millis=True, utc=utc)}" if at else ""
    shown = [f"incident {incident.get('id')}{when}"]
    for section, lines in itertools.groupby(incident_lines(incident, utc=utc, why=why), lambda line: line.section):
        if section in ("why", "traceback"):
            block = [f"  {section}:", *(f"    {line.text}" for line in lines)]
            shown += block if traceback or section == "why" else []
        else:
            name = f"{section}: " if section not in ("", MISSING) else ""
            shown += [f"  {name}{line.text}" for line in lines]
    return shown


def _missing(missing: MissingRanks | None) -> list[str]:
    if not missing:
        return []
    what = f"{missing.get('collective') or 'collective'} {missing.get('seq') or ''}".strip()
    absent, waiting = (
        name_ranks(missing.get("missing") or ()),
        name_ranks(missing.get("waiting") or ()),
    )
    lines = [f"missing in {what}: {absent}; waiting: {waiting}"]
    sources = dict(missing.get("sources") or {})
    for rank, place in (missing.get("stacks") or {}).items():
        lines.append(f"  rank {rank}: {one_line(place)}")
        if source := sources.pop(place, None):
            marked = ((">" if here else " ", number, text) for number, text, here in numbered_source(place, source))
            lines += [f"    {mark} {number}  {safe(text)}".rstrip() for mark, number, text in marked]
    return lines


def _place(proof: EvidenceEntry, *, is_short: bool) -> str:
    file = proof.get("file") or ""
    parts = [one_line(part) for part in (proof.get("node"), PurePath(file).name if is_short else file) if part]
    if proof.get("rank") is not None:
        parts.insert(1 if proof.get("node") else 0, f"rank {proof['rank']}")
    line = f":{proof['line']}" if proof.get("line") is not None else ""
    return (" ".join(parts) or "?") + line
