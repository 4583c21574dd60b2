"""`supervisor report`: the post-mortem of a job, or of a recording.

In: argv. Out: Markdown or one JSON document, on stdout or in a file.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_agent.diagnose.told import told_incidents
from supervisor.cli.entry import say
from supervisor.cli.options import add_json, load_target, make_parser, parse
from supervisor.cli.output import write_json, write_lines
from supervisor.errors import SupervisorError, UsageError

if TYPE_CHECKING:
    from supervisor.inventory import Inventory


def run(verb: str, argv: Sequence[str]) -> int:
    """Write the post-mortem; returns the exit status."""
    parser = make_parser(verb, "[HOSTS] [JOB] | RECORDING")
    add_json(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write into this file, not to stdout")
    options = parse(parser, argv)
    recording = _recording(options.target)
    if recording is not None:
        document = asyncio.run(_of_recording(recording))
    else:
        document = asyncio.run(_of_job(*load_target(options)))
    from supervisor.report.markdown import lines

    if options.output is not None:
        text = json.dumps(document, indent=1) if options.json else "\n".join(lines(document))
        _save(options.output, text + "\n")
    elif options.json:
        write_json(document)
    else:
        write_lines(lines(document))
    return 0


def _recording(words: Sequence[str]) -> Path | None:
    """Return the recording that is meant, None for a job: a word that names a file, other than an inventory."""
    files = [Path(word) for word in words if not word.endswith(".toml") and (os.sep in word or Path(word).is_file())]
    if files and len(words) > 1:
        raise UsageError(f"{files[0]} is a file: a recording stands alone")
    return files[0] if files else None


async def _of_recording(path: Path) -> dict[str, Any]:
    from supervisor.recording.player import Player
    from supervisor.recording.reading import load
    from supervisor.report.facts import report

    recording = load(path)
    async with Player(recording, recording.end_ns) as player:
        meta = recording.meta
        return await report(player, player.events, player.incidents, meta["nccl"], meta["hosts"])


async def _of_job(inventory: Inventory, job: str | None) -> dict[str, Any]:
    from supervisor.recording.writing import hosts_told
    from supervisor.report.facts import report
    from supervisor.session.session import open_session

    async with open_session(inventory, job) as session:
        await session.ready()
        for view in await session.settle():
            say(f"{view.name}: {view.step}: {view.error or 'no answer yet'}; what only it knows is missing")
        session.set_status(await session.call("status"))
        events = await session.journal()
        nccl = (await session.call("incidents")).get("nccl")
        return await report(session, events, told_incidents(events), nccl, await hosts_told(session))


def _save(path: Path, text: str) -> None:
    """Write a file that its owner alone may read: a report quotes logs."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SupervisorError(f"{path}: {error.strerror}") from error
