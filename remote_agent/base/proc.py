"""Processes: their entries in /proc, their limits, memory cgroup and Slurm step, the command that starts this program.

In: pids, the environment, commands. Out: fields of /proc; directories of the cgroup; what SIGTERM means; a command
line; what a program that was run to its end has printed.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from remote_agent.base.files import read_text

PR_SET_PDEATHSIG = 1
# The wait after SIGKILL is limited: a driver that hangs keeps its tool in the kernel forever.
KILL_S = 5.0
USER_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: [0] is the state; empty when the process is gone."""
    # The name in parentheses may contain spaces and parentheses.
    return read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None when it does not exist."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def runs(pid: int, started: int) -> bool:
    """Return whether the process that started then still runs: one that has ended keeps its pid until it is reaped."""
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in "ZX" and int(fields[19]) == started


def children() -> set[int]:
    """Return the pids of this process's children, including dead ones that are not reaped."""
    pids: set[int] = set()
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                pids.update(int(pid) for pid in file.read().split())
    except FileNotFoundError:
        # A thread ended in the meantime, or the kernel does not have this file.
        me = str(os.getpid())
        pids = {int(pid) for pid in os.listdir("/proc") if pid.isdigit() and stat_fields(int(pid))[1:2] == [me]}
    return pids


def reap(pid: int) -> None:
    """Reap a process that has ended, if it is our child."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def environment(pid: int) -> list[bytes]:
    """Return the variables that a process was started with, `NAME=value` each; none if it is gone or not ours."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def has_same(pid: int, path: str | Path, own: Path) -> bool:
    """Return whether what a process has at a path is our own file or directory: containers may have equal paths."""
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/root{path}"), os.stat(own))
    except OSError:
        return False


def own_command(*words: str, python: str = "") -> list[str]:
    """Return the command that starts this program in another mode, from a zipapp or from source.

    `python`: an interpreter other than this one.
    """
    program = sys.argv[0] if sys.argv[0].endswith(".pyz") else ""
    # -S: start files of the installation may print; __main__ runs them once stdout is not our wire.
    return [python or sys.executable, *(["-S", program] if program else ["-m", "remote_agent"]), *words]


def die_with_parent() -> None:
    """Make the kernel send SIGKILL to this process when the thread that has started it ends."""
    import ctypes  # only the children of the engine need it

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


async def run_program(
    command: list[str], timeout_s: float, variables: dict[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Run a program to its end; raises asyncio.TimeoutError (it is killed then, and what it started), OSError.

    `variables`: all that it has; None: those of this process.
    """
    import asyncio  # the callers have imported it; half of the processes that import this module have not

    child = await asyncio.create_subprocess_exec(
        *command,
        env=variables,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await asyncio.wait_for(child.communicate(), timeout_s)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(child.wait(), KILL_S)
        raise
    return child.returncode, out.decode(errors="replace"), err.decode(errors="replace")


def last_line(text: str) -> str:
    """Return the beginning of the last line that a program has printed."""
    return text.rstrip().rpartition("\n")[2][:300]


def raise_open_files() -> None:
    """Let this process have as many open files as the system permits: each connection and each log is one."""
    soft, hard = USER_OPEN_FILES
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def restore_open_files(pid: int) -> None:
    """Give a child the limit of open files that the user had: programs with `select` fail beyond 1024."""
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, USER_OPEN_FILES)


def slurm_ending() -> str:
    """Return why SIGTERM comes inside a Slurm step (scancel, time limit, preemption); empty outside of one."""
    return f"Slurm ends allocation {os.environ.get('SLURM_JOB_ID')} (SIGTERM)" if "SLURM_STEP_ID" in os.environ else ""


def cgroup_folders(controller: str, root: Path, pid: str = "self") -> Iterable[tuple[bool, Path]]:
    """Yield whether a process's cgroup is a v2 one and a directory that may hold its files, the most likely first.

    `controller`: memory or cpu. The path as a container sees it may begin at any of its parts.
    """
    text = read_text(root / "proc" / pid / "cgroup")
    top = root / "sys/fs/cgroup"
    groups = sorted((line.split(":", 2)[1:] for line in text.splitlines() if line.count(":") >= 2), reverse=True)
    for controllers, path in groups:
        if controllers and controller not in controllers.split(","):
            continue
        folder = Path(path.lstrip("/"))
        for each in (folder, *folder.parents):
            yield not controllers, (top / controller if controllers else top) / each
