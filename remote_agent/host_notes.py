"""What this host knows of a worker's death: its kernel's log, its memory cgroup's counters, free space.

In: the start of a generation; how a worker ended and what it said. Out: lines for the verdict, bounded in number,
length and time; none where the host does not tell.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from remote_agent.diagnose.exits import signal_name

log = logging.getLogger(__name__)

SIGNALS = frozenset({"SIGKILL", "SIGBUS", "SIGSEGV", "SIGABRT"})
MAX_LINES = 20
MAX_CHARS = 300
# A death is told without notes rather than later: a file system that hangs must not hold up the restart.
DEADLINE_S = 0.2
# Half of that for a kernel that talks much.
LOG_S = 0.1
# More than the largest record that the kernel hands out.
RECORD_BYTES = 16 * 1024
# Of interest, since the generation's start.
KEPT = 500
KMSG = os.makedev(1, 11)
# The first pid namespace's, in every kernel: only there does the log speak of the pids that we know.
FIRST_PID_NAMESPACE = 0xEFFFFFFC

_SHM = re.compile(r"DataLoader worker|shared memory|posix_fallocate")
_DISK = re.compile(r"No space left on device|Errno 28\b|Disk quota exceeded|unexpected pos \d+ vs")
_OTHER = re.compile(r"[Cc]an.?t allocate memory|Cannot allocate memory|MemoryError|bad_alloc|CUDA error|ECC error")
_DISK_PATH = re.compile(r"No space left on device: '([^'\n]+)'")
_COUNTED = re.compile(r"(?m)^(oom_kill|oom) (\d+)$")
_LOADER_PIDS = re.compile(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\)")
_HARDWARE = re.compile(r"NVRM: Xid|Machine check|Hardware Error", re.I)
_PROCESS = re.compile(
    r"oom-kill|out of memory|oom_reaper|segfault at|traps: |general protection|Sending SIGBUS|page allocation failure",
    re.I,
)


class Host:
    """This host as a witness. Its methods that take time are called in a thread; `explain` does so."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._log = _open_log(root / "dev/kmsg")
        self.knows_pids = self._log >= 0 and _inode(root / "proc/self/ns/pid") == FIRST_PID_NAMESPACE
        """The log can be read, and the pids in it are those that this process sees."""
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT)
        self._cwd = self._logs = Path()
        self._before: dict[tuple[Path, str], int] = {}

    def begin(self, cwd: Path, logs: Path) -> None:
        """Forget what happened before the generation that starts now, whose workers run in cwd and write to logs."""
        with self._lock:
            self._cwd, self._logs = cwd, logs
            self._lines.clear()
            if self._log >= 0:
                os.lseek(self._log, 0, os.SEEK_END)
        self._before = self._counters()

    async def explain(self, ended: dict[str, Any]) -> list[str]:
        """Return what the host knows of this end, an Exit of the wire; nothing when that takes too long."""
        if ended["stopped_by_us"] or ended["code"] == 0:
            return []
        asking = asyncio.get_running_loop().run_in_executor(None, self.notes, ended)
        try:
            return await asyncio.wait_for(asking, DEADLINE_S)
        except asyncio.TimeoutError:
            log.warning("rank %s: what the host knows of its end takes too long to read", ended["rank"])
        except Exception:
            # Its death must be told whatever the host's files hold.
            log.exception("rank %s: what the host knows of its end cannot be read", ended["rank"])
        return []

    def notes(self, ended: dict[str, Any]) -> list[str]:
        """Return the lines; may wait for file systems."""
        text = f"{ended['tail']}\n{(ended['error'] or {}).get('message')}"
        signal = signal_name(ended["code"], ended["signal"])
        is_disk, is_shm = _DISK.search(text), signal == "SIGBUS" or _SHM.search(text)
        if signal not in SIGNALS and not (is_disk or is_shm or _OTHER.search(text)):
            return []
        pids = {str(ended["pid"])}
        pids.update(pid for named in _LOADER_PIDS.findall(text) for pid in re.findall(r"\d+", named))
        with self._lock:
            is_whole = self._read_log()
            found = self._kernel_lines(pids)
        # A kernel that names every process it kills and does not name ours tells more than a count of them.
        if not (self.knows_pids and is_whole):
            found += self._risen()
        folders = [self._root / "dev/shm"] if is_shm else []
        if is_disk:
            folders += [*(Path(self._cwd, name).parent for name in _DISK_PATH.findall(text)), self._cwd, self._logs]
        found += _spaces(folders)
        return [line[:MAX_CHARS] for line in found[:MAX_LINES]]

    def _kernel_lines(self, pids: set[str]) -> list[str]:
        named = re.compile(rf"\b(?:{'|'.join(sorted(pids))})\b")
        own = [line for line in self._lines if named.search(line)]
        general = _HARDWARE if self.knows_pids else re.compile(f"{_HARDWARE.pattern}|{_PROCESS.pattern}", re.I)
        # The newest of what is general: it stands nearest to the death.
        others = [line for line in self._lines if line not in own and general.search(line)]
        return [f"kernel: {line}" for line in [*own[-MAX_LINES // 2 :], *others[-MAX_LINES // 4 :]]]

    def _read_log(self) -> bool:
        """Take in what the kernel has said since the last time; tell whether that was all."""
        end = time.monotonic() + LOG_S
        while self._log >= 0 and time.monotonic() < end:
            try:
                record = os.read(self._log, RECORD_BYTES)
            except BlockingIOError:
                return True
            except BrokenPipeError:
                # What came next has been overwritten; the read after it goes on with what is there.
                continue
            text = record.partition(b";")[2].partition(b"\n")[0].decode("utf-8", "replace")
            if _HARDWARE.search(text) or _PROCESS.search(text):
                self._lines.append(text)
        return False

    def _counters(self) -> dict[tuple[Path, str], int]:
        """Return the counters of the memory cgroup that this process and its workers are in."""
        for is_v2, folder in memory_folders(self._root):
            path = folder / ("memory.events" if is_v2 else "memory.oom_control")
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            return {(path, name): int(count) for name, count in _COUNTED.findall(text)}
        return {}

    def _risen(self) -> list[str]:
        now = self._counters()
        risen = {key: count - self._before[key] for key, count in now.items() if count > self._before.get(key, count)}
        return [f"{path}: {name} {count} since the workers started" for (path, name), count in risen.items()]


def memory_folders(root: Path) -> Iterable[tuple[bool, Path]]:
    """Return where the files of this process's memory cgroup may stand, the likeliest first, and whether it is a v2.

    What a container sees may begin anywhere on the path.
    """
    try:
        text = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    top = root / "sys/fs/cgroup"
    groups = sorted((line.split(":", 2)[1:] for line in text.splitlines() if line.count(":") >= 2), reverse=True)
    for controllers, path in groups:
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = Path(path.lstrip("/"))
        for each in (folder, *folder.parents):
            yield not controllers, (top / "memory" if controllers else top) / each


def _open_log(path: Path) -> int:
    """Return the kernel's log, opened; -1 where there is none that this user may read, or something stands for it."""
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


def _spaces(folders: Iterable[Path]) -> list[str]:
    """Return how full the file systems of these folders are, each once."""
    found: dict[int, str] = {}
    for folder in folders:
        try:
            device, space = folder.stat().st_dev, os.statvfs(folder)
        except OSError:
            continue
        free, size = (blocks * space.f_frsize / (1 << 20) for blocks in (space.f_bavail, space.f_blocks))
        inodes = ", no inode free" if space.f_files and not space.f_favail else ""
        found.setdefault(device, f"{folder}: {free:.1f} of {size:.1f} MiB free afterwards{inodes}")
    return list(found.values())
