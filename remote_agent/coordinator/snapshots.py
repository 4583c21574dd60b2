"""From which snapshots a group resumes: before it is started, the newest that any connected node has.

In: what the nodes have; an operator's choice. Out: orders to say what they have and to put the chosen ones in place,
the journal's `snapshots_chosen`. **A group starts only when each of its members has the chosen snapshots in place; a
member that cannot is left out, so ranks never resume from different ones.**
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from remote_agent.coordinator import state as s
from remote_agent.coordinator import views
from remote_agent.coordinator.transitions import Turn, give_up_on, stop_group
from remote_agent.snapshots.choice import choose
from remote_agent.wire.events import SNAPSHOT_NOT_KEPT, EventType, StopCause

if TYPE_CHECKING:
    from remote_agent.wire.documents import OfferedSnapshot, PlacedAnswer

# A member may have to read a snapshot of many gigabytes that was written just before the group stopped.
ANSWER_S = 120.0
# Nodes outside the group are asked too; one that is busy or hangs delays the others no longer than this.
OTHERS_S = 5.0
# Putting a snapshot from another node in place takes a fixed time, and its bytes at the rate of a slow network.
PLACE_S = 60.0
PLACE_BYTES_S = 10e6


def ask(turn: Turn, names: Iterable[str]) -> None:
    """Ask nodes which snapshots they have; what was chosen so far no longer counts."""
    state = turn.state
    if not state.spec.snapshots:
        return
    connected = [name for name in names if state.nodes[name].connected]
    waiting = frozenset((*state.resume.asked, *connected))
    turn.set(resume=s.Resume(asked=waiting, asked_at=turn.now))
    # Ranks may save once more when they are stopped, which must not push out what was asked for.
    offered = _offered(state)
    named = next((one for one in offered if one["id"] == state.resume_from), None)
    keep = [one["id"] for one in choose(offered, state.skipped, named)]
    for name in connected:
        turn.send(name, "snapshots", generation=state.generation, keep=keep if named is not None else [])
    turn.set(deadline=turn.now + ANSWER_S)


def on_held(turn: Turn, node: str) -> None:
    """Note that a node has answered."""
    turn.set(resume=dataclasses.replace(turn.state.resume, asked=turn.state.resume.asked - {node}))


def are_in_place(turn: Turn) -> bool:
    """Return whether all members have what the group resumes from; orders what is left to do."""
    state = turn.state
    resume = state.resume
    if not state.spec.snapshots:
        return True
    if resume.chosen is None:
        if not _have_answered(turn):
            return False
        _choose(turn)
        resume = turn.state.resume
    return not resume.placing


def _have_answered(turn: Turn) -> bool:
    state = turn.state
    late = turn.now - state.resume.asked_at >= OTHERS_S
    waited = [name for name in state.resume.asked if state.nodes[name].connected]
    return not any(name in state.members or not late for name in waited)


def _choose(turn: Turn) -> None:
    state = turn.state
    offered = _offered(state)
    named = next((one for one in offered if one["id"] == state.resume_from), None)
    if state.resume_from and named is None:
        message = f"no node has snapshot {state.resume_from} any more: the group resumes from the newest"
        turn.warn(state.me, None, SNAPSHOT_NOT_KEPT, message)
    chosen = choose(offered, state.skipped, named)
    members = frozenset(state.members if chosen else ())
    resume = dataclasses.replace(state.resume, chosen=tuple(chosen), placing=members)
    turn.set(resume=resume, resume_from="")
    if not chosen:
        return
    turn.set(skipped=state.skipped.after(chosen, named, turn.wall_ns))
    size = sum(int(one["bytes"]) for one in chosen)
    turn.set(deadline=turn.now + PLACE_S + size / PLACE_BYTES_S)
    skipped = [list(span) for span in turn.state.skipped.spans]
    for name in state.members:
        turn.send(name, "restore", generation=state.generation, snapshots=chosen, skipped=skipped)


def _offered(state: s.State) -> list[OfferedSnapshot]:
    """Return what connected nodes have, each with the nodes that have it, members of the group first."""
    versions: dict[str, OfferedSnapshot] = {}
    names = [*state.members, *(name for name in state.nodes if name not in state.members)]
    for name in names:
        for one in state.nodes[name].snapshots if state.nodes[name].connected else ():
            known = versions.setdefault(one["id"], {**one, "holders": []})
            known["time_ns"] = max(known["time_ns"], one["time_ns"])
            known["holders"].append(name)
    return list(versions.values())


def on_placed(turn: Turn, node: str, report: PlacedAnswer) -> None:
    """Note that a member has the chosen snapshots in place; one that has not is left out of the group."""
    state, resume = turn.state, turn.state.resume
    # An answer to an older order does not answer this one.
    if node not in resume.placing or report.get("ids") != [one["id"] for one in resume.chosen or ()]:
        return
    if report.get("problem"):
        _leave_out(turn, [node], f"the snapshot is not in place: {report['problem']}")
        return
    placed = {**resume.placed, node: report}
    turn.set(resume=dataclasses.replace(resume, placing=resume.placing - {node}, placed=placed))
    if not turn.state.resume.placing:
        turn.emit(
            EventType.SNAPSHOTS_CHOSEN,
            snapshots=[views.named(one) for one in resume.chosen or ()],
            placed={name: one for name, one in placed.items() if one.get("placed") or one.get("aside")},
            skipped=[list(span) for span in state.skipped.spans],
        )


def leave_out_the_late(turn: Turn) -> bool:
    """Leave members out that did not answer or act in time; returns whether there are any."""
    resume = turn.state.resume
    late = resume.placing or (resume.asked if resume.chosen is None else frozenset())
    names = sorted(name for name in late if name in turn.state.members)
    if names:
        _leave_out(turn, names, "it did not put the snapshot in place in time")
    return bool(names)


def _leave_out(turn: Turn, names: Iterable[str], reason: str) -> None:
    stop_group(turn, StopCause.NODE_LOST)
    for name in names:
        give_up_on(turn, name, reason)
