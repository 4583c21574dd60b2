"""The verdict across ranks and nodes: one cause, the ranks that failed as a consequence, the evidence. A pure function.

In: what each rank left behind, what is known about the nodes. Out: an incident.

**A rank that supervisor stopped is never the cause. A closed connection, a watchdog or a timeout of the store marks a
rank that failed as a consequence, unless there is nothing else. If the texts do not show the cause, the verdict says
so and what to check next.**
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from remote_agent.diagnose.categories import CATEGORIES
from remote_agent.diagnose.claims import (
    AWAITED,
    BASE,
    DIFFER,
    DONE,
    ENDED,
    FAILED,
    OF_OTHERS,
    STOPPED,
    TOLD,
    WAITED,
    Claim,
    in_order,
    is_likely_first,
)
from remote_agent.diagnose.evidence import JobContext, RankEvidence, name_nodes
from remote_agent.diagnose.exits import signal_name
from remote_agent.diagnose.hang.watchdogs import find_mismatch, find_missing
from remote_agent.diagnose.incidents import EvidenceLine, incident, iso_time
from remote_agent.diagnose.last_words import begun_work, last_error, own_lines
from remote_agent.diagnose.rosters import Roster, absent_of
from remote_agent.diagnose.signatures.signature import CHILD_FAILED, DIED, WRONG_SIZE
from remote_agent.diagnose.testimony import read_ranks
from remote_agent.diagnose.tracebacks import HEAD
from remote_agent.text.names import name_ranks
from remote_agent.text.shapes import clip, fingerprint, shape
from remote_agent.wire.events import AGENT_DIED

if TYPE_CHECKING:
    from remote_agent.wire.documents import IncidentDocument, MissingRanks

# Exits without a reason have the same cause only within this time.
_ENDED_WINDOW_NS = 10_000_000_000
_TIMED_OUT = re.compile(r"\btim(?:ed|es) ?out|\btime-?out|DEADLINE_EXCEEDED|\bstall|\bdead ?lock", re.IGNORECASE)
# A path of three parts or more is of one thing; a text of this length, cut off, can be told.
_PATH = re.compile(r"(?<![\w.])(?:/[\w.@+-]+){3,}")
# The size of a tensor, as scripts print it.
_SIZE = re.compile(r"[\[(]\d{1,9}(?:, ?\d{1,9})+[\])]|[\[(]\d{1,9},[\])]")
_FRAME_LINE = re.compile(r'(?m)^.*\bFile ".*$')
_OF_FILES = re.compile(
    r"^(?:[\w.]+\.)?(?:File\w+Error|OSError|IsADirectoryError|NotADirectoryError|PermissionError|EOFError|Bad\w*File"
    r"|JSONDecodeError|UnpicklingError|SafetensorError|ReadError)\b"
)
_CUT_OFF = 30
MAX_EVIDENCE = 12
_LEAVING_NS = 1_000_000_000
_MAX_PLACES = 3
_MAX_CLAIMS = 10
# What is not of the cause is listed as a consequence, so it did not fail by itself.
_TOO = "failed, too"
_LOOPBACK = re.compile(r"[Gg]loo.*(?:remote=|connect )\[(127\.[\d.]+|::1)\]")


class _Cause(NamedTuple):
    """The claims that together are the cause, and how certain that is."""

    category: str
    headline: str
    hint: str
    scope: str
    confidence: str = "supported"
    claims: Sequence[Claim] = ()
    ranks: Sequence[int] = ()
    node: str | None = None
    missing: MissingRanks | None = None
    t_ns: int | None = None
    """The time when it happened, where no claim shows it."""
    said: Sequence[EvidenceLine] = ()
    """The lines that show it, where these are not of a claim."""
    at_least: bool = False
    """Ranks that supervisor stopped may have been about to fail alike."""


class _Case(NamedTuple):
    """What the rules read."""

    claims: Sequence[Claim]
    """In order."""
    context: JobContext
    pointed_at: int | None
    """The rank that the others agree on, where nothing is known from itself."""

    def of(self, *kinds: str) -> list[Claim]:
        """Return the claims of these kinds."""
        return [each for each in self.claims if each.kind in kinds]

    def blame(self, ranks: Sequence[int], category: str, headline: str, hint: str = "", **more: Any) -> _Cause:
        """Return the cause that these ranks are, on their node if it is one."""
        nodes_said = {each.rank: each.node for each in self.claims}
        nodes = {self.context.node_of(rank) or nodes_said.get(rank) for rank in ranks}
        claims, said = _claims_of(ranks, self.claims), more.pop("said", ())
        return _Cause(
            category,
            headline,
            hint or CATEGORIES[category].hint,
            _scope_of(ranks),
            ranks=ranks,
            node=nodes.pop() if len(nodes) == 1 else None,
            said=[*_own_errors(claims), *said],
            **{"claims": claims, **more},
        )


def verdict(evidence: Sequence[RankEvidence], context: JobContext) -> IncidentDocument:
    """Return the incident that this evidence shows."""
    claims = in_order(read_ranks(evidence, context.host_notes))
    case = _Case(claims, context, _pointed_at(claims))
    found = ((why, rule(case)) for why, rule in RULES)
    why, cause = next(((why, cause) for why, cause in found if cause is not None), ("", _nothing(case)))
    first = cause.claims[0] if cause.claims else None
    return incident(
        context,
        time_ns=_time(cause, claims, context),
        category=cause.category,
        scope=cause.scope,
        confidence=cause.confidence,
        summary=f"{_subject(cause, context)}{cause.headline}",
        hint=cause.hint,
        fingerprint=_fingerprint(cause),
        ranks=cause.ranks,
        node=cause.node or None,
        at_least=cause.at_least,
        evidence=_evidence(cause, claims),
        traceback=first.traceback if first is not None else None,
        exit_={"code": first.exit_code, "signal": first.exit_signal} if first is not None else None,
        victims=_victims(cause, claims, context),
        missing=cause.missing,
        why=_why(why, cause, claims),
    )


def _error_ns(context: JobContext, *nodes: str | None) -> int:
    """Return the possible error when timestamps of these nodes are compared."""
    return int(sum(context.clock_error_ms.get(node or "", 0.0) for node in nodes) * 1e6)


def _node_lost(case: _Case) -> _Cause | None:
    """A lost node is the cause unless a rank of another node failed before the last sign of life."""
    claims, context, _ = case
    if not context.lost_nodes:
        return None
    node, (t_ns, reason) = min(context.lost_nodes.items(), key=lambda item: item[1][0])
    own = [each for each in claims if each.kind == FAILED and each.node != node]
    earlier = [each for each in own if each.t_ns is not None and each.t_ns + _error_ns(context, node, each.node) < t_ns]
    if earlier:
        return None
    ranks = context.ranks_of(node)
    with_ranks = f" ({name_ranks(ranks)})" if ranks else ""
    others = [name for name in context.lost_nodes if name != node]
    also = f"; also lost: {', '.join(sorted(others))}" if others else ""
    return _Cause(
        scope="outside_the_ranks",
        confidence="supported" if own else "established",
        category="node_lost",
        headline=f"node {node} lost: {reason}{with_ranks}{also}",
        hint=(
            f"host {node} answers, but the agent there died: see agent.log in the job's directory and the kernel's "
            "log; `supervisor attach` starts the agent again"
            if AGENT_DIED in reason
            else f"if {node} answers over SSH, see agent.log in the job's directory there; if not, check its power, "
            "network and console"
        ),
        node=node,
        t_ns=t_ns,
    )


def _loopback(case: _Case) -> _Cause | None:
    """The first failure is gloo's, which looked for a rank of another host at a loopback address."""
    claims, context, _ = case
    first = next((each for each in claims if each.kind == FAILED), None)
    match = _LOOPBACK.search(first.headline) if first is not None else None
    nodes = context.ranks_per_node
    if first is None or match is None or len(nodes) < 2:
        return None
    names = list(context.unreachable_names)
    who = f"the host name of {', '.join(names)}" if names else "the host name of a node"
    or_else = "" if names else ", or its GLOO_SOCKET_IFNAME is a loopback interface"
    return _Cause(
        first.category,
        f"gloo looked for ranks of another host at {match[1]}: {who} resolves to loopback there{or_else}",
        "set GLOO_SOCKET_IFNAME in `env` of that host to the interface of its address, or correct its /etc/hosts",
        "outside_the_ranks",
        "established",
        claims=[each for each in claims if each is first or _same_cause(first, each)],
    )


