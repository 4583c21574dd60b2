"""What one rank does between two pulses: it waits, works or is idle. Pure.

In: two pulses of the rank, some seconds apart (remote_agent.engine.inspect.pulse). Out: its Wait, how it is idle;
`read_pulses`, the gate for the pulses of a node. The annotations are evaluated (see wire/gate.py).
"""

import dataclasses
from typing import Annotated, Any, Optional, TypedDict

from remote_agent.wire.documents import Figure, SourceExcerpt, by_rank
from remote_agent.wire.gate import reader, row

# An idle interpreter with its threads uses a smaller share of a processor than this, any work a larger one.
BUSY_SHARE = 0.03
# Timers and logs of an idle process read and write at most this much per second.
BUSY_BYTES_PER_S = 16_384
# Stores and loggers send at most this much per second as keepalives; a process that polls a service sends more.
BUSY_SENT_PER_S = 4096
# A waiting thread wakes up at most this often to check the time. Each collective wakes it at least once.
WAKES, WAKES_PER_S = 3, 0.2

STOPPED, UNRESPONSIVE, IDLE = "stopped", "unresponsive", "idle"
# The part of a failure is this if an exception ended the script; tracebacks name "a thread" and the like.
SCRIPT = "the script"


# Here DDP communicates; if nothing is recorded, a rank that computes nothing here waits for others.
BACKWARD = "backward"


ProcessPulse = TypedDict("ProcessPulse", {"state": str, "cpu_s": float, "io": int, "sleeps": Optional[int]})
StackPulse = TypedDict(
    "StackPulse",
    {"stack": str, "where": str, "calls": str, "script": list[tuple[str, int, str]], "parked": bool, "over": bool,
     "inside": Optional[str], "frame": Optional[tuple[str, int]]},
)  # fmt: skip
ReachedCollectives = TypedDict(
    "ReachedCollectives",
    {"first": int, "t_us": int, "later_us": list[int], "done_us": list[Optional[int]]},
    total=False,
)
"""Number and time of a collective, the times since then of it and of all later ones, and when each was found done.

done_us: None where it is not done yet; absent where the backend does not say (gloo).
"""
# The values of a flight.Call.
_CALL = row(int, str, str, int, str, bool, bool, str, int)
GroupPulse = TypedDict(
    "GroupPulse",
    {"ranks": Optional[list[int]], "last": int, "calls": list[Annotated[list[Any], _CALL]],
     "came": Annotated[ReachedCollectives, reader(ReachedCollectives, "first", "t_us", "later_us")],
     "seq": int, "op": str, "sizes": str, "age_s": float, "timeout_s": Optional[float], "backend": str},
    total=False,
)  # fmt: skip
"""What a rank has recorded of a process group over one backend.

ranks: the group's members, None where the record does not have them; last: number of the newest collective; calls: the
newest ones, as `flight.from_rows` reads them; came: when this rank called the newest ones of the group of all ranks.
seq, op, sizes, age_s, timeout_s, backend: of the oldest one that is not done; age_s is 0 where the record has no time.
"""
_read_open = reader(GroupPulse, "ranks", "last", "seq", "op", "sizes", "age_s", "timeout_s", "backend")
_read_done = reader(GroupPulse, "ranks", "last")


def _group(value: object) -> GroupPulse:
    """Return what a rank has recorded of a group; the oldest open collective is described as a whole, or not at all."""
    return (_read_open if isinstance(value, dict) and "seq" in value else _read_done)(value)


EndedPart = TypedDict(
    "EndedPart",
    {"part": str, "type": str, "headline": str, "place": str, "traceback": str, "line": Optional[int], "age_s": float},
)
"""The exception that ended a part of a rank; line: its number in stderr.log, None if unknown; age_s: its least age."""
ChildrenPulse = TypedDict("ChildrenPulse", {"count": int, "name": str, "doing": str, "where": str})


class EnginePulse(ProcessPulse, StackPulse):
    """What a rank is doing at one moment.

    state: the kernel's letter, D also when it sleeps on a file; cpu_s, io (bytes) and net (bytes over TCP), with all
    descendants; sleeps: how often the main thread has gone to sleep. stack: a hash of the main thread's stack; where:
    the innermost frame of the user's code; calls: the library function that it called; script: file, line and function
    of the outermost frames of the user's code, while the main thread calls no library; parked: the main thread waits
    for another thread; over: the script is over, and Python waits for its threads; inside: the function of
    torch.distributed that the main thread is in; frame: file and line of `where`, which stay on the node. None:
    unknown, or none.
    """

    t: float
    """Monotonic seconds."""
    net: Optional[int]
    deaf: bool
    """Its worker server does not answer."""
    source: Optional[SourceExcerpt]
    """The lines of the file around `where`."""
    groups: dict[str, Annotated[GroupPulse, _group]]
    """By process group and backend."""
    ended: Optional[EndedPart]
    children: list[ChildrenPulse]
    unanswered: list[str]
    """The remote ends that do not answer a rank that waits, and the connected ones."""
    reached: list[str]
    ras: list[str]
    """In the pulse of one rank: messages of NCCL's service on this node, and the node's own addresses."""
    addresses: list[str]


