"""The types of what agents, engines and bridges answer: rows of logs, stacks, facts about a host and its torch, jobs.

In: JSON. Out: types, which the gate checks where an answer comes from another machine. What is kept in files too is in
documents.py; the annotations are evaluated in the same way.
"""

from typing import Annotated, Any, NamedTuple, Optional, TypedDict

from remote_agent.wire.documents import Count, GenerationNumber, RankExit, RankNumber, RankWindow, TimeNs
from remote_agent.wire.gate import Name, row, whole

# A node gives no more rows of a log than this at once.
MAX_ROWS = 4096
MAX_LARGE = 2**62
Port = Annotated[int, whole(0, 65535)]
Address = TypedDict("Address", {"address": str, "port": Port})
"""Where an agent listens for the others."""

# --- logs


class LogKey(NamedTuple):
    """The generation, rank and stream of a log file."""

    generation: int
    rank: int
    stream: str


LogEntry = TypedDict(
    "LogEntry",
    {"line": int, "offset": int, "t_ns": int, "level": Optional[str], "cut": int, "half": bool,
     "generation": int, "rank": int, "stream": str},
    total=False,
)  # fmt: skip
"""A row of a log without its text.

cut: how many bytes of its line follow the text; half: the line is still being written; generation, rank, stream: of its
file.
"""
Large = Annotated[int, whole(0, MAX_LARGE)]
_POSITIONS = list[Annotated[list[Any], row(GenerationNumber, RankNumber, Name, Large)]]
LogPage = TypedDict(
    "LogPage",
    {"rows": list[LogEntry], "apart": Count, "more": bool, "complete": bool, "since_ns": Optional[TimeNs],
     "until_ns": Optional[TimeNs], "first": Optional[GenerationNumber], "after": _POSITIONS, "lines": Optional[Count]},
    total=False,
)  # fmt: skip
"""Rows of several files by time. All wanted rows from since_ns on and before until_ns are in
it, or may be: `complete` says whether all files are indexed. apart: how many rows were left out because they are of a
stream that was not asked for; after: [generation, rank, stream, line] with which a reader continues; lines: how many
lines there are, in a page of one file that is indexed.
"""
LogChunk = TypedDict(
    "LogChunk",
    {"generation": GenerationNumber, "rank": RankNumber, "stream": Name, "offset": Large, "t_ns": Optional[TimeNs],
     "dropped": Count, "replaced": bool, "first": Optional[GenerationNumber], "after": _POSITIONS},
    total=False,
)  # fmt: skip
"""Bytes of one file, or where a reader of several begins."""

# --- what an engine answers its agent

TorchFacts = TypedDict(
    "TorchFacts",
    {"error": str, "torch": str, "python": str, "gpus": Count, "devices": dict[str, Count], "cuda": Optional[str],
     "nccl": Optional[str], "leaked": dict[str, str], "only_cpu": bool, "gpu_names": list[str], "pid": Count,
     "place": str},
    total=False,
)  # fmt: skip
"""What is known of an installed torch, or only `error`: why it cannot be imported.

devices: ranks by words of --nproc-per-node; leaked: what its torchrun adds to the environment of workers; pid: of the
engine; place: the digest of the environment or the image, empty for the node's own interpreter.
"""
StartedProcess = TypedDict(
    "StartedProcess", {"rank": int, "local_rank": int, "pid": int, "started": Optional[int]}, total=False
)
"""A rank, or torch's own agent; started: by the kernel's clock, None if unknown."""
NetworkNotice = TypedDict("NetworkNotice", {"kind": str, "message": str})


class StartedWorkers(TypedDict, total=False):
    """The answer to `go`."""

    ranks: list[StartedProcess]
    agent: StartedProcess
    cold: Optional[str]
    """Why no waiting process became the ranks: "" if one did, null where ranks are never warm."""
    t_ns: int
    notice: Optional[NetworkNotice]


StoppedWorkers = TypedDict("StoppedWorkers", {"exits": list[RankExit], "stacks": dict[str, str]})
ChildProcess = TypedDict("ChildProcess", {"pid": int, "name": str, "doing": str})
ChildStack = TypedDict("ChildStack", {"name": str, "doing": str, "stack": str})


class _RankStacks(TypedDict):
    stacks: dict[str, str]
    unreachable: dict[str, str]
    """By rank: why there is none."""


class RankStacks(_RankStacks, total=False):
    """What live ranks and their child processes are doing."""

    children: dict[str, list[ChildStack]]
    note: Optional[str]
    """Why stacks of child processes are missing, if any are."""


class SampledRanks(TypedDict):
    """New windows of ranks, by the window's number and by rank; off: by rank, why it cannot be sampled."""

    windows: dict[str, dict[str, RankWindow]]
    off: dict[str, str]


