"""Snapshots on real agents, each with a disk of its own: kept, copied, and put in place before the next group."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from remote_agent.base.proc import stat_fields
from tests.agents.engine_process import alive
from tests.agents.nodes import WAIT_S, Nodes
from tests.bench.resume import killed

# Rank 1 alone saves; all resume. A flag in the working directory of a node has its rank do something once.
SAVER = """
import os, time, zipfile
from pathlib import Path
rank, generation = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
step, path = 0, Path("snapshot.pt")
if path.exists():
    step = int(zipfile.ZipFile(path).read("snapshot/data.pkl"))
Path(f"resumed_{generation}_{rank}").write_text(str(step))
def asked(flag):
    found = Path(flag).exists()
    if found:
        os.remove(flag)
    return found
while not Path("stop").exists():
    step += 1
    print(f"step={step}", flush=True)
    if asked("save"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("snapshot/data/0", os.urandom(3_000_000))
            archive.writestr("snapshot/data.pkl", str(step))
        Path("saved").write_text(str(step))
    if asked("tear"):
        with path.open("r+b") as file:
            file.truncate(1_000_000)
        raise ValueError("killed while saving")
    time.sleep(0.02)
"""


class OwnDisks(Nodes):
    """Nodes with a work tree each; the last one is a spare."""

    def __init__(self, root: Path, count: int, script: str, **changes: Any) -> None:
        super().__init__(root, count, script, min_nodes=count - 1, max_nodes=count - 1, stop_grace=0.0, **changes)
        specs = (*self.spec.nodes[:-1], dataclasses.replace(self.spec.nodes[-1], spare=True))
        self.spec = dataclasses.replace(self.spec, nodes=specs, tree="tree", workdir=".")
        for name in self.nodes:
            self.tree(name).mkdir(parents=True)
            (self.tree(name) / "train.py").write_text(script)

    def tree(self, name: str) -> Path:
        """The working directory of a node."""
        return self.nodes[name].home / "trees" / "tree"

    async def copies(self, count: int) -> dict[str, Any]:
        """Return the newest snapshot once so many nodes have it."""
        found: list[dict[str, Any]] = []

        async def look() -> bool:
            found[:] = (await self.call("n1", "status"))["snapshots"][-1:]
            return bool(found) and len(found[0]["nodes"]) >= count

        await until(look)
        return found[0]


async def until_true(look: Callable[[], bool]) -> None:
    async def check() -> bool:
        return look()

    await until(check)


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    end = time.monotonic() + WAIT_S
    while not await look():
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


async def test_a_group_resumes_from_the_last_complete_snapshot_when_its_saver_is_gone(
    tmp_path: Path,
) -> None:
    nodes = OwnDisks(tmp_path, 3, SAVER, snapshots=("snapshot.pt",))
    async with nodes:
        await nodes.launch()
        pids = (await nodes.until("generation_running"))["detail"]["pids"]
        (nodes.tree("n2") / "save").touch()
        kept = await nodes.copies(2)
        # It is written after the snapshot.
        await until_true(lambda: bool(text_of(nodes.tree("n2") / "saved")))
        step = int(text_of(nodes.tree("n2") / "saved"))
        assert (kept["path"], kept["nodes"]) == ("snapshot.pt", ["n2", "n3"])
        # It is what its rank had printed by then, as far as the agent had read that.
        assert abs(kept["step"] - step) < 1000

        # Its own copy replaces one that was torn.
        (nodes.tree("n2") / "tear").touch()
        running = await nodes.until("generation_running", generation=1)
        pids = running["detail"]["pids"]
        chosen = (await nodes.until("snapshots_chosen", generation=1))["detail"]
        assert chosen["placed"]["n1"]["placed"] == {kept["id"]: "n2"}
        assert chosen["placed"]["n2"]["placed"] == {kept["id"]: None}
        assert await resumed(nodes, 1) == {"n1": step, "n2": step}

        # With the second heartbeat that has a step, the last line of the first has been taken.
        steps: set[int | None] = set()

        async def has_reported() -> bool:
            (rank,) = (await nodes.call("n1", "status"))["nodes"][1]["ranks"]
            steps.add(rank.get("step"))
            return len(steps - {None}) > 1

        await until(has_reported)
        agent = next(one["agent_pid"] for one in (await nodes.call("n1", "status"))["nodes"] if one["name"] == "n2")
        engine = int(stat_fields(pids["1"])[1])
        os.kill(agent, signal.SIGKILL)
        await nodes.nodes["n2"].close()
        await until_ended(pids["1"])
        # It removes what is its own before it ends.
        await until_ended(engine)
        shutil.rmtree(nodes.nodes["n2"].home)
        await nodes.until("generation_running", generation=2)
        chosen = (await nodes.until("snapshots_chosen", generation=2))["detail"]
        assert chosen["placed"]["n3"]["placed"] == {kept["id"]: None}
        assert await resumed(nodes, 2) == {"n1": step, "n3": step}

        incident = (await nodes.call("n1", "incidents"))["incidents"][-1]
        assert incident["category"] == "node_lost"
        assert incident["evidence"][-1]["text"].startswith("last output on n2: step=")
        for name in ("n1", "n3"):
            (nodes.tree(name) / "stop").touch()
        await nodes.until("job_succeeded")


async def resumed(nodes: OwnDisks, generation: int) -> dict[str, int]:
    """Return the step from which each of the two ranks has resumed, by node."""
    found: dict[str, int] = {}

    async def look() -> bool:
        for name in nodes.nodes:
            for path in nodes.tree(name).glob(f"resumed_{generation}_*"):
                if text := path.read_text():
                    found[name] = int(text)
        return len(found) == 2

    await until(look)
    return found


async def until_ended(pid: int) -> None:
    async def has_ended() -> bool:
        return not alive(pid)

    await until(has_ended)


def test_ranks_that_are_killed_while_they_save_leave_no_torn_snapshot_in_place(tmp_path: Path) -> None:
    """`python -m tests.bench.resume killed` does it more often."""
    assert "no torn snapshot" in killed(1, tmp_path, kills=4)
