"""The verdict across ranks and nodes: one cause, its victims, the evidence. A pure function.

In: what each rank left behind, what is known of the nodes. Out: an Incident.

**What we stopped is never a cause. A closed connection, a watchdog, a timeout of the store mark victims unless there is
nothing else. When the texts do not say, the verdict says so and what to look at next.**
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from remote_agent.diagnose.finding import Finding, in_order, is_likely_first
from remote_agent.diagnose.hangs import find_astray, find_missing
from remote_agent.diagnose.hints import HINTS
from remote_agent.diagnose.model import Context, Evidence, Incident, RankEvidence, Victims, name_nodes, name_ranks
from remote_agent.diagnose.named import gone_first, heard_first, look_first, odd_one_out, only_heard, received, same_way
from remote_agent.diagnose.pattern import PRIMARY, SECONDARY
from remote_agent.diagnose.reading import FINE, STOPPED, UNEXPLAINED, read_ranks
from remote_agent.diagnose.shapes import clip, lines_of, shape, signature
from remote_agent.diagnose.traces import Trace, find_ended_part

# The same failure this much later on another rank is the same cause.
_WINDOW_NS = 60_000_000_000
# A GPU error spreads: only ranks that fail at once share it.
_WINDOWS_NS = {"cuda_error": 200_000_000}
# Ends without a reason are alike only if they come together.
_UNEXPLAINED_WINDOW_NS = 10_000_000_000
# Nothing that a rank did: no rank is blamed.
_OUTSIDE = ("rendezvous_timeout", "port_in_use", "nccl_network", "node_lost")
# Whoever was lost first was so by chance.
_TO_ALL = ("rendezvous_timeout", "port_in_use", "node_lost", "signal_preempted")
_MAX_EVIDENCE = 12


class _Cause(NamedTuple):
    """The findings that together are the cause, and how sure that is."""

    findings: list[Finding]
    scope: str
    confidence: str
    category: str
    headline: str
    hint: str
    ranks: list[int]
    node: str | None
    missing: dict[str, Any] | None = None


def verdict(evidence: Sequence[RankEvidence], context: Context) -> Incident:
    """Return the incident that this evidence shows."""
    findings = in_order(read_ranks(evidence, context.host_notes))
    gone = gone_first(evidence, findings)
    cause = (
        _node_lost(findings, context)
        or _own_failure(findings, context, gone)
        or _missing_rank(evidence, findings, context)
        or _left_early(findings, context)
        or _astray(evidence, findings)
        or _node_trouble(evidence, findings)
        or _went_first(findings, context, gone)
        or _only_victims(findings, context)
    )
    first = cause.findings[0] if cause.findings else None
    return Incident(
        id=context.incident_id,
        generation=context.generation,
        time_ns=_time(cause, findings, context),
        category=cause.category,
        scope=cause.scope,
        culprit_ranks=tuple(sorted(cause.ranks)),
        culprit_node=cause.node or None,
        confidence=cause.confidence,
        summary=clip(f"{_who(cause, context)}{cause.headline}"),
        evidence=_evidence(cause, findings),
        traceback=first.traceback if first is not None else None,
        exit_code=first.exit_code if first is not None else None,
        exit_signal=first.exit_signal if first is not None else None,
        hint=cause.hint,
        victims=_victims(cause, findings, context),
        missing=cause.missing,
        signature=_signature(cause),
    )


def _error_ns(context: Context, *nodes: str | None) -> int:
    """Return how far the order of stamps of these nodes may be wrong."""
    return int(sum(context.clock_error_ms.get(node or "", 0.0) for node in nodes) * 1e6)


def _node_lost(findings: list[Finding], context: Context) -> _Cause | None:
    """A lost node is the cause unless a rank elsewhere failed by itself before its last sign of life."""
    if not context.lost_nodes:
        return None
    node, (t_ns, reason) = min(context.lost_nodes.items(), key=lambda item: item[1][0])
    own = [each for each in findings if each.role == PRIMARY and each.node != node]
    earlier = [each for each in own if each.t_ns is not None and each.t_ns + _error_ns(context, node, each.node) < t_ns]
    if earlier:
        return None
    ranks = context.ranks_of(node)
    on_it = f" ({name_ranks(ranks)})" if ranks else ""
    others = [name for name in context.lost_nodes if name != node]
    also = f"; also lost: {', '.join(sorted(others))}" if others else ""
    return _Cause(
        findings=[],
        scope="outside_the_ranks",
        confidence="supported" if own else "established",
        category="node_lost",
        headline=f"node {node} lost: {reason}{on_it}{also}",
        hint=HINTS["node_lost"],
        ranks=[],
        node=node,
    )


def _own_failure(findings: list[Finding], context: Context, gone: int | None) -> _Cause | None:
    """The first rank that failed by itself, with all that failed in the same way."""
    own = [each for each in findings if each.role == PRIMARY]
    # What belongs to no rank and explains nothing is a launcher's wrapper, unless nobody else complains.
    silent = [each for each in findings if each.role == UNEXPLAINED]
    a_rank_fails = any(each.rank is not None and each.role not in (FINE, STOPPED) for each in findings)
    silent = [each for each in silent if each.rank is not None or not a_rank_fails]
    # Whose end is known comes before whose text only sounds like one.
    candidates = own or sorted(silent, key=lambda each: not each.proven)
    if not candidates:
        return None
    first = candidates[0]
    same = [each for each in findings if each is first or _shares(first, each)]
    others = [each for each in own if each not in same]
    clear = all(_clearly_before(first, each, context) for each in others)
    confidence = "established" if first.proven and clear and own else "supported"
    if not own and any(not _clearly_before(first, each, context) for each in findings if each.role == SECONDARY):
        confidence = "unknown"
    ranks = [each.rank for each in same if each.rank is not None]
    nodes = {each.node for each in same}
    odd = odd_one_out(first, findings, ranks, context)
    if odd is None and first.rank is None and first.category not in _TO_ALL:
        odd = gone
    named = first.named or (() if odd is None else (odd,))
    if not named and first.peer is not None and first.rank is not None:
        # Two that differ: nothing tells which of them is right.
        named = (first.rank, first.peer)
    if named:
        return _named(first, named, same, context)
    # The only one of several that cannot meet the others is at fault itself.
    waiting = [each for each in findings if each.rank is not None and each.role in (SECONDARY, STOPPED, FINE)]
    alone = first.category == "rendezvous_timeout" and len(ranks) == 1 and len(waiting) > 1
    scope = "one_rank" if alone else _scope(first, ranks, context)
    return _Cause(
        findings=same,
        scope=scope,
        confidence=confidence,
        category=first.category,
        headline=first.text,
        hint=first.hint,
        ranks=ranks if scope in ("one_rank", "several_or_all_ranks") else [],
        node=first.node if len(nodes) == 1 and scope != "not_in_text" else None,
    )


def _shares(first: Finding, other: Finding) -> bool:
    """True when the other rank failed in the same way at about the same time, even if we then stopped it."""
    if other.role not in (PRIMARY, UNEXPLAINED, STOPPED) or not same_way(first, other):
        return False
    if other.role != first.role and other.role != STOPPED:
        return False
    if first.likely_ns is None or other.likely_ns is None:
        return True
    window_ns = _UNEXPLAINED_WINDOW_NS if first.role == UNEXPLAINED else _WINDOWS_NS.get(first.category, _WINDOW_NS)
    apart_ns = abs(other.likely_ns - first.likely_ns)
    return apart_ns <= window_ns or not (is_likely_first(first, other) or is_likely_first(other, first))


def _clearly_before(first: Finding, other: Finding, context: Context) -> bool:
    if first.t_ns is None or other.t_ns is None:
        return False
    return other.t_ns - first.t_ns - first.blur_ns > _error_ns(
        context, first.node, other.node if other.node != first.node else None
    )


def _scope(first: Finding, ranks: list[int], context: Context) -> str:
    # A full /dev/shm is the node's; a rank that died of it is another matter.
    if first.category in _OUTSIDE or (first.category == "bus_error_shm" and first.exit_signal is None):
        return "outside_the_ranks"
    if first.category == "signal_preempted" and (len(ranks) != 1 or (context.world_size or 0) == 1):
        return "outside_the_ranks"
    if received(first) or (len(ranks) == 1 and only_heard(first)):
        return "not_in_text"
    if not ranks:
        return "not_in_text" if first.node is None else "outside_the_ranks"
    return "one_rank" if len(ranks) == 1 else "several_or_all_ranks"


def _named(first: Finding, named: Sequence[int], same: list[Finding], context: Context) -> _Cause:
    """A rank says which others are the ones to look at."""
    says = f"says {name_ranks([first.rank])}" if first.rank is not None else "as the text or its peers say"
    nodes = {context.node_of(rank) for rank in named}
    node = nodes.pop() if len(nodes) == 1 else None
    scope = "one_rank" if len(named) == 1 else "several_or_all_ranks"
    return _Cause(same, scope, "supported", first.category, f"{first.headline} ({says})", first.hint, list(named), node)


def _went_first(findings: list[Finding], context: Context, gone: int | None) -> _Cause | None:
    """The others say which rank's connections were lost first; of itself nothing is known."""
    broken = [each for each in findings if each.role == SECONDARY and each.category not in _TO_ALL]
    if gone is None or not broken:
        return None
    text = "went first, say its peers; nothing of its own tells why"
    hint = f"look at what {name_ranks([gone])} left, and at its node's kernel log"
    return _Cause([], "one_rank", "supported", broken[0].category, text, hint, [gone], context.node_of(gone))


