"""Warnings about losses that were equal on all ranks and then differ; losses that always differ are normal."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from remote_agent.coordinator.output_watch import MAX_OPEN, PROOF_STEPS, Losses

RANKS = range(4)
NODES = ((0, 1), (2, 3))


def tell(losses: Losses, step: int, said: dict[int, str], generation: int = 0) -> dict[tuple[int, str], str]:
    """Let each node tell what its ranks say at a step; returns what is warned of then."""
    found: dict[tuple[int, str], str] = {}
    for node in NODES:
        reported: dict[str, Any] = {str(rank): {"losses": [(step, said[rank])]} for rank in node if rank in said}
        found = losses.read(generation, reported)
    return found


def play(says: Callable[[int, int], str], steps: range) -> dict[tuple[int, str], str]:
    """Return what is warned of when rank and step say this."""
    losses, found = Losses(), {}
    for step in steps:
        found = tell(losses, step, {rank: says(rank, step) for rank in RANKS})
    return found


def falling(step: int) -> str:
    return f"{2 + 1 / (step + 1):.4f}"


@pytest.mark.parametrize(
    ("odd", "rank", "text"),
    [
        ({2: 0.5}, 2, ("loss differs from about step 300 on: 2.5033 on rank 2, 2.0033 on ranks 0-1,3; it was the same "
         "on all before")),
        ({1: 0.5, 2: 0.5}, 1, ("2.5033 on ranks 1-2, 2.0033 on ranks 0,3; it was the same on all before, and no "
         "majority shows which is wrong")),
        ({1: 0.1, 2: 0.2, 3: 0.3}, 1, "2.1033 on rank 1, 2.2033 on rank 2, 2.0033 on rank 0 (and 1 more)"),
    ],
)  # fmt: skip
def test_ranks_that_come_apart_are_named(odd: dict[int, float], rank: int, text: str) -> None:
    def says(each: int, step: int) -> str:
        return f"{float(falling(step)) + (odd.get(each, 0) if step >= 300 else 0):.4f}"

    found = play(says, range(0, 400, 10))
    assert found == {}
    found = play(says, range(0, 400, 2))
    assert list(found) == [(rank, "loss")]
    assert text in found[rank, "loss"]


DICE = random.Random(1)


@pytest.mark.parametrize(
    "says",
    [
        # Each rank's own batch; of the same loss when it begins, and rounded.
        lambda rank, step: f"{2 + DICE.gauss(0, 0.1):.4f}",
        lambda rank, step: f"{0.6931 if step < 300 else 0.6 + DICE.gauss(0, 0.1):.4f}",
        lambda rank, step: f"{2 + DICE.gauss(0, 0.005):.2f}",
        # One loss, which rounding shows in two ways; one rank that prints something else once.
        lambda rank, step: f"{float(falling(step)) + 0.0001 * (rank == 1 and step > 300):.4f}",
        lambda rank, step: "7.0" if (rank, step % 100) == (3, 99) else falling(step),
        # It differs from the start.
        lambda rank, step: f"{2 + rank + 1 / (step + 1):.4f}",
        lambda rank, step: "1e-3" if step % 2 else "2.5E+01",
    ],
    ids=["own", "own, at first alike", "own, rounded", "last digit", "once", "from the start", "one"],
)
def test_a_healthy_run_is_not_warned_of(says: Callable[[int, int], str]) -> None:
    assert play(says, range(3600)) == {}


def test_a_new_group_begins_anew_and_a_silent_one_costs_nothing() -> None:
    losses = Losses()
    for step in range(PROOF_STEPS + 10):
        tell(losses, step, dict.fromkeys(RANKS, falling(step)))
    for step in range(5):
        assert tell(losses, step, {**dict.fromkeys(RANKS, falling(step)), 3: "9.9"}, generation=1) == {}
    for step in range(3 * MAX_OPEN):
        tell(losses, step, dict.fromkeys(RANKS[:3], falling(step)), generation=1)
    assert len(losses._open) == MAX_OPEN


def test_a_loss_that_is_no_number_is_warned_of_by_its_rank() -> None:
    assert Losses().read(0, {"3": {"warning": "loss is nan"}, "4": {}}) == {(3, "nan"): "loss is nan"}
