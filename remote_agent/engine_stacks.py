"""Stacks and flight records of live ranks, through the sockets of their worker servers; what their children do.

In: a generation's boot directory, ranks. Out: texts by rank, and why there is none; files beside a rank's logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_agent import engine_children
from remote_agent import engine_evidence as evidence

if TYPE_CHECKING:
    from remote_agent.engine_boot import BootDirectory

# Evidence of live ranks in all: the rest of the cluster waits for it.
COLLECT_S = 1.5
SAVED = ("stacks.txt", "flight.json")
# A file's time is that of the kernel's last tick.
CLOCK_STEP_S = 0.02


async def dump(boot: BootDirectory, pids: Mapping[int, int | None]) -> dict[str, Any]:
    """Return by rank: stacks, unreachable (why there is none), children ({pid, name, doing, stack} each); and note.

    `pids`: None where the rank's process has ended. `note`: why stacks of child processes are missing, if some are.
    """
    live = {rank: pid for rank, pid in pids.items() if pid is not None}
    asking = _stacks(boot, {rank: pid is not None for rank, pid in pids.items()})
    (texts, unreachable), below = await asyncio.gather(
        asking, engine_children.children(live.values(), engine_children.process_tree())
    )
    silent = {rank: pid for rank, pid in live.items() if str(rank) in unreachable}
    spied: dict[int, str] = {}
    note = ""
    if silent or any(below.values()):
        below_all = [child["pid"] for found in below.values() for child in found]
        spied, note = await engine_children.spy([*silent.values(), *below_all])
    for rank, pid in silent.items():
        if pid in spied:
            texts[str(rank)] = spied[pid]
            del unreachable[str(rank)]
    children = {
        str(rank): [{**child, "stack": spied.get(child["pid"], "")} for child in below[pid]]
        for rank, pid in live.items()
        if below.get(pid)
    }
    return {"stacks": texts, "unreachable": unreachable, "children": children, "note": note if children else ""}


async def _stacks(boot: BootDirectory, alive: Mapping[int, bool]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the stacks of ranks and why some have none; `alive`: whether the rank's process lives."""
    texts: dict[str, str] = {}
    unreachable: dict[str, str] = {}
    ranks = sorted(alive)
    answers = await asyncio.gather(*(ask(boot, rank, alive[rank], "dump_traceback") for rank in ranks))
    for rank, answer in zip(ranks, answers):
        if isinstance(answer, bytes):
            texts[str(rank)] = evidence.tidy_stacks(answer)
        else:
            unreachable[str(rank)] = answer
    return texts, unreachable


async def save(boot: BootDirectory, directories: Mapping[int, Path]) -> dict[str, str]:
    """Save stacks and flight records of these live ranks in their directories; returns the stacks by rank."""
    ranks = [rank for rank in sorted(directories) if boot.has_socket(rank)]
    records = asyncio.gather(*(ask(boot, rank, True, "fr_trace_json") for rank in ranks))
    (stacks, _), flights = await asyncio.gather(_stacks(boot, dict.fromkeys(ranks, True)), records)
    for rank, flight in zip(ranks, flights):
        with contextlib.suppress(OSError):
            if str(rank) in stacks:
                (directories[rank] / "stacks.txt").write_text(stacks[str(rank)], encoding="utf-8")
            if isinstance(flight, bytes) and _is_json(flight):
                (directories[rank] / "flight.json").write_bytes(flight)
    return stacks


async def keep(boot: BootDirectory, directories: Mapping[int, Path]) -> dict[str, list[str]]:
    """Save stacks and flight records for an operator; returns the files by rank, as far as there is something new."""
    begin = time.time()
    await save(boot, directories)
    files = {rank: [directory / name for name in SAVED] for rank, directory in directories.items()}
    return {
        str(rank): [str(path) for path in paths if path.exists() and path.stat().st_mtime >= begin - CLOCK_STEP_S]
        for rank, paths in files.items()
    }


async def ask(boot: BootDirectory, rank: int, alive: bool, handler: str) -> bytes | str:
    """Return the answer of a rank's worker server, or why there is none."""
    if not alive:
        return "the process has ended"
    if not boot.has_socket(rank):
        return "the script has not imported torch.distributed, or this torch has no worker server"
    # One request at a time: two dumps at once can end the rank, and one that holds Python's lock answers them all late.
    request = boot.requests.get((rank, handler))
    if request is None or request.done():
        request = asyncio.ensure_future(evidence.ask(boot.socket(rank), handler))
        # Nobody may be left to take its error.
        request.add_done_callback(lambda done: done.cancelled() or done.exception())
        boot.requests[rank, handler] = request
    try:
        return await asyncio.wait_for(asyncio.shield(request), COLLECT_S)
    except asyncio.TimeoutError:
        return f"no answer within {COLLECT_S} s: the rank holds Python's lock, or is stopped"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