def _own_failure(case: _Case) -> _Cause | None:
    """The first rank that failed by itself, and all ranks that failed alike."""
    claims, context, pointed_at = case
    # Beside a timeout, the end of a process proves nothing: a rank that waited for too long ends, too.
    waits = any(each.kind == WAITED and each.category != "rendezvous_timeout" for each in claims)
    counts = [each for each in claims if not waits or not (each.is_row or (each.kind == ENDED and not each.ended))]
    every = [each for each in counts if each.kind == FAILED]
    own = [each for each in every if not each.is_want] or every
    # Text of no rank that explains nothing is a launcher's wrapper, unless no rank reports a failure.
    unexplained = [each for each in counts if each.kind == ENDED]
    a_rank_fails = any(each.rank is not None and each.kind not in (DONE, STOPPED) for each in claims)
    unexplained = [each for each in unexplained if each.rank is not None or not a_rank_fails]
    # Ranks whose exit is known come before ranks whose text only suggests it.
    candidates = own or sorted(unexplained, key=lambda each: not each.proven)
    if not candidates:
        return None
    first = _named_itself(candidates)
    same = [each for each in claims if each is first or (_same_cause(first, each) and _is_way(each) <= _is_way(first))]
    same += _rows_like(same, claims)
    alike = {*same}
    others = [each for each in own if each not in alike]
    clear = all(_clearly_before(first, each, context) for each in others)
    confidence = "established" if first.proven and clear and own else "supported"
    if not own and any(not _clearly_before(first, each, context) for each in claims if each.kind in OF_OTHERS):
        confidence = "unknown"
    ranks = [each.rank for each in same if each.rank is not None]
    of_ranks = [each for each in same if each.rank is not None] or same
    nodes = {each.node for each in of_ranks}
    odd = _odd_one_out(first, claims, ranks, context)
    if odd is None and first.rank is None and not CATEGORIES[first.category].hits_all:
        odd = pointed_at
    named = first.of(FAILED) or (() if odd is None else (odd,))
    differ = {rank for each in claims if each.of(DIFFER) for rank in (each.rank, *each.others)}
    if not named and len(differ) == 2 and None not in differ:
        # The two differ, and nothing shows which of them is right.
        named = tuple(rank for rank in differ if rank is not None)
    if named:
        return _named(first, named, same, context)
    # A rank that is the only one to miss the rendezvous is at fault itself.
    waiting = [each for each in claims if each.rank is not None and each.kind in (*OF_OTHERS, STOPPED, DONE)]
    alone = first.category == "rendezvous_timeout" and len(ranks) == 1 and len(waiting) > 1
    scope = "one_rank" if alone else _scope(first, ranks, context)
    gone = _host_gone(claims, context) if first.category == "nccl_network" else None
    blames_ranks = scope in ("one_rank", "several_or_all_ranks")
    at_least = blames_ranks and _may_be_more(first, ranks, same, claims)
    return _Cause(
        claims=same,
        scope=scope,
        # The affected ranks are not established while some could not show it.
        confidence="supported" if at_least and confidence == "established" else confidence,
        at_least=at_least,
        category=first.category,
        headline=first.text,
        hint="; ".join([*_whole_nodes(ranks if blames_ranks else [], context), *([first.hint] if first.hint else [])]),
        ranks=ranks if blames_ranks else [],
        node=(of_ranks[0].node if len(nodes) == 1 and scope != "not_in_text" and not _is_way(first) else None) or gone,
    )


