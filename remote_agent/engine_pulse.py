"""What each live rank of this node is doing at this moment, cheap enough to be asked every few seconds.

In: a generation's boot directory, its live ranks. Out: a pulse by rank, which remote_agent.diagnose.stalls reads.
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
from typing import TYPE_CHECKING, Any, Protocol

from remote_agent import engine_children, engine_ras, engine_sockets
from remote_agent import engine_evidence as evidence
from remote_agent.diagnose.pulse import SCRIPT
from remote_agent.diagnose.traces import find_ended_part, find_traces, of_error
from remote_agent.engine_children import Tree, descendants, process_tree
from remote_agent.engine_stacks import ask
from remote_agent.netif import own_addresses
from remote_agent.paths import stat_fields

if TYPE_CHECKING:
    from remote_agent.engine_boot import BootDirectory

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')
_TICKS = os.sysconf("SC_CLK_TCK")
# The wrappers that torch puts around its collectives.
_WRAPPERS = ("wrapper", "inner", "_fn")
# In these Python waits for what another thread, task or process has to do.
_PARKED = ("threading.py", "queue.py", "selectors.py")
# Newest collectives of all ranks whose times are told.
MAX_CAME = 128
# Of children and deaf ranks, on this node, each time.
MAX_SPIED = 16
MAX_KINDS = 4
# Here torch.distributed works for long; where it waits there, it is in distributed_c10d.py.
_WORKSHOPS = ("checkpoint/", "fsdp/", "optim/")
_PICKLES = ("_object_to_tensor", "_tensor_to_object")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")


class Live(Protocol):
    """A rank whose process lives."""

    rank: int
    pid: int
    directory: Path


async def pulses(boot: BootDirectory, ranks: Sequence[Live], stacks: bool) -> dict[str, dict[str, Any]]:
    """Return a pulse by rank, of these.

    t: monotonic seconds; state: the kernel's letter, D also for one that sleeps at a file; cpu_s, io (bytes) and net
    (bytes over TCP; None: not known) with all descendants; sleeps: how often the main thread has gone to sleep (None:
    not known); deaf: it has a worker server that does not answer; stack: equal for an equal stack of the main thread;
    where: the user's innermost frame; calls: the library's function that it has called; parked: the main thread waits
    for another one; over: the script is over, and Python waits for its threads; inside: the function of
    torch.distributed that the main thread is in; groups: see `read_flight`; ended: the exception that ended its script
    or a thread, see `ended_part`; children: {count, name, doing, where} of those that do the same;
    unanswered, reached: of a rank that waits, the far ends that it dials in vain, and those that it is connected to;
    ras: what NCCL's service on this node complains of, addresses: this node's own, each told by one rank.
    Without `stacks` those of the stack are empty: to ask for one disturbs a rank, and could end it if another thread
    of C++ came to Python at that very moment.
    """
    tree = process_tree()
    asked = engine_ras.complaints([one.pid for one in ranks] if stacks else [])
    ras, *found = await asyncio.gather(asked, *(_pulse(boot, one, tree, stacks) for one in ranks))
    if ras:
        found[0]["ras"] = ras
    if stacks and found:
        found[0]["addresses"] = sorted(own_addresses())
        # Whose children sleep while it waits in a collective is not at fault.
        held = {one.rank: pulse for one, pulse in zip(ranks, found) if not _waits(pulse)}
        families = {one.rank: list(descendants(one.pid, tree)) for one in ranks}
        sent = await engine_children.in_time(lambda: engine_sockets.transferred(families)) or {}
        for one, pulse in zip(ranks, found):
            pulse["net"] = sent.get(one.rank)
        await _look_closer([one for one in ranks if one.rank in held], held, tree)
        waiting = {one.pid: pulse for one, pulse in zip(ranks, found) if one.rank not in held}
        ends = await engine_children.in_time(lambda: engine_sockets.far_ends(waiting)) if waiting else None
        for pid, (silent, reached) in (ends or {}).items():
            waiting[pid].update(unanswered=silent, reached=reached)
    return {str(one.rank): pulse for one, pulse in zip(ranks, found)}


async def _pulse(boot: BootDirectory, one: Live, tree: Tree, with_stack: bool) -> dict[str, Any]:
    pulse: dict[str, Any] = {"t": time.monotonic(), **_process(one.pid, tree)}
    pulse.update({"deaf": False, "stack": "", "where": "", "calls": "", "parked": False, "inside": None, "groups": {}})
    pulse.update({"over": False, "net": None, "ended": None, "children": [], "ras": []})
    pulse.update({"unanswered": [], "reached": [], "addresses": []})
    if not boot.has_socket(one.rank):
        return pulse
    flight = await ask(boot, one.rank, True, "fr_trace_json")
    if isinstance(flight, bytes):
        pulse["groups"] = read_flight(flight, time.time_ns())
    if with_stack:
        stacks = await ask(boot, one.rank, True, "dump_traceback")
        pulse["deaf"] = not isinstance(stacks, bytes)
        if isinstance(stacks, bytes):
            pulse.update(read_stack(evidence.tidy_stacks(stacks)))
    return pulse


def _waits(pulse: Mapping[str, Any]) -> bool:
    return bool(pulse["inside"]) or any("seq" in group for group in pulse["groups"].values())


async def _look_closer(ranks: Sequence[Live], pulses_: Mapping[int, dict[str, Any]], tree: Tree) -> None:
    """Add what is slower to find to the pulses of ranks that may hold others up: `ended` and `children`."""
    below = await engine_children.children([one.pid for one in ranks], tree)
    mute = [one.pid for one in ranks if not pulses_[one.rank]["stack"]]
    spied, _ = await engine_children.spy([*mute, *(each["pid"] for own in below.values() for each in own)][:MAX_SPIED])
    for one in ranks:
        pulse = pulses_[one.rank]
        if one.pid in spied:
            place = read_stack(spied[one.pid])
            pulse.update({key: place[key] for key in ("where", "calls")} if pulse["deaf"] else place)
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
    ended = await engine_children.in_time(
        lambda: {one.rank: ended_part(one.directory, is_over) for one, is_over in over}
    )
    for one in ranks:
        pulses_[one.rank]["ended"] = (ended or {}).get(one.rank)


def ended_part(directory: Path, is_over: bool) -> dict[str, Any] | None:
    """Return the exception that ended a rank's script, a thread, a task or a child of it, while its process lives.

    `is_over`: its main thread has left the script; else only the others can have ended. part: what it ended; type,
    headline, place, traceback; line: its number in stderr.log, None: not known; age_s: it is older than this.
    """
    path = directory / "stderr.log"
    tail, lines = evidence.read_tail(path)
    error = evidence.read_error(directory / "error.json") if is_over else None
    if error is not None:
        # Other threads may have printed much since, and not every script prints its exceptions.
        path = directory / "error.json"
        trace = of_error(error["message"], error["callstack"])[-1]
        printed = next((one for one in reversed(find_traces(tail)) if one.headline == trace.headline), None)
        part, text = SCRIPT, error["callstack"] or error["message"]
    else:
        found = find_ended_part(tail)
        if found is None:
            return None
        trace = printed = found
        part, text = trace.part, trace.text
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


def read_stack(text: str) -> dict[str, Any]:
    """Return stack, where, calls, parked, over and inside of the main thread, which a dump of Python's lists last."""
    frames = [match for line in text.rstrip().rpartition("\n\n")[2].split("\n") if (match := _FRAME.search(line))]
    digest = hashlib.sha256("\n".join(match[0] for match in frames).encode()).hexdigest()[:16]
    at = next((n for n, one in enumerate(frames) if not any(part in one["file"] for part in _LIBRARIES)), 0)
    where = f"{os.path.basename(frames[at]['file'])}:{frames[at]['line']} in {frames[at]['name']}" if frames else ""
    calls = f"{frames[at - 1]['name']} of {os.path.basename(frames[at - 1]['file'])}" if at else ""
    parked = bool(frames) and os.path.basename(frames[0]["file"]) in _PARKED
    # Outermost: below what the script itself calls stands the script's own frame.
    last = frames[-1] if frames else None
    over = last is not None and (os.path.basename(last["file"]), last["name"]) == ("threading.py", "_shutdown")
    told = {"stack": digest, "where": where, "calls": calls, "parked": parked, "over": over}
    return {**told, "inside": _inside(frames)}


