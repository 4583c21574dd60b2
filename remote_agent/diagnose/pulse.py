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
# What stores and loggers send in a second to stay in touch; who asks a service again and again sends more.
BUSY_SENT_PER_S = 4096
# How often who waits wakes up to look at the time: in all, and in a second. Each collective wakes it at least once.
WAKES, WAKES_PER_S = 3, 0.2
Pulse = Mapping[str, Any]

STOPPED, DEAF, INERT = "stopped", "deaf", "inert"
# As a part of a rank that has ended with an exception, beside "a thread" and the like.
SCRIPT = "the script"


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
            # A clock that was set since then, or a machine that slept, makes it no older.
            age_s = min(group["age_s"], earlier["age_s"] + now["t"] - before["t"])
            calls = {key: group[key] for key in ("op", "sizes", "timeout_s", "backend")}
            found.append(Wait(name, group["seq"], age_s=age_s, **calls))
    if found:
        return max(found, key=lambda wait: wait.age_s)
    # A loop stands at the same place each time that it is looked at.
    if _gets_on(before, now) or _wakes(before, now):
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


def is_busy(before: Pulse, now: Pulse) -> bool:
    """Whether it is known to do something: it works, or its main thread is elsewhere."""
    return works(before, now) or bool(before["stack"] and now["stack"] and before["stack"] != now["stack"])


def works(before: Pulse, now: Pulse) -> bool:
    """Whether it does anything: computes, reads, writes, or comes to further collectives or steps."""
    return _computes(before, now) or _transfers(before, now) or _gets_on(before, now)


def steps(before: Pulse, now: Pulse) -> bool:
    """Whether it has printed a further step, or another loss where it prints no steps."""
    return bool(now["step"] != before["step"])


def may_receive(before: Pulse, now: Pulse) -> bool:
    """Whether much comes or goes over its connections, or nobody has looked yet."""
    is_known = before["stack"] or before["deaf"]
    return not is_known or _sent(before, now) > BUSY_BYTES_PER_S * (now["t"] - before["t"])


def _computes(before: Pulse, now: Pulse) -> bool:
    return bool(now["cpu_s"] - before["cpu_s"] > BUSY_SHARE * (now["t"] - before["t"]))


def _transfers(before: Pulse, now: Pulse) -> bool:
    seconds = now["t"] - before["t"]
    # D: the kernel reads or writes for it.
    if now["state"] == "D" or now["io"] - before["io"] > BUSY_BYTES_PER_S * seconds:
        return True
    return bool(_sent(before, now) > BUSY_SENT_PER_S * seconds)


def _sent(before: Pulse, now: Pulse) -> int:
    # A connection that was closed takes its count along.
    return 0 if now["net"] is None or before["net"] is None else abs(now["net"] - before["net"])


def _gets_on(before: Pulse, now: Pulse) -> bool:
    """Whether it has begun further collectives, or printed a further step."""
    earlier = {name: group["last"] for name, group in before["groups"].items()}
    # Who makes a new group begins to count anew.
    is_further = any(group["last"] != earlier.get(name) for name, group in now["groups"].items())
    return steps(before, now) or (bool(earlier) and is_further)


def _wakes(before: Pulse, now: Pulse) -> bool:
    """Whether its main thread goes to sleep more often than one that waits all the time."""
    if now["sleeps"] is None or before["sleeps"] is None:
        return False
    return bool(now["sleeps"] - before["sleeps"] > WAKES + WAKES_PER_S * (now["t"] - before["t"]))
