"""The verbs that change the job, such as `supervisor restart` and `remove`: send the request and wait for the outcome.

In: argv. Out: one line such as `generation 3 running: world size 6, 0.84 s (…)`, or one JSON document; with --dry-run
the next group.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from remote_agent.snapshots.choice import WHICH_THERE_ARE
from remote_agent.wire.events import ENDED_EVENTS, Condition, EventType
from supervisor.actions import BY_OP, BY_VERB, Action
from supervisor.cli import progress
from supervisor.cli.entry import say
from supervisor.cli.options import add_json, in_session, make_parser, option_value, parse, split_target
from supervisor.cli.output import write_json, write_lines
from supervisor.errors import RequestFailed, UsageError
from supervisor.inventory.pattern import PatternError, expand
from supervisor.wording.events import outcome_line, tree_change
from supervisor.wording.plan import Plan, plan
from supervisor.wording.status import condition_of, next_step

if TYPE_CHECKING:
    from remote_agent.wire import Args
    from remote_agent.wire.documents import JournalEvent, ReplyEntry, RequestReply
    from supervisor.session import Session

# The script may use its whole grace period to save, and torch needs time to start, seconds.
DEADLINE = 600.0
# A group that has too few nodes for longer than this is worth a line, seconds.
PATIENCE = 2.0


def run(verb: str, argv: Sequence[str]) -> int:
    """Carry out one verb; returns the exit code."""
    action = BY_VERB[verb]
    options = _parse(action, argv)
    names = _read_nodes(action, option_value(options, "node") or ())
    args: Args = {"nodes": names} if len(names) > 1 else {}
    if action.scope == "node" and not args:
        args["node"] = names[0] if names else None
    if verb == "stop":
        args["kill"] = options.kill
    if verb == "restart":
        args |= _environment(options)
        if options.snapshot == "":
            raise UsageError("--from needs a snapshot's id", "`supervisor snapshots` lists them")
        args |= {"snapshot": options.snapshot} if options.snapshot else {}
    tree = _tree_verb(options) if verb == "restart" else ""

    async def steer(session: Session) -> int:
        if split_target(options.target)[1] is None:
            _name_silent(session)
        if option_value(options, "dry_run"):
            await session.until_current()
            snapshot = option_value(options, "snapshot") or ""
            if snapshot and not any(one["id"] == snapshot for one in session.status.get("snapshots") or ()):
                raise RequestFailed(f"no node has snapshot {snapshot}", WHICH_THERE_ARE, "no_snapshot")
            next_group = plan(str(action.op), names, session.status, session.events, snapshot)
            _show(await _with_code(session, next_group, tree), options.json)
            return 0
        if tree:
            return await _restart_from(session, action, tree, options)
        answer = await session.request(str(action.op), **args)
        is_later, goes_back = bool(args.get("later")), bool(args.get("snapshot"))
        return await _report(session, action, answer, options.json, later=is_later, goes_back=goes_back)

    return in_session(options, steer, follow=True, live_only=True)


def _add_environment(parser: argparse.ArgumentParser) -> None:
    words = "set a variable for the workers of future groups: NCCL_*, TORCH_* and GLOO_* only"
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help=words)
    parser.add_argument("--unset", action="append", default=[], metavar="K", help="restore the value of the launch")
    parser.add_argument("--later", action="store_true", help="set variables without restarting the group")


def _add_tree(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sync", action="store_true", help="copy the edited work tree to the nodes first, and restart from it"
    )
    parser.add_argument("--rollback", action="store_true", help="restart from the work tree before the last --sync")
    words = "with --sync or --rollback: continue without the nodes that did not get the work tree"
    parser.add_argument("--partial", action="store_true", help=words)


def _tree_verb(options: argparse.Namespace) -> str:
    """Return the request for the work tree: sync, rollback or nothing; raises UsageError."""
    if options.sync and options.rollback:
        raise UsageError("--sync and --rollback cannot be combined")
    tree = "sync" if options.sync else "rollback" if options.rollback else ""
    if tree and (options.env or options.unset):
        raise UsageError(f"--{tree} and --env cannot be combined", "set variables with --later, then sync")
    if options.snapshot and (tree or options.later):
        other = f"--{tree}" if tree else "--later"
        raise UsageError(f"--from and {other} cannot be combined", "restart from the snapshot first")
    if options.partial and not tree:
        raise UsageError("--partial needs --sync or --rollback")
    return tree


async def _with_code(session: Session, next_group: Plan, tree: str) -> Plan:
    """Return the plan with the work tree that the workers would run."""
    if not tree:
        return next_group
    edited = await session.edited()
    previous = edited["tree"].get("previous")
    back = f"back to work tree {previous['digest'][:8]}" if previous else "there is no previous work tree"
    change = edited["change"]
    text = back if tree == "rollback" else tree_change(change) if change else "no file has changed"
    place = [("Files", edited["place"])] if tree == "sync" else []
    return dataclasses.replace(next_group, facts=(*place, ("Code", text), *next_group.facts))


async def _restart_from(session: Session, action: Action, tree: str, options: argparse.Namespace) -> int:
    """Restart from another work tree and say what changed in it; returns the exit code."""
    args: Args = {"partial": options.partial}
    if tree == "sync":
        edited = await session.edited(to_restart=True)
        change = edited["change"]
        if change is not None:
            say(f"files of {edited['place']}\nwork tree {change['digest'][:8]}: {tree_change(change)}")
            args["digest"] = change["digest"]
    async with progress.said(session):
        answer = await session.request(tree, **args)
    if answer["accepted"]:
        return await _report(session, action, answer, options.json)
    if options.json:
        write_json({"job": session.job, "request": action.verb, **answer, "outcome": None})
    _say_refused(answer)
    raise RequestFailed(
        str(answer["message"]),
        "the other nodes keep it: run it again, or use --partial to continue without these nodes",
    )


def _say_refused(answer: RequestReply) -> list[ReplyEntry]:
    """Print which nodes failed, and why; returns their answers."""
    refused = [entry for entry in answer.get("nodes", {}).values() if not entry["accepted"]]
    for entry in refused:
        say(str(RequestFailed(entry["message"], entry["hint"])))
    return refused


def _environment(options: argparse.Namespace) -> dict[str, object]:
    """Return the variables of the request; None restores the value of the launch."""
    if not options.env and not options.unset:
        if options.later:
            raise UsageError("--later needs a variable", "add --env NAME=VALUE")
        return {}
    from supervisor.launch.specs import check_env

    env = {**check_env(options.env), **dict.fromkeys(options.unset)}
    return {"env": env, "later": options.later}


def _parse(action: Action, argv: Sequence[str]) -> argparse.Namespace:
    optional = action.op == "promote"
    parser = make_parser(action.verb)
    if action.scope == "node":
        words = "the node's name in the inventory" + (" (default: the first reachable node)" if optional else "")
        words += "; a,b or n[1-4]: several nodes with one restart" if action.plan else ""
        metavar = "NODE[,NODE…]" if action.plan else "NODE"
        parser.add_argument("--node", action="append", required=not optional, metavar=metavar, help=words)
    if action.plan:
        parser.add_argument("--dry-run", action="store_true", help="show the next group without changing anything")
    if action.op == "stop":
        parser.add_argument("--kill", action="store_true", help="without the grace period")
    if action.op == "restart":
        _add_tree(parser)
        _add_environment(parser)
        words = "resume from this snapshot, as `supervisor snapshots` lists it; later ones no longer count"
        parser.add_argument("--from", dest="snapshot", metavar="ID", help=words)
    add_json(parser)
    return parse(parser, argv)


def _read_nodes(action: Action, given: Sequence[str]) -> list[str]:
    """Return the names of --node: `n1`, and for verbs with a plan also `a,b` and `n[1-4]`; raises UsageError."""
    if not action.plan:
        if len(given) > 1:
            raise UsageError(f"{action.verb} takes one --node")
        return list(given)
    text = ",".join(given)
    try:
        return list(dict.fromkeys(expand(text))) if text else []
    except PatternError as error:
        raise UsageError(f"--node {text}: {error}") from error


async def _report(
    session: Session,
    action: Action,
    answer: RequestReply,
    as_json: bool,
    *,
    later: bool = False,
    goes_back: bool = False,
) -> int:
    """Wait for the outcome of a request and print it; returns the exit code."""
    if action.immediate:
        if as_json:
            write_json({"job": session.job, "request": action.verb, **answer})
        else:
            write_lines([str(answer["message"])])
        return 0
    outcome = await await_outcome(session, "environment" if later else str(action.op), answer)
    if as_json:
        write_json({"job": session.job, "request": action.verb, **answer, "outcome": outcome})
    else:
        since = int(answer["seq"]) if goes_back else int(outcome["seq"])
        chosen = [one for one in session.events if one["type"] == EventType.SNAPSHOTS_CHOSEN and one["seq"] > since]
        write_lines([outcome_line(one) for one in (*chosen[-1:], outcome)])
    refused = _say_refused(answer)
    if outcome["detail"].get("untold"):
        say("repeat it once they can be reached")
        return 1
    return 0 if is_success(action.verb, outcome["type"]) and not refused else 1


def _show(next_group: Plan, as_json: bool) -> None:
    if as_json:
        write_json(
            {"generation": next_group.generation, "nodes": list(next_group.nodes), "plan": dict(next_group.facts)}
        )
    else:
        write_lines(next_group.lines())


def _name_silent(session: Session) -> None:
    """Name the hosts that did not answer when the one live job was chosen."""
    for link in session.links.values():
        if link.jobs is None:
            say(f"{link.view.name}: {link.view.step}: {link.view.error}; jobs on this host are not considered")


def is_success(verb: str, kind: str) -> bool:
    """Return whether an event of this type is what the verb asked for; a restarted job has not ended."""
    if verb == "stop":
        return kind in (EventType.JOB_STOPPED, EventType.JOB_SUCCEEDED)
    return kind not in ENDED_EVENTS


async def await_outcome(session: Session, op: str, answer: RequestReply) -> JournalEvent:
    """Return the event that ends a request; raises RequestFailed if there is none within DEADLINE."""
    began, has_said = time.monotonic(), False
    end = began + DEADLINE
    while time.monotonic() < end:
        version = session.version
        # A group that runs with fewer nodes than it could have has this condition, too, but another state.
        is_short = session.state == condition_of(session.status) == Condition.DEGRADED
        if op in ("restart", "add") and is_short and not has_said and time.monotonic() > began + PATIENCE:
            has_said = True
            say(f"{next_step(session.status)}\nthe group starts then; Ctrl-C ends the waiting, not the request")
        outcome = find_outcome(session.events, op, int(answer["seq"]), answer.get("generation"))
        if outcome is not None:
            return outcome
        if session.ended:
            return session.events[-1]
        await session.wait_change(1.0, version)
    raise RequestFailed(
        f"{op} was accepted ({answer.get('message')}) but did not finish within {DEADLINE:g} s: job is {session.state}",
        "`supervisor events` shows the progress",
        "timeout",
    )


def find_outcome(events: Sequence[JournalEvent], op: str, since: int, generation: int | None) -> JournalEvent | None:
    """Return the event after `since` that ends the request, or None; `generation`: the generation that it leads to."""
    outcomes = BY_OP[op].outcomes if op in BY_OP else ()
    stopped = False
    for event in events:
        if int(event["seq"]) <= since:
            continue
        kind = event["type"]
        if kind in ENDED_EVENTS:
            return event
        if op == "environment" and kind == EventType.ENVIRONMENT_SET:
            return event
        if op in ("stop", "environment"):
            continue
        stopped = stopped or kind in (EventType.GENERATION_STOPPED, EventType.GENERATION_STARTED)
        if kind == EventType.GENERATION_RUNNING and int(event["generation"]) >= (generation or 0):
            return event
        if kind in outcomes and not (kind == EventType.NODE_REMOVED and stopped):
            # A node outside the group was removed; or the coordinator has moved, and its group needs more nodes.
            return event
    return None
