"""What the console shows of each rank: torchrun's --redirects, --tee and --local-ranks-filter.

In: the options' text. Out: a Console, which says yes or no for each stream of each rank. Files get every byte anyway.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from supervisor.errors import UsageError

# torchrun's numbers, `Std` in torch/distributed/elastic/multiprocessing/api.py.
BITS = {"stdout": 1, "stderr": 2}
ALL = 3
_ENTRY = re.compile(r"(?P<rank>rank)?(?P<number>\d+):(?P<value>[0-3])")


@dataclass(frozen=True)
class Streams:
    """Streams by rank, as bits: 0 none, 1 stdout, 2 stderr, 3 both."""

    every: int = 0
    by_local_rank: Mapping[int, int] = field(default_factory=dict)
    by_rank: Mapping[int, int] = field(default_factory=dict)

    def of(self, rank: int, local_rank: int) -> int:
        """Return the bits of one rank; its own entry wins over that of its local rank."""
        return self.by_rank.get(rank, self.by_local_rank.get(local_rank, self.every))


def read_streams(text: str | None, option: str) -> Streams:
    """Return the meaning of `3`, `0:1,1:3` (local ranks) or `rank12:3` (ranks of the job); raises UsageError."""
    if text is None:
        return Streams()
    words = text.strip()
    if words in ("0", "1", "2", "3"):
        return Streams(int(words))
    by_local_rank: dict[int, int] = {}
    by_rank: dict[int, int] = {}
    for part in words.split(","):
        entry = _ENTRY.fullmatch(part.strip())
        if entry is None:
            raise UsageError(
                f"{option} {text!r}: {part.strip()!r} is not understood",
                f"write {option} 3, or {option} 0:1,1:3 by local rank, or {option} rank5:3 by rank"
                " (0 none, 1 stdout, 2 stderr, 3 both)",
            )
        (by_rank if entry["rank"] else by_local_rank)[int(entry["number"])] = int(entry["value"])
    return Streams(0, by_local_rank, by_rank)


def read_local_ranks(text: str | None) -> frozenset[int] | None:
    """Return the local ranks of `0,2`, None for all; raises UsageError."""
    if text is None or not text.strip():
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"--local-ranks-filter {text!r}: must be local ranks such as 0,1")
    return frozenset(int(part) for part in parts)


@dataclass(frozen=True)
class Console:
    """What torchrun would show: what is not redirected, and what is tee'd, of the local ranks that are asked for."""

    redirects: Streams = Streams()
    tee: Streams = Streams()
    local_ranks: frozenset[int] | None = None

    @property
    def shows_all(self) -> bool:
        """Whether nothing is left out."""
        return self.redirects == Streams() and self.local_ranks is None

    def shows(self, rank: int, local_rank: int, stream: str) -> bool:
        """Tell whether this stream of this rank belongs on the console."""
        if self.local_ranks is not None and local_rank not in self.local_ranks:
            return False
        bit = BITS.get(stream, ALL)
        return bool(~self.redirects.of(rank, local_rank) & bit) or bool(self.tee.of(rank, local_rank) & bit)
