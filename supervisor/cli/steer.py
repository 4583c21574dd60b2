"""`supervisor restart | remove | add | promote | stop`: ask the cluster to act, and wait for the outcome.

In: argv. Out: one line such as `generation 3 running: world size 6, 0.84 s (…)`, or one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from supervisor import plain
from supervisor.actions import BY_VERB
from supervisor.cli.entry import say
from supervisor.cli.options import add_json, load_inventory, make_parser, parse, split_target
from supervisor.cli.output import write_json, write_lines
from supervisor.errors import RequestFailed, UsageError
from supervisor.session.view import ENDED_EVENTS

if TYPE_CHECKING:
    from supervisor.session.session import Session

# The script may take its whole grace period to save, and torch its time to start, seconds.
DEADLINE = 600.0


def run(verb: str, argv: Sequence[str]) -> int:
    """Carry out one verb; returns the exit status."""
    action = BY_VERB[verb]
    may_choose = verb == "promote"
    node = "" if action.scope != "node" else " [--node N]" if may_choose else " --node N"
    more = " [--env K=V]… [--unset K]… [--later]" if verb == "restart" else ""
    parser = make_parser(verb, f"[HOSTS] [JOB]{node}{more} [--json]")
    if action.scope == "node":
        words = "the node, as the inventory names it" + (" (default: the first in reach)" if may_choose else "")
        parser.add_argument("--node", required=not may_choose, metavar="N", help=words)
    if verb == "stop":
        parser.add_argument("--kill", action="store_true", help="at once, without grace")
    if verb == "restart":
        _add_environment(parser)
    add_json(parser)
    options = parse(parser, argv)
    hosts, job = split_target(options.target)
    args: dict[str, Any] = {"node": options.node} if action.scope == "node" else {}
    if verb == "stop":
        args["kill"] = options.kill
    if verb == "restart":
        args = _environment(options)
    inventory = load_inventory(hosts, options)
    from supervisor.session.session import open_session

    async def steer() -> int:
        async with open_session(inventory, job, feed=True, live_only=True) as session:
            await session.ready()
            if job is None:
                _name_silent(session)
            answer = await session.request(str(action.op), **args)
            op = "environment" if args.get("later") else str(action.op)
            outcome = await await_outcome(session, op, answer)
            if options.json:
                write_json({"job": session.job, "request": verb, **answer, "outcome": outcome})
            else:
                write_lines([plain.outcome_line(outcome)])
            return 0 if is_success(verb, outcome) else 1

    return asyncio.run(steer())


def _add_environment(parser: argparse.ArgumentParser) -> None:
    words = "a variable for all workers from the next group on: NCCL_*, TORCH_* and GLOO_* alone"
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help=words)
    parser.add_argument("--unset", action="append", default=[], metavar="K", help="let it be as at the launch again")
    parser.add_argument("--later", action="store_true", help="only set them: the group goes on until it is restarted")


def _environment(options: argparse.Namespace) -> dict[str, Any]:
    """Return what to ask for beside a restart: variables, None where the launch's value holds again."""
    if not options.env and not options.unset:
        if options.later:
            raise UsageError("--later: nothing to set", "give --env NAME=VALUE too")
        return {}
    from supervisor.session.specs import check_env

    env = {**check_env(options.env), **dict.fromkeys(options.unset)}
    return {"env": env, "later": options.later}


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


async def await_outcome(
    session: Session, op: str, answer: dict[str, Any], deadline_s: float = DEADLINE
) -> dict[str, Any]:
    """Return the event that ends a request; raises RequestFailed when none comes in time."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        version = session.version
        found = find_outcome(session.events, op, int(answer["seq"]), answer.get("generation"))
        if found is not None:
            return found
        if session.ended:
            return session.events[-1]
        await session.wait_change(1.0, version)
    raise RequestFailed(
        f"{op} was accepted ({answer.get('message')}), and is not done after {deadline_s:g} s: job is {session.state}",
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
