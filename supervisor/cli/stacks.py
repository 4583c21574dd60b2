"""`supervisor stacks`, `why` and `signal`: the Python stacks of ranks; what their time goes to; send a signal.

In: argv. Out: text, equal stacks grouped; one line per signalled rank; or one JSON document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from supervisor.cli.options import add_json, in_session, make_parser, parse, read_ranks, settle
from supervisor.cli.output import write_json, write_lines, write_ranks
from supervisor.errors import UsageError
from supervisor.wording.slow import Times
from supervisor.wording.stacks import stacks_lines

if TYPE_CHECKING:
    from supervisor.session import Session


def run(verb: str, argv: Sequence[str]) -> int:
    """Show the stacks; returns the exit code."""
    parser = make_parser(verb)
    parser.add_argument("--rank", type=read_ranks, metavar="RANK[,RANK…]", help="only these ranks: 0,2-4")
    parser.add_argument("--save", action="store_true", help="save stacks and flight records next to the ranks' logs")
    add_json(parser)
    options = parse(parser, argv)

    async def show(session: Session) -> int:
        await settle(session)
        if options.save:
            return await _save(session, options.rank, options.json)
        stacks = await session.stacks(options.rank)
        if options.json:
            write_json(stacks)
        else:
            write_lines(stacks_lines(**stacks))
        return 0

    return in_session(options, show, live_only=True)


def run_why(verb: str, argv: Sequence[str]) -> int:
    """Sample all ranks for some 20 s, and show what their time goes to; returns the exit code: 1 if none was."""
    parser = make_parser(verb)
    parser.add_argument("--rank", type=read_ranks, metavar="RANK[,RANK…]", help="these ranks beside the others: 0,2-4")
    add_json(parser)
    options = parse(parser, argv)

    async def show(session: Session) -> int:
        await settle(session)
        times = Times(await session.why(options.rank))
        if options.json:
            write_json(times.to_json(options.rank))
        else:
            write_lines(times.lines(options.rank))
        return 0 if times.shares else 1

    return in_session(options, show, live_only=True)


async def _save(session: Session, ranks: list[int] | None, as_json: bool) -> int:
    """Save the stacks on the nodes; returns the exit code: 1 if a rank gave none."""
    status = await session.call("status")
    known = [rank["rank"] for node in status.get("nodes", ()) for rank in node.get("ranks", ())]
    answer = await session.request("keep", ranks=known if ranks is None else ranks)
    return write_ranks(session.job, "stacks", answer, as_json=as_json)


def run_signal(verb: str, argv: Sequence[str]) -> int:
    """Send the signal; returns the exit code: 1 if a rank did not get it."""
    parser = make_parser(verb, "[HOSTS] [JOB] SIGNAL")
    parser.add_argument(
        "--rank", type=read_ranks, required=True, metavar="RANK[,RANK…]", help="the ranks to signal: 0,2-4"
    )
    add_json(parser)
    options = parse(parser, argv)
    if not options.target:
        raise UsageError("SIGNAL is missing", "supervisor signal --rank 3 USR1")
    *options.target, name = options.target

    async def send(session: Session) -> int:
        await session.settle()
        answer = await session.request("signal", ranks=options.rank, signal=name)
        return write_ranks(session.job, verb, answer, as_json=options.json)

    return in_session(options, send, follow=True, live_only=True)
