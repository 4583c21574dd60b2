"""Stand in for an agent: start an engine, give an order, then do nothing until it is killed.

Arguments: root, what to wait for ("running", "import", "stop"), the script and its arguments.
"""

import asyncio
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.agents.engine_process import engine


async def main() -> None:
    root, phase, script, *args = sys.argv[1:]
    async with engine(Path(root)) as one:
        if phase != "import":
            await one.go(script, *args, generation=0, local_world_size=2)
            await one.wait_mains(0, 2)
            for rank in (0, 1):
                while not os.path.exists(args[0] + str(rank)):
                    await asyncio.sleep(0.01)
        if phase == "stop":
            stopping = asyncio.ensure_future(one.call("stop", generation=0, grace_s=60.0, collect=False))
            await asyncio.sleep(0.2)
            assert not stopping.done()
        print(one.process.pid, flush=True)
        await asyncio.sleep(600)


asyncio.run(main())
