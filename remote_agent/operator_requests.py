"""What operators ask of the coordinator: restart, remove, add, cordon, stop.

In: a Turn and the request. Out: a Reply, and the stop of the group where it follows.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remote_agent import formation, inputs, policy, trees
from remote_agent import state as s
from remote_agent.turn import Turn, stop_group
from remote_agent.wire import Problem

CORDONED = "cordoned: `supervisor uncordon` or `add` takes it in again"
# Their values are told by the journal, so nothing else may be set this way: it could be a secret.
SETTABLE = re.compile(r"(NCCL|TORCH|GLOO)_[A-Z0-9_]+")
VALUE_MAX = 1024
ACTIVE = (s.PREPARING, s.STARTING, s.RUNNING)


def _over(turn: Turn) -> bool:
    state = turn.state
    if state.phase != s.ENDED:
        return False
    turn.refuse("over", f"the job is over: {state.ended or 'its coordinator moved'}")
    return True


def _known(turn: Turn, name: str) -> bool:
    if name in turn.state.nodes:
        return True
    turn.refuse("unknown_node", f"no node {name!r} in this job", "its nodes: " + " ".join(turn.state.nodes))
    return False


def on_restart(turn: Turn, event: inputs.Restart) -> None:
    """Set variables for the groups to come, and restart the whole group, free of charge."""
    if _over(turn) or not (trees.change(turn, event) if event.tree else _set(turn, event.env, event.operator)):
        return
    if event.later:
        turn.reply(f"it holds from generation {turn.state.env_from} on")
        return
    turn.emit("restart_requested", operator=event.operator)
    if turn.state.phase not in ACTIVE:
        turn.reply("a new generation is being formed already")
        return
    turn.reply("the group restarts")
    turn.mark("cause")
    stop_group(turn, "restart")


def _set(turn: Turn, env: Mapping[str, str | None], operator: str) -> bool:
    """Take variables in, None: the launch's value holds again; returns whether nothing was refused."""
    state = turn.state
    for name, value in env.items():
        if not SETTABLE.fullmatch(name):
            hint = "secrets stay out of the journal: give others to `supervisor up --env`, or in HOSTS"
            turn.refuse("not_settable", f"{name}: only NCCL_*, TORCH_* and GLOO_* can be set while a job runs", hint)
            return False
        if value is not None and (len(value) > VALUE_MAX or not value.isprintable()):
            turn.refuse("not_settable", f"{name}: its value is longer than {VALUE_MAX} or not printable")
            return False
    changed = {**state.env, **env}
    kept = {name: value for name, value in changed.items() if value is not None}
    if env:
        # A group that is being prepared has not been told its environment yet.
        turn.set(env=kept, env_from=state.generation + (state.phase != s.PREPARING))
        turn.emit("environment_set", env=kept, from_generation=turn.state.env_from, operator=operator)
    return True


def on_remove(turn: Turn, event: inputs.Remove) -> None:
    """Go on without a node; its workers get SIGTERM first, so that the script can save."""
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
    turn.emit("remove_requested", node=event.node, operator=event.operator)
    if event.node in state.members and state.phase in (*ACTIVE, s.STOPPING):
        turn.reply(f"{event.node} drains")
        turn.set(leaving=state.leaving | {event.node})
        turn.set_node(event.node, status="draining", reason="removed by an operator")
        stop_group(turn, "removed")
        return
    turn.reply(f"{event.node} is out")
    policy.remove(turn, event.node)
    if event.node == state.me:
        policy.hand_over(turn)


def on_add(turn: Turn, event: inputs.Add) -> None:
    """Take a node in that is connected and ready; until then the old group goes on."""
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
    if name in state.members and node.status in ("running", "draining") and state.phase != s.FORMING:
        turn.refuse("done", f"{name} is in the group already")
        return
    spec = dataclasses.replace(event.spec, spare=False)
    turn.set_node(name, spec=spec, status="ready", reason=None, losses=(), cordoned=False)
    turn.set(blames=tuple(blame for blame in state.blames if blame[1] != name))
    # Without its environment, which may hold secrets: its agent has it, and nobody else needs it.
    public = dataclasses.asdict(dataclasses.replace(spec, env={}))
    turn.emit("node_added", node=name, nproc=node.nproc, spec=public, operator=event.operator)
    # Others may have been added a moment ago, and wait for the same new group.
    room = len({*state.members, *(one.name for one in turn.state.nodes.values() if one.status == "ready")})
    if room > state.spec.max_nodes:
        turn.set(spec=dataclasses.replace(turn.state.spec, max_nodes=room))
    turn.reply(f"{name} joins")
    if state.phase in ACTIVE:
        stop_group(turn, "added")


def on_cordon(turn: Turn, event: inputs.Cordon) -> None:
    """Keep a node out of the groups to come, or let it in again; the running group keeps what it has."""
    if _over(turn) or not _known(turn, event.node):
        return
    name, node = event.node, turn.node(event.node)
    if node.cordoned == event.on or node.status == "removed":
        what = "removed" if node.status == "removed" else "cordoned already" if event.on else "not cordoned"
        turn.refuse("done", f"{name} is {what}")
        return
    outside = name not in turn.state.members
    turn.set_node(name, cordoned=event.on)
    if event.on and node.status == "ready" and outside:
        turn.set_node(name, status="spare", reason=CORDONED)
    elif not event.on and node.status == "spare" and not node.spec.spare:
        full = formation.is_full(turn.state, name)
        turn.set_node(name, status="spare" if full else "ready", reason=formation.FULL if full else None)
    kind = "node_cordoned" if event.on else "node_uncordoned"
    turn.emit(kind, node=name, operator=event.operator, status=turn.node(name).status)
    turn.reply(f"{name} {'is not taken in again' if event.on else 'may be taken in again'}")
    if not event.on:
        formation.admit(turn, name, "returned")


def on_stop(turn: Turn, event: inputs.Stop) -> None:
    """End the job."""
    if _over(turn):
        return
    turn.reply("the job is being stopped")
    if event.preempted and turn.state.preempted and not event.kill:
        # Every node of the allocation says it.
        return
    turn.emit("stop_requested", operator=event.operator, kill=event.kill, reason=event.preempted)
    if event.preempted:
        turn.set(preempted=event.preempted)
    if turn.state.phase == s.FORMING:
        policy.end_stopped(turn)
    else:
        stop_group(turn, "stop", kill=event.kill)


def refuse_unready(state: s.State, names: Iterable[str]) -> None:
    """Raise Problem while one of several nodes is not ready: those that come together cost one restart."""
    known = [state.nodes.get(name) for name in names]
    if not all(node is not None and node.connected and node.ready for node in known):
        raise Problem("not_ready", "not all of the nodes are ready")


def answer(replies: Sequence[tuple[str, s.Reply | None]]) -> dict[str, Any]:
    """Return the answer to an operator, with one entry per node where there are several; raises Problem for a no."""
    told = [(name, reply) for name, reply in replies if reply is not None]
    said = [(name, reply) for name, reply in told if reply.accepted]
    if not said:
        refused = told[0][1] if told else s.Reply(False, "no reply", kind="internal")
        raise Problem(refused.kind, "; ".join(reply.message for _, reply in told) or refused.message, refused.hint)
    found = {"accepted": True, "message": "; ".join(r.message for _, r in said), "generation": said[-1][1].generation}
    if len(told) > 1:
        found["nodes"] = {
            name: {"accepted": reply.accepted, "message": reply.message, "hint": reply.hint} for name, reply in told
        }
    return found
