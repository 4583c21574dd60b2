"""Connections that nobody answers: which of two nodes drops them, as far as the others' connections tell. Pure.

In: two pulses of each rank, some seconds apart; the ranks' nodes. Out: Dials, and who is to blame for them.

The kernel repeats an unanswered SYN for minutes, and the caller sees only that it waits. A far end that a third node
has reached lets nobody down.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from remote_agent.diagnose.model import Context, Evidence

# In a sentence.
MAX_ENDS = 3


@dataclasses.dataclass(frozen=True)
class Dials:
    """Who dials in vain, and what is known of the others' connections."""

    silent: Mapping[int, Sequence[str]]
    """By rank: far ends that have not answered in both pulses."""
    reached: Mapping[int, Sequence[str]]
    """By rank: far ends that it is connected to."""
    addresses: Mapping[int, Sequence[str]]
    """By the rank that tells them: its node's own addresses."""

    @property
    def is_lost(self) -> bool:
        """Whether no node has any of the addresses that are dialled."""
        return not any(self._ranks_at(end) for ends in self.silent.values() for end in ends)

    def _ranks_at(self, end: str) -> list[int]:
        """Return a rank of each node that has this address; of docker0's all have the same."""
        return [rank for rank, own in self.addresses.items() if _host(end) in own]

    def _owner(self, end: str, context: Context) -> str | None:
        ranks = self._ranks_at(end)
        return context.node_of(ranks[0]) if len(ranks) == 1 else None

    def blamed(self, context: Context) -> list[str]:
        """Return the nodes of which one drops the connections, in order; one: it is that one."""
        sides = []
        for rank, end in ((rank, end) for rank, ends in self.silent.items() for end in ends):
            here, there = context.node_of(rank), self._owner(end, context)
            third = {context.node_of(other) for other, ends in self.reached.items() if end in ends} - {here, there}
            sides.append({here} if third else {here, there})
        nodes = set.intersection(*sides) - {None} or set.union(*sides)
        return sorted(node for node in nodes if node)

    def text(self, context: Context, since: str) -> str:
        """Return the far ends with their nodes, and why they do not answer; `since`: for how long, and who waits."""
        ends = list(dict.fromkeys(end for rank in sorted(self.silent) for end in self.silent[rank]))
        named = [f"{end} ({owner})" if (owner := self._owner(end, context)) else end for end in ends[:MAX_ENDS]]
        more = f" and {len(ends) - MAX_ENDS} more" if len(ends) > MAX_ENDS else ""
        nodes = self.blamed(context)
        either = "" if len(nodes) == 1 else ", or between them,"
        drops = f"a firewall or a route of {' or '.join(nodes)}{either} drops what is sent"
        why = "no node of the job is there" if self.is_lost else drops
        return f"no answer from {', '.join(named)}{more} {since}: {why}"

    def evidence(self, context: Context) -> Iterator[Evidence]:
        """Yield a line for each rank that dials in vain."""
        for rank, ends in sorted(self.silent.items()):
            said = f"the kernel has sent SYN and got no answer: {', '.join(ends[:MAX_ENDS])}"
            yield Evidence(context.node_of(rank), rank, None, None, said)


def find_dials(
    before: Mapping[int, Mapping[str, Any]], now: Mapping[int, Mapping[str, Any]], waiting: Collection[int]
) -> Dials | None:
    """Return what these ranks have dialled in vain in both pulses; None: nothing of the job's.

    A far end outside the job counts where others have found its port inside: it is the store, looked for elsewhere.
    """
    addresses = {rank: one["addresses"] for rank, one in now.items()}
    reached = {rank: one["reached"] for rank, one in now.items()}
    own = {address for told in addresses.values() for address in told}
    ports = {_port(end) for ends in reached.values() for end in ends if _host(end) in own}
    silent = {}
    for rank in sorted(waiting):
        lasting = [end for end in now[rank]["unanswered"] if end in before[rank]["unanswered"]]
        ends = [end for end in lasting if _host(end) in own or _port(end) in ports]
        if ends:
            silent[rank] = ends
    return Dials(silent, reached, addresses) if silent else None


def _host(end: str) -> str:
    return end.rpartition(":")[0].strip("[]")


def _port(end: str) -> str:
    return end.rpartition(":")[2]
