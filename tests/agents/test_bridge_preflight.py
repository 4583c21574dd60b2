"""A preflight's requests to a node: they end with the connection, and a node in a poor state still answers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remote_agent.base.paths import Home
from remote_agent.base.proc import run_program
from remote_agent.bridge.probe import left_over
from remote_agent.wire import MAGIC, encode
from tests.agents.engine_process import await_death, await_variables

WAIT_S = 30.0


async def ask_and_hang_up(tmp_path: Path, repository: Path) -> tuple[int, str]:
    """Ask for facts where torch takes for ever to import, hang up meanwhile; return the status, the child's pid."""
    package = tmp_path / "slow" / "torch"
    package.mkdir(parents=True)
    fifo = tmp_path / "importing"
    os.mkfifo(fifo)
    text = f"import os, time\nopen({str(fifo)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    (package / "__init__.py").write_text(text)
    paths = os.pathsep.join([str(package.parent), str(repository)])
    bridge = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "remote_agent", "connect",
        env={**os.environ, "PYTHONPATH": paths, "SUPERVISOR_HOME": str(tmp_path / "home")},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert bridge.stdin is not None
        assert bridge.stdout is not None
        assert await bridge.stdout.readexactly(len(MAGIC)) == MAGIC
        bridge.stdin.write(encode({"id": 1, "op": "facts", "args": {"env": {}, "workdir": None, "address": ""}}))
        await bridge.stdin.drain()
        child = await asyncio.to_thread(fifo.read_text)
        bridge.stdin.close()
        return await bridge.wait(), child
    finally:
        if bridge.returncode is None:
            bridge.kill()
            await bridge.wait()


def test_a_preflight_ends_with_its_operator(tmp_path: Path, repository: Path) -> None:
    status, child = asyncio.run(asyncio.wait_for(ask_and_hang_up(tmp_path, repository), WAIT_S))
    assert status == 0
    assert not Path(f"/proc/{child}").exists()


def test_left_over_are_the_processes_of_a_lost_agent_not_those_of_another_home(tmp_path: Path) -> None:
    """As with two containers of a user on one machine, whose homes each have a job of that name."""
    homes = [Home(tmp_path / name) for name in ("one", "two")]
    processes = []
    try:
        for home in homes:
            home.job("job-1").make()
            words = [sys.executable, "-c", "input()", "remote_agent", "engine", "--job", "job-1"]
            env = {**os.environ, "SUPERVISOR_HOME": str(home.root)}
            processes.append(subprocess.Popen(words, env=env, stdin=subprocess.PIPE))
            await_variables(processes[-1].pid)
        listed = [left_over(home) for home in homes]
        assert listed == [[{"pid": process.pid, "mode": "engine", "job": "job-1"}] for process in processes]
    finally:
        for process in processes:
            process.communicate(b"\n")


def test_a_tool_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    """As a wrapper around nvidia-smi does it: what it has started holds its output."""
    began = time.monotonic()
    line = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(run_program(["sh", "-c", line], 5.0))
    assert time.monotonic() - began < 60.0
    await_death(int((tmp_path / "pid").read_text()))
