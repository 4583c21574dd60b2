"""`supervisor report`: the post-mortem of a job as Markdown or JSON; with --bundle the job itself as one file.

In: argv. Out: Markdown or one JSON document on stdout or in a file; a bundle, and one line about it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.diagnose.incidents import incidents_in
from remote_agent.text.controls import escape_controls
from remote_agent.text.names import count, size_text
from supervisor.bundle import check_free, host_facts, write
from supervisor.cli.entry import say
from supervisor.cli.options import LOOKS, add_json, in_session, make_parser, parse, settle
from supervisor.cli.output import write_json, write_lines
from supervisor.errors import SupervisorError, UsageError
from supervisor.standard_streams import progress_bar

if TYPE_CHECKING:
    from supervisor.report import Report
    from supervisor.session import Session

UNITS = {"k": 1000, "M": 1000**2, "G": 1000**3}
LOG_BYTES = 8 * 1000**2


def read_limit(text: str) -> int | None:
    """Return the bytes of `500k` or `2M`, None for `all`; raises argparse.ArgumentTypeError."""
    if text == "all":
        return None
    number, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1)
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: write all, or a size such as 500k or 2M")
    return int(number) * unit


def run(verb: str, argv: Sequence[str]) -> int:
    """Write the post-mortem, or the bundle; returns the exit code."""
    parser = make_parser(verb, LOOKS)
    add_json(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write to this file instead of stdout")
    words = "write the job as one file: logs, journal and charts of all nodes, without secrets; `attach FILE`, "
    words += "`diagnose FILE` and the like then show it anywhere"
    parser.add_argument("--bundle", metavar="FILE", type=Path, help=words)
    words = "of each log in the bundle, how much of its end, to about 1M (default: 8M)"
    parser.add_argument("--logs", metavar="all|SIZE", type=read_limit, default=LOG_BYTES, help=words)
    options = parse(parser, argv)
    if options.bundle is None:
        return in_session(options, lambda session: _report(session, options))
    if options.json or options.output is not None:
        raise UsageError("--bundle writes a file of its own", "leave --json and --output out")
    check_free(options.bundle)
    return in_session(options, lambda session: _bundle(session, options.bundle, options.logs))


async def _bundle(session: Session, path: Path, log_bytes: int | None) -> None:
    await settle(session)
    missing = await write(session, path, log_bytes, progress_bar)
    for reason in missing:
        say(f"{reason}; its files are missing from the bundle")
    if len(missing) == len(session.hosts):
        path.unlink()
        raise SupervisorError(f"{path}: no host has answered: nothing is written")
    there = count(len(session.hosts) - len(missing), "node")
    write_lines([f"{session.job}: {there}, {size_text(path.stat().st_size)} in {path}"])


async def _report(session: Session, options: argparse.Namespace) -> None:
    from supervisor.report import report

    await settle(session)
    session.set_status(await session.call("status"))
    events = await session.journal()
    nccl = (await session.call("incidents")).get("nccl")
    put(await report(session, events, incidents_in(events), nccl, await host_facts(session)), options)


def put(document: Report, options: argparse.Namespace) -> None:
    """Write a report to stdout or `options.output`, as lines or with `options.json` as JSON; raises SupervisorError."""
    from supervisor.report import lines

    if options.output is not None:
        text = json.dumps(document, indent=1) if options.json else escape_controls("\n".join(lines(document)))
        _save(options.output, text + "\n")
    elif options.json:
        write_json(document)
    else:
        write_lines(lines(document))


def _save(path: Path, text: str) -> None:
    """Write a file that only its owner may read: a report quotes logs."""
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise SupervisorError(f"{path}: {error.strerror}") from error
