"""The options of `supervisor logs`, checked against each other.

In: argv. Out: options; which files they mean; UsageError.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Sequence

from remote_agent.logs.filters import make_filter
from remote_agent.logs.pattern import compile_pattern, ignores_case
from remote_agent.wire import Problem
from supervisor.cli.options import make_parser, parse, read_duration, read_ranks
from supervisor.errors import UsageError
from supervisor.session.filters import ALL, Filter
from supervisor.session.logs import Selection
from supervisor.session.streams import STREAMS as ALL_STREAMS

STREAMS = {
    "stdout": ("stdout",),
    "stderr": ("stderr",),
    "nccl": ("nccl",),
    "both": ("stdout", "stderr"),
    "all": ALL_STREAMS,
}


def read_generation(text: str) -> int | str:
    """Return a generation's number, or "all"; raises argparse.ArgumentTypeError."""
    if text == "all" or text.isdecimal():
        return text if text == "all" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: a number, or all")


def read_count(text: str) -> int:
    """Return a whole number of 0 or more; raises argparse.ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of 0 or more")
    return int(text)


def parse_logs(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options, checked against each other; raises UsageError."""
    parser = make_parser("logs")
    parser.add_argument("--rank", type=read_ranks, metavar="R[,R…]", help="only these ranks: 0,2-4")
    parser.add_argument("--node", metavar="N", help="only the ranks on this node")
    parser.add_argument("--stream", choices=list(STREAMS), help="default: both, stdout and stderr")
    parser.add_argument("--generation", type=read_generation, metavar="G", help="a number or all (default: the newest)")
    parser.add_argument("--grep", metavar="REGEX", help="only lines that match; capitals count where REGEX has one")
    parser.add_argument("-i", "--ignore-case", action="store_true", help="--grep never tells A from a")
    parser.set_defaults(pattern=None)
    whole = "tracebacks as a whole; may be given again"
    parser.add_argument("--include", action="append", default=[], metavar="REGEX", help=f"keep what matches, {whole}")
    parser.add_argument("--exclude", action="append", default=[], metavar="REGEX", help=f"drop what matches, {whole}")
    parser.add_argument("--level", choices=["debug", "info", "warn", "error"], help="only lines of this level or worse")
    parser.add_argument("--since", type=read_duration, metavar="T", help="only what came in the last T: 90s, 10m, 2h")
    parser.add_argument("--tail", type=read_count, metavar="N", help="only the last N lines")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as lines come, until the job is over")
    parser.add_argument("--fold", action="store_true", help="what ranks print alike at one moment, once: [0-3,5]| text")
    parser.add_argument("--raw", action="store_true", help="the very bytes of one stream of one rank, nothing added")
    options = parse(parser, argv)
    if options.grep is not None:
        try:
            # As the nodes read it.
            options.pattern = _compiled(options)
        except Problem as refused:
            raise UsageError(f"--grep {options.grep!r}: {refused.message}", refused.hint) from refused
    if options.include or options.exclude:
        _check_filter(options)
    if options.raw:
        _check_raw(options)
    return options


def _check_filter(options: argparse.Namespace) -> None:
    if options.raw or options.grep is not None:
        other = "--raw" if options.raw else "--grep"
        raise UsageError(f"{other} excludes --include and --exclude", "leave one of them out")
    try:
        make_filter(options.include, options.exclude)
    except Problem as refused:
        raise UsageError(f"--include, --exclude: {refused.message}", refused.hint) from refused


def _check_raw(options: argparse.Namespace) -> None:
    filters = [name for name in ("grep", "level", "since", "tail") if getattr(options, name) is not None]
    if filters:
        raise UsageError(f"--raw and --{filters[0]} exclude each other: --raw writes every byte")
    if options.fold:
        raise UsageError("--raw and --fold exclude each other: --raw writes every byte")
    if options.rank is None or len(options.rank) != 1:
        raise UsageError("--raw writes one stream of one rank", "add --rank R")
    if options.stream in ("both", "all"):
        raise UsageError(f"--raw writes one stream, not {options.stream}", "choose stdout, stderr or nccl")
    if options.generation == "all":
        raise UsageError("--raw writes one generation, not all")


def smart_case(options: argparse.Namespace) -> bool:
    """True where --grep does not tell A from a."""
    return options.ignore_case or (options.grep is not None and ignores_case(options.grep))


def _compiled(options: argparse.Namespace) -> re.Pattern[bytes]:
    with warnings.catch_warnings():
        # Of a future meaning of [[: an operator is no programmer of ours.
        warnings.simplefilter("ignore", FutureWarning)
        return compile_pattern(options.grep, smart_case(options)).regex


def selection_of(options: argparse.Namespace) -> Selection:
    """Return which files the options mean."""
    return Selection(
        generation=options.generation,
        ranks=options.rank,
        streams=STREAMS[options.stream or "both"],
        nodes=[options.node] if options.node else None,
        filter=filter_of(options),
    )


def filter_of(options: argparse.Namespace) -> Filter:
    """Return which records the options keep; without patterns the level is one of lines."""
    if not options.include and not options.exclude:
        return ALL
    return Filter(tuple(options.include), tuple(options.exclude), options.level or "")
