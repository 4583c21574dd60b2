"""torchrun's rendezvous handler, and a subclass of its elastic agent that follows the job's coordinator.

In: torchrun's settings; work from the Handover. Out: workers that torchrun starts as the coordinator orders, with our
log files; torchrun's exit code by how the job ended.

torch's loop only sees healthy workers. The coordinator decides about failures, restarts and the end, so that none of
them counts against torchrun's --max-restarts and no node's torchrun ends before the job does.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remote_agent.engine import torch_api
from remote_agent.engine.boot_dir import add_bootstrap
from remote_agent.engine.launchers.inside_torchrun import Dismissed, HandlerThread, Outcome, Work, say
from remote_agent.engine.order import rank_files

log = logging.getLogger(__name__)

BACKEND = "supervisor"
# The coordinator's agent first reports to all others how the job ended.
AGENT_S = 15.0
# This was torch's default before it had --shutdown-timeout.
GRACE_S = 30.0
EXITS = {"succeeded": 0, "removed": 0, "stopped": 4}

Begin = Callable[[Any, float], "tuple[HandlerThread, subprocess.Popen[bytes]]"]


class SupervisorHandler(torch_api.RendezvousHandler):
    """Gives this torchrun its place in each generation."""

    def __init__(self, run_id: str, begin: Begin) -> None:
        self.grace_s = 0.0
        self._run_id = run_id
        self._begin = begin
        self._thread: HandlerThread | None = None
        self._agent: subprocess.Popen[bytes] | None = None
        self._work: Work | None = None

    def begin(self, spec: Any, grace_s: float) -> None:
        """Start this node's agent; `spec`: torchrun's WorkerSpec."""
        self.grace_s = grace_s
        self._thread, self._agent = self._begin(spec, grace_s)

    @property
    def thread(self) -> HandlerThread:
        """The thread that serves the agent."""
        assert self._thread is not None, "begin() comes first"
        return self._thread

    @property
    def work(self) -> Work:
        """The workers that torchrun starts or has started."""
        assert self._work is not None, "next_rendezvous() comes first"
        return self._work

    @property
    def use_agent_store(self) -> bool:
        """Return True: one of our processes serves the store, and the workers are its clients."""
        return True

    def get_backend(self) -> str:
        """Return the name of this backend."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._run_id

    def next_rendezvous(self) -> torch_api.RendezvousInfo:
        """Wait for this node's place in the next generation; ends torchrun when there is none."""
        try:
            self._work = self.thread.handover.take()
        except Dismissed as dismissed:
            leave(self._run_id, dismissed.outcome)
        order = self.work.order
        meeting = torch_api.RendezvousStoreInfo(order.master_addr, order.master_port)
        # torch's agents need no common store, because the ranks are in the order.
        return torch_api.RendezvousInfo(torch_api.HashStore(), order.group_rank, order.group_world_size, meeting)

    def num_nodes_waiting(self) -> int:
        """Return 1 when torchrun must leave its workers."""
        return int(self.thread.handover.must_return())

    def is_closed(self) -> bool:
        """Return False: the coordinator may always form another group."""
        return False

    def set_closed(self) -> None:
        """Do nothing: a node that leaves does not end the others' work."""

    def shutdown(self) -> bool:
        """Let the agent end, and wait until it has reported to the others."""
        if self._thread is not None and self._agent is not None:
            self._thread.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._agent.wait(AGENT_S)
        return True


def leave(job: str, outcome: Outcome) -> None:
    """End torchrun with the job's outcome; always raises SystemExit."""
    say(job, outcome.state + (f": {outcome.reason}" if outcome.reason else ""))
    raise SystemExit(EXITS.get(outcome.state, 1))


