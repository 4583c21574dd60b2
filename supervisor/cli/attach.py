"""`supervisor attach`: watch a running or finished job.

In: argv. Out: the TUI, or the merged log from now on.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from supervisor.cli.entry import say
from supervisor.cli.options import (
    add_screen,
    is_terminal,
    load_inventory,
    make_parser,
    parse,
    source_words,
    split_target,
)


def run(verb: str, argv: Sequence[str]) -> int:
    """Attach; returns the exit status."""
    parser = make_parser(verb)
    add_screen(parser)
    options = parse(parser, argv)
    hosts, job = split_target(options.target)
    inventory = load_inventory(hosts, options)
    mode = "watch" if options.read_only else "control"
    from supervisor.session.session import Session, open_session

    if options.headless or not is_terminal():
        from supervisor.cli.headless import Headless

        if not options.headless and sys.stdout.isatty() and not options.read_only:
            say("no screen on this terminal (TERM=dumb, or stdin is none): the merged log; Ctrl-C stops the job")

        async def watch() -> int:
            session = open_session(inventory, job, attach=mode, read_only=options.read_only)
            return await Headless(session, sys.stdout.buffer).attached(hosts=source_words(hosts, options))

        return asyncio.run(watch())
    from supervisor.tui.app import run_tui

    def make() -> Session:
        return open_session(inventory, job, attach=mode, read_only=options.read_only)

    return run_tui(make, theme=options.theme, read_only=options.read_only, ascii_only=options.ascii)