def _missing_rank(evidence: Sequence[RankEvidence], findings: list[Finding], context: Context) -> _Cause | None:
    """Watchdogs gave up on some ranks: those that did not come are the ones to look at."""
    missing = dict(context.hang) if context.hang and context.hang["missing"] else find_missing(evidence, context)
    if missing is None:
        return None
    # What we stopped is no failure, but its text may say why it did not come.
    parts = {each.rank: part for each in evidence if each.rank is not None and (part := find_ended_part(each.tail))}
    parts = {rank: part for rank, part in parts.items() if rank in missing["missing"]}
    ranks = sorted(parts) or list(missing["missing"])
    nodes = {name for name in context.ranks_per_node for rank in ranks if rank in context.ranks_of(name)}
    gave_up = not context.hang or any(each.category == "nccl_timeout_watchdog" for each in findings)
    category = "user_exception" if parts else "nccl_timeout_watchdog" if gave_up else "hang_no_output"
    return _Cause(
        findings=[each for each in findings if each.rank in ranks],
        scope="one_rank" if len(ranks) == 1 else "several_or_all_ranks",
        confidence="supported",
        category=category,
        headline="; ".join([*_said(parts), _absence(missing)]),
        hint=HINTS[category],
        ranks=ranks,
        node=nodes.pop() if len(nodes) == 1 else None,
        missing=missing,
    )


