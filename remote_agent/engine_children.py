"""What the processes below a rank are doing, DataLoader workers for example, and ranks that do not answer themselves.

In: pids. Out: by process what the kernel tells, and Python's stack where py-spy is installed and may look; why not.
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
from typing import Any, TypeVar

from remote_agent.paths import stat_fields

Found = TypeVar("Found")
Tree = Mapping[int, "list[int]"]
# Of one rank: more say nothing new.
MAX_CHILDREN = 64
# A stack takes some 20 ms.
SPY_S = 2.0
AT_ONCE = 4
# What holds a process in the kernel may hold who reads of it, in /proc or in its log.
KERNEL_S = 1.0
NAME_CHARS = 56
NOT_INSTALLED = "py-spy is not installed there: of child processes only the kernel tells"
NOT_ALLOWED = "py-spy may not look into processes there: it needs kernel.yama.ptrace_scope = 0 or CAP_SYS_PTRACE"
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "is held by the kernel",
    "T": "is stopped",
    "Z": "is dead",
}
# System calls whose first argument is a file: read, write, pread, pwrite, readv, writev, recvfrom, fsync, fdatasync.
_ON_A_FILE = {"x86_64": (0, 1, 17, 18, 19, 20, 45, 74, 75), "aarch64": (63, 64, 65, 66, 67, 68, 82, 83, 207)}
# It ends when a file's last bytes have been written, to a bucket for example.
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


async def children(pids: Iterable[int], tree: Tree) -> dict[int, list[dict[str, Any]]]:
    """Return {pid, name, doing} of every process below these, by the pid above; empty where the kernel is too slow."""
    return await in_time(lambda: {pid: _below(pid, tree) for pid in pids}) or {}


async def in_time(look: Callable[[], Found]) -> Found | None:
    """Return what looking at files finds; None where it takes too long."""
    try:
        return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, look), KERNEL_S)
    except asyncio.TimeoutError:
        return None


def _below(pid: int, tree: Tree) -> list[dict[str, Any]]:
    found = []
    for child in list(descendants(pid, tree))[1 : MAX_CHILDREN + 1]:
        fields, name = stat_fields(child), _name(child)
        # multiprocessing's own helper is always there.
        if fields and "resource_tracker" not in name:
            found.append({"pid": child, "name": name[:NAME_CHARS], "doing": _doing(child, fields[0])})
    return found


def _name(pid: int) -> str:
    name = _read(pid, "comm").strip()
    if not name.startswith("python"):
        return name
    # What follows the script may hold secrets. A forked one has its rank's command line.
    words = _read(pid, "cmdline").split("\0")[1:]
    script = next((word for word in words if word and not word.startswith(("-", "supervisor="))), "")
    if "-c" in words and not script.startswith("from multiprocessing."):
        script = "-c"
    return f"{name} {os.path.basename(script.partition(';')[0])}".strip()


def _doing(pid: int, state: str) -> str:
    """Say what the kernel knows: the state, where in the kernel it waits, and on which file."""
    doing = _STATES.get(state, f"is in state {state}")
    # Behind a point stands what the compiler made of the function.
    where = _read(pid, "wchan").strip().partition(".")[0]
    if where not in ("", "0"):
        doing += f" in {where}"
    _, target = _call(pid)
    return f"{doing} on {target}" if target else doing


def _call(pid: int) -> tuple[int | None, str]:
    """Return the system call that a process's main thread is in, and the file where it reads or writes one."""
    call = _read(pid, "syscall").split()
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
    """Return whether the kernel reads, writes or closes a file for a process, one in a bucket for example.

    File systems that are programs themselves let it sleep meanwhile, and a look at the file could hold who looks.
    """
    number, target = _call(pid)
    is_closing = number is not None and number == _CLOSE.get(os.uname().machine)
    return is_closing or (bool(target) and not target.startswith("/dev/"))


def _read(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


async def spy(pids: Iterable[int]) -> tuple[dict[int, str], str]:
    """Return Python's stacks by pid, as faulthandler writes them, and why there may be fewer than asked for."""
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
    """Return the stack of one process, or why there is none; neither for one that is gone or is no Python."""
    # Without stopping it: a process that hangs stands still by itself.
    command = [program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False, encoding="utf-8"
        )
    except subprocess.TimeoutExpired:
        return "", f"py-spy took longer than {SPY_S:g} s there"
    except (OSError, ValueError) as error:
        return "", f"py-spy does not run there: {error}"
    return as_faulthandler(done.stdout), NOT_ALLOWED if "ermission denied" in done.stderr.lower() else ""


def as_faulthandler(dump: str) -> str:
    """Return the dump of py-spy as Python would write it, the main thread last; empty for one without frames."""
    blocks: list[tuple[str, list[str]]] = []
    is_own = True
    for line in dump.splitlines():
        thread, frame = _THREAD.match(line), _FRAME.match(line)
        if thread is not None:
            blocks.append((thread["name"] or "?", []))
            is_own = True
        elif frame is not None and blocks and is_own:
            # Python names functions without their classes.
            name = frame["name"].rpartition(".")[2]
            blocks[-1][1].append(f'  File "{frame["file"]}", line {frame["line"]} in {name}')
            # Below it stands where the parent was when it forked.
            is_own = name != "_bootstrap" or not frame["file"].endswith("multiprocessing/process.py")
    blocks.sort(key=lambda block: block[0] == "MainThread")
    return "\n".join(
        "\n".join((f"Thread {name} (most recent call first):", *frames, "")) for name, frames in blocks if frames
    )
