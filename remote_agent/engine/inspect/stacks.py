"""Stacks and flight records of live ranks, read from torch's worker server in each rank; stacks of their children.

In: a generation's boot directory, ranks. Out: texts by rank, and the reason where there is none; files in the ranks'
directories.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.diagnose import flight
from remote_agent.diagnose.flight_files import parse_flight_record
from remote_agent.engine.inspect import children
from remote_agent.wire.gate import Misfit, parse, reader

if TYPE_CHECKING:
    from remote_agent.engine.boot_dir import BootDirectory
    from remote_agent.wire.answers import ChildStack, RankStacks

# All live ranks together get this long, because the other nodes wait meanwhile.
COLLECT_S = 1.5
ANSWER_BYTES = 64 * 1024 * 1024
SAVED = ("stacks.txt", "flight.json")
# A worker server has recorders with these names; the first of a line is used. torch 2.4 has only the pickle.
RECORDERS = (("fr_trace_json",), ("dump_nccl_trace_json", "dump_nccl_trace_pickle"))
# The first handler lists all handlers; the second one returns stacks, and torch 2.4 lacks it.
LIST, STACKS = "", "dump_traceback"
_read_names = reader(list[str])
# A file's time is that of the kernel's last tick.
CLOCK_STEP_S = 0.02


async def dump(boot: BootDirectory, pids: Mapping[int, int | None]) -> RankStacks:
    """Return what ranks and their child processes are doing; `pids`: None where the rank's process has ended."""
    live = {rank: pid for rank, pid in pids.items() if pid is not None}
    asking = _stacks(boot, {rank: pid is not None for rank, pid in pids.items()})
    (texts, unreachable), below = await asyncio.gather(
        asking, children.children(live.values(), children.process_tree())
    )
    silent = {rank: pid for rank, pid in live.items() if str(rank) in unreachable}
    spied: dict[int, str] = {}
    note = ""
    if silent or any(below.values()):
        spied, note = await children.spy(
            [*silent.values(), *(child["pid"] for each in below.values() for child in each)]
        )
    for rank, pid in silent.items():
        if pid in spied:
            texts[str(rank)] = spied[pid]
            del unreachable[str(rank)]
    families: dict[str, list[ChildStack]] = {
        str(rank): [
            {"name": one["name"], "doing": one["doing"], "stack": spied.get(one["pid"], "")} for one in below[pid]
        ]
        for rank, pid in live.items()
        if below.get(pid)
    }
    return {"stacks": texts, "unreachable": unreachable, "children": families, "note": note if families else ""}