class NodeWindows(SampledRanks):
    """The newest whole windows of a node's ranks, for an operator."""

    generation: GenerationNumber


class JobWindows(TypedDict):
    """The same of all nodes: by rank and number, the node of each rank, by rank why there is nothing."""

    windows: dict[str, dict[str, RankWindow]]
    nodes: dict[str, str]
    unreachable: dict[str, str]


class JobStacks(_RankStacks):
    """The same of all nodes; notes: by node."""

    children: dict[str, list[ChildStack]]
    notes: dict[str, str]


# --- between an engine and its waiting process

LoadOrder = TypedDict(
    "LoadOrder",
    {"modules": list[str], "left_out": list[str], "varying": list[str], "prefixes": list[str], "is_urgent": bool,
     "tree": str, "stamp": list[str]},
)  # fmt: skip
LoadedModules = TypedDict("LoadedModules", {"modules": int, "pss_kb": int, "without": list[str]})
ForkedRank = TypedDict("ForkedRank", {"env": dict[str, str], "boot": str, "stdout": str, "stderr": str})
ForkOrder = TypedDict(
    "ForkOrder", {"ranks": list[ForkedRank], "cwd": str, "tree": str, "arguments": list[str], "replaced": int}
)
"""replaced: how many words at the end of the command line are those of another order."""

# --- what a bridge answers, also for a preflight

_Host = TypedDict(
    "_Host",
    {"protocol": Count, "version": str, "hostname": str, "user": str, "python": str, "executable": str, "home": str,
     "cpu_count": Count, "shm_free": Optional[Count], "time_ns": TimeNs, "pid": Count, "platform": str, "uv": bool},
    total=False,
)  # fmt: skip


class HostFacts(_Host, total=False):
    """A host's answer to `hello`."""

    disk_free: Optional[Count]


class _Job(TypedDict):
    job: Name
    live: bool
    tree: Optional[str]
    script: Optional[str]
    created_ns: Optional[TimeNs]
    updated_ns: Optional[TimeNs]
    state: str
    generation: GenerationNumber
    world_size: Count
    warm_until_ns: Optional[TimeNs]


class ListedJob(_Job):
    """A job as one host knows it."""

    node: Optional[Name]
    agent_pid: Optional[Count]


class JobRow(_Job):
    """A job as all of its hosts know it."""

    hosts: list[str]


StartedAgent = TypedDict("StartedAgent", {"agent_pid": Count, "script": Optional[str]}, total=False)
"""script: a hash of the script's bytes where it is not synced. No pid: a Slurm step starts the agent."""
Basis = TypedDict("Basis", {"authorities": list[str], "program": str}, total=False)
"""Fingerprints of a job's description and of the authorities that a node trusts."""
Space = TypedDict("Space", {"total": Count, "free": Count})
LeftOver = TypedDict("LeftOver", {"pid": Count, "mode": str, "job": str})
"""A process of ours whose agent is gone."""
ProbeFacts = TypedDict(
    "ProbeFacts",
    {"sockets": NetworkNotice, "kernel": str, "torch": TorchFacts, "driver": Optional[str],
     "gpu_processes": Optional[list[str]], "env": dict[str, str], "disk_free": dict[str, Optional[Count]],
     "shm": Optional[Space], "memlock": Optional[Count], "open_files": Optional[Count], "load": float,
     "live_jobs": list[str], "left_over": list[LeftOver], "code": Optional[str],
     "remarks": list[Annotated[list[str], row(str, str)]]},
    total=False,
)  # fmt: skip
"""gpu_processes: `pid, name, MiB` of each process on a GPU; memlock, open_files: null for unlimited; code: a hash of
the Python files, or in words why there is none; remarks: a text and a way out each, about containers.
"""


TreeDifferences = TypedDict(
    "TreeDifferences",
    {"files": Count, "changed": list[Annotated[list[Any], row(str, Count)]], "removed": list[str]},
)
"""files: how many differ; changed: path and size each."""


class CheckedFacts(_Host, ProbeFacts, total=False):
    """What a preflight knows of a node."""

    via: str
    """How supervisor reaches it, and why not by asyncssh."""
    clock_offset_ms: float
    clock_error_ms: float


ProbePort = TypedDict("ProbePort", {"port": Port, "token": str})


class ProbeTarget(ProbePort):
    """Where a node listens for the others, and what it says to each."""

    address: str


Reached = TypedDict("Reached", {"ms": float, "error": str}, total=False)


class AllReduce(Reached, total=False):
    """A rank's part of a small collective."""

    latency_ms: float
    bus_gb_per_s: float
    backend: str
    last: str
    """The last line of a rank that did not finish."""
