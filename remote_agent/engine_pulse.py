"""What each live rank of this node is doing at this moment, cheap enough to be asked every few seconds.

In: a generation's boot directory, pids by rank. Out: a pulse by rank, which remote_agent.diagnose.stalls reads.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from remote_agent import engine_evidence as evidence
from remote_agent.engine_stacks import ask
from remote_agent.engine_watch import stat_fields

if TYPE_CHECKING:
    from remote_agent.engine_boot import BootDirectory

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')
_TICKS = os.sysconf("SC_CLK_TCK")
# The wrappers that torch puts around its collectives.
_WRAPPERS = ("wrapper", "inner", "_fn")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")


async def pulses(boot: BootDirectory, pids: Mapping[int, int], stacks: bool) -> dict[str, dict[str, Any]]:
    """Return by rank: t, state, cpu_s, io, deaf, stack, where, calls, inside, groups.

    t: monotonic seconds; state: the kernel's letter; cpu_s and io (bytes) with all descendants; deaf: it has a worker
    server that does not answer; stack: equal for an equal stack of the main thread; where: the user's innermost frame;
    calls: the library's function that it has called; inside: the function of torch.distributed that the main thread
    is in; groups: see `read_flight`. Without `stacks` those of the stack are empty: to ask for one disturbs a rank,
    and could end it if another thread of C++ came to Python at that very moment.
    """
    ranks = sorted(pids)
    tree = _process_tree()
    found = await asyncio.gather(*(_pulse(boot, rank, pids[rank], tree, stacks) for rank in ranks))
    return {str(rank): pulse for rank, pulse in zip(ranks, found)}


async def _pulse(
    boot: BootDirectory, rank: int, pid: int, tree: Mapping[int, list[int]], with_stack: bool
) -> dict[str, Any]:
    pulse: dict[str, Any] = {"t": time.monotonic(), **_process(pid, tree)}
    pulse.update({"deaf": False, "stack": "", "where": "", "calls": "", "inside": None, "groups": {}})
    if not boot.has_socket(rank):
        return pulse
    flight = await ask(boot, rank, True, "fr_trace_json")
    if isinstance(flight, bytes):
        pulse["groups"] = read_flight(flight, time.time_ns())
    if with_stack:
        stacks = await ask(boot, rank, True, "dump_traceback")
        pulse["deaf"] = not isinstance(stacks, bytes)
        if isinstance(stacks, bytes):
            pulse.update(read_stack(evidence.tidy_stacks(stacks)))
    return pulse


def read_stack(text: str) -> dict[str, Any]:
    """Return stack, where, calls and inside of the main thread, which a dump of Python's lists last."""
    frames = [match for line in text.rstrip().rpartition("\n\n")[2].split("\n") if (match := _FRAME.search(line))]
    digest = hashlib.sha256("\n".join(match[0] for match in frames).encode()).hexdigest()[:16]
    at = next((n for n, one in enumerate(frames) if not any(part in one["file"] for part in _LIBRARIES)), 0)
    where = f"{os.path.basename(frames[at]['file'])}:{frames[at]['line']} in {frames[at]['name']}" if frames else ""
    calls = f"{frames[at - 1]['name']} of {os.path.basename(frames[at - 1]['file'])}" if at else ""
    return {"stack": digest, "where": where, "calls": calls, "inside": _inside(frames)}


def _inside(frames: list[re.Match[str]]) -> str | None:
    """Return the outermost function of torch.distributed that the innermost frames belong to."""
    found = None
    for match in frames:
        if "/torch/" not in match["file"]:
            break
        if "/torch/distributed/" in match["file"] and match["name"] not in _WRAPPERS:
            found = match["name"]
    return found


def read_flight(text: bytes, now_ns: int) -> dict[str, dict[str, Any]]:
    """Return by process group what a flight record tells: ranks, last, and of the first collective not yet done more.

    last: number of the newest collective; seq, op, sizes, age_s, timeout_s: of the oldest one that is not done.
    ranks: the group's members, None where the record does not say.
    """
    try:
        record = json.loads(text)
        entries = [one for one in record.get("entries") or () if not one.get("is_p2p")]
        known = record.get("pg_config") or {}
        groups: dict[str, dict[str, Any]] = {}
        for one in entries:
            name = str(one["process_group"][0])
            group = groups.setdefault(name, {"ranks": _members(known.get(name)), "last": 0})
            group["last"] = max(group["last"], int(one["collective_seq_id"]))
            if "seq" not in group and not one.get("retired") and one.get("state") != "completed":
                group.update(_waiting(one, now_ns))
        return groups
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        # Another torch, another form: what cannot be read is not known.
        return {}


def _waiting(entry: Mapping[str, Any], now_ns: int) -> dict[str, Any]:
    timeout_ms = entry.get("timeout_ms")
    return {
        "seq": int(entry["collective_seq_id"]),
        "op": str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
        "sizes": json.dumps([entry.get("input_sizes"), entry.get("input_dtypes")]),
        "age_s": round(max(0.0, (now_ns - int(entry["time_created_ns"])) / 1e9), 1),
        "timeout_s": None if timeout_ms is None else timeout_ms / 1000,
    }


def _members(config: Any) -> list[int] | None:
    ranks = config.get("ranks") if isinstance(config, dict) else None
    try:
        return [int(rank) for rank in json.loads(ranks)] if ranks else None
    except (ValueError, TypeError):
        return None


def _process_tree() -> dict[int, list[int]]:
    """Return the children of every process."""
    tree: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = stat_fields(int(name))
            if fields:
                tree.setdefault(int(fields[1]), []).append(int(name))
    return tree


def _process(pid: int, tree: Mapping[int, list[int]]) -> dict[str, Any]:
    """Return state, cpu_s and io of a process; the last two with its descendants."""
    state, ticks, count = "?", 0, 0
    for each in _descendants(pid, tree):
        fields = stat_fields(each)
        if fields:
            # Descendants that have ended are in their parent's two sums for children.
            ticks += sum(int(field) for field in fields[11:15])
            count += _transferred(each)
        if each == pid and fields:
            state = fields[0]
    return {"state": state, "cpu_s": round(ticks / _TICKS, 2), "io": count}


def _descendants(pid: int, tree: Mapping[int, list[int]]) -> Iterator[int]:
    yield pid
    for child in tree.get(pid, ()):
        yield from _descendants(child, tree)


def _transferred(pid: int) -> int:
    """Return the bytes that a process has read and written so far."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            fields = dict(line.split(": ") for line in file.read().splitlines())
        return int(fields["rchar"]) + int(fields["wchar"])
    except (OSError, KeyError, ValueError):
        return 0
