"""The description of a job that the supervisor sends to the agents, with torchrun's syntax for a rendezvous.

In: JSON of the `start` request, words of the command line. Out: frozen objects, the same on every node.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Optional

from remote_agent.wire import gate, leases

# A launch has this term. Only in this term is it certain that no node has workers of an unknown group.
FIRST_TERM = 1
# These are the default ports of torch.
PORTS = {"c10d": 29400, "static": 29500, "etcd": 2379, "etcd-v2": 2379}


class SpecError(ValueError):
    """A job description that this agent cannot read."""


@dataclasses.dataclass(frozen=True)
class NodeSpec:
    """One node of the job, in inventory order."""

    name: str
    address: str
    """The host name or address that the other nodes connect to."""
    nproc_per_node: str = "auto"
    """auto, a kind of device (gpu, cpu, xpu …), or a number as text."""
    spare: bool = False
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    python: str = ""
    """The interpreter of the ranks where it is another one than the agent's; empty: python3 there."""
    wrap: str = ""
    """Words that stand before it, such as `apptainer exec --nv train.sif`; empty: none."""

    @classmethod
    def from_json(cls, data: object) -> NodeSpec:
        """Read a document, without fields that only a newer version knows; raises Misfit."""
        return cls(**read_fields(cls, data))


@dataclasses.dataclass(frozen=True)
class Hook:
    """A shell command or URL to call on events of the job. Both may contain secrets, so nothing prints them."""

    on: tuple[str, ...]
    """Some of failure, hang, slow, recovery and end."""
    command: str = dataclasses.field(default="", repr=False)
    url: str = dataclasses.field(default="", repr=False)
    kind: str = ""
    """The kind of the incoming webhook: slack, discord or mattermost; "": it gets the event as JSON."""
    timeout: float = 10.0
    """Seconds for one attempt."""
    retries: int = 3


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """Everything that agents need to know about a job. Times are in seconds unless the name says otherwise."""

    job: str
    script: str
    """Relative to the working directory, or absolute; a module name or a program by `kind`."""
    nodes: tuple[NodeSpec, ...]
    args: tuple[str, ...] = ()
    kind: str = "script"
    """script, module (`python -m`), run_path (`runpy.run_path`) or binary (no Python)."""
    tree: str | None = None
    """Name of the synced tree under `trees/`; None: the tree is already on the nodes."""
    tree_digest: str = ""
    """The digest of the synced files; empty: unknown."""
    workdir: str = "."
    """Working directory of the workers: relative to the tree, absolute without a tree."""
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    min_nodes: int = 1
    max_nodes: int = 1
    max_restarts: int = 0
    node_timeout: float = 15.0
    stop_grace: float = 15.0
    hang_after: float = 30.0
    """How long ranks must wait for an inactive rank before it counts as a hang; 0: hangs are not detected."""
    hang_restart: float = 0.0
    """A group that hangs for this long is restarted, like after a failure; 0: never."""
    slow: bool = True
    """Whether ranks are sampled now and then, to say which one the others wait for, and why."""
    join_timeout: float = 120.0
    """How long generation 0 waits for all members before it starts with at least min_nodes."""
    settle_timeout: float = 3.0
    """How long generation 0 waits for more nodes once min_nodes are ready, if min_nodes is below max_nodes."""
    coordinator_port: int = 0
    ports: str = ""
    """FIRST-LAST: where agents and stores listen for other nodes; empty: at any free port."""
    role: str = "default"
    log_dir: str | None = None
    """A directory in which each node links its logs in torchrun's layout; relative to the working directory."""
    numa_binding: str | None = None
    """How workers are bound to CPUs: a value of torchrun's --numa-binding."""
    signals_to_handle: str | None = None
    virtual_local_rank: bool = False
    rendezvous: Rendezvous | None = None
    """None: the coordinator forms the group."""
    hooks: tuple[Hook, ...] = ()
    metrics_port: int = 0
    """The port on which the coordinator serves Prometheus metrics; 0: none."""
    log_bound: int = 0
    """Limit in bytes for the logs of a rank on its disk, per generation; 0: no limit."""
    standby: str = "auto"
    """auto: each node keeps a process that waits with modules loaded and becomes the ranks of a restart; off: none."""
    keep_warm: float = 0.0
    """How long that process waits for the next job of the same tree after the end of the job; 0: not at all."""
    snapshots: tuple[str, ...] = ()
    """Patterns of the files and directories that ranks save to and resume from; relative to the working directory."""
    snapshots_limit: int = 0
    """How many bytes the copies of snapshots may use on each node; 0: whatever is free, but for a tenth of the disk."""
    environment: str = ""
    """The lock file from which each node builds what the ranks need, relative to the working directory; empty: none."""
    extras: tuple[str, ...] = ()
    """The extras of its project."""
    container: str = ""
    """The image in whose container the ranks of a node run; empty: in none."""
    mounts: tuple[str, ...] = ()
    """The directories of the host that the container has, too: PATH or PATH:ro."""
    created_ns: int = 0
    endpoint: str = ""
    """HOST:PORT of a job that any node with its certificate may join; empty: only `nodes` take part."""

    def node(self, name: str) -> NodeSpec | None:
        """Return the node of that name, or None."""
        return next((node for node in self.nodes if node.name == name), None)

    def to_json(self) -> dict[str, object]:
        """Return the JSON document, the input of `from_json`."""
        return dataclasses.asdict(self)

    def program_digest(self) -> str:
        """Return a hash of what the job runs and how: of all but its nodes and the digest of its files."""
        common = dataclasses.asdict(dataclasses.replace(self, nodes=(), tree_digest=""))
        if self.slow:
            # The agents of earlier versions, which may be part of the same job, do not have it.
            del common["slow"]
        return hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_json(cls, data: object) -> JobSpec:
        """Read a document; raises SpecError, which names the wrong field."""
        try:
            spec = cls(**read_fields(cls, data, _OBJECTS))
        except gate.Misfit as error:
            raise SpecError(f"job description: {error}") from error
        if not leases.holds(spec.node_timeout):
            raise SpecError(f"node_timeout: must be at least {leases.MIN_NODE_TIMEOUT_S:g} seconds")
        return spec


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """One of torch's rendezvous backends, for a job whose group torch's agents form."""

    backend: str
    """c10d, etcd-v2, etcd or static."""
    run_id: str
    endpoint: str = ""
    """HOST:PORT; empty: a free port of the group's first node."""
    conf: str = ""
    """torchrun's K=V,…"""
    nnodes: str = ""
    """N or MIN:MAX, if other nodes may join; empty: the size of the group."""


