"""The gate for what nodes answer: one shape for each request, and an error of that host for everything else.

In: a request and its answer. Out: the same answer, whose fields have the types that their readers expect; or a
MalformedAnswer, which names the host, the request and the field. Code behind the gate needs no checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any, cast

from remote_agent.history.pyramid import BUCKETS
from remote_agent.wire import Answer, CallFailed, Channel, Items, WireError
from remote_agent.wire.documents import INCIDENT as _INCIDENT
from remote_agent.wire.documents import (
    MAX_RANKS,
    MAX_TIME_NS,
    count,
    generation,
    rank,
    read_event,
    read_nccl_node,
    read_nccl_summary,
    read_status,
    read_status_changes,
    time_ns,
)
from remote_agent.wire.gate import Misfit, by_name, each, flag, maybe, name, number, record, row, text, whole
from supervisor.actions import ACTIONS
from supervisor.errors import HostError, one_line


class MalformedAnswer(HostError, WireError):
    """A host's answer is not of the shape that it should have, or none at all: as if its connection had failed."""


Read = Callable[[Any, bytes], Any]
"""Returns an answer's document; gets its body too. Raises Misfit."""
LEVELS = ("D", "I", "W", "E", None)
MAX_STREAM = 64
_LARGE = 2**62

_port = whole(0, 65535)
_nothing = record({})
_file = {"generation": generation, "rank": rank, "stream": name}
_clock = {"clock_offset_ms": number, "clock_error_ms": number}
_members = by_name(record({"address": text, "port": _port}))

_HELLO = {
    "version": text,
    "hostname": text,
    "user": text,
    "python": text,
    "executable": text,
    "home": text,
    "cpu_count": count,
    "disk_free": maybe(count),
    "shm_free": maybe(count),
    "time_ns": time_ns,
    "pid": count,
}
_TORCH = {"torch": text, "cuda": maybe(text), "nccl": maybe(text)}
_JOB = {
    "job": name,
    "node": maybe(name),
    "live": flag,
    "agent_pid": maybe(count),
    "tree": maybe(text),
    "script": maybe(text),
    "created_ns": maybe(time_ns),
    "updated_ns": maybe(time_ns),
    "state": text,
    "generation": generation,
    "world_size": count,
    "warm_until_ns": maybe(time_ns),
}
_BASIS = {"authorities": each(text), "program": text}
_IDENTITY = record(
    {"job": name, "node": name, "term": count, "role": text, "live": flag, "last_seq": count, "members": _members},
    {
        "coordinator": maybe(name),
        "journal_term": count,
        "coordinator_reachable": flag,
        "peer_port": _port,
        "ended": flag,
        "version": text,
        "build": text,
        **_BASIS,
    },
)
_FACTS = record(
    {
        "sockets": record({"kind": text, "message": text}),
        "torch": record({}, {**_TORCH, "error": text, "gpu_names": each(text)}),
        "driver": maybe(text),
        "gpu_processes": maybe(each(text)),
        "env": by_name(text),
        "disk_free": by_name(maybe(count)),
        "shm": maybe(record({"total": count, "free": count})),
        "memlock": maybe(count),
        "open_files": maybe(count),
        "load": number,
        "live_jobs": each(text),
        "left_over": each(record({"pid": count, "job": text})),
        "code": maybe(text),
    },
    # They stand beside those of `hello`.
    {**{key: shape for key, shape in _HELLO.items() if key != "disk_free"}, **_clock},
)
_TREE_CHANGES = {"root": text, "changed": count, "removed": count, "conflicts": each(text)}
_ENTRY = record({"accepted": flag, "message": text}, {"hint": text})
_REPLY = record({"accepted": flag, "message": text}, {"generation": generation, "seq": count, "nodes": by_name(_ENTRY)})
_POSITIONS = each(row(generation, rank, name, whole(0, _LARGE)))
_PAGE = {
    "apart": count,
    "more": flag,
    "complete": flag,
    "around": flag,
    "done": flag,
    "counted": count,
    "before": count,
    "behind": count,
    "begun_ns": maybe(time_ns),
    "since_ns": maybe(time_ns),
    "until_ns": maybe(time_ns),
    "ends": maybe(each(row(generation, rank, name, maybe(count)))),
    "first": maybe(generation),
    "after": _POSITIONS,
}


def _facts(value: Any) -> Any:
    facts = _FACTS(value)
    if not facts["disk_free"]:
        raise Misfit("disk_free is empty")
    if not facts["torch"].keys() & {"torch", "error"}:
        raise Misfit("torch.torch is missing")
    return facts


def _identity(value: Any) -> Any:
    identity = _IDENTITY(value)
    if identity["live"] and identity["node"] not in identity["members"]:
        raise Misfit("members has no address of the node itself")
    return identity


