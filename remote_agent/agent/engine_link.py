"""The agent's side of its engine: start it, call it, take its notices, and end what it left behind.

In: orders. Out: answers and notices of the engine, or of the torchrun in its place; no worker of ours survives an
engine that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from remote_agent.base.proc import own_command, restore_open_files, start_ticks
from remote_agent.engine.processes import Leftovers
from remote_agent.wire import Answer, Args, CallFailed, Channel, ChannelClosed, Problem, WireError
from remote_agent.wire.documents import StandbyStatus
from remote_agent.wire.gate import reader

if TYPE_CHECKING:
    from remote_agent.base.paths import JobFiles
    from remote_agent.wire.answers import TorchFacts

log = logging.getLogger(__name__)

# This is longer than the engine waits for a process that imports torch.
IMPORT_TIMEOUT_S = 310.0
CALL_MARGIN_S = 30.0
# Once its input has ended, an engine kills its workers and ends, within two seconds; one that needs longer hangs.
END_S = 0.5
# After SIGKILL, a process that stays longer is stuck in the kernel and runs no user code any more.
DEAD_S = 2.0
DISMISS_S = 5.0
VERSIONS = ("torch", "cuda", "nccl", "python")
_read_standby = reader(StandbyStatus)
Notice = Callable[[str, "Args"], Awaitable[None]]


class EngineLink:
    """One engine process."""

    replaceable = True
    """Another one may be started when it has died."""

    def __init__(self, files: JobFiles, notice: Notice, hello: Mapping[str, object]) -> None:
        """`hello`: the arguments of the first request to the engine."""
        self._files = files
        self._hello = hello
        self._notice = notice
        self._workers: dict[int, int | None] = {}
        self.facts: TorchFacts = {}
        self.problem: str | None = None
        self.ready = asyncio.Event()
        """Set when the engine is up, or cannot come up (`problem`)."""
        self.standby: StandbyStatus | None = None
        """What the engine said last about its waiting process."""
        self.ended = asyncio.Event()
        """Set when the engine's process is gone."""
        self.has_served = False
        """The engine has served an earlier job: if it ends, the installation is not the reason."""
        self._channel: Channel | None = None
        self._serving: asyncio.Future[str] | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> str:
        """Start the engine, unless it serves another job now, and serve its notices until it ends; returns how.

        One that is not closed outlives a caller that is cancelled.
        """
        try:
            if self._channel is None or self._serving is None:
                self._channel = Channel(*await self._open(), self._hear)
                self._serving = asyncio.ensure_future(self._serve(self._channel))
        except OSError as error:
            return self._over(f"it cannot be started: {error}")
        greeting = asyncio.ensure_future(self._greet())
        try:
            return self._over(await asyncio.shield(self._serving))
        finally:
            greeting.cancel()
            await asyncio.gather(greeting, return_exceptions=True)

    def turn_to(self, files: JobFiles, notice: Notice, hello: Mapping[str, object]) -> None:
        """Serve another job from now on: `run` greets the engine for it."""
        self._files, self._notice, self._hello = files, notice, hello
        self.facts = {}
        self.ready = asyncio.Event()
        self.has_served = True

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._process = await asyncio.create_subprocess_exec(
            *own_command("engine", "--job", self._files.name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        # The limit is raised before the engine starts workers, which it does only on request.
        restore_open_files(self._process.pid)
        output, feed = self._process.stdout, self._process.stdin
        assert output is not None
        assert feed is not None
        return output, feed

    async def _serve(self, channel: Channel) -> str:
        try:
            await channel.run()
            return await self._how_it_ended()
        finally:
            self.ended.set()
            await self.kill()

    async def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            return f"exit code {await asyncio.wait_for(self._process.wait(), 10.0)}"
        except asyncio.TimeoutError:
            return "it hung"

    def _over(self, how: str) -> str:
        if self.problem is None:
            self.problem = f"the engine ended ({how})"
        self.ready.set()
        return how

    @property
    def has_started(self) -> bool:
        """Whether there ever was an engine: without one there are no workers."""
        return self._channel is not None

    def give_up(self, problem: str) -> None:
        """Say why this node cannot start workers any more."""
        self.problem = problem

    def nproc(self, requested: str) -> int:
        """Return how many ranks a node runs by its nproc_per_node; raises Problem without an engine or without GPUs."""
        if self.problem is not None:
            raise Problem("engine", self.problem)
        if requested.isdigit():
            return int(requested)
        count = int(self.facts.get("devices", {}).get(requested, 0))
        if not count:
            raise Problem("engine", f"nproc_per_node is {requested}, and torch sees no {requested.upper()} here")
        return count

    @property
    def versions(self) -> dict[str, str]:
        """The facts that should be the same on all nodes."""
        return {name: str(version) for name, version in self.facts.items() if name in VERSIONS and version}

    async def call(self, op: str, args: Mapping[str, object], timeout: float = CALL_MARGIN_S) -> Any:
        """Return the engine's answer; raises CallFailed, ChannelClosed, asyncio.TimeoutError."""
        if self._channel is None:
            raise ChannelClosed("the engine has not started")
        answer: Answer = await self._channel.call(op, args, timeout=timeout)
        if op == "go":
            # torch's own agent, if there is one, is a process that has to be ended like a worker.
            others = [answer.data["agent"]] if answer.data.get("agent") is not None else []
            for process in (*answer.data["ranks"], *others):
                self._workers[int(process["pid"])] = process.get("started")
        if op == "stop":
            self._workers.clear()
        return answer.data

    async def renew(self, seconds: float) -> None:
        """Allow the engine to continue for that long; without renewal it ends what it runs."""
        if self._channel is not None:
            with contextlib.suppress(WireError):
                await self._channel.notify("lease", {"s": seconds})

    async def dismiss(self, outcome: Mapping[str, object]) -> None:
        """Report how the job ended for this node: nothing to do for an engine, which ends with its agent."""

    async def remark(self, text: str) -> None:
        """Report what this node waits for: nothing to do for an engine."""

    async def close(self) -> None:
        """End the engine: at the end of its input it kills what it runs; one that hangs is killed with its workers."""
        if self._channel is None:
            return
        await self._channel.close()
        if self._process is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), END_S)
        await self.kill()
        if self._serving is not None:
            await asyncio.wait({self._serving})

    async def kill(self) -> None:
        """Kill the engine, the workers it left and all that these started, and wait for that.

        Each worker only if it is still the process we started.
        """
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        pidfds = []
        for pid, started in self._workers.items():
            if started is not None and start_ticks(pid) == started:
                with contextlib.suppress(AttributeError, OSError):
                    pidfds.append(os.pidfd_open(pid))
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        try:
            await asyncio.wait_for(_all_dead(self._process, pidfds), DEAD_S)
        except asyncio.TimeoutError:
            log.warning("the engine or one of its workers did not end")
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
        sessions, self._workers = set(self._workers), {}
        # A torchrun is not our child, and neither are the processes that it leaves behind.
        if self._process is not None and await Leftovers(self._files.root, sessions).sweep((), DEAD_S):
            log.warning("a process that a worker started did not end")

    async def _greet(self) -> None:
        try:
            self.facts = await self.call("hello", self._hello, IMPORT_TIMEOUT_S)
        except CallFailed as failed:
            self.problem = failed.message
        except asyncio.TimeoutError:
            self.problem = f"torch was not imported within {IMPORT_TIMEOUT_S:.0f} s"
        except ChannelClosed:
            return
        self.ready.set()

    async def _hear(self, op: str, args: Args, body: bytes) -> Answer:
        if op == "exited":
            self._workers.pop(int(args["exit"]["pid"]), None)
        if op == "standby":
            self.standby = _read_standby(args)
            return Answer({})
        await self._notice(op, args)
        return Answer({})


