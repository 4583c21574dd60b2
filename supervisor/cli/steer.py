"""`supervisor restart`, `remove`, `add`, `cordon`, `uncordon`, `promote`, `stop`: ask, and await the outcome.

In: argv. Out: one line such as `generation 3 running: world size 6, 0.84 s (…)`, or one JSON document; with --dry-run
what it would lead to.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from supervisor import plain
from supervisor.actions import BY_VERB, Action
from supervisor.cli.entry import say
from supervisor.cli.options import add_json, given, load_target, make_parser, parse
from supervisor.cli.output import write_json, write_lines
from supervisor.errors import RequestFailed, UsageError
from supervisor.inventory.pattern import PatternError, expand
from supervisor.membership import OPS, Plan, plan
from supervisor.session.view import ENDED_EVENTS

if TYPE_CHECKING:
    from supervisor.session.session import Session

# The script may take its whole grace period to save, and torch its time to start, seconds.
DEADLINE = 600.0


def run(verb: str, argv: Sequence[str]) -> int:
    """Carry out one verb; returns the exit status."""
    action = BY_VERB[verb]
    options = _parse(action, argv)
    names = _read_nodes(action, given(options, "node"))
    args: dict[str, Any] = {"nodes": names} if len(names) > 1 else {}
    if action.scope == "node" and not args:
        args["node"] = names[0] if names else None
    if verb == "stop":
        args["kill"] = options.kill
    if verb == "restart":
        args |= _environment(options)
    tree = _tree_verb(options) if verb == "restart" else ""
    inventory, job = load_target(options)
    from supervisor.session.session import open_session

    async def steer() -> int:
        async with open_session(inventory, job, feed=True, live_only=True) as session:
            await session.ready()
            if job is None:
                _name_silent(session)
            if given(options, "dry_run"):
                await session.heard()
                found = plan(str(action.op), names, session.status, session.events)
                _show(await _with_code(session, found, tree), options.json)
                return 0
            if tree:
                return await _restart_from(session, action, tree, options)
            answer = await session.request(str(action.op), **args)
            return await _tell(session, action, answer, options.json, later=bool(args.get("later")))

    return asyncio.run(steer())


def _add_environment(parser: argparse.ArgumentParser) -> None:
    words = "a variable for all workers from the next group on: NCCL_*, TORCH_* and GLOO_* alone"
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help=words)
    parser.add_argument("--unset", action="append", default=[], metavar="K", help="let it be as at the launch again")
    parser.add_argument("--later", action="store_true", help="only set them: the group goes on until it is restarted")


def _add_tree(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sync", action="store_true", help="bring the edited work tree first, and start from it")
    parser.add_argument("--rollback", action="store_true", help="start from the work tree before the last --sync")
    words = "with --sync or --rollback: also without the nodes that have not got the tree"
    parser.add_argument("--partial", action="store_true", help=words)


def _tree_verb(options: argparse.Namespace) -> str:
    """Return what is asked of the work tree: sync, rollback or nothing; raises UsageError."""
    if options.sync and options.rollback:
        raise UsageError("--sync and --rollback: one or the other")
    tree = "sync" if options.sync else "rollback" if options.rollback else ""
    if tree and (options.env or options.unset):
        raise UsageError(f"--{tree} and --env: one after the other", "set variables with --later, then sync")
    if options.partial and not tree:
        raise UsageError("--partial: only with --sync or --rollback")
    return tree


async def _with_code(session: Session, found: Plan, tree: str) -> Plan:
    """Return the plan with what the workers would run."""
    if not tree:
        return found
    looked = await session.edited()
    before = looked["tree"].get("previous")
    back = f"back to work tree {before['digest'][:8]}" if before else "there is no work tree before this one"
    change = looked["change"]
    text = back if tree == "rollback" else plain.tree_change(change) if change else "no file has changed"
    return dataclasses.replace(found, facts=(("Code", text), *found.facts))


async def _restart_from(session: Session, action: Action, tree: str, options: argparse.Namespace) -> int:
    """Restart from another work tree, saying what is in it; returns the exit status."""
    wish: dict[str, Any] = {"partial": options.partial}
    if tree == "sync":
        change = (await session.edited())["change"]
        if change is not None:
            say(f"work tree {change['digest'][:8]}: {plain.tree_change(change)}")
            wish["digest"] = change["digest"]
    answer = await session.request(tree, **wish)
    if answer["accepted"]:
        return await _tell(session, action, answer, options.json)
    if options.json:
        write_json({"job": session.job, "request": action.verb, **answer, "outcome": None})
    _say_refused(answer)
    raise RequestFailed(str(answer["message"]), "the others keep it: run it again, or go without them by --partial")


def _say_refused(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Say which nodes could not do it, and why; returns their answers."""
    refused = [entry for entry in answer.get("nodes", {}).values() if not entry["accepted"]]
    for entry in refused:
        say(str(RequestFailed(entry["message"], entry["hint"])))
    return refused


