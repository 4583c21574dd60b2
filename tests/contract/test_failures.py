"""What ends real ranks is told while it happens: category, rank, and what the host says of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote_agent.vitals.host_notes import HostNotes
from supervisor.postmortem.diagnosis import diagnose
from tests.agents.nodes import Nodes

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make file systems and cgroups of its own"),
]
MIB = 1 << 20
# Rank 1 fails, rank 0 waits for its end.
SCRIPT = """
import os, time
while os.environ["RANK"] == "0":
    time.sleep(1)
"""
OOM = """
open("/proc/self/oom_score_adj", "w").write("1000")
full = []
while True:
    full.append(bytearray(1 << 24))
"""
SEGV = "import ctypes; ctypes.string_at(0)"
SHM = """
import mmap
file = open("/dev/shm/full", "w+b")
file.truncate(1 << 23)
mmap.mmap(file.fileno(), 0)[:] = bytes(1 << 23)
"""
LOADER = """
import signal, torch
class Set(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)
for batch in torch.utils.data.DataLoader(Set(), num_workers=1):
    pass
"""
CHECKPOINT = 'import torch; torch.save(torch.zeros(1 << 20), "model.pt")'
KILL = "os.kill(os.getpid(), 9)"


def mounted(*commands: str) -> tuple[str, ...]:
    """Run what follows in a mount namespace of its own."""
    return ("unshare", "-m", "sh", "-ec", "\n".join((*commands, 'exec "$@"')), "sh")


SMALL_SHM = mounted("mount -t tmpfs -o size=4m tmpfs /dev/shm")
HIDE_LOG = "test ! -e /dev/kmsg || mount --bind /dev/null /dev/kmsg"


@pytest.mark.parametrize(
    ("script", "prefix", "category", "says", "reported"),
    [
        pytest.param(SEGV, (), "segfault", "killed by SIGSEGV", "", id="segfault"),
        pytest.param(SHM, SMALL_SHM, "bus_error_shm", "killed by SIGBUS", "/dev/shm: 0.0 of 4.0 MiB free", id="shm"),
        pytest.param(LOADER, (), "dataloader_worker_killed", "DataLoader worker", "/dev/shm: ", id="loader"),
        pytest.param(CHECKPOINT, (), "disk_full", "", "work: 0.0 of 1.0 MiB free", id="disk"),
        pytest.param(KILL, mounted(HIDE_LOG), "other", "killed by SIGKILL from outside", "", id="kill"),
    ],
)
def test_a_failure_is_reported_with_the_host_s_notes(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    script: str,
    prefix: tuple[str, ...],
    category: str,
    says: str,
    reported: str,
) -> None:
    if "torch" not in script:
        request.getfixturevalue("light_torch")
    if script is CHECKPOINT:
        work = tmp_path / "work"
        prefix = mounted(f"cd {tmp_path}; cp work/train.py .; mount -t tmpfs -o size=1m tmpfs {work}; cp train.py work")
    check(tmp_path, script, prefix, (category, says, reported))


@pytest.mark.usefixtures("light_torch")
@pytest.mark.parametrize("log", [True, False], ids=["kernel's log", "counters"])
def test_a_kill_for_memory_is_distinguished_from_a_manual_kill(tmp_path: Path, log: bool) -> None:
    if log and not HostNotes().knows_pids:
        pytest.skip("the kernel's log cannot be read here, or speaks of other pids")
    with cgroup(700 * MIB) as members:
        prefix = mounted(f"echo $$ > {members}", *([] if log else [HIDE_LOG]))
        reported = "Killed process" if log else "oom_kill 1 since the workers started"
        check(tmp_path, OOM, prefix, ("host_oom_kill", "killed by the host's OOM killer", reported))


def check(root: Path, script: str, prefix: tuple[str, ...], expected: tuple[str, str, str]) -> None:
    """Run two ranks: the incident and the one that `diagnose` finds in the files are what is expected."""
    category, says, reported = expected

    async def run() -> None:
        async with Nodes(root, 1, SCRIPT + script, nproc=2, prefix=prefix, max_restarts=0) as nodes:
            await nodes.launch()
            live = (await nodes.until("incident"))["detail"]
            await nodes.until("job_failed")
            (later,) = diagnose([nodes.journal("n1").parent])["incidents"]
            for incident in (live, later):
                assert (incident["category"], incident["culprit_ranks"]) == (category, [1]), incident
                assert says in incident["summary"], incident
                lines = [line["text"] for line in incident["evidence"]]
                assert any(reported in line for line in lines) or not reported, incident

    asyncio.run(run())


@contextlib.contextmanager
def cgroup(limit: int) -> Iterator[Path]:
    """Make a memory cgroup and yield the file that takes its members; the test is skipped where none can be made."""
    top = Path("/sys/fs/cgroup")
    is_old = (top / "memory").is_dir()
    group = (top / "memory" if is_old else top) / f"supervisor_test_{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        yield group / "cgroup.procs"
    finally:
        # The kernel tells nobody when the last process, the engine of a killed agent, is out of it.
        end = time.monotonic() + 10
        while time.monotonic() < end and group.is_dir():
            with contextlib.suppress(OSError):
                group.rmdir()
            time.sleep(0.02)
        assert not group.exists()
