"""One turn of the coordinator: the state as it changes, the commands so far, and the moves several handlers share.

In: a State and now. Out: the changed State and its commands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from remote_agent.coordinator import state as s
from remote_agent.coordinator.quorum import lacking
from remote_agent.diagnose.incidents import after_event, iso_time
from remote_agent.wire.events import EventType, StopCause

if TYPE_CHECKING:
    from remote_agent.diagnose.hang.pulses import Pulse
    from remote_agent.wire.documents import RankExit

# A node that is lost this often in this time is left out until an operator adds it again.
QUARANTINE_LOSSES = 3
# An operator may take this long to notice. A node that fails less often is better kept than left out.
QUARANTINE_WINDOW_S = 600.0
WITHIN = f"in {QUARANTINE_WINDOW_S / 60:.0f} minutes"
# In addition to the grace period, stacks are collected, workers are reaped, and the report is sent.
STOP_MARGIN_S = 45.0
# A node is lost for this reason if the coordinator is new, or was suspended, and the node has not joined again.
NOT_JOINED = "it did not join the coordinator"
# The number of warnings of one kind is limited: a NaN loss reaches all ranks, and the first few are enough.
MAX_WARNINGS = 8
# The grace period when an operator asks for an immediate end.
KILL_GRACE_S = 0.0


# Sets of the state that grow and shrink by one.
Named = Literal["waiting", "recorded"]
Numbered = Literal["mains", "grouping", "grouped"]


class Turn:
    """The coordinator's state during the events that are taken together; only `run` makes one.

    A collection of the state is copied once, when a turn first changes it: a thousand nodes cost one copy.
    """

    def __init__(self, state: s.State, now: float, wall_ns: int = 0) -> None:
        self.state = state
        self.now = now
        self.wall_ns = wall_ns
        self.commands: list[s.Command] = []
        self.may_go = False
        """Something has come for which the start of the group waited."""
        self._copied: set[str] = set()
        self._numbers: dict[str, list[int]] | None = None
        """The numbers of the ranks of each node, once they are wanted."""

    def set(self, **changes: Any) -> None:
        """Change fields of the state."""
        self.state = dataclasses.replace(self.state, **changes)
        self._copied.difference_update(changes)
        self._numbers = None if "ranks" in changes else self._numbers

    def _own(self, name: str, kind: type) -> Any:
        """Return a collection of the state that belongs to this turn."""
        if name not in self._copied:
            self.state = dataclasses.replace(self.state, **{name: kind(getattr(self.state, name))})
            self._copied.add(name)
        return getattr(self.state, name)

    def node(self, name: str) -> s.Node:
        """Return a node that is known."""
        return self.state.nodes[name]

    def set_node(self, name: str, **changes: Any) -> None:
        """Change fields of a node."""
        self._own("nodes", dict)[name] = dataclasses.replace(self.state.nodes[name], **changes)

    def set_rank(self, rank: s.Rank) -> None:
        """Note what is known of a rank."""
        if rank.rank not in self.state.ranks:
            self._numbers = None
        self._own("ranks", dict)[rank.rank] = rank

    def kill_ranks(self, node: str) -> None:
        """Note that the ranks of a node that still lived are dead."""
        if self._numbers is None:
            # Many nodes may be lost together.
            self._numbers = self.state.ranks_per_node()
        for number in self._numbers.get(node, ()):
            rank = self.state.ranks[number]
            if rank.state in ("starting", "running"):
                self.set_rank(dataclasses.replace(rank, state="killed"))

    def add_pulses(self, node: str, ranks: Mapping[int, Pulse]) -> None:
        """Note a node's answer in this round of pulses."""
        watch = self.state.watch
        if "watch" not in self._copied:
            watch = dataclasses.replace(watch, asked=set(watch.asked), now=dict(watch.now))
            self.set(watch=watch)
            self._copied.add("watch")
        cast("set[str]", watch.asked).discard(node)
        cast("dict[int, Pulse]", watch.now).update(ranks)

    def add(self, field: Named | Numbered, *values: object) -> None:
        """Add to a set of the state."""
        self._own(field, set).update(values)

    def discard(self, field: Named | Numbered, value: object) -> None:
        """Take something out of a set of the state."""
        self._own(field, set).discard(value)

    def go_soon(self) -> None:
        """Start the prepared group after the last event, if it waits for nothing else."""
        self.may_go = True

    def mark(self, name: str) -> None:
        """Remember when a phase of the restart was reached."""
        self.set(marks={**self.state.marks, name: self.now})

    def emit(self, kind: EventType, /, *, node: str | None = None, rank: int | None = None, **detail: Any) -> None:
        """Write a fact about the newest generation to the journal."""
        self.write(s.Emit(kind, self.state.generation, node, rank, detail))

    def write(self, fact: s.Emit) -> None:
        """Write a fact to the journal; the newest incident changes with it, as in a state read from the journal."""
        self.commands.append(fact)
        self.set(incident=after_event(self.state.incident, fact.record(0, iso_time(self.wall_ns))))

    def warn(self, node: str, rank: int | None, kind: str, message: str) -> None:
        """Write a warning about a rank or node to the journal: once per kind, at most MAX_WARNINGS per kind."""
        known = self.state.warnings
        if (node, rank, kind) not in known and sum(each == kind for *_, each in known) < MAX_WARNINGS:
            self.set(warnings={**known, (node, rank, kind): message})
            self.emit(EventType.WARNING, node=node, rank=rank, kind=kind, message=message)

    def send(self, node: str, op: str, **args: Any) -> None:
        """Give a node an order."""
        self.commands.append(s.Send(node, op, args))

    def reply(self, message: str) -> None:
        """Accept the operator's request; it leads to the next generation."""
        self.commands.append(s.Reply(True, message, self.state.generation + 1))

    def refuse(self, kind: str, message: str, hint: str = "") -> None:
        """Refuse the operator's request."""
        self.commands.append(s.Reply(False, message, self.state.generation, kind, hint))

    def record_exit(self, node: str, ended: RankExit) -> bool:
        """Note how a rank ended, once; return whether it failed by itself."""
        number = int(ended["rank"])
        known = self.state.ranks.get(number)
        if number in self.state.exits or (known is not None and known.state in ("succeeded", "failed", "killed")):
            return False
        code, signal, ours = ended.get("code"), ended.get("signal"), bool(ended.get("stopped_by_us"))
        failed = code != 0 and not ours
        outcome = "succeeded" if code == 0 else "failed" if failed else "killed"
        rank = s.Rank(number, node, int(ended["local_rank"] or 0), ended.get("pid"), outcome, code, signal)
        self.set_rank(rank)
        if code != 0:
            self._own("exits", dict)[number] = {**ended, "node": node}
        elif not ours:
            # If others fail later, this rank may have exited too early; its output does not matter.
            self._own("exits", dict)[number] = {**ended, "node": node, "error": None, "tail": "", "nccl": ""}
        if failed:
            error = ended.get("error")
            self.emit(
                EventType.RANK_FAILED,
                node=node,
                rank=number,
                local_rank=rank.local_rank,
                pid=rank.pid,
                exit={"code": code, "signal": signal},
                sent=ended.get("sent"),
                time_ns=ended.get("t_ns"),
                shift_ns=ended.get("shift_ns", 0),
                raised_ns=error["timestamp_ns"] if error else None,
                over_ns=ended.get("over_ns"),
                message=error["message"] if error else None,
                notes=ended.get("notes", []),
            )
        return failed

    def end(self, how: str, reason: str) -> None:
        """End the job: succeeded, failed or stopped.

        If the nodes in reach are no quorum, the others may form a group without them, unaware of the end.
        """
        untold = self._untold()
        reason += f"; {' '.join(untold)} cannot be reached and may continue" if untold else ""
        self.set(phase=s.ENDED, ended=how, deadline=None, failure=reason if how == "failed" else None)
        detail: dict[str, Any] = {"untold": untold} if untold else {}
        self.emit(EventType(f"job_{how}"), reason=reason, restarts=self.state.restarts, **detail)
        for name, node in self.state.nodes.items():
            if node.connected:
                self.send(name, "end", state=how)
            if node.status in ("running", "draining"):
                self.set_node(name, status="ready")

    def _untold(self) -> list[str]:
        """Return the nodes out of reach that may form the next group; none while those in reach are a quorum."""
        state = self.state
        reached = state.disks([name for name, node in state.nodes.items() if node.connected or name == state.me])
        group = lacking(state.groups, reached, state.given_up)
        return sorted(set(group.members) - set(reached)) if group is not None and state.groups else []


