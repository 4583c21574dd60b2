"""`supervisor record`: a job as one file.

In: argv. Out: the file; one line that says what is in it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from supervisor import plain
from supervisor.cli.entry import say
from supervisor.cli.options import load_target, make_parser, parse
from supervisor.cli.output import write_lines
from supervisor.errors import UsageError
from supervisor.recording.excerpts import Limit

if TYPE_CHECKING:
    from supervisor.inventory import Inventory

UNITS = {"k": 1000, "M": 1000**2, "G": 1000**3}


def read_limit(text: str) -> Limit:
    """Return what `500k`, `2M`, `none` or `all` of each log means; raises argparse.ArgumentTypeError."""
    if text in ("all", "none"):
        return Limit(None if text == "all" else 0, None)
    number, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1)
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: write all, none, or a size such as 500k or 2M")
    return Limit(int(number) * unit, None)


def run(verb: str, argv: Sequence[str]) -> int:
    """Record a job; returns the exit status."""
    parser = make_parser(verb, "[HOSTS] [JOB] FILE")
    words = "of the end of each log: all, none, or a size (default: 1M, and 64M of all logs); evidence comes anyway"
    parser.add_argument("--logs", metavar="all|none|SIZE", type=read_limit, default=Limit(), help=words)
    parser.add_argument("-f", "--follow", action="store_true", help="record until the job is over, or Ctrl-C")
    options = parse(parser, argv)
    if not options.target or options.target[-1].endswith(".toml"):
        raise UsageError("FILE is missing", f"supervisor {verb} [HOSTS] [JOB] FILE")
    *options.target, name = options.target
    inventory, job = load_target(options)
    return asyncio.run(_record(inventory, job, Path(name), options.logs, follow=options.follow))


async def _record(inventory: Inventory, job: str | None, path: Path, limit: Limit, *, follow: bool) -> int:
    from supervisor.recording.statuses import watch
    from supervisor.recording.writing import check_free, write
    from supervisor.session.session import open_session

    check_free(path)
    async with open_session(inventory, job, feed=follow) as session:
        await session.ready()
        for view in await session.settle():
            say(f"{view.name}: {view.step}: {view.error or 'no answer yet'}; what only it knows is not recorded")
        seen = []
        if follow:
            await session.heard()
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGINT, stop.set)
            try:
                seen = await watch(session, stop)
            finally:
                loop.remove_signal_handler(signal.SIGINT)
        events, missing = await write(session, path, limit=limit, seen=seen)
        for reason in missing:
            say(f"{reason}; logs are missing from here on")
        write_lines([f"{session.job}: {events} events, {plain.size(path.stat().st_size)} in {path}"])
    return 0
