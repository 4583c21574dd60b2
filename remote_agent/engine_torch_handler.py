"""torchrun's rendezvous handler, and its elastic agent as we steer it.

In: torchrun's own settings; work from the Desk. Out: workers that torchrun starts as the job's coordinator orders, with
files of ours; an exit of torchrun that tells how the job ended.

torch's loop only ever sees healthy workers: a failure, a restart and an end are the coordinator's decision, so none
costs torchrun's own budget, and no node's torchrun ends before the job does.
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

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.launcher import api

from remote_agent.engine_boot import add_bootstrap
from remote_agent.engine_handler import Dismissed, HandlerThread, Outcome, Work, say
from remote_agent.engine_start import nccl_file

log = logging.getLogger(__name__)

BACKEND = "supervisor"
# The coordinator's agent first lets all others know how the job ended.
AGENT_S = 15.0
# torch's own, before it had --shutdown-timeout.
GRACE_S = 30.0
EXITS = {"succeeded": 0, "removed": 0, "stopped": 4}

Begin = Callable[[Any, float], "tuple[HandlerThread, subprocess.Popen[bytes]]"]


class SupervisorHandler(RendezvousHandler):
    """What torchrun asks for its place in the group."""

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
        """The thread that hears the agent."""
        assert self._thread is not None, "begin() comes first"
        return self._thread

    @property
    def work(self) -> Work:
        """What torchrun starts, or has started."""
        assert self._work is not None, "next_rendezvous() comes first"
        return self._work

    @property
    def use_agent_store(self) -> bool:
        """The workers are clients of the generation's store, which one of our processes serves."""
        return True

    def get_backend(self) -> str:
        """Return our name."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for this node's place in the next generation; ends torchrun when there is none."""
        try:
            self._work = self.thread.desk.take()
        except Dismissed as dismissed:
            leave(self._run_id, dismissed.outcome)
        order = self.work.order
        meeting = RendezvousStoreInfo(order.master_addr, order.master_port)
        # torch's agents have nothing to tell each other: the ranks are in the order.
        return RendezvousInfo(HashStore(), order.group_rank, order.group_world_size, meeting)

    def num_nodes_waiting(self) -> int:
        """Return 1 when torchrun must leave its workers."""
        return int(self.thread.desk.wants())

    def is_closed(self) -> bool:
        """Tell that nobody can know: the coordinator may always form another group."""
        return False

    def set_closed(self) -> None:
        """Do nothing: a node that leaves ends nobody else's work."""

    def shutdown(self) -> bool:
        """Let the agent end, and wait until it has told the others what it knows."""
        if self._thread is not None and self._agent is not None:
            self._thread.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._agent.wait(AGENT_S)
        return True


def leave(job: str, outcome: Outcome) -> None:
    """End torchrun as the job ended; always raises SystemExit."""
    say(job, outcome.state + (f": {outcome.reason}" if outcome.reason else ""))
    raise SystemExit(EXITS.get(outcome.state, 1))


class SteeredAgent(LocalElasticAgent):
    """torch's agent, which leaves every decision to the job's coordinator.

    torch documents this class for subclassing; the methods exist in 2.4 to 2.15.
    """

    def __init__(self, spec: Any, logs_specs: LogsSpecs, *args: Any, **kwargs: Any) -> None:
        # Only this one launch is ours.
        vars(api)["LocalElasticAgent"] = LocalElasticAgent
        self._handler: SupervisorHandler = spec.rdzv_handler
        super().__init__(spec, GenerationFiles(logs_specs, self._handler), *args, **kwargs)
        self._handler.begin(spec, float(kwargs.get("shutdown_timeout", GRACE_S)))

    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: Any) -> list[Worker]:
        order = self._handler.work.order
        return [
            Worker(local_rank, rank, rank, order.world_size, order.world_size)
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

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        # Asking torch would reap the dead before our thread has seen how they died.
        if self._handler.thread.desk.has_succeeded():
            result: RunResult = super()._monitor_workers(worker_group)
            return result
        return RunResult(state=WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        self._handler.thread.end_workers(self._handler.grace_s)
        super()._shutdown(death_sig, *args, **kwargs)

    def _exit_barrier(self) -> None:
        """All ranks of all nodes have ended already."""


class GenerationFiles(LogsSpecs):
    """The files that torchrun's options ask for, and with them each rank's own directory of this generation."""

    def __init__(self, asked: LogsSpecs, handler: SupervisorHandler) -> None:
        super().__init__(asked.root_log_dir)
        self._asked = asked
        self._handler = handler

    @property
    def root_log_dir(self) -> str:
        """Return the directory that --log-dir names."""
        return self._asked.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files; a stream that goes nowhere but to the console also goes to a file of ours."""
        work = self._handler.work
        for env in envs.values():
            # The same number on every node; and torch removes what an earlier attempt of that number has left.
            env["TORCHELASTIC_RESTART_COUNT"] = str(work.order.restart_count)
        files = self._asked.reify(envs)
        for local_rank, env in envs.items():
            directory = work.directories[local_rank]
            _keep(directory / "stdout.log", local_rank, files.stdouts, files.tee_stdouts)
            _keep(directory / "stderr.log", local_rank, files.stderrs, files.tee_stderrs)
            _keep(directory / "error.json", local_rank, files.error_files, None)
            env["TORCHELASTIC_ERROR_FILE"] = files.error_files[local_rank]
            # Only what operators have set while the job runs: the rest is torchrun's own.
            env.update(work.order.env)
            given = {**os.environ, **env}
            if given.get("NCCL_DEBUG") and "NCCL_DEBUG_FILE" not in given:
                env.update(nccl_file(directory))
            if work.order.kind != "binary":
                add_bootstrap(env, work.boot.path)
        return files


def _keep(ours: Path, local_rank: int, files: dict[int, str], tee: dict[int, str] | None) -> None:
    """Have one file in our directory: a link to where torchrun writes it, or else the file itself."""
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
    """Return the handler of this torchrun; the agent that torch makes next is ours too."""
    for stream in (sys.stdout, sys.stderr):
        # What torch shows of the workers' lines would wait in a buffer wherever that is no terminal, and die with it.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    # launch_agent makes an agent of the class of this name, right after its handler.
    vars(api)["LocalElasticAgent"] = SteeredAgent
    return SupervisorHandler(run_id, begin)
