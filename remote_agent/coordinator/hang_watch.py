"""Whether the running group makes progress: when its ranks are asked, and what their answers mean. Pure.

In: heartbeats, pulses of the ranks, time. Out: orders `pulse`, the incident of a hang while it lasts, its end.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from remote_agent.coordinator import inputs, slow_watch
from remote_agent.coordinator import state as s
from remote_agent.coordinator.transitions import stop_group
from remote_agent.diagnose.evidence import JobContext
from remote_agent.diagnose.hang.loops import find_loops
from remote_agent.diagnose.hang.stalls import (
    collectives,
    find_stall,
    gives_up_in,
    is_suspect,
    missing_of,
    stall_incident,
)
from remote_agent.diagnose.incidents import iso_time
from remote_agent.wire.events import EventType, StopCause

if TYPE_CHECKING:
    from remote_agent.coordinator.transitions import Turn
    from remote_agent.diagnose.hang.stalls import Stall

# After this share of hang_after without progress the first pulses are taken, and after it again the next ones.
ASK_SHARE = 1 / 4
# If every rank waits, the network may just be slow: it gets this many times hang_after.
NETWORK_TIMES = 3
# Setting up a group and a model takes fewer collectives than this.
STEPPED_COLLECTIVES = 20


def fresh(watch: s.Watch, now: float) -> s.Watch:
    """Return the watch over a new group."""
    return s.Watch(moved_at=now, asked_at=now, longest_s=watch.longest_s)


def on_tick(turn: Turn) -> None:
    """Ask all ranks when it is time; end a group that hangs for longer than the job allows."""
    state, watch = turn.state, turn.state.watch
    patience_s = state.spec.hang_after
    if state.phase != s.RUNNING or not patience_s:
        return
    allowed = state.spec.hang_restart
    if watch.hang is not None and allowed and turn.now - watch.hang_at >= allowed:
        stop_group(turn, StopCause.FAILURE)
        return
    quiet_s, asked_s = turn.now - watch.moved_at, turn.now - watch.asked_at
    connected = all(state.nodes[name].connected or name == state.me for name in state.members)
    ask_s = ASK_SHARE * patience_s
    # Output is no proof of progress, as a thread may print it: all ranks are asked now and then anyway.
    if connected and asked_s >= ask_s and (watch.suspect or quiet_s >= ask_s or asked_s >= 2 * ask_s):
        before = watch.before if watch.asked else watch.now
        asked = frozenset(state.members)
        turn.set(watch=dataclasses.replace(watch, asked=asked, asked_at=turn.now, before=before, now={}))
        for name in state.members:
            turn.send(name, "pulse", generation=state.generation, stacks=watch.suspect)


def on_pulses(turn: Turn, event: inputs.Pulses) -> None:
    """Take one node's answer; a round is examined when it is complete."""
    state, watch = turn.state, turn.state.watch
    if state.phase != s.RUNNING or event.node not in watch.asked:
        return
    turn.add_pulses(event.node, event.ranks)
    watch = turn.state.watch
    if watch.asked:
        return
    watch = dataclasses.replace(watch, suspect=is_suspect(watch.before, watch.now))
    # A script that prints no steps counts as having made some after this many collectives.
    stepped = state.stepped or collectives(watch.now) >= STEPPED_COLLECTIVES
    turn.set(watch=watch, stepped=stepped)
    slow_watch.on_pulses(turn)
    left = frozenset(number for number, rank in state.ranks.items() if rank.state == "succeeded")
    watch = _look_for_loops(turn, left)
    stall = find_stall(watch.before, watch.now, left)
    if watch.hang is not None:
        if _is_over(watch, stall):
            _resolved(turn)
        return
    key = _key(stall)
    if key != watch.key:
        watch = dataclasses.replace(watch, key=key, since=turn.now - (stall.age_s if stall is not None else 0.0))
        turn.set(watch=watch)
    if stall is not None:
        patience_s = state.spec.hang_after * (NETWORK_TIMES if stall.kind == "network" else 1)
        # After a long wait that was not a hang, the next one gets more time.
        if turn.now - watch.since >= max(patience_s, 2 * watch.longest_s):
            _report(turn, stall)


def _look_for_loops(turn: Turn, left: frozenset[int]) -> s.Watch:
    """Warn of ranks that have computed for hang_after while others wait for them; returns the watch with its loops."""
    state, watch = turn.state, turn.state.watch
    watch = dataclasses.replace(watch, loops=find_loops(watch.before, watch.now, left, watch.loops))
    turn.set(watch=watch)
    for rank, loop in watch.loops.items():
        if rank in state.ranks and loop.seconds >= state.spec.hang_after:
            turn.warn(state.ranks[rank].node, rank, "busy", loop.text)
    return watch


def _key(stall: Stall | None) -> str:
    """Return what stays the same while the same ranks hold the group up."""
    if stall is None:
        return ""
    first = (stall.first.group, stall.first.seq) if stall.waits else None
    return f"{stall.kind} {sorted(stall.missing)} {first}"


def _is_over(watch: s.Watch, stall: Stall | None) -> bool:
    """Return whether the hang in the journal has ended: no rank waits in that collective any more."""
    hang = watch.hang or {}
    if not hang["group"]:
        return stall is None
    return all(one["groups"].get(hang["group"], {}).get("seq") != hang["seq"] for one in watch.now.values())


def _report(turn: Turn, stall: Stall) -> None:
    state = turn.state
    number, age_s = state.incidents + 1, turn.now - state.watch.since
    context = JobContext(
        generation=state.generation,
        incident_id=number,
        world_size=len(state.ranks),
        ranks_per_node=state.ranks_per_node(),
        now_ns=turn.wall_ns - int(age_s * 1e9),
    )
    first = stall.first if stall.waits else None
    hang = {
        "missing": missing_of(stall),
        "group": first.group if first is not None else "",
        "seq": first.seq if first is not None else 0,
    }
    turn.set(incidents=number, watch=dataclasses.replace(state.watch, hang=hang, hang_at=turn.now))
    # The document has times because it may be shown later, when a duration would be wrong.
    turn.emit(
        EventType.INCIDENT,
        **stall_incident(stall, context),
        ongoing=True,
        times_out_at=_later(turn, gives_up_in(stall, age_s)),
        restarts_at=_later(turn, state.spec.hang_restart or None),
    )


def _later(turn: Turn, seconds: float | None) -> str | None:
    return None if seconds is None else iso_time(turn.wall_ns + int(seconds * 1e9))


def _resolved(turn: Turn) -> None:
    """Note that the group makes progress again: what looked like a hang was only slow."""
    watch = turn.state.watch
    waited_s = turn.now - watch.since
    reason = f"training resumed after {waited_s:.0f} s"
    turn.emit(EventType.HANG_OVER, reason=reason, waited_s=round(waited_s, 1))
    longest_s = max(watch.longest_s, waited_s)
    turn.set(watch=dataclasses.replace(watch, hang=None, key="", since=turn.now, longest_s=longest_s))
