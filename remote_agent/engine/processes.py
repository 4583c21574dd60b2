"""Worker processes: when and how each one died, and the processes that it left.

In: pids. Out: deaths with a time in nanoseconds; no process that a dead worker started survives.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.base.proc import children, environment, has_same, start_ticks, stat_fields
from remote_agent.base.tasks import within

if TYPE_CHECKING:
    from remote_agent.wire.documents import RankExit

log = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER = 36
SPARED_END_S = 5.0
# This is used only if the kernel has no pidfd (before 5.3).
POLL_S = 0.05
# This variable marks every process that a rank has started.
ERROR_FILE = b"TORCHELASTIC_ERROR_FILE="


@dataclasses.dataclass(frozen=True)
class Death:
    """How a process ended."""

    code: int | None
    """Exit status; None when a signal ended it."""
    signal: str | None
    core: bool
    t_ns: int
    """time_ns at which the death was seen."""


class RankProcess:
    """The process of one rank."""

    def __init__(self, rank: int, local_rank: int, pid: int, directory: Path) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.pid = pid
        self.directory = directory
        self.over_ns: int | None = None
        """The time when its script was over, as reported by the bootstrap."""
        self.sent: str | None = None
        """The last signal that an operator sent."""
        self._pidfd = _open_pidfd(pid)

    @property
    def is_alive(self) -> bool:
        """Whether no death was seen yet."""
        raise NotImplementedError

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to exactly this process; returns whether it still existed."""
        if self._pidfd < 0:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)
            return True
        return False

    def note_sent(self, name: str) -> None:
        """Note the signal that an operator has sent."""
        self.sent = name

    def note_over(self, t_ns: int) -> None:
        """Note when its script was over."""
        self.over_ns = t_ns

    def end_watch(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


class Worker(RankProcess):
    """A child of this process, from its start until it is reaped."""

    def __init__(self, rank: int, local_rank: int, pid: int, directory: Path) -> None:
        super().__init__(rank, local_rank, pid, directory)
        self.started = start_ticks(pid)
        self.death: Death | None = None
        self.asked_ns: int | None = None
        """The time when we first signalled it while it was alive: we caused its death then."""
        self._poller: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        return self.death is None

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
        """Check now whether the process is dead."""
        if self.death is not None:
            return
        t_ns = time.time_ns()
        # WNOWAIT: until it is reaped, a dead process keeps its pid, and so its group, which is killed first.
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if result is None:
            return
        self.death = decode(result.si_code, result.si_status, t_ns)
        self.end_watch()
        self.kill_group(signal.SIGKILL)
        died(self)

    def send(self, number: signal.Signals) -> bool:
        if self.death is not None:
            return False
        if self._pidfd >= 0:
            return super().send(number)
        # Only we can have reaped our child, so the pid is still its own.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False

    def terminate(self, number: signal.Signals) -> None:
        """Send a signal that ends the worker and its process group."""
        self.asked_ns = self.asked_ns or time.time_ns()
        self.kill_group(number)

    def kill_group(self, number: signal.Signals) -> None:
        """Send a signal to the worker's process group; only before the worker is reaped."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def end_watch(self) -> None:
        super().end_watch()
        if self._poller is not None and self._poller is not asyncio.current_task():
            self._poller.cancel()


def decode(si_code: int, si_status: int, t_ns: int) -> Death:
    """Return the death that waitid reports."""
    if si_code == os.CLD_EXITED:
        return Death(si_status, None, False, t_ns)
    return Death(None, signal_name(si_status), si_code == os.CLD_DUMPED, t_ns)


def signal_name(number: int) -> str:
    """Return a signal's name; for example SIG35 when Python has none for it."""
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
    """Become the parent of every descendant whose own parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Orphans:
    """Children that we did not start: descendants of workers that outlived their parent."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.spared: set[int] = set()
        """Pids of children that are not orphans, and have an owner."""

    async def end_spared(self, process: subprocess.Popen[bytes], what: str) -> None:
        """Kill a child that was spared and reap it; `what`: its name in the log, where it does not die."""
        process.kill()
        try:
            await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, process.wait), SPARED_END_S)
        except asyncio.TimeoutError:
            log.warning("%s does not die", what)
        self.spared.discard(process.pid)

    def tend(self, workers: Iterable[Worker], *, kill_all: bool = False) -> int:
        """Reap dead orphans and kill those of dead workers, or all of them; returns how many are alive."""
        known = {worker.pid for worker in workers} | self.spared
        dead = [worker for worker in workers if worker.death is not None]
        alive = 0
        for pid in children() - known:
            fields = stat_fields(pid)
            alive += _end(pid, fields, kill_all or any(_belongs(pid, fields, worker) for worker in dead))
        return alive

    async def sweep(self, workers: Iterable[Worker], deadline_s: float) -> int:
        """Kill every orphan, and what that orphans; returns how many did not die in time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while True:
            self.changed.clear()
            alive = self.tend(workers, kill_all=True)
            left = end - loop.time()
            if alive == 0 or left <= 0:
                return alive
            await within(self.changed, min(left, POLL_S))


class Leftovers(Orphans):
    """The processes of a job's ranks that outlived their engine; they are children of this process now."""

    def __init__(self, root: Path, sessions: Collection[int]) -> None:
        """`root`: the job's directory; `sessions`: pids of the workers that the engine had."""
        super().__init__()
        self._sessions = {str(pid) for pid in sessions}
        self._mark = ERROR_FILE + os.fsencode(root) + b"/"
        self._ours: set[int] = set()

    def tend(self, workers: Iterable[Worker], *, kill_all: bool = False) -> int:
        """Kill the live ones and reap the dead ones; returns how many are alive."""
        alive = 0
        for pid in children():
            fields = stat_fields(pid)
            if fields and (pid in self._ours or fields[3] in self._sessions or self._is_marked(pid)):
                self._ours.add(pid)
                alive += _end(pid, fields, True)
        return alive

    def _is_marked(self, pid: int) -> bool:
        return any(entry.startswith(self._mark) for entry in environment(pid))


