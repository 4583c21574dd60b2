"""Goodput: the share of a job's time in which its ranks trained, and what the rest was spent on. Pure.

In: the journal, the steps before and after each restart. Out: seconds by what they were spent on; None while no step of
the job is known, as then nobody knows whether it trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.wire.events import ENDED_EVENTS, EventType
from supervisor.wording.events import phases_by_generation
from supervisor.wording.incidents import is_hang
from supervisor.wording.values import elapsed, local_time

if TYPE_CHECKING:
    from remote_agent.wire.documents import JournalEvent

# The phases of a start have these names here.
_SPENT = {
    "detect": "stop",
    "stop": "stop",
    "rendezvous": "start",
    "spawn": "start",
    "main": "start",
    "imports": "import",
    "process_group": "import",
    "first_step": "first step",
}


class Goodput(NamedTuple):
    """Seconds since the first group was started, and those in which no step was made, or one was made again."""

    total_s: float
    lost: dict[str, float]

    @property
    def share(self) -> float:
        """The part of the time that counts, from 0 to 1."""
        return max(0.0, 1 - sum(self.lost.values()) / self.total_s) if self.total_s > 0 else 1.0

    def text(self, details: bool = True) -> str:
        """Return `goodput 93 %, 38 s lost: stop 24, import 12, redo 2`."""
        lost = sum(self.lost.values())
        text = f"goodput {self.share:.0%}".replace("%", " %")
        if not details or lost < 0.5:
            return text
        parts = sorted(((value, name) for name, value in self.lost.items() if value >= 0.5), reverse=True)
        spent = ", ".join(f"{name} {value:.0f}" for value, name in parts)
        return f"{text}, {lost:.0f} s lost: {spent}"


def goodput(events: Sequence[JournalEvent], now_s: float, redone_s: float = 0.0) -> Goodput | None:
    """Return a job's goodput up to now, or up to its end; `redone_s`: spent on steps that had been made before."""
    began = next((_time(event) for event in events if event.get("type") == EventType.GENERATION_STARTED), None)
    if began is None or not any(event.get("type") == EventType.FIRST_STEP for event in events):
        return None
    end_s = next((_time(event) for event in events if event.get("type") in ENDED_EVENTS), None) or now_s
    lost: dict[str, float] = {}
    for phases in phases_by_generation(events).values():
        for phase, milliseconds in phases.items():
            name = _SPENT.get(phase, phase)
            lost[name] = lost.get(name, 0.0) + milliseconds / 1000
    lost["hang"] = _hung_s(events, end_s)
    if (waits := _waits(events)) is not None:
        # That time does not belong to a phase yet.
        name, since = waits
        lost[name] = lost.get(name, 0.0) + max(0.0, end_s - since)
    lost["redo"] = redone_s
    total_s = max(0.0, end_s - began)
    return Goodput(total_s, {name: value for name, value in lost.items() if value > 0})


def _hung_s(events: Sequence[JournalEvent], end_s: float) -> float:
    """Return for how long the group hung, from each incident of a hang to what ended it."""
    hung_s, since = 0.0, None
    for event in events:
        # A time is read only where it counts: a screen asks for this with each new status.
        kind = event["type"]
        if kind == EventType.INCIDENT and since is None and is_hang(event["detail"]):
            since = _time(event)
        elif kind in (EventType.HANG_OVER, EventType.GENERATION_STOPPED) and since is not None:
            hung_s, since = hung_s + max(0.0, (_time(event) or since) - since), None
    return hung_s + (max(0.0, end_s - since) if since is not None else 0.0)


def start_waits(events: Sequence[JournalEvent], now_s: float) -> str:
    """Return what a running group without a first step waits for: `imports: 8 s`; "" where there is none."""
    what, since = _waits(events) or ("restart", 0.0)
    return "" if what == "restart" else f"{'imports' if what == 'import' else what}: {elapsed(now_s - since)}"


def _waits(events: Sequence[JournalEvent]) -> tuple[str, float] | None:
    """Return what a job waits for that makes no steps yet, or again, and since when; None: it trains, or has ended."""
    for event in reversed(events):
        if (kind := event["type"]) in (EventType.FIRST_STEP, *ENDED_EVENTS):
            return None
        is_launched = kind == EventType.GENERATION_STARTED and event["generation"] == 0
        what = "import" if is_launched else _NEXT.get(kind)
        if what is not None and (since := _time(event)) is not None:
            return what, since
    return None


# After these events, a job waits for this.
_NEXT = {
    EventType.GENERATION_STOPPED: "restart",
    EventType.GENERATION_RUNNING: "import",
    EventType.PROCESS_GROUP_UP: "first step",
}


def redone_s(steps: Iterable[tuple[float, float, float]], restarts: Iterable[float], step_s: float) -> float:
    """Return the seconds spent on steps that were made again after restarts.

    steps: time, least and greatest step of each bucket, in order; restarts: when groups began; step_s: seconds a step.
    """
    lost, reached = 0.0, None
    coming = sorted(restarts, reverse=True)
    for time_s, low, high in steps:
        restarted = bool(coming) and coming[-1] <= time_s
        # If groups made no step at all, the lost steps are repeated only once.
        while coming and coming[-1] <= time_s:
            coming.pop()
        if restarted and reached is not None:
            lost += max(0.0, reached - low) * step_s
        reached = high
    return lost


def _time(event: JournalEvent) -> float | None:
    moment = local_time(event.get("time"))
    return None if moment is None else moment.timestamp()
