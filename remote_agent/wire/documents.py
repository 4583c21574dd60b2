"""The shapes of the documents that cross wires and files: journal events, incidents, status, NCCL's facts.

In: JSON. Out: `read_event`, `read_status` …: the same documents, whose fields have the types that their readers expect;
`Misfit` for anything else. Fields that only a newer version knows stay, as long as they are plain JSON.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

from remote_agent.wire.events import PHASES, EventType, JournalEvent
from remote_agent.wire.gate import (
    Misfit,
    Shape,
    anything,
    by_name,
    each,
    flag,
    maybe,
    name,
    number,
    parse,
    record,
    row,
    text,
    whole,
)

STREAMS = ("stdout", "stderr", "nccl")
# A node gives no more rows of a log than this at once.
MAX_ROWS = 4096
Severity = Literal["error", "warning", "info"]
# More than any job has: a damaged number must not become a list of that length.
MAX_RANKS = 1 << 17
# In the years 1684 and 2255; anything beyond is no time. A machine without a clock starts in 1970.
MAX_TIME_NS = 9_000_000_000 * 1_000_000_000
_MOMENT = re.compile(r"(?:1[6-9]|2\d)\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{3}(?:\d{3})?)?Z")


def moment(value: Any) -> str:
    """Return a time as 2026-11-20T10:00:00.123Z; raises Misfit."""
    try:
        if _MOMENT.fullmatch(text(value)) is None:
            raise ValueError
        datetime.datetime.fromisoformat(value[:-1])
    except ValueError as error:
        raise Misfit("is not a time") from error
    return text(value)


count = whole(0)
rank = whole(0, MAX_RANKS - 1)
time_ns = whole(-MAX_TIME_NS, MAX_TIME_NS)
generation = whole(-1)
_document = record({})
# JSON has no such numbers: a rank's figures have them as words.
NOT_FINITE = ("nan", "-nan", "inf", "-inf")
_exit_code = whole(-(1 << 31), 1 << 32)

_EVIDENCE = each(
    record({"node": maybe(name), "rank": maybe(rank), "file": maybe(text), "line": maybe(whole()), "text": text})
)
_CALL = record({"collective": text, "seq": maybe(whole()), "group": text, "ranks": each(rank)})
INCIDENT = record(
    {
        "id": count,
        "generation": generation,
        "time": maybe(moment),
        "category": text,
        "scope": text,
        "culprit_ranks": each(rank),
        "culprit_node": maybe(name),
        "confidence": text,
        "summary": text,
        "evidence": _EVIDENCE,
        "traceback": maybe(text),
        "exit": record({"code": maybe(_exit_code), "signal": maybe(text)}),
        "hint": text,
        "victims": each(record({"ranks": each(rank), "category": text, "summary": text})),
        "missing": maybe(
            record(
                {
                    "collective": maybe(text),
                    "seq": maybe(whole()),
                    "waiting": each(rank),
                    "missing": each(rank),
                    "stacks": by_name(text),
                },
                {
                    "calls": each(_CALL),
                    "sources": by_name(record({"first": whole(1), "text": text})),
                },
            )
        ),
    },
    {
        "fingerprint": text,
        "at_least": flag,
        "state": text,
        "ended_at": maybe(moment),
        "over": maybe(text),
        "ongoing": flag,
        "preliminary": flag,
        "times_out_at": maybe(moment),
        "restarts_at": maybe(moment),
    },
)

# --- the journal

_SPEC = record({"name": name, "address": text}, {"nproc_per_node": text, "spare": flag, "env": by_name(text)})
_PHASES = {phase: maybe(number) for phase in PHASES}
_START = record({"warm": flag, "why": text})
_MEMBERS = each(record({"node": name, "base_rank": rank, "nproc": rank}))
_MEETING = maybe(record({"backend": text, "endpoint": text, "run_id": text}))
_EXIT = record({"code": maybe(_exit_code), "signal": maybe(text)})
_LEFT = each(row(rank, time_ns, maybe(time_ns)))
_STOPPED = each(row(rank, time_ns, maybe(_exit_code), maybe(text), maybe(time_ns), maybe(time_ns), maybe(time_ns)))
_TREE = row(text, time_ns)
_SNAPSHOT = {"id": name, "path": text, "bytes": count, "time_ns": time_ns, "step": maybe(count)}
_PLACED = {"seconds": number, "bytes": count, "placed": by_name(maybe(name)), "aside": each(text)}
_TREE_CHANGE = {"digest": text, "files": count, "bytes": count, "paths": each(text), "without": each(text)}
_SAID_BY = {"operator": maybe(text), "reason": maybe(text)}


def _members(value: Any) -> list[dict[str, Any]]:
    members: list[dict[str, Any]] = _MEMBERS(value)
    if sum(member["nproc"] for member in members) > MAX_RANKS:
        raise Misfit(f"is a group of more than {MAX_RANKS} ranks")
    return members


def _detail(needed: Mapping[str, Shape] | None = None, /, **optional: Shape) -> Shape:
    return record(needed or {}, {**_SAID_BY, **optional})


_LOST = _detail({"status": text}, alive_ns=maybe(time_ns))
_CORDONED = _detail({"status": text})
_ENDED = _detail(restarts=maybe(count))
_HOOK = _detail({"hook": count, "of": count}, event=text)
_DETAILS: Mapping[str, Shape] = {
    EventType.JOB_STARTED: _detail(script=text, args=each(text), nodes=each(name)),
    EventType.JOB_DEGRADED: _detail(ready=count, needed=count),
    EventType.JOB_SUCCEEDED: _ENDED,
    EventType.JOB_FAILED: _ENDED,
    EventType.JOB_STOPPED: _ENDED,
    EventType.NODE_JOINED: _detail({"spec": _SPEC}),
    EventType.NODE_READY: _detail({"nproc": rank}, spare=flag, returned=flag, versions=by_name(anything)),
    EventType.NODE_ADDED: _detail({"spec": _SPEC, "nproc": rank}),
    EventType.NODE_LOST: _LOST,
    EventType.NODE_FAILED: _LOST,
    EventType.NODE_CORDONED: _CORDONED,
    EventType.NODE_UNCORDONED: _CORDONED,
    EventType.COORDINATOR_CHANGED: _detail(former=maybe(name), term=count),
    EventType.QUORUM_LOST: _detail(held=each(name), members=each(name)),
    EventType.GENERATION_STARTED: _detail(
        {"members": _members, "restarts": count},
        world_size=maybe(count),
        fingerprint=maybe(text),
        suspects=each(name),
        rendezvous=_MEETING,
        env=by_name(text),
    ),
    EventType.RANKS_ASSIGNED: _detail({"ranks": each(row(rank, rank, whole())), "world_size": maybe(count)}),
    EventType.GENERATION_RUNNING: _detail(
        world_size=maybe(count), pids=by_name(maybe(whole())), starts=by_name(_START), **_PHASES
    ),
    EventType.PROCESS_GROUP_UP: _detail(**_PHASES),
    EventType.FIRST_STEP: _detail(**_PHASES),
    EventType.GENERATION_STOPPED: _detail(
        cause=maybe(text), stop_ms=maybe(number), left=_LEFT, stopped=_STOPPED, clocks=by_name(row(whole(), whole()))
    ),
    EventType.RANK_FAILED: _detail(
        {"exit": _EXIT},
        local_rank=maybe(rank),
        pid=maybe(whole()),
        sent=maybe(text),
        time_ns=maybe(time_ns),
        shift_ns=whole(),
        raised_ns=maybe(time_ns),
        over_ns=maybe(time_ns),
        notes=each(text),
    ),
    EventType.INCIDENT: INCIDENT,
    EventType.LAST_OUTPUT: _detail({"kept_by": name, "ranks": each(rank), "evidence": _EVIDENCE}),
    EventType.WARNING: _detail({"message": text}, kind=text),
    EventType.ENVIRONMENT_SET: _detail({"env": by_name(text), "from_generation": generation}),
    EventType.TREE_CHANGED: _detail({"trees": row(_TREE, _TREE)}, rollback=flag, **_TREE_CHANGE),
    EventType.RESTART_REQUESTED: _detail(snapshot=maybe(name)),
    EventType.SNAPSHOTS_CHOSEN: _detail(
        {"snapshots": each(record(_SNAPSHOT)), "skipped": each(row(time_ns, time_ns))},
        placed=by_name(record({}, _PLACED)),
    ),
    EventType.SIGNAL_SENT: _detail(ranks=maybe(each(rank)), signal=maybe(text)),
    EventType.OPERATOR_ATTACHED: _detail(mode=maybe(text)),
    EventType.HOOK_DELIVERED: _HOOK,
    EventType.HOOK_FAILED: _HOOK,
}
_ANY_DETAIL = _detail()
# These are facts about one node.
_OF_NODE = frozenset(
    {
        EventType.NODE_READY,
        EventType.NODE_LOST,
        EventType.NODE_FAILED,
        EventType.NODE_REMOVED,
        EventType.NODE_CORDONED,
        EventType.NODE_UNCORDONED,
        EventType.RANKS_ASSIGNED,
        EventType.RANK_FAILED,
        EventType.LAST_OUTPUT,
    }
)
_EVENT = record(
    {
        "seq": whole(1),
        "time": moment,
        "type": text,
        "generation": generation,
        "node": maybe(name),
        "rank": maybe(rank),
        "detail": _document,
    },
    {"term": count},
)


def read_event(value: Any) -> JournalEvent:
    """Return an event of the journal, also of a type that only a newer version knows; raises Misfit."""
    event = _EVENT(value)
    kind = event["type"]
    try:
        event["detail"] = _DETAILS.get(kind, _ANY_DETAIL)(event["detail"])
    except Misfit as wrong:
        raise wrong.inside("detail") from wrong
    if kind in _OF_NODE:
        name(event["node"])
    if kind == EventType.RANK_FAILED:
        rank(event["rank"])
    return cast("JournalEvent", event)


def parse_event(line: str | bytes) -> JournalEvent:
    """Return the event in a line of a journal; raises Misfit."""
    return read_event(parse(line))


# --- the status


def _measured(value: Any) -> float | None:
    """Return a number that is shown, null for one that is too large or not finite; raises Misfit."""
    if value is None or value in NOT_FINITE:
        return None
    return number(value) if isinstance(value, bool) or not isinstance(value, (int, float)) else anything(value)


def _figure(value: Any) -> float | str | None:
    """Return what a rank printed, a number or a word of NOT_FINITE; raises Misfit."""
    return text(value) if value in NOT_FINITE else _measured(value)


def _measurements(*names: str, **others: Shape) -> Shape:
    return record({}, {**dict.fromkeys(("age_s", *names), _measured), **others})


_GPU = _measurements(
    *("use", "mem_used", "mem_total", "temp", "power", "power_limit", "clock", "ecc", "xid"), index=maybe(count)
)
_NODE_VITALS = _measurements(
    *("every_s", "cpu", "mem_used", "mem_total", "disk_free", "shm_free", "net_in", "net_out"), gpus=each(_GPU)
)
_RANK_VITALS = _measurements("cpu", "rss", gpu=maybe(count))
_PROGRESS = _measurements(
    *("rate", "steps_s", "lag"),
    loss=_figure,
    lr=_figure,
    grad_norm=_figure,
    unit=maybe(text),
    total=maybe(whole()),
    saved=maybe(whole()),
)
_RANK = record(
    {"rank": rank},
    {
        "local_rank": maybe(rank),
        "pid": maybe(whole()),
        "state": text,
        "exit_code": maybe(_exit_code),
        "signal": maybe(text),
        "step": maybe(whole()),
        "last_output_age_s": maybe(number),
        "progress": maybe(_PROGRESS),
        "vitals": maybe(_RANK_VITALS),
    },
)
_NODE = record(
    {"name": name},
    {
        "address": text,
        "state": text,
        "nproc": rank,
        "spare": flag,
        "cordoned": flag,
        "lacks_tree": flag,
        "group_rank": maybe(count),
        "reason": maybe(text),
        "agent_pid": maybe(whole()),
        "clock_offset_ms": maybe(number),
        "clock_error_ms": maybe(number),
        "vitals": maybe(_NODE_VITALS),
        "start": maybe(_START),
        "standby": maybe(record({"state": text}, {"pid": maybe(whole()), "why": text, "modules": count, "mb": count})),
        "ranks": each(_RANK),
    },
)
_STATUS: Mapping[str, Shape] = {
    "job": text,
    "state": text,
    "condition": text,
    "generation": generation,
    "restarts": count,
    "max_restarts": count,
    "min_nodes": count,
    "max_nodes": count,
    "world_size": maybe(count),
    "coordinator": maybe(name),
    "started_at": maybe(moment),
    "phases": record({}, _PHASES),
    "nodes": each(_NODE),
    "incident": maybe(INCIDENT),
    "warnings": each(record({"kind": text, "node": maybe(name), "rank": maybe(rank), "message": text})),
    "failure": maybe(text),
    "plan": maybe(text),
    "environment": maybe(record({"env": by_name(text)}, {"from_generation": generation})),
    "snapshots": each(record(_SNAPSHOT, {"nodes": each(name), "skipped": flag})),
    "tree": maybe(record({"digest": text, "previous": maybe(record({"digest": text}))})),
    "script": maybe(record({"script": maybe(text)}, {"kind": text, "args": each(text)})),
    "term": count,
    "journal_term": count,
    "last_seq": count,
    "node": maybe(name),
    "coordinator_reachable": maybe(flag),
}
read_status = record({key: _STATUS[key] for key in ("job", "state", "generation", "nodes")}, _STATUS)
read_status_changes = record({}, {**_STATUS, "order": each(name)})

# --- snapshots, as agents report them

read_snapshots = each(record({**_SNAPSHOT, "exact": flag}))
read_placed = record({"ids": each(name), **_PLACED}, {"problem": text})

# --- the last output of a lost node's ranks, as the agent that has a copy reports it

# In the directory of each of these ranks, beside its logs; names the lost node.
COPY_MARK = "copy.json"

read_last_output = record({"generation": generation, "of": name, "ranks": each(rank), "evidence": _EVIDENCE})

# --- NCCL's facts

read_nccl_summary = record(
    {}, {"versions": each(text), "networks": each(text), "interfaces": each(text), "transports": each(text),
         "nranks": maybe(count), "nodes": maybe(count), "channels": maybe(count), "nvls": maybe(flag),
         "warnings": each(text)}
)  # fmt: skip
read_nccl_node = record(
    {"generation": generation},
    {
        "stamp": text,
        "groups": each(record({"ranks": each(rank), "facts": record({}, {"env": by_name(text)})})),
        "comms": each(row(rank, text, whole(), whole())),
        "links": each(row(rank, text, whole(), whole(), text, whole())),
        "warnings": each(row(rank, text, anything)),
    },
)
