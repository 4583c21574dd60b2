"""Reach a node of the Slurm allocation in which this process runs by srun, without SSH.

In: a host, the allocation's environment. Out: the bridge's streams, as those of an SSH session; an agent in a step of
its own: at the end of a step Slurm may kill all its processes, so the bridge's step cannot start an agent.
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

from supervisor.errors import HostError
from supervisor.inventory.pattern import PatternError, expand
from supervisor.inventory.sources import gpus_per_node
from supervisor.ssh import boot
from supervisor.ssh.wires import LocalWire, end_process

if TYPE_CHECKING:
    from remote_agent.wire import Args, Channel
    from supervisor.inventory import Host
    from supervisor.ssh.agent_file import AgentFile

# These are facts of the allocation and its controller. srun reads every other SLURM_ variable as an option.
_FACTS = re.compile(r"SLURM_(?:JOB_|ARRAY_|SUBMIT_|CLUSTER|CONF)")


def missing() -> str:
    """Return why srun cannot be used here; empty if it can be tried."""
    if not os.environ.get("SLURM_JOB_ID"):
        return "SLURM_JOB_ID is not set"
    return "" if shutil.which("srun") else "no srun in PATH"


def is_node(host: Host) -> bool:
    """Return whether srun reaches a host: it is a node of this process's allocation."""
    try:
        nodes = expand(os.environ.get("SLURM_JOB_NODELIST", ""))
    except PatternError:
        return False
    return not missing() and host.ssh.partition(".")[0] in {node.partition(".")[0] for node in nodes}


def words(host: Host, command: str, *options: str) -> list[str]:
    """Return the command line that runs a shell command on a host, in a step of its own.

    The step ends with the process that srun starts. It must not be a shell, which a signal to all would end.
    """
    step = [
        # The step runs next to others, with all cores, memory and GPUs that the allocation has on the node.
        *("--overlap", "--cpu-bind=none", "--mem=0"),
        *("--nodes=1", "--ntasks=1", f"--nodelist={host.ssh}"),
        *("--export=ALL", "--mpi=none", "--chdir=/"),
    ]
    gpus = gpus_per_node(os.environ)
    if gpus is not None:
        # Without it a step gets the GPUs of the allocation's request: per task, or for all nodes together.
        step.append(f"--gpus-per-node={gpus}")
    return ["srun", f"--jobid={os.environ['SLURM_JOB_ID']}", *step, *options, "sh", "-c", f"exec {command}"]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for srun: this one, without the variables that srun reads as options."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(("SLURM_", "SRUN_")) or _FACTS.match(name) is not None
    }


class SrunWire(LocalWire):
    """The bridge in a step of the allocation."""

    # If srun is killed by SIGKILL, its step stays.
    force = (signal.SIGTERM, signal.SIGKILL)

    def __init__(self, process: asyncio.subprocess.Process, host: Host, agent: AgentFile) -> None:
        super().__init__(process)
        self._host = host
        self._agent = agent

    @classmethod
    async def open(cls, host: Host, agent: AgentFile) -> SrunWire:
        """Run the bridge on a host; raises HostError."""
        reason = missing()
        if reason:
            raise HostError(host.name, "connect", f"srun: {reason}", "run inside an allocation: salloc, or sbatch")
        # Otherwise slurmstepd holds back incomplete lines.
        line = words(host, boot.command(host, agent), "--unbuffered")
        try:
            return cls(await cls.run(line, environment(os.environ)), host, agent)
        except OSError as error:
            raise HostError(host.name, "connect", f"srun: {error.strerror}") from error

    async def start_agent(self, channel: Channel, request: Args, timeout_s: float) -> Any:
        """Start an agent in a step of its own; returns the answer of `start`.

        Raises CallFailed, WireError, asyncio.TimeoutError, HostError.
        """
        job = str(request["spec"]["job"])
        written = (await channel.call("start", {**request, "step": True}, timeout=timeout_s)).data
        step = await self._open_step(job)
        output = asyncio.ensure_future(step.communicate())
        started = asyncio.ensure_future(channel.call("await_agent", {"job": job}, timeout=timeout_s))
        force: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGKILL)
        try:
            await asyncio.wait({output, started}, return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                raise self._ended(output.result()[1])
            facts = started.result().data
            # The step continues without its srun; a signal or hangup to srun would end the step.
            force = (signal.SIGKILL,)
            return {**written, **facts}
        finally:
            started.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(step.pid, force[0])
            await end_process(step, force)
            await asyncio.gather(output, started, return_exceptions=True)

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

    def _ended(self, output: bytes) -> HostError:
        text = boot.tail(output) or "; it printed nothing"
        return HostError(self._host.name, "start", f"the agent's step ended at once{text}", "see the job's agent.log")
