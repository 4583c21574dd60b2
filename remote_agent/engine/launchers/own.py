"""The engine's own launcher: it starts the workers as torch's start_processes does, with ranks that the order names.

In: an Order without a rendezvous. Out: notices `main` and `exited`; a group that ends completely.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.base.tasks import within
from remote_agent.engine import boot_dir
from remote_agent.engine.launchers.launcher import KILL_S, STUCK_HINT, SWEEP_S, LaunchContext, Notify, WorkerGroup
from remote_agent.engine.order import Order, link_logs, link_nccl, rank_directories, whole_environment
from remote_agent.engine.processes import RankProcess, Worker, exit_document
from remote_agent.engine.standby import Cold
from remote_agent.wire import Problem

if TYPE_CHECKING:
    from remote_agent.wire.answers import StartedProcess, StartedWorkers, StoppedWorkers

log = logging.getLogger(__name__)

# A wrapper named by PYTHON_EXEC may drop our bootstrap: after this time a live worker is assumed to run its script.
SILENT_S = 15.0
REAP_S = 5


Spawned = tuple["dict[int, int]", Callable[[], None], "str | None"]
"""Pids by local rank; a function that reaps the processes when they are dead; why they are cold.

"" for warm ones, None where ranks are never warm.
"""
Spawn = Callable[[LaunchContext, Order, boot_dir.BootDirectory, "dict[int, Path]"], Awaitable[Spawned]]


async def _spawn(
    context: LaunchContext, order: Order, boot: boot_dir.BootDirectory, directories: dict[int, Path]
) -> Spawned:
    envs = {local_rank: whole_environment(order, local_rank, context.leaked) for local_rank in directories}
    why: str | None = None
    if order.standby:
        boot.note_imports()
        try:
            pids = await context.standby.fork(order, envs, directories, boot.path)
            return pids, partial(_reap, list(pids.values())), ""
        except Cold as cold:
            why = str(cold)
        finally:
            context.standby.note_start(order, envs[0], boot.path)
    pids, reap = await context.in_thread(_start_processes, context, order, boot.path, directories, envs)
    return pids, reap, why


def _reap(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


async def start(context: LaunchContext, order: Order, spawn: Spawn = _spawn) -> WorkerGroup:
    """Start workers as children of this process."""
    directories = rank_directories(order)
    link_logs(order, directories)
    boot = boot_dir.BootDirectory(order.log_dir, order.slow)
    try:
        pids, reap, why = await spawn(context, order, boot, directories)
        link_nccl(order, pids, directories)
    except BaseException:
        boot.close()
        raise
    workers = [
        Worker(order.base_rank + local_rank, local_rank, pid, directories[local_rank])
        for local_rank, pid in sorted(pids.items())
    ]
    return OwnGroup(context, order.generation, boot, workers, reap, why)


def _start_processes(
    context: LaunchContext, order: Order, boot: Path, directories: dict[int, Path], envs: dict[int, dict[str, str]]
) -> tuple[dict[int, int], Callable[[], None]]:
    """Start the workers, in the thread that lives as long as this process; returns pids, and what reaps them."""
    commands, envs = {}, {local_rank: dict(env) for local_rank, env in envs.items()}
    for local_rank, env in envs.items():
        commands[local_rank] = boot_dir.command(order, boot, env)
        if order.kind != "binary":
            boot_dir.add_bootstrap(env, boot)
    if order.numa_binding:
        return _start_bound(order, commands, directories, envs)
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for local_rank, words in commands.items():
            folder = directories[local_rank]
            with open(folder / "stdout.log", "wb") as out, open(folder / "stderr.log", "wb") as err:
                processes[local_rank] = subprocess.Popen(
                    words, env=envs[local_rank], cwd=order.cwd, stdout=out, stderr=err, start_new_session=True
                )
    except BaseException:
        for process in processes.values():
            process.kill()
            process.wait()
        raise
    # The objects must live as long as the processes: Python reaps a process whose object is gone.
    return {local_rank: one.pid for local_rank, one in processes.items()}, partial(_wait, list(processes.values()))


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.wait()


def _start_bound(
    order: Order, commands: dict[int, list[str]], directories: dict[int, Path], envs: dict[int, dict[str, str]]
) -> tuple[dict[int, int], Callable[[], None]]:
    """Have torch start the workers: it knows how to bind them to NUMA nodes."""
    torch = importlib.import_module("remote_agent.engine.torch_api")
    # Workers inherit the working directory; all our own paths are absolute.
    os.chdir(order.cwd)
    files = torch.RankFiles(str(order.log_dir), {number: str(path) for number, path in directories.items()})
    started = torch.start(order.role, commands, envs, files, order.numa_binding)
    return started.pids(), partial(started.close, signal.SIGKILL, REAP_S)


class OwnGroup(WorkerGroup):
    """Workers whose deaths this process sees itself."""

    def __init__(
        self,
        context: LaunchContext,
        generation: int,
        boot: boot_dir.BootDirectory,
        workers: list[Worker],
        reap: Callable[[], None],
        why_cold: str | None,
    ) -> None:
        super().__init__(context, generation, boot)
        self._why_cold = why_cold
        self._standby = context.standby
        self._ranks = self._workers = {worker.rank: worker for worker in workers}
        self._reap = reap
        self._reports: list[asyncio.Task[None]] = []
        self._silent = set(self._workers)
        """Ranks that have not reported that they run their script."""
        self._assume_later: asyncio.TimerHandle | None = None

    def answer(self) -> StartedWorkers:
        ranks: list[StartedProcess] = [
            {"rank": one.rank, "local_rank": one.local_rank, "pid": one.pid, "started": one.started}
            for one in self._workers.values()
        ]
        return {"ranks": ranks, "cold": self._why_cold}

    def watch(self, notify: Notify) -> None:
        super().watch(notify)
        self._assume_later = asyncio.get_running_loop().call_later(SILENT_S, self._assume)
        for worker in self._workers.values():
            worker.watch(self._died)

    async def run(self) -> None:
        await self._all_dead.wait()
        await asyncio.gather(*self._reports)
        left = await self._orphans.sweep(self._children(), SWEEP_S)
        if left:
            log.warning("generation %d: %d descendants of its workers did not end", self.generation, left)
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(loop.run_in_executor(None, self._reap), KILL_S)
        except asyncio.TimeoutError:
            log.warning("generation %d: cannot reap the workers", self.generation)
        self._standby.learn()
        self.close()
        self.ended.set()

    def close(self) -> None:
        if self._assume_later is not None:
            self._assume_later.cancel()
        super().close()

    def tend(self) -> None:
        self._orphans.changed.set()
        self._orphans.tend(self._children())

    async def stop(self, grace_s: float, collect: bool) -> StoppedWorkers:
        stacks = await self._save_stacks() if collect else {}
        self._terminate(signal.SIGTERM)
        if not await within(self._all_dead, grace_s):
            self.kill()
        if not await within(self.ended, KILL_S + SWEEP_S):
            stuck = ", ".join(f"rank {rank.rank} (pid {rank.pid})" for rank in self._alive()) or "their descendants"
            raise Problem("stuck", f"not dead after SIGKILL: {stuck}", STUCK_HINT)
        return {"exits": self.exits(), "stacks": stacks}

    def kill(self) -> None:
        self._terminate(signal.SIGKILL)

    def _terminate(self, number: signal.Signals) -> None:
        self._alive()
        for worker in self._workers.values():
            if worker.death is None:
                worker.terminate(number)

    def has_succeeded(self) -> bool:
        return all(worker.death is not None and worker.death.code == 0 for worker in self._workers.values())

    def _children(self) -> Sequence[Worker]:
        return list(self._workers.values())

    def _alive(self) -> list[RankProcess]:
        for worker in self._workers.values():
            worker.look(self._died)
        return super()._alive()

    def _begun(self, rank: int, t_ns: int) -> None:
        self._silent.discard(rank)
        super()._begun(rank, t_ns)

    def _assume(self) -> None:
        for worker in self._alive():
            if worker.rank in self._silent:
                log.warning("rank %d does not report that it runs: the bootstrap did not reach it", worker.rank)
                args = {"generation": self.generation, "rank": worker.rank, "t_ns": time.time_ns(), "assumed": True}
                self._notify("main", args)

    def _died(self, worker: Worker) -> None:
        # Its earlier messages must not be reported after its death.
        self._read_pipe()
        self._reports.append(asyncio.ensure_future(self._report(worker)))
        self.tend()
        if all(other.death is not None for other in self._workers.values()):
            self._all_dead.set()

    async def _report(self, worker: Worker) -> None:
        evidence = await self._evidence(worker)
        assert worker.death is not None
        is_ours = worker.asked_ns is not None
        if worker.asked_ns is not None and worker.over_ns is not None and worker.death.code is not None:
            # When its script was over before our signal, the exit code is its own.
            is_ours = worker.asked_ns < worker.over_ns
        await self._report_exit(exit_document(worker, worker.death, worker.asked_ns, is_ours, evidence))
