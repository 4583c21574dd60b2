"""Forming a generation: which nodes, which ranks, when it counts as running.

In: a Turn whose group is to be formed. Out: prepare and go orders, generation_started and generation_running.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from remote_agent.coordinator import hang_watch, phases, snapshots, views
from remote_agent.coordinator import state as s
from remote_agent.coordinator.quorum import Group, lacking
from remote_agent.coordinator.transitions import NOT_JOINED, Turn, lose_node, stop_group
from remote_agent.wire import FIRST_TERM, PORTS, Args, leases, read_conf, split_endpoint
from remote_agent.wire.events import EventType, StopCause

# A store opens in milliseconds; a node that takes longer than this for it has a problem.
PREPARE_TIMEOUT_S = 30.0
STARTED_TIMEOUT_S = 60.0
FULL = "the group is full (max_nodes): it stands by as a spare"
# If there are too few nodes for this long, the job has failed.
ALONE_TIMEOUT_S = 3600.0
# This is torch's default (RendezvousTimeout of dynamic_rendezvous.py).
JOIN_TIMEOUT_S = 600.0


def try_form(turn: Turn) -> None:
    """Form the next generation if enough nodes are ready; else wait, and say since when."""
    state = turn.state
    group = views.choose(state)
    short = len(group) < views.limit(state)
    pending = any(_is_pending(node, short) for node in state.nodes.values()) or _expects_more(state, len(group))
    if state.deadline is not None and pending and not _is_settled(turn, len(group)):
        return
    state = turn.state
    if len(group) < views.floor(state) or not holds_quorum(state, turn.now):
        _wait_for_nodes(turn)
        return
    generation, disks = state.generation + 1, state.disks(group)
    author = state.me, state.nodes[state.me].disk
    turn.set(
        phase=s.PREPARING,
        generation=generation,
        members=s.ranked(group),
        groups=(*state.groups, Group(generation, state.term, disks, author)),
        recorded=frozenset(),
        resume=s.Resume(),
        port=None,
        ranks={},
        waiting=frozenset(),
        mains=frozenset(),
        grouping=frozenset(),
        grouped=frozenset(),
        phases={},
        exits={},
        lost={},
        rendezvous=None,
        world_size=None,
        troubles={},
        stepped=False,
        tree_new_since=None if views.has_proven_tree(state) else state.tree_new_since,
        cause=None,
        alone_since=None,
        enough_since=None,
        deadline=turn.now + PREPARE_TIMEOUT_S,
    )
    for name, node in state.nodes.items():
        if name in group:
            turn.set_node(name, status="running", reason=None)
        elif node.status == "ready" and node.ready and node.connected:
            turn.set_node(name, status="spare", reason=FULL)
    turn.emit(EventType.GENERATION_PROPOSED, node=state.me, members=disks, disk=author[1])
    snapshots.ask(turn, state.nodes)
    prepare(turn)


def prepare(turn: Turn, returned: str | None = None) -> None:
    """Have the group's store opened, unless torch opens it; `returned`: a node whose order or answer may be lost."""
    opener = opener_of(turn.state)
    if opener is None:
        turn.set(port=0)
        turn.go_soon()
    elif returned in (None, opener[0]):
        turn.send(opener[0], "prepare", **opener[1], tree=tree_of(turn.state))


def _is_settled(turn: Turn, ready: int) -> bool:
    """Return whether an elastic job has waited long enough for nodes that still come up; those are admitted later.

    This holds for the first group only: a node of an older group may still have its workers.
    """
    state = turn.state
    spec = state.spec
    first = state.generation < 0 and state.term == FIRST_TERM
    if not first or spec.min_nodes >= spec.max_nodes or ready < views.floor(state):
        turn.set(enough_since=None)
        return False
    since = turn.now if state.enough_since is None else state.enough_since
    turn.set(enough_since=since)
    return turn.now - since >= spec.settle_timeout


def _is_pending(node: s.Node, short: bool) -> bool:
    """Return whether a node may still join, or has workers to stop; `short`: the group has a place for a spare."""
    if node.status in ("removed", "failed"):
        return False
    awaited = not node.spec.spare or (short and not node.cordoned)
    if node.connected:
        return node.running is not None or (awaited and not node.ready and not node.lacks)
    return awaited and node.status == "connecting"


def patience(turn: Turn) -> float | None:
    """Return the deadline for nodes that followed the last coordinator and have not joined this one yet."""
    if not any(is_expected(node) for node in turn.state.nodes.values()):
        return None
    return turn.state.marks.get("stop", turn.now) + turn.state.spec.node_timeout


def lose_expected(turn: Turn) -> None:
    """Stop waiting for nodes that have not joined the new coordinator."""
    for name, node in turn.state.nodes.items():
        if is_expected(node):
            lose_node(turn, name, NOT_JOINED)


