"""`supervisor logs`: what the ranks printed, merged by time of arrival, filtered, followed, or raw.

In: argv. Out: lines `node:rank| text`, with --fold those alike as one; with --raw the very bytes of one stream of one
rank.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from remote_agent.logs.rows import dropped_text
from supervisor.cli.entry import say
from supervisor.cli.folded import fold_all, fold_live, line_of, rows_of
from supervisor.cli.log_options import parse_logs, selection_of, smart_case
from supervisor.cli.options import load_target
from supervisor.cli.output import Writer
from supervisor.cli.whole_lines import Printer, patiently, whole_line
from supervisor.errors import RequestFailed, UsageError
from supervisor.session import logs
from supervisor.session.hits import hits, now_ns
from supervisor.session.passing import Passing
from supervisor.session.search import search
from supervisor.session.streams import Sieve, files_of

if TYPE_CHECKING:
    from supervisor.session.follow import Chunk, Seen
    from supervisor.session.logs import Row, Selection
    from supervisor.session.session import Session

# Rows that are handed to the writer at once.
BATCH = 500
# How long `-f` waits for hosts before it begins with those that have answered, seconds.
LATE_GRACE = 2.0


def run(verb: str, argv: Sequence[str]) -> int:
    """Show logs; returns the exit status."""
    options = parse_logs(argv)
    inventory, job = load_target(options)
    if options.node is not None and options.node not in {host.name for host in inventory.hosts}:
        names = " ".join(host.name for host in inventory.hosts)
        raise RequestFailed(f"no host {options.node!r} in the inventory", f"its hosts: {names}")
    from supervisor.session.session import open_session

    async def show() -> int:
        async with open_session(inventory, job, feed=options.follow) as session:
            await session.ready()
            if _takes_late(options):
                silent, what = await session.settle(timeout_s=LATE_GRACE), "shown once it answers"
            else:
                silent, what = await session.settle([options.node] if options.node else None), "not shown"
            for view in silent:
                say(f"{view.name}: {view.step}: {view.error or 'no answer yet'}; its log is {what}")
            # For the clocks of the nodes.
            if options.follow:
                await session.heard()
            else:
                session.set_status(await session.call("status"))
            writer = Writer(sys.stdout.buffer)
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
    """Whether all is followed from its begin, so that nothing is lost of a host that answers later.

    Nothing waits for it then: the group may be restarted meanwhile, and the newest generation be another one.
    """
    part = options.tail is not None or options.since is not None or options.node is not None
    return bool(options.follow) and not (part or options.fold or options.raw)


def _outcome(options: argparse.Namespace, writer: Writer) -> int:
    """Return the exit status: as grep's, 1 where no line matches."""
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
    nodes = [options.node] if options.node else None
    found = [
        file
        for file in await logs.files(session, nodes)
        if file["rank"] == rank and file["stream"] == stream and options.generation in (None, file["generation"])
    ]
    if not found:
        where = f" in generation {options.generation}" if options.generation is not None else ""
        hint = "NCCL may have written into stdout or stderr: leave --raw out" if stream == "nccl" else ""
        raise RequestFailed(f"no {stream} of rank {rank}{where} on the hosts that answer", hint)
    newest = max(found, key=lambda file: int(file["generation"]))

    def note_dropped(size: int) -> None:
        say(f"{dropped_text(size).decode()}; --raw goes on behind them")

    async for data in logs.read_raw(session, newest, note_dropped, follow=options.follow):
        await _put(writer, data)


# --- lines


def _check_there(files: list[dict[str, Any]], generation: Any, ranks: Sequence[int] | None) -> None:
    """Raise RequestFailed for a generation or a rank that left no file."""
    there = {int(file["rank"]) for file in files if generation in (None, "all", file["generation"])}
    if files and not there:
        raise RequestFailed(
            f"no generation {generation} on the hosts that answer", f"the newest is {logs.newest(files)}"
        )
    missing = sorted(set(ranks or ()) - there)
    if files and missing:
        names = " ".join(str(rank) for rank in sorted(there))
        raise RequestFailed(f"no rank {missing[0]} in generation {generation}", f"its ranks: {names}")


def _say_apart() -> None:
    say("lines of NCCL are left out here: --stream nccl shows them, --stream all shows all lines")


