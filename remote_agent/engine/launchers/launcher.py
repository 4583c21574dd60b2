"""What a launcher is, which starts a node's workers, and the group of workers that it starts.

In: an Order. Out: a WorkerGroup that reports each death, answers questions about live ranks and ends completely.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from remote_agent.base.tasks import within
from remote_agent.engine import evidence
from remote_agent.engine.inspect import pulse, stacks
from remote_agent.engine.inspect.phases import PhaseReader

if TYPE_CHECKING:
    from pathlib import Path

    from remote_agent.diagnose.hang.pulses import EnginePulse
    from remote_agent.engine.boot_dir import BootDirectory
    from remote_agent.engine.order import Order
    from remote_agent.engine.processes import Orphans, RankProcess, Worker
    from remote_agent.engine.standby import Standby
    from remote_agent.vitals.host_notes import HostNotes
    from remote_agent.wire.answers import RankStacks, SampledRanks, StartedWorkers, StoppedWorkers
    from remote_agent.wire.documents import RankExit

# A process that stays longer after SIGKILL is stuck in the kernel.
KILL_S = 10.0
SWEEP_S = 2.0
STUCK_HINT = "it is stuck in the kernel: look at dmesg"
Notify = Callable[[str, Mapping[str, object]], None]
Launch = Callable[["LaunchContext", "Order"], Awaitable["WorkerGroup"]]
"""Starts one generation's workers; raises OSError, RuntimeError, ValueError, Problem, then leaves nothing behind."""


@dataclasses.dataclass(frozen=True)
class LaunchContext:
    """What the engine shares with its launchers."""

    notes: HostNotes
    orphans: Orphans
    leaked: dict[str, str]
    """What this torch's torchrun adds to the environment of its workers."""
    in_thread: Callable[..., Awaitable[Any]]
    """Runs a function in the thread that may start processes, and waits for its end even when cancelled."""
    standby: Standby


