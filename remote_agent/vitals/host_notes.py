"""What this host logged about a worker's death: the kernel's log, the memory cgroup's counters, free space.

In: the start of a generation; how a worker ended and what it printed. Out: lines for the verdict, bounded in number,
length and time; none where the host logs nothing.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import math
import os
import re
import stat
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.base.files import read_text
from remote_agent.base.proc import cgroup_folders
from remote_agent.diagnose.exits import signal_name

if TYPE_CHECKING:
    from remote_agent.wire.documents import RankExit

log = logging.getLogger(__name__)

SIGNALS = frozenset({"SIGKILL", "SIGBUS", "SIGSEGV", "SIGABRT"})
MAX_LINES = 20
MAX_CHARS = 300
# After this time a death is reported without notes: a file system that hangs must not delay the restart.
DEADLINE_S = 0.2
# Reading the kernel's log takes at most this long; it may be large.
LOG_S = 0.1
# If less than this is free, the next lines of a log and an error file may not fit.
FULL_BYTES = 48 * 1024
# This is larger than the kernel's largest record.
RECORD_BYTES = 16 * 1024
# At most this many relevant lines since the generation's start are stored.
MAX_STORED = 500
KMSG = os.makedev(1, 11)
# In every kernel, the first pid namespace has this inode. Only there does the log name the pids that we see.
FIRST_PID_NAMESPACE = 0xEFFFFFFC

_SHM = re.compile(r"DataLoader worker|shared memory|posix_fallocate")
_DISK = re.compile(r"No space left on device|Errno 28\b|Disk quota exceeded|unexpected pos \d+ vs")
_OTHER = re.compile(r"[Cc]an.?t allocate memory|Cannot allocate memory|MemoryError|bad_alloc|CUDA error|ECC error")
_DISK_PATH = re.compile(r"No space left on device: '([^'\n]+)'")
_COUNTED = re.compile(r"(?m)^(oom_kill|oom) (\d+)$")
_LOADER_PIDS = re.compile(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\)")
_HARDWARE = re.compile(r"NVRM: Xid|Machine check|Hardware Error", re.I)
# The driver names the process that made an error, if one did.
_XID_OF = re.compile(r"NVRM: Xid .*\bpid='?\d")
_CUDA = re.compile(r"\bCUDA\b")
_PROCESS = re.compile(
    r"oom-kill|out of memory|oom_reaper|segfault at|traps: |general protection|Sending SIGBUS|page allocation failure",
    re.I,
)


class HostNotes:
    """Reads the host's logs and counters. Its slow methods run in a thread, which `explain` does."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._log = _open_log(root / "dev/kmsg")
        self.knows_pids = self._log >= 0 and _inode(root / "proc/self/ns/pid") == FIRST_PID_NAMESPACE
        """Whether the log is readable and its pids are those of this process's namespace."""
        self._lines: collections.deque[str] = collections.deque(maxlen=MAX_STORED)
        self._cwd = self._logs = Path()
        self._before: dict[tuple[Path, str], int] = {}

    def begin(self, cwd: Path, logs: Path) -> None:
        """Forget what happened before a generation that runs in `cwd` and writes to `logs`."""
        with self._lock:
            self._cwd, self._logs = cwd, logs
            self._lines.clear()
            if self._log >= 0:
                os.lseek(self._log, 0, os.SEEK_END)
        self._before = self._counters()

    async def explain(self, ended: RankExit) -> list[str]:
        """Return the host's notes on this Exit; none when reading them takes too long."""
        if ended["stopped_by_us"] or ended["code"] == 0:
            return []
        asking = asyncio.get_running_loop().run_in_executor(None, self.notes, ended)
        try:
            return await asyncio.wait_for(asking, DEADLINE_S)
        except asyncio.TimeoutError:
            log.warning("rank %s: reading the host's log about its end takes too long", ended["rank"])
        except Exception:
            # The death must be reported whatever these files contain.
            log.exception("rank %s: cannot read the host's log about its end", ended["rank"])
        return []

    def notes(self, ended: RankExit) -> list[str]:
        """Return the lines; may block on file systems."""
        text = f"{ended['tail']}\n{(error := ended['error']) and error['message']}"
        signal = signal_name(ended["code"], ended["signal"])
        is_disk, is_shm = _DISK.search(text), signal == "SIGBUS" or _SHM.search(text)
        if signal not in SIGNALS and not (is_disk or is_shm or _OTHER.search(text)):
            # On a full disk a script cannot report anything.
            return _spaces((self._cwd, self._logs), FULL_BYTES)
        pids = {str(ended["pid"])}
        pids.update(pid for named in _LOADER_PIDS.findall(text) for pid in re.findall(r"\d+", named))
        with self._lock:
            is_complete = self._read_log()
            lines = self._kernel_lines(pids, bool(_CUDA.search(text)))
        # When the log names every killed process, the counters add nothing.
        if not (self.knows_pids and is_complete):
            lines += self._risen()
        folders = [self._root / "dev/shm"] if is_shm else []
        if is_disk:
            folders += [*(Path(self._cwd, name).parent for name in _DISK_PATH.findall(text)), self._cwd, self._logs]
        lines += _spaces(folders)
        return [line[:MAX_CHARS] for line in lines[:MAX_LINES]]

    def _kernel_lines(self, pids: set[str], has_cuda_error: bool) -> list[str]:
        """Return the lines about these processes, then those about the host.

        An Xid of another process is not ours. Where pids cannot be compared, it counts if the rank itself has reported
        an error of CUDA.
        """
        named = re.compile(rf"\b(?:{'|'.join(sorted(pids))})\b")
        own = [line for line in self._lines if named.search(line)]
        general = _HARDWARE if self.knows_pids else re.compile(f"{_HARDWARE.pattern}|{_PROCESS.pattern}", re.I)
        # The newest of the general lines are the nearest to the death.
        others = [line for line in self._lines if line not in own and general.search(line)]
        if self.knows_pids or not has_cuda_error:
            others = [line for line in others if not _XID_OF.search(line)]
        return [f"kernel: {line}" for line in [*own[-MAX_LINES // 2 :], *others[-MAX_LINES // 4 :]]]

    def _read_log(self) -> bool:
        """Read the kernel's new records; returns whether it reached the end of the log."""
        end = time.monotonic() + LOG_S
        while self._log >= 0 and time.monotonic() < end:
            try:
                record = os.read(self._log, RECORD_BYTES)
            except BlockingIOError:
                return True
            except BrokenPipeError:
                # The next records were overwritten; the next read continues after them.
                continue
            text = record.partition(b";")[2].partition(b"\n")[0].decode("utf-8", "replace")
            if _HARDWARE.search(text) or _PROCESS.search(text):
                self._lines.append(text)
        return False

    def _counters(self) -> dict[tuple[Path, str], int]:
        """Return the OOM counters of the memory cgroup that this process and its workers are in."""
        for is_v2, folder in cgroup_folders("memory", self._root):
            path = folder / ("memory.events" if is_v2 else "memory.oom_control")
            if text := read_text(path):
                return {(path, name): int(count) for name, count in _COUNTED.findall(text)}
        return {}

    def _risen(self) -> list[str]:
        now = self._counters()
        risen = {key: count - self._before[key] for key, count in now.items() if count > self._before.get(key, count)}
        return [f"{path}: {name} {count} since the workers started" for (path, name), count in risen.items()]


def _open_log(path: Path) -> int:
    """Return a descriptor of the kernel's log; -1 when it is not readable or another file is in its place."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return -1
    status = os.fstat(opened)
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == KMSG:
        return opened
    os.close(opened)
    return -1


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _spaces(folders: Iterable[Path], below: float = math.inf) -> list[str]:
    """Return the free space of each file system that these folders are on, where it has fewer bytes or no inode."""
    lines: dict[int, str] = {}
    for folder in folders:
        try:
            device, space = folder.stat().st_dev, os.statvfs(folder)
        except OSError:
            continue
        free, size = (blocks * space.f_frsize for blocks in (space.f_bavail, space.f_blocks))
        inodes = ", no inode free" if space.f_files and not space.f_favail else ""
        if free < below or inodes:
            mib = 1 << 20
            lines.setdefault(device, f"{folder}: {free / mib:.1f} of {size / mib:.1f} MiB free afterwards{inodes}")
    return list(lines.values())
