"""Stragglers: ranks that all others wait for again and again, though they never stop. Pure.

In: pulses of all ranks (remote_agent.engine.inspect.pulse), the nodes of the ranks. Out: a Straggler, or None.

Ranks that train together make the same number of steps, so their pace does not show which one is slow; the times at
which they reach a collective do. Only gloo's count: NCCL's are queued long before they run, by some ranks earlier than
by others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from remote_agent.text.names import name_ranks

if TYPE_CHECKING:
    from remote_agent.diagnose.hang.pulses import Pulse

# Share of the time that the others wait for a straggler.
SHARE = 0.5
# An evaluation or a checkpoint does not make a rank slow: the longest waits are ignored, and others must be left.
IGNORED, FEWEST = 2, 4


@dataclasses.dataclass(frozen=True)
class Straggler:
    """Ranks of one node that the others wait for."""

    node: str
    rank: int | None
    """None: all ranks of the node."""
    ranks: tuple[int, ...]
    newest: int
    """The number of the last collective that was compared."""
    text: str


def find_straggler(pulses: Mapping[int, Pulse], nodes: Mapping[int, str]) -> Straggler | None:
    """Return the slow ranks, a whole node or one of its ranks, according to the last collectives."""
    first, arrivals = _arrivals(pulses)
    if len(arrivals) < 2 or len(next(iter(arrivals.values()))) < FEWEST + IGNORED:
        return None
    errors_ns = [pulse["clock"][1] for pulse in pulses.values()]
    if None in errors_ns:
        # The times of a clock that has not been measured cannot be compared.
        return None
    by_node: dict[str, dict[int, list[int]]] = {}
    for rank, times in sorted(arrivals.items()):
        by_node.setdefault(nodes[rank], {})[rank] = times
    # The largest possible difference between the corrected clocks of two nodes.
    error_ns = 2 * max(errors_ns)
    waits: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for late, begin_ns, end_ns in _waits(by_node):
        if end_ns > begin_ns + error_ns:
            waits.setdefault(late, []).append((begin_ns + error_ns, end_ns))
    begin_ns, end_ns = min(times[0] for times in arrivals.values()), max(times[-1] for times in arrivals.values())
    shares = {late: _share(own, end_ns - begin_ns) for late, own in waits.items()}
    # If all ranks of a node are slow it is the node, whichever of them is last.
    slow = max((late for late, share in shares.items() if share >= SHARE), key=len, default=None)
    if slow is None:
        return None
    node, share, count = nodes[slow[0]], shares[slow], len(arrivals[slow[0]])
    is_whole = len(slow) == len(by_node[node])
    text = (
        f"slow: the other ranks wait for {f'its {name_ranks(slow)}' if is_whole else 'it'} {share:.0%} of the time "
        f"({count} collectives in {(end_ns - begin_ns) / 1e9:.0f} s)"
    )
    return Straggler(node, None if is_whole else slow[0], slow, first + count - 1, text)


def _arrivals(pulses: Mapping[int, Pulse]) -> tuple[int, dict[int, list[int]]]:
    """Return the first collective that all ranks report, and by rank when it reached that and each later one.

    In ns of the coordinator's clock; empty if a rank reports none.
    """
    reports = {rank: pulse["groups"].get("0", {}).get("came") for rank, pulse in pulses.items()}
    if not reports or not all(reports.values()):
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


def _waits(by_node: Mapping[str, Mapping[int, list[int]]]) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield for each collective the last ranks, a node's or one, and when the other ranks and the last had arrived."""
    earliest = {node: list(map(min, zip(*ranks.values()))) for node, ranks in by_node.items()}
    latest = {node: list(map(max, zip(*ranks.values()))) for node, ranks in by_node.items()}
    for at in range(len(next(iter(latest.values())))):
        node = max(latest, key=lambda name: latest[name][at])
        others = [times[at] for name, times in latest.items() if name != node]
        ranks = by_node[node]
        if others:
            yield tuple(ranks), max(others), earliest[node][at]
        last = max(ranks, key=lambda rank: ranks[rank][at])
        others += [times[at] for rank, times in ranks.items() if rank != last]
        if others:
            yield (last,), max(others), ranks[last][at]


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
