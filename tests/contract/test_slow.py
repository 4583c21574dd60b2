"""A job that limps says whom the others wait for, what it does, where, and why; a healthy one says nothing.

Real hosts with sshd, real torch over gloo. Each way takes a minute, so most are for `make nightly`; SUPERVISOR_SLOW
names some of them, with commas between.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.agents.engine_process import SCRIPTS
from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import Job, until
from tests.examples import nightly

SCRIPT = (SCRIPTS / "limps.py").read_text()
CHOSEN = frozenset(filter(None, os.environ.get("SUPERVISOR_SLOW", "").split(",")))
WITHIN_S = 150.0
SILENT_S = float(os.environ.get("SUPERVISOR_SILENT_S", "100"))
pair, trio = hosts_of(2), hosts_of(3, scope="function")


class Way(NamedTuple):
    """How a job limps, and what must be said of it."""

    ranks: list[int]
    phase: str
    function: str | None = None
    cause: str | None = None


# In the order of the design.
WAYS = {
    "input": Way([1], "input", "read"),
    "workers": Way([1], "input", "train", "sleeps"),
    "collate": Way([1], "input", "collate"),
    "tokenize": Way([1], "script", "tokenize"),
    "taken": Way([1], "compute", None, "cpu_taken"),
    "throttled": Way([1], "compute", None, "throttled"),
    "batch": Way([1], "compute", None, "computes_more"),
    "checkpoint": Way([0], "checkpoint", "save"),
    "logging": Way([1], "logging", "emit"),
    "sleep": Way([1], "script", "naps", "sleeps"),
    "nap": Way([1], "script", "sleeps", "sleeps"),
    "gil": Way([1], "script", "counts"),
    "gc": Way([1], "script", "collects"),
    "evaluate": Way([0], "eval", "evaluate"),
    "hook": Way([1], "compute", "delays", "computes_more"),
    "all_input": Way([], "input", "read"),
    "bursts": Way([1], "compute"),
    "disk": Way([1], "script", "save_to_disk", "disk"),
}
SILENT = ("balanced", "pipeline", "jitter", "once", "compile")


def look(job: Job) -> None:
    """On Python 3.11, ranks of which none arrives last are looked at only on request."""
    for _ in range(2 if sys.version_info[:2] == (3, 11) else 0):
        print(job.run("why").stdout.decode())


def one(way: str) -> Any:
    """Return a way as a parameter: only the chosen ones, or the nightly ones, are tried."""
    return pytest.param(way, marks=() if way in CHOSEN else nightly)


@contextlib.contextmanager
def running(cluster: Cluster, work: Path, way: str, **more: object) -> Iterator[Job]:
    with Job(cluster, work, SCRIPT, way, nproc_per_node=1, hang_after=30.0, **more).start() as job:
        try:
            job.until_step(20)
            with HELPS[way](job) if way in HELPS else contextlib.nullcontext():
                yield job
        finally:
            # The next one has the same hosts.
            done = job.run("stop")
        assert done.returncode == 0, done.stderr.decode()


@contextlib.contextmanager
def busy_core(job: Job) -> Iterator[None]:
    """Another process on the core of rank 1."""
    command = ["taskset", "-c", "1", sys.executable, "-c", "while True: pass"]
    with job.cluster.popen("n2", command) as process:
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def bursts(job: Job) -> Iterator[None]:
    """Rank 1 is stopped for 60 of 100 ms."""
    code = f"""
import os, signal, time
while True:
    os.kill({job.pid(1)}, signal.SIGSTOP); time.sleep(0.06)
    os.kill({job.pid(1)}, signal.SIGCONT); time.sleep(0.04)
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()
            process.wait()
            os.kill(job.pid(1), signal.SIGCONT)


@contextlib.contextmanager
def quota(job: Job) -> Iterator[None]:
    """Rank 1 may use a third of a processor."""
    folder = Path(f"/sys/fs/cgroup/cpu/sv-test-{os.getpid()}")
    if not folder.parent.is_dir():
        pytest.skip("the processor's cgroup of version 1 is not mounted here")
    # The host sees no control groups yet.
    mounts = "mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/cpu && mount -t cgroup -o cpu none"
    assert job.cluster.exec("n2", ["sh", "-c", f"{mounts} /sys/fs/cgroup/cpu"]).returncode == 0
    folder.mkdir()
    try:
        (folder / "cpu.cfs_period_us").write_text("100000")
        (folder / "cpu.cfs_quota_us").write_text("35000")
        (folder / "cgroup.procs").write_text(str(job.pid(1)))
        yield
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            (folder.parent / "cgroup.procs").write_text(pid)
        until(lambda: not (folder / "cgroup.procs").read_text(), "the cgroup is in use")
        folder.rmdir()


HELPS: dict[str, Callable[[Job], Any]] = {"taken": busy_core, "bursts": bursts, "throttled": quota}


@pytest.mark.parametrize("way", [one(way) for way in WAYS])
def test_who_is_slow_is_named_with_the_line_and_the_reason(pair: Cluster, tmp_path: Path, way: str) -> None:
    wanted = WAYS[way]
    began = time.monotonic()
    with running(pair, tmp_path / "work", way) as job:
        stepped = time.monotonic()
        if not wanted.ranks:
            look(job)
        slow = job.until("slow", WITHIN_S)
        print(f"{way}: {time.monotonic() - stepped:.0f} s ({stepped - began:.0f}): {slow['detail']['message']}")
        detail = slow["detail"]
        assert detail["ranks"] == wanted.ranks, detail
        assert slow["node"] == (f"n{wanted.ranks[0] + 1}" if wanted.ranks else None), slow
        assert detail["phase"] == wanted.phase, detail
        assert (detail["cause"] or {"kind": None})["kind"] == wanted.cause, detail
        if wanted.function:
            assert (detail["place"]["file"], detail["place"]["function"]) == ("train.py", wanted.function), detail


@pytest.mark.parametrize("way", [one(way) for way in SILENT])
def test_of_a_healthy_job_nothing_is_said(pair: Cluster, tmp_path: Path, way: str) -> None:
    with running(pair, tmp_path / "work", way) as job:
        end = time.monotonic() + SILENT_S
        while time.monotonic() < end:
            assert [event for event in job.journal() if event["type"] == "slow"] == []
            time.sleep(1)


@pytest.mark.parametrize("way", [one("network")])
def test_the_network_of_one_host_is_named(trio: Cluster, tmp_path: Path, way: str) -> None:
    trio.limit("n3", 100)
    with running(trio, tmp_path / "work", way) as job:
        look(job)
        slow = job.until("slow", WITHIN_S)
        print(slow["detail"]["message"])
        assert (slow["node"], slow["detail"]["ranks"], slow["detail"]["phase"]) == ("n3", [], "network"), slow
