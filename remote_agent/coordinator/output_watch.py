"""What heartbeats show of the ranks' output: whether they make progress, and what is worth a warning.

In: the ranks' part of heartbeats, node by node. Out: whether they progress, warnings by rank and kind.

Losses that differ between ranks are normal; losses that were equal for a long time and then differ mean that the ranks
have diverged.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from remote_agent.coordinator.state import HEARTBEAT_S
from remote_agent.text.names import name_ranks

# A difference counts once this many steps, with this many values, had the same loss on all ranks.
PROOF_STEPS, PROOF_VALUES = 50, 10
# The loss must differ on the same ranks in this many steps in a row.
APART_STEPS = 3
# At most this many steps are remembered that some ranks have not reported yet.
MAX_OPEN = 64
MAX_NAMED = 3
Warnings = dict[tuple[int, str], str]


def moved(before: Mapping[str, Any], ranks: Mapping[str, Any]) -> bool:
    """Return whether a node's ranks have progressed between two heartbeats: by their steps, or else by their output."""
    steps = [rank.get("step") for rank in ranks.values()]
    if any(step is not None for step in steps):
        return steps != [before.get(name, {}).get("step") for name in ranks]
    ages = [age for rank in ranks.values() if (age := rank.get("last_output_age_s")) is not None]
    return bool(ages) and min(ages) <= 2 * HEARTBEAT_S


class Losses:
    """The losses of the ranks of one generation after the other."""

    def __init__(self) -> None:
        self._begin(-1)

    def _begin(self, generation: int) -> None:
        self._generation = generation
        self._reporters: set[int] = set()
        self._open: dict[int, dict[int, str]] = {}
        """The loss that each rank has reported so far, by step."""
        self._same, self._values = 0, set[str]()
        """Steps with one loss on all ranks, and which losses."""
        self._apart: list[tuple[int, list[list[int]], dict[int, str]]] = []
        """The last steps in which ranks differed: the step, the ranks by loss, the loss of each rank."""

    def read(self, generation: int, ranks: Mapping[str, Any]) -> Warnings:
        """Take the reports of a node's ranks of this generation; return all warnings, including earlier ones."""
        if generation != self._generation:
            self._begin(generation)
        for rank, one in ranks.items():
            for step, loss in one.get("losses") or ():
                self._reporters.add(int(rank))
                self._open.setdefault(int(step), {})[int(rank)] = str(loss)
        warnings: Warnings = {
            (int(rank), "nan"): str(one["warning"]) for rank, one in ranks.items() if one.get("warning")
        }
        whole = [step for step, losses in self._open.items() if len(losses) == len(self._reporters) > 1]
        for step in whole:
            self._compare(step, self._open[step])
        # A rank that has not reported an earlier step by now never will.
        steps = list(self._open)
        done = steps.index(whole[-1]) + 1 if whole else 0
        for step in steps[: max(done, len(steps) - MAX_OPEN)]:
            del self._open[step]
        if len(self._apart) == APART_STEPS:
            step, groups, losses = self._apart[0]
            warnings[groups[1][0], "loss"] = _text(step, groups, losses)
        return warnings

    def _compare(self, step: int, losses: dict[int, str]) -> None:
        by_loss: dict[Decimal, list[int]] = {}
        for rank in sorted(losses):
            by_loss.setdefault(Decimal(losses[rank]), []).append(rank)
        if len(by_loss) == 1:
            self._apart = self._apart if len(self._apart) == APART_STEPS else []
            self._same += 1
            if len(self._values) < PROOF_VALUES:
                self._values.add(losses[min(losses)])
        elif self._same < PROOF_STEPS or len(self._values) < PROOF_VALUES:
            self._same, self._values = 0, set()
        elif max(by_loss) - min(by_loss) > max(map(_last_place, by_loss)) and len(self._apart) < APART_STEPS:
            groups = sorted(by_loss.values(), key=lambda ranks: (-len(ranks), ranks))
            if self._apart and _odd(self._apart[-1][1]) != _odd(groups):
                self._apart = []
            self._apart.append((step, groups, losses))


def _odd(groups: list[list[int]]) -> set[int]:
    """Return the ranks that are not in the largest group."""
    return {rank for ranks in groups[1:] for rank in ranks}


def _last_place(loss: Decimal) -> Decimal:
    """Return by how much rounding may have changed a loss."""
    return Decimal((0, (1,), int(loss.as_tuple().exponent)))


def _text(step: int, groups: list[list[int]], losses: Mapping[int, str]) -> str:
    """Return which ranks have which loss; the largest group comes last."""
    most, *odd = groups
    named = [f"{losses[ranks[0]]} on {name_ranks(ranks)}" for ranks in [*odd[: MAX_NAMED - 1], most]]
    more = f" (and {len(odd) - MAX_NAMED + 1} more)" if len(odd) >= MAX_NAMED else ""
    doubt = ", and no majority shows which is wrong" if len(odd[0]) == len(most) else ""
    return f"loss differs from about step {step} on: {', '.join(named)}{more}; it was the same on all before{doubt}"
