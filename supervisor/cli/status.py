"""`supervisor status`, `events` and `incidents`: nodes, ranks and state; the journal; failures with their causes.

In: argv. Out: text or the contract's documents; with --watch the status at each change, with -f new events as they
arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from supervisor.cli import colours
from supervisor.cli.options import LOOKS, add_json, in_session, make_parser, parse
from supervisor.cli.output import is_rich, write_json, write_lines, write_table
from supervisor.standard_streams import clear_screen
from supervisor.wording.events import EventRows, event_line, still_there
from supervisor.wording.incidents import incident_text
from supervisor.wording.status import fabric_lines, header, node_rows, rank_rows, status_lines, status_tail

if TYPE_CHECKING:
    from remote_agent.wire.documents import JournalEvent, Status
    from supervisor.session import Session

JOB_KEYS = (
    "job", "state", "generation", "restarts", "max_restarts", "world_size", "coordinator", "started_at", "nodes",
    "incident", "condition", "snapshots", "phases", "sampling",
)  # fmt: skip
NODE_KEYS = ("name", "address", "state", "group_rank", "reason", "agent_pid", "clock_offset_ms", "ranks")
RANK_KEYS = ("rank", "local_rank", "pid", "state", "exit_code", "step", "last_output_age_s")
# Optional fields: null where they are unknown.
NODE_MORE = ("clock_error_ms", "vitals", "start", "standby")
RANK_MORE = ("progress", "vitals")
WARNING_KEYS = ("kind", "node", "rank", "message")
INTERVAL = 1.0
# The files of a host may take this long to answer, seconds.
STATUS_DEADLINE = 10.0


def contract(status: Status) -> dict[str, object]:
    """Return the documented part of a status: the other fields are between agents and this program."""
    document: dict[str, object] = {key: status.get(key) for key in JOB_KEYS}
    document["nodes"] = [
        {
            **{key: node.get(key) for key in (*NODE_KEYS, *NODE_MORE)},
            "ranks": [{key: rank.get(key) for key in (*RANK_KEYS, *RANK_MORE)} for rank in node.get("ranks", ())],
        }
        for node in status.get("nodes", ())
    ]
    document["slow"] = list(status.get("slow", ()))
    document["warnings"] = [{key: one.get(key) for key in WARNING_KEYS} for one in status.get("warnings", ())]
    return document


def run(verb: str, argv: Sequence[str]) -> int:
    """Show the status; returns the exit code."""
    parser = make_parser(verb, LOOKS)
    add_json(parser)
    colours.add_color(parser)
    parser.add_argument(
        "--watch", action="store_true", help="show the status again whenever it changes, until the job ends"
    )
    parser.add_argument("--ascii", action="store_true", help="use ASCII characters only")
    options = parse(parser, argv)
    rich = not options.json and options.color != "never" and is_rich(ascii_only=options.ascii)

    async def show(session: Session) -> None:
        if options.watch:
            return await _watch(session, as_json=options.json, rich=rich, color=options.color)
        status: Status = await session.call("status")
        if status.get("coordinator_reachable") is False:
            status = await _as_each_knows_itself(session, status)
        fabric = None
        # Where one node speaks for all, the others are not asked.
        if not options.json and not session.spared:
            session.set_status(status)
            fabric = await session.nccl(status)
        _show(status, as_json=options.json, rich=rich, color=options.color)
        lines = fabric_lines(fabric) if fabric is not None else []
        return write_lines(["", *lines] if lines else [])

    return in_session(options, show, follow=options.watch)


async def _as_each_knows_itself(session: Session, status: Status) -> Status:
    """Return a status without a coordinator in which nodes that have no agent are as their own files show them."""
    await session.settle()
    links = session.opened_links(live=False)
    answers = await asyncio.gather(*(link.try_call("status", timeout_s=STATUS_DEADLINE) for link in links))
    rows = [(node, answer["node"]) for answer in answers if answer for node in answer["nodes"]]
    own = {node["name"]: node for node, where in rows if node["name"] == where}
    return {**status, "nodes": [own.get(node["name"], node) for node in status.get("nodes", ())]}


def _show(status: Status, *, as_json: bool, rich: bool, color: str) -> None:
    if as_json:
        write_json(contract(status))
    elif not rich:
        colours.write(status_lines(status), color)
    else:
        write_lines([header(status), ""])
        write_table(node_rows(status), rich=True)
        ranks = rank_rows(status)
        if len(ranks) > 1:
            write_lines([""])
            write_table(ranks, rich=True)
        tail = status_tail(status)
        colours.write(["", *tail] if tail else [], color)


async def _watch(session: Session, *, as_json: bool, rich: bool, color: str) -> None:
    last: Status = {}
    while True:
        over = session.ended
        if session.status and session.status is not last:
            last = session.status
            if rich:
                clear_screen()
            _show(last, as_json=as_json, rich=rich, color=color)
            if not as_json and not rich:
                write_lines([""])
        if over:
            return
        await session.wait_change(INTERVAL)
        await asyncio.sleep(INTERVAL / 4)  # at most four a second, however fast it changes


# --- the journal


def run_events(verb: str, argv: Sequence[str]) -> int:
    """Show the journal; returns the exit code."""
    parser = make_parser(verb, LOOKS)
    add_json(parser, "one JSON object a line")
    colours.add_color(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="print new events until the job ends")
    options = parse(parser, argv)

    async def show(session: Session) -> None:
        rows, printed = EventRows(), list["JournalEvent"]()
        while True:
            over, version = session.ended or not options.follow, session.version
            events = session.events if options.follow else await session.journal()
            if options.json:
                for event in events[still_there(printed, events) :]:
                    write_json(event)
                printed = list(events)
            elif news := rows.follow(events):
                colours.write(list(map(event_line, news)), options.color)
            if over:
                return
            await session.wait_change(1.0, version)

    return in_session(options, show, follow=options.follow)


def run_incidents(verb: str, argv: Sequence[str]) -> int:
    """Show failures and their causes; returns the exit code."""
    parser = make_parser(verb, LOOKS)
    add_json(parser)
    colours.add_color(parser)
    options = parse(parser, argv)

    async def show(session: Session) -> None:
        answer = await session.call("incidents")
        if options.json:
            write_json({"incidents": answer["incidents"], "nccl": answer.get("nccl")})
        elif not answer["incidents"]:
            write_lines(["no incidents"])
        for number, incident in enumerate(() if options.json else answer["incidents"]):
            colours.write([*([""] if number else []), *incident_text(incident)], options.color)

    return in_session(options, show)
