"""What one rank does between two looks at it: it waits, it works, it stands still. Pure.

In: two pulses of the rank, some seconds apart (remote_agent.engine_pulse). Out: its Wait, how it does nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# More of a processor than an idle interpreter with its threads, less than any work.
BUSY_SHARE = 0.03
# What timers and logs of an idle process may read and write in a second.
BUSY_BYTES_PER_S = 16_384
Pulse = Mapping[str, Any]

STOPPED, DEAF, INERT = "stopped", "deaf", "inert"


@dataclasses.dataclass(frozen=True)
class Wait:
    """What one rank waits for: the oldest collective of a group that is not done; group "": no collective yet."""

    group: str
    seq: int
    op: str
    sizes: str = ""
    age_s: float = 0.0
    timeout_s: float | None = None
    backend: str = ""


def lasting(before: Pulse, now: Pulse) -> Wait | None:
    """Return what a rank has waited for in both pulses: of several collectives the one that has lasted longest."""
    found = []
    for name, group in now["groups"].items():
        earlier = before["groups"].get(name, {})
        if "seq" in group and earlier.get("seq") == group["seq"]:
            times = {key: group[key] for key in ("age_s", "timeout_s", "backend")}
            found.append(Wait(name, group["seq"], group["op"], group["sizes"], **times))
    if found:
        return max(found, key=lambda wait: wait.age_s)
    # A loop stands at the same place each time that it is looked at.
    if _gets_on(before, now):
        return None
    if now["stack"] and now["inside"] and now["inside"] == before["inside"] and now["stack"] == before["stack"]:
        return Wait("", 0, now["inside"], age_s=now["t"] - before["t"])
    return None


def idleness(before: Pulse, now: Pulse) -> str | None:
    """Return how a rank does nothing; None when it does something, or nobody knows."""
    if is_stopped(before, now):
        return STOPPED
    if _transfers(before, now):
        return None
    if now["deaf"] and before["deaf"]:
        return DEAF
    same = bool(now["stack"]) and now["stack"] == before["stack"]
    return INERT if same and not works(before, now) else None


def is_stopped(before: Pulse, now: Pulse) -> bool:
    """Whether it stands still; a limit on its processor time may stop it again and again, and it gets on."""
    return bool(now["state"] == before["state"] == "T") and not _computes(before, now)


def _transfers(before: Pulse, now: Pulse) -> bool:
    busy = BUSY_BYTES_PER_S * (now["t"] - before["t"])
    # A connection that was closed takes its count along.
    sent = 0 if now["net"] is None or before["net"] is None else abs(now["net"] - before["net"])
    # D: the kernel reads or writes for it.
    return bool(now["state"] == "D" or now["io"] - before["io"] > busy or sent > busy)


def _computes(before: Pulse, now: Pulse) -> bool:
    return bool(now["cpu_s"] - before["cpu_s"] > BUSY_SHARE * (now["t"] - before["t"]))


def works(before: Pulse, now: Pulse) -> bool:
    """Whether it does anything: computes, reads, writes, or comes to further collectives."""
    return _computes(before, now) or _transfers(before, now) or _gets_on(before, now)


def _gets_on(before: Pulse, now: Pulse) -> bool:
    """Whether it has begun further collectives."""
    groups = before["groups"]
    return any(name in groups and group["last"] > groups[name]["last"] for name, group in now["groups"].items())
