"""Worker processes: when and how each one died, and what it left running.

In: pids. Out: deaths with a time in nanoseconds; no process that a dead worker started stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from remote_agent.paths import start_ticks, stat_fields

PR_SET_CHILD_SUBREAPER = 36
# Only where the kernel has no pidfd (before 5.3).
POLL_S = 0.05
# What marks all that a rank has started.
ERROR_FILE = b"TORCHELASTIC_ERROR_FILE="


@dataclasses.dataclass(frozen=True)
class Death:
    """How a process ended."""

    code: int | None
    """Exit status; None when a signal ended it."""
    signal: str | None
    core: bool
    t_ns: int
    """time_ns at which we saw it."""


class Worker:
    """One rank's process, from its start until it is reaped."""

    def __init__(self, rank: int, local_rank: int, pid: int, directory: Path) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.pid = pid
        self.directory = directory
        self.started = start_ticks(pid)
        self.death: Death | None = None
        self.asked_ns: int | None = None
        """When we first signalled it while it lived: its death is our doing then."""
        self.sent: str | None = None
        """The last signal that an operator had us send."""
        self.over_ns: int | None = None
        """When its script was over, as it says."""
        self._pidfd = _open_pidfd(pid)
        self._poller: asyncio.Task[None] | None = None

    def watch(self, died: Callable[[Worker], None]) -> None:
        """Call `died` once, as soon as the process is dead."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().add_reader(self._pidfd, self.look, died)
        else:
            self._poller = asyncio.ensure_future(self._poll(died))

    async def _poll(self, died: Callable[[Worker], None]) -> None:
        while self.death is None:
            self.look(died)
            await asyncio.sleep(POLL_S)

    def look(self, died: Callable[[Worker], None]) -> None:
        """Notice the death if there is one, now."""
        if self.death is not None:
            return
        t_ns = time.time_ns()
        # WNOWAIT: the dead process keeps its pid, and so its group, until we have killed what is left of them.
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if result is None:
            return
        self.death = decode(result.si_code, result.si_status, t_ns)
        self.close()
        self.kill_group(signal.SIGKILL)
        died(self)

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to the process itself; returns whether it was there. Never to what has its pid after it."""
        return self.death is None and send_signal(self._pidfd, number, self.pid)

    def ask(self, number: signal.Signals) -> None:
        """Have it end, and what it has started."""
        self.asked_ns = self.asked_ns or time.time_ns()
        self.kill_group(number)

    def kill_group(self, number: signal.Signals) -> None:
        """Send a signal to the worker's process group; only before the worker is reaped."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._poller is not None and self._poller is not asyncio.current_task():
            self._poller.cancel()


def send_signal(pidfd: int, number: signal.Signals, child: int | None = None) -> bool:
    """Send a signal; returns whether there was a process. `child`: its pid, where nobody but us can have reaped it."""
    with contextlib.suppress(ProcessLookupError):
        if pidfd >= 0:
            signal.pidfd_send_signal(pidfd, number)
            return True
        if child is not None:
            os.kill(child, number)
            return True
    return False


def signal_ranks(ranks: Mapping[int, Any], pids: Mapping[str, int], name: str) -> dict[str, str]:
    """Send a signal to ranks as far as they still have these pids; returns by rank why it was not sent."""
    refused: dict[str, str] = {}
    for rank, pid in pids.items():
        one = ranks.get(int(rank))
        if one is None or one.pid != pid:
            refused[rank] = f"rank {rank} is not the process {pid} any more"
        elif not one.send(signal.Signals[name]):
            refused[rank] = f"rank {rank} has ended"
        else:
            one.sent = name
    return refused


def decode(si_code: int, si_status: int, t_ns: int) -> Death:
    """Return the death that waitid tells of."""
    if si_code == os.CLD_EXITED:
        return Death(si_status, None, False, t_ns)
    return Death(None, signal_name(si_status), si_code == os.CLD_DUMPED, t_ns)


def signal_name(number: int) -> str:
    """Return a signal's name, SIG35 for one that Python has none for."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none can leave us."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the pids of this process's children, dead ones that nobody waited for included."""
    found: set[int] = set()
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                found.update(int(pid) for pid in file.read().split())
    except FileNotFoundError:
        # A thread ended meanwhile, or a kernel without this file.
        me = str(os.getpid())
        found = {int(pid) for pid in os.listdir("/proc") if pid.isdigit() and stat_fields(int(pid))[1:2] == [me]}
    return found


class Orphans:
    """Children that we did not start: descendants of workers that outlived their parent."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()

    def tend(self, workers: Iterable[Worker], *, kill_all: bool = False) -> int:
        """Reap dead orphans, kill those whose worker is dead (or all); returns how many live."""
        known = {worker.pid for worker in workers}
        dead = [worker for worker in workers if worker.death is not None]
        alive = 0
        for pid in children() - known:
            fields = stat_fields(pid)
            if not fields or fields[0] in "ZX":
                _reap(pid)
                continue
            alive += 1
            if kill_all or any(_belongs(pid, fields, worker) for worker in dead):
                _kill(pid)
        return alive

    async def sweep(self, workers: Iterable[Worker], deadline_s: float) -> int:
        """Kill every orphan, and what is orphaned by that; returns how many would not die in time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while True:
            self.changed.clear()
            alive = self.tend(workers, kill_all=True)
            left = end - loop.time()
            if alive == 0 or left <= 0:
                return alive
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), min(left, POLL_S))


class Leftovers(Orphans):
    """What ranks of a job have started and what outlived their engine: our children since, among others."""

    def __init__(self, root: Path, sessions: Collection[int]) -> None:
        """`root`: the job's directory; `sessions`: pids of the workers that the engine had."""
        super().__init__()
        self._sessions = {str(pid) for pid in sessions}
        self._mark = ERROR_FILE + os.fsencode(root) + b"/"
        self._ours: set[int] = set()

    def tend(self, workers: Iterable[Worker], *, kill_all: bool = False) -> int:
        """Kill those that live and reap the dead; returns how many live."""
        alive = 0
        for pid in children():
            fields = stat_fields(pid)
            if not fields or not (pid in self._ours or fields[3] in self._sessions or self._is_marked(pid)):
                continue
            self._ours.add(pid)
            if fields[0] in "ZX":
                _reap(pid)
                continue
            alive += 1
            _kill(pid)
        return alive

    def _is_marked(self, pid: int) -> bool:
        return any(entry.startswith(self._mark) for entry in _environment(pid))


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _belongs(pid: int, fields: list[str], worker: Worker) -> bool:
    if fields[3] == str(worker.pid):
        return True
    return ERROR_FILE + os.fsencode(worker.directory / "error.json") in _environment(pid)


def exit_document(worker: Worker, evidence: dict[str, Any]) -> dict[str, Any]:
    """Return the `Exit` of the wire; the worker must be dead."""
    death = worker.death
    if death is None:
        raise ValueError(f"rank {worker.rank} has not ended")
    is_ours = worker.asked_ns is not None
    if worker.asked_ns is not None and worker.over_ns is not None and death.code is not None:
        # It was about to exit when our signal came, and did: the status is its own.
        is_ours = worker.asked_ns < worker.over_ns
    return {
        "rank": worker.rank,
        "local_rank": worker.local_rank,
        "pid": worker.pid,
        **dataclasses.asdict(death),
        "over_ns": worker.over_ns,
        "asked_ns": worker.asked_ns,
        "sent": worker.sent,
        "stopped_by_us": is_ours,
        **evidence,
    }
