"""A generation's order, and what its workers start with.

In: the arguments of `go`. Out: each rank's environment as torchrun sets it, directories for its files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Optional

from remote_agent.base.files import set_aside
from remote_agent.wire import Args, Problem
from remote_agent.wire.documents import OrderedMeeting
from remote_agent.wire.gate import Misfit, text
from remote_agent.wire.job_spec import read_fields

KINDS = ("script", "module", "run_path", "binary")
# Workers must not inherit these variables of the agent.
OWN_VARIABLES = ("SUPERVISOR_HOME",)


@dataclasses.dataclass(frozen=True)
class Order:
    """The arguments of `go`."""

    generation: int
    run_id: str
    role: str
    group_rank: int
    base_rank: int
    local_world_size: int
    world_size: int
    group_world_size: int
    address: str
    """The address of this node for the others."""
    master_addr: str
    master_port: int
    restart_count: int
    max_restarts: int
    env: dict[str, str]
    cwd: str
    kind: str
    script: str
    args: tuple[str, ...]
    log_dir: Path
    links: str
    """Directory for links to the logs in torchrun's layout; empty for none."""
    numa_binding: str
    signals_to_handle: str
    virtual_local_rank: bool
    shutdown_timeout: int
    """Seconds from SIGTERM to SIGKILL for workers that torch's agent stops."""
    rendezvous: OrderedMeeting | None
    """How torch's agents form the group; None: the ranks are in this order."""
    slow: bool
    """Whether the ranks can be sampled, to see why they are slow."""
    standby: str
    """The directory of what is known of scripts for a waiting process; empty: there is none."""

    @classmethod
    def from_args(cls, args: Args) -> Order:
        """Read the arguments of `go`; raises Problem that names the wrong argument."""
        try:
            order = cls(**read_fields(cls, args, _OBJECTS))
        except Misfit as error:
            raise Problem("bad_request", f"the order: {error}") from error
        for name in OWN_VARIABLES:
            order.env.pop(name, None)
        order.check()
        return order

    def check(self) -> None:
        """Raise Problem when the order cannot be carried out on this node."""
        if self.kind not in KINDS:
            raise Problem("bad_request", f"unknown kind of script: {self.kind}")
        if self.local_world_size < 1 or self.base_rank + self.local_world_size > self.world_size:
            raise Problem(
                "bad_request",
                f"{self.local_world_size} workers from rank {self.base_rank} in a world of {self.world_size}",
            )
        for name in ("log_dir", "cwd"):
            if not os.path.isabs(getattr(self, name)):
                raise Problem("bad_request", f"{name} is not absolute: {getattr(self, name)}")
        if not os.path.isdir(self.cwd):
            raise Problem("cwd", f"no such directory on this node: {self.cwd}", "is the work tree synced here?")


# The fields that are objects.
_OBJECTS = {
    "log_dir": Annotated[Path, lambda path: Path(text(path))],
    "rendezvous": Optional[OrderedMeeting],
}


def worker_environment(order: Order, local_rank: int, leaked: dict[str, str]) -> dict[str, str]:
    """Return the variables that a worker gets in addition to, or instead of, this process's own."""
    env = dict(order.env)
    rank = order.base_rank + local_rank
    env.update(leaked)
    if order.signals_to_handle:
        env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = order.signals_to_handle
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        GROUP_RANK=str(order.group_rank),
        ROLE_RANK=str(rank),
        ROLE_NAME=order.role,
        LOCAL_WORLD_SIZE=str(order.local_world_size),
        WORLD_SIZE=str(order.world_size),
        GROUP_WORLD_SIZE=str(order.group_world_size),
        ROLE_WORLD_SIZE=str(order.world_size),
        MASTER_ADDR=order.master_addr,
        MASTER_PORT=str(order.master_port),
        TORCHELASTIC_RESTART_COUNT=str(order.restart_count),
        TORCHELASTIC_MAX_RESTARTS=str(order.max_restarts),
        TORCHELASTIC_RUN_ID=order.run_id,
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    base = {**os.environ, **order.env}
    env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if order.local_world_size > 1 and "OMP_NUM_THREADS" not in base:
        env["OMP_NUM_THREADS"] = "1"
    if order.virtual_local_rank:
        env["LOCAL_RANK"] = "0"
        env["CUDA_VISIBLE_DEVICES"] = _own_device(base.get("CUDA_VISIBLE_DEVICES"), local_rank)
    env.update(rank_files(order.log_dir / f"rank_{rank}", base))
    if "PWD" in base:
        # The value is as if a shell had started torchrun in that directory.
        env["PWD"] = order.cwd
    return env


