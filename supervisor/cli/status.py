"""`supervisor status`: nodes, ranks, state.

In: argv. Out: text or the contract's status document; with --watch again and again.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from supervisor import plain
from supervisor.cli.options import add_json, load_target, make_parser, parse
from supervisor.cli.output import is_rich, write_json, write_lines, write_table
from supervisor.plain_nccl import fabric_lines

if TYPE_CHECKING:
    from supervisor.session.session import Session

JOB_KEYS = (
    "job", "state", "generation", "restarts", "max_restarts", "world_size", "coordinator", "started_at", "nodes",
    "incident",
)  # fmt: skip
NODE_KEYS = ("name", "address", "state", "group_rank", "reason", "agent_pid", "clock_offset_ms", "ranks")
RANK_KEYS = ("rank", "local_rank", "pid", "state", "exit_code", "step", "last_output_age_s")
# Ours, beside the contract's.
NODE_MORE = ("clock_error_ms", "vitals")
RANK_MORE = ("progress", "vitals")
WARNING_KEYS = ("kind", "node", "rank", "message")
INTERVAL = 1.0


def contract(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contract's document, and of what the agents add the clocks' error, progress, vitals and warnings."""
    document = {key: status.get(key) for key in JOB_KEYS}
    document["nodes"] = [
        {
            **{key: node.get(key) for key in (*NODE_KEYS, *NODE_MORE)},
            "ranks": [{key: rank.get(key) for key in (*RANK_KEYS, *RANK_MORE)} for rank in node.get("ranks", ())],
        }
        for node in status.get("nodes", ())
    ]
    document["warnings"] = [{key: one.get(key) for key in WARNING_KEYS} for one in status.get("warnings", ())]
    return document


def run(verb: str, argv: Sequence[str]) -> int:
    """Show the status; returns the exit status."""
    parser = make_parser(verb)
    add_json(parser)
    parser.add_argument("--watch", action="store_true", help="show it again whenever it changes, until the job is over")
    parser.add_argument("--ascii", action="store_true", help="no characters beyond ASCII")
    options = parse(parser, argv)
    inventory, job = load_target(options)
    rich = not options.json and is_rich(ascii_only=options.ascii)
    from supervisor.session.session import open_session

    async def once() -> int:
        async with open_session(inventory, job) as session:
            await session.ready()
            status = await session.call("status")
            fabric = None if options.json else await session.nccl(status)
            _show(status, as_json=options.json, rich=rich)
            lines = fabric_lines(fabric) if fabric is not None else []
            write_lines(["", *lines] if lines else [])
        return 0

    async def watch() -> int:
        async with open_session(inventory, job, feed=True) as session:
            await session.ready()
            await _watch(session, as_json=options.json, rich=rich)
        return 0

    return asyncio.run(watch() if options.watch else once())


def _show(status: Mapping[str, Any], *, as_json: bool, rich: bool) -> None:
    if as_json:
        write_json(contract(status))
    elif not rich:
        write_lines(plain.status_lines(status))
    else:
        write_lines([plain.header(status), ""])
        write_table(plain.node_rows(status), rich=True)
        ranks = plain.rank_rows(status)
        if len(ranks) > 1:
            write_lines([""])
            write_table(ranks, rich=True)
        tail = plain.status_tail(status)
        write_lines(["", *tail] if tail else [])


async def _watch(session: Session, *, as_json: bool, rich: bool) -> None:
    shown: Mapping[str, Any] = {}
    while True:
        over = session.ended
        if session.status and session.status is not shown:
            shown = session.status
            if rich:
                sys.stdout.write("\x1b[H\x1b[2J")
            _show(shown, as_json=as_json, rich=rich)
            if not as_json and not rich:
                write_lines([""])
        if over:
            return
        await session.wait_change(INTERVAL)
        await asyncio.sleep(INTERVAL / 4)  # at most four a second, however fast it changes
