"""The ranks of a launch are forked from a process that has begun to load before their order came."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from tests.agents.engine_process import DEADLINE_S, alive, order
from tests.agents.test_standby import SCRIPT, Node, node

# A module that is loaded when the test lets it.
SLOW = "import os\nwith open(os.path.join(os.path.dirname(__file__), 'gate')) as gate:\n    gate.read()\n"


async def learn(root: Path) -> None:
    """Run the script once: its engine learns which modules it loads."""
    async with node(root) as one:
        assert (await one.go())[0] == "nothing was loaded before"
        assert (await one.warm())["state"] == "ready"


async def hello(one: Node, cwd: Path) -> Any:
    """Announce the ranks of a launch, as an agent does it; returns their order."""
    expected = order(
        one.root,
        one.script,
        str(one.root / "random"),
        cwd=str(cwd),
        local_world_size=2,
        standby=str(one.root / "standby"),
        env={"PYTHONPATH": str(one.installed)},
    )
    sizes = {"local_world_size": 0, "world_size": 0}
    await one.engine.call("hello", nproc="2", known=str(one.root / "torch.json"), order={**expected, **sizes})
    await one.engine.until(lambda: one.engine.standby, "standby")
    return expected


async def test_the_first_ranks_of_an_engine_are_warm(tmp_path: Path) -> None:
    await learn(tmp_path)
    async with node(tmp_path) as one:
        # It is known from another work tree what a script of that name loads.
        other = tmp_path / "other"
        other.mkdir()
        await hello(one, other)
        # It comes while the modules are loaded, and waits for them.
        assert (await one.go(cwd=str(other)))[0] == ""
        assert (await one.seen())[1]["twice"] == 1
        # An edited script changes nothing: only what is installed was loaded.
        one.script.write_text("print('edited')\n" + SCRIPT)
        assert (await one.go(cwd=str(other)))[0] == ""
        await one.seen()
        assert one.engine.text("stdout", one.generation, 1).startswith("edited")


async def test_the_first_ranks_of_a_script_that_is_new_here_are_forked_with_what_it_imports(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        await hello(one, one.tree)
        assert (await one.go())[0] == ""
        _, after = await one.seen()
        assert {"early", "early.uses"} <= set(after["names"])
        assert (after["twice"], after["written"]) == (1, "yes")
        # From then on it is known what they load besides: rank 0 notes it, which is read once they make steps.
        await one.seen(0)
        await one.engine.call("standby", generation=one.generation)
        (known,) = (tmp_path / "standby").iterdir()
        assert {"early", "early.uses", "random"} <= set(json.loads(known.read_text())["modules"])


async def test_ranks_that_wait_can_be_stopped(tmp_path: Path) -> None:
    """The process that loads for them stays: the next ranks may come soon."""
    await learn(tmp_path)
    async with node(tmp_path) as one:
        (one.installed / "early" / "base.py").write_text(SLOW)
        os.mkfifo(one.installed / "early" / "gate")
        going = asyncio.ensure_future(one.engine.call("go", **await hello(one, one.tree)))
        # Its directory is made just before it waits.
        while not list((tmp_path / "generation_0").glob(".run-*")):
            await asyncio.sleep(0.01)
        assert not going.done()
        await one.engine.call("stop", generation=0, grace_s=0.0)
        answer = await asyncio.wait_for(going, DEADLINE_S)
        assert answer["cold"] == "the waiting process was still loading modules"
        assert alive(one.engine.standby[-1]["pid"])
