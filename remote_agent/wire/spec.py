"""The job as the supervisor describes it to the agents.

In: JSON of the `start` request. Out: frozen objects, the same on every node.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from remote_agent.wire.rendezvous import Rendezvous


class SpecError(ValueError):
    """A job description that this agent cannot read."""


@dataclasses.dataclass(frozen=True)
class NodeSpec:
    """One node of the job, in inventory order."""

    name: str
    address: str
    """What the other nodes connect to: a host name or an address."""
    nproc_per_node: str = "auto"
    """auto, a kind of device (gpu, cpu, xpu …), or a number as text."""
    spare: bool = False
    env: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Hook:
    """Who is told of the job's events: a shell line or a web server. Both may hold secrets, so nothing prints them."""

    on: tuple[str, ...]
    """Of failure, hang, recovery and end."""
    command: str = dataclasses.field(default="", repr=False)
    url: str = dataclasses.field(default="", repr=False)
    timeout: float = 10.0
    """Of one try."""
    retries: int = 3


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """All that agents need to know of a job. Times are seconds unless the name says otherwise."""

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
    """What tells the synced contents from others; empty: not known."""
    workdir: str = "."
    """Working directory of the workers: relative to the tree, absolute where there is none."""
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    min_nodes: int = 1
    max_nodes: int = 1
    max_restarts: int = 0
    node_timeout: float = 15.0
    stop_grace: float = 15.0
    hang_after: float = 30.0
    """How long ranks must wait for one that does nothing until it is called a hang; 0: nobody looks."""
    hang_restart: float = 0.0
    """A group that hangs for this long is restarted, as after a failure; 0: never."""
    join_timeout: float = 120.0
    """How long generation 0 waits for all members before it starts with at least min_nodes."""
    settle_timeout: float = 3.0
    """Where min_nodes is below max_nodes: how long generation 0 waits for the rest once min_nodes are ready."""
    coordinator_port: int = 0
    role: str = "default"
    log_dir: str | None = None
    """Where each node also links its logs, in torchrun's layout; relative to the working directory."""
    numa_binding: str | None = None
    """torchrun's word for how workers are bound to CPUs."""
    signals_to_handle: str | None = None
    virtual_local_rank: bool = False
    rendezvous: Rendezvous | None = None
    """None: the coordinator forms the group."""
    hooks: tuple[Hook, ...] = ()
    metrics_port: int = 0
    """Where the coordinator serves Prometheus on its own machine; 0: nowhere."""
    log_bound: int = 0
    """Bytes that the logs of a rank may take on its disk, in each generation; 0: any number."""
    created_ns: int = 0
    endpoint: str = ""
    """HOST:PORT of a job that nodes join by themselves, if they have its certificate; empty: only `nodes` take part."""

    def node(self, name: str) -> NodeSpec | None:
        """Return the node of that name, or None."""
        return next((node for node in self.nodes if node.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """Return the document that `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> JobSpec:
        """Read a document; raises SpecError that names what is wrong."""
        try:
            known = {field.name for field in dataclasses.fields(cls)}
            values = {key: value for key, value in data.items() if key in known}
            values["nodes"] = tuple(NodeSpec(**node) for node in data["nodes"])
            values["args"] = tuple(data.get("args", ()))
            values["hooks"] = tuple(Hook(**{**hook, "on": tuple(hook["on"])}) for hook in data.get("hooks", ()))
            if data.get("rendezvous") is not None:
                values["rendezvous"] = Rendezvous(**data["rendezvous"])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise SpecError(f"job description: {error!r}") from error
