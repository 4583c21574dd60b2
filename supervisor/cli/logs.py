"""`supervisor logs`: what the ranks printed, merged by time of arrival, filtered, followed, or raw.

In: argv. Out: lines `node:rank| text`, with --fold one line for many ranks; with --raw the bytes of one stream of one
rank.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import warnings
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from remote_agent.text.patterns import compile_pattern, ignores_case, make_filter
from remote_agent.text.rows import dropped_text
from remote_agent.wire import Problem
from remote_agent.wire.answers import MAX_ROWS
from remote_agent.wire.documents import STREAMS as ALL_STREAMS
from supervisor.cli.entry import say
from supervisor.cli.options import (
    LATE_GRACE,
    LOOKS,
    load_target,
    make_parser,
    parse,
    read_duration,
    read_ranks,
    say_left_out,
    settle,
)
from supervisor.cli.output import Writer
from supervisor.cli.whole_lines import WholeLines, patiently, printed, whole_line, write_folded
from supervisor.errors import RequestFailed, UsageError
from supervisor.logs import files as log_files
from supervisor.logs import pages
from supervisor.logs.files import READ_DEADLINE, Asking
from supervisor.logs.rows import Clocks, now_ns
from supervisor.logs.selection import ALL, LogQuery, RecordFilter, Selection, StreamFilter, files_of
from supervisor.standard_streams import binary_out
from supervisor.wording.log_lines import line_of

if TYPE_CHECKING:
    from supervisor.logs.reader import LogReader
    from supervisor.logs.rows import LogLine
    from supervisor.session import Session
    from supervisor.ssh.answers import LogFileEntry

BATCH = 500


def run(verb: str, argv: Sequence[str]) -> int:
    """Show logs; returns the exit code."""
    options = parse_logs(argv)
    inventory, job = load_target(options)
    if options.node is not None and options.node not in {host.name for host in inventory.hosts}:
        names = " ".join(host.name for host in inventory.hosts)
        raise RequestFailed(f"no host {options.node!r} in the inventory", f"its hosts: {names}")
    from supervisor.session import Session

    async def show() -> int:
        async with Session(inventory, job, follow=options.follow, note_left_out=say_left_out) as session:
            await session.ready()
            if _takes_late(options):
                for view in await session.settle(timeout_s=LATE_GRACE):
                    say(f"{view.name}: {view.step}: {view.error or 'no answer yet'}; its log is shown once it answers")
            else:
                await settle(session, [options.node] if options.node else None)
            # The status has the clock offsets of the nodes.
            if options.follow:
                await session.until_current()
            else:
                session.set_status(await session.call("status"))
            for link in session.links.values():
                if link.is_malformed:
                    say(f"{link.view.name}: {link.view.error}; its log is not shown")
            writer = Writer(binary_out(), raw=options.raw)
            try:
                await (_raw(session, options, writer) if options.raw else _lines(session, options, writer))
            finally:
                await asyncio.to_thread(writer.close)
            writer.check()
        return _outcome(options, writer)

    try:
        return asyncio.run(show())
    except RequestFailed as refused:
        if refused.kind != "pattern":
            raise
        name = f"--grep {options.grep!r}" if options.grep is not None else "--include, --exclude"
        raise UsageError(f"{name}: {refused.message}", refused.hint) from refused


def _takes_late(options: argparse.Namespace) -> bool:
    """Return True if the log is followed from its beginning, so that hosts that answer late can be added later.

    Then there is no need to wait for them; while waiting, the group may be restarted and the newest generation change.
    """
    is_partial = options.tail is not None or options.since is not None or options.node is not None
    return bool(options.follow) and not (is_partial or options.fold or options.raw)


def _outcome(options: argparse.Namespace, writer: Writer) -> int:
    """Return the exit code: 1 if no line matches, as grep does."""
    if options.grep is None or writer.used:
        return 0
    say(f"no line matches --grep {options.grep!r}")
    return 1


async def _put(writer: Writer, data: bytes) -> None:
    """Queue bytes, and wait while the reader is behind; raises BrokenPipeError, SupervisorError."""
    writer.put(data)
    while writer.full and not writer.broken:
        await writer.room()
    writer.check()


async def _put_all(writer: Writer, pieces: AsyncGenerator[bytes, None]) -> None:
    async with aclosing(pieces):
        async for data in pieces:
            await _put(writer, data)


# --- raw


async def _raw(session: Session, options: argparse.Namespace, writer: Writer) -> None:
    stream, rank = options.stream or "stdout", options.rank[0]
    nodes = _nodes(session, options)
    matching = [
        file
        for file in await log_files.files(session, nodes)
        if file["rank"] == rank and file["stream"] == stream and options.generation in (None, file["generation"])
    ]
    if not matching:
        where = f" in generation {options.generation}" if options.generation is not None else ""
        hint = "NCCL may have written to stdout or stderr: try without --raw" if stream == "nccl" else ""
        raise RequestFailed(f"no {stream} of rank {rank}{where} on the hosts that answer", hint)
    newest = max(matching, key=lambda file: int(file["generation"]))

    def note_dropped(size: int) -> None:
        say(f"{dropped_text(size).decode()}; --raw continues after them")

    async for data in log_files.read_raw(session, newest, note_dropped, follow=options.follow):
        await _put(writer, data)


# --- lines


def _nodes(session: Session, options: argparse.Namespace) -> list[str] | None:
    """Return the hosts that are asked, None for all; a rank that is followed may move to another one."""
    if options.node:
        return [options.node]
    return None if options.follow or options.generation is not None else log_files.hosts_of(session, options.rank)


def _check_exists(files: list[LogFileEntry], generation: Any, ranks: Sequence[int] | None) -> None:
    """Raise RequestFailed for a generation or a rank that left no file."""
    present = {int(file["rank"]) for file in files if generation in (None, "all", file["generation"])}
    if files and not present:
        raise RequestFailed(
            f"no generation {generation} on the hosts that answer", f"the newest is {log_files.newest(files)}"
        )
    missing = sorted(set(ranks or ()) - present)
    if files and missing:
        names = " ".join(str(rank) for rank in sorted(present))
        raise RequestFailed(f"no rank {missing[0]} in generation {generation}", f"its ranks: {names}")


def _say_apart() -> None:
    say("lines of NCCL are left out here: --stream nccl shows them, --stream all shows all lines")


async def _lines(session: Session, options: argparse.Namespace, writer: Writer) -> None:
    selection = dataclasses.replace(selection_of(options), nodes=_nodes(session, options))
    stream_filter = StreamFilter(selection.streams, _say_apart)
    files = await log_files.files(session, None if options.follow else selection.nodes)
    newest = log_files.newest(files)
    if not options.follow:
        # The generation is fixed once, because the group may be restarted while we read.
        generation = newest if options.generation is None else options.generation
        _check_exists(files, generation, options.rank)
        selection = dataclasses.replace(selection, generation=generation)
    if options.follow and not _is_narrowed(options):
        await _follow(session, selection, newest, stream_filter, writer)
        return
    since_ns, clocks = await _since(session, selection, options)
    query = LogQuery(
        selection,
        pattern=options.grep,
        ignore_case=smart_case(options),
        level=None if selection.filter else options.level,
        since_ns=since_ns,
        exact=not (writer.is_terminal or options.fold),
    )
    batches = _batches(session.rows(query, clocks), options, newest, stream_filter)
    if options.fold:
        # A record may be a second old before it is known to be whole.
        wait_ns = (lambda: now_ns(session) - 2_000_000_000) if options.follow else (lambda: 0)
        await write_folded(batches, partial(_put, writer), wait_ns)
        return
    async with aclosing(batches):
        async for rows in batches:
            await _write(session, writer, rows, options)


async def write_tail(session: Session, writer: Writer, count: int) -> None:
    """Write the last lines of the newest generation, until nobody reads them."""
    with contextlib.suppress(BrokenPipeError):
        await _lines(session, parse_logs(["--tail", str(count)]), writer)


def _is_narrowed(options: argparse.Namespace) -> bool:
    some = any(getattr(options, name) is not None for name in ("grep", "level", "since", "tail"))
    return some or bool(options.fold or options.include or options.exclude)


async def _since(
    session: Session, selection: Selection, options: argparse.Namespace
) -> tuple[int | None, Clocks | None]:
    """Return the time of the first row wanted, None for all, and the clocks that it is measured by.

    The last lines of a pattern or a level of lines must be searched for in all lines; all others are counted from the
    end.
    """
    since_ns = None if options.since is None else now_ns(session) - int(options.since * 1e9)
    is_by_line = options.grep is not None or (options.level is not None and not selection.filter)
    if options.tail is None or is_by_line:
        return since_ns, None
    if not options.tail:
        return now_ns(session), None
    left, before_ns, clocks = options.tail, None, None
    while True:
        count = min(MAX_ROWS, left)
        page = await pages.merged(session, selection, count, before_ns=before_ns, clocks=clocks)
        clocks, left = page.clocks, left - len(page.rows)
        before_ns = page.since_ns
        if left <= 0 or not page.more:
            return max(since_ns or 0, before_ns), clocks


async def _batches(
    reader: LogReader, options: argparse.Namespace, newest: int, stream_filter: StreamFilter
) -> AsyncGenerator[list[LogLine], None]:
    """Yield the existing rows (only the last ones if a number was given), then those that arrive."""
    kept: deque[LogLine] = deque(maxlen=options.tail)
    async with aclosing(reader.existing(newest, whole=options.follow)) as existing:
        async for row in existing:
            kept.append(row)
            if options.tail is None and len(kept) == BATCH:
                stream_filter.note(reader.apart)
                yield list(kept)
                kept.clear()
    stream_filter.note(reader.apart)
    yield list(kept)
    if options.follow:
        async with aclosing(reader.live(newest)) as batches:
            async for batch in batches:
                stream_filter.note(reader.apart)
                yield batch.lines


async def _write(session: Session, writer: Writer, rows: list[LogLine], options: argparse.Namespace) -> None:
    """Write rows; of a line of any length all of it."""
    lines: list[bytes] = []
    # If the log is followed, a line that cannot be read must not cost lines of other ranks; otherwise it is an error.
    at_once: Asking = partial(log_files.ask, session, timeout_s=READ_DEADLINE)
    for row in rows:
        if not row.cut:
            lines.append(line_of(row))
            continue
        await _put(writer, b"".join(lines))
        lines.clear()
        await _put_all(writer, whole_line(patiently(session) if options.follow else at_once, row))
    await _put(writer, b"".join(lines))


async def _follow(
    session: Session, selection: Selection, newest: int, stream_filter: StreamFilter, writer: Writer
) -> None:
    """Write all bytes of the chosen files as lines."""
    whole = dataclasses.replace(selection, streams=files_of(selection.streams))
    lines = WholeLines(stream_filter, overwrites=writer.is_terminal)
    async with aclosing(session.follow(whole, "begin", newest)) as chunks:
        async for chunk in chunks:
            await _put_all(writer, printed(session, lines.feed(chunk)))
        await _put_all(writer, printed(session, lines.rest()))


# --- options

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
    parser = make_parser("logs", LOOKS)
    parser.add_argument("--rank", type=read_ranks, metavar="RANK[,RANK…]", help="only these ranks: 0,2-4")
    parser.add_argument("--node", metavar="NODE", help="only the ranks on this node")
    parser.add_argument("--stream", choices=list(STREAMS), help="default: both, stdout and stderr")
    parser.add_argument("--generation", type=read_generation, metavar="G", help="a number or all (default: the newest)")
    parser.add_argument("--grep", metavar="REGEX", help="only matching lines; case-sensitive if REGEX has a capital")
    parser.add_argument("-i", "--ignore-case", action="store_true", help="case-insensitive --grep")
    for option, effect in (("--include", "keep only records that match"), ("--exclude", "drop records that match")):
        parser.add_argument(option, action="append", default=[], metavar="REGEX", help=f"{effect}; repeatable")
    parser.add_argument("--level", choices=["debug", "info", "warn", "error"], help="only lines of this level or worse")
    parser.add_argument("--since", type=read_duration, metavar="T", help="only lines of the last T: 90s, 10m, 2h")
    parser.add_argument("--tail", type=read_count, metavar="N", help="only the last N lines")
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines until the job is over")
    parser.add_argument("--fold", action="store_true", help="collapse identical lines across ranks: [0-3,5]| text")
    parser.add_argument("--raw", action="store_true", help="the bytes of one stream of one rank, unchanged")
    options = parse(parser, argv)
    if options.grep is not None:
        try:
            # The nodes compile it the same way.
            _compile(options)
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
        raise UsageError(f"{other} cannot be combined with --include or --exclude", "leave one of them out")
    try:
        make_filter(options.include, options.exclude)
    except Problem as refused:
        raise UsageError(f"--include, --exclude: {refused.message}", refused.hint) from refused


def _check_raw(options: argparse.Namespace) -> None:
    filters = [name for name in ("grep", "level", "since", "tail") if getattr(options, name) is not None]
    if filters:
        raise UsageError(f"--raw and --{filters[0]} cannot be combined: --raw writes every byte")
    if options.fold:
        raise UsageError("--raw and --fold cannot be combined: --raw writes every byte")
    if options.rank is None or len(options.rank) != 1:
        raise UsageError("--raw writes one stream of one rank", "add --rank R")
    if options.stream in ("both", "all"):
        raise UsageError(f"--raw writes one stream, not {options.stream}", "choose stdout, stderr or nccl")
    if options.generation == "all":
        raise UsageError("--raw writes one generation, not all")


def smart_case(options: argparse.Namespace) -> bool:
    """Return whether --grep ignores case."""
    return options.ignore_case or (options.grep is not None and ignores_case(options.grep))


def _compile(options: argparse.Namespace) -> None:
    with warnings.catch_warnings():
        # A warning about a future meaning of [[ does not help an operator.
        warnings.simplefilter("ignore", FutureWarning)
        compile_pattern(options.grep, smart_case(options))


def selection_of(options: argparse.Namespace) -> Selection:
    """Return the selection of files and records."""
    return Selection(
        generation=options.generation,
        ranks=options.rank,
        streams=STREAMS[options.stream or "both"],
        nodes=[options.node] if options.node else None,
        filter=filter_of(options),
    )


def filter_of(options: argparse.Namespace) -> RecordFilter:
    """Return the filter for records; without patterns, --level selects lines instead."""
    if not options.include and not options.exclude:
        return ALL
    return RecordFilter(tuple(options.include), tuple(options.exclude), options.level or "")
