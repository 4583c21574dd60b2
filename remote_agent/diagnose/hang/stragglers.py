"""Stragglers: ranks that all others wait for again and again, though they never stop. Pure.

In: pulses of all ranks (remote_agent.engine.inspect.pulse), the nodes of the ranks. Out: ranks of one node.

Ranks that train together make the same number of steps, so their pace does not show which one is slow; the times at
which they reach a collective do. A call over NCCL is queued, by some ranks long before it can run: nobody waits for it
before the one before it is done, which a rank notices up to 0.1 s later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from remote_agent.diagnose.hang.pulses import Pulse

# The others wait this share of the time for a straggler. gloo computes on the processors that all else uses too: there,
# smaller shares only give reason to look closer.
SHARE, SHARE_OF_GPUS, SUSPICIOUS = 0.5, 0.2, 0.2
# An evaluation or a checkpoint does not make a rank slow: the longest waits are ignored, and others must be left.
IGNORED, FEWEST = 2, 4


class Stragglers(NamedTuple):
    """Ranks of one node, all or one of them, and the share of the time that the others wait for them."""

    ranks: tuple[int, ...] = ()
    share: float = 0.0
    is_certain: bool = False


NOBODY = Stragglers()


def find_stragglers(pulses: Mapping[int, Pulse], nodes: Mapping[int, str]) -> Stragglers:
    """Return the slow ranks according to the last collectives."""
    keys = {key for pulse in pulses.values() for key, group in pulse["groups"].items() if "came" in group}
    found = (_find(pulses, nodes, key) for key in sorted(keys))
    return next((one for one in found if one.ranks), NOBODY)


def _find(pulses: Mapping[int, Pulse], nodes: Mapping[int, str], key: str) -> Stragglers:
    """Return the slow ranks according to the collectives of one backend."""
    first, arrivals = _arrivals(pulses, key)
    if len(arrivals) < 2 or len(next(iter(arrivals.values()))) < FEWEST + IGNORED:
        return NOBODY
    errors_ns = [error_ns for pulse in pulses.values() if (error_ns := pulse["clock"][1]) is not None]
    if len(errors_ns) < len(pulses):
        # The times of a clock that has not been measured cannot be compared.
        return NOBODY
    by_node: dict[str, dict[int, list[int]]] = {}
    for rank, times in sorted(arrivals.items()):
        by_node.setdefault(nodes[rank], {})[rank] = times
    # The largest possible difference between the corrected clocks of two nodes.
    error_ns = 2 * max(errors_ns)
    waits: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    done = _done(pulses, key)
    for number, late, begin_ns, end_ns in _waits(by_node):
        begin_ns = max(begin_ns, done.get(first + number - 1, 0))
        if end_ns > begin_ns + error_ns:
            waits.setdefault(late, []).append((begin_ns + error_ns, end_ns))
    begin_ns, end_ns = min(times[0] for times in arrivals.values()), max(times[-1] for times in arrivals.values())
    shares = {late: _share(own, end_ns - begin_ns) for late, own in waits.items()}
    # If all ranks of a node are slow it is the node, whichever of them is last.
    certain = SHARE_OF_GPUS if done else SHARE
    for least in (certain, SUSPICIOUS):
        slow = max((late for late, share in shares.items() if share >= least), key=len, default=())
        if slow:
            return Stragglers(slow, shares[slow], least == certain)
    return NOBODY


def _done(pulses: Mapping[int, Pulse], key: str) -> dict[int, int]:
    """Return when the first rank found each collective done, in ns of the coordinator's clock; {} if none says so."""
    done: dict[int, int] = {}
    for pulse in pulses.values():
        came, ahead_ns = pulse["groups"][key]["came"], int(pulse["clock"][0])
        for number, us in enumerate(came.get("done_us") or (), came["first"]):
            if us is not None:
                at_ns = (came["t_us"] + us) * 1000 + ahead_ns
                done[number] = min(at_ns, done.get(number, at_ns))
    return done


def _arrivals(pulses: Mapping[int, Pulse], key: str) -> tuple[int, dict[int, list[int]]]:
    """Return the first collective that all ranks report, and by rank when it reached that and each later one.

    In ns of the coordinator's clock; empty if a rank reports none.
    """
    reports = {rank: came for rank, pulse in pulses.items() if (came := pulse["groups"].get(key, {}).get("came"))}
    if not reports or len(reports) < len(pulses):
        return 0, {}
    first = max(one["first"] for one in reports.values())
    end = min(one["first"] + len(one["later_us"]) for one in reports.values())
    return first, {
        rank: [
            (one["t_us"] + us) * 1000 + int(pulses[rank]["clock"][0])
            for us in one["later_us"][first - one["first"] : max(0, end - one["first"])]
        ]
        for rank, one in reports.items()
    }


def _waits(by_node: Mapping[str, Mapping[int, list[int]]]) -> Iterator[tuple[int, tuple[int, ...], int, int]]:
    """Yield for each collective: its number, the last ranks (a node's or one), when all others and the last arrived."""
    earliest = {node: list(map(min, zip(*ranks.values()))) for node, ranks in by_node.items()}
    latest = {node: list(map(max, zip(*ranks.values()))) for node, ranks in by_node.items()}
    for at in range(len(next(iter(latest.values())))):
        node = max(latest, key=lambda name: latest[name][at])
        others = [times[at] for name, times in latest.items() if name != node]
        ranks = by_node[node]
        if others:
            yield at, tuple(ranks), max(others), earliest[node][at]
        last = max(ranks, key=lambda rank: ranks[rank][at])
        others += [times[at] for rank, times in ranks.items() if rank != last]
        if others:
            yield at, (last,), max(others), ranks[last][at]


def _share(waits: list[tuple[int, int]], span_ns: int) -> float:
    """Return the share of this time in which ranks waited; the waits of one step may overlap."""
    merged: list[list[int]] = []
    for begin, end in sorted(waits):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    lengths = sorted(end - begin for begin, end in merged)
    if len(lengths) < FEWEST + IGNORED:
        return 0.0
    return sum(lengths[:-IGNORED]) / max(1, span_ns - sum(lengths[-IGNORED:]))