def _rows_like(same: Sequence[Claim], claims: Iterable[Claim]) -> list[Claim]:
    """Return the rows of a launcher that have the time and code of one of several ranks that failed alike.

    Its table has those that had ended when it looked, and says of the first that it is the cause.
    """
    shown = {each.shown.row for each in same if each.shown.row and each.kind == FAILED}
    if len(same) < 2 or not shown:
        return []
    return [
        each for each in claims if each.kind == ENDED and each.is_row and each.shown.row in shown and each not in same
    ]


def _whole_nodes(ranks: Sequence[int], context: JobContext) -> list[str]:
    """Return a hint where all ranks of some nodes failed, and none of the others."""
    nodes = {name: set(own) for name, own in context.ranks_per_node.items() if own}
    these = set(ranks)
    failed = [name for name, own in nodes.items() if own <= these]
    spared = [name for name, own in nodes.items() if own.isdisjoint(these)]
    if not spared or not failed or len(failed) + len(spared) < len(nodes) or len(ranks) == len(failed):
        return []
    return [f"all ranks{name_nodes(failed)} failed, none{name_nodes(spared)}: compare the nodes"]


def _is_way(claim: Claim) -> bool:
    """Return whether it reports the way to another host: that accuses neither its own host nor, alone, the other."""
    lines = [each.text for each in claim.evidence[:1]]
    return claim.category == "nccl_network" and any(host in line for host in claim.hosts for line in lines)


def _named_itself(candidates: Sequence[Claim]) -> Claim:
    """Return the first claim, or that of a rank which the first one names as failed, if it shows why itself.

    What a host says of its own network comes before what others say of the way to it.
    """
    first = candidates[0]
    if _is_way(first):
        own = (each for each in candidates if each.category == "nccl_network" and not _is_way(each))
        return next(own, first)
    return next((each for each in candidates if each.rank in first.of(FAILED) and not each.of(FAILED)), first)


def _may_be_more(first: Claim, ranks: list[int], same: list[Claim], claims: Sequence[Claim]) -> bool:
    """Return whether ranks that we stopped may have been about to fail alike: where several did, or any rank would."""
    if len(ranks) < 2 and not CATEGORIES[first.category].same_on_all:
        return False
    return any(_is_undecided(each) for each in {*claims}.difference(same))


def _is_undecided(claim: Claim) -> bool:
    """Return whether we stopped a rank whose text shows no failure of its own, nor of others."""
    return claim.kind == STOPPED and claim.category == "signal_preempted"


def _same_cause(first: Claim, other: Claim) -> bool:
    """Return whether the other rank failed alike at about the same time, even if we then stopped it."""
    if other.kind not in (FAILED, ENDED, STOPPED) or not _fails_alike(first, other):
        return False
    if other.kind != first.kind and other.kind != STOPPED:
        return False
    if first.likely_ns is None or other.likely_ns is None:
        return True
    window_ns = _ENDED_WINDOW_NS if first.kind == ENDED else CATEGORIES[first.category].window_ns
    apart_ns = abs(other.likely_ns - first.likely_ns)
    return apart_ns <= window_ns or not (is_likely_first(first, other) or is_likely_first(other, first))


def _clearly_before(first: Claim, other: Claim, context: JobContext, grace_ns: int = 0) -> bool:
    if first.t_ns is None or other.t_ns is None:
        return False
    error_ns = _error_ns(context, first.node, other.node if other.node != first.node else None)
    return other.t_ns + grace_ns - first.t_ns - first.uncertainty_ns > error_ns