class ReportedPulse(EnginePulse):
    """A pulse as an agent reports it."""

    step: Optional[tuple[Optional[int], Figure]]
    """The step and the loss that the rank has printed last: added by its agent."""


class Pulse(ReportedPulse):
    """A pulse as the coordinator's state machine gets it."""

    clock: tuple[int, Optional[int]]
    """The node's base.clocks.Clock, by which its times are corrected: added by the coordinator's agent."""


ReportedPulses = Annotated[dict[str, ReportedPulse], by_rank(ReportedPulse)]
"""The pulses of a node's ranks, by rank."""


@dataclasses.dataclass(frozen=True)
class Wait:
    """What one rank waits for: the oldest unfinished collective of a group; group "": no collective yet."""

    group: str
    seq: int
    op: str
    sizes: str = ""
    age_s: float = 0.0
    timeout_s: Optional[float] = None
    backend: str = ""


def lasting_wait(before: Pulse, now: Pulse) -> Optional[Wait]:
    """Return what a rank waited for in both pulses; of several collectives the oldest."""
    waits = []
    for name, group in now["groups"].items():
        earlier = before["groups"].get(name, {})
        if "seq" in group and earlier.get("seq") == group["seq"]:
            # Setting the clock, or suspending the machine, does not make it older.
            age_s = min(group["age_s"], earlier["age_s"] + now["t"] - before["t"])
            call = (group["seq"], group["op"], group["sizes"])
            waits.append(Wait(name, *call, age_s, group["timeout_s"], group["backend"]))
    if waits:
        return max(waits, key=lambda wait: wait.age_s)
    # A running loop may show the same stack in each pulse.
    if _progresses(before, now) or _wakes_often(before, now):
        return None
    if now["inside"] == BACKWARD and is_working(before, now):
        return None
    if now["stack"] and now["inside"] and now["inside"] == before["inside"] and now["stack"] == before["stack"]:
        return Wait("", 0, now["inside"], age_s=now["t"] - before["t"])
    return None


def idleness(before: Pulse, now: Pulse) -> Optional[str]:
    """Return how a rank is idle; None if it is not, or not known."""
    if is_stopped(before, now):
        return STOPPED
    if _transfers(before, now):
        return None
    if now["deaf"] and before["deaf"]:
        return UNRESPONSIVE
    same = bool(now["stack"]) and now["stack"] == before["stack"]
    return IDLE if same and not is_working(before, now) else None


def is_stopped(before: Pulse, now: Pulse) -> bool:
    """Return whether it is stopped; a process that only has a limited share of a processor still progresses."""
    return bool(now["state"] == before["state"] == "T") and not _computes(before, now)


def is_busy(before: Pulse, now: Pulse) -> bool:
    """Return whether it is known to be active: it works, or its main thread has moved."""
    return is_working(before, now) or bool(before["stack"] and now["stack"] and before["stack"] != now["stack"])


def is_working(before: Pulse, now: Pulse) -> bool:
    """Return whether it computes, reads, writes, or reaches further collectives or steps."""
    return _computes(before, now) or _transfers(before, now) or _progresses(before, now)


def only_computes(before: Pulse, now: Pulse) -> bool:
    """Return whether its main thread ran in both pulses, and in between it read, wrote, printed and reached nothing."""
    runs = before["state"] == now["state"] == "R" and _computes(before, now)
    return runs and not _transfers(before, now) and not _progresses(before, now)


def has_stepped(before: Pulse, now: Pulse) -> bool:
    """Return whether it has printed another step, or another loss if it prints no steps."""
    return bool(now["step"] != before["step"])


def may_receive(before: Pulse, now: Pulse) -> bool:
    """Return whether its connections carry much data, or are not known yet."""
    is_known = before["stack"] or before["deaf"]
    return not is_known or _sent(before, now) > BUSY_BYTES_PER_S * (now["t"] - before["t"])


def _computes(before: Pulse, now: Pulse) -> bool:
    return bool(now["cpu_s"] - before["cpu_s"] > BUSY_SHARE * (now["t"] - before["t"]))


def _transfers(before: Pulse, now: Pulse) -> bool:
    seconds = now["t"] - before["t"]
    # In state D, the process is in a read or write of the kernel.
    if now["state"] == "D" or now["io"] - before["io"] > BUSY_BYTES_PER_S * seconds:
        return True
    return bool(_sent(before, now) > BUSY_SENT_PER_S * seconds)


def _sent(before: Pulse, now: Pulse) -> int:
    # The count of a connection is lost when it is closed.
    return 0 if now["net"] is None or before["net"] is None else abs(now["net"] - before["net"])


def _progresses(before: Pulse, now: Pulse) -> bool:
    """Return whether it has begun further collectives, or printed another step."""
    earlier = {name: group["last"] for name, group in before["groups"].items()}
    # The count starts again in a new group.
    is_further = any(group["last"] != earlier.get(name) for name, group in now["groups"].items())
    return has_stepped(before, now) or (bool(earlier) and is_further)


def _wakes_often(before: Pulse, now: Pulse) -> bool:
    """Return whether its main thread goes to sleep more often than a thread that only waits."""
    if now["sleeps"] is None or before["sleeps"] is None:
        return False
    return bool(now["sleeps"] - before["sleeps"] > WAKES + WAKES_PER_S * (now["t"] - before["t"]))
