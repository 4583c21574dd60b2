"""For which ranks the others wait, what these do meanwhile, and why; or what all ranks are limited by. Pure.

In: what each rank's time went to in the same seconds (engine/sampler.py), the nodes of the ranks, who arrived last at
the collectives. Out: a Slowness, or None.

A rank for which others wait is one that waits less than they do. Nothing is compared by step or by clock: shares of
time are a rank's own. A group that waits as a whole, starts or compiles is not judged, and neither are small
differences: it is better to be silent than to name the wrong rank.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from remote_agent.diagnose.hang.stragglers import NOBODY, Stragglers
from remote_agent.text.names import name_ranks

if TYPE_CHECKING:
    from remote_agent.wire.documents import RankWindow, SlowCause, SlowPlace, SlowStatus, TakenBy

# The share of time that the others wait more than the slow rank; if nothing but computing takes longer, and no reason
# for it is known, it may be meant so.
LEAST, LEAST_FOR_COMPUTING = 0.15, 0.25
# A difference counts from this multiple of its standard error, from so many looks at a rank that was covered so far.
ERRORS, FEWEST_LOOKS, COVERED = 3.0, 20, 0.5
# While this much is spent on imports or compilation, a rank is not compared with others.
STARTING = 0.1
# If the others do less than this beside waiting, it may be a pause of the whole group, such as a checkpoint.
PAUSE = 0.02
# From this share on, stages of a pipeline send each other their work: only ranks of the same stage are comparable.
PIPELINE = 0.05
# A cause explains at least this part of the wait, a phase this one, a function this part of the phase.
OF_CAUSE, OF_PHASE, OF_PLACE = 1 / 4, 1 / 2, 0.4
# Page faults a second that are read from disk, and how many times those of the peers: the node swaps.
SWAPS, SWAPS_TIMES = 50.0, 3.0
# With a smaller share of a processor, a phase sleeps.
ASLEEP = 0.3
# If every rank communicates for this share, one host's network may be the reason: all its connections, two at least,
# carry less than this part of what those between other hosts do, and bytes wait for them half of the time.
COMMUNICATES, OF_SPEED, FEWEST_LINKS, QUEUED = 0.7, 0.4, 2, 0.5
# If no rank is slow: each rank spends this share in one phase.
LIMITS: Mapping[str, float] = {"input": 0.4, "checkpoint": 0.15, "logging": 0.4}
COMPUTING = ("forward", "backward", "optimizer", "gpu")
# What a rank may do in place of computing; each has a place in the script.
HOST = ("input", "script", "checkpoint", "logging", "eval")
COMPUTE, ALL, WAIT, NETWORK, IDLE = "compute", "all", "wait", "network", "gpus_idle"
# The causes that are the host's: whoever just computes then needs no place. And that it does more or longer work.
OF_HOST = ("throttled", "cpu_taken", "swapping")
MORE = "computes_more"

DOING: Mapping[str, str] = {
    "input": "loading data",
    "checkpoint": "saving a checkpoint",
    "logging": "logging",
    "eval": "evaluating",
    "gpu": "its GPU takes longer",
    COMPUTE: "computing",
    ALL: "all its work takes longer",
    WAIT: "communication",
}


@dataclasses.dataclass(frozen=True)
class Shares:
    """What one rank's time went to, as shares of it."""

    looks: int
    phases: Mapping[str, float]
    cpu: Mapping[str, float]
    """By phase: the share of all time in which a processor worked for it."""
    places: Mapping[tuple[str, str, str], float]
    """By phase, file and function."""
    lines: Mapping[tuple[str, str, str], int]
    """The line of each place at which most time went by."""
    disk: float
    delay: float
    throttled: float
    faults_s: float
    cuda: bool
    taken: TakenBy | None
    links: Sequence[tuple[str, str, float, float]]

    def of(self, phase: str) -> float:
        """Return the share of a phase; of COMPUTE: of all that computes."""
        if phase == COMPUTE:
            return sum(self.phases.get(each, 0.0) for each in COMPUTING)
        return self.phases.get(phase, 0.0)

    def worked(self, phase: str) -> float:
        """Return the share in which a processor worked for a phase."""
        names = COMPUTING if phase == COMPUTE else (phase,)
        return sum(self.cpu.get(each, 0.0) for each in names)

    @property
    def is_comparable(self) -> bool:
        """Whether it was seen long enough, and trains."""
        return self.looks >= FEWEST_LOOKS and self.of("start") + self.of("compile") < STARTING