async def _lines(session: Session, options: argparse.Namespace, writer: Writer) -> None:
    selection = selection_of(options)
    sieve = Sieve(selection.streams, _say_apart)
    if not options.follow:
        files = await logs.files(session, selection.nodes)
        # Fixed once: the group may be restarted while we read.
        generation = logs.newest(files) if options.generation is None else options.generation
        _check_there(files, generation, options.rank)
        selection = dataclasses.replace(selection, generation=generation)
    if selection.filter:
        await _passing(session, selection, options, writer)
    elif not options.follow:
        await _write(session, writer, _there(session, selection, options, sieve), options)
    elif options.level is not None:
        await _follow_level(session, selection, options, sieve, writer)
    else:
        await _follow(session, selection, options, sieve, writer)


async def _passing(session: Session, selection: Selection, options: argparse.Namespace, writer: Writer) -> None:
    """Write what a filter keeps: of what is there the last lines if so many were asked for, then what comes."""
    since_ns = 0 if options.since is None else now_ns(session) - int(options.since * 1e9)
    passing = Passing(session, selection, since_ns)
    files = await logs.files(session, selection.nodes) if selection.generation is None else []
    generation = logs.newest(files) if selection.generation is None else selection.generation

    async def batches() -> AsyncGenerator[list[Row], None]:
        kept: deque[Row] = deque(maxlen=options.tail)
        async with aclosing(passing.there(generation, last=not options.follow)) as there:
            async for rows in there:
                kept.extend(rows)
                if options.tail is None:
                    yield list(kept)
                    kept.clear()
        yield list(kept)
        if options.follow:
            async with aclosing(passing.coming(generation if isinstance(generation, int) else 0)) as coming:
                async for rows in coming:
                    yield rows

    if options.follow and options.fold:
        # A record may be a second old before it is known to be whole.
        await fold_live(batches(), partial(_put, writer), lambda: now_ns(session) - 2_000_000_000)
        return

    async with aclosing(batches()) as every:
        async for rows in every:
            await _write(session, writer, _one_by_one(rows), options)


async def _one_by_one(rows: list[Row]) -> AsyncGenerator[Row, None]:
    for row in rows:
        yield row


async def _there(
    session: Session, selection: Selection, options: argparse.Namespace, sieve: Sieve, seen: Seen | None = None
) -> AsyncGenerator[Row, None]:
    """Yield what is there: all of it, or what passes the filters, or the last lines; note in `seen` how far it goes."""
    whole = options.tail is None and not _is_filtered(options)
    rows = logs.dump(session, selection) if whole else _recent(session, selection, options, sieve)
    async with aclosing(rows):
        async for row in rows:
            if seen is not None:
                place = seen.setdefault(row.node, {})
                key = (row.generation, row.rank, row.stream)
                place[key] = max(place.get(key, 0), row.offset + len(row.text) + row.cut)
            if not whole or sieve.holds(row.stream, row.text):
                yield row


async def _write(
    session: Session, writer: Writer, rows: AsyncGenerator[Row, None], options: argparse.Namespace
) -> None:
    """Write rows, many at once; of a line of any length all of it."""
    if options.fold:
        await fold_all(rows, partial(_put, writer), BATCH)
        return
    lines: list[bytes] = []
    # Who follows loses no line of the others because of one that cannot be read; else that is an error.
    at_once: logs.Asking = partial(logs.ask, session, timeout_s=logs.READ_DEADLINE)
    asking = patiently(session) if options.follow else at_once
    try:
        async for row in rows:
            if not row.cut:
                lines.append(line_of(row))
            if row.cut or len(lines) >= BATCH:
                await _put(writer, b"".join(lines))
                lines.clear()
            if row.cut:
                await _put_all(writer, whole_line(asking, row))
    finally:
        await rows.aclose()
    await _put(writer, b"".join(lines))


def _is_filtered(options: argparse.Namespace) -> bool:
    return any(getattr(options, name) is not None for name in ("grep", "level", "since"))


async def _search(session: Session, selection: Selection, options: argparse.Namespace, sieve: Sieve) -> list[Row]:
    rows = [row async for row in search(session, selection, **_query(session, options, sieve))]
    return sorted(rows, key=lambda row: (row.t_ns, row.rank, row.stream, row.line))


def _query(session: Session, options: argparse.Namespace, sieve: Sieve) -> dict[str, Any]:
    return {
        "pattern": options.grep or "",
        "ignore_case": smart_case(options),
        "level": options.level,
        "since_ns": None if options.since is None else now_ns(session) - int(options.since * 1e9),
        "note_apart": sieve.note,
    }