def _scope(first: Claim, ranks: list[int], context: JobContext) -> str:
    killed_by = signal_name(first.exit_code, first.exit_signal)
    # A full /dev/shm is a problem of the node, unless the rank was killed for it.
    if CATEGORIES[first.category].outside or (first.category == "bus_error_shm" and killed_by is None):
        return "outside_the_ranks"
    if first.category == "signal_preempted" and (len(ranks) != 1 or (context.world_size or 0) == 1):
        return "outside_the_ranks"
    # A trainer prints the loss of all ranks on one of them.
    if first.category == "nan_loss" and first.traceback is None and not first.ended:
        return "not_in_text"
    # Of two that differ, either may be wrong.
    of_two = first.category == "collective_desync" and context.world_size == 2
    if _is_wrong_size(first) or first.of(DIFFER) or _is_hearsay(first) or (len(ranks) == 1 and of_two):
        return "not_in_text"
    if not ranks and first.times > 1:
        return "several_or_all_ranks"
    if not ranks:
        return "not_in_text" if first.node is None else "outside_the_ranks"
    return _scope_of(ranks)


def _named(first: Claim, named: Sequence[int], same: list[Claim], context: JobContext) -> _Cause:
    """The text of a rank or of its peers names the culprits."""
    source = f"rank {first.rank}" if first.rank is not None else "the log or its peers"
    nodes = {context.node_of(rank) for rank in named}
    node = (nodes.pop() if len(nodes) == 1 else None) or (first.node if first.rank is None else None)
    scope = _scope_of(named)
    headline = f"{first.headline} (reported by {source})"
    return _Cause(first.category, headline, first.hint, scope, claims=same, ranks=named, node=node)


def _failed_first(case: _Case) -> _Cause | None:
    """Its peers report which rank failed first; nothing is known from that rank itself."""
    lost = case.pointed_at
    broken = [each for each in case.of(*OF_OTHERS) if not CATEGORIES[each.category].hits_all]
    if lost is None or not broken:
        return None
    text = "failed first according to its peers; its own output does not say why"
    hint = f"check the output of rank {lost}, and the kernel log of its node"
    return case.blame([lost], broken[0].category, text, hint, claims=())


def _mismatch(case: _Case) -> _Cause | None:
    """Ranks waited for each other in different collectives, or in one of different sizes."""
    claims = case.claims
    mismatch = find_mismatch([each.wait for each in claims if each.wait is not None])
    if mismatch is None or any(each.kind == FAILED for each in claims):
        return None
    by_call: dict[str, list[int]] = {}
    for rank, call in sorted(mismatch.calls.items()):
        by_call.setdefault(call, []).append(rank)
    odd = list(mismatch.odd)
    order = sorted(by_call, key=lambda call: by_call[call] != odd)
    calls = ", ".join(f"{call} on {name_ranks(by_call[call])}" for call in order)
    headline = f"collective number {mismatch.number} is not the same on all ranks: {calls}"
    return case.blame(odd, "collective_desync", headline)


def _absent(case: _Case) -> _Cause | None:
    """A list of who came, or of who did not, names those for whom the others waited."""
    waits = [each for each in case.of(WAITED, FAILED) if each.kind == WAITED or _is_wait(each)]
    lists = [each for each in case.claims if each.shown.roster is not None]
    roster = _joined([each.shown.roster for each in lists if each.shown.roster is not None])
    if roster is None or not waits or any(each not in waits for each in case.of(FAILED)):
        return None
    absent = absent_of(roster, case.context.world_size or 0)
    # That one rank waits for another accuses nobody: that one may wait, too.
    is_pair = roster.is_of_one and len(lists) == 1 and lists[0].rank is not None
    if not absent or is_pair or any(each.kind == WAITED and each.rank in absent for each in waits):
        return None
    category = next((each.category for each in waits if each.kind == WAITED), "hang_no_output")
    said = [each.listed for each in lists if each.listed is not None]
    return case.blame(sorted(absent), category, f"did not come, according to who did: {said[-1].text}", said=said)


def _is_wait(claim: Claim) -> bool:
    """Return whether an exception says only that others did not come."""
    return claim.is_want or (claim.category in ("user_exception", "other") and bool(_TIMED_OUT.search(claim.headline)))


def _joined(rosters: Sequence[Roster]) -> Roster | None:
    """Return what the lists of several authors say together; None where they differ."""
    lists = [each for each in rosters if each.is_list]
    if not rosters or any(each[1:4] != lists[0][1:4] for each in lists):
        return None
    ranks = frozenset().union(*(each.ranks for each in rosters))
    return lists[0] if lists else rosters[0]._replace(ranks=ranks, of=max(each.of for each in rosters))


def _at_work(case: _Case) -> _Cause | None:
    """The others gave up waiting while some were at work that was not done."""
    claims, context, _ = case
    waits = case.of(WAITED)
    busy = [each for each in claims if each.shown.work and each.rank is not None and each.exit_code is None]
    busy = [each for each in busy if each.kind in (DONE, STOPPED, TOLD)]
    # Work that those who waited had begun as well tells nothing.
    common = {shape(line) for each in waits if busy for line in begun_work(own_lines(each.shown.text))}
    busy = [each for each in busy if shape(each.shown.work) not in common]
    if not waits or not busy or len(busy) > len(waits) or case.of(FAILED) or context.hang is not None:
        return None
    others = name_ranks(_ranks_of(waits)) or "others"
    headline = f"was at work while {others} waited until the time-out: {busy[0].shown.work}"
    hint = "do such work before the process group is set up, or on all ranks, or raise the time-out of the group"
    said = [EvidenceLine(each.node, each.rank, None, None, each.shown.work) for each in busy]
    return case.blame(_ranks_of(busy), waits[0].category, headline, hint, said=said)