def shares_of(window: RankWindow, window_s: float) -> Shares | None:
    """Return one rank's shares in a window; None if too little of its time is covered."""
    seconds = sum(time_s for time_s, _ in window["phases"].values())
    if seconds < COVERED * window_s:
        return None
    places: dict[tuple[str, str, str], float] = {}
    lines: dict[tuple[str, str, str], int] = {}
    # The places with the most time come first.
    for phase, file, function, line, time_s in window["sites"]:
        place = (phase, file, function)
        places[place] = places.get(place, 0.0) + time_s / seconds
        lines.setdefault(place, line)
    return Shares(
        looks=window["looks"],
        phases={phase: time_s / seconds for phase, (time_s, _) in window["phases"].items()},
        cpu={phase: cpu_s / seconds for phase, (_, cpu_s) in window["phases"].items()},
        places=places,
        lines=lines,
        disk=window["disk_s"] / seconds,
        delay=window["delay_s"] / seconds,
        throttled=min(1.0, window["throttled_s"] / seconds),
        faults_s=window["faults"] / seconds,
        cuda=window["cuda"],
        taken=window["taken"],
        links=window["links"],
    )


def mean(each: Sequence[Shares]) -> Shares:
    """Return one rank's shares in several windows together."""

    def of(name: str) -> float:
        return statistics.fmean(getattr(one, name) for one in each)

    def by_key(name: str) -> dict[Any, float]:
        keys = {key for one in each for key in getattr(one, name)}
        return {key: statistics.fmean(getattr(one, name).get(key, 0.0) for one in each) for key in keys}

    return Shares(
        looks=sum(one.looks for one in each),
        phases=by_key("phases"),
        cpu=by_key("cpu"),
        places=by_key("places"),
        lines={place: line for one in each for place, line in one.lines.items()},
        disk=of("disk"),
        delay=of("delay"),
        throttled=of("throttled"),
        faults_s=of("faults_s"),
        cuda=any(one.cuda for one in each),
        taken=next((one.taken for one in reversed(each) if one.taken), None),
        links=each[-1].links,
    )


@dataclasses.dataclass(frozen=True)
class Slowness:
    """Ranks that the others wait for, or, without ranks, what all of them are limited by."""

    ranks: tuple[int, ...]
    node: str | None
    """The node of these ranks, or the one whose network limits all."""
    share: float
    """How much of the time the others wait for them, or how much of it is spent in what limits all."""
    phase: str
    place: SlowPlace | None
    cause: SlowCause | None
    speeds: tuple[float, float] = (0.0, 0.0)
    """In Gbit/s, what the connections of a slow network carry, and what others do."""

    def text(self) -> str:
        """Return it in words, without the name of the rank or node."""
        doing = DOING.get(self.phase, "")
        if self.phase == NETWORK:
            own, others = self.speeds
            carry = f"connections from and to it carry {own:.2g} Gbit/s, others {others:.2g}"
            return f"its network: {carry}; every rank waits {self.share:.0%} of the time"
        where = f"{self.place['file']}:{self.place['line']} in {self.place['function']}" if self.place else ""
        if self.phase == IDLE:
            return f"the GPUs are idle {self.share:.0%} of the time"
        if not self.ranks:
            where = f" ({where})" if where else ""
            what = {"input": "in the data loader", "checkpoint": "saving checkpoints"}.get(self.phase, doing)
            return f"every rank spends {self.share:.0%} of its time {what}{where}"
        who = f"its {name_ranks(self.ranks)}" if len(self.ranks) > 1 else "it"
        if self.phase == COMPUTE and (self.cause is None or self.cause["kind"] == MORE):
            doing = "forward and backward take longer"
        what = ", ".join(filter(None, (doing, where))) or "its own code takes longer"
        return f"the others wait {self.share:.0%} of the time for {who}: {what}{_because(self.cause)}"

    def to_json(self, since: str) -> SlowStatus:
        """Return it as a status has it."""
        return {
            "node": self.node,
            "ranks": list(self.ranks),
            "since": since,
            "share": round(self.share, 2),
            "phase": self.phase,
            "place": self.place,
            "cause": self.cause,
            "limits": None if self.ranks else self.phase,
            "message": self.text(),
        }


def _because(cause: SlowCause | None) -> str:
    if cause is None:
        return ""
    kind, by = cause["kind"], cause["by"]
    if kind == "cpu_taken":
        return f"; its processors are taken by {by} (pid {cause['pid']})" if by else "; it waits for a processor"
    return {
        "throttled": f"; its cgroup throttles it {cause['share']:.0%} of the time",
        "disk": f"; it waits for the disk {cause['share']:.0%} of the time",
        "swapping": "; its memory is read back from swap or disk",
        "sleeps": ", where it sleeps",
        MORE: "; it computes more, the host shows no fault",
    }[kind]


