"""What stays of a job's agent when the job is over: its engine, with the waiting process, for the next job of the tree.

In: requests of bridges on the unix socket `warm.sock` of the job that is over. Out: an engine that serves another job,
or its end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import resource
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from remote_agent.base import proc
from remote_agent.base.streams import serve_unix
from remote_agent.wire import Answer, Args, CallFailed, Channel, Problem, WireError

if TYPE_CHECKING:
    from remote_agent.agent.context import Life
    from remote_agent.agent.engine_link import EngineLink
    from remote_agent.base.paths import JobFiles
    from remote_agent.wire import JobSpec

log = logging.getLogger(__name__)

CALL_S = 10.0
# The engine exits if its agent is suspended for this much longer than the lease allows.
SILENCE_S = 60.0
LIMITS = (
    resource.RLIMIT_AS,
    resource.RLIMIT_CORE,
    resource.RLIMIT_CPU,
    resource.RLIMIT_DATA,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_MEMLOCK,
    resource.RLIMIT_NPROC,
    resource.RLIMIT_STACK,
)


def standing() -> dict[str, Any]:
    """Return what an agent and its workers have from the login that started them, besides variables."""
    umask = os.umask(0o77)
    os.umask(umask)
    return {
        "program": [*proc.own_command(), sys.version],
        "umask": umask,
        "limits": [list(proc.USER_OPEN_FILES), *(list(resource.getrlimit(limit)) for limit in LIMITS)],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cpus": sorted(os.sched_getaffinity(0)),
    }


def reuse_key(spec: JobSpec) -> list[str | None]:
    """Return what must be the same for a job to take over another one's engine."""
    places = sorted({f"{node.wrap} {node.python}" for node in spec.nodes})
    inside = [spec.environment, *spec.extras, spec.container, *spec.mounts, *places]
    return [spec.tree, spec.workdir, spec.kind, spec.script, *inside]


def may_keep(spec: JobSpec, engine: EngineLink) -> bool:
    """Return whether an engine may outlive its job. A Slurm step ends with its job."""
    is_warm = spec.standby == "auto" and spec.rendezvous is None
    return spec.keep_warm > 0 and is_warm and engine.replaceable and "SLURM_STEP_ID" not in os.environ


@dataclasses.dataclass(frozen=True)
class NextJob:
    """The job that takes over an engine."""

    job: str
    env: Mapping[str, str]
    """All variables of the login that starts it."""


class EngineKeeper:
    """Keeps one engine until the next job takes it, its time is over, or somebody ends it."""

    def __init__(self, files: JobFiles, spec: JobSpec, life: Life, engine: EngineLink) -> None:
        self.engine = engine
        self._files = files
        self._spec = spec
        self._life = life
        self._server: asyncio.AbstractServer | None = None
        self._until = time.monotonic() + spec.keep_warm
        self._is_alone = asyncio.Event()
        """Set once everything else of the job's agent has ended."""
        self._taker: Channel | None = None
        """The connection of the bridge whose job takes the engine, once it has asked for it."""
        self._asked: NextJob | None = None
        self._next: NextJob | None = None
        self._decided = asyncio.Event()

    async def open(self) -> None:
        """Prepare the engine for the next job, and answer bridges; raises Problem, WireError, OSError."""
        await self.engine.call("rest", {}, CALL_S)
        self._server = await serve_unix(self._files.warm, self._connected)
        log.info("the waiting process stays for %.0f s", self._spec.keep_warm)

    async def wait(self) -> NextJob | None:
        """Return the job that has taken the engine, which serves it then; None where nobody has."""
        self._is_alone.set()
        left_s = self._until - time.monotonic()
        await self.engine.renew(max(0.0, left_s) + SILENCE_S)
        ends = (self._decided.wait(), self._life.at_once.wait(), self.engine.ended.wait())
        tasks = [asyncio.ensure_future(end) for end in ends]
        await asyncio.wait(tasks, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        # From now on a job that asks is refused, because nobody would serve it.
        self._decided.set()
        return self._next

    def close(self) -> None:
        """Stop answering bridges."""
        if self._server is not None:
            self._server.close()
            self._files.warm.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def handle(op: str, args: Args, body: bytes) -> Answer:
            return Answer(await self._answer(channel, op, args))

        channel = Channel(reader, writer, handle)
        try:
            await channel.run()
        finally:
            if self._taker is channel:
                self._taker = None

    async def _answer(self, channel: Channel, op: str, args: Args) -> dict[str, Any]:
        if op == "look":
            until_ns = time.time_ns() + round((self._until - time.monotonic()) * 1e9)
            return {"until_ns": until_ns, "standby": self.engine.standby}
        if op == "end":
            self._life.leave_operators()
            self._decided.set()
            return {}
        if op == "take":
            return await self._offer(channel, args)
        if self._decided.is_set():
            raise Problem("over", "it is not kept any more")
        if op == "begin" and self._taker is channel:
            self._next = self._asked
            self._decided.set()
            return {}
        raise Problem("unknown_op", f"no such request to an agent whose job is over: {op}")

    async def _offer(self, channel: Channel, args: Args) -> dict[str, Any]:
        """Answer once the engine is free for this job; raises Problem when it cannot have it."""
        state = self.engine.standby and self.engine.standby["state"]
        if args["runs"] != reuse_key(self._spec) or args["standing"] != standing() or state not in ("loading", "ready"):
            raise Problem("other", "this job cannot be started by that engine")
        if self._taker is not None:
            raise Problem("taken", "another launch has asked for it")
        self._taker = channel
        self._asked = NextJob(str(args["job"]), {str(name): str(value) for name, value in args["env"].items()})
        self._life.leave_operators()
        await self._is_alone.wait()
        return {"pid": os.getpid()}


async def keep(files: JobFiles, spec: JobSpec, life: Life, engine: EngineLink) -> EngineKeeper | None:
    """Return what keeps an engine beyond the end of its job, where the job asks for it; None: nothing is kept."""
    if life.at_once.is_set() or not may_keep(spec, engine):
        return None
    keeper = EngineKeeper(files, spec, life, engine)
    try:
        await keeper.open()
    except (CallFailed, WireError, OSError, asyncio.TimeoutError) as error:
        log.info("the waiting process does not stay: %s", str(error) or "no answer in time")
        return None
    return keeper


async def hand_over(engine: EngineLink, files: JobFiles, order: NextJob) -> bool:
    """Have an engine serve another job, with this process's log and variables set for it; returns whether it does."""
    os.environ.clear()
    os.environ.update(order.env)
    log_file = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for number in (1, 2):
        os.dup2(log_file, number)
    os.close(log_file)
    try:
        await engine.call("next", {"env": await engine.variables(order.env), "log": str(files.log)}, CALL_S)
    except (Problem, WireError, asyncio.TimeoutError) as error:
        log.warning("the engine of the last job cannot be used: %s", str(error) or "no answer in time")
        await engine.close()
        return False
    return True