def _missing_rank(case: _Case) -> _Cause | None:
    """Ranks timed out in a collective that some ranks never reached: those are the culprits."""
    claims, context, _ = case
    timed_out = any(each.kind in OF_OTHERS and _TIMED_OUT.search(each.headline) for each in claims)
    hang = context.hang or (context.seen if timed_out else None)
    missing = hang if hang and hang["missing"] else _find_missing(claims, context)
    if missing is None:
        return None
    # A missing rank that we stopped has not failed, but its text may say why it was missing.
    failures = _asides(claims, missing["missing"])
    ranks = sorted(failures) or list(missing["missing"])
    gave_up = not hang or any(each.category == "nccl_timeout_watchdog" for each in claims)
    category = "user_exception" if failures else "nccl_timeout_watchdog" if gave_up else "hang_no_output"
    headline = "; ".join([*list(failures.values())[:1], _absence(missing)])
    return case.blame(ranks, category, headline, missing=missing)


def _asides(claims: Iterable[Claim], ranks: Sequence[int]) -> dict[int, str]:
    """Return which exception ended a thread, a task or a child of some of these ranks."""
    return {
        each.rank: each.shown.aside for each in _claims_of(ranks, claims) if each.rank is not None and each.shown.aside
    }


def _absence(missing: MissingRanks) -> str:
    """Return which collective the missing ranks never reached."""
    waiting = missing["waiting"]
    if not waiting:
        return "the group made no progress"
    number = f" number {missing['seq']}" if missing["seq"] is not None else ""
    verb = "was" if len(waiting) == 1 else "were"
    places = sorted({str(place) for place in missing["stacks"].values()})
    at = f", last seen at {', '.join(places[:_MAX_PLACES])}" if places else ""
    return f"never reached {missing['collective']}{number}{at}; {name_ranks(waiting)} {verb} waiting"


def _scope_of(ranks: Sequence[int]) -> str:
    return "one_rank" if len(ranks) == 1 else "several_or_all_ranks" if ranks else "not_in_text"


def _exited_early(case: _Case) -> _Cause | None:
    """Some ranks exited with success before the others lost their connections: they exited too early."""
    claims, context, _ = case
    broken = case.of(*OF_OTHERS)
    if not broken:
        return None
    left = [each for each in claims if each.kind == DONE and (each.exit_code == 0 or each.exit_signal is not None)]
    # A process closes its connections before it exits: those that it leaves may be seen first.
    grace = {each.rank: 0 if each.exit_signal is not None else _LEAVING_NS for each in left}
    left = [each for each in left if _clearly_before(each, broken[0], context, grace[each.rank])]
    if not left:
        return None
    ranks = _ranks_of(left)
    headline = f"left early: {left[0].headline} while {name_ranks(_ranks_of(broken))} still communicated"
    headline = "; ".join([headline, *list(_asides(claims, ranks).values())[:1]])
    hint = "every rank must run the same number of steps and collectives: compare the amount of data per rank"
    return case.blame(ranks, "collective_desync", headline, hint)


def _wrong_address(case: _Case) -> _Cause | None:
    """One rank tried to reach the store at an address where there is none."""
    lost = [each for each in case.claims if each.shown.address and each.rank is not None]
    waited = [each for each in case.of(WAITED) if each.category == "rendezvous_timeout" and not each.shown.address]
    if len(lost) != 1 or len(waited) < 2:
        return None
    headline = f"could not reach a store at ({lost[0].shown.address}); the other ranks waited in another one"
    hint = "compare its MASTER_ADDR, MASTER_PORT and route with those of the other ranks"
    return case.blame(_ranks_of(lost), "rendezvous_timeout", headline, hint)


def _larger_world(case: _Case) -> _Cause | None:
    """The ranks waited for one that nobody has started."""
    started = case.context.world_size or 0
    waits = [each for each in case.of(WAITED) if max(each.of(AWAITED), default=-1) >= started > 0]
    if not waits:
        return None
    awaited = min(rank for each in waits for rank in each.others)
    headline = f"waited for rank {awaited}, so for a world of {awaited + 1} or more, but {started} ranks were started"
    hint = "compare world_size in the script (or WORLD_SIZE) with the number of ranks that the launcher starts"
    return _Cause(waits[0].category, headline, hint, "outside_the_ranks", claims=waits)


def _node_trouble(case: _Case) -> _Cause | None:
    """Nodes, not their ranks, report what went wrong."""
    reports = [each for each in case.claims if each.report]
    if not reports:
        return None
    first = reports[0]
    categories = [each.category for each in case.of(*OF_OTHERS) if each.rank is None]
    others = f"{len(reports)} nodes " if len(reports) > 1 else ""
    hint = f"check the agent's log on {first.node}"
    node = None if others else first.node
    return _Cause((categories or ["other"])[0], clip(f"{others}{first.report}"), hint, "outside_the_ranks", node=node)