def with_remedy(name: str, reason: str) -> str:
    """Return why a node is left out for good, and what an operator does once it is repaired."""
    return f"{reason}; `supervisor add --node {name}` brings it back"


def fail_node(turn: Turn, name: str, reason: str) -> None:
    """Leave a node without workers out until an operator adds it; its agent stays."""
    reason = with_remedy(name, reason)
    turn.set_node(name, status="failed", reason=reason)
    turn.emit(EventType.NODE_FAILED, node=name, reason=reason, status="failed")


def stop_group(turn: Turn, cause: StopCause, age: float = 0.0, kill: bool = False) -> None:
    """Order every live member to stop its workers; `age`: seconds since what caused it."""
    state = turn.state
    if state.phase == s.STOPPING:
        if cause == StopCause.STOP:
            turn.set(cause=cause)
        if kill:
            _order_stop(turn, grace=KILL_GRACE_S, collect=False)
        return
    grace = KILL_GRACE_S if kill else state.spec.stop_grace
    # If the group never ran, the mark would belong to the previous group.
    running = {name: at for name, at in state.marks.items() if name == "running" and state.phase == s.RUNNING}
    turn.set(
        phase=s.STOPPING,
        cause=cause,
        waiting=frozenset(name for name in state.members if state.nodes[name].connected),
        deadline=turn.now + grace + STOP_MARGIN_S,
        marks={"cause": turn.now - age, "stop": turn.now, **running},
    )
    _order_stop(turn, grace, collect=cause in (StopCause.FAILURE, StopCause.NODE_LOST))