class WorkerGroup:
    """One generation's workers on this node. An owner must await `run`."""

    def __init__(self, context: LaunchContext, generation: int, boot: BootDirectory) -> None:
        self.generation = generation
        self.ended = asyncio.Event()
        """Set when every process is dead, reported and reaped, and no process of theirs is left."""
        self._boot = boot
        self._notes = context.notes
        self._orphans = context.orphans
        self._ranks: Mapping[int, RankProcess] = {}
        self._notify: Notify = lambda _op, _args: None
        self._all_dead = asyncio.Event()
        """Set when all children that we started are dead."""
        self._exits: dict[int, RankExit] = {}
        self._phases = PhaseReader(boot.path)
        self._called_ns: dict[int, int] = {}
        """By rank: when its script called init_process_group."""

    def answer(self) -> StartedWorkers:
        """Return the group's part of the answer to `go`."""
        raise NotImplementedError

    def watch(self, notify: Notify) -> None:
        """Start to report: `notify` is called with notices in the order of events."""
        self._notify = notify
        asyncio.get_running_loop().add_reader(self._boot.pipe, self._read_pipe)

    async def run(self) -> None:
        """Return when the generation has ended on this node, for whatever reason."""
        raise NotImplementedError

    def tend(self) -> None:
        """Look after orphans; call it when a child has died."""
        raise NotImplementedError

    async def stop(self, grace_s: float, collect: bool) -> StoppedWorkers:
        """End all workers; returns their exits, and their stacks if `collect`. Raises Problem if one does not die.

        A second call with a shorter grace ends them sooner.
        """
        raise NotImplementedError

    def kill(self) -> None:
        """Send SIGKILL to everything that is alive."""
        raise NotImplementedError

    def _children(self) -> Sequence[Worker]:
        """Return the processes that we started and will reap."""
        raise NotImplementedError

    def _alive(self) -> list[RankProcess]:
        """Return the ranks that are alive at this moment."""
        return [rank for rank in self._ranks.values() if rank.is_alive]

    async def vanish(self, deadline_s: float) -> None:
        """Kill everything at once because the engine must end; nothing is reported."""
        self.kill()
        await within(self._all_dead, deadline_s)
        await self._orphans.sweep(self._children(), deadline_s)
        self.close()

    def close(self) -> None:
        """Stop watching and remove the workers' directory."""
        for process in (*self._children(), *self._ranks.values()):
            process.end_watch()
        if self._boot.pipe >= 0:
            asyncio.get_running_loop().remove_reader(self._boot.pipe)
        self._boot.close()

    def has_succeeded(self) -> bool:
        """Return whether every worker has exited with 0."""
        return False

    def exits(self) -> list[RankExit]:
        """Return the exits so far, by rank."""
        return [self._exits[rank] for rank in sorted(self._exits)]

    async def stacks(self, ranks: Iterable[int] | None) -> RankStacks:
        """Return stacks of these ranks (None: all) and of their children."""
        self._alive()
        wanted = [self._ranks[rank] for rank in (self._ranks if ranks is None else ranks) if rank in self._ranks]
        return await stacks.dump(self._boot, {one.rank: one.pid if one.is_alive else None for one in wanted})

    async def keep(self, ranks: Iterable[int] | None) -> dict[str, list[str]]:
        """Save stacks and flight records of the live ones of these ranks (None: all); returns the files by rank."""
        chosen = {rank: path for rank, path in self._directories().items() if ranks is None or rank in ranks}
        return await stacks.keep(self._boot, chosen)

    def send(self, pids: Mapping[str, int], name: str) -> dict[str, str]:
        """Send a signal to the ranks that still have these pids; returns by rank why it was not sent."""
        self._alive()
        refused: dict[str, str] = {}
        for rank, pid in pids.items():
            one = self._ranks.get(int(rank))
            if one is None or one.pid != pid:
                refused[rank] = f"rank {rank} is no longer process {pid}"
            elif not one.send(signal.Signals[name]):
                refused[rank] = f"rank {rank} has ended"
            else:
                one.note_sent(name)
        return refused

    async def pulses(self, with_stacks: bool) -> dict[str, EnginePulse]:
        """Return the pulse of each live rank."""
        return await pulse.pulses(self._boot, self._alive(), with_stacks)

    async def sample(self, until_ns: int, shift_ns: int, routine: bool) -> SampledRanks:
        """Have the live ranks sampled until then; returns their new windows."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self._phases.sample, self._alive(), until_ns, shift_ns, routine)

    async def _save_stacks(self) -> dict[str, str]:
        return await stacks.save(self._boot, self._directories())

    def _directories(self) -> dict[int, Path]:
        return {rank.rank: rank.directory for rank in self._alive()}

    def _read_pipe(self) -> None:
        for what, rank, t_ns in self._boot.messages():
            if what == "main":
                self._begun(rank, t_ns)
            elif what == "init":
                self._called_ns[rank] = t_ns
                self._notify("grouping", {"generation": self.generation, "rank": rank})
            elif what == "group" and rank in self._called_ns:
                times = {"t_ns": t_ns, "took_s": (t_ns - self._called_ns[rank]) / 1e9}
                self._notify("grouped", {"generation": self.generation, "rank": rank, **times})
            elif rank in self._ranks:
                self._ranks[rank].note_over(t_ns)

    def _begun(self, rank: int, t_ns: int) -> None:
        """Report that a rank is about to run the script."""
        self._notify("main", {"generation": self.generation, "rank": rank, "t_ns": t_ns})

    async def _evidence(self, rank: RankProcess) -> RankExit:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, evidence.read_evidence, rank.directory, len(self._ranks))

    async def _report_exit(self, document: RankExit) -> None:
        document["notes"] = await self._notes.explain(document)
        self._exits[document["rank"]] = document
        self._notify("exited", {"generation": self.generation, "exit": document})
