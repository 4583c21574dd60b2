"""`supervisor events` and `supervisor incidents`: what happened, and why it failed.

In: argv. Out: text or JSON; with -f the events as they come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from supervisor import plain
from supervisor.cli.options import add_json, load_target, make_parser, parse
from supervisor.cli.output import write_json, write_lines
from supervisor.plain_incident import incident_lines

if TYPE_CHECKING:
    from supervisor.inventory import Inventory


def run(verb: str, argv: Sequence[str]) -> int:
    """Show the journal or the incidents; returns the exit status."""
    return _events(verb, argv) if verb == "events" else _incidents(verb, argv)


def _events(verb: str, argv: Sequence[str]) -> int:
    parser = make_parser(verb)
    add_json(parser, "one JSON object a line")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as events come, until the job is over")
    options = parse(parser, argv)
    inventory, job = load_target(options)
    if options.follow:
        return asyncio.run(_follow(inventory, job, as_json=options.json))

    async def once() -> int:
        from supervisor.session.session import open_session

        async with open_session(inventory, job) as session:
            await session.ready()
            _write(await session.journal(), as_json=options.json)
        return 0

    return asyncio.run(once())


async def _follow(inventory: Inventory, job: str | None, *, as_json: bool) -> int:
    from supervisor.session.session import open_session

    async with open_session(inventory, job, feed=True) as session:
        await session.ready()
        told = 0
        while True:
            over, version = session.ended, session.version
            _write(session.events[told:], as_json=as_json)
            told = len(session.events)
            if over:
                return 0
            await session.wait_change(1.0, version)


def _write(events: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        for event in events:
            write_json(event)
    elif events:
        write_lines([plain.event_line(event) for event in events])


def _incidents(verb: str, argv: Sequence[str]) -> int:
    parser = make_parser(verb)
    add_json(parser)
    options = parse(parser, argv)
    inventory, job = load_target(options)

    async def once() -> int:
        from supervisor.session.session import open_session

        async with open_session(inventory, job) as session:
            await session.ready()
            found = await session.call("incidents")
        if options.json:
            write_json({"incidents": found["incidents"], "nccl": found.get("nccl")})
        elif not found["incidents"]:
            write_lines(["no incidents"])
        for number, incident in enumerate(() if options.json else found["incidents"]):
            write_lines([*([""] if number else []), *incident_lines(incident)])
        return 0

    return asyncio.run(once())
