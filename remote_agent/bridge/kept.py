"""The bridge's side of an agent whose job is over and that keeps its waiting process: find it, ask it, give it a job.

In: the sockets `jobs/*/warm.sock` of this node. Out: until when one stays; its pid, where it takes a job over; its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.agent.keeping import reuse_key, standing
from remote_agent.base.streams import open_unix
from remote_agent.wire import CallFailed, Channel, JobSpec, WireError

if TYPE_CHECKING:
    from remote_agent.base.paths import Home, JobFiles

# If the previous job takes longer to end, for example because of a hook, the launch is like any other.
TAKE_S = 10.0
END_S = 30.0


async def look(path: Path) -> int | None:
    """Return until when the agent behind a socket keeps its waiting process, in nanoseconds; None without one."""
    with contextlib.suppress(OSError, CallFailed, WireError, asyncio.TimeoutError):
        async with _connected(path) as channel:
            return int((await channel.call("look", timeout=END_S)).data["until_ns"])
    return None


async def end(path: Path) -> None:
    """End the agent behind a socket, with its waiting process; returns once it is gone."""
    with contextlib.suppress(OSError, CallFailed, WireError, asyncio.TimeoutError):
        async with _connected(path) as channel:
            await channel.call("end", timeout=END_S)
            await asyncio.wait_for(channel.closed.wait(), END_S)


async def take(home: Home, files: JobFiles, env: Mapping[str, str]) -> int | None:
    """Give a job to an agent that has kept a waiting process for it; returns its pid, None where there is none."""
    request = {
        "job": files.name,
        "runs": reuse_key(JobSpec.from_json(json.loads(files.spec.read_text()))),
        "standing": standing(),
        "env": dict(env),
    }
    for path in home.jobs.glob("*/warm.sock"):
        with contextlib.suppress(OSError, CallFailed, WireError, asyncio.TimeoutError):
            async with _connected(path) as channel:
                pid = int((await channel.call("take", request, timeout=TAKE_S)).data["pid"])
                # From here on the agent belongs to the new job.
                await channel.call("begin", timeout=TAKE_S)
                return pid
    return None


@contextlib.asynccontextmanager
async def _connected(path: Path) -> AsyncIterator[Channel]:
    reader, writer = await open_unix(path)
    channel = Channel(reader, writer)
    running = asyncio.ensure_future(channel.run())
    try:
        yield channel
    finally:
        await channel.close()
        await asyncio.gather(running, return_exceptions=True)
