"""Loops: ranks that compute in one function of the script while others wait for them. Pure.

In: two pulses of each rank (remote_agent.engine.inspect.pulse), the loops of the rounds before. Out: a Loop by rank.

Whether a long computation ever ends cannot be seen from outside: a loop is shown with its place and its duration, and
is no hang.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from remote_agent.diagnose.hang.pulses import Pulse, Wait, only_computes
from remote_agent.diagnose.hang.stalls import awaited, call_text
from remote_agent.diagnose.incidents import missing_ranks
from remote_agent.text.names import name_ranks

if TYPE_CHECKING:
    from remote_agent.wire.documents import MissingRanks


@dataclasses.dataclass(frozen=True)
class LoopFrame:
    """A function of the script; several lines: it was seen at these and maybe at those between."""

    file: str
    first: int
    last: int
    name: str

    def __str__(self) -> str:
        lines = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"{self.file}:{lines} in {self.name}"


@dataclasses.dataclass(frozen=True)
class Loop:
    """A rank that others wait for, and that has computed all the time."""

    frames: tuple[LoopFrame, ...]
    """What all its stacks have in common, the outermost function first."""
    seconds: float
    """The time for which it has been observed."""
    waits: Mapping[int, Wait]
    """What other ranks wait for until it arrives."""

    @property
    def place(self) -> str:
        """The innermost function that it did not leave."""
        return str(self.frames[-1])

    @property
    def text(self) -> str:
        """What the rank does, and which ranks wait for it."""
        wait = max(self.waits.values(), key=lambda wait: wait.age_s)
        who = name_ranks(sorted(self.waits))
        return f"busy for {self.seconds:.0f} s at {self.place}; {who} waiting in {call_text(wait)}"


def find_loops(
    before: Mapping[int, Pulse], now: Mapping[int, Pulse], exited: frozenset[int], known: Mapping[int, Loop]
) -> dict[int, Loop]:
    """Return the loops of a round; `known`: those of the round before, of which all stacks must agree."""
    loops = {}
    for rank, waits in awaited(before, now, exited).items():
        if rank not in before or rank not in now or not only_computes(before[rank], now[rank]):
            continue
        loop = known.get(rank)
        earlier = _frames(before[rank]["script"]) if loop is None else loop.frames
        frames = _common(earlier, _frames(now[rank]["script"]))
        if frames:
            seconds = now[rank]["t"] - before[rank]["t"] + (0.0 if loop is None else loop.seconds)
            loops[rank] = Loop(frames, seconds, waits)
    return loops


def missing_in(loops: Mapping[int, Loop]) -> MissingRanks | None:
    """Return the contract's `missing` object of ranks that loop; None without any."""
    if not loops:
        return None
    waits = loops[min(loops)].waits
    first = max(waits.values(), key=lambda wait: wait.age_s)
    places = [(rank, f"{loop.place}, busy for {loop.seconds:.0f} s") for rank, loop in sorted(loops.items())]
    return missing_ranks(first.op, first.seq if first.group else None, waits, loops, places)


def _frames(script: Sequence[tuple[str, int, str]]) -> tuple[LoopFrame, ...]:
    return tuple(LoopFrame(file, line, line, name) for file, line, name in script)


def _common(known: Sequence[LoopFrame], stack: Sequence[LoopFrame]) -> tuple[LoopFrame, ...]:
    """Return the functions in which two stacks agree, down to the one in which the line differs."""
    common = []
    for ours, theirs in zip(known, stack):
        if (ours.file, ours.name) != (theirs.file, theirs.name):
            break
        first, last = min(ours.first, theirs.first), max(ours.last, theirs.last)
        common.append(LoopFrame(ours.file, first, last, ours.name))
        if first != last:
            break
    return tuple(common)