def _victims_only(case: _Case) -> _Cause | None:
    """Nothing shows the cause: say what was seen, and what to check next."""
    claims, context, _ = case
    broken = case.of(*OF_OTHERS)
    if not broken:
        return None
    first = _earliest_failure(broken)
    reason = "the logs do not say why" if first.traceback is None else "no rank shows an earlier failure"
    where = f"first on {name_ranks([first.rank])}{name_nodes([first.node])}" if first.rank is not None else "in the log"
    hint = "; ".join([*_ranks_to_check(broken, claims, context), first.hint])
    outside = CATEGORIES[first.category].outside or first.category == "signal_preempted"
    host = _host_gone(claims, context)
    return _Cause(
        scope="outside_the_ranks" if outside or host else "not_in_text",
        confidence="supported" if outside or host else "unknown",
        category=first.category,
        headline=f"{first.headline}, {where}; {reason}",
        hint=f"look at {host} first: the others lost their connections to it" if host else hint,
        node=host,
    )


def _host_gone(claims: Sequence[Claim], context: JobContext) -> str | None:
    """Return the only host to which connections were lost, as several lines say, none of them of that host."""
    lost = [host for each in claims for host in each.hosts]
    hosts = {*lost}
    if len(lost) < 2 or len(hosts) != 1 or hosts & {each.node for each in claims}:
        return None
    host = hosts.pop()
    return host if not any(context.ranks_per_node) or host in context.ranks_per_node else None


def _nothing(case: _Case) -> _Cause:
    stopped = bool(case.of(STOPPED))
    text = "supervisor stopped the ranks; none failed by itself" if stopped else "no failure in the ranks' output"
    hint = "check the earlier events, and the ranks' stdout"
    return _Cause("other", text, hint, "not_in_text", "unknown")


def _subject(cause: _Cause, context: JobContext) -> str:
    """Return the ranks and nodes that the summary begins with."""
    ranks = cause.ranks or _ranks_of(cause.claims)
    if not ranks:
        return f"{cause.node}: " if cause.node is not None and cause.category != "node_lost" else ""
    nodes = [cause.node] if cause.node is not None else [each.node for each in cause.claims]
    nodes = nodes if all(nodes) else []
    if len(ranks) > 1 and len(ranks) == context.world_size:
        return f"all {len(ranks)} ranks{name_nodes(nodes)}: "
    return f"{'at least ' if cause.at_least else ''}{name_ranks(ranks)}{name_nodes(nodes)}: "


def _time(cause: _Cause, claims: list[Claim], context: JobContext) -> int | None:
    if cause.t_ns is not None:
        return cause.t_ns
    times = [each.t_ns for each in (cause.claims or claims) if each.t_ns is not None]
    return min(times, default=context.now_ns)


