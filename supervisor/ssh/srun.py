"""A node of the Slurm allocation that this process runs in, reached by srun: no SSH.

In: a host, the allocation's environment. Out: the bridge's streams, as those of an SSH session; an agent in a step of
its own. When a step ends Slurm may kill all that it has started, so no agent can come out of the bridge's step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from supervisor.inventory.sources import gpus_per_node
from supervisor.ssh import boot
from supervisor.ssh.errors import HostError
from supervisor.ssh.wires import LocalWire, end_process

if TYPE_CHECKING:
    from remote_agent.wire import Channel
    from supervisor.inventory import Host
    from supervisor.ssh.agent_file import AgentFile

# Facts of the allocation, and where its controller is. srun takes every other one as an option, meant for other steps.
_FACTS = re.compile(r"SLURM_(?:JOB_|ARRAY_|SUBMIT_|CLUSTER|CONF)")


def missing() -> str:
    """Say what srun lacks here; empty where it can be tried."""
    if not os.environ.get("SLURM_JOB_ID"):
        return "SLURM_JOB_ID is not set"
    return "" if shutil.which("srun") else "no srun in PATH"


def words(host: Host, command: str, *options: str) -> list[str]:
    """Return the command line that runs a shell's command on a host, in a step of its own.

    The step ends when the process ends that srun has started, which must be no shell: a signal to all would end it.
    """
    step = [
        # Beside other steps, with all that the allocation has on the node: cores, memory, GPUs.
        *("--overlap", "--cpu-bind=none", "--mem=0"),
        *("--nodes=1", "--ntasks=1", f"--nodelist={host.ssh}"),
        *("--export=ALL", "--mpi=none", "--chdir=/"),
    ]
    gpus = gpus_per_node(os.environ)
    if gpus is not None:
        # Without it a step is given what its allocation asked for: per task, or for all nodes together.
        step.append(f"--gpus-per-node={gpus}")
    return ["srun", f"--jobid={os.environ['SLURM_JOB_ID']}", *step, *options, "sh", "-c", f"exec {command}"]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an srun: as it is here, less what srun would take as its options."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(("SLURM_", "SRUN_")) or _FACTS.match(name) is not None
    }


class SrunWire(LocalWire):
    """The bridge in a step of the allocation."""

    # Before a death by SIGKILL srun says nothing to the step, which would stay.
    force = (signal.SIGTERM, signal.SIGKILL)

    def __init__(self, process: asyncio.subprocess.Process, host: Host, agent: AgentFile) -> None:
        super().__init__(process)
        self._host = host
        self._agent = agent

    @classmethod
    async def open(cls, host: Host, agent: AgentFile) -> SrunWire:
        """Run the bridge on a host; raises HostError."""
        lack = missing()
        if lack:
            raise HostError(host.name, "connect", f"srun: {lack}", "run inside an allocation: salloc, or sbatch")
        # Without it slurmstepd keeps what is no whole line.
        line = words(host, boot.command(host, agent), "--unbuffered")
        try:
            return cls(await cls.run(line, environment(os.environ)), host, agent)
        except OSError as error:
            raise HostError(host.name, "connect", f"srun: {error.strerror}") from error

    async def start_agent(self, channel: Channel, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Start an agent in a step of its own; returns what `start` does.

        Raises CallFailed, WireError, asyncio.TimeoutError, HostError.
        """
        job = str(request["spec"]["job"])
        written = (await channel.call("start", {**request, "step": True}, timeout=timeout_s)).data
        step = await self._open_step(job)
        saying = asyncio.ensure_future(step.communicate())
        coming = asyncio.ensure_future(channel.call("await_agent", {"job": job}, timeout=timeout_s))
        force: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGKILL)
        try:
            await asyncio.wait({saying, coming}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                raise self._ended(saying.result()[1])
            came = coming.result().data
            # The step goes on without its srun, which a signal or a hangup here would make end the step.
            force = (signal.SIGKILL,)
            return {**written, **came}
        finally:
            coming.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(step.pid, force[0])
            await end_process(step, force)
            await asyncio.gather(saying, coming, return_exceptions=True)

    async def _open_step(self, job: str) -> asyncio.subprocess.Process:
        command = boot.command(self._host, self._agent, "serve", "--job", job, "--step")
        try:
            return await asyncio.create_subprocess_exec(
                *words(self._host, command, "--input=none", f"--job-name={job}"),
                env=environment(os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise HostError(self._host.name, "start", f"srun: {error.strerror}") from error

    def _ended(self, said: bytes) -> HostError:
        text = boot.tail(said) or "; it said nothing"
        return HostError(self._host.name, "start", f"the agent's step ended at once{text}", "see the job's agent.log")
