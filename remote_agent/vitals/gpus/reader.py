"""The process that reads the GPUs, apart from the agent: a driver that hangs must not block the agent.

In: one line on stdin for each reading. Out: one JSON list of `Gpu` for each line; the process ends with its stdin, or
at the first line on a node without GPUs. `GpuLink` is the agent's side of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from remote_agent.base.proc import own_command
from remote_agent.vitals.gpus import amdgpu, nvidia_smi, nvml

if TYPE_CHECKING:
    from remote_agent.vitals.gpus.gpu import Gpu

log = logging.getLogger(__name__)

# Each tool has `may_be_here`, which is cheap, and `open_reader`. The first tool that finds GPUs is used.
TOOLS = (nvml, nvidia_smi, amdgpu)
# A driver in trouble may be slow; after this the reader is killed and started again later.
ANSWER_S = 15.0
AGAIN_S = 60.0
END_S = 2.0


def main() -> int:
    """Answer each line of stdin with the GPUs; returns 0 where there are none, 1 when they cannot be read."""
    try:
        read = next((reader for tool in TOOLS if (reader := tool.open_reader())), None)
        for _ in sys.stdin:
            if read is None:
                break
            sys.stdout.write(json.dumps(read()) + "\n")
            sys.stdout.flush()
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"GPUs: {error}\n")
        return 1
    return 0


class GpuLink:
    """Runs the reading process where there may be GPUs, and replaces it when it fails."""

    def __init__(self, job: str) -> None:
        self._job = job
        self.devices: list[Gpu] = []
        """The last reading; empty when there is no GPU or no reading."""

    async def keep(self, pause: Callable[[], Awaitable[None]]) -> None:
        """Read the GPUs again and again; returns when there are none."""
        if not any(tool.may_be_here() for tool in TOOLS):
            return
        while await self._serve(pause):
            self.devices = []
            await asyncio.sleep(AGAIN_S)

    async def _serve(self, pause: Callable[[], Awaitable[None]]) -> bool:
        """Read until the process ends; returns whether to try again."""
        child = await asyncio.create_subprocess_exec(
            *own_command("gpus", "--job", self._job),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            while True:
                child.stdin.write(b"\n")
                line = await asyncio.wait_for(child.stdout.readline(), ANSWER_S)
                if not line:
                    return await asyncio.wait_for(child.wait(), END_S) != 0
                self.devices = json.loads(line)
                await pause()
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            log.warning("cannot read the GPUs: %s", str(error) or "no answer in time")
            return True
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(child.wait(), END_S)
