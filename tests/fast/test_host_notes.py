"""What a host says of a death is read from its files as kernels and containers write them."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.vitals.host_notes import DEADLINE_S, MAX_CHARS, MAX_LINES, HostNotes

V2 = "low 0\nhigh 0\nmax 12\noom {0}\noom_kill {0}\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {0}\n"


def ended(signal: str | None = "SIGKILL", tail: str = "", **more: Any) -> Any:
    code = 1 if signal is None else None
    base = {"rank": 3, "pid": 4003, "code": code, "signal": signal, "stopped_by_us": False, "tail": tail, "error": None}
    return {**base, **more}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("own", "counters", "form", "reported"),
    [
        pytest.param("0::/job/task_0\n", "job/task_0/memory.events", V2, ["oom_kill 2", "oom 2"], id="v2"),
        pytest.param("0::/kubepods/pod1/x\n", "memory.events", V2, ["oom_kill 2", "oom 2"], id="container v2"),
        pytest.param("0::/../x\n", "memory.events", V2, ["oom_kill 2", "oom 2"], id="container beside"),
        pytest.param("0::/u/s\n", "u/memory.events", V2, ["oom_kill 2", "oom 2"], id="controller above"),
        pytest.param("9:memory:/job\n0::/job\n", "memory/job/memory.oom_control", V1, ["oom_kill 2"], id="v1"),
        pytest.param("3:cpu,memory:/docker/1\n", "memory/memory.oom_control", V1, ["oom_kill 2"], id="container v1"),
        pytest.param("0::/job\n", "job/memory.events", "broken\noom_kill x\n", [], id="unknown form"),
    ],
)
def test_kills_are_counted_from_the_start(
    tmp_path: Path, own: str, counters: str, form: str, reported: list[str]
) -> None:
    path = tmp_path / "sys/fs/cgroup" / counters
    write(tmp_path / "proc/self/cgroup", own)
    write(path, form.format(5))
    host = HostNotes(tmp_path)
    host.begin(tmp_path, tmp_path)
    assert host.notes(ended()) == []
    write(path, form.format(7))
    assert sorted(host.notes(ended())) == sorted(f"{path}: {each} since the workers started" for each in reported)
    assert host.notes(ended(None, "ValueError: x")) == [], "no death of memory's"
    assert bool(host.notes(ended(None, code=137))) == bool(reported), "a shell's word for SIGKILL"
    host.begin(tmp_path, tmp_path)
    assert host.notes(ended()) == []


def test_a_host_without_notes_is_not_quoted(tmp_path: Path) -> None:
    write(tmp_path / "dev/kmsg", "6,1,1,-;Out of memory: Killed process 4003 (python)\n")
    host = HostNotes(tmp_path)
    host.begin(tmp_path / "gone", tmp_path / "gone")
    assert host.notes(ended()) == [], "a file that stands for the kernel's log is none"
    assert host.notes(ended("SIGBUS", "OSError: [Errno 28] No space left on device: 'x'")) == []


def test_the_file_systems_that_count_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    host = HostNotes(tmp_path)
    host.begin(tmp_path, tmp_path)
    (shm,) = host.notes(ended("SIGBUS"))
    assert shm.startswith(f"{tmp_path}/dev/shm: ")
    error = {"message": "OSError: [Errno 28] No space left on device: '/proc/x/model.pt'"}
    (here,) = host.notes(ended(None, error=error))
    assert here.startswith(f"{tmp_path}: ")
    assert here.endswith(" MiB free afterwards")
    error = {"message": "OSError: [Errno 28] No space left on device: '/proc/model.pt'"}
    assert [line.partition(":")[0] for line in host.notes(ended(None, error=error))] == ["/proc", str(tmp_path)]


@pytest.mark.parametrize(
    ("blocks", "inodes", "reported"),
    [(3, 9, ": 0.0 of 0.8 MiB free afterwards"), (100, 0, ": 0.4 of 0.8 MiB free afterwards, no inode free")],
)
def test_a_full_disk_is_noted_whatever_the_script_could_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, inodes: int, reported: str
) -> None:
    host = HostNotes(tmp_path)
    host.begin(tmp_path, tmp_path / "gone")
    assert host.notes(ended(None)) == []
    space = SimpleNamespace(f_bavail=blocks, f_frsize=4096, f_blocks=200, f_files=9, f_favail=inodes)
    monkeypatch.setattr(os, "statvfs", lambda _: space)
    assert host.notes(ended(None)) == [f"{tmp_path}{reported}"]


def test_a_host_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cgroup")
    host = HostNotes(tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").symlink_to(tmp_path / "cgroup")

    async def ask() -> float:
        loop = asyncio.get_running_loop()
        before = loop.time()
        assert await host.explain(ended()) == []
        took = loop.time() - before
        threading.Thread(target=(tmp_path / "cgroup").write_text, args=("",)).start()
        return took

    assert asyncio.run(ask()) < DEADLINE_S + 1


def log_of_this_machine() -> HostNotes:
    host = HostNotes()
    if not host.knows_pids or not os.access("/dev/kmsg", os.W_OK):
        pytest.skip("needs a kernel's log that can be read and written, in the first pid namespace")
    return host


def say(*lines: str) -> None:
    """Write to the kernel's log, as its own code does."""
    for line in lines:
        with open("/dev/kmsg", "w") as log:
            log.write(f"<6>{line}\n")


