"""The coordinator's state machine: who is in the group, and when it starts, stops and ends. Pure: no I/O, no clock.

In: (State, Input, now). Out: the next State and the commands for the shell. Every message carries its generation;
a message of another generation changes nothing.

    forming -> preparing -> starting -> running -> ended
       ^                       |          |
       +------- stopping <-----+----------+
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from remote_agent.coordinator import (
    code_version,
    formation,
    hang_watch,
    inputs,
    phases,
    policy,
    slow_watch,
    snapshots,
    views,
)
from remote_agent.coordinator import state as s
from remote_agent.coordinator.operator_requests import CORDONED, VERBS
from remote_agent.coordinator.transitions import (
    NOT_JOINED,
    STOP_MARGIN_S,
    Turn,
    fail_node,
    give_up_on,
    lose_node,
    stop_group,
)
from remote_agent.text.names import count
from remote_agent.wire import leases
from remote_agent.wire.events import OUT_OF_GROUPS, SNAPSHOT_UNNAMED, EventType, StopCause

# An agent that was started for a removed node and is not added by then is sent away.
UNWANTED_S = 60.0
# Members may have workers.
ALIVE = (s.STARTING, s.RUNNING, s.STOPPING)
STUCK = "it did not stop its workers in time"
# There are several ticks a second: a gap of this share of node_timeout means that this process was suspended.
PAUSE_SHARE = 0.25
# A busy machine may keep a process waiting for this long.
PAUSE_MIN_S = 2.0
MAX_NAMED = 4


def step(state: s.State, event: inputs.Input, now: float, wall_ns: int = 0) -> s.Turned:
    """Return the state after one event, and what to do; see `run`."""
    return run(state, (event,), now, wall_ns)


def run(state: s.State, events: Iterable[inputs.Input], now: float, wall_ns: int = 0) -> s.Turned:
    """Return the state after events that came together, and what to do.

    `now`: seconds of a clock that never goes back; `wall_ns`: the time of day, for what people read. What is decided
    by looking at all nodes is decided once, after the last event.
    """
    turn = Turn(state, now, wall_ns)
    dropped = _notice_pause(turn)
    for event in events:
        is_heard = getattr(event, "node", None) not in dropped or isinstance(
            event, (inputs.AgentDead, inputs.GivenUp, inputs.Remove)
        )
        if is_heard and not _is_stale(turn.state, event):
            HANDLERS[type(event)](turn, event)
        if turn.state.phase == s.STOPPING and not turn.state.waiting:
            policy.after_stop(turn)
    _decide(turn)
    policy.note_recovery(turn)
    return turn.state, tuple(turn.commands)


def _decide(turn: Turn) -> None:
    """Form the next group, or start the one that is prepared, where nothing is missing any more."""
    if turn.state.phase == s.FORMING and turn.state.cause == StopCause.STOP:
        # The stop was requested from a coordinator that has died meanwhile.
        policy.end_stopped(turn)
    elif turn.state.phase == s.FORMING and turn.state.me in turn.state.leaving:
        policy.hand_over(turn)
    elif turn.state.phase == s.FORMING:
        formation.try_form(turn)
    if turn.may_go and turn.state.phase == s.PREPARING:
        formation.go_when_recorded(turn)


def _is_stale(state: s.State, event: inputs.Input) -> bool:
    """Return whether a report comes from a node that is not in the job, or is about another generation."""
    if isinstance(event, inputs.GroupReport) and event.generation != state.generation:
        return True
    return isinstance(event, inputs.Report) and event.node not in state.nodes


def _notice_pause(turn: Turn) -> set[str]:
    """Blame no node for silence while we were suspended; after a long pause, let all nodes join again.

    Returns the nodes whose connections are dropped.
    """
    state, timeout = turn.state, turn.state.spec.node_timeout
    if state.ticked is None or state.phase == s.ENDED:
        return set()
    pause = turn.now - state.ticked
    if pause <= max(PAUSE_MIN_S, PAUSE_SHARE * timeout):
        return set()
    turn.set(ticked=turn.now, deadline=None if state.deadline is None else state.deadline + pause)
    for name, node in state.nodes.items():
        turn.set_node(name, seen=node.seen + pause)
    turn.emit(
        EventType.COORDINATOR_PAUSED,
        node=state.me,
        seconds=round(pause, 1),
        reason=f"its agent, or the whole machine, was suspended for {pause:.0f} s",
    )
    if pause <= leases.HELD * timeout:
        return set()
    if state.phase in (s.PREPARING, s.STARTING, s.RUNNING):
        stop_group(turn, StopCause.PAUSED, kill=True)
        turn.set(waiting=frozenset(state.members), deadline=turn.now + timeout)
    # Earlier messages may arrive only now, and do not show which coordinator a node follows: all have to join again.
    dropped = {name: node for name, node in state.nodes.items() if node.connected and name != state.me}
    for name in dropped:
        turn.set_node(name, connected=False)
        turn.commands.append(s.Drop(name))
    return set(dropped)


def on_joined(turn: Turn, event: inputs.Joined) -> None:
    node = turn.node(event.node)
    fresh = node.incarnation != event.incarnation
    turn.set(given_up=turn.state.given_up - {event.node})
    turn.set_node(
        event.node,
        connected=True,
        seen=turn.now,
        joined=turn.now,
        held=turn.now - event.delay,
        running=event.running,
        incarnation=event.incarnation,
        ready=node.ready and not fresh,
        lacks=False,
        disk=event.disk,
        leaves=node.leaves and not fresh,
    )
    if node.disk != event.disk:
        turn.discard("recorded", event.node)
    state = turn.state
    if state.phase == s.ENDED:
        # While the role is handed over, the job continues without us.
        if state.ended is not None:
            turn.send(event.node, "end", state=state.ended)
    elif node.status == "removed" and not fresh:
        turn.set_node(event.node, leaves=True)
        formation.send_away(turn)
    elif event.node in state.members and state.phase in (s.STARTING, s.RUNNING) and event.running != state.generation:
        lose_node(turn, event.node, f"{event.reason}, its workers are gone")
        turn.set_node(event.node, connected=True, seen=turn.now)
    elif event.running is not None and not _carries_on(state, event):
        turn.send(event.node, "stop", generation=event.running, grace_s=state.spec.stop_grace, collect=False)
    elif state.phase == s.PREPARING:
        snapshots.ask(turn, [event.node])
        formation.prepare(turn, event.node)
    elif state.phase == s.STOPPING and event.running is None:
        if event.nproc is not None:
            # The node is ready before it is idle: the next group must not be formed without it.
            on_ready(turn, inputs.Ready(event.node, event.nproc, trees=event.trees))
        on_idle(turn, inputs.Idle(event.node, state.generation))


def _carries_on(state: s.State, event: inputs.Joined) -> bool:
    return state.phase in (s.STARTING, s.RUNNING) and event.running == state.generation and event.node in state.members


def on_ready(turn: Turn, event: inputs.Ready) -> None:
    node = turn.node(event.node)
    was_ready = node.ready
    turn.set_node(event.node, ready=True, nproc=event.nproc, trees=event.trees)
    if not code_version.admits(turn, event.node) or node.status in OUT_OF_GROUPS:
        return
    returned = node.status == "lost"
    if node.status in ("connecting", "lost"):
        full = formation.is_full(turn.state, event.node)
        # A new coordinator takes over the old one's group: its members stay, even cordoned ones.
        out = node.cordoned and (returned or event.node not in turn.state.members)
        spare = node.spec.spare or full or out
        reason = CORDONED if out else formation.FULL if full else None
        turn.set_node(event.node, status="spare" if spare else "ready", reason=reason)
        facts: dict[str, Any] = {"returned": returned, "spare": spare, "versions": dict(event.versions)}
        turn.emit(EventType.NODE_READY, node=event.node, nproc=event.nproc, **facts)
    # A node that was ready before may have been away while a group formed.
    formation.admit(turn, event.node, StopCause.RETURNED if returned or was_ready else StopCause.JOINED)


def on_unfit(turn: Turn, event: inputs.Unfit) -> None:
    node = turn.node(event.node)
    if node.status in ("removed", "failed"):
        return
    if node.status == "lost":
        # It is back but cannot take part; the reason for its loss no longer applies.
        fail_node(turn, event.node, event.reason)
        if views.is_short(turn.state):
            formation.note_shortage(turn)
        return
    connected = node.connected
    lose_node(turn, event.node, event.reason, status="failed")
    # Its agent still runs, and must learn of the end.
    turn.set_node(event.node, connected=connected)


def on_heartbeat(turn: Turn, event: inputs.Heartbeat) -> None:
    turn.set_node(event.node, seen=turn.now, held=max(turn.node(event.node).held, turn.now - event.heard_age))
    if event.snapshots is not None:
        turn.set_node(event.node, snapshots=event.snapshots)
    if event.said is not None:
        turn.set_node(event.node, said=event.said)
    if event.stepped:
        turn.set(stepped=True)
    phases.note_step(turn, event.first_step_age)
    if event.gpu_use is not None:
        slow_watch.on_gpu_use(turn, event.gpu_use)
    if event.moved:
        turn.set(watch=dataclasses.replace(turn.state.watch, moved_at=turn.now))
    for (rank, kind), message in event.warnings.items():
        # A warning may come from a comparison of ranks and concern a rank of another node.
        known = turn.state.ranks.get(rank)
        turn.warn(event.node if known is None else known.node, rank, kind, message)


def on_notice(turn: Turn, event: inputs.NodeWarning) -> None:
    # It is enough that one node reports what all nodes do.
    if event.kind != SNAPSHOT_UNNAMED or not any(kind == event.kind for *_, kind in turn.state.warnings):
        turn.warn(event.node, None, event.kind, event.message)


def on_agent_dead(turn: Turn, event: inputs.AgentDead) -> None:
    node = turn.node(event.node)
    if turn.state.phase == s.ENDED:
        return
    if event.alone and node.status not in ("draining", "removed", "lost", "failed"):
        turn.emit(EventType.AGENT_LOST, node=event.node, reason=event.reason)
    if event.said:
        turn.set_node(event.node, said=event.said)
    lose_node(turn, event.node, event.reason)


def on_given_up(turn: Turn, event: inputs.GivenUp) -> None:
    if turn.node(event.node).connected or turn.state.phase == s.ENDED:
        return
    turn.set(given_up=turn.state.given_up | {event.node})
    lose_node(turn, event.node, "an operator declared it dead")


def on_prepared(turn: Turn, event: inputs.Prepared) -> None:
    state = turn.state
    opener = formation.opener_of(state) if state.phase == s.PREPARING else None
    if opener is not None and event.node == opener[0]:
        turn.set(port=event.port)
        turn.go_soon()


def on_recorded(turn: Turn, event: inputs.Recorded) -> None:
    state = turn.state
    if state.phase == s.PREPARING and event.term == state.groups[-1].term:
        turn.add("recorded", event.node)
        turn.go_soon()


def on_held(turn: Turn, event: inputs.Held) -> None:
    turn.set_node(event.node, snapshots=event.snapshots)
    if turn.state.phase == s.PREPARING:
        snapshots.on_held(turn, event.node)
        turn.go_soon()


def on_placed(turn: Turn, event: inputs.Placed) -> None:
    if turn.state.phase == s.PREPARING:
        snapshots.on_placed(turn, event.node, event.report)
        turn.go_soon()


def on_started(turn: Turn, event: inputs.Started) -> None:
    state = turn.state
    if state.phase not in ALIVE:
        return
    turn.set_node(event.node, running=event.generation, notice=event.notice, cold=event.cold, said=())
    # torch's agent starts its workers after the rendezvous, and reports their ranks then.
    if state.rendezvous is None:
        _take_ranks(turn, event.node, event.ranks)
    # In a group of our own, the last node to start is the only one that the start waits for.
    is_last = turn.state.rendezvous is not None or not turn.state.waiting
    if is_last and all(turn.node(name).running == event.generation for name in state.members):
        _warn_of_network(turn)


def _warn_of_network(turn: Turn) -> None:
    """Write each different notice of the members to the journal once, with all nodes that gave it."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for name in turn.state.members:
        if notice := turn.node(name).notice:
            nodes.setdefault((notice["kind"], notice["message"]), []).append(name)
    for (kind, message), names in nodes.items():
        others = ", ".join(names[1:]) if len(names) <= MAX_NAMED else count(len(names) - 1, "other node")
        turn.warn(names[0], None, kind, f"{message} (also {others})" if others else message)