def _inside(frames: list[re.Match[str]]) -> str | None:
    """Return the outermost function of torch.distributed that the innermost frames belong to."""
    found = None
    if not frames or not _may_wait(frames[0]):
        return None
    for match in frames:
        if "/torch/" not in match["file"]:
            break
        if "/torch/distributed/" in match["file"] and match["name"] not in _WRAPPERS:
            found = match["name"]
    return found


def _may_wait(frame: re.Match[str]) -> bool:
    """Whether the innermost frame is one in which torch.distributed waits for other ranks: who saves a file works."""
    _, _, part = frame["file"].partition("/torch/distributed/")
    # What comes from torch.ops, which functional collectives are called by, has no frame of its own.
    is_distributed = bool(part) or frame["file"].endswith("/torch/_ops.py")
    return is_distributed and not part.startswith(_WORKSHOPS) and frame["name"] not in _PICKLES


def read_flight(text: bytes, now_ns: int) -> dict[str, dict[str, Any]]:
    """Return by process group what a flight record tells: ranks, last, and of the first collective not yet done more.

    last: number of the newest collective; seq, op, sizes, age_s, timeout_s: of the oldest one that is not done; age_s
    is 0 where the record has no time. ranks: the group's members, None where the record does not say. came: when it
    came to the newest ones over gloo.
    """
    try:
        record = json.loads(text)
        entries = _newest([one for one in record.get("entries") or () if not one.get("is_p2p")])
        known = record.get("pg_config") or {}
        groups: dict[str, dict[str, Any]] = {}
        for one in entries:
            name = str(one["process_group"][0])
            group = groups.setdefault(name, {"ranks": _members(known.get(name)), "last": 0})
            group["last"] = max(group["last"], int(one["collective_seq_id"]))
            if "seq" not in group and not one.get("retired") and one.get("state") != "completed":
                group.update(_waiting(one, now_ns))
        stamps = {
            int(one["collective_seq_id"]): int(one["time_created_ns"]) // 1000
            for one in entries
            if _kind(one) == ("0", "gloo") and one.get("time_created_ns")
        }
        if stamps:
            groups["0"]["came"] = _came(stamps)
        return groups
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        # Another torch, another form: what cannot be read is not known.
        return {}


