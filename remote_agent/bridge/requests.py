"""What an operator asks of a node before a job is open there: its jobs, the sync, an agent's start, the preflight.

In: requests, of which the first has been read. Out: their answers; the request that opens a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from remote_agent.agent import jobs
from remote_agent.agent.tree_requests import TreeRequests
from remote_agent.base.streams import open_unix
from remote_agent.bridge.operator import Operator, hello
from remote_agent.bridge.probe import Probe
from remote_agent.wire import Args, Frame, Problem

if TYPE_CHECKING:
    from remote_agent.base.paths import Home, JobFiles
    from remote_agent.wire.answers import HostFacts, StartedAgent

log = logging.getLogger(__name__)

# These requests may wait for torch for minutes and change nothing, so they end when the operator disconnects.
LONG = frozenset({"facts", "collective_start", "collective_end"})


class Bridge:
    """The requests that need no agent."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._trees = TreeRequests(home)
        self._probe = Probe(home)
        self._started: list[asyncio.StreamWriter] = []
        """Connections to agents that were started here: they see by these whether their operator is still there."""
        self._ops: dict[str, Callable[[Args, bytes], Awaitable[Mapping[str, object]]]] = {
            "hello": self._hello,
            "jobs": self._jobs,
            **self._trees.ops,
            "start": self._start,
            "await_agent": self._await_agent,
            "clean": self._clean,
            "facts": self._probe.facts,
            "listen": self._probe.listen,
            "reach": self._probe.reach,
            "collective_start": self._probe.collective_start,
            "collective_end": self._probe.collective_end,
        }

    def close(self) -> None:
        """Give back what a half-done sync holds, and end a preflight."""
        self._trees.close()
        self._probe.close()
        for writer in self._started:
            writer.close()

    async def _accompany(self, job: object) -> None:
        """Connect to an agent until this operator opens the job, or is gone: then the agent need not wait for long."""
        with contextlib.suppress(OSError):
            self._started.append((await open_unix(self.home.job(job).sock))[1])

    async def handle(self, op: str, args: Args, body: bytes) -> Mapping[str, object]:
        """Answer one request; raises Problem."""
        handler = self._ops.get(op)
        if handler is None:
            raise Problem("unknown_op", f"no such request before open: {op}")
        return await handler(args, body)

    async def _hello(self, args: Args, body: bytes) -> HostFacts:
        return hello(self.home)

    async def _jobs(self, args: Args, body: bytes) -> dict[str, Any]:
        described = []
        for name in self.home.job_names():
            # A job may be cleaned away while we look.
            with contextlib.suppress(OSError):
                described.append(jobs.describe(self.home.job(name)))
                described[-1]["warm_until_ns"] = await _warm_until(self.home.job(name))
        return {"jobs": described}

    async def _start(self, args: Args, body: bytes) -> StartedAgent:
        from remote_agent.bridge.starting import start

        try:
            started = await start(self.home, args)
            if not args.get("step"):
                await self._accompany(args["spec"]["job"])
            return started
        finally:
            # A launch that waits for the tree can see the agent now. With a step, the agent starts later.
            if not args.get("step"):
                self._trees.close()

    async def _await_agent(self, args: Args, body: bytes) -> StartedAgent:
        from remote_agent.bridge.starting import await_agent

        try:
            started = await await_agent(self.home, args)
            await self._accompany(args.get("job"))
            return started
        finally:
            self._trees.close()

    async def _clean(self, args: Args, body: bytes) -> dict[str, Any]:
        for path in self.home.jobs.glob(f"{self.home.job(args['job']).name if args.get('job') else '*'}/warm.sock"):
            from remote_agent.bridge import kept

            await kept.end(path)
        return await asyncio.to_thread(jobs.clean, self.home, args.get("job"))


async def _warm_until(files: JobFiles) -> int | None:
    """Return until when a job that is over keeps its waiting process here; None: it keeps none."""
    if not files.warm.exists():
        return None
    from remote_agent.bridge import kept

    return await kept.look(files.warm)


async def serve(operator: Operator, first: Frame, home: Home) -> Frame | None:
    """Answer requests in order; returns the `open`, or None at the end. Raises WireError, OSError."""
    bridge = Bridge(home)
    frame: Frame | None = first
    try:
        while frame is not None and frame.header.get("op") != "open":
            # A thread reads the next frame, so that listeners for other nodes continue.
            ahead: asyncio.Future[Frame | None] | None = None
            if frame.header.get("op") in LONG:
                ahead = asyncio.ensure_future(asyncio.to_thread(operator.next))
                await _while_connected(_answer(bridge, operator, frame), ahead)
            elif "op" in frame.header:
                await _answer(bridge, operator, frame)
            frame = await (ahead or asyncio.to_thread(operator.next))
        return frame
    finally:
        bridge.close()


async def _while_connected(answering: Coroutine[Any, Any, None], ahead: asyncio.Future[Frame | None]) -> None:
    """Give up waiting for the answer when the input ends, or becomes invalid, before the answer is there."""
    task: asyncio.Future[None] = asyncio.ensure_future(answering)
    either: set[asyncio.Future[Any]] = {task, ahead}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and (ahead.exception() is not None or ahead.result() is None):
            task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()
    finally:
        task.cancel()


async def _answer(bridge: Bridge, operator: Operator, frame: Frame) -> None:
    op = str(frame.header["op"])
    try:
        data = await bridge.handle(op, frame.header.get("args") or {}, frame.body)
    except Problem as problem:
        await asyncio.to_thread(operator.refuse, frame, problem)
    except Exception as error:  # a request that fails must not end the connection
        log.exception("request %s failed", op)
        internal = Problem("internal", f"{op}: {type(error).__name__}: {error}")
        await asyncio.to_thread(operator.refuse, frame, internal)
    else:
        await asyncio.to_thread(operator.answer, frame, data)