def on_assigned(turn: Turn, event: inputs.Assigned) -> None:
    state = turn.state
    if state.phase not in ALIVE:
        return
    pids = {pid for _, _, pid in event.ranks}
    others = {number: rank for number, rank in state.ranks.items() if rank.node != event.node or rank.pid in pids}
    turn.set(world_size=event.world_size, ranks=others)
    turn.emit(
        EventType.RANKS_ASSIGNED,
        node=event.node,
        ranks=[list(rank) for rank in event.ranks],
        world_size=event.world_size,
    )
    _take_ranks(turn, event.node, event.ranks)


def _take_ranks(turn: Turn, node: str, started: tuple[tuple[int, int, int], ...]) -> None:
    """Note which ranks a node has started. A rank that has ended stays as it is."""
    state = turn.state
    for rank, local_rank, pid in started:
        known = state.ranks.get(rank, s.Rank(rank, node, local_rank))
        outcome = "running" if known.state == "starting" else known.state
        turn.set_rank(s.Rank(rank, node, local_rank, pid, outcome, known.code, known.signal))
    if state.phase == s.STARTING:
        turn.discard("waiting", node)
        if state.spec.kind == "binary":
            turn.add("mains", *(rank for rank, _, _ in started))
        if not turn.state.waiting:
            turn.mark("started")
            turn.set(deadline=None)
        formation.running_when_all_are(turn)


