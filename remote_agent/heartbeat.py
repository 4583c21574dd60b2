"""What a node tells the coordinator once a second.

In: the node's logs, vitals and clock. Out: the facts of a heartbeat; the ranks' steps beside their pulses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from remote_agent import clocks

if TYPE_CHECKING:
    from remote_agent.follower import Follower


def facts(follower: Follower) -> dict[str, Any]:
    """Return what a heartbeat carries; of each rank: step, last_output_age_s, warning, progress, vitals."""
    vitals, of_ranks = follower.agent.vitals.told(follower.workers())
    return {
        "generation": follower.generation,
        "ranks": _ranks(follower, of_ranks) if follower.generation >= 0 else {},
        "agent_pid": os.getpid(),
        **follower.offset.told(),
        "heard_age": clocks.now() - follower.member.contact,
        "vitals": vitals,
    }


def beat(follower: Follower) -> dict[str, Any]:
    """Return a heartbeat: the facts, and of each rank the losses of some steps since the one before."""
    found = facts(follower)
    for rank, losses in follower.agent.logs.take_losses(follower.generation).items():
        found["ranks"][str(rank)]["losses"] = losses
    return found


def with_steps(follower: Follower, pulses: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return these pulses, each with `step`: the step and the loss that its rank has printed last."""
    seen = follower.agent.logs.progress(follower.generation)
    told = {str(rank): [one["step"], one["loss"]] for rank, one in seen.items()}
    return {rank: {**pulse, "step": told.get(rank)} for rank, pulse in pulses.items()}


def _ranks(follower: Follower, vitals: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    now_ns = time.time_ns()
    ranks: dict[str, dict[str, Any]] = {}
    for rank, seen in follower.agent.logs.progress(follower.generation).items():
        last = seen["last_output_ns"]
        ranks[str(rank)] = {
            "step": seen["step"],
            "last_output_age_s": None if last is None else round((now_ns - last) / 1e9, 2),
            "warning": seen["warning"],
            "progress": {name: seen[name] for name in ("loss", "rate", "unit", "steps_s", "saved")},
            "vitals": vitals.get(rank),
        }
    return ranks
