"""Everything that is asked of torch: its facts, a store for a generation, and processes started its way.

In: plain values. Out: plain values, torch's own `PContext` and `TCPStore`. Imported in a thread: it takes a second.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import socket
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext, Std, start_processes
from torch.distributed.launcher.api import LaunchConfig

# Our own client of a store that this very process serves: longer means that the address is not ours.
STORE_TIMEOUT = timedelta(seconds=20)

# It warns at every start that a thread cannot install torch's signal handlers, which is why we start from one.
logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)


def facts() -> dict[str, Any]:
    """Return what `hello` tells of this installation."""
    nccl = None
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpus": _device_count(),
        "devices": _devices(),
        "cuda": torch.version.cuda,
        "nccl": nccl,
    }


def _device_count() -> int:
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    accelerator = getattr(torch, "accelerator", None)
    return int(accelerator.device_count()) if accelerator is not None and accelerator.is_available() else 0


def _devices() -> dict[str, int]:
    """Return how many workers each word of --nproc-per-node means here, as torchrun's determine_local_world_size."""
    counts = {"cpu": torch._utils.cpu_count() or 1}
    if torch.cuda.is_available():
        counts["gpu"] = torch.cuda.device_count()
    if torch.xpu.is_available():
        counts["xpu"] = torch.xpu.device_count()
    counts["auto"] = _device_count() or counts["cpu"]
    custom = torch._C._get_privateuse1_backend_name()
    module = getattr(torch, custom, None)
    if module is not None and module.is_available():
        counts[custom] = module.device_count()
    return counts


def open_store(host: str, port: int = 0) -> TCPStore:
    """Serve a fresh store, on a free port for 0; raises OSError or RuntimeError when `host` is not this machine."""
    # torch asks for a name that does not exist until its time is over.
    socket.getaddrinfo(host, None)
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)


def leaked_environment() -> dict[str, str]:
    """Return what torchrun of this torch puts into its own environment, and so into that of its workers."""
    for field in dataclasses.fields(LaunchConfig):
        if field.name == "signals_to_handle":
            return {"TORCHELASTIC_SIGNALS_TO_HANDLE": str(field.default)}
    return {}


class RankFiles(LogsSpecs):
    """Each rank's streams and error file in its own directory, by local rank. Nothing is ever removed."""

    def __init__(self, root: str, directories: dict[int, str]) -> None:
        super().__init__(root, redirects=Std.ALL, tee=Std.NONE)
        self._directories = directories

    @property
    def root_log_dir(self) -> str:
        """Return the generation's directory."""
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files, and tell each worker the one for its error."""
        destinations = LogsDest()
        for local_rank, directory in self._directories.items():
            destinations.stdouts[local_rank] = os.path.join(directory, "stdout.log")
            destinations.stderrs[local_rank] = os.path.join(directory, "stderr.log")
            destinations.error_files[local_rank] = os.path.join(directory, "error.json")
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = destinations.error_files[local_rank]
        return destinations


def start(
    name: str, commands: dict[int, list[str]], envs: dict[int, dict[str, str]], files: RankFiles, numa_binding: str
) -> PContext:
    """Start one process per local rank; raises OSError when the system will not, ValueError for a binding that fails.

    `numa_binding`: torchrun's word, or empty.
    """
    entrypoint = commands[0][0]
    args = {local_rank: tuple(words[1:]) for local_rank, words in commands.items()}
    more = {"numa_options": _numa_options(numa_binding)} if numa_binding else {}
    return start_processes(name=name, entrypoint=entrypoint, args=args, envs=envs, logs_specs=files, **more)


def _numa_options(mode: str) -> Any:
    """Return torch's own options for a mode; raises ValueError where this torch or this node cannot bind."""
    try:
        from torch.numa.binding import AffinityMode, NumaOptions
    except ImportError as error:
        raise ValueError(f"--numa-binding needs torch 2.10 or newer, here is {torch.__version__}") from error
    if not _device_count():
        raise ValueError("--numa-binding binds each worker near its GPU, and torch sees none here")
    return NumaOptions(affinity_mode=AffinityMode(mode))