def on_main(turn: Turn, event: inputs.Main) -> None:
    state = turn.state
    if state.phase == s.STARTING:
        turn.add("mains", event.rank)
        formation.running_when_all_are(turn)


def on_exited(turn: Turn, event: inputs.Exited) -> None:
    state = turn.state
    if state.phase not in ALIVE:
        return
    failed = turn.record_exit(event.node, event.exit)
    if state.phase == s.STOPPING:
        return
    if failed:
        stop_group(turn, StopCause.FAILURE, age=event.age)
        return
    turn.add("mains", event.exit["rank"])
    formation.running_when_all_are(turn)
    ranks = turn.state.ranks
    ended = len(turn.state.exits) >= len(ranks) > 0
    if ended and all(rank.state == "succeeded" for rank in ranks.values()):
        turn.end("succeeded", "all ranks succeeded")


def on_idle(turn: Turn, event: inputs.Idle) -> None:
    state, node = turn.state, turn.node(event.node)
    if node.running is not None and node.running <= event.generation:
        turn.set_node(event.node, running=None)
        formation.admit(turn, event.node, StopCause.RETURNED)
    if event.generation != state.generation or state.phase not in ALIVE:
        return
    for ended in event.exits:
        turn.record_exit(event.node, ended)
    if state.phase == s.STOPPING:
        turn.discard("waiting", event.node)
    elif event.node in state.members and not _done(turn.state, event.node):
        lose_node(turn, event.node, "it stopped its workers after it had lost the coordinator")
        turn.set_node(event.node, connected=True, ready=True)
        if turn.node(event.node).status == "lost":
            back = ("spare", CORDONED) if node.cordoned else ("ready", None)
            turn.set_node(event.node, status=back[0], reason=back[1])


