"""Goodput: the share of a job's time in which its ranks trained, and what all of it was spent on. Pure.

In: the journal, the history. Out: seconds and device hours by what they were spent on; None while no step of the job is
known, as then nobody knows whether it trains.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.wire.events import ENDED_EVENTS, EventType
from supervisor.wording.events import phases_by_generation
from supervisor.wording.incidents import is_hang
from supervisor.wording.values import elapsed, local_time

if TYPE_CHECKING:
    from array import array

    from remote_agent.wire.documents import JournalEvent, Status
    from supervisor.history import Series

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


KINDS = ("step", "step_s", "input", "checkpoint")
"""What of the history `measure` needs."""


class Measured(NamedTuple):
    """What the history of a job shows of its time."""

    redone_s: float = 0.0
    """Seconds that were spent on steps that had been made before."""
    loading: float = 0.0
    """The share of the time in which the ranks load data, as far as they were sampled."""
    saving: float = 0.0
    """The share in which any rank saves a checkpoint, for which the others wait."""


NOTHING = Measured()


class Goodput(NamedTuple):
    """Seconds since the first group was started, and those in which no step was made, or one was made again."""

    total_s: float
    lost: dict[str, float]
    devices: float = 0.0
    """How many ranks there were, on average."""
    spent: Mapping[str, float] = {}
    """All seconds, by what they were spent on."""

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

    def hours(self) -> dict[str, float]:
        """Return the hours of all devices, by what they were spent on."""
        return {name: seconds * self.devices / 3600 for name, seconds in self.spent.items()}

    def hours_text(self, status: Status) -> str:
        """Return `305 GPU hours: training 81 %, loading data 12 %, restarts 7 %`; without GPUs, in hours of ranks."""
        has_gpus = any((node.get("vitals") or {}).get("gpus") for node in status.get("nodes", ()))
        unit = "GPU hours" if has_gpus else "rank hours"
        hours = self.hours()
        total = sum(hours.values())
        parts = ", ".join(
            f"{name} {value / total:.0%}".replace("%", " %") for name, value in hours.items() if value >= total / 200
        )
        return f"{total:.3g} {unit}: {parts}" if parts else ""


def goodput(events: Sequence[JournalEvent], now_s: float, found: Measured = NOTHING) -> Goodput | None:
    """Return a job's goodput up to now, or up to its end."""
    began = next((_time(event) for event in events if event.get("type") == EventType.GENERATION_STARTED), None)
    if began is None or not any(event.get("type") == EventType.FIRST_STEP for event in events):
        return None
    end_s = next((_time(event) for event in events if event.get("type") in ENDED_EVENTS), None) or now_s
    lost: dict[str, float] = {}
    start_s = 0.0
    for generation, phases in phases_by_generation(events).items():
        for phase, milliseconds in phases.items():
            name = _SPENT.get(phase, phase)
            lost[name] = lost.get(name, 0.0) + milliseconds / 1000
            start_s += 0.0 if generation else milliseconds / 1000
    if (waits := _waits(events)) is not None:
        # That time does not belong to a phase yet.
        name, since = waits
        lost[name] = lost.get(name, 0.0) + max(0.0, end_s - since)
    restarts_s = sum(lost.values()) - start_s
    lost["hang"] = _hung_s(events, end_s)
    lost["redo"] = found.redone_s
    total_s = max(0.0, end_s - began)
    trained_s = max(0.0, total_s - sum(lost.values()))
    slow_s = min(trained_s, _slow_s(events, end_s))
    loading_s, saving_s = (share * (trained_s - slow_s) for share in (found.loading, found.saving))
    spent = {
        "training": max(0.0, trained_s - slow_s - loading_s - saving_s),
        "loading data": loading_s,
        "checkpoints": saving_s,
        "waiting for a slow rank": slow_s,
        "start": start_s,
        "restarts": restarts_s,
        "steps made again": lost["redo"],
        "hangs": lost["hang"],
    }
    known = {name: value for name, value in lost.items() if value > 0}
    return Goodput(total_s, known, _devices(events, end_s), {name: value for name, value in spent.items() if value > 0})


def _devices(events: Sequence[JournalEvent], end_s: float) -> float:
    """Return how many ranks there were, on average over the time."""
    sizes = [
        (_time(event) or 0.0, int(event["detail"].get("world_size") or 0))
        for event in events
        if event["type"] == EventType.GENERATION_RUNNING
    ]
    ends = [*(time_s for time_s, _ in sizes[1:]), end_s]
    spans = [(max(0.0, end - time_s), size) for (time_s, size), end in zip(sizes, ends, strict=True)]
    total_s = sum(span for span, _ in spans)
    return sum(span * size for span, size in spans) / total_s if total_s else 0.0


def _slow_s(events: Sequence[JournalEvent], end_s: float) -> float:
    """Return for how long the average rank waited for slow ones; the time of checkpoints counts as such."""
    slow_s, since, share, world = 0.0, None, 0.0, 0
    for event in events:
        kind = event["type"]
        if kind == EventType.GENERATION_RUNNING:
            world = event["detail"]["world_size"] or 0
        if since is not None and kind in (EventType.SLOW, EventType.SLOW_OVER, EventType.GENERATION_STOPPED):
            slow_s, since = slow_s + share * max(0.0, (_time(event) or since) - since), None
        if kind == EventType.SLOW and event["detail"]["phase"] != "checkpoint":
            detail = event["detail"]
            if detail["ranks"] or detail["node"]:
                waiting = 1 - len(detail["ranks"]) / world if world else 1.0
                since, share = _time(event), waiting * detail["share"]
    return slow_s + (share * max(0.0, end_s - since) if since is not None else 0.0)


def measure(events: Sequence[JournalEvent], series: Series | None) -> Measured:
    """Return what the history shows, which has KINDS of all ranks or of some."""
    if series is None:
        return Measured()
    started = [event for event in events if event["type"] == EventType.GENERATION_STARTED]
    restarts = [time_s for event in started[1:] if (time_s := _time(event)) is not None]
    paces = [value for row in series.of("step_s").values() for value in _known(row)]
    step_s = statistics.median(paces) if paces else 0.0
    loading, saving = (_columns(series.of(kind).values()) for kind in ("input", "checkpoint"))
    return Measured(
        redone_s(_steps(series), restarts, step_s),
        statistics.fmean(map(statistics.median, loading)) if loading else 0.0,
        statistics.fmean(map(max, saving)) if saving else 0.0,
    )


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _columns(rows: Iterable[array[float]]) -> list[list[float]]:
    """Return the known values of each bucket that has any."""
    return [known for column in zip(*rows, strict=True) if (known := _known(column))]


def _steps(series: Series) -> list[tuple[float, float, float]]:
    """Return the time, the least and the greatest step of all ranks of each bucket that has one."""
    spans = [span for (kind, _), span in series.ranks.items() if kind == "step"]
    points = []
    for at in range(series.buckets):
        lows, highs = _known(span.low[at] for span in spans), _known(span.high[at] for span in spans)
        if lows:
            points.append((series.begin_s + (at + 1) * series.width_s, min(lows), max(highs)))
    return points


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