def _environment(options: argparse.Namespace) -> dict[str, Any]:
    """Return what to ask for beside a restart: variables, None where the launch's value holds again."""
    if not options.env and not options.unset:
        if options.later:
            raise UsageError("--later: nothing to set", "give --env NAME=VALUE too")
        return {}
    from supervisor.session.specs import check_env

    env = {**check_env(options.env), **dict.fromkeys(options.unset)}
    return {"env": env, "later": options.later}


def _parse(action: Action, argv: Sequence[str]) -> argparse.Namespace:
    may_choose = action.op == "promote"
    parser = make_parser(action.verb)
    if action.scope == "node":
        words = "the node, as the inventory names it" + (" (default: the first in reach)" if may_choose else "")
        words += "; a,b or n[1-4]: several, with one restart" if action.op in OPS else ""
        parser.add_argument("--node", required=not may_choose, metavar="N", help=words)
    if action.op in OPS:
        parser.add_argument("--dry-run", action="store_true", help="say what it would lead to, and change nothing")
    if action.op == "stop":
        parser.add_argument("--kill", action="store_true", help="at once, without grace")
    if action.op == "restart":
        _add_tree(parser)
        _add_environment(parser)
    add_json(parser)
    return parse(parser, argv)


def _read_nodes(action: Action, text: str | None) -> list[str]:
    """The names of `n1`, and for verbs that take several those of `a,b` or `n[1-4]`; raises UsageError."""
    if text is None or action.op not in OPS:
        return [] if text is None else [text]
    try:
        return list(dict.fromkeys(expand(text)))
    except PatternError as error:
        raise UsageError(f"--node {text}: {error}") from error


async def _tell(session: Session, action: Action, answer: dict[str, Any], as_json: bool, *, later: bool = False) -> int:
    """Wait for what came of a request, and print it; returns the exit status."""
    if action.op in ("cordon", "uncordon"):
        if as_json:
            write_json({"job": session.job, "request": action.verb, **answer})
        else:
            write_lines([str(answer["message"])])
        return 0
    outcome = await await_outcome(session, "environment" if later else str(action.op), answer)
    if as_json:
        write_json({"job": session.job, "request": action.verb, **answer, "outcome": outcome})
    else:
        write_lines([plain.outcome_line(outcome)])
    refused = _say_refused(answer)
    return 0 if is_success(action.verb, outcome) and not refused else 1


def _show(found: Plan, as_json: bool) -> None:
    if as_json:
        write_json({"generation": found.generation, "nodes": list(found.nodes), "plan": dict(found.facts)})
    else:
        write_lines(found.lines())


def _name_silent(session: Session) -> None:
    """Say which hosts were not heard when the one live job was chosen."""
    for link in session.links.values():
        if link.jobs is None:
            say(f"{link.view.name}: {link.view.step}: {link.view.error}; a job there was not looked for")


def is_success(verb: str, outcome: dict[str, Any]) -> bool:
    """Tell whether the event is what the verb asked for; a job that ended meanwhile was not restarted."""
    if verb == "stop":
        return outcome["type"] in ("job_stopped", "job_succeeded")
    return outcome["type"] not in ENDED_EVENTS


async def await_outcome(session: Session, op: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the event that ends a request; raises RequestFailed when none comes in time."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        version = session.version
        found = find_outcome(session.events, op, int(answer["seq"]), answer.get("generation"))
        if found is not None:
            return found
        if session.ended:
            return session.events[-1]
        await session.wait_change(1.0, version)
    raise RequestFailed(
        f"{op} was accepted ({answer.get('message')}), and is not done after {DEADLINE:g} s: job is {session.state}",
        "`supervisor events` shows what goes on",
        "timeout",
    )


def find_outcome(
    events: Sequence[dict[str, Any]], op: str, since: int, generation: int | None
) -> dict[str, Any] | None:
    """Return the event after `since` that ends the request, or None; `generation`: the one that it leads to."""
    stopped = False
    for event in events:
        if int(event["seq"]) <= since:
            continue
        kind = event["type"]
        if kind in ENDED_EVENTS:
            return event
        if op == "environment" and kind == "environment_set":
            return event
        if op in ("stop", "environment"):
            continue
        stopped = stopped or kind in ("generation_stopped", "generation_started")
        if op == "promote" and kind == "job_degraded":
            # The role has moved; more nodes are needed, and the event says why.
            return event
        if kind == "generation_running" and int(event["generation"]) >= (generation or 0):
            return event
        if op == "remove" and kind == "node_removed" and not stopped:
            # It was not in the group, which goes on as it was.
            return event
    return None