def end_all_marked(root: Path, deadline_s: float) -> bool:
    """Kill all that ranks of a job have started, whoever its parent is; returns whether all of it died in time.

    The agent that follows one killed together with its engine uses it. `root`: the job's directory; other nodes
    of the job may have the same path and see the same processes.
    """
    mark = ERROR_FILE + os.fsencode(root) + b"/"
    end = time.monotonic() + deadline_s
    while [pid for pid in _marked(mark) if has_same(pid, root, root) and _end(pid, stat_fields(pid), True)]:
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True


def _marked(mark: bytes) -> list[int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return [pid for pid in pids if any(entry.startswith(mark) for entry in environment(pid))]


def _end(pid: int, fields: list[str], kill: bool) -> bool:
    """Reap a dead child, or kill a live one if `kill`; returns whether it was alive."""
    if not fields or fields[0] in "ZX":
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        return False
    if kill:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return True


def _belongs(pid: int, fields: list[str], worker: Worker) -> bool:
    if fields[3:4] == [str(worker.pid)]:
        return True
    return ERROR_FILE + os.fsencode(worker.directory / "error.json") in environment(pid)


def exit_document(
    rank: RankProcess, death: Death, asked_ns: int | None, stopped_by_us: bool, evidence: RankExit
) -> RankExit:
    """Return the `Exit` of the wire."""
    return {
        "rank": rank.rank,
        "local_rank": rank.local_rank,
        "pid": rank.pid,
        "code": death.code,
        "signal": death.signal,
        "core": death.core,
        "t_ns": death.t_ns,
        "over_ns": rank.over_ns,
        "asked_ns": asked_ns,
        "sent": rank.sent,
        "stopped_by_us": stopped_by_us,
        **evidence,
    }
