"""`supervisor record`, `replay` and `report`: a job as one file, that file on the screen, the post-mortem of either.

In: argv. Out: a file and one line that names its contents; the TUI, or headless lines `node:rank| text` on stdout and
events on stderr; Markdown or one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import heapq
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.diagnose.incidents import incidents_in
from remote_agent.text.controls import escape_controls
from remote_agent.text.names import size_text
from supervisor.cli.entry import say
from supervisor.cli.options import (
    add_json,
    in_session,
    is_terminal,
    load_target,
    make_parser,
    parse,
    read_duration,
    say_left_out,
    settle,
)
from supervisor.cli.output import write_json, write_lines
from supervisor.errors import SupervisorError, UsageError
from supervisor.recording.writing import Limit, Seen, check_free, host_facts, watch, write
from supervisor.standard_streams import binary_out, flush_out, lines_for, write_err
from supervisor.wording.events import EventRows, event_line
from supervisor.wording.log_lines import line_of

if TYPE_CHECKING:
    from supervisor.inventory import Inventory
    from supervisor.logs.rows import LogLine
    from supervisor.recording.reading import Recording
    from supervisor.report import Report
    from supervisor.session import Session

UNITS = {"k": 1000, "M": 1000**2, "G": 1000**3}


def read_limit(text: str) -> Limit:
    """Return the limit for `500k`, `2M`, `none` or `all`; raises argparse.ArgumentTypeError."""
    if text in ("all", "none"):
        return Limit(None if text == "all" else 0, None)
    number, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1)
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: write all, none, or a size such as 500k or 2M")
    return Limit(int(number) * unit, None)


def run(verb: str, argv: Sequence[str]) -> int:
    """Record a job; returns the exit code."""
    parser = make_parser(verb, "[HOSTS] [JOB] FILE")
    words = "how much of the end of each log: all, none, or a size (default: 1M, 64M in total); "
    words += "the lines around evidence are always included"
    parser.add_argument("--logs", metavar="all|none|SIZE", type=read_limit, default=Limit(), help=words)
    parser.add_argument("-f", "--follow", action="store_true", help="record until the job is over, or Ctrl-C")
    options = parse(parser, argv)
    if not options.target or options.target[-1].endswith(".toml"):
        raise UsageError("FILE is missing", f"supervisor {verb} [HOSTS] [JOB] FILE")
    *options.target, name = options.target
    path = Path(name)

    async def record(session: Session) -> None:
        await settle(session)
        seen = await _watch(session) if options.follow else []
        events, missing = await write(session, path, limit=options.logs, seen=seen)
        for reason in missing:
            say(f"{reason}; later log lines are missing from the recording")
        write_lines([f"{session.job}: {events} events, {size_text(path.stat().st_size)} in {path}"])

    check_free(path)
    return in_session(options, record, follow=options.follow)


async def _watch(session: Session) -> list[Seen]:
    """Return the status by time until the job is over, or Ctrl-C."""
    await session.until_current()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        return await watch(session, stop)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


# --- replay


def run_replay(verb: str, argv: Sequence[str]) -> int:
    """Play a recording; returns the exit code."""
    parser = make_parser(verb, "FILE", target=False)
    parser.add_argument("file", metavar="FILE", type=Path, help="written by `supervisor record`")
    words = "where to start: 90s, 10m or 2h after the beginning, 10:03:51 local time, a time as in the journal, or end"
    parser.add_argument("--at", metavar="TIME", help=words)
    parser.add_argument(
        "--speed", metavar="N", type=float, help="play N times as fast (default: 1; headless: all at once)"
    )
    parser.add_argument("--paused", action="store_true", help="start paused")
    parser.add_argument(
        "--headless", action="store_true", help="print the merged log and the events instead of the TUI"
    )
    parser.add_argument("--theme", metavar="NAME", help="colours of the TUI")
    parser.add_argument("--ascii", action="store_true", help="use ASCII characters only")
    options = parse(parser, argv)
    if options.speed is not None and not 0 < options.speed < 1e6:
        raise UsageError(f"--speed {options.speed}: must be above 0")
    from supervisor.recording.reading import load

    recording = load(options.file)
    at_ns = read_at(options.at, recording)
    if options.headless or not is_terminal():
        with contextlib.closing(recording):
            return _print(recording, at_ns, options.speed)
    from supervisor.recording.player import Player
    from supervisor.tui.replay import run_replay

    player = Player(recording, at_ns, speed=options.speed or 1.0, paused=options.paused)
    return run_replay(player, theme=options.theme, ascii_only=options.ascii)


def read_at(text: str | None, recording: Recording) -> int:
    """Return the time given by `--at`, or the beginning; raises UsageError."""
    if text is None or text == "end":
        return recording.begin_ns if text is None else recording.end_ns
    begin = datetime.datetime.fromtimestamp(recording.begin_ns / 1e9).astimezone()
    try:
        if "T" in text:
            moment = datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone()
        elif ":" in text:
            moment = datetime.datetime.combine(begin.date(), datetime.time.fromisoformat(text), begin.tzinfo)
            # The job may have run past midnight.
            moment += datetime.timedelta(days=moment < begin.replace(microsecond=0))
        else:
            return recording.begin_ns + int(read_duration(text) * 1e9)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"--at {text!r}: write 90s, 10m, 10:03:51, 2026-11-20T10:03:51Z or end") from error
    return int(moment.timestamp() * 1e9)


def _print(recording: Recording, at_ns: int, speed: float | None) -> int:
    """Write rows and events by time, in real time if a speed is given."""
    last_ns = at_ns
    file = binary_out()
    render = lines_for(file)
    for t_ns, item in _items(recording):
        if t_ns < at_ns:
            continue
        if speed is not None and t_ns > last_ns:
            flush_out()
            time.sleep((t_ns - last_ns) / 1e9 / speed)
            last_ns = t_ns
        if isinstance(item, str):
            flush_out()
            write_err(f"{item}\n")
        else:
            file.write(render(line_of(item)))
    flush_out()
    return 0


def _items(recording: Recording) -> Iterator[tuple[int, str | LogLine]]:
    from supervisor.logs.selection import Selection
    from supervisor.recording.reading import rows_between, selected

    files = selected(recording, Selection(generation="all"), recording.end_ns)
    rows = rows_between({file: recording.lines(file) for file in files}, 0, sys.maxsize)
    journal = EventRows()
    journal.follow(recording.events)
    events = ((recording.event_times_ns[row["seq"] - 1], event_line(row)) for row in journal.rows)
    return heapq.merge(events, ((row.t_ns, row) for row in rows), key=lambda item: item[0])


# --- report


def run_report(verb: str, argv: Sequence[str]) -> int:
    """Write the post-mortem; returns the exit code."""
    parser = make_parser(verb, "[HOSTS] [JOB] | RECORDING")
    add_json(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write to this file instead of stdout")
    options = parse(parser, argv)
    recording = _recording(options.target)
    if recording is not None:
        document = asyncio.run(_of_recording(recording))
    else:
        document = asyncio.run(_of_job(*load_target(options)))
    from supervisor.report import lines

    if options.output is not None:
        text = json.dumps(document, indent=1) if options.json else escape_controls("\n".join(lines(document)))
        _save(options.output, text + "\n")
    elif options.json:
        write_json(document)
    else:
        write_lines(lines(document))
    return 0


def _recording(words: Sequence[str]) -> Path | None:
    """Return the recording that the arguments name, None for a job: a file other than an inventory."""
    files = [Path(word) for word in words if not word.endswith(".toml") and (os.sep in word or Path(word).is_file())]
    if files and len(words) > 1:
        raise UsageError(f"{files[0]} is a recording: give no other arguments")
    return files[0] if files else None


async def _of_recording(path: Path) -> Report:
    from supervisor.recording.player import Player
    from supervisor.recording.reading import load
    from supervisor.report import report

    recording = load(path)
    async with Player(recording, recording.end_ns) as player:
        meta = recording.meta
        return await report(player, player.events, player.incidents, meta["nccl"], meta["hosts"])


async def _of_job(inventory: Inventory, job: str | None) -> Report:
    from supervisor.report import report
    from supervisor.session import Session

    async with Session(inventory, job, note_left_out=say_left_out) as session:
        await session.ready()
        await settle(session)
        session.set_status(await session.call("status"))
        events = await session.journal()
        nccl = (await session.call("incidents")).get("nccl")
        return await report(session, events, incidents_in(events), nccl, await host_facts(session))


def _save(path: Path, text: str) -> None:
    """Write a file that only its owner may read: a report quotes logs."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SupervisorError(f"{path}: {error.strerror}") from error