class SteeredAgent(torch_api.LocalElasticAgent):
    """torch's agent, with every decision left to the job's coordinator.

    torch documents this class for subclassing; the methods exist in 2.4 to 2.15.
    """

    def __init__(self, spec: Any, logs_specs: torch_api.LogsSpecs, *args: Any, **kwargs: Any) -> None:
        # Only this one launch uses our class.
        torch_api.replace_agent(torch_api.LocalElasticAgent)
        self._handler: SupervisorHandler = spec.rdzv_handler
        super().__init__(spec, GenerationFiles(logs_specs, self._handler), *args, **kwargs)
        self._handler.begin(spec, float(kwargs.get("shutdown_timeout", GRACE_S)))

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: Any
    ) -> list[torch_api.Worker]:
        order = self._handler.work.order
        return [
            torch_api.Worker(local_rank, rank, rank, order.world_size, order.world_size)
            for local_rank, rank in enumerate(range(order.base_rank, order.base_rank + spec.local_world_size))
        ]

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        work = self._handler.work
        try:
            pids: dict[int, Any] = super()._start_workers(worker_group)
        except BaseException as error:
            work.failed(error)
            raise
        work.started(pids)
        return pids

    def _monitor_workers(self, worker_group: Any) -> torch_api.RunResult:
        # torch's check would reap dead workers before our thread has seen how they died.
        if self._handler.thread.handover.has_succeeded():
            result: torch_api.RunResult = super()._monitor_workers(worker_group)
            return result
        return torch_api.RunResult(state=torch_api.WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        self._handler.thread.end_workers(self._handler.grace_s)
        super()._shutdown(death_sig, *args, **kwargs)

    def _exit_barrier(self) -> None:
        """Do nothing: all ranks of all nodes have ended already."""


class GenerationFiles(torch_api.LogsSpecs):
    """The files that torchrun's options request, and each rank's directory of this generation."""

    def __init__(self, requested: torch_api.LogsSpecs, handler: SupervisorHandler) -> None:
        super().__init__(requested.root_log_dir)
        self._requested = requested
        self._handler = handler

    @property
    def root_log_dir(self) -> str:
        """Return the directory of --log-dir."""
        return self._requested.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> torch_api.LogsDest:
        """Return the files; a stream that would only go to the console also goes to a file in our directory."""
        work = self._handler.work
        for env in envs.values():
            # The number is the same on every node. torch removes the files of an earlier attempt with that number.
            env["TORCHELASTIC_RESTART_COUNT"] = str(work.order.restart_count)
        files = self._requested.reify(envs)
        for local_rank, env in envs.items():
            directory = work.directories[local_rank]
            _keep(directory / "stdout.log", local_rank, files.stdouts, files.tee_stdouts)
            _keep(directory / "stderr.log", local_rank, files.stderrs, files.tee_stderrs)
            _keep(directory / "error.json", local_rank, files.error_files, None)
            env["TORCHELASTIC_ERROR_FILE"] = files.error_files[local_rank]
            # These are variables that operators have set during the job; the others come from torchrun.
            env.update(work.order.env)
            environment = {**os.environ, **env}
            env.update(rank_files(directory, environment))
            if work.order.kind != "binary":
                add_bootstrap(env, work.boot.path)
        return files


def _keep(ours: Path, local_rank: int, files: dict[int, str], tee: dict[int, str] | None) -> None:
    """Put one file into our directory: a link to torchrun's file, or else the file itself."""
    theirs = files.get(local_rank, "")
    if theirs and theirs != os.devnull:
        ours.symlink_to(os.path.abspath(theirs))
        return
    files[local_rank] = str(ours)
    if tee is not None:
        tee.pop(local_rank, None)
        if not theirs:
            tee[local_rank] = str(ours)


def make_handler(run_id: str, begin: Begin) -> SupervisorHandler:
    """Return the handler of this torchrun, and make torch use our agent class next."""
    for stream in (sys.stdout, sys.stderr):
        # Without a terminal, the lines of the workers would stay in a buffer and be lost with torchrun.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    # torch creates the agent right after its handler.
    torch_api.replace_agent(SteeredAgent)
    return SupervisorHandler(run_id, begin)
