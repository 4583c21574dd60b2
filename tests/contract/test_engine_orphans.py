"""When the agent dies, however it dies, nothing that its engine started lives two seconds later."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.agents.engine_process import SCRIPTS, alive, await_death, children_of, engine


@pytest.mark.parametrize("phase", ["running", "stop", "import"])
def test_nothing_lives_after_the_agent(tmp_path: Path, phase: str) -> None:
    words = [str(SCRIPTS / "agent_stand_in.py"), str(tmp_path / "job"), phase]
    stand_in = subprocess.Popen(
        [sys.executable, *words, str(SCRIPTS / "stubborn.py"), f"{tmp_path}/pids"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert stand_in.stdout is not None
    try:
        pid = int(stand_in.stdout.readline())
    finally:
        stand_in.send_signal(signal.SIGKILL)
        stand_in.wait()
        stand_in.stdout.close()
    killed = time.monotonic()
    pids = [pid]
    if phase != "import":
        pids += [int(pid) for rank in (0, 1) for pid in (tmp_path / f"pids{rank}").read_text().split()]
        assert len(pids) == 9
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() - killed < 30.0:
        time.sleep(0.01)
    print(f"{phase}: all gone after {(time.monotonic() - killed) * 1000:.0f} ms")
    assert left == []
    assert list(tmp_path.glob("job/generation_*/.run-*")) == []


async def test_a_start_that_nobody_waits_for_any_more_leaves_nothing(tmp_path: Path) -> None:
    async with engine(tmp_path) as one:
        await one.call("hello")
        going = asyncio.ensure_future(one.go(SCRIPTS / "stubborn.py", f"{tmp_path}/pids", local_world_size=16))
        while not (tmp_path / "generation_0" / "rank_15").exists():
            await asyncio.sleep(0)
        going.cancel()
        await asyncio.wait({going})
        assert await one.call("stop", generation=0, grace_s=0.0) == {"exits": [], "stacks": {}}
        # It needs the thread that starts workers.
        await one.call("prepare", generation=1, host="127.0.0.1", hold=False)
        # Those that had begun to run are killed.
        for child in children_of(one.process.pid):
            await asyncio.to_thread(await_death, child)
