"""Who makes all others wait, again and again, without ever standing still. Pure.

In: pulses of all ranks (remote_agent.engine_pulse), the nodes of the ranks. Out: a Straggler, or None.

Ranks that train together make the same number of steps, so their pace does not tell who is slow; when each came to a
collective does. Only gloo's are told: NCCL's are queued long before they run, by some ranks earlier than by others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from remote_agent.diagnose.model import name_ranks

if TYPE_CHECKING:
    from remote_agent.diagnose.pulse import Pulse

# Of the time, that the others wait for it.
SHARE = 0.5
# An evaluation or a checkpoint on one rank is no habit: so many waits do not count, the longest ones, and so many
# others there must be.
ASIDE, FEWEST = 2, 4


@dataclasses.dataclass(frozen=True)
class Straggler:
    """Ranks of one node that the others wait for."""

    node: str
    rank: int | None
    """None: all ranks of the node."""
    ranks: tuple[int, ...]
    newest: int
    """The number of the last collective that was looked at."""
    text: str


def find_straggler(pulses: Mapping[int, Pulse], nodes: Mapping[int, str]) -> Straggler | None:
    """Return who is slow, the ranks of a node or one of them, as far as the last collectives tell."""
    first, came = _arrivals(pulses)
    if len(came) < 2 or len(next(iter(came.values()))) < FEWEST + ASIDE:
        return None
    errors_ns = [pulse["clock"][1] for pulse in pulses.values()]
    if None in errors_ns:
        # What a clock that nobody has measured yet tells is no order.
        return None
    homes: dict[str, dict[int, list[int]]] = {}
    for rank, times in sorted(came.items()):
        homes.setdefault(nodes[rank], {})[rank] = times
    # So far two nodes' clocks may be from what is known of them.
    error_ns = 2 * max(errors_ns)
    waits: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for late, begin_ns, end_ns in _waits(homes):
        if end_ns > begin_ns + error_ns:
            waits.setdefault(late, []).append((begin_ns + error_ns, end_ns))
    begun_ns, ended_ns = min(times[0] for times in came.values()), max(times[-1] for times in came.values())
    shares = {late: _share(own, ended_ns - begun_ns) for late, own in waits.items()}
    # Where all of a node's are slow it is the node, whichever of them comes last.
    slow = max((late for late, share in shares.items() if share >= SHARE), key=len, default=None)
    if slow is None:
        return None
    node, share, count = nodes[slow[0]], shares[slow], len(came[slow[0]])
    is_whole = len(slow) == len(homes[node])
    text = (
        f"slow: the others wait for {f'its {name_ranks(slow)}' if is_whole else 'it'} for {share:.0%} of the time, "
        f"{count} collectives in {(ended_ns - begun_ns) / 1e9:.0f} s"
    )
    return Straggler(node, None if is_whole else slow[0], slow, first + count - 1, text)


def _arrivals(pulses: Mapping[int, Pulse]) -> tuple[int, dict[int, list[int]]]:
    """Return the first of the collectives that all ranks tell of, and when each came to it and the ones after.

    In ns of the coordinator's clock; empty where one does not tell.
    """
    told = {rank: pulse["groups"].get("0", {}).get("came") for rank, pulse in pulses.items()}
    if not told or not all(told.values()):
        return 0, {}
    first = max(one["first"] for one in told.values())
    end = min(one["first"] + len(one["later_us"]) for one in told.values())
    return first, {
        rank: [
            (one["t_us"] + us) * 1000 + int(pulses[rank]["clock"][0])
            for us in one["later_us"][first - one["first"] : max(0, end - one["first"])]
        ]
        for rank, one in told.items()
    }


def _waits(homes: Mapping[str, Mapping[int, list[int]]]) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield for each collective who came last, all ranks of a node or one, when all others were there, and it was."""
    earliest = {node: list(map(min, zip(*ranks.values()))) for node, ranks in homes.items()}
    latest = {node: list(map(max, zip(*ranks.values()))) for node, ranks in homes.items()}
    for at in range(len(next(iter(latest.values())))):
        node = max(latest, key=lambda name: latest[name][at])
        others = [times[at] for name, times in latest.items() if name != node]
        ranks = homes[node]
        if others:
            yield tuple(ranks), max(others), earliest[node][at]
        last = max(ranks, key=lambda rank: ranks[rank][at])
        others += [times[at] for rank, times in ranks.items() if rank != last]
        if others:
            yield (last,), max(others), ranks[last][at]


def _share(waits: list[tuple[int, int]], span_ns: int) -> float:
    """Return for how much of this time somebody waited; a step's collectives may be waited for at once."""
    merged: list[list[int]] = []
    for begin, end in sorted(waits):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    lengths = sorted(end - begin for begin, end in merged)
    if len(lengths) < FEWEST + ASIDE:
        return 0.0
    return sum(lengths[:-ASIDE]) / max(1, span_ns - sum(lengths[-ASIDE:]))