def _evidence(cause: _Cause, claims: list[Claim]) -> tuple[EvidenceLine, ...]:
    """Return the lines of the cause, then one line for each other category of failure."""
    own = dict.fromkeys([*cause.said, *(line for each in cause.claims for line in each.evidence)])
    lines = list(own)[: MAX_EVIDENCE // 2]
    seen = {each.category for each in cause.claims}
    for each in claims:
        # What is of the cause has a category that has been seen.
        if each.kind in (FAILED, *OF_OTHERS, ENDED) and each.category not in seen:
            seen.add(each.category)
            lines.extend(each.evidence[:1])
    return tuple(lines[:MAX_EVIDENCE])


def _victims(cause: _Cause, claims: list[Claim], context: JobContext) -> list[tuple[Sequence[int], str, str]]:
    """Return all other ranks that failed, in order, in groups that failed alike."""
    groups: dict[tuple[str, str], list[Claim]] = {}
    guilty, of_cause = set(cause.ranks), set(cause.claims)
    for each in claims:
        if each.kind == DONE or each in of_cause or each.rank is None or each.rank in guilty:
            continue
        groups.setdefault((each.category, each.shape), []).append(each)
    victims: list[tuple[Sequence[int], str, str]] = []
    for (category, _), alike in groups.items():
        ranks = _ranks_of(alike)
        times = f"{len(ranks)} x " if len(ranks) > 1 else ""
        later = "later: " if alike[0].kind == FAILED else ""
        too = "; may be affected too" if cause.at_least and _is_undecided(alike[0]) else ""
        victims.append((ranks, category, f"{times}{later}{alike[0].text}{too}"))
    lost = [name for name in context.lost_nodes if name != cause.node or cause.category != "node_lost"]
    of_nodes = (
        (context.ranks_of(name), "node_lost", f"node {name} lost: {context.lost_nodes[name][1]}") for name in lost
    )
    return [*victims, *of_nodes]


def _fingerprint(cause: _Cause) -> str:
    if cause.claims and cause.missing is None and cause.category != "collective_desync":
        return cause.claims[0].fingerprint
    return fingerprint(cause.category, "", cause.node or "" if cause.category == "node_lost" else "", cause.headline)


def _odd_one_out(first: Claim, claims: Sequence[Claim], ranks: Sequence[int], context: JobContext) -> int | None:
    """Return the only rank that differs from all others, or for which they waited, according to two or more of them.

    A rank that fails alike and names no other is left out: the texts are about something that all ranks share.
    """
    reports = [each for each in claims if each.category == first.category and each.of(DIFFER) not in ((), (each.rank,))]
    votes = Counter(each.others[0] for each in reports)
    most = max(votes, key=lambda rank: votes[rank], default=None)
    itself = next((each for each in claims if each.rank == most and each.fingerprint == first.fingerprint), None)
    agrees = all(each.others[0] == most or each.rank == most for each in reports)
    if most is not None and votes[most] > 1 and agrees and (itself is None or itself.of(DIFFER)):
        return most
    everyone = {rank for own in context.ranks_per_node.values() for rank in own} | set(range(context.world_size or 0))
    if len(ranks) > 1 and first.of(BASE) and everyone.union(range(max(ranks) + 1)) == {*ranks, *first.others}:
        return first.others[0]
    if first.category == "collective_desync" and (odd := _other_size(claims)) is not None:
        return odd
    # All of them received the tensor from the one rank that reports nothing.
    others = {rank for own in context.ranks_per_node.values() for rank in own} - set(ranks)
    return others.pop() if _is_wrong_size(first) and len(ranks) > 1 and len(others) == 1 else None


def _other_size(claims: Iterable[Claim]) -> int | None:
    """Return the only rank that prints another size than all others do in the same line."""
    by_line: dict[str, dict[int, str]] = {}
    for each in claims:
        for line in own_lines(each.shown.text) if each.rank is not None else ():
            if (size := _SIZE.search(line)) is not None:
                by_line.setdefault(shape(_SIZE.sub("", line)), {})[each.rank or 0] = size.group()
    for sizes in by_line.values():
        most, count = Counter(sizes.values()).most_common(1)[0]
        if count == len(sizes) - 1 > 1:
            return next(rank for rank, size in sizes.items() if size != most)
    return None


def _is_wrong_size(claim: Claim) -> bool:
    """Return whether a rank only received a tensor of the wrong size: the sender is to blame."""
    return claim.headline == WRONG_SIZE


def _fails_alike(first: Claim, other: Claim) -> bool:
    """Return whether two ranks failed alike: the same exception, kind of failure, or file that they share.

    A GPU's error spreads to other ranks: without times the first GPU is unknown.
    """
    if not other.fingerprint or not first.fingerprint:
        return False
    if other.fingerprint == first.fingerprint:
        return True
    if first.category == "cuda_error" or CATEGORIES[first.category].alone:
        same = first.category == other.category == "cuda_error" and first.t_ns is None and other.t_ns is None
    else:
        same = first.category == other.category
    short, long = sorted((first.headline, other.headline), key=len)
    cut_off = first.place == other.place != "" and len(short) > _CUT_OFF and long.startswith(short)
    end, whole = sorted((first.traceback or "", other.traceback or ""), key=len)
    headless = not end.startswith(HEAD) and end.count("\n") > 1 and whole.endswith(end)
    return same or cut_off or headless or _share_a_path(first, other) or _share_a_file(first, other)


def _share_a_file(first: Claim, other: Claim) -> bool:
    """Return whether two ranks failed at files in one function, each at another step of what both do there."""
    places = {re.sub(r":\d+", "", each.place) for each in (first, other)}
    return len(places) == 1 and "" not in places and all(_OF_FILES.search(each.headline) for each in (first, other))


def _share_a_path(first: Claim, other: Claim) -> bool:
    """Return whether two failures name the same file, or one names a file in the folder that the other names.

    The exception may name it, or the line of code that raised it.
    """
    texts = (f"{each.headline}\n{_FRAME_LINE.sub('', each.traceback or '')}" for each in (first, other))
    paths, others = (set(_PATH.findall(text)) for text in texts)
    return any(f"{one}/".startswith(f"{two}/") or f"{two}/".startswith(f"{one}/") for one in paths for two in others)


def _is_hearsay(claim: Claim) -> bool:
    """Return whether a rank reports a failure of NCCL or a child without a reason, and its exit was not observed."""
    without_reason = claim.category == "nccl_system_error" or claim.headline == CHILD_FAILED
    return without_reason and claim.kind == ENDED and not claim.ended


def _pointed_at(claims: Sequence[Claim]) -> int | None:
    """Return the only rank that died according to its parent, or that others lost first, or waited for in vain.

    A rank that lost connections itself is not returned: it failed for another reason.
    """
    died = {each.rank for each in claims if each.headline == DIED and each.rank is not None}
    if len(died) == 1:
        return died.pop()
    awaited = [rank for each in claims if each.kind != FAILED for rank in each.of(AWAITED)]
    victims = {each.rank for each in claims if each.kind in (*OF_OTHERS, STOPPED)}
    return awaited[0] if len(awaited) > 1 and len({*awaited}) == 1 and awaited[0] not in victims else None


def _earliest_failure(broken: Sequence[Claim]) -> Claim:
    """Return the first of several failures by time or, in one file, by line; otherwise the most informative one.

    The way in which a launcher stopped ranks is the least informative.
    """
    broken = [each for each in broken if each.category != "signal_preempted"] or broken
    if all(each.t_ns is not None for each in broken):
        return min(broken, key=lambda each: each.t_ns or 0)
    lines = [line for each in broken for line in each.evidence[:1] if line.line is not None]
    if len(lines) == len(broken) and len({line.file for line in lines}) == 1:
        return min(broken, key=lambda each: each.evidence[0].line or 0)
    # A timeout only says that other ranks are missing, and a rank that gives up closes its connections.
    weights = {"nccl_timeout_watchdog": 1, "gloo_connection_reset": 2}
    return min(broken, key=lambda each: weights.get(each.category, 0))


def _ranks_to_check(broken: Sequence[Claim], claims: Sequence[Claim], context: JobContext) -> list[str]:
    """Return a hint with the few ranks that may show more: nothing is known about them, or they report no failure."""
    awaited = sorted({rank for each in broken for rank in each.of(AWAITED)} - set(_ranks_of(broken)))
    if awaited:
        return [f"check {name_ranks(awaited)} first: other ranks waited for {_pronoun(awaited)}"]
    silent = sorted({rank for ranks in context.ranks_per_node.values() for rank in ranks} - set(_ranks_of(claims)))
    if silent:
        return [f"check {name_ranks(silent)} first: nothing is known about {_pronoun(silent)}"]
    others = _ranks_of(each for each in claims if each.kind in (DONE, STOPPED))
    if not others or len(others) >= len(broken):
        return []
    return [f"check {name_ranks(others)} first: all other ranks report failures"]


def _pronoun(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def _claims_of(ranks: Iterable[int], claims: Iterable[Claim]) -> list[Claim]:
    """Return the claims of these ranks."""
    authors = set(ranks)
    return [each for each in claims if each.rank in authors]


def _own_errors(claims: Iterable[Claim]) -> list[EvidenceLine]:
    """Return the error after which each author went on, where its claim shows nothing: it may say why it was away."""
    errors = ((each, last_error(own_lines(each.shown.text))) for each in claims if not each.evidence)
    return [EvidenceLine(each.node, each.rank, None, None, clip(error)) for each, error in errors if error]


def _ranks_of(claims: Iterable[Claim]) -> list[int]:
    """Return the ranks of these claims."""
    return [each.rank for each in claims if each.rank is not None]


def _find_missing(claims: Sequence[Claim], context: JobContext) -> MissingRanks | None:
    """Return the ranks that never reached the collective in which the watchdogs of the others gave up."""
    world = {rank for ranks in context.ranks_per_node.values() for rank in ranks} | set(range(context.world_size or 0))
    away = {rank for node in context.lost_nodes for rank in context.ranks_of(node)}
    waits = [each.wait for each in claims if each.wait is not None]
    return find_missing(waits, world, away, all_known=context.world_size is not None)


def _why(rule: str, cause: _Cause, claims: Sequence[Claim]) -> tuple[str, ...]:
    """Return the claims that decided, in order, each alike once, and the rule that they decided by."""
    groups: dict[tuple[bool, str, str], list[Claim]] = {}
    of_cause = set(cause.claims)
    for each in [*cause.claims, *(each for each in claims if each not in of_cause)]:
        if each.headline or each.hosts:
            is_cause, of_others = each in of_cause, each.kind in OF_OTHERS
            kind = each.kind if is_cause or each.kind != FAILED else WAITED if _is_wait(each) else _TOO
            groups.setdefault((is_cause, kind, each.category if of_others else each.shape), []).append(each)
    lines = [_claim_line(alike, kind) for (_, kind, _), alike in list(groups.items())[: _MAX_CLAIMS - 1]]
    said = [
        f"{name_ranks([each.rank]) if each.rank is not None else 'some process'}: {each.text}" for each in cause.said
    ]
    return (*said, *lines, f"so: {rule}") if rule else tuple(lines)


def _claim_line(alike: Sequence[Claim], kind: str) -> str:
    """Return who claims what, and when, of claims that are alike."""
    first, ranks = alike[0], _ranks_of(alike)
    who = name_ranks(ranks) if ranks else "some process"
    nodes = [each.node for each in alike]
    at = f", {iso_time(first.t_ns)[11:23]}" if first.t_ns is not None else ""
    of = f" ({name_ranks(first.others)})" if first.others else ""
    lost = f"lost {', '.join(dict.fromkeys(first.hosts))}" if first.hosts else ""
    what = "; ".join(filter(None, (first.text, lost)))
    return clip(f"{who}{name_nodes(nodes if all(nodes) else [])}{at}: {kind}{of}: {what}")


RULES: tuple[tuple[str, Callable[[_Case], _Cause | None]], ...] = (
    ("a node was lost, and no rank of another node had failed by itself before", _node_lost),
    ("gloo looked for a rank of another host at a loopback address", _loopback),
    ("a list of who came names those for whom the others waited", _absent),
    ("the first that failed by itself, and all that failed alike, or those whom it accuses", _own_failure),
    ("the ranks waited for each other in different collectives", _mismatch),
    ("one was at work while the others gave up waiting", _at_work),
    ("some never came to the collective in which the others gave up", _missing_rank),
    ("some left before the others lost them", _exited_early),
    ("only one looked for the store where there is none", _wrong_address),
    ("all waited for a rank that nobody has started", _larger_world),
    ("nodes report it, not their ranks", _node_trouble),
    ("the others agree on one that did not answer", _failed_first),
    ("all that is known are consequences: no rank is named", _victims_only),
)
"""Each rule in words, in the order in which they are asked; the first that applies decides."""
