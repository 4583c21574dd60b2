"""`supervisor snapshots`: the snapshots that the nodes keep, and where; bring one here.

In: argv. Out: a table, oldest first, or one JSON document; with --pull a file or directory, complete or not at all.
What a node sends is checked by its hashes, and written only below that place.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.snapshots.choice import WHICH_THERE_ARE
from remote_agent.text.names import size_text
from remote_agent.wire import CallFailed, WireError
from supervisor.cli.entry import say
from supervisor.cli.options import add_json, in_session, make_parser, parse, settle
from supervisor.cli.output import is_rich, write_json, write_table
from supervisor.errors import RequestFailed, Unreachable, UsageError, why
from supervisor.logs.files import ask, sources
from supervisor.wording.status import snapshot_rows

if TYPE_CHECKING:
    from supervisor.link.host_link import HostLink
    from supervisor.link.hub import Hub
    from supervisor.session import Session

# A node that sends nothing for this long is given up, seconds.
PIECE_DEADLINE = 60.0
SnapshotFile = tuple[str, int, int, str]
"""Path, mode, size and hash."""


def run(verb: str, argv: Sequence[str]) -> int:
    """Show the snapshots; returns the exit code."""
    parser = make_parser(verb)
    parser.add_argument("--pull", metavar="ID", help="copy this snapshot to this machine")
    words = "with --pull: the new file or directory (default: the snapshot's own name, in this directory)"
    parser.add_argument("-o", "--output", metavar="PATH", type=Path, help=words)
    add_json(parser)
    options = parse(parser, argv)
    if options.pull == "":
        raise UsageError("--pull needs a snapshot's id", "`supervisor snapshots` lists them")
    if options.output is not None and not options.pull:
        raise UsageError("--output needs --pull ID", "`supervisor snapshots` lists the ids")

    async def show(session: Session) -> None:
        kept = (await session.call("status")).get("snapshots") or []
        if options.json:
            write_json({"job": session.job, "snapshots": kept})
        elif kept:
            write_table(snapshot_rows(kept), rich=is_rich())
        else:
            say(
                "no node keeps a snapshot of this job yet: nodes keep what `snapshots` in [job] or up --snapshots "
                "names, once ranks have saved it; if ranks save something else, `supervisor events` has a warning"
            )

    async def bring(session: Session) -> None:
        await settle(session)
        place, size, node = await pull(session, options.pull, options.output)
        if options.json:
            write_json({"job": session.job, "id": options.pull, "path": str(place), "bytes": size, "node": node})
        else:
            say(f"{place}: {size_text(size)} from {node}")

    return in_session(options, bring if options.pull else show)


class Pulled(NamedTuple):
    """A snapshot that has arrived."""

    place: Path
    size: int
    """Bytes."""
    node: str


async def pull(session: Hub, name: str, place: Path | None = None) -> Pulled:
    """Bring a snapshot from the first node that sends it; `place`: a new name, default: its own name, here.

    Raises RequestFailed, UsageError where the target exists, OSError.
    """
    reasons = []
    for link in sources(session, None):
        node = link.view.name
        try:
            answer = await ask(session, node, "snapshot_files", {"id": name})
            path, files = _checked(name, answer.data["path"], [tuple(file) for file in answer.data["files"]])
            target = place or Path(path.rpartition("/")[2])
            if os.path.lexists(target):
                raise UsageError(f"{target} exists", "-o PATH names another place")
            return Pulled(target, await _take(link, files, target), node)
        except (CallFailed, WireError, asyncio.TimeoutError) as error:
            reasons.append(f"{node}: {why(error)}")
        except (RequestFailed, Unreachable) as refused:
            if isinstance(refused, RequestFailed) and refused.kind == "no_snapshot":
                continue
            reasons.append(refused.message if refused.message.startswith(node) else f"{node}: {refused.message}")
    why_not = f"no node sent snapshot {name}: {'; '.join(reasons)}" if reasons else f"no node has snapshot {name}"
    raise RequestFailed(why_not, WHICH_THERE_ARE)


def _checked(name: str, path: str, files: list[SnapshotFile]) -> tuple[str, list[SnapshotFile]]:
    """Return path and files of a snapshot, if they are what its id says; raises RequestFailed."""
    contents = sorted([one[0], one[3]] for one in files)
    last = path.rpartition("/")[2]
    is_inside = all(
        one[0].split("/")[0] == last and not {"", ".", ".."} & set(one[0].split("/")) and "\0" not in one[0]
        for one in files
    )
    if not files or not is_inside or hashlib.sha256(json.dumps([path, contents]).encode()).hexdigest()[:12] != name:
        raise RequestFailed(f"its answer does not match snapshot {name}")
    return path, files


async def _take(link: HostLink, files: list[SnapshotFile], target: Path) -> int:
    """Bring the files beside the target, then put them there at once; returns their bytes."""
    total = sum(size for _, _, size, _ in files)
    if not target.parent.is_dir():
        raise UsageError(f"there is no directory {target.parent}", "-o PATH in one that exists")
    free = shutil.disk_usage(target.parent).free
    if total > free:
        raise UsageError(f"{target.parent} has {free:,} bytes free, and the snapshot has {total:,}", "-o PATH")
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        for path, mode, size, sha in files:
            place = work / path
            place.parent.mkdir(parents=True, exist_ok=True)
            await _take_one(link, sha, size, place)
            place.chmod(mode | 0o600)
        if os.path.lexists(target):
            raise UsageError(f"{target} exists now", "-o PATH names another place")
        os.rename(work / files[0][0].split("/")[0], target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return total


async def _take_one(link: HostLink, sha: str, size: int, place: Path) -> None:
    digest, left = hashlib.sha256(), size
    with place.open("wb") as file:
        async with aclosing(link.whole_stream("snapshot_read", {"sha": sha}, timeout_s=PIECE_DEADLINE)) as pieces:
            async for piece in pieces:
                left -= len(piece.body)
                if left < 0:
                    break
                digest.update(piece.body)
                await asyncio.to_thread(file.write, piece.body)
    if left or digest.hexdigest() != sha:
        raise RequestFailed(f"{link.view.name}: {place.name} arrived damaged")
