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
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from remote_agent.base.files import read_text
from remote_agent.base.proc import reap, restore_open_files, start_ticks
from remote_agent.base.streams import serve_unix
from remote_agent.base.tasks import to_the_end
from remote_agent.engine.processes import Leftovers, end_all_marked
from remote_agent.wire import Answer, Args, CallFailed, Channel, ChannelClosed, Problem, WireError
from remote_agent.wire.documents import StandbyStatus
from remote_agent.wire.gate import reader

if TYPE_CHECKING:
    from remote_agent.base.paths import JobFiles
    from remote_agent.runtime.runtime import Runtime, Start
    from remote_agent.wire.answers import TorchFacts

log = logging.getLogger(__name__)

# This is longer than the engine waits for a process that imports torch.
IMPORT_TIMEOUT_S = 310.0
CALL_MARGIN_S = 30.0
# An engine behind a prefix starts with its container, on a node that swaps more slowly.
CALLS_S = 120.0
# Once its connection has ended, an engine kills its workers and ends, within two seconds; one that needs longer hangs.
END_S = 0.5
# After SIGKILL, a process that stays longer is stuck in the kernel and runs no user code any more.
DEAD_S = 2.0
DISMISS_S = 5.0
VERSIONS = ("torch", "cuda", "nccl", "python", "place")
# A container is removed when its process has ended.
APART_END_S = 3.0
# struct ucred: pid, uid and gid of the process at the other end of a Unix socket, as this process sees them.
PEER = struct.Struct("3i")
NO_PIDS = "it gives its processes numbers of their own (a PID namespace), so signals and stacks would miss the ranks"
PIDS_HINT = "have it use the host's: no --unshare-pid with bwrap, no --pid with apptainer"
_read_standby = reader(StandbyStatus)
Notice = Callable[[str, "Args"], Awaitable[None]]


