"""Stands in for torch where torch is not the point: it is imported in no time.

In: what remote_agent/engine/torch_api.py asks of torch. Out: the same names; a store is a port that nobody serves.
tests/contract holds what torch itself does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from enum import IntFlag
from types import ModuleType, SimpleNamespace
from typing import Any

__version__ = "2.13.0+stub"


def _module(name: str, **names: Any) -> ModuleType:
    """Make `torch.NAME` importable; the packages above it are there."""
    module = sys.modules[f"torch.{name}"] = ModuleType(f"torch.{name}")
    vars(module).update(names, __path__=[])
    parent, _, leaf = f"torch.{name}".rpartition(".")
    setattr(sys.modules[parent], leaf, module)
    return module


class TCPStore:
    def __init__(self, host: str, port: int, *, master_listen_fd: int, **options: Any) -> None:
        self._server = socket.socket(fileno=master_listen_fd)
        self.port = port


class Std(IntFlag):
    NONE = 0
    ALL = 3


@dataclass
class LogsDest:
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)


class LogsSpecs:
    def __init__(self, log_dir: str, redirects: Std, tee: Std) -> None:
        self._root_log_dir = log_dir


class PContext:
    """Processes, each with a session and log files of its own."""

    def __init__(self, entrypoint: str, args: Any, envs: dict[int, dict[str, str]], logs_specs: Any) -> None:
        files = logs_specs.reify(envs)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank, words in args.items():
                with open(files.stdouts[rank], "w") as out, open(files.stderrs[rank], "w") as err:
                    self._processes[rank] = subprocess.Popen(
                        [entrypoint, *map(str, words)],
                        env={**os.environ, **envs[rank]},
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
        except BaseException:
            self.close(signal.SIGTERM, 30)
            raise

    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def close(self, death_sig: signal.Signals, timeout: float) -> None:
        end = time.monotonic() + timeout
        for number in (death_sig, signal.SIGKILL):
            for process in self._processes.values():
                if process.poll() is None:
                    os.killpg(process.pid, number)
            for process in self._processes.values():
                try:
                    process.wait(max(0.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue


def start_processes(name: str, entrypoint: str, args: Any, envs: Any, logs_specs: Any) -> PContext:
    return PContext(entrypoint, args, envs, logs_specs)


@dataclass
class LaunchConfig:
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


def _nothing(*names: str) -> dict[str, type]:
    """Classes that only torch's own agent needs."""
    return {name: type(name, (), {}) for name in names}


def _no() -> bool:
    return False


version = SimpleNamespace(cuda=None, hip=None)
_utils = SimpleNamespace(cpu_count=lambda: len(os.sched_getaffinity(0)))
_C = SimpleNamespace(_get_privateuse1_backend_name=lambda: "privateuseone")
_module("cuda", is_available=_no, device_count=lambda: 0)
_module("xpu", is_available=_no, device_count=lambda: 0)
_module("accelerator", is_available=_no, device_count=lambda: 0)
_module("distributed", TCPStore=TCPStore, is_nccl_available=_no, **_nothing("HashStore"))
_module("distributed.elastic")
_module("distributed.elastic.agent")
_module("distributed.elastic.agent.server")
_module("distributed.elastic.agent.server.api", **_nothing("RunResult", "Worker", "WorkerState"))
_module("distributed.elastic.agent.server.local_elastic_agent", **_nothing("LocalElasticAgent"))
_module(
    "distributed.elastic.multiprocessing",
    LogsDest=LogsDest,
    LogsSpecs=LogsSpecs,
    PContext=PContext,
    Std=Std,
    start_processes=start_processes,
)
_module("distributed.elastic.multiprocessing.errors", **_nothing("ChildFailedError"))
_module("distributed.elastic.rendezvous", **_nothing("RendezvousHandler", "RendezvousInfo", "RendezvousStoreInfo"))
_module("distributed.launcher")
_module("distributed.launcher.api", LaunchConfig=LaunchConfig)