def is_expected(node: s.Node) -> bool:
    """Return whether a node followed the last coordinator and has not joined this one yet."""
    return node.status == "connecting" and not node.connected and bool(node.incarnation)


def _expects_more(state: s.State, ready: int) -> bool:
    """Return whether further nodes may still join the first group by themselves."""
    return bool(state.spec.endpoint) and state.generation < 0 and ready < state.spec.max_nodes


def is_held(state: s.State, name: str, now: float) -> bool:
    """Return whether a node has recently confirmed that it follows this coordinator."""
    return name == state.me or now - state.nodes[name].held <= leases.HELD * state.spec.node_timeout


def held(state: s.State, now: float) -> list[str]:
    """Return this node and all connected nodes that have recently confirmed that they follow it."""
    return [
        name for name, node in state.nodes.items() if name == state.me or (node.connected and is_held(state, name, now))
    ]


def held_until(state: s.State, now: float) -> float:
    """Return until when we hold enough nodes if none of them sends another heartbeat."""
    ends = {name: state.nodes[name].held + leases.HELD * state.spec.node_timeout for name in held(state, now)}
    ends[state.me] = now + leases.HELD * state.spec.node_timeout
    latest = sorted(ends.values(), reverse=True)

    def is_enough(end: float) -> bool:
        there = [name for name, until in ends.items() if until >= end]
        return lacking(state.groups, state.disks(there), state.given_up) is None

    # The earlier the end, the more nodes are there until then: the latest end with enough of them is searched.
    first, last = 0, len(latest)
    while first < last:
        middle = (first + last) // 2
        first, last = (first, middle) if is_enough(latest[middle]) else (middle + 1, last)
    return latest[first] if first < len(latest) else now


def holds_quorum(state: s.State, now: float) -> bool:
    """Return whether we hold enough nodes of every group that may have formed."""
    return lacking(state.groups, state.disks(held(state, now)), state.given_up) is None


def note_shortage(turn: Turn) -> None:
    """Write to the journal why no group can be formed now."""
    state = turn.state
    ready = len(views.choose(state))
    turn.emit(EventType.JOB_DEGRADED, ready=ready, needed=views.floor(state), reason=views.shortage(state))


def _wait_for_nodes(turn: Turn) -> None:
    state = turn.state
    patience, waited = ALONE_TIMEOUT_S, f"{ALONE_TIMEOUT_S / 60:.0f} minutes"
    if state.spec.endpoint:
        # This is as in torch's rendezvous. Before the first group, join_timeout has passed already.
        first = state.generation < 0 and state.term == FIRST_TERM
        patience, waited = 0.0 if first else state.spec.join_timeout, f"{state.spec.join_timeout:g} s (join_timeout)"
    if state.alone_since is None:
        turn.set(alone_since=turn.now)
        if state.generation >= 0 or state.deadline is None:
            note_shortage(turn)
    elif turn.now - state.alone_since > patience:
        turn.end("failed", f"fewer than {views.floor(state)} nodes for {waited}")


def go_when_recorded(turn: Turn) -> None:
    """Start the group once its store is open, its snapshots are in place and enough nodes of the former groups have its
    proposal on disk.
    """
    state = turn.state
    recorded = state.disks(state.recorded)
    has_votes = lacking(state.groups[:-1], recorded, state.given_up) is None
    if state.port is not None and has_votes and snapshots.are_in_place(turn):
        _go(turn, state.port)


def _go(turn: Turn, port: int) -> None:
    """Order every member to start its workers, with ranks in inventory order (torch's agents assign their own)."""
    state = turn.state
    spec = state.spec
    turn.set(groups=(dataclasses.replace(state.groups[-1], formed=True),), given_up=frozenset())
    send_away(turn)
    nodes = [turn.node(name) for name in state.members]
    world = sum(node.nproc for node in nodes)
    joining = rendezvous_of(state, port)
    patience = STARTED_TIMEOUT_S + (_join_timeout(state) if joining is not None else 0.0)
    turn.mark("go")
    turn.set(phase=s.STARTING, waiting=frozenset(state.members), deadline=turn.now + patience, rendezvous=joining)
    ranks: dict[int, s.Rank] = {}
    plan = []
    for group_rank, node in enumerate(nodes):
        base = len(ranks)
        for local_rank in range(node.nproc):
            ranks[base + local_rank] = s.Rank(base + local_rank, node.name, local_rank)
        plan.append({"node": node.name, "group_rank": group_rank, "base_rank": base, "nproc": node.nproc})
        turn.send(
            node.name,
            "go",
            generation=state.generation,
            group_rank=group_rank,
            base_rank=base,
            local_world_size=node.nproc,
            world_size=world,
            group_world_size=len(nodes),
            master_addr=nodes[0].spec.address,
            master_port=port,
            restart_count=state.generation,
            max_restarts=spec.max_restarts,
            rendezvous=None if joining is None else {**joining, "local_addr": node.spec.address},
            set_env=dict(state.env),
            tree=tree_of(state),
        )
    turn.set(ranks=ranks)
    turn.emit(
        EventType.GENERATION_STARTED,
        world_size=world,
        members=plan,
        master=f"{nodes[0].spec.address}:{port}",
        restarts=state.restarts,
        fingerprint=state.fingerprint,
        suspects=list(state.suspects),
        rendezvous=joining,
        env=dict(state.env),
        tree=state.trees[-1].digest if state.trees else None,
    )