class EngineLink:
    """One engine process: how it is started, called, heard, and ended with all that it has started."""

    replaceable = True
    """Another one may be started when it has died."""

    def __init__(self, files: JobFiles, notice: Notice, hello: Mapping[str, object], runtime: Runtime) -> None:
        """`hello`: the arguments of the first request to the engine; `runtime`: where it runs."""
        self._files = files
        self.runtime = runtime
        self.runs_in = ""
        """The name of what it runs in, as `Runtime.name` returns it."""
        self.is_superseded = False
        """Its end is no death: another one follows, which runs in something else."""
        self._start: Start | None = None
        self._own: tuple[int, int | None] | None = None
        """The engine's own pid and start time, where a prefix stands before it."""
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
        except Problem as problem:
            self.problem = f"{problem.message} ({problem.hint})" if problem.hint else problem.message
            return self._over(problem.message)
        greeting = asyncio.ensure_future(self._greet())
        try:
            return self._over(await asyncio.shield(self._serving))
        finally:
            greeting.cancel()
            await asyncio.gather(greeting, return_exceptions=True)

    def turn_to(self, files: JobFiles, notice: Notice, hello: Mapping[str, object], runtime: Runtime) -> None:
        """Serve another job from now on: `run` greets the engine for it."""
        runtime.inherit(self.runtime)
        self.runtime = runtime
        if self._start is not None and self._start.container is not None:
            self._start.container.save(files.container)
        self._files, self._notice, self._hello = files, notice, hello
        self.facts = {}
        self.ready = asyncio.Event()
        self.has_served = True

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.runs_in = await self.runtime.make()
        words = ("engine", "--job", self._files.name, "--wire", str(self._files.wire))
        self._start = start = await self.runtime.start(*words)
        called: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()

        async def calls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            called.set_result((reader, writer))

        server = await serve_unix(self._files.wire, calls)
        try:
            return await self._call_of(start, called)
        except BaseException:
            # Whoever cancels a start, perhaps twice, waits for the end of what it has begun.
            await to_the_end(self.kill())
            raise
        finally:
            server.close()
            self._files.wire.unlink(missing_ok=True)

    async def _call_of(
        self, start: Start, called: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Start the process and wait until the engine calls; raises OSError, Problem."""
        before = len(read_text(self._files.log))
        self._process = await asyncio.create_subprocess_exec(
            *start.command, stdin=asyncio.subprocess.DEVNULL, env=start.variables, start_new_session=True
        )
        # The limit is raised before the engine starts workers, which it does only on request.
        restore_open_files(self._process.pid)
        ended = asyncio.ensure_future(self._process.wait())
        either: set[asyncio.Future[Any]] = {called, ended}
        await asyncio.wait(either, timeout=CALLS_S, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not called.done():
            status = self._process.returncode
            how = f"did not call within {CALLS_S:.0f} s" if status is None else f"ended with {status}"
            words = read_text(self._files.log)[before:].strip().rpartition("\n")[2]
            name = os.path.basename(start.command[0])
            text = f"the engine did not start: {name} {how}{f': {words}' if words else ''}"
            raise Problem("engine", text, "look at agent.log of the job there")
        reader, writer = called.result()
        if start.is_apart:
            pid, _, _ = PEER.unpack(
                writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
            )
            self._own = (pid, start_ticks(pid))
        return reader, writer

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

    async def variables(self, login: Mapping[str, str]) -> dict[str, str] | None:
        """Return what an engine has of the variables of a login; None: it keeps its own."""
        return await self.runtime.variables(login)

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
            is_apart = self._start is not None and self._start.is_apart
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), APART_END_S if is_apart else END_S)
        await self.kill()
        if self._serving is not None:
            await asyncio.wait({self._serving})

    async def give_way(self) -> None:
        """End the engine, which has no workers, because another one is to follow."""
        self.is_superseded = True
        await self.close()

    async def kill(self) -> None:
        """Kill the engine, the workers it left and all that these started, and wait for that.

        Each worker only if it is still the process we started.
        """
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        pidfds = []
        own = dict((self._own,)) if self._own is not None else {}
        for pid, started in {**own, **self._workers}.items():
            if started is not None and start_ticks(pid) == started:
                with contextlib.suppress(AttributeError, OSError):
                    pidfds.append(os.pidfd_open(pid))
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    # Behind a prefix that has started it, an engine leads no group.
                    (os.kill if pid in own else os.killpg)(pid, signal.SIGKILL)
        try:
            await asyncio.wait_for(_all_dead(self._process, pidfds), DEAD_S)
        except asyncio.TimeoutError:
            log.warning("the engine or one of its workers did not end")
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
            for pid in own:
                # It is our child if what had started it is dead, and podman waits until it is no zombie any more.
                reap(pid)
        sessions, self._workers = set(self._workers), {}
        # A torchrun is not our child, and neither are the processes that it leaves behind.
        if self._process is not None and await Leftovers(self._files.root, sessions).sweep((), DEAD_S):
            log.warning("a process that a worker started did not end")
        await self._end_apart()

    async def _end_apart(self) -> None:
        """End what is not our descendant: a container, and what an engine in it has left."""
        start, self._start, self._own = self._start, None, None
        if start is not None and start.is_apart:
            if not await asyncio.to_thread(end_all_marked, self._files.root, DEAD_S):
                log.warning("a process that a worker started did not end")
            await self.runtime.end(start)

    async def _greet(self) -> None:
        try:
            self.facts = await self.call("hello", self._hello, IMPORT_TIMEOUT_S)
            self.facts["place"] = await self.runtime.digest()
            if self._own is not None and self.facts["pid"] != self._own[0]:
                self.problem = f"{NO_PIDS}: {PIDS_HINT}"
        except (CallFailed, Problem) as failed:
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

    def __init__(self, files: JobFiles, notice: Notice, wire: int, runtime: Runtime) -> None:
        super().__init__(files, notice, {}, runtime)
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