class TorchrunLink(EngineLink):
    """The torchrun that started this agent, in an engine's place: it ends by itself, and there is no other."""

    replaceable = False

    def __init__(self, files: JobFiles, notice: Notice, wire: int) -> None:
        super().__init__(files, notice, {})
        self._wire = wire

    async def dismiss(self, outcome: Mapping[str, object]) -> None:
        """Report to torchrun how the job ended for this node, so that it ends likewise."""
        with contextlib.suppress(WireError, CallFailed, asyncio.TimeoutError):
            await self.call("end", outcome, DISMISS_S)

    async def kill(self) -> None:
        """Kill the workers and release torchrun, which has started us and exits as soon as it can."""
        await super().kill()
        if self._channel is not None:
            await self._channel.close()

    async def remark(self, text: str) -> None:
        """Have torchrun print what this node waits for: nobody else may be watching."""
        if self._channel is not None:
            with contextlib.suppress(WireError):
                await self._channel.notify("remark", {"text": text})

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(sock=socket.socket(fileno=self._wire))

    async def _how_it_ended(self) -> str:
        return "its torchrun ended"


async def _all_dead(process: asyncio.subprocess.Process | None, pidfds: list[int]) -> None:
    if process is not None:
        await process.wait()
    loop = asyncio.get_running_loop()
    for pidfd in pidfds:
        dead = asyncio.Event()
        loop.add_reader(pidfd, dead.set)
        try:
            await dead.wait()
        finally:
            loop.remove_reader(pidfd)