# A document has these values for a field, by the field's type.
_KINDS: Mapping[str, object] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "str | None": Optional[str],
    "tuple[str, ...]": list[str],
    "dict[str, str]": dict[str, str],
}
# The fields of a job that are objects.
_OBJECTS: Mapping[str, object] = {
    "nodes": list[Annotated[Any, NodeSpec.from_json]],
    "hooks": list[Annotated[Any, lambda hook: Hook(**read_fields(Hook, hook))]],
    "rendezvous": Optional[Annotated[Any, lambda meeting: Rendezvous(**read_fields(Rendezvous, meeting))]],
}


def read_fields(cls: Any, data: object, kinds: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Return the fields of a dataclass that a document has; `kinds`: of those of another type. Raises Misfit."""
    needed: dict[str, object] = {}
    optional: dict[str, object] = {}
    for field in dataclasses.fields(cls):
        kind = (kinds or {}).get(field.name) or _KINDS[str(field.type)]
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        (optional if has_default else needed)[field.name] = kind
    values = gate.record(needed, optional)(data)
    known = {**needed, **optional}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if name in known}


def read_ports(text: str) -> range:
    """Return the ports of FIRST-LAST; port 0, any, for an empty text. Raises ValueError."""
    if not text:
        return range(1)
    first, _, last = text.partition("-")
    if not (first.strip().isdecimal() and last.strip().isdecimal()) or not 0 < int(first) < int(last) < 65536:
        raise ValueError(f"{text!r} is not FIRST-LAST, two or more ports from 1 to 65535")
    return range(int(first), int(last) + 1)


def read_conf(text: str) -> dict[str, str]:
    """Return torchrun's K=V,… as a dict; raises ValueError, which names the invalid part."""
    conf = {}
    for part in text.split(","):
        if part.strip():
            key, equals, value = part.partition("=")
            if not equals or not key.strip() or not value.strip():
                raise ValueError(f"{part!r} is not K=V")
            conf[key.strip()] = value.strip()
    return conf


def split_endpoint(endpoint: str, default: int) -> tuple[str, int]:
    """Return host and port of HOST[:PORT]; raises ValueError for an invalid port."""
    host, colon, port = endpoint.rpartition(":")
    if not colon:
        return endpoint, default
    if not port.isdecimal() or not 0 < int(port) < 65536 or not host:
        raise ValueError(f"{endpoint!r} is not HOST:PORT")
    return host, int(port)
