"""torch's own agent under the engine: its ranks are reported, it ends when told, and nothing of it stays."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.agent.engine_process import SCRIPTS, EngineProcess, alive, engine

pytestmark = pytest.mark.torch
STEP = 'import os; print("count", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], flush=True); '


async def go(one: EngineProcess, script: str | Path, *args: str, ranks: int = 1, **changes: Any) -> dict[str, Any]:
    """Start torch's agent of a group of this node alone, on a store of this engine; returns the answer."""
    opened = await one.call("prepare", generation=0, host="127.0.0.1", port=0, hold=True)
    meeting = {
        "backend": "c10d",
        "endpoint": f"127.0.0.1:{opened['port']}",
        "run_id": "run",
        "nnodes": "1",
        "conf": "",
        "is_ours": True,
        "local_addr": "127.0.0.1",
        **changes.pop("meeting", {}),
    }
    return await one.go(script, *args, local_world_size=ranks, rendezvous=meeting, shutdown_timeout=1, **changes)


def pids_of(one: EngineProcess) -> list[int]:
    return [int(rank["pid"]) for rank in one.assigned[-1]["ranks"]]


async def gone(pids: list[int], seconds: float = 2.0) -> list[int]:
    """Wait until none of them lives; returns those that still do."""
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return left


def test_ranks_are_assigned_run_and_end(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine(tmp_path) as one:
            (tmp_path / "ends.py").write_text(STEP + "import sys; print(sys.argv[1:])")
            answer = await go(one, "ends.py", "$$", "${local_rank}", ranks=2, restart_count=4)
            assert answer["ranks"] == []
            exits = await one.wait_exits(0, 2)
            assert [(ended["rank"], ended["code"], ended["stopped_by_us"]) for ended in exits] == [
                (0, 0, False),
                (1, 0, False),
            ]
            assert [rank["rank"] for rank in one.assigned[0]["ranks"]] == [0, 1]
            assert one.assigned[0]["world_size"] == 2
            assert set(one.mains) == {(0, 0), (0, 1)}
            assert one.text(rank=1) == "count 4 1\n['$$', '${local_rank}']\n"

    asyncio.run(run())


def test_the_rank_that_failed_is_told_from_those_that_torch_stopped(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine(tmp_path) as one:
            text = (
                'import os, time\nif os.environ["RANK"] == "1": raise OSError(28, "No space left")\ntime.sleep(600)\n'
            )
            (tmp_path / "breaks.py").write_text(text)
            await go(one, "breaks.py", ranks=2)
            first, second = await one.wait_exits(0, 2)
            assert (second["code"], second["stopped_by_us"]) == (1, False)
            assert second["error"]["message"] == "OSError: [Errno 28] No space left"
            assert second["notes"][0].startswith(f"{tmp_path}: ")
            assert (first["signal"], first["stopped_by_us"], first["notes"]) == ("SIGTERM", True, [])

    asyncio.run(run())


def test_stop_shows_stacks_and_ends_what_ignores_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine(tmp_path) as one:
            await go(one, SCRIPTS / "stubborn.py", f"{tmp_path}/pids", ranks=2)
            await one.wait_mains(0, 2)
            while not all((tmp_path / f"pids{rank}").exists() for rank in (0, 1)):
                await asyncio.sleep(0.02)
            pids = [int(pid) for rank in (0, 1) for pid in (tmp_path / f"pids{rank}").read_text().split()]
            stopped = await one.call("stop", generation=0, grace_s=1.0, collect=True)
            assert all(ended["stopped_by_us"] for ended in stopped["exits"])
            assert len(stopped["exits"]) == 2
            assert await gone([*pids, *pids_of(one)]) == []
            assert list(tmp_path.glob("generation_0/.run-*")) == []

    asyncio.run(run())


@pytest.mark.parametrize("victim", ["engine", "agent"])
def test_nothing_outlives_its_engine_or_torchs_agent(tmp_path: Path, victim: str) -> None:
    async def run() -> None:
        async with engine(tmp_path) as one:
            (tmp_path / "waits.py").write_text("import time; time.sleep(600)")
            answer = await go(one, "waits.py", ranks=2)
            await one.wait_mains(0, 2)
            os.kill(one.process.pid if victim == "engine" else answer["agent"]["pid"], signal.SIGKILL)
            assert await gone([*pids_of(one), answer["agent"]["pid"]]) == []
            if victim == "agent":
                exits = await one.wait_exits(0, 2)
                assert {ended["stopped_by_us"] for ended in exits} == {False}
            else:
                await one.process.wait()

    asyncio.run(run())


def test_the_next_group_may_meet_at_the_same_port(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine(tmp_path) as one:
            first = await one.call("prepare", generation=0, host="127.0.0.1", port=0, hold=True)
            again = await one.call("prepare", generation=1, host="127.0.0.1", port=first["port"], hold=True)
            assert again == first

    asyncio.run(run())


def test_torchs_own_trouble_is_told(tmp_path: Path) -> None:
    async def run() -> None:
        async with engine(tmp_path) as one:
            (tmp_path / "never.py").write_text("")
            await go(one, "never.py", meeting={"nnodes": "2", "conf": "join_timeout=1"})
            assert "RendezvousTimeoutError" in (await one.wait_failed())["message"]

    asyncio.run(run())