def _newest(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entries of groups that there are: one of the same name may have been destroyed before."""
    newest = {_kind(one): one.get("pg_id") for one in entries}
    return [one for one in entries if one.get("pg_id") == newest[_kind(one)]]


def _kind(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return group and backend."""
    return str(entry["process_group"][0]), str(entry.get("profiling_name")).partition(":")[0]


def _came(stamps: Mapping[int, int]) -> dict[str, Any]:
    """Return the number and the time of a collective, and the times of it and all after it, later than that."""
    first = end = max(stamps) + 1
    while first - 1 in stamps and end - first < MAX_CAME:
        first -= 1
    t_us = stamps[first]
    return {"first": first, "t_us": t_us, "later_us": [stamps[number] - t_us for number in range(first, end)]}


def _waiting(entry: Mapping[str, Any], now_ns: int) -> dict[str, Any]:
    timeout_ms = entry.get("timeout_ms")
    call = str(entry.get("profiling_name") or "collective")
    return {
        "seq": int(entry["collective_seq_id"]),
        "backend": call.rpartition(":")[0],
        "op": call.partition(":")[2] or call,
        "sizes": json.dumps([entry.get("input_sizes"), entry.get("input_dtypes")]),
        "age_s": round(max(0.0, (now_ns - int(entry.get("time_created_ns") or now_ns)) / 1e9), 1),
        "timeout_s": None if timeout_ms is None else timeout_ms / 1000,
    }


def _members(config: Any) -> list[int] | None:
    ranks = config.get("ranks") if isinstance(config, dict) else None
    try:
        return [int(rank) for rank in json.loads(ranks)] if ranks else None
    except (ValueError, TypeError):
        return None


def _process(pid: int, tree: Tree) -> dict[str, Any]:
    """Return state, cpu_s, io and sleeps of a process; cpu_s and io with its descendants."""
    state, ticks, count = "?", 0, 0
    for each in descendants(pid, tree):
        fields = stat_fields(each)
        if fields:
            # Descendants that have ended are in their parent's two sums for children.
            ticks += sum(int(field) for field in fields[11:15])
            count += _transferred(each)
        if each == pid and fields:
            state = "D" if fields[0] == "S" and engine_children.is_at_a_file(pid) else fields[0]
    return {"state": state, "cpu_s": round(ticks / _TICKS, 2), "io": count, "sleeps": _sleeps(pid)}


def _sleeps(pid: int) -> int | None:
    """Return how often a process's main thread has gone to sleep."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches:")), None)
    except (OSError, ValueError):
        return None


def _transferred(pid: int) -> int:
    """Return the bytes that a process has read and written so far."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            fields = dict(line.split(": ") for line in file.read().splitlines())
        return int(fields["rchar"]) + int(fields["wchar"])
    except (OSError, KeyError, ValueError):
        return 0