def _done(state: s.State, node: str) -> bool:
    return all(rank.state == "succeeded" for rank in state.ranks.values() if rank.node == node)


def on_order_failed(turn: Turn, event: inputs.OrderFailed) -> None:
    state = turn.state
    if state.phase in (s.PREPARING, *ALIVE):
        # If several nodes cannot carry it out, the failure is not one node's own.
        turn.set(troubles={**state.troubles, event.node: event.message})
    if state.phase in (s.PREPARING, s.STARTING):
        stop_group(turn, StopCause.FAILURE)


def on_tick(turn: Turn, event: inputs.Tick) -> None:
    state = turn.state
    if state.phase == s.ENDED:
        return
    turn.set(ticked=turn.now)
    timeout = state.spec.node_timeout
    for name, node in state.nodes.items():
        unwanted = node.status == "removed" and node.connected and turn.now - node.joined > UNWANTED_S
        if unwanted and not any(name in group.members for group in state.groups):
            turn.set_node(name, connected=False)
            turn.send(name, "leave", reason="it is not in the job, and was not added")
            continue
        if node.connected and name != state.me and turn.now - node.seen > timeout:
            lose_node(turn, name, f"no heartbeat within {timeout:g} s")
            turn.commands.append(s.Drop(name))
    _keep_quorum(turn)
    _keep_deadline(turn)
    policy.publish(turn)
    if turn.state.phase == s.PREPARING and turn.state.spec.snapshots:
        # A node outside the group may have disappeared, or the wait for it may be over.
        turn.go_soon()
    hang_watch.on_tick(turn)
    slow_watch.on_tick(turn)