def running_when_all_are(turn: Turn) -> None:
    """Call the generation running once every rank is in the user's main, and say how long each phase took."""
    state = turn.state
    if state.phase != s.STARTING or state.waiting or len(state.mains) < len(state.ranks):
        return
    turn.mark("running")
    turn.set(phase=s.RUNNING, deadline=None, watch=hang_watch.fresh(state.watch, turn.now))
    detail: dict[str, Any] = {**phases.note_running(turn), "world_size": state.world_size or len(state.ranks)}
    detail["pids"] = {str(rank.rank): rank.pid for rank in state.ranks.values()}
    cold = {name: turn.node(name).cold for name in state.members}
    detail["starts"] = {name: {"warm": not why, "why": why} for name, why in cold.items() if why is not None}
    turn.emit(EventType.GENERATION_RUNNING, **detail)
    phases.note_group(turn)


def send_away(turn: Turn) -> None:
    """Let removed nodes exit, unless a group that may have formed contains them: the next may need their votes."""
    state = turn.state
    for name, node in state.nodes.items():
        if node.leaves and node.connected and not any(name in group.members for group in state.groups):
            turn.set_node(name, leaves=False)
            turn.send(name, "leave", reason="it was removed from the job")


def is_full(state: s.State, name: str) -> bool:
    """Return whether there is a group, which does not contain that node and has no room for it."""
    active = state.phase in (s.PREPARING, s.STARTING, s.RUNNING)
    return active and name not in state.members and len(state.members) >= state.spec.max_nodes


def admit(turn: Turn, name: str, cause: StopCause) -> None:
    """Take a ready node that is not in the running group into a new generation, if there is room.

    One that still has workers of an older group is admitted when they are gone; a spare where a node is absent.
    """
    state, node = turn.state, turn.node(name)
    active = state.phase in (s.PREPARING, s.STARTING, s.RUNNING)
    room = {"ready": state.spec.max_nodes, "spare": views.limit(state)}.get(node.status, 0)
    kept_out = node.cordoned and node.status == "spare"
    outside = name not in state.members and node.ready and node.running is None and not kept_out
    if active and outside and len(state.members) < room:
        stop_group(turn, cause)


def _join_timeout(state: s.State) -> float:
    """Return how many seconds torch's agents wait for each other."""
    conf = read_conf(state.spec.rendezvous.conf if state.spec.rendezvous is not None else "")
    try:
        return float(conf.get("join_timeout", JOIN_TIMEOUT_S))
    except ValueError:
        return JOIN_TIMEOUT_S


def tree_of(state: s.State) -> str | None:
    """Return the work tree from which the group starts; None: the one that is in place."""
    return state.trees[-1].digest if state.trees else None


def opener_of(state: s.State) -> tuple[str, Args] | None:
    """Return the node that opens the group's store, and the order to do so; None when another process serves it."""
    first = next(iter(state.members))
    order: dict[str, Any] = {"generation": state.generation, "host": state.nodes[first].spec.address}
    asked = state.spec.rendezvous
    if asked is None:
        return first, order
    if asked.backend not in ("c10d", "static"):
        return None
    # torch's static agent opens its store itself: it only needs a port.
    held = {"hold": asked.backend == "c10d"}
    if not asked.endpoint:
        return first, {**order, **held, "port": 0}
    host, port = split_endpoint(asked.endpoint, PORTS[asked.backend])
    ours = [name for name in state.members if host in (name, state.nodes[name].spec.address)]
    if not ours:
        return None
    return ours[0], {"generation": state.generation, "host": state.nodes[ours[0]].spec.address, **held, "port": port}


def rendezvous_of(state: s.State, port: int) -> dict[str, Any] | None:
    """Return how others can join this group: backend, endpoint, run_id, nnodes; None for a group of our own.

    `port`: of the store that we opened, 0 if we did not open it.
    """
    asked = state.spec.rendezvous
    if asked is None:
        return None
    opened = opener_of(state)
    endpoint = f"{opened[1]['host']}:{port}" if opened is not None else asked.endpoint
    # If the store outlives a group, torch closes the run in it for good when an agent leaves.
    suffix = f".{state.generation}" if state.generation and (opened is None) else ""
    nnodes = asked.nnodes or str(len(state.members))
    return {
        "backend": asked.backend,
        "endpoint": endpoint,
        "run_id": f"{asked.run_id}{suffix}",
        "nnodes": nnodes,
        "conf": asked.conf,
        "is_ours": opened is not None,
    }