def _said(parts: Mapping[int, Trace]) -> list[str]:
    """Say which exception ended a part of the first of these ranks."""
    if not parts:
        return []
    trace = parts[min(parts)]
    place = f" in {trace.user_frame.place()}" if trace.user_frame is not None else ""
    return [f"{trace.part} ended with {trace.headline}{place}"]


def _absence(missing: Mapping[str, Any]) -> str:
    """Say where ranks did not come."""
    if not missing["waiting"]:
        return "the group stood still"
    number = f" number {missing['seq']}" if missing["seq"] is not None else ""
    return f"did not come to {missing['collective']}{number}, where {name_ranks(missing['waiting'])} waited"


def _left_early(findings: list[Finding], context: Context) -> _Cause | None:
    """Some ranks ended well before the others lost their connections: they left too early."""
    broken = [each for each in findings if each.role == SECONDARY]
    if not broken:
        return None
    left = [each for each in findings if each.role == FINE and (each.exit_code == 0 or each.exit_signal is not None)]
    left = [each for each in left if _clearly_before(each, broken[0], context)]
    if not left or len(left) > len(broken):
        return None
    ranks = [each.rank for each in left if each.rank is not None]
    nodes = {each.node for each in left}
    return _Cause(
        findings=left,
        scope="one_rank" if len(ranks) == 1 else "several_or_all_ranks",
        confidence="supported",
        category="collective_desync",
        headline=f"left early: {left[0].headline} while {name_ranks(_ranks(broken))} still communicated",
        hint="each rank must run the same number of steps and collectives: compare the lengths of the data per rank",
        ranks=ranks,
        node=left[0].node if len(nodes) == 1 else None,
    )


def _astray(evidence: Sequence[RankEvidence], findings: list[Finding]) -> _Cause | None:
    """One rank looked for the store where none is."""
    found = find_astray(evidence)
    if found is None:
        return None
    mine = [each for each in findings if each.rank == found[0]]
    headline = f"found no store at ({found[1]}), while others waited in theirs"
    hint = "compare its MASTER_ADDR and MASTER_PORT, and its way there, with the others'"
    return _Cause(mine, "one_rank", "supported", "rendezvous_timeout", headline, hint, [found[0]], mine[0].node)


