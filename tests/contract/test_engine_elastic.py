"""torch's own agent under the engine: its ranks are reported, it ends when told, and nothing of it stays."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents.engine_process import DEADLINE_S, SCRIPTS, EngineProcess, SharedEngine, alive, engine

STEP = 'import os; print("count", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], flush=True); '


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    with SharedEngine(tmp_path_factory.mktemp("elastic")).running() as one:
        yield one


class Group:
    """Torch's agent of a group of this node alone, on a store of this engine."""

    def __init__(self, one: EngineProcess, generation: int) -> None:
        self.one = one
        self.generation = generation

    async def go(self, script: str | Path, *args: str, ranks: int = 1, **changes: Any) -> Any:
        """Start it; returns the answer."""
        opened = await self.one.call("prepare", generation=self.generation, host="127.0.0.1", port=0, hold=True)
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
        changes.update(local_world_size=ranks, generation=self.generation, rendezvous=meeting, shutdown_timeout=1)
        return await self.one.go(script, *args, **changes)

    async def exits(self) -> Any:
        return await self.one.wait_exits(self.generation, 2)

    async def stop(self, **options: Any) -> Any:
        return await self.one.call("stop", generation=self.generation, **options)

    @property
    def assigned(self) -> Any:
        return [one for one in self.one.assigned if one["generation"] == self.generation]

    async def pids(self) -> list[int]:
        """Return the ranks' pids, which torch's agent reports after they have begun."""
        await self.one.until(lambda: self.assigned, "assigned ranks")
        return [int(rank["pid"]) for rank in self.assigned[-1]["ranks"]]


def play(shared: SharedEngine, work: Callable[[Group], Awaitable[None]]) -> None:
    """Do something with a group, and end it."""
    group = Group(shared.engine, shared.generation())

    async def run() -> None:
        try:
            await work(group)
        finally:
            await group.stop(grace_s=0.0)

    shared.do(run())


async def gone(pids: list[int], seconds: float = DEADLINE_S) -> list[int]:
    """Wait until none of them lives; returns those that still do."""
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return left


def test_ranks_are_assigned_run_and_end(shared: SharedEngine) -> None:
    async def work(group: Group) -> None:
        (shared.root / "ends.py").write_text(STEP + "import sys; print(sys.argv[1:])")
        answer = await group.go("ends.py", "$$", "${local_rank}", ranks=2, restart_count=4)
        assert answer["ranks"] == []
        assert [(ended["rank"], ended["code"], ended["stopped_by_us"]) for ended in await group.exits()] == [
            (0, 0, False),
            (1, 0, False),
        ]
        assert [rank["rank"] for rank in group.assigned[0]["ranks"]] == [0, 1]
        assert group.assigned[0]["world_size"] == 2
        assert {rank for generation, rank in group.one.mains if generation == group.generation} == {0, 1}
        assert group.one.text(generation=group.generation, rank=1) == "count 4 1\n['$$', '${local_rank}']\n"

    play(shared, work)


def test_the_rank_that_failed_is_distinguished_from_those_that_torch_stopped(shared: SharedEngine) -> None:
    async def work(group: Group) -> None:
        text = 'import os, time\nif os.environ["RANK"] == "1": raise OSError(28, "No space left")\ntime.sleep(600)\n'
        (shared.root / "breaks.py").write_text(text)
        await group.go("breaks.py", ranks=2)
        first, second = await group.exits()
        assert (second["code"], second["stopped_by_us"]) == (1, False)
        assert second["error"]["message"] == "OSError: [Errno 28] No space left"
        assert second["notes"][0].startswith(f"{shared.root}: ")
        assert (first["signal"], first["stopped_by_us"], first["notes"]) == ("SIGTERM", True, [])

    play(shared, work)


def test_stop_shows_stacks_and_ends_what_ignores_it(shared: SharedEngine, tmp_path: Path) -> None:
    async def work(group: Group) -> None:
        await group.go(SCRIPTS / "stubborn.py", f"{tmp_path}/pids", ranks=2)
        await group.one.wait_mains(group.generation, 2)
        while not all((tmp_path / f"pids{rank}").exists() for rank in (0, 1)):
            await asyncio.sleep(0.02)
        pids = [int(pid) for rank in (0, 1) for pid in (tmp_path / f"pids{rank}").read_text().split()]
        stopped = await group.stop(grace_s=1.0, collect=True)
        assert all(ended["stopped_by_us"] for ended in stopped["exits"])
        assert len(stopped["exits"]) == 2
        assert await gone([*pids, *await group.pids()]) == []
        assert list(shared.root.glob(f"generation_{group.generation}/.run-*")) == []

    play(shared, work)


WAITS = "import time; time.sleep(600)"


def test_nothing_outlives_torchs_agent(shared: SharedEngine) -> None:
    async def work(group: Group) -> None:
        (shared.root / "waits.py").write_text(WAITS)
        agent = int((await group.go("waits.py", ranks=2))["agent"]["pid"])
        await group.one.wait_mains(group.generation, 2)
        pids = await group.pids()
        os.kill(agent, signal.SIGKILL)
        assert await gone([*pids, agent]) == []
        assert {ended["stopped_by_us"] for ended in await group.exits()} == {False}

    play(shared, work)


async def test_nothing_outlives_its_engine(tmp_path: Path) -> None:
    async with engine(tmp_path) as one:
        (tmp_path / "waits.py").write_text(WAITS)
        group = Group(one, 0)
        agent = int((await group.go("waits.py", ranks=2))["agent"]["pid"])
        await one.wait_mains(0, 2)
        pids = await group.pids()
        one.process.kill()
        assert await gone([*pids, agent]) == []
        await one.process.wait()


def test_the_next_group_may_meet_at_the_same_port(shared: SharedEngine) -> None:
    async def run() -> None:
        hold = {"host": "127.0.0.1", "hold": True}
        first = await shared.engine.call("prepare", generation=shared.generation(), port=0, **hold)
        again = await shared.engine.call("prepare", generation=shared.generation(), port=first["port"], **hold)
        assert again == first

    shared.do(run())


def test_an_error_of_torch_itself_is_reported(shared: SharedEngine) -> None:
    async def work(group: Group) -> None:
        (shared.root / "never.py").write_text("")
        await group.go("never.py", meeting={"nnodes": "2", "conf": "join_timeout=1"})
        failed = await group.one.wait_failed()
        assert failed["generation"] == group.generation
        assert "RendezvousTimeoutError" in failed["message"]

    play(shared, work)
