"""torch's own elastic agent, as torchrun runs it, for a job that asks for one of torch's rendezvous backends.

In: one JSON document on stdin. Out: a JSON line on stdout for each assignment of ranks, failure and trouble; the exit
status. The engine starts this process (`agent.pyz torchrun`) and ends it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api

from remote_agent.engine_start import nccl_file
from remote_agent.paths import set_aside
from remote_agent.wire import read_conf

PR_SET_PDEATHSIG = 1
# torch's own default for the static backend (LaunchConfig).
STATIC_TIMEOUT_S = "900"


class Wire:
    """Lines to the engine."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def tell(self, op: str, **args: Any) -> None:
        """Send one line; the engine is our parent and reads until we end."""
        os.write(self._descriptor, json.dumps({"op": op, **args}).encode() + b"\n")


class AssignedFiles(LogsSpecs):
    """Each rank's streams and error file in its own directory, once torch has said which rank it is.

    What an earlier round of this very group left there is kept aside: torch truncates the files.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__(str(order["log_dir"]), redirects=Std.ALL, tee=Std.NONE)
        self._order = order

    @property
    def root_log_dir(self) -> str:
        """Return the generation's directory."""
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files; each worker learns of its error file, and counts restarts as the job does."""
        destinations = LogsDest()
        for local_rank, env in envs.items():
            directory = Path(self.root_log_dir, f"rank_{env['RANK']}")
            if directory.is_dir():
                set_aside(directory, ".old")
            directory.mkdir(mode=0o700, parents=True)
            destinations.stdouts[local_rank] = str(directory / "stdout.log")
            destinations.stderrs[local_rank] = str(directory / "stderr.log")
            destinations.error_files[local_rank] = str(directory / "error.json")
            if os.environ.get("NCCL_DEBUG") and "NCCL_DEBUG_FILE" not in os.environ:
                env.update(nccl_file(directory))
            env["TORCHELASTIC_ERROR_FILE"] = destinations.error_files[local_rank]
            env["TORCHELASTIC_RESTART_COUNT"] = str(self._order["restart_count"])
            env["TORCHELASTIC_MAX_RESTARTS"] = str(self._order["max_restarts"])
        return destinations


def reporting_agent(wire: Wire) -> type[local_elastic_agent.LocalElasticAgent]:
    """Return torch's agent, which also tells what it does.

    torch documents this class for subclassing; the two methods exist in 2.4 to 2.15.
    """

    class ReportingAgent(local_elastic_agent.LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> Any:
            pids = super()._start_workers(worker_group)
            workers = worker_group.workers
            ranks = [
                {"rank": one.global_rank, "local_rank": one.local_rank, "pid": pids[one.local_rank]} for one in workers
            ]
            wire.tell("assigned", ranks=ranks, world_size=workers[0].world_size)
            return pids

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.is_failed():
                codes = {str(rank): failure.exitcode for rank, failure in result.failures.items()}
                wire.tell("failed", codes=codes)
            return result

    return ReportingAgent


def launch_config(order: dict[str, Any]) -> api.LaunchConfig:
    """Return torchrun's configuration for this order; what this torch does not know yet is left out."""
    meeting = order["rendezvous"]
    low, _, high = meeting["nnodes"].partition(":")
    conf: dict[str, Any] = dict(read_conf(meeting["conf"]))
    if meeting["backend"] == "static":
        conf = {"timeout": STATIC_TIMEOUT_S, **conf, "rank": order["group_rank"]}
    elif meeting["backend"] == "c10d" and meeting["is_ours"]:
        # The engine of its node serves the store: it outlives any one of torch's agents.
        conf["is_host"] = "false"
    values = {
        "min_nodes": int(low),
        "max_nodes": int(high or low),
        "nproc_per_node": order["local_world_size"],
        "run_id": meeting["run_id"],
        "role": order["role"],
        "rdzv_backend": meeting["backend"],
        "rdzv_endpoint": meeting["endpoint"],
        "rdzv_configs": conf,
        # Restarts are the coordinator's: a torch agent that ends is one failure of the group.
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "local_addr": meeting["local_addr"],
        "logs_specs": AssignedFiles(order),
        "virtual_local_rank": order["virtual_local_rank"],
        "shutdown_timeout": order["shutdown_timeout"],
    }
    if order["signals_to_handle"]:
        values["signals_to_handle"] = order["signals_to_handle"]
    if order["numa_binding"]:
        from torch.numa.binding import AffinityMode, NumaOptions

        values["numa_options"] = NumaOptions(affinity_mode=AffinityMode(order["numa_binding"]))
    known = {field.name for field in dataclasses.fields(api.LaunchConfig)}
    return api.LaunchConfig(**{name: value for name, value in values.items() if name in known})


def run(order: dict[str, Any], wire: Wire) -> int:
    """Run torch's agent until its workers have ended; returns its exit status."""
    os.chdir(order["cwd"])
    # The restart of a worker group needs a fresh store: torch's default reads the keys of the group before.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.update(order["worker_env"])
    # launch_agent, which elastic_launch calls, makes an agent of the class of this name.
    vars(api)["LocalElasticAgent"] = reporting_agent(wire)
    # torch substitutes macros in arguments; ours are the script's own.
    command = [word.replace("$", "$$") for word in order["command"]]
    try:
        api.elastic_launch(launch_config(order), order["command"][0])(*command[1:])
    except ChildFailedError:
        return 1
    except Exception as error:  # whatever torch's rendezvous raises ends this agent
        said = str(error).partition("\n")[0]
        wire.tell("trouble", message=f"{type(error).__name__}: {said}" if said else type(error).__name__)
        raise
    return 0


def main() -> int:
    """Serve the engine once."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    order = json.loads(sys.stdin.buffer.readline())
    wire = os.dup(1)
    os.dup2(2, 1)
    if os.getppid() != order["engine"]:
        return 1
    return run(order, Wire(wire))