def _keep_quorum(turn: Turn) -> None:
    """Stop our side of a split if it may be the smaller one: the others may form a group of their own."""
    state = turn.state
    if state.phase not in (s.PREPARING, s.STARTING, s.RUNNING):
        return
    if not formation.holds_quorum(state, turn.now):
        turn.emit(EventType.QUORUM_LOST, held=formation.held(state, turn.now), members=list(state.members))
        stop_group(turn, StopCause.QUORUM, kill=True)


def _keep_deadline(turn: Turn) -> None:
    state = turn.state
    if state.deadline is None or turn.now < state.deadline:
        return
    turn.set(deadline=None)
    if state.phase == s.FORMING:
        formation.lose_expected(turn)
    elif state.phase == s.STOPPING:
        _lose_the_stuck(turn)
    elif state.phase == s.PREPARING and not (state.port is not None and snapshots.leave_out_the_late(turn)):
        opener = formation.opener_of(state)
        name = opener[0] if opener is not None else next(iter(state.members))
        on_order_failed(turn, inputs.OrderFailed(name, state.generation, "it did not open the store in time"))
    elif state.phase == s.STARTING:
        stop_group(turn, StopCause.NODE_LOST)
        for name in sorted(state.waiting):
            give_up_on(turn, name, "it did not start its workers in time")


def _lose_the_stuck(turn: Turn) -> None:
    """Declare nodes lost that are not idle in time; one that is connected gets a second chance, on a new connection.

    Its workers may still be alive: without a connection, the end of its lease stops them.
    """
    state = turn.state
    for name in sorted(state.waiting):
        node = state.nodes[name]
        if node.reason == STUCK:
            lose_node(turn, name, STUCK, status="failed")
        elif node.connected:
            turn.set_node(name, connected=False, reason=STUCK)
        else:
            lose_node(turn, name, NOT_JOINED)
        if node.connected:
            turn.commands.append(s.Drop(name))
    if turn.state.waiting:
        turn.set(deadline=turn.now + max(state.spec.node_timeout, state.spec.stop_grace + STOP_MARGIN_S))


HANDLERS: dict[type, Callable[[Turn, Any], None]] = {
    inputs.Joined: on_joined,
    inputs.Ready: on_ready,
    inputs.Unfit: on_unfit,
    inputs.Heartbeat: on_heartbeat,
    inputs.Pulses: hang_watch.on_pulses,
    inputs.Windows: slow_watch.on_windows,
    inputs.Unsampled: slow_watch.on_unsampled,
    inputs.NodeWarning: on_notice,
    inputs.AgentDead: on_agent_dead,
    inputs.GivenUp: on_given_up,
    inputs.Prepared: on_prepared,
    inputs.Recorded: on_recorded,
    inputs.Held: on_held,
    inputs.Placed: on_placed,
    inputs.Started: on_started,
    inputs.Assigned: on_assigned,
    inputs.OrderFailed: on_order_failed,
    inputs.Main: on_main,
    inputs.Grouping: phases.on_grouping,
    inputs.Grouped: phases.on_grouped,
    inputs.Exited: on_exited,
    inputs.Idle: on_idle,
    inputs.Judged: policy.on_judged,
    inputs.Tick: on_tick,
    **{verb.kind: verb.handle for verb in VERBS.values()},
}
