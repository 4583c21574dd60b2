"""What the time of ranks goes to, and for whom the others wait, as text. Pure.

In: windows of the ranks, as the nodes return them. Out: lines; the document of `why --json`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from remote_agent.diagnose import slow
from remote_agent.diagnose.incidents import iso_time
from remote_agent.diagnose.slow import COMPUTE, COMPUTING, WAIT, Shares
from remote_agent.text.names import count, name_ranks
from remote_agent.wire.documents import WINDOW_S
from supervisor.wording.values import one_line

if TYPE_CHECKING:
    from remote_agent.wire.answers import JobWindows
    from remote_agent.wire.documents import SlowStatus

# What a phase is called where time is split, in this order.
PHASES: Mapping[str, str] = {
    COMPUTE: "forward, backward, optimizer",
    "input": "loading data",
    "script": "the script's own code",
    "checkpoint": "saving checkpoints",
    "eval": "evaluating",
    "logging": "logging",
    "compile": "compiling",
    "start": "importing",
    "p2p": "sending to and receiving from ranks",
    WAIT: "waiting for other ranks",
}
# Smaller shares are not listed; of each phase the first places are.
LEAST, MAX_PLACES = 0.01, 3
WIDTH = 30


def slow_line(status: SlowStatus, *, short: bool = False) -> str:
    """Return for whom the others wait, or what limits all ranks, as a line; `short`: of the wait, only its share."""
    ranks, node, message = status["ranks"], one_line(status["node"] or ""), one_line(status["message"])
    who = f"rank {ranks[0]} ({node})" if len(ranks) == 1 else node
    if ranks and short:
        return f"slow: {who} {status['share']:.0%}: {message.partition(': ')[2]}"
    return f"slow: {who}: {message}" if who else f"slow: {message}"


class Times:
    """What the time of a job's ranks went to."""

    def __init__(self, sampled: JobWindows) -> None:
        self._nodes = {int(rank): node for rank, node in sampled["nodes"].items()}
        self._off = {int(rank): reason for rank, reason in sampled["unreachable"].items()}
        # Only windows that all have are compared.
        owned = [set(windows) for windows in sampled["windows"].values()]
        numbers = sorted(set.intersection(*owned) if owned else ())
        each = {
            int(rank): [one for number in numbers if (one := slow.shares_of(windows[number], WINDOW_S)) is not None]
            for rank, windows in sampled["windows"].items()
        }
        self.shares = {rank: slow.mean(shares) for rank, shares in sorted(each.items()) if shares}
        self._seconds = len(numbers) * WINDOW_S
        self._since = iso_time(int(min(map(int, numbers)) * WINDOW_S * 1e9)) if numbers else ""
        nodes = {rank: node for rank, node in self._nodes.items() if rank in self.shares}
        self._slow = slow.find_slowness(self.shares, nodes)

    def lines(self, ranks: Sequence[int] | None) -> list[str]:
        """Return it as text: of one rank beside its peers, of several, or of all."""
        missing = [] if ranks is None else [rank for rank in ranks if rank not in self.shares]
        lines = [f"rank {rank}: {self._off.get(rank, 'it does not live')}" for rank in missing]
        if ranks is None:
            lines = [f"rank {rank}: {one_line(reason)}" for rank, reason in sorted(self._off.items())]
        if not self.shares:
            return lines or ["no rank could be sampled"]
        found = self._slow
        line = slow_line(found.to_json(self._since)) if found is not None else "no rank waits much less than the others"
        shown = [rank for rank in self.shares if ranks is None or rank in ranks]
        if ranks is None and found is not None and found.ranks:
            shown = list(found.ranks)
        if not shown:
            return lines
        peers = [self.shares[rank] for rank in self.shares if rank not in shown]
        head = f"{count(len(self.shares), 'rank')}, {self._seconds:.0f} s"
        return [line, "", *self._table(head, shown, peers), *lines]

    def _table(self, head: str, ranks: Sequence[int], peers: Sequence[Shares]) -> list[str]:
        own = [self.shares[rank] for rank in ranks]
        names = name_ranks(ranks) if peers else "all ranks"
        titles = f"{names:>12}" + (f"{'the others':>13}" if peers else "")
        lines = [f"{head:<{WIDTH}}{titles}"]
        rows = sorted(PHASES, key=lambda phase: -_median(own, phase))
        for phase in rows:
            shares = [_median(group, phase) for group in (own, peers) if group]
            if max(shares) < LEAST:
                continue
            columns = "".join(f"{share:>{12 + at}.0%}" for at, share in enumerate(shares))
            lines.append(f"  {PHASES[phase]:<{WIDTH - 2}}{columns}   {_places(own, phase)}".rstrip())
        return lines

    def to_json(self, ranks: Sequence[int] | None) -> dict[str, object]:
        """Return it as `why --json` prints it."""
        return {
            "seconds": self._seconds,
            "slow": [self._slow.to_json(self._since)] if self._slow is not None else [],
            "ranks": {
                str(rank): {
                    "node": self._nodes[rank],
                    "shares": {phase: round(share, 3) for phase, share in shares.phases.items()},
                    "places": [
                        {"phase": place[0], "file": place[1], "function": place[2], "line": shares.lines[place],
                         "share": round(share, 3)}
                        for place, share in sorted(shares.places.items(), key=lambda item: -item[1])
                    ],
                }
                for rank, shares in self.shares.items()
                if ranks is None or rank in ranks
            },
            "off": {str(rank): reason for rank, reason in self._off.items() if ranks is None or rank in ranks},
        }  # fmt: skip


def _median(ranks: Sequence[Shares], phase: str) -> float:
    return statistics.median(shares.of(phase) for shares in ranks)


def _places(ranks: Sequence[Shares], phase: str) -> str:
    """Return the places at which these ranks spend most of a phase."""
    phases = COMPUTING if phase == COMPUTE else (phase,)
    shares: dict[tuple[str, str], float] = {}
    lines: dict[tuple[str, str], int] = {}
    for one in ranks:
        for place, share in one.places.items():
            if place[0] in phases:
                shares[place[1:]] = shares.get(place[1:], 0.0) + share / len(ranks)
                lines.setdefault(place[1:], one.lines[place])
    most = sorted((place for place in shares if shares[place] >= LEAST), key=lambda place: -shares[place])[:MAX_PLACES]
    return ", ".join(f"{one_line(file)}:{lines[file, function]} in {one_line(function)}" for file, function in most)
