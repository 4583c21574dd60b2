"""The pulse of each live rank: what it is doing at this moment, cheap enough to be read every few seconds.

In: a generation's boot directory, its live ranks. Out: a pulse by rank, which remote_agent.diagnose.hang.stalls reads.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.base.files import read_text
from remote_agent.base.proc import stat_fields
from remote_agent.diagnose import flight
from remote_agent.diagnose.hang.pulses import BACKWARD, SCRIPT, StackPulse
from remote_agent.diagnose.tracebacks import find_traces, last_background_failure, traces_of_error
from remote_agent.engine import evidence
from remote_agent.engine.inspect import children, sockets
from remote_agent.engine.inspect import ras as nccl_ras
from remote_agent.engine.inspect.children import Tree, descendants, process_tree
from remote_agent.engine.inspect.stacks import STACKS, ask, flight_record, handlers_of, tidy
from remote_agent.vitals.netif import own_addresses

if TYPE_CHECKING:
    from remote_agent.diagnose.hang.pulses import EndedPart, EnginePulse, GroupPulse, ProcessPulse, ReachedCollectives
    from remote_agent.engine.boot_dir import BootDirectory
    from remote_agent.engine.processes import RankProcess
    from remote_agent.wire.documents import SourceExcerpt

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')
_TICKS = os.sysconf("SC_CLK_TCK")
# torch wraps its collectives with these functions.
_WRAPPERS = ("wrapper", "inner", "_fn")
# In these modules Python waits for another thread, task or process.
_PARKED = ("threading.py", "queue.py", "selectors.py")
# The times of at most this many of the newest collectives are reported.
MAX_CAME = 128
# At most this many children and unresponsive ranks of this node are inspected each time.
MAX_SPIED = 16
MAX_KINDS = 4
# These parts of torch.distributed compute for long; they wait in distributed_c10d.py.
_WORKSHOPS = ("checkpoint/", "fsdp/", "optim/")
_PICKLES = ("_object_to_tensor", "_tensor_to_object")
# If a function calls itself, the outermost frames are enough.
MAX_FRAMES = 16
# This many lines of the script are shown before and after the line at which a rank is.
SOURCE_LINES = 4
SOURCE_CHARS = 120
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
_NO_STACK = StackPulse(stack="", where="", calls="", script=[], parked=False, over=False, inside=None, frame=None)


async def pulses(boot: BootDirectory, ranks: Sequence[RankProcess], stacks: bool) -> dict[str, EnginePulse]:
    """Return the pulse of each of these ranks.

    Without `stacks` the fields of the stack are empty: a dump disturbs the rank, and can end it when a C++ thread
    enters Python at the same moment.
    """
    tree = process_tree()
    asking = nccl_ras.complaints([one.pid for one in ranks] if stacks else [])
    ras, *each = await asyncio.gather(asking, *(_pulse(boot, one, tree, stacks) for one in ranks))
    if ras:
        each[0]["ras"] = ras
    if stacks and each:
        each[0]["addresses"] = sorted(own_addresses())
        # A rank that waits in a collective is not at fault, even when its children sleep.
        held = {one.rank: pulse for one, pulse in zip(ranks, each) if not _waits(pulse)}
        families = {one.rank: list(descendants(one.pid, tree)) for one in ranks}
        sent = await children.in_time(lambda: sockets.transferred(families)) or {}
        for one, pulse in zip(ranks, each):
            pulse["net"] = sent.get(one.rank)
        await _look_closer([one for one in ranks if one.rank in held], held, tree)
        waiting = {one.pid: pulse for one, pulse in zip(ranks, each) if one.rank not in held}
        ends = await children.in_time(lambda: sockets.remote_ends(waiting)) if waiting else None
        for pid, (silent, reached) in (ends or {}).items():
            waiting[pid].update(unanswered=silent, reached=reached)
        frames = {one.pid: frame for one, pulse in zip(ranks, each) if (frame := pulse["frame"])}
        sources = await children.in_time(lambda: {pid: read_source(pid, *frame) for pid, frame in frames.items()})
        for one, pulse in zip(ranks, each):
            pulse["source"], pulse["frame"] = (sources or {}).get(one.pid), None
    return {str(one.rank): pulse for one, pulse in zip(ranks, each)}


async def _pulse(boot: BootDirectory, one: RankProcess, tree: Tree, with_stack: bool) -> EnginePulse:
    t, process, stack, is_deaf = time.monotonic(), _process(one.pid, tree), _NO_STACK, False
    groups: dict[str, GroupPulse] = {}
    if boot.has_socket(one.rank):
        groups = read_flight(await flight_record(boot, one.rank), time.time_ns())
        if with_stack and STACKS in await handlers_of(boot, one.rank):
            stacks = await ask(boot, one.rank, True, STACKS)
            is_deaf = not isinstance(stacks, bytes)
            stack = read_stack(tidy(stacks)) if isinstance(stacks, bytes) else stack
    for key, group in groups.items():
        if not ("seq" in group or stack["inside"]):
            del group["calls"]
        members = group["ranks"]
        # Two members are enough to list them all, and the first group has all ranks anyway.
        if members and (flight.group_name(key) == flight.DEFAULT_GROUP or one.rank not in (members[0], members[-1])):
            group["ranks"] = None
    return {"t": t, **process, **stack, "deaf": is_deaf, "groups": groups, "source": None, "net": None, "ended": None,
            "children": [], "ras": [], "unanswered": [], "reached": [], "addresses": []}  # fmt: skip


def _waits(pulse: EnginePulse) -> bool:
    return bool(pulse["inside"]) or any("seq" in group for group in pulse["groups"].values())


async def _look_closer(ranks: Sequence[RankProcess], pulses_: Mapping[int, EnginePulse], tree: Tree) -> None:
    """Add `ended` and `children`, which take longer, to the pulses of ranks that may block others."""
    below = await children.children([one.pid for one in ranks], tree)
    stackless = [one.pid for one in ranks if not pulses_[one.rank]["stack"]]
    spied, _ = await children.spy([*stackless, *(each["pid"] for own in below.values() for each in own)][:MAX_SPIED])
    for one in ranks:
        pulse = pulses_[one.rank]
        if one.pid in spied:
            place = read_stack(spied[one.pid])
            pulse["where"], pulse["frame"], pulse["calls"] = place["where"], place["frame"], place["calls"]
            if not pulse["deaf"]:
                pulse["stack"], pulse["script"], pulse["inside"] = place["stack"], place["script"], place["inside"]
                pulse["parked"], pulse["over"] = place["parked"], place["over"]
        kinds: dict[tuple[str, str, str], int] = {}
        for child in below.get(one.pid, ()):
            where = read_stack(spied[child["pid"]])["where"] if child["pid"] in spied else ""
            kind = (child["name"], child["doing"], where)
            kinds[kind] = kinds.get(kind, 0) + 1
        pulse["children"] = [
            {"count": count, "name": name, "doing": doing, "where": where}
            for (name, doing, where), count in list(kinds.items())[:MAX_KINDS]
        ]
    over = [(one, pulses_[one.rank]["over"]) for one in ranks]
    ended = await children.in_time(lambda: {one.rank: ended_part(one.directory, is_over) for one, is_over in over})
    for one in ranks:
        pulses_[one.rank]["ended"] = (ended or {}).get(one.rank)


def ended_part(directory: Path, is_over: bool) -> EndedPart | None:
    """Return the exception that ended the script, a thread, a task or a child of a rank that is still alive.

    `is_over`: its main thread has left the script; otherwise only the others can have ended.
    """
    path = directory / "stderr.log"
    tail, lines = evidence.read_tail(path)
    error = evidence.read_error(directory / "error.json") if is_over else None
    if error is not None:
        # Other threads may have printed since, and not every script prints its exceptions.
        path = directory / "error.json"
        trace = traces_of_error(error["message"], error["callstack"])[-1]
        printed = next((one for one in reversed(find_traces(tail)) if one.headline == trace.headline), None)
        part, text = SCRIPT, error["callstack"] or error["message"]
    else:
        ended = last_background_failure(tail)
        if ended is None:
            return None
        trace = printed = ended
        part, text = trace.background, trace.text
    frame = trace.user_frame
    first = None if lines is None else lines - tail.count("\n")
    return {
        "part": part,
        "type": trace.type,
        "headline": trace.headline,
        "place": frame.place() if frame is not None else "",
        "traceback": evidence.shortened(text.rstrip("\n")),
        "line": None if first is None or printed is None else first + printed.last_line,
        "age_s": round(max(0.0, time.time() - path.stat().st_mtime), 1),
    }


def read_stack(text: str) -> StackPulse:
    """Return the fields of the main thread's stack, which is the last of Python's dump."""
    frames = [match for line in text.rstrip().rpartition("\n\n")[2].split("\n") if (match := _FRAME.search(line))]
    digest = hashlib.sha256("\n".join(match[0] for match in frames).encode()).hexdigest()[:16]
    at = next((n for n, one in enumerate(frames) if not any(part in one["file"] for part in _LIBRARIES)), 0)
    where = f"{os.path.basename(frames[at]['file'])}:{frames[at]['line']} in {frames[at]['name']}" if frames else ""
    calls = f"{frames[at - 1]['name']} of {os.path.basename(frames[at - 1]['file'])}" if at else ""
    own = [one for one in frames if not any(part in one["file"] for part in _LIBRARIES)] if at == 0 else []
    script = [(os.path.basename(one["file"]), int(one["line"]), one["name"]) for one in own[::-1][:MAX_FRAMES]]
    parked = bool(frames) and os.path.basename(frames[0]["file"]) in _PARKED
    # Python's own shutdown is the outermost frame only when the script is over.
    last = frames[-1] if frames else None
    over = last is not None and (os.path.basename(last["file"]), last["name"]) == ("threading.py", "_shutdown")
    frame = (frames[at]["file"], int(frames[at]["line"])) if frames else None
    return {"stack": digest, "where": where, "calls": calls, "script": script, "parked": parked, "over": over,
            "frame": frame, "inside": _inside(frames)}  # fmt: skip


def read_source(pid: int, file: str, line: int) -> SourceExcerpt | None:
    """Return the lines of a rank's file around this one: {first, text}; None where the file has no such line."""
    lines = read_text(os.path.join(f"/proc/{pid}/cwd", file)).splitlines()
    first = max(1, line - SOURCE_LINES)
    around = [text[:SOURCE_CHARS].rstrip() for text in lines[first - 1 : line + SOURCE_LINES]]
    return {"first": first, "text": "\n".join(around)} if line <= len(lines) else None