def _order_stop(turn: Turn, grace: float, collect: bool) -> None:
    for name in turn.state.members:
        if turn.node(name).connected:
            turn.send(name, "stop", generation=turn.state.generation, grace_s=grace, collect=collect)


def give_up_on(turn: Turn, name: str, reason: str) -> None:
    """Exclude a node from future groups; its agent is alive, so we still wait until its workers are gone."""
    node, state, reason = turn.node(name), turn.state, with_remedy(name, reason)
    turn.set_node(name, status="failed", reason=reason)
    alive_ns = turn.wall_ns - int((turn.now - node.seen) * 1e9)
    turn.emit(EventType.NODE_LOST, node=name, reason=reason, status="failed", alive_ns=alive_ns)
    turn.set(lost={**state.lost, name: (alive_ns, reason)})


def _with_loss(losses: tuple[float, ...], now: float, node_timeout: float) -> tuple[float, ...]:
    recent = tuple(when for when in losses if now - when < QUARANTINE_WINDOW_S)
    # One outage may break several connections, one after the other: within a node_timeout they are one loss.
    return recent if recent and now - recent[-1] < node_timeout else (*recent, now)


def lose_node(turn: Turn, name: str, reason: str, *, status: str = "lost") -> None:
    """Take a node out: it is dead, cut off, or unable; its group continues without it."""
    node = turn.node(name)
    if node.status in ("removed", "lost", "failed"):
        turn.set_node(name, connected=False, ready=False, running=None)
        if turn.state.phase == s.STOPPING:
            # It was already lost, but the stop still waited for it.
            turn.discard("waiting", name)
        return
    losses = _with_loss(node.losses, turn.now, turn.state.spec.node_timeout)
    if len(losses) >= QUARANTINE_LOSSES and status == "lost":
        status, reason = "failed", f"quarantined: lost {len(losses)} times {WITHIN}, last: {reason}"
    if node.status == "draining":
        status = "removed"
    reason = with_remedy(name, reason) if status == "failed" else reason
    changes = {"connected": False, "ready": False, "running": None}
    turn.set_node(name, status=status, reason=reason, losses=losses, **changes)
    kind = EventType.NODE_FAILED
    if status == "removed":
        kind = EventType.NODE_REMOVED
    elif node.incarnation:
        kind = EventType.NODE_LOST
    alive_ns = turn.wall_ns - int((turn.now - node.seen) * 1e9)
    state = turn.state
    said = [[rank, text] for rank, text in node.said] if name in state.members else []
    turn.emit(kind, node=name, reason=reason, status=status, alive_ns=alive_ns if node.incarnation else None, said=said)
    if name not in state.members or state.phase not in (s.PREPARING, s.STARTING, s.RUNNING, s.STOPPING):
        return
    if status != "removed":
        turn.set(lost={**state.lost, name: (alive_ns, reason)})
    turn.kill_ranks(name)
    if state.phase != s.STOPPING:
        stop_group(turn, StopCause.NODE_LOST)
        return
    turn.discard("waiting", name)
