"""Run torch's elastic agent as torchrun does, for a job that uses one of torch's rendezvous backends.

In: one JSON document on stdin. Out: a JSON line on stdout for each assignment of ranks, failure and error; the exit
status. The engine starts this process (`agent.pyz torchrun`) and ends it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from remote_agent.base.files import set_aside
from remote_agent.base.proc import die_with_parent
from remote_agent.engine import torch_api
from remote_agent.engine.order import Order, rank_files
from remote_agent.wire import read_conf

# This is torch's default for the static backend (LaunchConfig).
STATIC_TIMEOUT_S = "900"


def _send(wire: int, op: str, **args: Any) -> None:
    """Send the engine one JSON line; it is our parent and reads until this process ends."""
    os.write(wire, json.dumps({"op": op, **args}).encode() + b"\n")


class AssignedFiles(torch_api.RankFiles):
    """Chooses each rank's directory once torch has assigned the ranks.

    Files that an earlier round of the same group wrote there are renamed, because torch truncates them.
    """

    def __init__(self, order: Order) -> None:
        super().__init__(str(order.log_dir), {})
        self._order = order

    def reify(self, envs: dict[int, dict[str, str]]) -> torch_api.LogsDest:
        """Return the files, and set each worker's error file and the job's count of restarts."""
        for local_rank, env in envs.items():
            directory = Path(self.root_log_dir, f"rank_{env['RANK']}")
            if directory.is_dir():
                set_aside(directory, ".old")
            directory.mkdir(mode=0o700, parents=True)
            self.directories[local_rank] = str(directory)
            env.update(rank_files(directory, os.environ))
            env["TORCHELASTIC_RESTART_COUNT"] = str(self._order.restart_count)
            env["TORCHELASTIC_MAX_RESTARTS"] = str(self._order.max_restarts)
        return super().reify(envs)


def reporting_agent(wire: int) -> type[torch_api.LocalElasticAgent]:
    """Return torch's agent with reports of assignments and failures added."""

    class ReportingAgent(torch_api.LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> Any:
            pids = super()._start_workers(worker_group)
            workers = worker_group.workers
            ranks = [
                {"rank": one.global_rank, "local_rank": one.local_rank, "pid": pids[one.local_rank]} for one in workers
            ]
            _send(wire, "assigned", ranks=ranks, world_size=workers[0].world_size)
            return pids

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.is_failed():
                codes = {str(rank): failure.exitcode for rank, failure in result.failures.items()}
                _send(wire, "failed", codes=codes)
            return result

    return ReportingAgent


def launch_settings(order: Order) -> dict[str, Any]:
    """Return the fields of torch's LaunchConfig for this order."""
    meeting = order.rendezvous
    assert meeting is not None
    low, _, high = meeting["nnodes"].partition(":")
    conf: dict[str, str | int] = {**read_conf(meeting["conf"])}
    if meeting["backend"] == "static":
        conf = {"timeout": STATIC_TIMEOUT_S, **conf, "rank": order.group_rank}
    elif meeting["backend"] == "c10d" and meeting["is_ours"]:
        # The engine of that node serves the store, so that it outlives every single torch agent.
        conf["is_host"] = "false"
    settings = {
        "min_nodes": int(low),
        "max_nodes": int(high or low),
        "nproc_per_node": order.local_world_size,
        "run_id": meeting["run_id"],
        "role": order.role,
        "rdzv_backend": meeting["backend"],
        "rdzv_endpoint": meeting["endpoint"],
        "rdzv_configs": conf,
        # The coordinator counts restarts: one torch agent that ends is one failure of the group.
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "local_addr": meeting["local_addr"],
        "logs_specs": AssignedFiles(order),
        "virtual_local_rank": order.virtual_local_rank,
        "shutdown_timeout": order.shutdown_timeout,
    }
    if order.signals_to_handle:
        settings["signals_to_handle"] = order.signals_to_handle
    return settings


def run(order: Order, command: list[str], worker_env: dict[str, str], wire: int) -> int:
    """Run torch's agent until its workers have ended; returns its exit code."""
    os.chdir(order.cwd)
    # The restart of a worker group needs a fresh store: torch's default reads the keys of the group before.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.update(worker_env)
    torch_api.replace_agent(reporting_agent(wire))
    # torch expands macros in arguments; these belong to the script.
    args = [word.replace("$", "$$") for word in command[1:]]
    try:
        torch_api.launch(launch_settings(order), order.numa_binding, command[0], args)
    except torch_api.ChildFailedError:
        return 1
    except Exception as error:  # torch's rendezvous may raise anything
        first_line = str(error).partition("\n")[0]
        _send(wire, "trouble", message=f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__)
        raise
    return 0


def main() -> int:
    """Read the order from stdin and run it."""
    die_with_parent()
    document = json.loads(sys.stdin.buffer.readline())
    wire = os.dup(1)
    os.dup2(2, 1)
    if os.getppid() != document["engine"]:
        return 1
    return run(Order.from_args(document["order"]), document["command"], document["worker_env"], wire)
