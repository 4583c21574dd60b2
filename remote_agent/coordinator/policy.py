"""What follows when the group has stopped: a new generation, an end, or the role's hand-over.

In: a Turn whose members are all idle, with the cause and the evidence. Out: incident, restart charge, end.

The verdict on a failure is not made in a Turn: that of thousands of ranks takes seconds, in which the coordinator must
answer. The Turn orders it with `Judge`, the shell calls `judged`, and what that returns is the next input.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from remote_agent.coordinator import code_version, inputs, views
from remote_agent.coordinator import state as s
from remote_agent.coordinator.formation import patience, send_away
from remote_agent.coordinator.quorum import without
from remote_agent.coordinator.transitions import QUARANTINE_WINDOW_S, WITHIN, Turn, fail_node
from remote_agent.diagnose import incidents
from remote_agent.diagnose.categories import CATEGORIES
from remote_agent.diagnose.evidence import JobContext, RankEvidence
from remote_agent.diagnose.hang.loops import missing_in
from remote_agent.diagnose.hang.stalls import find_stall, missing_of
from remote_agent.diagnose.incidents import last_lines
from remote_agent.diagnose.verdict import verdict
from remote_agent.wire.events import HOST_NAME, EventType, StopCause

if TYPE_CHECKING:
    from remote_agent.wire.documents import IncidentDocument, MissingRanks

# A script that prints no steps counts as being before its first step only for this long after its start.
EARLY_S = 60.0
# One fault proves nothing, two may be chance; max_restarts is 3 by default, so a fourth would end the job.
QUARANTINE_FAULTS = 3
# Most groups have stopped by then, so related failures are reported together; operators hardly notice this delay.
PUBLISH_AFTER_S = 0.5
# A process ends itself by these signals, or exits (None); all other signals come from outside.
OWN_ENDS = frozenset({None, "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"})


def after_stop(turn: Turn) -> None:
    """Decide what follows a stopped group; if it failed, order the verdict first."""
    if "idle" not in turn.state.marks:
        turn.mark("idle")
    if _is_failure(turn.state):
        _order_verdict(turn, final=True)
    else:
        _conclude(turn, None)


def _order_verdict(turn: Turn, final: bool) -> None:
    """Order the verdict, unless it is being made; the final one does not wait for a preliminary one."""
    if turn.state.judging is None or (final and not turn.state.judging):
        turn.set(judging=final)
        turn.commands.append(s.Judge(turn.state, turn.wall_ns, final))


def judged(order: s.Judge) -> inputs.Judged:
    """Return the verdict that was ordered."""
    return inputs.Judged(order.state.generation, _judge(order.state, order.wall_ns), order.final, _known(order.state))


def on_judged(turn: Turn, event: inputs.Judged) -> None:
    """Take the verdict, unless it is not wanted any more."""
    state = turn.state
    if state.phase != s.STOPPING or event.generation != state.generation or event.final != state.judging:
        return
    turn.set(judging=None)
    if event.final:
        _conclude(turn, event.incident)
    else:
        _publish(turn, event)


def _conclude(turn: Turn, incident: IncidentDocument | None) -> None:
    """Decide what follows a stopped group, which failed if there is an incident."""
    state = turn.state
    cause = state.cause or StopCause.RESTART
    stop_ms = round((state.marks["idle"] - state.marks.get("stop", state.marks["idle"])) * 1000, 1)
    ends = {} if incident is None else _ends(state)
    turn.emit(EventType.GENERATION_STOPPED, cause=cause, stop_ms=stop_ms, **ends)
    turn.set(groups=without(state.groups, state.generation, state.term))
    if incident is not None:
        lines = [line for name in state.lost for line in last_lines(name, state.nodes[name].said)]
        _report(turn, {**incident, "evidence": [*incident["evidence"], *lines]})
    turn.set(judging=None, preliminary=None)
    _close(turn)
    leaving = [name for name in state.nodes if name in turn.state.leaving]
    for name in sorted(leaving, key=lambda name: name == state.me):
        if name == turn.state.me and successor(turn.state) is None:
            # The others may be back in a moment.
            turn.warn(name, None, "removal", f"{name} is removed once another node can take over as coordinator")
        elif turn.node(name).status != "removed":
            remove(turn, name)
    if cause == StopCause.STOP:
        end_stopped(turn)
    elif incident is None or _continues(turn, incident):
        _form_again(turn)


def _continues(turn: Turn, incident: IncidentDocument) -> bool:
    """Take the consequences of a failure; return False when the job ended."""
    return incident["category"] == "node_lost" or _leave_out(turn, incident) or _charge(turn, incident)


def _close(turn: Turn) -> None:
    """Note that the members run no ranks any more, and whether the group had come further than earlier ones."""
    # Nobody reports the ranks of an agent that came back without them.
    turn.set(ranks=turn.state.with_killed().ranks)
    if not _came_early(turn.state):
        turn.set(fingerprint=None, suspects=())
    for name in turn.state.members:
        if turn.node(name).status == "running":
            turn.set_node(name, status="ready")


def _ends(state: s.State) -> dict[str, Any]:
    """Return what a verdict from the files of a failed group needs and no other record contains.

    left: rank, time, and when its script was over, of those that ended well; stopped: rank, time, code, signal, and
    when it had raised, its script was over, and we asked it to end, of those that we ended; clocks: by node, what
    corrects its times, and how far that may be wrong. Raised, over and asked are in the node's own time.
    """
    ends = sorted(state.exits.items())
    left = [[rank, ended["t_ns"], ended.get("over_ns")] for rank, ended in ends if ended["code"] == 0]
    stopped = [
        [rank, ended["t_ns"], ended["code"], ended["signal"],
         error["timestamp_ns"] if (error := ended.get("error")) else None,
         ended.get("over_ns"), ended.get("asked_ns")]
        for rank, ended in ends
        if ended.get("stopped_by_us")
    ]  # fmt: skip
    clocks = {ended["node"]: [ended.get("shift_ns", 0), ended.get("clock_error_ns", 0)] for _, ended in ends}
    return {key: value for key, value in {"left": left, "stopped": stopped, "clocks": clocks}.items() if value}


def publish(turn: Turn) -> None:
    """Write the incident of a group that takes long to stop as it is known so far, and again if another cause emerges.

    Its number stays; the final verdict replaces it.
    """
    state = turn.state
    if state.phase != s.STOPPING or not _is_failure(state) or turn.now - state.marks["stop"] < PUBLISH_AFTER_S:
        return
    if _known(state) > (0 if state.preliminary is None else state.preliminary.known):
        _order_verdict(turn, final=False)


def _known(state: s.State) -> int:
    """Return how many failures of ranks and nodes are known."""
    own = sum(ended["code"] != 0 and not ended.get("stopped_by_us") for ended in state.exits.values())
    return own + len(state.lost) + len(state.troubles)


def _publish(turn: Turn, event: inputs.Judged) -> None:
    incident, before = event.incident, turn.state.preliminary
    trial = Turn(turn.state, turn.now, turn.wall_ns)
    _close(trial)
    is_last = not _continues(trial, incident)
    turn.set(preliminary=s.Preliminary(incident["id"], incident["fingerprint"], event.known, is_last))
    if before is None or before.fingerprint != incident["fingerprint"]:
        _report(turn, incident, preliminary=True)


def end_stopped(turn: Turn) -> None:
    """End the job as requested; if its allocation ended, with an incident that says so."""
    reason = turn.state.preempted or "an operator stopped the job"
    if turn.state.preempted:
        _report(turn, _preempted(turn.state, turn.wall_ns))
    turn.end("stopped", reason)


def _is_failure(state: s.State) -> bool:
    if state.cause == StopCause.NODE_LOST:
        # All agents may have been restarted and come back: then nothing has failed, and no node is lost.
        failed = (ended for ended in state.exits.values() if ended["code"] != 0)
        return bool(state.lost) or any(not ended.get("stopped_by_us") for ended in failed)
    return state.cause != StopCause.STOP and (state.cause == StopCause.FAILURE or bool(state.lost))


def _report(turn: Turn, incident: IncidentDocument, preliminary: bool = False) -> None:
    turn.set(incidents=incident["id"])
    facts: IncidentDocument = {**incident, "preliminary": True} if preliminary else incident
    turn.emit(EventType.INCIDENT, **facts)


def _leave_out(turn: Turn, incident: IncidentDocument) -> bool:
    """Continue without a node that alone keeps failing; returns whether that is so."""
    name = incident["culprit_node"]
    if name is None or name not in turn.state.nodes or turn.node(name).status != "ready":
        return False
    what = _blame(turn, name, incident)
    if not what and _can_do_without(turn.state, incident) == name and name in turn.state.suspects:
        what = "failed alone twice before the first step"
        turn.set(fingerprint=incident["fingerprint"])
    if what:
        fail_node(turn, name, f"quarantined: {what}, last: {incident['summary']}")
    return bool(what)


def _blame(turn: Turn, name: str, incident: IncidentDocument) -> str:
    """Count failures that a machine caused; return why the node is left out, or "" if it stays."""
    if not CATEGORIES[incident["category"]].machine:
        return ""
    recent = [blame for blame in turn.state.blames if turn.now - blame[0] < QUARANTINE_WINDOW_S]
    turn.set(blames=(*recent, (turn.now, name)))
    # If other nodes fail too, the cause is the script or something that the nodes share.
    alone = all(node == name for _, node in turn.state.blames)
    faults = len(turn.state.blames)
    return f"caused {faults} failures {WITHIN}" if alone and faults >= QUARANTINE_FAULTS else ""


def _can_do_without(state: s.State, incident: IncidentDocument) -> str | None:
    """Return the node that alone failed before the first step, if the others are enough without it.

    None while the work tree is new: then that is the more likely reason, and there is one to go back to. Nor can one
    tell while no group has ever formed: only the first node opens a store, and the others may be as unable.
    """
    name = incident["culprit_node"]
    if not any(group.formed and group.generation >= 0 for group in state.groups):
        return None
    early = _came_early(state) and incident["exit"]["signal"] in OWN_ENDS and incident["confidence"] != "unknown"
    if name is None or name not in state.nodes or not early or not views.has_proven_tree(state):
        return None
    others = {**state.nodes, name: dataclasses.replace(state.nodes[name], ready=False)}
    enough = len(views.choose(dataclasses.replace(state, nodes=others))) >= views.floor(state)
    return name if enough else None


def _charge(turn: Turn, incident: IncidentDocument) -> bool:
    """Charge one restart, or go back to the last work tree for free; return False when the job ended instead."""
    state = turn.state
    early = _came_early(state) and incident["exit"]["signal"] is None
    alone = _can_do_without(state, incident)
    # A fault of the script follows it to the next node, but several machines may have the same fault.
    is_machine = alone is not None and CATEGORIES[incident["category"]].machine
    if early and incident["fingerprint"] == state.fingerprint and not is_machine:
        reason = f"the same failure twice in a row before the first step: {incident['summary']}"
    elif state.restarts >= state.spec.max_restarts:
        reason = f"max_restarts ({state.spec.max_restarts}) is used up: {incident['summary']}"
    else:
        suspects = state.suspects if alone is None else (*state.suspects, alone)
        turn.set(restarts=state.restarts + 1, fingerprint=incident["fingerprint"] if early else None, suspects=suspects)
        return True
    if early and code_version.fall_back(turn, reason):
        return True
    turn.end("failed", reason)
    return False


def _came_early(state: s.State) -> bool:
    return _is_early(state, state.marks.get("stop", 0.0))


def _is_early(state: s.State, at: float) -> bool:
    """Return whether the group was still before its first step at that time."""
    running = state.marks.get("running")
    return not state.stepped and (running is None or at - running < EARLY_S)


def note_recovery(turn: Turn) -> None:
    """Write to the journal, once, that a group makes steps again, or has run for a minute without showing one.

    Ranks that still wait for each other in init_process_group have shown nothing.
    """
    state, incident = turn.state, turn.state.incident
    is_open = incident is not None and incident.get("state") == incidents.OPEN and not incident.get("ongoing")
    if state.phase != s.RUNNING or not is_open:
        return
    if state.stepped or not (state.grouping or _is_early(state, turn.now)):
        how = "has made a step" if state.stepped else f"has run for {EARLY_S:.0f} s without showing steps"
        turn.emit(EventType.INCIDENT_HEALED, reason=f"generation {state.generation} {how}")


def remove(turn: Turn, name: str) -> None:
    """Take a node out for good; its agent leaves once a group without it has formed."""
    leaves = turn.node(name).connected and name != turn.state.me
    turn.set_node(name, status="removed", reason="removed by an operator", leaves=leaves)
    turn.emit(EventType.NODE_REMOVED, node=name, reason="removed by an operator")
    send_away(turn)


def _form_again(turn: Turn) -> None:
    leaving = turn.state.leaving & {turn.state.me}
    turn.set(phase=s.FORMING, deadline=patience(turn), leaving=leaving, alone_since=None)
    if leaving:
        hand_over(turn)


def succession(state: s.State) -> list[str]:
    """Return who may coordinate, in turn: the last group without removed nodes; before the first group, all nodes."""
    group = list(state.members or state.nodes)
    return [name for name in group if state.nodes[name].status not in ("removed", "failed")]


def successor(state: s.State) -> str | None:
    """Return the node that takes over when ours leaves: the first ready one, of the group before any other."""
    for name in (*succession(state), *state.nodes):
        node = state.nodes[name]
        if name != state.me and node.connected and node.ready and node.status in ("ready", "running", "spare"):
            return name
    return None


def hand_over(turn: Turn) -> None:
    """Hand the role over, once another node can take it; this coordinator forms no further group."""
    chosen, me = successor(turn.state), turn.state.me
    if chosen is None:
        return
    if turn.node(me).status != "removed":
        remove(turn, me)
    turn.set(phase=s.ENDED, ended=None, leaving=frozenset())
    turn.commands.append(s.HandOver(chosen))


def _judge(state: s.State, now_ns: int) -> IncidentDocument:
    """Return the incident of the generation that stops, from what is known of its ranks."""
    evidence = [
        RankEvidence.from_exit(ended, ended["node"], _files(state.generation, rank), int(ended.get("shift_ns", 0)))
        for rank, ended in sorted(state.exits.items())
    ]
    evidence += [
        RankEvidence(rank=None, node=node, tail=f"could not carry out the order: {trouble}")
        for node, trouble in state.troubles.items()
    ]
    host_notes: dict[str, list[str]] = {}
    clock_error_ms: dict[str, float] = {}
    for ended in state.exits.values():
        clock_error_ms[ended["node"]] = ended.get("clock_error_ns", 0) / 1e6
        host_notes.setdefault(ended["node"], []).extend(ended.get("notes", ()))
    context = JobContext(
        generation=state.generation,
        incident_id=state.incidents + 1 if state.preliminary is None else state.preliminary.id,
        world_size=len(state.ranks),
        ranks_per_node=state.ranks_per_node(),
        lost_nodes=state.lost,
        now_ns=now_ns,
        host_notes=host_notes,
        clock_error_ms=clock_error_ms,
        unreachable_names=[
            name for name, node in state.nodes.items() if node.notice and node.notice["kind"] == HOST_NAME
        ],
        hang=state.watch.hang["missing"] if state.watch.hang is not None else None,
        seen=_last_seen(state),
    )
    return verdict(evidence, context)


def _last_seen(state: s.State) -> MissingRanks | None:
    """Return which ranks were missing when all were last asked; None where none was, or the answers are incomplete."""
    watch = state.watch
    left = frozenset(number for number, rank in state.ranks.items() if rank.state == "succeeded")
    if watch.asked:
        return None
    stall = find_stall(watch.before, watch.now, left)
    return (
        missing_of(stall) if stall is not None and stall.kind == "missing" and stall.waits else missing_in(watch.loops)
    )


def _preempted(state: s.State, now_ns: int) -> IncidentDocument:
    """Return the incident of a job whose allocation is ended."""
    return incidents.incident(
        JobContext(state.generation, state.incidents + 1),
        time_ns=now_ns,
        category="signal_preempted",
        scope="outside_the_ranks",
        confidence="established",
        summary=f"preempted: {state.preempted}",
        hint="ask for more time, or let the scheduler requeue the job: the script resumes from its snapshot",
        fingerprint="signal_preempted|allocation",
        victims=[(sorted(state.ranks), "signal_preempted", "stopped with the allocation")] if state.ranks else (),
    )


def _files(generation: int, rank: int) -> dict[str, str]:
    """Name a rank's files relative to the job's directory, which is the same on every node."""
    base = f"generation_{generation}/rank_{rank}"
    return {
        "stdout": f"{base}/stdout.log",
        "stderr": f"{base}/stderr.log",
        "nccl": f"{base}/nccl.log",
        "error": f"{base}/error.json",
    }