def find_slowness(
    shares: Mapping[int, Shares],
    nodes: Mapping[int, str],
    stages: Iterable[Collection[int]] = (),
    last: Stragglers = NOBODY,
    known: Collection[int] = (),
) -> Slowness | None:
    """Return for whom the others wait in these windows, or what limits all.

    `shares`: of all ranks that have them; `nodes`: of all ranks; `stages`: groups of ranks that do the same, of a
    pipeline; `last`: ranks that arrive last at most collectives, if any do; `known`: ranks that were slow before, for
    which half of the difference is enough.
    """
    compared = {rank: one for rank, one in shares.items() if one.is_comparable}
    is_pipeline = any(one.of("p2p") >= PIPELINE for one in compared.values())
    groups = [set(stage) & compared.keys() for stage in stages] if is_pipeline else [set(compared)]
    found = [
        slowness
        for group in groups
        if len(group) > 1
        and (slowness := _in_group({rank: compared[rank] for rank in sorted(group)}, nodes, last, known)) is not None
    ]
    if found:
        return max(found, key=lambda one: one.share)
    if is_pipeline or len(compared) < len(nodes):
        return None
    return _slow_network(compared, nodes) or _limited_alike(compared)


def is_pause(shares: Mapping[int, Shares]) -> bool:
    """Return whether no step was made in these seconds: all ranks but one only wait, and that one does not compute."""
    least, *others = sorted(one.of(WAIT) for one in shares.values()) or [0.0]
    is_alone = least <= 1 - PAUSE < min(others, default=0.0)
    return is_alone and not any(one.of(COMPUTE) for one in shares.values())


def _in_group(
    shares: Mapping[int, Shares], nodes: Mapping[int, str], last: Stragglers, known: Collection[int]
) -> Slowness | None:
    cuda = any(one.cuda for one in shares.values())
    # The main thread runs ahead of a GPU, so its waits tell nothing; the order of arrival does.
    rank = min(last.ranks, default=None) if cuda else min(shares, key=lambda each: shares[each].of(WAIT))
    if rank is None or rank not in shares:
        return None
    peers = [one for each, one in shares.items() if each != rank]
    if cuda:
        return _describe(last.ranks, last.share, shares, nodes, cuda=True)
    own = shares[rank].of(WAIT)
    others = statistics.median(one.of(WAIT) for one in peers)
    gap = others - own
    error = math.sqrt(sum(share * (1 - share) / shares[rank].looks for share in (own, others)))
    least = LEAST / 2 if rank in known else LEAST
    if gap < max(least, ERRORS * error):
        return None
    ranks = _whole_node(rank, gap, shares, nodes) or (rank,)
    if last.ranks and not set(last.ranks) & set(ranks):
        # Two witnesses that contradict each other: nobody is named.
        return None
    slowness = _describe(ranks, gap, shares, nodes, cuda=False)
    is_plain = slowness.phase in (COMPUTE, ALL) and (slowness.cause is None or slowness.cause["kind"] == MORE)
    return None if is_plain and gap < LEAST_FOR_COMPUTING and rank not in known else slowness


def _whole_node(
    rank: int, gap: float, shares: Mapping[int, Shares], nodes: Mapping[int, str]
) -> tuple[int, ...] | None:
    """Return all ranks of this rank's node if the others wait for all of them; None if it is the only one there."""
    own = [each for each, node in nodes.items() if node == nodes[rank]]
    others = [one.of(WAIT) for each, one in shares.items() if each not in own]
    if len(own) < 2 or not others or not shares.keys() >= set(own):
        return None
    highest = max(shares[each].of(WAIT) for each in own)
    is_alike = highest - shares[rank].of(WAIT) < gap / 2 <= statistics.median(others) - highest
    return tuple(sorted(own)) if is_alike else None


def _describe(
    ranks: tuple[int, ...], gap: float, shares: Mapping[int, Shares], nodes: Mapping[int, str], cuda: bool
) -> Slowness:
    own = [one for rank, one in shares.items() if rank in ranks]
    peers = [one for rank, one in shares.items() if rank not in ranks] or own

    def excess(phase: str) -> float:
        return _median(own, phase) - _median(peers, phase)

    phases = HOST if cuda else (*HOST, COMPUTE)
    phase = max(phases, key=excess)
    if excess(phase) < OF_PHASE * gap:
        phase = "gpu" if cuda else ALL
    cause = None if cuda else _cause(phase, gap, own, peers)
    has_place = phase in HOST or (phase == COMPUTE and (cause is None or cause["kind"] not in OF_HOST))
    place = _place(phase, own, peers, excess(phase)) if has_place else None
    return Slowness(ranks, nodes[ranks[0]], gap, phase, place, cause)


