"""The engine and the process that serves its stores: which answer belongs to which request."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

from remote_agent.engine.processes import Orphans
from remote_agent.engine.torch_processes import TorchProcesses


class StoreProcess:
    """The other end of the wire, in this process."""

    pid = 2**22 + 1

    def __init__(self) -> None:
        self.is_over = False

    async def start(self, _popen: Callable[..., Any], _job: str, wire: socket.socket) -> StoreProcess:
        self.wire = wire.dup()
        self.wire.setblocking(False)
        return self

    async def request(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(await asyncio.get_running_loop().sock_recv(self.wire, 65536))
        return data

    def say(self, **message: Any) -> None:
        self.wire.send(json.dumps(message).encode())

    def kill(self) -> None:
        self.is_over = True

    def wait(self) -> int:
        return -9


def test_a_request_that_overtakes_the_store_of_the_launch_gets_its_own_answer() -> None:
    async def run() -> None:
        process, failures = StoreProcess(), list[str]()
        torch = TorchProcesses("job", process.start, Orphans(), failures.append)
        await torch.serve("n1", socket.create_server(("127.0.0.1", 0)))
        process.say(ready=True)
        first = await process.request()
        # The next group is prepared while the store of the launch is still being opened.
        dropping = asyncio.ensure_future(torch.drop())
        second = await process.request()
        process.say(number=first["number"], error="address in use")
        while not failures:
            await asyncio.sleep(0)
        assert not dropping.done()
        process.say(number=second["number"], error="")
        await dropping
        assert failures == ["address in use"]
        await torch.close()
        assert process.is_over
        process.wire.close()

    asyncio.run(asyncio.wait_for(run(), 20))