def whole_environment(order: Order, local_rank: int, leaked: dict[str, str]) -> dict[str, str]:
    """Return all variables that a worker starts with, but for the bootstrap's."""
    errors = order.log_dir / f"rank_{order.base_rank + local_rank}" / "error.json"
    return {**os.environ, **worker_environment(order, local_rank, leaked), "TORCHELASTIC_ERROR_FILE": str(errors)}


def rank_files(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name a rank's files: for its metrics, and for NCCL's debug output if it has any."""
    asks_nccl = environment.get("NCCL_DEBUG") and "NCCL_DEBUG_FILE" not in environment
    return {"SUPERVISOR_METRICS": str(directory / "metrics.jsonl"), **(_nccl_file(directory) if asks_nccl else {})}


def _nccl_file(directory: Path) -> dict[str, str]:
    path = str(directory / "nccl.log")
    # NCCL expands %h and %p in the path.
    return {} if "%" in path else {"NCCL_DEBUG_FILE": path}


def link_nccl(order: Order, pids: dict[int, int], directories: dict[int, Path]) -> None:
    """Link each rank's nccl.log to the user's NCCL_DEBUG_FILE, if that names one process (%p).

    Without %p several ranks, or several generations, write to the same file.
    """
    path = {**os.environ, **order.env}.get("NCCL_DEBUG_FILE", "")
    for local_rank, pid in pids.items() if "%p" in path else ():
        words = {"%": "%", "h": socket.gethostname().partition(".")[0], "p": str(pid)}
        target = re.sub("%(.)", lambda match, words=words: words.get(match[1], match[0]), path)  # type: ignore[misc]
        # The workers already run, and a full disk must not end them.
        with contextlib.suppress(OSError):
            (directories[local_rank] / "nccl.log").symlink_to(Path(order.cwd, target))


def _own_device(visible: str | None, local_rank: int) -> str:
    """Return a worker's device under --virtual-local-rank, as torch's LocalElasticAgent chooses it."""
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise ValueError(f"local rank {local_rank} is beyond the devices of CUDA_VISIBLE_DEVICES={visible}")
    return devices[local_rank].strip()


def link_logs(order: Order, directories: dict[int, Path]) -> None:
    """Link each rank's directory at its place under torchrun's --log-dir; raises Problem."""
    if not order.links:
        return
    attempt = Path(order.cwd, os.path.expanduser(order.links), f"attempt_{order.generation}")
    try:
        attempt.mkdir(parents=True, exist_ok=True)
        for local_rank, directory in directories.items():
            link = attempt / str(local_rank)
            if link.is_symlink():
                link.unlink()
            link.symlink_to(directory, target_is_directory=True)
    except OSError as error:
        raise Problem("log_dir", f"--log-dir: {error.strerror}: {error.filename}", "use another --log-dir") from error


def rank_directories(order: Order) -> dict[int, Path]:
    """Create an empty directory for each local rank and rename an earlier one that has files; raises OSError."""
    order.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    directories = {}
    for local_rank in range(order.local_world_size):
        directory = order.log_dir / f"rank_{order.base_rank + local_rank}"
        if directory.exists() and any(directory.iterdir()):
            set_aside(directory, ".old")
        directory.mkdir(mode=0o700, exist_ok=True)
        directories[local_rank] = directory
    return directories
