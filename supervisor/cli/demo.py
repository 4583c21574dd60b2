"""`supervisor demo`: two embedded SSH hosts, a real DDP run.

In: argv. Out: the exit status of the run.
"""

from __future__ import annotations

from collections.abc import Sequence

from supervisor.cli.options import is_terminal, make_parser, parse


def run(verb: str, argv: Sequence[str]) -> int:
    """Run the demo; returns the exit status."""
    parser = make_parser(verb, "", target=False)
    parser.add_argument("--headless", action="store_true", help="no TUI: print the merged log")
    options = parse(parser, argv)
    from supervisor.demo import run_demo

    return run_demo(headless=options.headless or not is_terminal())
