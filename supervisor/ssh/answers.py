"""The gate for what nodes answer: one shape for each request, and an error of that host for everything else.

In: a request and its answer. Out: the same answer, whose fields have the types that their readers expect; or a
MalformedAnswer, which names the host, the request and the field. Code behind the gate needs no checks.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Annotated, Any, TypedDict, cast

from remote_agent.history.pyramid import BUCKETS
from remote_agent.wire import Answer, CallFailed, Channel, ChannelClosed, Items, WireError
from remote_agent.wire.answers import (
    MAX_LARGE,
    Address,
    AllReduce,
    Basis,
    HostFacts,
    Large,
    ListedJob,
    LogChunk,
    LogEntry,
    LogPage,
    NodeWindows,
    Port,
    ProbeFacts,
    ProbePort,
    RankStacks,
    Reached,
    StartedAgent,
    TorchFacts,
    TreeDifferences,
)
from remote_agent.wire.documents import (
    MAX_RANKS,
    MAX_TIME_NS,
    Count,
    GenerationNumber,
    IncidentDocument,
    NcclSummary,
    NodeStatus,
    RankNumber,
    RequestReply,
    TimeNs,
    read_event,
    read_nccl_node,
    read_status,
)
from remote_agent.wire.gate import JsonObject, Misfit, Name, reader, record, row, whole
from supervisor.actions import ACTIONS
from supervisor.errors import HostError, one_line


class MalformedAnswer(HostError, WireError):
    """A host's answer is not of the shape that it should have, or none at all: as if its connection had failed."""


Read = Callable[[Any, bytes], Any]
"""Returns an answer's document; gets its body too. Raises Misfit."""
LEVELS = ("D", "I", "W", "E", None)
MAX_STREAM = 64
_NOTHING = record({})
_MODE = Annotated[int, whole(0, 0o777)]


class Hello(HostFacts, total=False):
    """A host's answer to `hello`; it has no fields before that."""

    clock_offset_ms: float
    """How far its clock is ahead of ours: measured here."""
    clock_error_ms: float


class EngineFacts(TorchFacts, total=False):
    nproc: RankNumber


JobList = TypedDict("JobList", {"jobs": list[ListedJob]})
Cleaned = TypedDict("Cleaned", {"removed": list[str], "kept": list[str], "bytes": Count})


class _LogFileEntry(TypedDict):
    generation: GenerationNumber
    rank: RankNumber
    stream: Name
    size: Large


class LogFileEntry(_LogFileEntry, total=False):
    lines: Count | None
    first_ns: TimeNs | None
    last_ns: TimeNs | None
    node: Any
    """The node of the file, which is added here."""


class Identity(Basis, total=False):
    """What an agent is in its job; it has no fields before the host has answered."""

    job: Name
    node: Name
    term: Count
    role: str
    live: bool
    last_seq: Count
    members: dict[str, Address]
    coordinator: Name | None
    journal_term: Count
    coordinator_reachable: bool
    joining: bool
    peer_port: Port
    ended: bool
    version: str
    build: str


_read_identity = reader(Identity, "job", "node", "term", "role", "live", "last_seq", "members")
_read_facts = reader(ProbeFacts, *ProbeFacts.__annotations__)
_read_times = reader(AllReduce, "ms")
_STEP = Annotated[list[Any], row(int | None, float | None, int | None)]
_WATCHED = {
    "status": record({"status": Annotated[Any, read_status]}, {"more": bool}),
    "nodes": record({"nodes": list[NodeStatus]}, {"more": bool}),
    "steps": record({"steps": dict[str, _STEP], "generation": GenerationNumber}),
}


def _status(value: object) -> Any:
    """Return a status, or a piece of it."""
    return read_status(value) if isinstance(value, dict) and "job" in value else _watched(value)


def _watched(value: object) -> Any:
    """Return an item of `watch`: a status, more of its nodes, or newer steps of its ranks."""
    kind = next((key for key in _WATCHED if isinstance(value, dict) and key in value), "status")
    return _WATCHED[kind](value)


_TREE_CHANGES = {"root": str, "changed": Count, "removed": Count, "conflicts": list[str]}


def _facts(value: object) -> ProbeFacts:
    facts = _read_facts(value)
    if not facts["disk_free"]:
        raise Misfit("disk_free is empty")
    if not facts["torch"].keys() & {"torch", "error"}:
        raise Misfit("torch.torch is missing")
    return facts


