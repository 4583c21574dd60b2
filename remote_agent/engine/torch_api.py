"""The only module of the node's side that imports torch: what is used of it is listed in `__all__`.

In: plain values. Out: plain values; torch's classes for the launchers to subclass; a store; started processes.

Everything is in torch 2.4 unless a version is named (as in tests/versions.py, which has run some of them); what a
version lacks is done without:
* torch: `__version__`, `version.cuda`, `cuda`, `xpu`, `accelerator` (2.6), `_utils.cpu_count` (2.12 or 2.13),
  `_C._get_privateuse1_backend_name`;
* torch.distributed: TCPStore (with libuv it takes a listening socket from 2.7 or 2.8 on), HashStore,
  is_nccl_available, and the preflight's all-reduce;
* torch.distributed.elastic and .launcher: the imports below, and the methods of LocalElasticAgent that launchers
  override;
* torch.numa.binding (2.10).
worker.py, which runs inside the ranks, uses `torch._C._distributed_c10d._WorkerServer` where it exists.

Importing this module takes seconds: the engine leaves that to processes of its own (torch_processes.py), and imports it
only to bind workers to NUMA nodes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import platform
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext, Std, start_processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.launcher import api

if TYPE_CHECKING:
    from remote_agent.wire.answers import TorchFacts

__all__ = [
    "ChildFailedError",
    "HashStore",
    "LocalElasticAgent",
    "LogsDest",
    "LogsSpecs",
    "RankFiles",
    "RendezvousHandler",
    "RendezvousInfo",
    "RendezvousStoreInfo",
    "RunResult",
    "Worker",
    "WorkerState",
    "distributed",
    "facts",
    "launch",
    "open_store",
    "replace_agent",
    "start",
    "torch",
]

NO_CUSTOM_BACKEND = "privateuseone"
# Our own client waits for a store in this process; a longer wait means that the address is not ours.
STORE_TIMEOUT = timedelta(seconds=20)

# At every start torch warns that a thread cannot install its signal handlers. We use a thread for that very reason.
logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)


def facts() -> TorchFacts:
    """Return what the engine reports about this installation."""
    nccl = None
    if torch.cuda.is_available() and distributed.is_nccl_available():
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpus": _device_count(),
        "devices": _devices(),
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "leaked": _leaked_environment(),
        "only_cpu": _is_only_cpu(),
    }


def _is_only_cpu() -> bool:
    """Return whether this build of torch can use nothing but CPUs."""
    builds = (torch.version.cuda, torch.version.hip, getattr(torch.version, "xpu", None))
    return not any(builds) and _custom_backend() == NO_CUSTOM_BACKEND


def _custom_backend() -> str:
    """Return the name of a device that is not torch's own, NO_CUSTOM_BACKEND if there is none."""
    name = getattr(torch._C, "_get_privateuse1_backend_name", None)
    return NO_CUSTOM_BACKEND if name is None else str(name())


def _device_count() -> int:
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    accelerator = getattr(torch, "accelerator", None)
    return int(accelerator.device_count()) if accelerator is not None and accelerator.is_available() else 0


def _devices() -> dict[str, int]:
    """Return the number of workers for each word of --nproc-per-node, like torchrun's determine_local_world_size."""
    counts = {"cpu": getattr(torch._utils, "cpu_count", os.cpu_count)() or 1}
    if torch.cuda.is_available():
        counts["gpu"] = torch.cuda.device_count()
    xpu = getattr(torch, "xpu", None)
    if xpu is not None and xpu.is_available():
        counts["xpu"] = xpu.device_count()
    counts["auto"] = _device_count() or counts["cpu"]
    custom = _custom_backend()
    module = getattr(torch, custom, None)
    if module is not None and module.is_available():
        counts[custom] = module.device_count()
    return counts


def open_store(host: str, listening: socket.socket, timeout: timedelta = STORE_TIMEOUT) -> TCPStore:
    """Serve a fresh store on a socket, which is taken over; raises RuntimeError when `host` is not this machine."""
    serve = functools.partial(
        TCPStore, host, listening.getsockname()[1], is_master=True, wait_for_workers=False, timeout=timeout,
        master_listen_fd=listening.detach(),
    )  # fmt: skip
    try:
        return serve()
    except NotImplementedError:
        # With libuv, torch 2.6 cannot take over a socket.
        return serve(use_libuv=False)


def _leaked_environment() -> dict[str, str]:
    """Return what this torch's torchrun adds to its own environment, and so to that of its workers."""
    for field in dataclasses.fields(api.LaunchConfig):
        if field.name == "signals_to_handle":
            return {"TORCHELASTIC_SIGNALS_TO_HANDLE": str(field.default)}
    return {}


class RankFiles(LogsSpecs):
    """Puts each rank's streams and error file into its own directory, by local rank, and never removes a file."""

    def __init__(self, root: str, directories: dict[int, str]) -> None:
        super().__init__(root, redirects=Std.ALL, tee=Std.NONE)
        self.directories = directories

    @property
    def root_log_dir(self) -> str:
        """Return the generation's directory."""
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files, and set each worker's TORCHELASTIC_ERROR_FILE."""
        destinations = LogsDest()
        for local_rank, directory in self.directories.items():
            destinations.stdouts[local_rank] = os.path.join(directory, "stdout.log")
            destinations.stderrs[local_rank] = os.path.join(directory, "stderr.log")
            destinations.error_files[local_rank] = os.path.join(directory, "error.json")
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = destinations.error_files[local_rank]
        return destinations


def start(
    name: str, commands: dict[int, list[str]], envs: dict[int, dict[str, str]], files: RankFiles, numa_binding: str
) -> PContext:
    """Start one process per local rank, bound by torch; raises OSError from the system, ValueError if it cannot be.

    `numa_binding`: the value of --numa-binding.
    """
    entrypoint = commands[0][0]
    args = {local_rank: tuple(words[1:]) for local_rank, words in commands.items()}
    options = _numa_options(numa_binding)
    return start_processes(name=name, entrypoint=entrypoint, args=args, envs=envs, logs_specs=files, **options)


def _numa_options(mode: str) -> dict[str, Any]:
    """Return the keyword for --numa-binding; raises ValueError where this torch or this node cannot bind."""
    if not mode:
        return {}
    try:
        from torch.numa.binding import AffinityMode, NumaOptions
    except ImportError as error:
        raise ValueError(f"--numa-binding needs torch 2.10 or newer; this is {torch.__version__}") from error
    if not _device_count():
        raise ValueError("--numa-binding binds each worker near its GPU, and torch sees none here")
    return {"numa_options": NumaOptions(affinity_mode=AffinityMode(mode))}


def replace_agent(agent: type[LocalElasticAgent]) -> None:
    """Set the class of agent that torch's launcher uses: launch_agent looks it up by this name."""
    vars(api)["LocalElasticAgent"] = agent


def launch(settings: dict[str, Any], numa_binding: str, program: str, args: list[str]) -> None:
    """Run torch's elastic agent with these fields of LaunchConfig; fields that this torch does not have are dropped.

    Raises ChildFailedError when a worker fails, and whatever torch's rendezvous raises.
    """
    known = {field.name for field in dataclasses.fields(api.LaunchConfig)}
    values = {**settings, **_numa_options(numa_binding)}
    config = api.LaunchConfig(**{name: value for name, value in values.items() if name in known})
    api.elastic_launch(config, program)(*args)