def _node_trouble(evidence: Sequence[RankEvidence], findings: list[Finding]) -> _Cause | None:
    """A node, not one of its ranks, says what went wrong."""
    words = (each for each in evidence if each.rank is None and each.node and each.tail.strip() and not each.places)
    said = next(words, None)
    if said is None:
        return None
    meant = [each.category for each in findings if each.rank is None and each.role == SECONDARY]
    headline = clip(lines_of(said.tail.strip())[0])
    hint = f"look at the agent's log on {said.node}"
    return _Cause([], "outside_the_ranks", "supported", (meant or ["other"])[0], headline, hint, [], said.node)


def _only_victims(findings: list[Finding], context: Context) -> _Cause:
    """Nothing tells the cause: say what was seen, and what to look at next."""
    broken = [each for each in findings if each.role == SECONDARY]
    if not broken:
        return _nothing(findings)
    first = heard_first(broken)
    where = (
        f"first on {name_ranks([first.rank])}{name_nodes([first.node])}" if first.rank is not None else "in the text"
    )
    hint = "; ".join([*look_first(broken, findings, context), first.hint])
    outside = first.category in (*_OUTSIDE, "signal_preempted")
    return _Cause(
        findings=[],
        scope="outside_the_ranks" if outside else "not_in_text",
        confidence="supported" if outside else "unknown",
        category=first.category,
        headline=f"{first.headline}, {where}; the logs do not say why",
        hint=hint,
        ranks=[],
        node=None,
    )


def _nothing(findings: list[Finding]) -> _Cause:
    stopped = [each for each in findings if each.role == STOPPED]
    text = "the supervisor stopped the ranks; none failed by itself" if stopped else "no failure in what the ranks left"
    hint = "look at the events before it, and at stdout of the ranks"
    return _Cause([], "not_in_text", "unknown", "other", text, hint, [], None)


def _ranks(findings: Sequence[Finding]) -> list[int]:
    return [each.rank for each in findings if each.rank is not None]


def _who(cause: _Cause, context: Context) -> str:
    """Return the summary's subject."""
    ranks = cause.ranks or _ranks(cause.findings)
    if not ranks:
        return ""
    nodes = [each.node for each in cause.findings] if cause.findings else []
    if cause.node is not None:
        nodes = [cause.node]
    if len(ranks) > 1 and len(ranks) == context.world_size:
        return f"all {len(ranks)} ranks{name_nodes(nodes)}: "
    return f"{name_ranks(ranks)}{name_nodes(nodes)}: "


def _time(cause: _Cause, findings: list[Finding], context: Context) -> int | None:
    if cause.category == "node_lost" and cause.node is not None:
        return context.lost_nodes[cause.node][0]
    times = [each.t_ns for each in (cause.findings or findings) if each.t_ns is not None]
    return min(times, default=context.now_ns)


def _evidence(cause: _Cause, findings: list[Finding]) -> tuple[Evidence, ...]:
    """Return the lines of the cause, then one line for each other failure of a kind."""
    own = dict.fromkeys(line for each in cause.findings for line in each.evidence)
    lines = list(own)[: _MAX_EVIDENCE // 2]
    seen = {each.category for each in cause.findings}
    for each in findings:
        if each.role in (PRIMARY, SECONDARY, UNEXPLAINED) and each.category not in seen and each not in cause.findings:
            seen.add(each.category)
            lines.extend(each.evidence[:1])
    return tuple(lines[:_MAX_EVIDENCE])


def _victims(cause: _Cause, findings: list[Finding], context: Context) -> tuple[Victims, ...]:
    """Return all other ranks that ended badly, those alike together, in the order in which they did."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    guilty = set(cause.ranks)
    for each in findings:
        if each.role == FINE or each in cause.findings or each.rank is None or each.rank in guilty:
            continue
        groups.setdefault((each.category, shape(each.text)), []).append(each)
    victims = []
    for (category, _), alike in groups.items():
        ranks = tuple(sorted(_ranks(alike)))
        times = f"{len(ranks)} x " if len(ranks) > 1 else ""
        later = "later: " if alike[0].role == PRIMARY else ""
        victims.append(Victims(ranks, category, f"{times}{later}{alike[0].text}"))
    gone = [name for name in context.lost_nodes if name != cause.node or cause.category != "node_lost"]
    victims.extend(
        Victims(tuple(context.ranks_of(name)), "node_lost", f"node {name} lost: {context.lost_nodes[name][1]}")
        for name in gone
    )
    return tuple(victims)


def _signature(cause: _Cause) -> str:
    if cause.findings and cause.missing is None and cause.category != "collective_desync":
        return cause.findings[0].signature
    return signature(cause.category, "", cause.node or "" if cause.category == "node_lost" else "", cause.headline)
