"""`supervisor replay`: a recording on the screen, or as the merged log that it was.

In: argv. Out: the TUI on the recording; headless, lines `node:rank| text` on stdout and events on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import heapq
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from supervisor import plain
from supervisor.cli.folded import line_of
from supervisor.cli.options import is_terminal, make_parser, parse, read_duration
from supervisor.errors import UsageError

if TYPE_CHECKING:
    from supervisor.recording.reading import Recording
    from supervisor.session.logs import Row


def run(verb: str, argv: Sequence[str]) -> int:
    """Play a recording; returns the exit status."""
    parser = make_parser(verb, "FILE", target=False)
    parser.add_argument("file", metavar="FILE", type=Path, help="what `supervisor record` wrote")
    words = "begin at 90s, 10m, 2h after the begin, at a local time 10:03:51, at a time of the journal, or at the end"
    parser.add_argument("--at", metavar="TIME", help=words)
    parser.add_argument("--speed", metavar="N", type=float, help="times as fast (default: 1; headless: all at once)")
    parser.add_argument("--paused", action="store_true", help="let the time stand")
    parser.add_argument("--headless", action="store_true", help="no TUI: print the merged log and the events")
    parser.add_argument("--theme", metavar="NAME", help="palette of the TUI")
    parser.add_argument("--ascii", action="store_true", help="no characters beyond ASCII")
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
    """Return the time that `--at` means, the begin for none; raises UsageError."""
    if text is None or text == "end":
        return recording.begin_ns if text is None else recording.end_ns
    begin = datetime.datetime.fromtimestamp(recording.begin_ns / 1e9).astimezone()
    try:
        if "T" in text:
            moment = datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone()
        elif ":" in text:
            moment = datetime.datetime.combine(begin.date(), datetime.time.fromisoformat(text), begin.tzinfo)
            # A job may run past midnight.
            moment += datetime.timedelta(days=moment < begin.replace(microsecond=0))
        else:
            return recording.begin_ns + int(read_duration(text) * 1e9)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"--at {text!r}: write 90s, 10m, 10:03:51, 2026-11-20T10:03:51Z or end") from error
    return int(moment.timestamp() * 1e9)


def _print(recording: Recording, at_ns: int, speed: float | None) -> int:
    """Write rows and events in the order of their times, paced where a speed is given."""
    last_ns = at_ns
    for t_ns, item in _items(recording):
        if t_ns < at_ns:
            continue
        if speed is not None and t_ns > last_ns:
            sys.stdout.flush()
            time.sleep((t_ns - last_ns) / 1e9 / speed)
            last_ns = t_ns
        if isinstance(item, str):
            sys.stdout.flush()
            sys.stderr.write(f"{item}\n")
        else:
            sys.stdout.buffer.write(line_of(item))
    sys.stdout.flush()
    return 0


def _items(recording: Recording) -> Iterator[tuple[int, str | Row]]:
    from supervisor.recording import tape
    from supervisor.session.logs import Selection

    files = tape.selected(recording, Selection(generation="all"), recording.end_ns)
    logs = [tape.rows(file, recording.lines(file)) for file in files]
    events = (
        (t_ns, plain.event_line(event)) for t_ns, event in zip(recording.event_times_ns, recording.events, strict=True)
    )
    return heapq.merge(events, *(((row.t_ns, row) for row in rows) for rows in logs), key=lambda item: item[0])
