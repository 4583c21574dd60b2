"""This node's workers of one generation: watch them, report each death, stop them, leave nothing behind.

In: workers that torch has just started. Out: notices `main` and `exited`; stacks; an end that is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from remote_agent import engine_evidence as evidence
from remote_agent import engine_pulse, engine_stacks
from remote_agent.engine_watch import Orphans, Worker, exit_document, signal_ranks
from remote_agent.wire import Problem

if TYPE_CHECKING:
    from pathlib import Path

    from remote_agent.engine_boot import BootDirectory
    from remote_agent.host_notes import Host

log = logging.getLogger(__name__)

# After SIGKILL: a process that stays longer is stuck in the kernel.
KILL_S = 10.0
SWEEP_S = 2.0
# A wrapper named by PYTHON_EXEC may keep our bootstrap out: whoever lives this long is taken to run its script.
SILENT_S = 15.0
Tell = Callable[[str, "dict[str, Any]"], None]


class Group:
    """One generation's workers on this node. `run` must be awaited by an owner."""

    def __init__(
        self,
        generation: int,
        boot: BootDirectory,
        workers: list[Worker],
        reap: Callable[[], None],
        host: Host,
        orphans: Orphans | None = None,
    ) -> None:
        self.generation = generation
        self.ended = asyncio.Event()
        """Set when every worker is dead, reported and reaped, and nothing of theirs is left."""
        self._boot = boot
        self._workers = {worker.rank: worker for worker in workers}
        self._reap = reap
        self._host = host
        self._tell: Tell = lambda _op, _args: None
        self._orphans = orphans or Orphans()
        self._all_dead = asyncio.Event()
        self._reports: list[asyncio.Task[None]] = []
        self._exits: dict[int, dict[str, Any]] = {}
        self._silent = set(self._workers)
        self._patience: asyncio.TimerHandle | None = None

    def watch(self, tell: Tell) -> None:
        """Begin to report; `tell` is called with notices in the order in which things happened."""
        self._tell = tell
        loop = asyncio.get_running_loop()
        loop.add_reader(self._boot.pipe, self._hear)
        self._patience = loop.call_later(SILENT_S, self._assume)
        for worker in self._workers.values():
            worker.watch(self._died)

    async def run(self) -> None:
        """Return when the generation has ended here, whatever ended it."""
        await self._all_dead.wait()
        await asyncio.gather(*self._reports)
        left = await self._orphans.sweep(self._workers.values(), SWEEP_S)
        if left:
            log.warning("generation %d: %d descendants of its workers do not die", self.generation, left)
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(loop.run_in_executor(None, self._reap), KILL_S)
        except asyncio.TimeoutError:
            log.warning("generation %d: workers cannot be reaped", self.generation)
        self.close()
        self.ended.set()

    def close(self) -> None:
        """Stop watching and remove the workers' directory."""
        if self._patience is not None:
            self._patience.cancel()
        for worker in self._workers.values():
            worker.close()
        if self._boot.pipe >= 0:
            asyncio.get_running_loop().remove_reader(self._boot.pipe)
        self._boot.close()

    def tend(self) -> None:
        """Look after orphans: to be called when a child has died."""
        self._orphans.changed.set()
        self._orphans.tend(self._workers.values())

    async def stop(self, grace_s: float, collect: bool) -> dict[str, Any]:
        """End all workers; returns their exits and what stacks were collected. Raises Problem if one cannot be ended.

        A second call with a shorter grace ends them sooner.
        """
        stacks = await engine_stacks.save(self._boot, self._directories()) if collect else {}
        for worker in self._alive():
            worker.ask(signal.SIGTERM)
        if not await within(self._all_dead, grace_s):
            self.kill()
        if not await within(self.ended, KILL_S + SWEEP_S):
            stuck = ", ".join(f"rank {worker.rank} (pid {worker.pid})" for worker in self._alive()) or "leftovers"
            raise Problem("stuck", f"not dead after SIGKILL: {stuck}", "it hangs in the kernel: look at dmesg")
        return {"exits": self.exits(), "stacks": stacks}

    def kill(self) -> None:
        """Send SIGKILL to every worker that lives, and to its process group."""
        for worker in self._alive():
            worker.ask(signal.SIGKILL)

    async def vanish(self, deadline_s: float) -> None:
        """Kill everything at once, for an engine that must end; nothing is reported."""
        self.kill()
        await within(self._all_dead, deadline_s)
        await self._orphans.sweep(self._workers.values(), deadline_s)
        self.close()

    def has_succeeded(self) -> bool:
        """Whether every worker has exited with 0."""
        return all(worker.death is not None and worker.death.code == 0 for worker in self._workers.values())

    def exits(self) -> list[dict[str, Any]]:
        """Return the exits so far, by rank."""
        return [self._exits[rank] for rank in sorted(self._exits)]

    async def stacks(self, ranks: Iterable[int] | None) -> dict[str, Any]:
        """Return stacks of the live ones of these ranks (None: all) and of their children, and why some have none."""
        wanted = [self._workers[rank] for rank in (self._workers if ranks is None else ranks) if rank in self._workers]
        pids = {worker.rank: worker.pid if worker.death is None else None for worker in wanted}
        return await engine_stacks.dump(self._boot, pids)

    async def keep(self, ranks: Iterable[int] | None) -> dict[str, list[str]]:
        """Save stacks and flight records of the live ones of these ranks (None: all); returns the files by rank."""
        chosen = {rank: path for rank, path in self._directories().items() if ranks is None or rank in ranks}
        return await engine_stacks.keep(self._boot, chosen)

    def send(self, pids: Mapping[str, int], name: str) -> dict[str, str]:
        """Send a signal to ranks that still have these pids; returns by rank why it was not sent."""
        self._alive()
        return signal_ranks(self._workers, pids, name)

    async def pulses(self, stacks: bool) -> dict[str, Any]:
        """Return what the live ranks are doing, by rank."""
        return await engine_pulse.pulses(self._boot, self._alive(), stacks)

    def _alive(self) -> list[Worker]:
        """Return the workers that live at this very moment."""
        for worker in self._workers.values():
            worker.look(self._died)
        return [worker for worker in self._workers.values() if worker.death is None]

    def _directories(self) -> dict[int, Path]:
        """Return the directories of the ranks that live."""
        return {worker.rank: worker.directory for worker in self._alive()}

    def _hear(self) -> None:
        for what, rank, t_ns in self._boot.words():
            if what == "main":
                self._silent.discard(rank)
                self._tell("main", {"generation": self.generation, "rank": rank, "t_ns": t_ns})
            elif rank in self._workers:
                self._workers[rank].over_ns = t_ns

    def _assume(self) -> None:
        for worker in self._alive():
            if worker.rank in self._silent:
                log.warning("rank %d does not say that it runs: the bootstrap did not reach it", worker.rank)
                args = {"generation": self.generation, "rank": worker.rank, "t_ns": time.time_ns(), "assumed": True}
                self._tell("main", args)

    def _died(self, worker: Worker) -> None:
        # What it said before it died must not come after its death.
        self._hear()
        self._reports.append(asyncio.ensure_future(self._report(worker)))
        self.tend()
        if all(other.death is not None for other in self._workers.values()):
            self._all_dead.set()

    async def _report(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(None, evidence.of_the_dead, worker.directory, len(self._workers))
        document = exit_document(worker, found)
        document["notes"] = await self._host.explain(document)
        self._exits[worker.rank] = document
        self._tell("exited", {"generation": self.generation, "exit": document})


async def within(event: asyncio.Event, seconds: float) -> bool:
    """Tell whether the event is set before so many seconds have passed."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