def _identity(value: object) -> Identity:
    identity = _read_identity(value)
    if identity["live"] and identity["node"] not in identity["members"]:
        raise Misfit("members has no address of the node itself")
    return identity


def _is_row(one: Any) -> bool:
    """Return whether this is a row of a file; by hand, because there may be millions."""
    if type(one) is not dict:
        return False
    get = one.get
    line, offset, t_ns = get("line"), get("offset"), get("t_ns", 0)
    if (
        type(line) is not int
        or type(offset) is not int
        or not (-MAX_LARGE <= line <= MAX_LARGE and 0 <= offset <= MAX_LARGE)
    ):
        return False
    if t_ns is not None and (type(t_ns) is not int or abs(t_ns) > MAX_TIME_NS):
        return False
    if get("level") not in LEVELS or type(cut := get("cut", 0)) is not int or abs(cut) > MAX_LARGE:
        return False
    return (
        type(group := get("generation")) is int
        and -1 <= group <= MAX_LARGE
        and type(place := get("rank")) is int
        and 0 <= place < MAX_RANKS
        and type(stream := get("stream")) is str
        and len(stream) < MAX_STREAM
    )


def _rows(value: object) -> list[LogEntry]:
    if not isinstance(value, list) or not all(map(_is_row, value)):
        raise Misfit("is not a list of rows")
    return value


def _plain(shape: Callable[[Any], Any]) -> Read:
    return lambda data, _body: shape(data)


def _with(**needed: Any) -> Read:
    """Return the reader of a document with these fields, each of its type."""
    return _plain(record(needed))


_read_page = record({}, {**LogPage.__annotations__, "rows": Annotated[Any, _rows]})


def _page(data: Any, body: bytes) -> Any:
    """Return a page, which has as many rows as its body has lines."""
    page = _read_page(data)
    rows = page.get("rows")
    if (body.count(b"\n") + 1 != len(rows)) if rows else body:
        raise Misfit(f"rows has {len(rows or ())} rows, but not as many texts")
    return page


_read_chunk = reader(LogChunk, "generation", "rank", "stream", "offset")


def _follow(data: Any, body: bytes) -> LogChunk:
    return (_read_chunk if body or "offset" in data else reader(LogChunk))(data)


_SERIES = record(
    {
        "count": Annotated[int, whole(1, BUCKETS)],
        "first": Annotated[int, whole(-BUCKETS)],
        "series": list[Annotated[Any, row(Name, Annotated[int, whole(-1, MAX_RANKS)])]],
    }
)


def _series(data: Any, body: bytes) -> Any:
    answer = _SERIES(data)
    if len(body) != 12 * answer["count"] * len(answer["series"]):
        raise Misfit("the values of series do not match its names")
    return answer


SHAPES: Mapping[str, Read] = {
    **{op: _plain(_NOTHING) for op in ("attach", "assign", "introduce", "exit", "over", "tree_put", "tree_free")},
    **{action.op: _plain(reader(RequestReply)) for action in ACTIONS if action.destructive and action.op},
    "hello": _plain(reader(HostFacts, *HostFacts.__annotations__)),
    "jobs": _plain(reader(JobList)),
    "open": _with(live=bool, node=Name | None),
    "start": _plain(reader(StartedAgent)),
    "await_agent": _with(agent_pid=Count | None),
    "clean": _plain(reader(Cleaned)),
    "facts": _plain(_facts),
    "listen": _plain(reader(ProbePort)),
    "reach": _with(reached=dict[str, Reached]),
    "collective_start": _plain(record({}, {"port": Port})),
    "collective_end": lambda data, _body: (reader(AllReduce) if "error" in data else _read_times)(data),
    "identity": _plain(_identity),
    "make": _with(said=str),
    "await_engine": _plain(reader(EngineFacts, "torch", "nproc")),
    "status": _plain(_status),
    "watch": _plain(_watched),
    "events": _with(event=Annotated[Any, read_event]),
    "series": _series,
    "incidents": _plain(record({"incidents": list[IncidentDocument]}, {"nccl": NcclSummary | None})),
    "job_files": _plain(record({"path": str, "mtime_ns": TimeNs, "at": Large}, {"left": Large})),
    "nccl": _plain(read_nccl_node),
    # JobSpec.from_json has the shape of a description.
    "describe": _with(ca=str, spec=JsonObject),
    "trust": _with(**Basis.__annotations__),
    "promote": _with(term=Count, coordinator=Name, went_on=bool),
    "signal": _with(refused=dict[str, str]),
    "keep": _with(files=dict[str, list[str]]),
    "stacks": _plain(reader(RankStacks)),
    "why": _plain(reader(NodeWindows)),
    "tree_has": _with(has=bool),
    "tree_plan": _with(missing=list[str], left=list[str], **_TREE_CHANGES),
    "tree_commit": _with(kept_in=str | None, **_TREE_CHANGES),
    "tree_differences": _plain(reader(TreeDifferences)),
    "log_list": _with(files=list[LogFileEntry]),
    "log_read": _plain(record({"offset": Large}, {"size": Large, "eof": bool})),
    "log_merged": _page,
    "log_rows": _page,
    "log_follow": _follow,
    "snapshot_files": _with(path=str, files=list[Annotated[Any, row(str, _MODE, Large, Name)]]),
    "snapshot_read": _plain(_NOTHING),
    # It is read as the answer of the host to which the request is passed on.
    "relay": lambda data, _body: data,
}
"""How the answer to each request is read; of a stream, each item. Verbs that change the job have one shape."""