def _rows(files: bool) -> Callable[[Any], list[dict[str, Any]]]:
    """Return the shape of rows; `files`: each names its file. Checked by hand: there may be millions."""

    def is_cut(one: dict[str, Any]) -> bool:
        return all(type(value) is int and abs(value) <= _LARGE for value in (one.get("cut", 0), one.get("column", 0)))

    def is_row(one: Any) -> bool:
        if type(one) is not dict:
            return False
        get = one.get
        line, offset, t_ns = get("line"), get("offset"), get("t_ns", 0)
        if (
            type(line) is not int
            or type(offset) is not int
            or not (-_LARGE <= line <= _LARGE and 0 <= offset <= _LARGE)
        ):
            return False
        if t_ns is not None and (type(t_ns) is not int or abs(t_ns) > MAX_TIME_NS):
            return False
        if get("level") not in LEVELS or (("cut" in one or "column" in one) and not is_cut(one)):
            return False
        return not files or (
            type(group := get("generation")) is int
            and -1 <= group <= _LARGE
            and type(place := get("rank")) is int
            and 0 <= place < MAX_RANKS
            and type(stream := get("stream")) is str
            and len(stream) < MAX_STREAM
        )

    def read(value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not all(map(is_row, value)):
            raise Misfit("is not a list of rows")
        return value

    return read


def _plain(shape: Callable[[Any], Any]) -> Read:
    return lambda data, _body: shape(data)


def _with_rows(*, files: bool, **needed: Any) -> Read:
    """Return the reader of a page: as many rows as its body has lines."""
    shape = record(needed, {**_PAGE, "rows": _rows(files)})

    def read(data: Any, body: bytes) -> Any:
        page = shape(data)
        rows = page.get("rows")
        if (body.count(b"\n") + 1 != len(rows)) if rows else body:
            raise Misfit(f"rows has {len(rows or ())} rows, but not as many texts")
        return page

    return read


_CHUNK = record({**_file, "offset": whole(0, _LARGE)}, {"t_ns": maybe(time_ns), "dropped": count, "replaced": flag})
_BEGINNING = record({}, {"first": maybe(generation), "after": _POSITIONS})


def _follow(data: Any, body: bytes) -> Any:
    return (_CHUNK if body or "offset" in data else _BEGINNING)(data)


_SERIES = record(
    {"count": whole(1, BUCKETS), "first": whole(-BUCKETS), "series": each(row(name, whole(-1, MAX_RANKS)))}
)


def _series(data: Any, body: bytes) -> Any:
    answer = _SERIES(data)
    if len(body) != 12 * answer["count"] * len(answer["series"]):
        raise Misfit("the values of series do not match its names")
    return answer


SHAPES: Mapping[str, Read] = {
    **{op: _plain(_nothing) for op in ("attach", "assign", "introduce", "exit", "over", "tree_put", "tree_free")},
    **{action.op: _plain(_REPLY) for action in ACTIONS if action.destructive and action.op},
    "hello": _plain(record({"protocol": count, **_HELLO})),
    "jobs": _plain(record({"jobs": each(record(_JOB))})),
    "open": _plain(record({"live": flag, "node": maybe(name)})),
    "start": _plain(record({}, {"agent_pid": count, "script": maybe(text)})),
    "await_agent": _plain(record({"agent_pid": maybe(count)})),
    "clean": _plain(record({"removed": each(text), "kept": each(text), "bytes": count})),
    "facts": _plain(_facts),
    "listen": _plain(record({"port": _port, "token": text})),
    "reach": _plain(record({"reached": by_name(record({}, {"ms": number, "error": text}))})),
    "collective_start": _plain(record({}, {"port": _port})),
    "collective_end": lambda data, _body: record({} if "error" in data else {"ms": number}, {"error": text})(data),
    "identity": _plain(_identity),
    "await_engine": _plain(record({"torch": text, "nproc": rank}, {**_TORCH, "python": text})),
    "status": _plain(read_status),
    "watch": _plain(record({"status": read_status})),
    "events": _plain(record({"event": read_event})),
    "history": _plain(record({"seq": count, "changes": read_status_changes})),
    "series": _series,
    "incidents": _plain(record({"incidents": each(_INCIDENT)}, {"nccl": maybe(read_nccl_summary)})),
    "nccl": _plain(read_nccl_node),
    # JobSpec.from_json has the shape of a description.
    "describe": _plain(record({"ca": text, "spec": _nothing})),
    "trust": _plain(record(_BASIS)),
    "promote": _plain(record({"term": count, "coordinator": name, "went_on": flag})),
    "signal": _plain(record({"refused": by_name(text)})),
    "keep": _plain(record({"files": by_name(each(text))})),
    "stacks": _plain(
        record(
            {"stacks": by_name(text), "unreachable": by_name(text)},
            {"children": by_name(each(record({"name": text, "doing": text, "stack": text}))), "note": maybe(text)},
        )
    ),
    "tree_has": _plain(record({"has": flag})),
    "tree_plan": _plain(record({"missing": each(text), "left": each(text), **_TREE_CHANGES})),
    "tree_commit": _plain(record({"kept_in": maybe(text), **_TREE_CHANGES})),
    "tree_differences": _plain(record({"files": count, "changed": each(row(text, count)), "removed": each(text)})),
    "log_list": _plain(
        record(
            {
                "files": each(
                    record(
                        {**_file, "size": whole(0, _LARGE)},
                        {"lines": maybe(count), "first_ns": maybe(time_ns), "last_ns": maybe(time_ns)},
                    )
                )
            }
        )
    ),
    "log_read": _plain(record({"offset": whole(0, _LARGE)}, {"size": whole(0, _LARGE), "eof": flag})),
    "log_window": _with_rows(
        files=False, line=whole(), total_lines=maybe(count), size=whole(0, _LARGE), at=maybe(whole()), rows=_rows(False)
    ),
    "log_merged": _with_rows(files=True),
    "log_search": _with_rows(files=True),
    "log_rows": _with_rows(files=True),
    "log_follow": _follow,
    "snapshot_files": _plain(record({"path": text, "files": each(row(text, whole(0, 0o777), whole(0, _LARGE), name))})),
    "snapshot_read": _plain(_nothing),
}
"""How the answer to each request is read; of a stream, each item. Verbs that change the job have one shape."""


_READS = {"status", "watch", "events", "history", "incidents", *(op for op in SHAPES if op.startswith("log_"))}
# What such a request is refused with because of what it asks for: every host says the same.
_OF_THE_REQUEST = {"no_log", "no_such_job", "pattern", "usage"}


def read_refusal(host: str, op: str, refused: CallFailed) -> CallFailed | MalformedAnswer:
    """Return a host's refusal, as MalformedAnswer if others may answer that request: then it is this host's failure."""
    if op not in _READS or refused.kind in _OF_THE_REQUEST:
        return refused
    return MalformedAnswer(host, op, f"it refuses `{op}`: {refused.message}", refused.hint)


def read_answer(host: str, op: str, answer: Answer) -> Answer:
    """Return a host's answer to a request, or one item of it; raises MalformedAnswer."""
    try:
        return Answer(SHAPES[op](answer.data, answer.body), answer.body)
    except Misfit as wrong:
        reason = f"its answer to `{op}` is malformed: {wrong}"
        hint = "does it run another version of supervisor, or something else under that name?"
        raise MalformedAnswer(host, op, reason, hint) from wrong


# A frame is read in parts of this size, so that a large one on a slow line is seen to arrive.
PART = 64 * 1024


class _Heard:
    """A host's reader, which notes when something arrived."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.at = 0.0

    async def readexactly(self, count: int) -> bytes:
        """Return that many bytes; raises IncompleteReadError, ConnectionError."""
        parts = []
        while count:
            parts.append(await self._reader.readexactly(min(PART, count)))
            count -= len(parts[-1])
            self.at = asyncio.get_running_loop().time()
        return parts[0] if len(parts) == 1 else b"".join(parts)


class HostChannel(Channel):
    """The channel to one host: what comes through it has the shape that its readers expect."""

    def __init__(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._heard = _Heard(reader)
        super().__init__(cast("asyncio.StreamReader", self._heard), writer)
        self._host = host

    @property
    def heard_at(self) -> float:
        """When the newest bytes arrived, by the loop's clock."""
        return self._heard.at

    async def call(
        self, op: str, args: dict[str, Any] | None = None, body: bytes = b"", timeout: float = 30.0
    ) -> Answer:
        """Return the answer to one request; raises MalformedAnswer, CallFailed, ChannelClosed, asyncio.TimeoutError."""
        try:
            return read_answer(self._host, op, await super().call(op, args, body, timeout))
        except CallFailed as refused:
            raise _in_lines(refused) from None

    async def stream(self, op: str, args: dict[str, Any] | None = None) -> Items:
        """Yield the items of one request; raises MalformedAnswer, CallFailed, ChannelClosed."""
        async with aclosing(super().stream(op, args)) as items:
            try:
                async for item in items:
                    yield read_answer(self._host, op, item)
            except CallFailed as refused:
                raise _in_lines(refused) from None


def _in_lines(refused: CallFailed) -> CallFailed:
    """Return a host's refusal with texts of one line each."""
    return CallFailed(one_line(refused.kind), one_line(refused.message), one_line(refused.hint))