def _inside(frames: list[re.Match[str]]) -> str | None:
    """Return the outermost function of torch.distributed among the innermost frames, or that it is in `backward`."""
    function = None
    if frames and frames[0]["name"] == "_engine_run_backward" and "/torch/autograd/" in frames[0]["file"]:
        return BACKWARD
    if not frames or not _may_wait(frames[0]):
        return None
    for match in frames:
        if "/torch/" not in match["file"]:
            break
        if "/torch/distributed/" in match["file"] and match["name"] not in _WRAPPERS:
            function = match["name"]
    return function


def _may_wait(frame: re.Match[str]) -> bool:
    """Return whether torch.distributed may be waiting for other ranks here; while it saves a file it is not."""
    _, _, module = frame["file"].partition("/torch/distributed/")
    # Functional collectives are called through torch.ops and have no frame in torch.distributed.
    is_distributed = bool(module) or frame["file"].endswith("/torch/_ops.py")
    return is_distributed and not module.startswith(_WORKSHOPS) and frame["name"] not in _PICKLES


def read_flight(document: flight.FlightRecord, now_ns: int) -> dict[str, GroupPulse]:
    """Return what a rank has recorded, by process group and backend."""
    known = document.get("pg_config") or {}
    entries: dict[str, list[flight.FlightEntry]] = {}
    for one in flight.newest(flight.collectives(document)):
        entries.setdefault(flight.group_key(one), []).append(one)
    groups: dict[str, GroupPulse] = {}
    for key, own in entries.items():
        name = flight.group_name(key)
        group: GroupPulse = {
            "ranks": flight.members_of(known.get(name)),
            "last": max(one["collective_seq_id"] for one in own),
            "calls": flight.newest_rows(own),
        }
        waiting = next((one for one in own if not flight.is_done(one)), None)
        if waiting is not None:
            _add_waiting(group, waiting, now_ns)
        came = _came({one["collective_seq_id"]: one for one in own if one.get("time_created_ns")})
        if came and name == flight.DEFAULT_GROUP:
            group["came"] = came
        groups[key] = group
    return groups