def test_the_kernels_log_is_read_from_the_start_and_names_the_process(tmp_path: Path) -> None:
    host = log_of_this_machine()
    killed = "test: Memory cgroup out of memory: Killed process 4194305 (python)"
    mine = ended(pid=4194305)
    say(killed)
    host.begin(tmp_path, tmp_path)
    assert killed not in str(host.notes(mine))
    say(killed, "test: Out of memory: Killed process 14194305 (other)", "test: no news of 4194305")
    assert host.notes(mine) == [f"kernel: {killed}"]
    assert host.notes(mine) == [f"kernel: {killed}"], "the second rank that dies is told as much"
    assert host.notes(ended(pid=1)) == []
    loader = "RuntimeError: DataLoader worker (pid(s) 7, 4194305) exited unexpectedly"
    assert host.notes(ended(None, loader))[0] == f"kernel: {killed}"


def test_an_xid_is_that_of_the_process_that_it_names(tmp_path: Path) -> None:
    host = log_of_this_machine()
    host.begin(tmp_path, tmp_path)
    xid = "NVRM: Xid (PCI:0000:04:00): 31, pid={}, name=python, Ch 00000008, intr 00000000. MMU Fault"
    mine, other = xid.format(4194308), xid.format(4194309)
    unnamed = "NVRM: Xid (PCI:0000:04:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    say(mine, other, unnamed)
    message = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert host.notes(ended(None, message, pid=4194308)) == [f"kernel: {mine}", f"kernel: {unnamed}"]
    assert host.notes(ended("SIGSEGV", pid=4194310)) == [f"kernel: {unnamed}"]
    # In a container the kernel's pids are not those that we see.
    host.knows_pids = False
    assert host.notes(ended(None, message, pid=7))[:3] == [f"kernel: {line}" for line in (mine, other, unnamed)]
    assert host.notes(ended("SIGSEGV", pid=7))[:1] == [f"kernel: {unnamed}"]


def test_notes_are_bounded(tmp_path: Path) -> None:
    host = log_of_this_machine()
    host.begin(tmp_path, tmp_path)
    say(*(f"test: python[4194306]: segfault at {number} {'x' * 400}" for number in range(30)))
    lines = host.notes(ended("SIGSEGV", pid=4194306))
    assert 0 < len(lines) <= MAX_LINES
    assert {len(line) for line in lines} == {MAX_CHARS}
    assert "segfault at 29" in lines[-1]
