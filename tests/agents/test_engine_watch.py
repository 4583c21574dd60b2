"""A process's death is seen at once, with its reason, with and without pidfd."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from remote_agent.base.proc import children
from remote_agent.engine import processes as engine_watch
from remote_agent.engine.boot_dir import BootDirectory
from remote_agent.engine.launchers import own
from remote_agent.engine.launchers.launcher import LaunchContext
from remote_agent.engine.processes import Death, Orphans, Worker, exit_document
from remote_agent.engine.standby import Standby
from remote_agent.vitals.host_notes import HostNotes


def watched(tmp_path: Path, code: str) -> tuple[Worker, float]:
    """Run a Python process to its end; returns it as a worker, and how many seconds its death took to be seen."""

    async def run() -> tuple[Worker, float]:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code], start_new_session=True, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdin is not None
        worker = Worker(3, 1, process.pid, tmp_path)
        seen = asyncio.Event()
        worker.watch(lambda _worker: seen.set())
        assert worker.death is None
        start = time.monotonic()
        process.stdin.close()
        await asyncio.wait_for(seen.wait(), 30)
        seconds = time.monotonic() - start
        worker.look(lambda _worker: pytest.fail("it has died already"))
        # Still there to be reaped: nothing was stolen.
        process.wait()
        worker.end_watch()
        return worker, seconds

    return asyncio.run(run())


@pytest.mark.parametrize("pidfd", [True, False])
@pytest.mark.parametrize(
    ("end", "code", "number"),
    [
        ("pass", 0, None),
        ("os._exit(255)", 255, None),
        ("os.kill(os.getpid(), 9)", None, "SIGKILL"),
        ("os.kill(os.getpid(), 11)", None, "SIGSEGV"),
        ("os.kill(os.getpid(), 40)", None, "SIG40"),
    ],
)
def test_a_death_and_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pidfd: bool, end: str, code: int | None, number: str | None
) -> None:
    if not pidfd:
        monkeypatch.setattr(engine_watch, "_open_pidfd", lambda _pid: -1)
    before_ns = time.time_ns()
    worker, seconds = watched(tmp_path, f"import os, sys, time; sys.stdin.read(); {end}")
    assert worker.death is not None
    assert (worker.death.code, worker.death.signal) == (code, number)
    assert before_ns < worker.death.t_ns < time.time_ns()
    assert seconds < 30.0
    assert worker.started is not None


def test_a_core_is_reported() -> None:
    assert engine_watch.decode(os.CLD_DUMPED, signal.SIGSEGV, 5) == Death(None, "SIGSEGV", True, 5)
    assert engine_watch.decode(os.CLD_KILLED, signal.SIGSEGV, 5) == Death(None, "SIGSEGV", False, 5)


def test_the_document_has_the_form_of_the_wire(tmp_path: Path) -> None:
    worker, _ = watched(tmp_path, "import sys; sys.stdin.read(); sys.exit(4)")
    assert worker.death is not None
    document = exit_document(worker, worker.death, None, False, {"error": None, "tail": "x", "stderr_lines": 1})
    assert document == {
        "rank": 3,
        "local_rank": 1,
        "pid": worker.pid,
        "code": 4,
        "signal": None,
        "core": False,
        "t_ns": document["t_ns"],
        "over_ns": None,
        "asked_ns": None,
        "sent": None,
        "stopped_by_us": False,
        "error": None,
        "tail": "x",
        "stderr_lines": 1,
    }


def test_children_are_found() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process.pid in children()
    assert process.pid not in children()


def test_a_worker_that_the_bootstrap_did_not_reach_is_taken_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python may be a wrapper that drops PYTHONPATH."""
    monkeypatch.setattr(own, "SILENT_S", 0.05)

    async def run() -> list[tuple[str, dict[str, Any]]]:
        processes = [
            subprocess.Popen([sys.executable, "-S", "-c", "input()"], start_new_session=True, stdin=subprocess.PIPE)
            for _ in range(2)
        ]
        boot = BootDirectory(tmp_path)
        os.write(boot.pipe, b"main 0 5\n")
        workers = [Worker(rank, rank, process.pid, tmp_path) for rank, process in enumerate(processes)]
        orphans = Orphans()
        standby = Standby(orphans, asyncio.to_thread, lambda _facts: None)
        context = LaunchContext(HostNotes(), orphans, {}, asyncio.to_thread, standby)
        group = own.OwnGroup(context, 7, boot, workers, lambda: None, "")
        notices: list[tuple[str, dict[str, Any]]] = []
        heard = asyncio.Event()

        def tell(op: str, args: Any) -> None:
            notices.append((op, args))
            if len(notices) == 2:
                heard.set()

        group.watch(tell)
        await asyncio.wait_for(heard.wait(), 60)
        group.close()
        for process in processes:
            process.communicate(b"\n")
        return notices

    first, second = asyncio.run(run())
    assert first == ("main", {"generation": 7, "rank": 0, "t_ns": 5})
    assert second == ("main", {"generation": 7, "rank": 1, "t_ns": second[1]["t_ns"], "assumed": True})
    assert list(tmp_path.iterdir()) == []


def test_the_bootstrap_lies_where_pythonpath_can_name_it(tmp_path: Path) -> None:
    (tmp_path / "odd:home").mkdir()
    boot = BootDirectory(tmp_path / "odd:home")
    try:
        found = subprocess.run(
            [sys.executable, "-c", "import os; print(os.environ.get('PYTHONPATH'))"],
            env={**os.environ, "PYTHONPATH": str(boot.path), "RANK": "0"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        # The bootstrap takes itself off the path, so it was found.
        assert found.stdout == "None\n"
    finally:
        boot.close()