def _came(entries: Mapping[int, flight.FlightEntry]) -> ReachedCollectives | None:
    """Return the times of the newest of these collectives, all of which have a time."""
    if not entries:
        return None
    first = end = max(entries) + 1
    while first - 1 in entries and end - first < MAX_CAME:
        first -= 1
    listed = [entries[number] for number in range(first, end)]
    called_us = [(one["time_created_ns"] or 0) // 1000 for one in listed]
    done_ns = [one.get("time_discovered_completed_ns") for one in listed]
    t_us = called_us[0]
    came: ReachedCollectives = {"first": first, "t_us": t_us, "later_us": [each - t_us for each in called_us]}
    if any(done_ns):
        came["done_us"] = [each // 1000 - t_us if each else None for each in done_ns]
    return came


def _add_waiting(group: GroupPulse, entry: flight.FlightEntry, now_ns: int) -> None:
    timeout_ms = entry.get("timeout_ms")
    group["seq"] = entry["collective_seq_id"]
    group["backend"], group["op"] = flight.backend_of(entry), flight.op_of(entry)
    group["sizes"] = json.dumps([entry.get("input_sizes"), entry.get("input_dtypes")])
    group["age_s"] = round(max(0.0, (now_ns - (entry.get("time_created_ns") or now_ns)) / 1e9), 1)
    group["timeout_s"] = None if timeout_ms is None else timeout_ms / 1000


def _process(pid: int, tree: Tree) -> ProcessPulse:
    """Return state, cpu_s, io and sleeps of a process; cpu_s and io with its descendants."""
    state, ticks, count = "?", 0, 0
    for each in descendants(pid, tree):
        fields = stat_fields(each)
        if fields:
            # The parent's two sums for children include descendants that have ended.
            ticks += sum(int(field) for field in fields[11:15])
            count += _transferred(each)
        if each == pid and fields:
            state = "D" if fields[0] == "S" and children.is_at_a_file(pid) else fields[0]
    return {"state": state, "cpu_s": round(ticks / _TICKS, 2), "io": count, "sleeps": _sleeps(pid)}


def _sleeps(pid: int) -> int | None:
    """Return how often a process's main thread has gone to sleep, None if unknown."""
    lines = read_text(f"/proc/{pid}/status").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:")), None)


def _transferred(pid: int) -> int:
    """Return the bytes that a process has read and written."""
    fields = dict(line.split(": ") for line in read_text(f"/proc/{pid}/io").splitlines())
    return int(fields.get("rchar", 0)) + int(fields.get("wchar", 0))
