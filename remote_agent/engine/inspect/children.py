"""What a rank's child processes are doing, such as DataLoader workers, and ranks that do not answer.

In: pids. Out: the kernel's view of each process, and its Python stack where py-spy is installed and permitted.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from remote_agent.base.files import read_text
from remote_agent.base.proc import stat_fields

if TYPE_CHECKING:
    from remote_agent.wire.answers import ChildProcess

T = TypeVar("T")
Tree = Mapping[int, "list[int]"]
# This is the limit for one rank; more children would add nothing new.
MAX_CHILDREN = 64
# One stack takes about 20 ms.
SPY_S = 2.0
AT_ONCE = 4
# A process that is blocked in the kernel may also block a reader of its /proc entries or its log.
KERNEL_S = 1.0
NAME_CHARS = 56
NOT_INSTALLED = "py-spy is not installed there, so child processes have no Python stacks"
NOT_ALLOWED = "py-spy is not permitted there: it needs kernel.yama.ptrace_scope = 0 or CAP_SYS_PTRACE"
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "is blocked in the kernel",
    "T": "is stopped",
    "Z": "is dead",
}
# System calls whose first argument is a file: read, write, pread, pwrite, readv, writev, recvfrom, fsync, fdatasync.
_ON_A_FILE = {"x86_64": (0, 1, 17, 18, 19, 20, 45, 74, 75), "aarch64": (63, 64, 65, 66, 67, 68, 82, 83, 207)}
# close returns when the last bytes have been written, for example to a bucket.
_CLOSE = {"x86_64": 3, "aarch64": 57}
_THREAD = re.compile(r'^Thread \S+ \([^)]*\)(?:: "(?P<name>.*)")?')
_FRAME = re.compile(r"^ +(?P<name>\S+) \((?P<file>.+):(?P<line>\d+)\)$")


def process_tree() -> dict[int, list[int]]:
    """Return the children of every process."""
    tree: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = stat_fields(int(name))
            if fields:
                tree.setdefault(int(fields[1]), []).append(int(name))
    return tree


def descendants(pid: int, tree: Tree) -> Iterator[int]:
    """Yield the process and all below it."""
    yield pid
    for child in tree.get(pid, ()):
        yield from descendants(child, tree)


async def children(pids: Iterable[int], tree: Tree) -> dict[int, list[ChildProcess]]:
    """Return every descendant, by ancestor; empty when the kernel is too slow."""
    return await in_time(lambda: {pid: _below(pid, tree) for pid in pids}) or {}


async def in_time(look: Callable[[], T]) -> T | None:
    """Run a function that reads files in a thread; returns None when it takes too long."""
    try:
        return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, look), KERNEL_S)
    except asyncio.TimeoutError:
        return None


def _below(pid: int, tree: Tree) -> list[ChildProcess]:
    processes: list[ChildProcess] = []
    for child in list(descendants(pid, tree))[1 : MAX_CHILDREN + 1]:
        fields, name = stat_fields(child), _name(child)
        # multiprocessing always starts this helper.
        if fields and "resource_tracker" not in name:
            processes.append({"pid": child, "name": name[:NAME_CHARS], "doing": _doing(child, fields[0])})
    return processes


def _name(pid: int) -> str:
    name = read_text(f"/proc/{pid}/comm").strip()
    if not name.startswith("python"):
        return name
    # The script's arguments may contain secrets. A forked process has the command line of its rank.
    words = read_text(f"/proc/{pid}/cmdline").split("\0")[1:]
    script = next((word for word in words if word and not word.startswith(("-", "supervisor="))), "")
    if "-c" in words and not script.startswith("from multiprocessing."):
        script = "-c"
    return f"{name} {os.path.basename(script.partition(';')[0])}".strip()


def _doing(pid: int, state: str) -> str:
    """Return the state of a process, the kernel function that it waits in, and the file."""
    doing = _STATES.get(state, f"is in state {state}")
    # The compiler appends suffixes after a dot.
    where = read_text(f"/proc/{pid}/wchan").strip().partition(".")[0]
    if where not in ("", "0"):
        doing += f" in {where}"
    _, target = _call(pid)
    return f"{doing} on {target}" if target else doing


def _call(pid: int) -> tuple[int | None, str]:
    """Return the system call of a process's main thread, and the file when it reads or writes one."""
    call = read_text(f"/proc/{pid}/syscall").split()
    if len(call) < 2 or not call[0].isdigit():
        return None, ""
    number = int(call[0])
    if number not in _ON_A_FILE.get(os.uname().machine, ()):
        return number, ""
    try:
        target = os.readlink(f"/proc/{pid}/fd/{int(call[1], 16)}")
    except OSError:
        return number, ""
    return number, target if target.startswith("/") else ""


def is_at_a_file(pid: int) -> bool:
    """Return whether the kernel reads, writes or closes a file for a process, for example one in a bucket.

    With FUSE the process sleeps meanwhile; to look at the file itself could block the caller.
    """
    number, target = _call(pid)
    is_closing = number is not None and number == _CLOSE.get(os.uname().machine)
    return is_closing or (bool(target) and not target.startswith("/dev/"))


async def spy(pids: Iterable[int]) -> tuple[dict[int, str], str]:
    """Return Python stacks by pid in faulthandler's format, and why some may be missing."""
    places = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    program = shutil.which("py-spy", path=places)
    if program is None:
        return {}, NOT_INSTALLED
    gate = asyncio.Semaphore(AT_ONCE)
    loop = asyncio.get_running_loop()
    end = loop.time() + SPY_S

    async def one(pid: int) -> tuple[str, str]:
        async with gate:
            left_s = end - loop.time()
            if left_s <= 0:
                return "", f"py-spy took longer than {SPY_S:g} s there"
            return await loop.run_in_executor(None, partial(_spy, program, pid, left_s))

    asked = list(pids)
    answers = await asyncio.gather(*(one(pid) for pid in asked))
    notes = [note for _, note in answers if note]
    return {pid: text for pid, (text, _) in zip(asked, answers) if text}, notes[0] if notes else ""


def _spy(program: str, pid: int, timeout_s: float) -> tuple[str, str]:
    """Return the stack of one process, or why there is none; both empty if it has ended or is not Python."""
    # --nonblocking does not stop the process, and one that hangs does not change.
    command = [program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False, encoding="utf-8"
        )
    except subprocess.TimeoutExpired:
        return "", f"py-spy took longer than {SPY_S:g} s there"
    except (OSError, ValueError) as error:
        return "", f"cannot run py-spy there: {error}"
    return as_faulthandler(done.stdout), NOT_ALLOWED if "ermission denied" in done.stderr.lower() else ""


def as_faulthandler(dump: str) -> str:
    """Return py-spy's dump in Python's own format, the main thread last; empty without frames."""
    blocks: list[tuple[str, list[str]]] = []
    is_own = True
    for line in dump.splitlines():
        thread, frame = _THREAD.match(line), _FRAME.match(line)
        if thread is not None:
            blocks.append((thread["name"] or "?", []))
            is_own = True
        elif frame is not None and blocks and is_own:
            # Stacks in Python's format have no class names.
            name = frame["name"].rpartition(".")[2]
            blocks[-1][1].append(f'  File "{frame["file"]}", line {frame["line"]} in {name}')
            # The frames below belong to the parent at the time of the fork.
            is_own = name != "_bootstrap" or not frame["file"].endswith("multiprocessing/process.py")
    blocks.sort(key=lambda block: block[0] == "MainThread")
    return "\n".join(
        "\n".join((f"Thread {name} (most recent call first):", *frames, "")) for name, frames in blocks if frames
    )