async def _tail(session: Session, selection: Selection, count: int, sieve: Sieve) -> list[Row]:
    """Return the last `count` rows, however many pages that takes."""
    page = await logs.merged(session, selection, min(4096, max(1, count)))
    rows = page.rows
    sieve.note(page.apart)
    while len(rows) < count and page.more:
        wanted = min(4096, count - len(rows))
        page = await logs.merged(session, selection, wanted, before_ns=rows[0].t_ns, clocks=page.clocks)
        sieve.note(page.apart)
        rows = page.rows + rows
    return last(rows, count)


def last(rows: list[Row], count: int | None) -> list[Row]:
    """Return the last `count` rows; None: all."""
    return rows if count is None else rows[len(rows) - min(count, len(rows)) :]


# --- follow


async def _follow(
    session: Session, selection: Selection, options: argparse.Namespace, sieve: Sieve, writer: Writer
) -> None:
    """Write what is there (all, or the last lines, or what matches), then what comes."""
    start, seen = "begin", None
    files = await logs.files(session)
    oldest = logs.newest(files)
    if options.fold or options.tail is not None or options.since is not None:
        start = "resume"
        seen = _positions(files)
        past = selection
        if selection.generation is None:
            # Fixed once: a generation that begins now is followed from its begin.
            mine = [file for file in files if selection.nodes is None or file["node"] in selection.nodes]
            past = dataclasses.replace(selection, generation=logs.newest(mine))
        await _write(session, writer, _there(session, past, options, sieve, seen), options)
    pattern = options.pattern
    whole = dataclasses.replace(selection, streams=files_of(selection.streams))
    chunks = _without_torn(session.follow(whole, start, seen, oldest), seen)
    if options.fold:
        await fold_live(rows_of(session, chunks, pattern, sieve), partial(_put, writer), time.monotonic_ns)
        return
    printer = Printer(session, sieve, pattern)
    async with aclosing(chunks):
        async for chunk in chunks:
            await _put_all(writer, printer.feed(chunk))
        await _put_all(writer, printer.rest())


def _positions(files: list[dict[str, Any]]) -> Seen:
    seen: Seen = {}
    for file in files:
        seen.setdefault(file["node"], {})[(file["generation"], file["rank"], file["stream"])] = int(file["size"])
    return seen


async def _recent(
    session: Session, selection: Selection, options: argparse.Namespace, sieve: Sieve
) -> AsyncGenerator[Row, None]:
    if _is_filtered(options):
        rows = last(await _search(session, selection, options, sieve), options.tail)
    else:
        rows = await _tail(session, selection, options.tail, sieve)
    for row in rows:
        yield row


async def _without_torn(chunks: AsyncGenerator[Chunk, None], seen: Seen | None) -> AsyncGenerator[Chunk, None]:
    """Drop the newline of a row that has been written already: a row's text comes without it."""
    begun = {(node, *key): offset for node, places in (seen or {}).items() for key, offset in places.items()}
    async with aclosing(chunks):
        async for chunk in chunks:
            start = begun.pop((chunk.node, chunk.generation, chunk.rank, chunk.stream), None)
            if start is not None and chunk.offset == start and chunk.data[:1] == b"\n":
                yield chunk._replace(offset=chunk.offset + 1, data=chunk.data[1:])
            else:
                yield chunk


async def _follow_level(
    session: Session, selection: Selection, options: argparse.Namespace, sieve: Sieve, writer: Writer
) -> None:
    """Write lines of a level as they come; of those that are there, the last ones if so many were asked for."""
    oldest = logs.newest(await logs.files(session)) if selection.generation is None else 0
    looks = _lasts(hits(session, selection, oldest, _query(session, options, sieve)), options.tail)
    if options.fold:
        # What a look finds may be a second old.
        await fold_live(looks, partial(_put, writer), lambda: now_ns(session) - 1_000_000_000)
        return
    async with aclosing(looks):
        async for rows in looks:
            await _write(session, writer, _one_by_one(rows), options)


async def _lasts(looks: AsyncGenerator[list[Row], None], count: int | None) -> AsyncGenerator[list[Row], None]:
    """Yield what looks bring; of the first one the last `count` rows."""
    async with aclosing(looks):
        async for rows in looks:
            yield last(rows, count)
            count = None