async def _stacks(boot: BootDirectory, alive: Mapping[int, bool]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the stacks of ranks, and why some have none; `alive`: whether the rank's process lives."""
    texts: dict[str, str] = {}
    unreachable: dict[str, str] = {}
    ranks = sorted(alive)
    answers = await asyncio.gather(*(ask(boot, rank, alive[rank], STACKS) for rank in ranks))
    for rank, answer in zip(ranks, answers):
        if isinstance(answer, bytes):
            texts[str(rank)] = tidy(answer)
        else:
            unreachable[str(rank)] = answer
    return texts, unreachable


async def save(boot: BootDirectory, directories: Mapping[int, Path]) -> dict[str, str]:
    """Save stacks and flight records of these live ranks in their directories; returns the stacks by rank."""
    ranks = [rank for rank in sorted(directories) if boot.has_socket(rank)]
    records = asyncio.gather(*(flight_record(boot, rank) for rank in ranks))
    both = await asyncio.gather(_stacks(boot, dict.fromkeys(ranks, True)), records)
    stacks: dict[str, str] = both[0][0]
    flights: list[flight.FlightRecord] = both[1]
    for rank, recorded in zip(ranks, flights):
        with contextlib.suppress(OSError):
            if str(rank) in stacks:
                (directories[rank] / "stacks.txt").write_text(stacks[str(rank)], encoding="utf-8")
            if recorded["entries"]:
                (directories[rank] / "flight.json").write_text(json.dumps(recorded), encoding="utf-8")
    return stacks


async def keep(boot: BootDirectory, directories: Mapping[int, Path]) -> dict[str, list[str]]:
    """Save stacks and flight records for an operator; returns the new files by rank."""
    begin = time.time()
    await save(boot, directories)
    files = {rank: [directory / name for name in SAVED] for rank, directory in directories.items()}
    return {
        str(rank): [str(path) for path in paths if path.exists() and path.stat().st_mtime >= begin - CLOCK_STEP_S]
        for rank, paths in files.items()
    }


async def flight_record(boot: BootDirectory, rank: int) -> flight.FlightRecord:
    """Return the records of all backends of a live rank as one document; empty where there are none."""
    handlers = await handlers_of(boot, rank)
    names = [name for names in RECORDERS if (name := next((one for one in names if one in handlers), ""))]
    answers = await asyncio.gather(*(ask(boot, rank, True, name) for name in names))
    return merged_records(answer for answer in answers if isinstance(answer, bytes))


def merged_records(answers: Iterable[bytes]) -> flight.FlightRecord:
    """Return what recorders have answered as one document; another torch may write what cannot be read."""
    documents = []
    for answer in answers:
        with contextlib.suppress(Misfit):
            documents.append(flight.read_record(parse_flight_record(answer)))
    return flight.merged(documents)


async def handlers_of(boot: BootDirectory, rank: int) -> frozenset[str]:
    """Return what a rank's worker server can be asked, which it lists once; STACKS if it does not answer."""
    if rank not in boot.handlers:
        listed = await ask(boot, rank, True, LIST)
        if not isinstance(listed, bytes):
            return frozenset({STACKS})
        with contextlib.suppress(Misfit):
            boot.handlers[rank] = frozenset(_read_names(parse(listed)))
    return boot.handlers.get(rank, frozenset({STACKS}))


async def ask(boot: BootDirectory, rank: int, alive: bool, handler: str) -> bytes | str:
    """Return the answer of a rank's worker server, or the reason why there is none."""
    if not alive:
        return "the process has ended"
    if not boot.has_socket(rank):
        return "the script has not imported torch.distributed, or this torch has no worker server"
    if handler and handler not in boot.handlers.get(rank, {handler}):
        return f"this torch's worker server has no {handler}; py-spy shows stacks if it is installed on the node"
    # One request at a time: two simultaneous dumps can end the rank, and a rank that holds the GIL answers both late.
    request = boot.requests.get((rank, handler))
    if request is None or request.done():
        request = asyncio.ensure_future(fetch(boot.socket(rank), handler))
        # The caller may have stopped waiting by the time it fails.
        request.add_done_callback(lambda done: done.cancelled() or done.exception())
        boot.requests[rank, handler] = request
    try:
        return await asyncio.wait_for(asyncio.shield(request), COLLECT_S)
    except asyncio.TimeoutError:
        return f"no answer within {COLLECT_S} s: the rank holds Python's lock (GIL), or is stopped"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


async def fetch(socket: str, handler: str) -> bytes:
    """Return the body of a worker server's answer; raises OSError or ValueError. It has no deadline."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        method = "POST" if handler else "GET"
        request = f"{method} /handler/{handler} HTTP/1.0\r\nHost: rank\r\nContent-Length: 0\r\n\r\n"
        writer.write(request.encode())
        await writer.drain()
        answer = b""
        while len(answer) < ANSWER_BYTES and (block := await reader.read(1 << 20)):
            answer += block
    finally:
        writer.close()
    head, separator, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if not separator or status != [b"200"]:
        raise ValueError(f"{handler}: {head[:200].decode('utf-8', 'replace')!r}")
    return body


def tidy(text: bytes) -> str:
    """Return a traceback dump without the threads that run no Python, such as the server's own."""
    blocks = text.decode("utf-8", "replace").rstrip("\n").split("\n\n")
    kept = [block for block in blocks if "<no Python frame>" not in block]
    return "\n\n".join(kept or blocks) + "\n"
