"""The input of a verdict: what each rank left behind, and what is known about the job and its nodes.

In: the engine's exits, texts, error files. Out: RankEvidence, JobContext; nodes in words.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from remote_agent.diagnose.json_lines import shown_lines
from remote_agent.text.shapes import KEPT_TEXTS, lines_of

if TYPE_CHECKING:
    from remote_agent.wire.documents import ErrorDocument, MissingRanks, RankExit

_MAX_NODES_NAMED = 4


@dataclasses.dataclass(frozen=True)
class RankEvidence:
    """What one rank left behind. rank None: text that belongs to no rank (launcher, scheduler, kernel)."""

    rank: int | None
    node: str | None = None
    local_rank: int | None = None
    exit: RankExit | None = None
    """The engine's Exit, with t_ns corrected to the coordinator's clock. None: the rank is alive, or unknown."""
    error: ErrorDocument | None = None
    """What error.json says; the timestamp is of the node's own clock."""
    tail: str = ""
    """The last lines of stderr, or a whole log."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Paths by stream: stdout, stderr, nccl, error."""
    tail_line: int | None = None
    """Number of the tail's first line in its file, from 1; None: unknown."""
    places: Sequence[tuple[str | None, int | None]] = ()
    """File and line number of each line of a tail that comes from several files; otherwise empty."""
    nodes: Sequence[str | None] = ()
    """The node that wrote each line, for a tail of several nodes; otherwise empty."""
    clock_shift_ns: int = 0
    """The number to add to a timestamp of this node to get the time on the coordinator's clock."""
    time_of_line: Callable[[Sequence[str], int], tuple[int, int] | None] | None = None
    """Returns when a line was written and the uncertainty, in ns, for a process whose end nobody observed."""

    @property
    def raised_ns(self) -> int | None:
        """When its exception was recorded."""
        return None if self.error is None else self.error.get("timestamp_ns")

    @classmethod
    def from_exit(
        cls,
        exit: RankExit,  # noqa: A002  the engine's word
        node: str,
        files: Mapping[str, str] | None = None,
        clock_shift_ns: int = 0,
    ) -> RankEvidence:
        """Return the evidence in an engine's Exit, whose t_ns has been corrected by clock_shift_ns."""
        files = files or {}
        texts = _texts_of(str(exit.get("tail") or ""))
        lines = exit.get("stderr_lines")
        first = None if lines is None else max(1, int(lines) - len(texts) + 1)
        places: list[tuple[str | None, int | None]] = []
        nccl_lines = lines_of(str(exit.get("nccl") or ""))
        if nccl_lines or any(len(one) > 1 for one in texts):
            places += [(files.get("nccl"), None)] * len(nccl_lines)
            for index, one in enumerate(texts):
                places += [(files.get("stderr"), first and first + index)] * len(one)
        tail = "\n".join([*nccl_lines, *(line for one in texts for line in one)])
        return cls(
            rank=exit["rank"],
            node=node,
            local_rank=exit.get("local_rank"),
            exit=exit,
            error=exit.get("error"),
            tail=tail,
            files=files,
            tail_line=first,
            places=places,
            clock_shift_ns=clock_shift_ns,
        )

    def place(self, index: int) -> tuple[str | None, int | None]:
        """Return file and line number of a line of the tail; index counts from 0."""
        if self.places:
            return self.places[min(index, len(self.places) - 1)]
        return self.files.get("stderr"), None if self.tail_line is None else self.tail_line + index

    @property
    def stopped_by_us(self) -> bool:
        """True when the supervisor ended this rank."""
        return bool(self.exit and self.exit.get("stopped_by_us"))


@functools.lru_cache(KEPT_TEXTS)
def _texts_of(tail: str) -> tuple[Sequence[str], ...]:
    """Return what each line shows: itself, or the lines of a JSON record's text."""
    return tuple(shown_lines(line) or (line,) for line in lines_of(tail))


@dataclasses.dataclass(frozen=True)
class JobContext:
    """What is known besides the ranks. Times are ns of the coordinator's clock."""

    generation: int = 0
    incident_id: int = 1
    world_size: int | None = None
    ranks_per_node: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    lost_nodes: Mapping[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    """By name: the last sign of life (the time of detection would be too late to order by), and the reason."""
    now_ns: int | None = None
    hang: MissingRanks | None = None
    """The contract's `missing` object of the hang that this group was in when it ended."""
    seen: MissingRanks | None = None
    """The same of the last look at the live ranks, where it was not a hang yet: it counts if a rank times out."""
    clock_error_ms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By node: the possible error of its corrected timestamps."""
    unreachable_names: Sequence[str] = ()
    """Nodes whose host name resolves to a loopback address, where other nodes look for its workers."""
    host_notes: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """By node: lines of the kernel log, the memory cgroup's counters and free space, from around the failure."""

    def ranks_of(self, node: str) -> list[int]:
        """Return the ranks of a node, in order."""
        return sorted(self.ranks_per_node.get(node, ()))

    def node_of(self, rank: int) -> str | None:
        """Return the node of a rank, None where that is not known."""
        return self._nodes.get(rank)

    @functools.cached_property
    def _nodes(self) -> dict[int, str]:
        return {rank: name for name, ranks in self.ranks_per_node.items() for rank in ranks}

    def nodes_of(self, ranks: Iterable[int]) -> set[str]:
        """Return the nodes of these ranks, as far as they are known."""
        return {node for rank in ranks if (node := self.node_of(rank)) is not None}


def name_nodes(nodes: Sequence[str | None]) -> str:
    """Return the nodes in parentheses, behind a blank; nothing when none is known."""
    known = list(dict.fromkeys(node for node in nodes if node))
    if not known:
        return ""
    return f" ({', '.join(known)})" if len(known) <= _MAX_NODES_NAMED else f" ({len(known)} nodes)"
