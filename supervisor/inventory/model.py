"""What an inventory is.

In: checked values. Out: frozen objects that the rest of the supervisor passes on.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from supervisor.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from remote_agent.wire import Hook


class InventoryError(UsageError):
    """The inventory cannot be used: one clear message with file, key and what to write instead."""


@dataclasses.dataclass(frozen=True)
class Host:
    """One host and how to reach it. None means: as ~/.ssh/config says, else ssh's own default."""

    name: str
    ssh: str
    """Where to connect: a host name, an address or an alias of ~/.ssh/config."""
    address: str
    """Where the other nodes reach it."""
    user: str | None = None
    port: int | None = None
    identity_file: Path | None = None
    known_hosts: Path | None = None
    python: str = "python3"
    prelude: str | None = None
    """Shell text that is run before python."""
    proxy_jump: str | None = None
    """[user@]host[:port], several separated by commas; "none" overrides ~/.ssh/config."""
    nproc_per_node: str = "auto"
    spare: bool = False
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    via: str = "ssh"
    """ssh, srun (a step of the Slurm allocation that this process runs in), or auto: srun where SSH is refused."""
    local: bool = False
    """This machine: no SSH."""


@dataclasses.dataclass(frozen=True)
class JobDefaults:
    """The [job] table, but for nproc_per_node, which each Host has; the command line wins over it."""

    workdir: Path
    min_nodes: int = 1
    max_nodes: int = 1
    max_restarts: int = 3
    sync: bool = True
    sync_limit_mb: int = 512
    """Largest work tree that is sent, in MB (10^6 bytes)."""
    exclude: tuple[str, ...] = ()
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    coordinator_port: int = 0
    node_timeout: float = 15.0
    """Seconds without a heartbeat after which a node is lost."""
    stop_grace: float = 15.0
    """Seconds from SIGTERM to SIGKILL."""
    hang_after: float = 30.0
    hang_restart: float = 0.0
    metrics_port: int = 0
    """Where the coordinator serves Prometheus on its own machine; 0: nowhere."""
    log_bound: int = 0
    """Bytes that the logs of a rank may take on its disk, in each generation; 0: any number."""


@dataclasses.dataclass(frozen=True)
class Inventory:
    """The hosts in the order in which ranks are given out, and the defaults of `up`."""

    path: Path | None
    """None: this machine alone."""
    hosts: tuple[Host, ...]
    job: JobDefaults
    hooks: tuple[Hook, ...] = ()

    def host(self, name: str) -> Host | None:
        """Return the host of that name, or None."""
        return next((host for host in self.hosts if host.name == name), None)