_READS = {"status", "watch", "events", "incidents", *(op for op in SHAPES if op.startswith("log_"))}
_OF_ONE_NODE = {"await_engine", "job_files", "nccl", "series", "stacks", "why"}
PASSED_ON = {op for op in SHAPES if op.startswith(("log_", "snapshot_"))} | _OF_ONE_NODE
"""What a host is asked through another one. How the job is, and who its members are, comes over connections only."""
# Such a refusal depends only on the request: every host answers the same.
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
# Calls that one host passes on at once; more would fill the room that it has for requests.
PASSING = 128


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
        self.passing = asyncio.Semaphore(PASSING)

    @property
    def heard_at(self) -> float:
        """The time when the newest bytes arrived, by the loop's clock."""
        return self._heard.at

    async def call(
        self, op: str, args: Mapping[str, object] | None = None, body: bytes = b"", timeout: float = 30.0
    ) -> Answer:
        """Return the answer to one request; raises MalformedAnswer, CallFailed, ChannelClosed, asyncio.TimeoutError."""
        try:
            return read_answer(self._host, op, await super().call(op, args, body, timeout))
        except CallFailed as refused:
            raise _in_lines(refused) from None

    async def stream(self, op: str, args: Mapping[str, object] | None = None) -> Items:
        """Yield the items of one request; raises MalformedAnswer, CallFailed, ChannelClosed."""
        async with aclosing(super().stream(op, args)) as items:
            try:
                async for item in items:
                    yield read_answer(self._host, op, item)
            except CallFailed as refused:
                raise _in_lines(refused) from None


class RelayedChannel:
    """Requests to one host through the channel to another one, which could forge the answers."""

    def __init__(self, host: str, node: str, through: str, channel: HostChannel) -> None:
        self._host = host
        self._node = node
        self._through = through
        self._channel = channel

    async def call(
        self, op: str, args: Mapping[str, object] | None = None, body: bytes = b"", timeout: float = 30.0
    ) -> Answer:
        async with self._channel.passing, aclosing(self.stream(op, args)) as items:
            answer = await asyncio.wait_for(anext(items, None), timeout)
        if answer is None:
            raise MalformedAnswer(self._host, op, f"through {self._through}: no answer to `{op}`")
        return answer

    async def stream(self, op: str, args: Mapping[str, object] | None = None) -> Items:
        request = {"node": self._node, "op": op, "args": args or {}}
        try:
            async with aclosing(self._channel.stream("relay", request)) as items:
                async for item in items:
                    yield read_answer(self._host, op, item)
        except MalformedAnswer as wrong:
            raise MalformedAnswer(self._host, op, f"through {self._through}: {wrong.reason}", wrong.hint) from wrong
        except CallFailed as refused:
            if refused.kind in ("unreachable", "busy"):
                raise ChannelClosed(f"through {self._through}: {refused.message}") from None
            raise


def _in_lines(refused: CallFailed) -> CallFailed:
    """Return a host's refusal with texts of one line each."""
    return CallFailed(one_line(refused.kind), one_line(refused.message), one_line(refused.hint))
