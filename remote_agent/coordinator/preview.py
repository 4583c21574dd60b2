"""What a request would lead to: the state machine run on a copy, with members that carry out every order at once.

In: a status document, a verb and its nodes. Out: the state before, the state once the next group is ordered to start,
and the coordinator's replies.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.coordinator import inputs, policy
from remote_agent.coordinator import state as s
from remote_agent.coordinator.machine import step
from remote_agent.coordinator.operator_requests import ACTIVE, VERBS
from remote_agent.coordinator.quorum import Group, first
from remote_agent.wire import JobSpec, NodeSpec
from remote_agent.wire.events import ENDED_STATES, LIVE_RANKS, EventType

if TYPE_CHECKING:
    from remote_agent.wire.documents import NodeStatus, Status


class Preview(NamedTuple):
    """The state before a request and after it."""

    before: s.State
    after: s.State
    replies: tuple[s.Reply, ...]

    @property
    def members(self) -> tuple[str, ...]:
        """The nodes of the next group in group rank order; none where no group can be formed."""
        return tuple(self.after.members) if self.after.phase in ACTIVE else ()


def preview(status: Status, op: str, names: Sequence[str]) -> Preview:
    """Return what `op` of these nodes leads to; nodes to be added count as ready, as they are brought up first."""
    before = state = _read_status(status)
    if op == "add":
        for name in names:
            node = state.nodes.get(name, s.Node(NodeSpec(name, "")))
            node = dataclasses.replace(node, connected=True, ready=True)
            state = dataclasses.replace(state, nodes={**state.nodes, name: node})
    waiting = deque(event for _, event in VERBS[op].read({"nodes": list(names)}, state))
    replies: list[s.Reply] = []
    while waiting:
        state, commands = step(state, waiting.popleft(), 0.0)
        for command in commands:
            if isinstance(command, s.Reply):
                replies.append(command)
            elif isinstance(command, s.HandOver):
                # The successor forms the next group.
                state = dataclasses.replace(state, me=command.node, phase=s.FORMING, ended=None)
            waiting.extend(_carried_out(command, state))
    return Preview(before, state, tuple(replies))


def _carried_out(command: s.Command, state: s.State) -> Iterator[inputs.Input]:
    """Return what follows once a command is carried out."""
    if isinstance(command, s.HandOver):
        yield inputs.Tick()
    elif isinstance(command, s.Judge):
        yield policy.judged(command)
    elif isinstance(command, s.Emit) and command.type is EventType.GENERATION_PROPOSED:
        for name, node in state.nodes.items():
            if node.connected:
                yield inputs.Recorded(name, command.generation, state.term)
    elif isinstance(command, s.Send) and command.op == "stop":
        yield inputs.Idle(command.node, int(command.args["generation"]))
    elif isinstance(command, s.Send) and command.op == "prepare":
        yield inputs.Prepared(command.node, int(command.args["generation"]), 1)


def _read_status(status: Status) -> s.State:
    """Return the coordinator's state as far as its status document shows it."""
    described = list(status.get("nodes") or ())
    generation = int(status.get("generation", -1))
    grouped = [node for node in described if node.get("group_rank") is not None and node.get("ranks")]
    members = tuple(node["name"] for node in sorted(grouped, key=lambda node: node["group_rank"] or 0))
    ranks = {
        int(rank["rank"]): s.Rank(int(rank["rank"]), str(node["name"]), number, rank.get("pid"), str(rank.get("state")))
        for node in grouped
        for number, rank in enumerate(node.get("ranks") or ())
    }
    phase = s.FORMING
    if status.get("state") in ENDED_STATES:
        phase = s.ENDED
    elif any(rank.state in LIVE_RANKS for rank in ranks.values()):
        phase = s.RUNNING
    spec = JobSpec(
        job=str(status.get("job", "")),
        script="",
        nodes=(),
        min_nodes=int(status.get("min_nodes") or 1),
        max_nodes=int(status.get("max_nodes") or len(described) or 1),
    )
    me = str(status.get("coordinator") or "")
    group = Group(generation, 0, dict.fromkeys(members, ""), (me, ""), formed=True)
    return s.State(
        spec=spec,
        me=me,
        term=0,
        nodes={str(node["name"]): _read_node(node, generation) for node in described},
        phase=phase,
        generation=generation,
        members=s.ranked(members),
        ranks=ranks,
        groups=(group,) if members else first(me, ""),
        ended=status["state"] if phase == s.ENDED else None,
    )


def _read_node(node: NodeStatus, generation: int) -> s.Node:
    state = str(node.get("state", ""))
    connected = state in ("ready", "running", "draining", "spare")
    ranks = node.get("ranks") or ()
    return s.Node(
        NodeSpec(str(node["name"]), str(node.get("address", "")), spare=bool(node.get("spare"))),
        nproc=int(node.get("nproc") or 0) or len(ranks),
        status=state,
        reason=node.get("reason"),
        connected=connected,
        ready=connected and not node.get("lacks_tree"),
        running=generation if connected and ranks and state in ("running", "draining") else None,
        cordoned=bool(node.get("cordoned")),
    )
