"""Whom the words of several ranks point to, where one alone proves nothing.

In: texts and findings of ranks. Out: the rank that the others differ from, the one that went first, those to look at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from remote_agent.diagnose.model import name_ranks
from remote_agent.diagnose.pattern import SECONDARY
from remote_agent.diagnose.patterns import CHILD, DIED, RECEIVED
from remote_agent.diagnose.reading import FINE, STOPPED, UNEXPLAINED

if TYPE_CHECKING:
    from remote_agent.diagnose.finding import Finding
    from remote_agent.diagnose.model import Context, RankEvidence

_GONE = re.compile(
    r"\[(?P<own>\d+)\] NCCL INFO \[Service thread\] (?:Connection closed by|Could not receive type from) "
    r"localRank (?P<other>\d+)"
)


def odd_one_out(first: Finding, findings: Sequence[Finding], ranks: Sequence[int], context: Context) -> int | None:
    """Return the only rank whose collective is another than all others'."""
    if first.category != "collective_desync":
        return None
    told = [each for each in findings if each.category == first.category and each.peer not in (None, each.rank)]
    votes = Counter(each.peer for each in told)
    most = max(votes, key=lambda rank: votes[rank], default=None)
    if most is not None and votes[most] > 1 and all(each.peer == most or each.rank == most for each in told):
        return most
    # All got it from the one that does not complain.
    others = {rank for own in context.ranks_per_node.values() for rank in own} - set(ranks)
    return others.pop() if received(first) and len(ranks) > 1 and len(others) == 1 else None


def received(finding: Finding) -> bool:
    """Whether a rank only says that what it got has the wrong size: who sent it is to blame."""
    return finding.headline == RECEIVED


def same_way(first: Finding, other: Finding) -> bool:
    """Whether two failed in the same way; without times nobody knows which GPU failed first, in whatever words."""
    unordered = first.t_ns is None and other.t_ns is None and first.category == other.category == "cuda_error"
    return bool(other.signature) and (other.signature == first.signature or unordered)


def only_heard(finding: Finding) -> bool:
    """Whether a rank only complains of NCCL or a child, with no reason, and nobody saw it end: any other might too."""
    heard = finding.category == "nccl_system_error" or finding.headline == CHILD
    return heard and finding.role == UNEXPLAINED and not finding.ended


def gone_first(evidence: Sequence[RankEvidence], findings: Sequence[Finding]) -> int | None:
    """Return the only rank of which a parent says that it died, or whose connections two or more others lost first.

    One that complains of others went for another reason.
    """
    died = {each.rank for each in findings if each.headline == DIED and each.rank is not None}
    if len(died) == 1:
        return died.pop()
    named = set()
    told = 0
    for each in evidence:
        lost = (match for match in _GONE.finditer(each.tail) if match["own"] != match["other"])
        found = next(lost, None)
        if found is not None and each.rank is not None:
            # Ranks of a node have numbers in a row, as its devices have.
            named.add(each.rank - int(found["own"]) + int(found["other"]))
            told += 1
    # Who lost others himself, or was stopped by us, went for another reason.
    victims = {each.rank for each in findings if each.role in (SECONDARY, STOPPED)}
    return named.pop() if told > 1 and len(named) == 1 and not named & victims else None


def heard_first(broken: Sequence[Finding]) -> Finding:
    """Return the first complaint of several, by their times or their lines in one file; else the one that says most.

    What a launcher did to the ranks it stopped says least of all.
    """
    broken = [each for each in broken if each.category != "signal_preempted"] or broken
    if all(each.t_ns is not None for each in broken):
        return min(broken, key=lambda each: each.t_ns or 0)
    lines = [line for each in broken for line in each.evidence[:1] if line.line is not None]
    if len(lines) == len(broken) and len({line.file for line in lines}) == 1:
        return min(broken, key=lambda each: each.evidence[0].line or 0)
    # A timeout only tells that others did not come, and who gives up so closes connections.
    weights = {"nccl_timeout_watchdog": 1, "gloo_connection_reset": 2}
    return min(broken, key=lambda each: weights.get(each.category, 0))


def look_first(broken: Sequence[Finding], findings: Sequence[Finding], context: Context) -> list[str]:
    """Name the few ranks that might know more: nothing is known of them, or they alone did not complain."""
    awaited = sorted({each.peer for each in broken if each.peer is not None} - set(_ranks(broken)))
    if awaited:
        return [f"look at {name_ranks(awaited)} first: others waited for it"]
    silent = sorted({rank for ranks in context.ranks_per_node.values() for rank in ranks} - set(_ranks(findings)))
    if silent:
        return [f"look at {name_ranks(silent)} first: nothing is known of {'it' if len(silent) == 1 else 'them'}"]
    quiet = _ranks([each for each in findings if each.role in (FINE, STOPPED)])
    if not quiet or len(quiet) >= len(broken):
        return []
    return [f"look at {name_ranks(quiet)} first: all others complain"]


def _ranks(findings: Iterable[Finding]) -> list[int]:
    return [each.rank for each in findings if each.rank is not None]