def _median(ranks: Iterable[Shares], phase: str) -> float:
    return statistics.median(one.of(phase) for one in ranks)


def _place(phase: str, own: Sequence[Shares], peers: Sequence[Shares], excess: float) -> SlowPlace | None:
    """Return the function in which these ranks spend more time than the others."""
    here = {place for one in own for place in one.places if place[0] in (COMPUTING if phase == COMPUTE else (phase,))}
    more = {
        place: statistics.median(one.places.get(place, 0.0) for one in own)
        - statistics.median(one.places.get(place, 0.0) for one in peers)
        for place in here
    }
    place = max(more, key=more.__getitem__, default=None)
    if place is None or more[place] < OF_PLACE * excess:
        return None
    line = next(one.lines[place] for one in own if place in one.lines)
    return {"file": place[1], "line": line, "function": place[2]}


def _cause(phase: str, gap: float, own: Sequence[Shares], peers: Sequence[Shares]) -> SlowCause | None:
    """Return why, as far as the node shows it: the first reason that explains enough."""

    def of(ranks: Sequence[Shares], name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in ranks))

    for kind, name in (("throttled", "throttled"), ("cpu_taken", "delay"), ("disk", "disk")):
        share = of(own, name) - of(peers, name)
        if share >= OF_CAUSE * gap:
            taken = next((one.taken for one in own if one.taken), None) if kind == "cpu_taken" else None
            return _because_of(kind, share, taken)
    faults = of(own, "faults_s")
    if faults >= SWAPS and faults >= SWAPS_TIMES * of(peers, "faults_s"):
        return _because_of("swapping", faults)
    if phase in HOST:
        spent, worked = _median(own, phase), statistics.median(one.worked(phase) for one in own)
        if worked < ASLEEP * spent:
            return _because_of("sleeps", spent - worked)
    if phase in (COMPUTE, "script"):
        more = statistics.median(one.worked(phase) for one in own) - statistics.median(
            one.worked(phase) for one in peers
        )
        if more >= OF_PHASE * gap:
            return _because_of(MORE, more)
    return None


def _because_of(kind: str, share: float, taken: TakenBy | None = None) -> SlowCause:
    by, pid = (taken["name"], taken["pid"]) if taken else (None, None)
    return {"kind": kind, "share": round(share, 2), "by": by, "pid": pid}


def _slow_network(shares: Mapping[int, Shares], nodes: Mapping[int, str]) -> Slowness | None:
    """Return the host whose network all ranks wait for; None where they do not, or nothing shows which one."""
    share = min((one.of(WAIT) for one in shares.values()), default=0.0)
    if share < COMMUNICATES or any(one.cuda for one in shares.values()):
        return None
    owners = {local: nodes[rank] for rank, one in shares.items() for local, _, _, _ in one.links}
    speeds: dict[tuple[str, str], float] = {}
    queued: dict[tuple[str, str], float] = {}
    for rank, one in shares.items():
        for _, remote, speed, waits in one.links:
            pair = nodes[rank], owners.get(remote, "")
            if pair[1] and speed:
                speeds[pair], queued[pair] = max(speed, speeds.get(pair, 0.0)), max(waits, queued.get(pair, 0.0))
    for node in sorted({*nodes.values()}):
        own = [pair for pair in speeds if node in pair]
        others = [speed for pair, speed in speeds.items() if node not in pair]
        if len(own) < FEWEST_LINKS or not others:
            continue
        fastest, usual = max(speeds[pair] for pair in own), statistics.median(others)
        if fastest < OF_SPEED * usual and min(queued[pair] for pair in own) >= QUEUED:
            return Slowness((), node, share, NETWORK, None, None, (fastest, usual))
    return None


def _limited_alike(shares: Mapping[int, Shares]) -> Slowness | None:
    """Return what every rank spends much of its time on, while all of them train."""
    if not shares or not all(one.of(COMPUTE) >= PAUSE for one in shares.values()):
        return None
    for phase, least in LIMITS.items():
        share = min(one.of(phase) for one in shares.values())
        if share >= least:
            own = list(shares.values())
            place = _place(phase, own, [dataclasses.replace(own[0], places={})], share)
            return Slowness((), None, share, phase, place, None)
    return None
