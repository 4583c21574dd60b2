"""The requests of operators that change the job: restart, remove, add, cordon, stop.

In: a request from the wire; a Turn. Out: inputs of the state machine; a Reply, and the stop of the group
where one follows. A new verb is an input, its handler, and one line of VERBS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from remote_agent.coordinator import code_version, environment, formation, inputs, policy
from remote_agent.coordinator import state as s
from remote_agent.coordinator.transitions import Turn, stop_group
from remote_agent.snapshots.choice import WHICH_THERE_ARE
from remote_agent.wire import Args, NodeSpec, Problem
from remote_agent.wire.events import EventType, StopCause

if TYPE_CHECKING:
    from remote_agent.wire.documents import RequestReply

CORDONED = "cordoned: `supervisor uncordon` or `add` admits it again"
# A start that takes longer may be stuck, and the operator wants a new one.
JUST_BEGUN_S = 5.0
ACTIVE = (s.PREPARING, s.STARTING, s.RUNNING)
Named = tuple[str, inputs.Input]
"""An input and the node that it concerns, "" for the whole job."""


def _over(turn: Turn) -> bool:
    state = turn.state
    if state.phase != s.ENDED:
        return False
    if state.ended is None:
        turn.refuse("moved", "the coordinator is moving to another node", "try again in a moment")
    else:
        turn.refuse("over", f"the job is over: {state.ended}")
    return True


def _known(turn: Turn, name: str) -> bool:
    if name in turn.state.nodes:
        return True
    turn.refuse("unknown_node", f"no node {name!r} in this job", "its nodes: " + " ".join(turn.state.nodes))
    return False


def on_restart(turn: Turn, event: inputs.Restart) -> None:
    """Set variables for future groups, and restart the whole group, free of charge."""
    if _over(turn) or not (code_version.change(turn, event) if event.tree else _set(turn, event.env, event.operator)):
        return
    if event.later:
        turn.reply(f"it applies from generation {turn.state.env_from} on")
        return
    if event.snapshot:
        if not any(one["id"] == event.snapshot for node in turn.state.nodes.values() for one in node.snapshots):
            turn.refuse("no_snapshot", f"no node has snapshot {event.snapshot}", WHICH_THERE_ARE)
            return
        turn.set(resume_from=event.snapshot)
    changes = bool(event.env or event.tree or event.snapshot)
    if not changes and _has_just_begun(turn):
        turn.commands.append(s.Reply(True, "a new generation is already starting", turn.state.generation))
        return
    turn.emit(EventType.RESTART_REQUESTED, operator=event.operator, snapshot=event.snapshot or None)
    if turn.state.phase not in ACTIVE:
        turn.reply("a new generation is already being formed")
        return
    turn.reply("the group restarts")
    turn.mark("cause")
    stop_group(turn, StopCause.RESTART)


def _has_just_begun(turn: Turn) -> bool:
    """Return whether the start of a group has only just begun: one more restart would change nothing."""
    state = turn.state
    since = state.marks.get("go", turn.now) if state.phase == s.STARTING else turn.now
    return state.phase in (s.PREPARING, s.STARTING) and turn.now - since < JUST_BEGUN_S


def _set(turn: Turn, env: Mapping[str, str | None], operator: str) -> bool:
    """Set variables (None: restore the value of the launch); return whether all of them were accepted."""
    state = turn.state
    for name, value in env.items():
        refused = environment.refusal(name, value)
        if refused:
            turn.refuse("not_settable", refused, "give it at the launch: `supervisor up --env`, or in HOSTS")
            return False
    changed = {**state.env, **env}
    kept = {name: value for name, value in changed.items() if value is not None}
    if env:
        # A group that is being prepared has not got its environment yet.
        turn.set(env=kept, env_from=state.generation + (state.phase != s.PREPARING))
        turn.emit(EventType.ENVIRONMENT_SET, env=kept, from_generation=turn.state.env_from, operator=operator)
    return True


def on_remove(turn: Turn, event: inputs.Remove) -> None:
    """Continue without a node; its workers get SIGTERM first, so that the script can save."""
    if _over(turn) or not _known(turn, event.node):
        return
    state = turn.state
    if turn.node(event.node).status in ("removed", "draining"):
        turn.refuse("done", f"{event.node} is already {turn.node(event.node).status}")
        return
    others = [name for name in state.members if name != event.node and name not in state.leaving]
    if state.members and not others:
        turn.refuse("last_node", f"{event.node} is the last node of the job", "end the job with: supervisor stop")
        return
    if event.node == state.me and policy.successor(state) is None:
        turn.refuse("no_successor", f"{event.node} holds the coordinator and no other node is ready to take over")
        return
    turn.emit(EventType.REMOVE_REQUESTED, node=event.node, operator=event.operator)
    if event.node in state.members and state.phase in (*ACTIVE, s.STOPPING):
        turn.reply(f"{event.node} drains")
        turn.set(leaving=state.leaving | {event.node})
        turn.set_node(event.node, status="draining", reason="removed by an operator")
        stop_group(turn, StopCause.REMOVED)
        return
    turn.reply(f"{event.node} is removed")
    policy.remove(turn, event.node)
    if event.node == state.me:
        policy.hand_over(turn)


def on_add(turn: Turn, event: inputs.Add) -> None:
    """Admit a node that is connected and ready; until then the old group continues."""
    if _over(turn):
        return
    state = turn.state
    name = event.spec.name
    node = state.nodes.get(name)
    if node is None or not node.connected or not node.ready:
        hint = "its agent must run first; `supervisor add` starts it"
        if state.spec.endpoint:
            hint = f"start torchrun there first, with --rdzv-id {state.spec.job}"
        turn.refuse("not_ready", f"{name} is not ready", hint)
        return
    if node.status == "draining":
        turn.refuse("leaving", f"{name} is being removed", "add it once it has been removed")
        return
    if name in state.members and node.status == "running" and state.phase != s.FORMING:
        turn.refuse("done", f"{name} is already in the group")
        return
    spec = dataclasses.replace(event.spec, spare=False)
    turn.set_node(name, spec=spec, status="ready", reason=None, losses=(), cordoned=False)
    turn.set(blames=tuple(blame for blame in state.blames if blame[1] != name))
    turn.set(suspects=tuple(suspect for suspect in state.suspects if suspect != name))
    # The environment is left out because it may hold secrets; only the node's own agent needs it.
    public = dataclasses.asdict(dataclasses.replace(spec, env={}))
    turn.emit(EventType.NODE_ADDED, node=name, nproc=node.nproc, spec=public, operator=event.operator)
    # Others may have been added a moment ago, and wait for the same new group.
    room = len({*state.members, *(one.name for one in turn.state.nodes.values() if one.status == "ready")})
    if room > state.spec.max_nodes:
        turn.set(spec=dataclasses.replace(turn.state.spec, max_nodes=room))
    turn.reply(f"{name} joins")
    if state.phase in ACTIVE:
        stop_group(turn, StopCause.ADDED)


def on_cordon(turn: Turn, event: inputs.Cordon) -> None:
    """Cordon or uncordon a node: outside the group it is then not admitted, inside it stays across restarts."""
    if _over(turn) or not _known(turn, event.node):
        return
    name, node = event.node, turn.node(event.node)
    if node.cordoned == event.on or node.status == "removed":
        what = "removed" if node.status == "removed" else "already cordoned" if event.on else "not cordoned"
        turn.refuse("done", f"{name} is {what}")
        return
    outside = name not in turn.state.members
    turn.set_node(name, cordoned=event.on)
    if event.on and node.status == "ready" and outside:
        turn.set_node(name, status="spare", reason=CORDONED)
    elif not event.on and node.status == "spare" and not node.spec.spare:
        full = formation.is_full(turn.state, name)
        turn.set_node(name, status="spare" if full else "ready", reason=formation.FULL if full else None)
    kind = EventType.NODE_CORDONED if event.on else EventType.NODE_UNCORDONED
    turn.emit(kind, node=name, operator=event.operator, status=turn.node(name).status)
    keeps = "is not admitted" if outside else "stays until it leaves the group, and is not admitted again"
    turn.reply(f"{name} {keeps if event.on else 'may be admitted again'}")
    if not event.on:
        formation.admit(turn, name, StopCause.RETURNED)


def on_stop(turn: Turn, event: inputs.Stop) -> None:
    """End the job."""
    if _over(turn):
        return
    turn.reply("the job is being stopped")
    if event.preempted and turn.state.preempted and not event.kill:
        # Every node of the allocation reports it.
        return
    turn.emit(EventType.STOP_REQUESTED, operator=event.operator, kill=event.kill, reason=event.preempted)
    if event.preempted:
        turn.set(preempted=event.preempted)
    if turn.state.phase == s.FORMING:
        policy.end_stopped(turn)
    else:
        stop_group(turn, StopCause.STOP, kill=event.kill)


def read(op: str, args: Args, state: s.State) -> list[Named]:
    """Return the inputs that a request stands for, with the node of each; raises Problem."""
    expected = args.get("if_generation")
    if expected is not None and not args.get("later") and expected != state.generation:
        raise Problem("stale", f"generation {expected} is over: the job is in generation {state.generation}")
    if op not in VERBS:
        raise Problem("unknown_op", f"no such request: {op[:40]}")
    return VERBS[op].read(args, state)


def _names(args: Args) -> list[str]:
    return [str(name) for name in args.get("nodes") or [args.get("node", "")]]


def _operator(args: Args) -> str:
    return str(args.get("operator", ""))


def _read_restart(args: Args, state: s.State) -> list[Named]:
    env = {str(name): None if value is None else str(value) for name, value in dict(args.get("env") or {}).items()}
    later, without = bool(args.get("later")), tuple(str(name) for name in args.get("without", ()))
    tree, change = str(args.get("tree") or ""), args.get("change") or {}
    snapshot = str(args.get("snapshot") or "")
    return [("", inputs.Restart(_operator(args), env, later, tree, change, without, snapshot))]


def _read_remove(args: Args, state: s.State) -> list[Named]:
    # The coordinator's own node comes last: the role leaves with it.
    names = sorted(_names(args), key=lambda name: name == state.me)
    return [(name, inputs.Remove(name, _operator(args))) for name in names]


def _read_add(args: Args, state: s.State) -> list[Named]:
    names = _names(args)
    specs = {name: node.spec for name, node in state.nodes.items()}
    new = [NodeSpec(**spec) for spec in args.get("specs") or [args.get("spec")] if spec is not None]
    specs.update({spec.name: spec for spec in new})
    for name in names:
        if name not in specs:
            raise Problem("unknown_node", f"no node {name!r} in this job")
    if len(names) > 1 and not args.get("late"):
        _refuse_unready(state, names)
    return [(name, inputs.Add(specs[name], _operator(args))) for name in names]


def _refuse_unready(state: s.State, names: Iterable[str]) -> None:
    """Raise Problem while one of several nodes is not ready: adding them together costs one restart."""
    known = [state.nodes.get(name) for name in names]
    if not all(node is not None and node.connected and node.ready for node in known):
        raise Problem("not_ready", "not all of the nodes are ready")


def _read_cordon(on: bool, args: Args, state: s.State) -> list[Named]:
    return [(name, inputs.Cordon(name, on, _operator(args))) for name in _names(args)]


def _read_stop(args: Args, state: s.State) -> list[Named]:
    return [("", inputs.Stop(bool(args.get("kill")), _operator(args), str(args.get("preempted") or "")))]


def answer(replies: Sequence[tuple[str, s.Reply | None]]) -> RequestReply:
    """Return the answer to a request, with an entry for each of several nodes; raises Problem for a refusal."""
    answers = [(name, reply) for name, reply in replies if reply is not None]
    accepted = [reply for _, reply in answers if reply.accepted]
    if not accepted:
        refused = answers[0][1] if answers else s.Reply(False, "no reply", kind="internal")
        raise Problem(refused.kind, "; ".join(reply.message for _, reply in answers) or refused.message, refused.hint)
    message = "; ".join(reply.message for reply in accepted)
    whole: RequestReply = {"accepted": True, "message": message, "generation": accepted[-1].generation}
    if len(answers) > 1:
        whole["nodes"] = {
            name: {"accepted": reply.accepted, "message": reply.message, "hint": reply.hint} for name, reply in answers
        }
    return whole


class Verb(NamedTuple):
    """One request that changes the job."""

    read: Callable[[Args, s.State], list[Named]]
    """Reads its arguments; raises Problem."""
    kind: type
    """The input that it becomes."""
    handle: Callable[[Turn, Any], None]
    """What the state machine does with that input."""


VERBS: dict[str, Verb] = {
    "restart": Verb(_read_restart, inputs.Restart, on_restart),
    "remove": Verb(_read_remove, inputs.Remove, on_remove),
    "add": Verb(_read_add, inputs.Add, on_add),
    "cordon": Verb(partial(_read_cordon, True), inputs.Cordon, on_cordon),
    "uncordon": Verb(partial(_read_cordon, False), inputs.Cordon, on_cordon),
    "stop": Verb(_read_stop, inputs.Stop, on_stop),
}
