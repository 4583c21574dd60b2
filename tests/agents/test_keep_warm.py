"""What stays of a job that is over: a waiting process that becomes the ranks of the next job from the same tree."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from remote_agent.base.paths import Home
from remote_agent.bridge.probe import left_over
from tests.agents.engine_process import alive, await_death
from tests.agents.nodes import WAIT_S, Nodes, end_agent

SCRIPT = "import decimal, os\nprint('{word}', os.environ['SSH_CONNECTION'], flush=True)\n"


class Edits(Nodes):
    """One node on which one job follows another."""

    def __init__(self, root: Path, **changes: Any) -> None:
        defaults: dict[str, Any] = {"standby": "auto", "keep_warm": 600.0}
        super().__init__(root, 1, SCRIPT.format(word="first"), **{**defaults, **changes})
        self._first = self.spec

    async def run(self, job: str, word: str, **changes: Any) -> tuple[dict[str, Any], str]:
        """Run a job to its end; returns how its ranks were started, and what rank 0 printed."""
        await self.disconnect()
        self.spec = dataclasses.replace(self._first, job=job, **changes)
        (self.work / "train.py").write_text(SCRIPT.format(word=word))
        await self.launch()
        running = await self.until("generation_running")
        await self.until("job_succeeded")
        printed = self.journal("n1").parent / "generation_0" / "rank_0" / "stdout.log"
        return running["detail"]["starts"]["n1"], printed.read_text()

    async def ask(self, op: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask the node what needs no agent."""
        bridge = await self.nodes["n1"].connect()
        data: dict[str, Any] = (await bridge.call(op, args, timeout=WAIT_S)).data
        return data

    async def kept(self, job: str) -> dict[str, Any]:
        """Return the job as the node lists it, once it keeps its waiting process."""
        while True:
            row: dict[str, Any] = next(one for one in (await self.ask("jobs"))["jobs"] if one["job"] == job)
            if row["warm_until_ns"] is not None:
                return row
            await asyncio.sleep(0.05)

    def pid(self, job: str) -> int:
        """Return the pid of a job's agent."""
        return int((self.nodes["n1"].home / "jobs" / job / "agent.pid").read_text().split()[0])

    def all_pids(self) -> set[int]:
        """Return the pids of this node's processes: their home is in their variables."""
        mark = f"SUPERVISOR_HOME={self.nodes['n1'].home}".encode(), f"{self.nodes['n1'].home}/jobs/".encode()
        found = set()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if any(word in path.read_bytes() for word in mark):
                    found.add(int(path.parent.name))
            except OSError:
                continue
        return {pid for pid in found if alive(pid)}

    async def end(self) -> None:
        for path in self.nodes["n1"].home.glob("jobs/*/agent.pid"):
            end_agent(path)
        await self.disconnect()

    async def disconnect(self) -> None:
        """Have no operator."""
        for node in self.nodes.values():
            await node.close()


async def test_the_next_job_of_the_tree_is_warm_and_runs_the_edited_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Edits(tmp_path)
    monkeypatch.setenv("SSH_CONNECTION", "a login")
    try:
        assert await jobs.run("first-1", "one") == (
            {"warm": False, "why": "nothing was loaded before"},
            "one a login\n",
        )
        row = await jobs.kept("first-1")
        assert time.time() < row["warm_until_ns"] / 1e9 < time.time() + 600
        assert row["state"] == "succeeded"
        monkeypatch.setenv("SSH_CONNECTION", "another one")
        assert await jobs.run("other-2", "two") == ({"warm": True, "why": ""}, "two another one\n")
        assert jobs.pid("other-2") == jobs.pid("first-1")
        assert left_over(Home(jobs.nodes["n1"].home)) == []
        # It takes other arguments.
        assert await jobs.run("third-3", "three", args=("-v",)) == (
            {"warm": True, "why": ""},
            "three another one\n",
        )
        # Another script leaves it alone.
        (jobs.work / "else.py").write_text("")
        assert not (await jobs.run("third-4", "four", script="else.py"))[0]["warm"]
        assert jobs.pid("third-4") != jobs.pid("third-3")
        await jobs.kept("third-3")
        await jobs.kept("third-4")
        assert sorted((await jobs.ask("clean"))["removed"]) == ["first-1", "other-2", "third-3", "third-4"]
        await jobs.disconnect()
        while jobs.all_pids():
            await asyncio.sleep(0.05)
    finally:
        await jobs.end()


async def test_what_is_kept_ends_with_its_owner_and_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "")

    async def run(how: str) -> None:
        (tmp_path / how).mkdir()
        jobs = Edits(tmp_path / how, keep_warm=1.0 if how == "time" else 600.0)
        try:
            await jobs.run("first-1", "one")
            agent = jobs.pid("first-1")
            if how != "time":
                await jobs.kept("first-1")
                engine, *_ = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
                os.kill(int(engine) if how == "engine" else agent, END_BY[how])
            await jobs.disconnect()
            while jobs.all_pids():
                await asyncio.sleep(0.05)
            await asyncio.to_thread(await_death, agent)
            (row,) = (await jobs.ask("jobs"))["jobs"]
            assert (row["warm_until_ns"], row["live"]) == (None, False)
        finally:
            await jobs.end()

    await asyncio.gather(*(run(how) for how in ("time", *END_BY)))


END_BY = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM, "engine": signal.SIGKILL}
