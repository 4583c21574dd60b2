"""The launcher inside a torchrun that somebody else started: torchrun starts and reaps, the coordinator decides.

In: the agent's requests on a socket. Out: work for torchrun's main thread; answers and notices.

torchrun's main thread takes each generation's work from the Handover, starts the workers and then only waits there.
Our thread watches, stops and reports them, exactly as the engine does on a node that we started ourselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from remote_agent.engine.engine import Engine
from remote_agent.engine.launchers import own
from remote_agent.engine.launchers.launcher import KILL_S, SWEEP_S, LaunchContext
from remote_agent.engine.processes import Orphans, Worker
from remote_agent.engine.torch_processes import STORE_S
from remote_agent.text.controls import escape_controls
from remote_agent.wire import Args, Channel

if TYPE_CHECKING:
    from remote_agent.engine.boot_dir import BootDirectory
    from remote_agent.engine.order import Order
    from remote_agent.wire.answers import StoppedWorkers, TorchFacts

log = logging.getLogger(__name__)

JOIN_S = 5.0
# In addition to the grace period of the workers, SIGKILL and the kernel need time.
END_S = KILL_S + SWEEP_S + 5.0


def say(job: str, text: str) -> None:
    """Print a message next to torchrun's own."""
    sys.stderr.write(escape_controls(f"supervisor: job {job}: {text}\n"))
    sys.stderr.flush()


class Outcome(NamedTuple):
    """How the job ended for this node: succeeded, failed, stopped, removed or lost."""

    state: str
    reason: str


class Dismissed(Exception):
    """There is no more work for this torchrun."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


class Work:
    """One generation's workers, for torchrun to start."""

    def __init__(self, order: Order, boot: BootDirectory, directories: dict[int, Path]) -> None:
        self.order = order
        self.boot = boot
        self.directories = directories
        self._loop = asyncio.get_running_loop()
        self.pids: asyncio.Future[dict[int, int]] = self._loop.create_future()

    def started(self, pids: dict[int, int]) -> None:
        """Report, from torchrun's thread, that the workers run: pids by local rank."""
        self._loop.call_soon_threadsafe(self._resolve, pids, None)

    def failed(self, error: BaseException) -> None:
        """Report, from torchrun's thread, that they could not be started."""
        self._loop.call_soon_threadsafe(self._resolve, {}, OSError(str(error) or type(error).__name__))

    def _resolve(self, pids: dict[int, int], error: OSError | None) -> None:
        if self.pids.done():
            # The engine has given up waiting, so these workers must not run.
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        elif error is None:
            self.pids.set_result(pids)
        else:
            self.pids.set_exception(error)


class Handover:
    """What torchrun's main thread and ours pass to each other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._work: Work | None = None
        self._is_recalled = False
        self._outcome: Outcome | None = None

    def offer(self, work: Work) -> None:
        """Leave work for torchrun."""
        with self._changed:
            self._work = work
            self._changed.notify_all()

    def withdraw(self, work: Work) -> None:
        """Remove work that torchrun has not taken."""
        with self._changed:
            if self._work is work:
                self._work = None

    def recall(self) -> None:
        """Make torchrun return from its workers, which are being stopped."""
        with self._changed:
            self._is_recalled = True

    def close(self, outcome: Outcome) -> None:
        """End the work; the first outcome counts."""
        with self._changed:
            self._outcome = self._outcome or outcome
            self._changed.notify_all()

    def take(self) -> Work:
        """Wait for work; raises Dismissed when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._work is not None or self._outcome is not None)
            if self._outcome is not None:
                raise Dismissed(self._outcome)
            work, self._work, self._is_recalled = self._work, None, False
            assert work is not None
            return work

    def must_return(self) -> bool:
        """Return whether torchrun must leave its workers and call `take`."""
        with self._changed:
            ended = self._outcome is not None and self._outcome.state != "succeeded"
            return self._is_recalled or self._work is not None or ended

    def has_succeeded(self) -> bool:
        """Return whether every rank of the whole job has exited with 0."""
        with self._changed:
            return self._outcome is not None and self._outcome.state == "succeeded"


async def _spawn(
    handover: Handover, context: LaunchContext, order: Order, boot: BootDirectory, directories: dict[int, Path]
) -> own.Spawned:
    """Have torchrun's main thread start the workers; they are children of this process all the same."""
    work = Work(order, boot, directories)
    handover.offer(work)
    try:
        return await work.pids, lambda: None, "torchrun starts the ranks" if order.standby else None
    finally:
        handover.withdraw(work)


class NoOrphans(Orphans):
    """torchrun has other children, such as our agent, so only the workers' process groups are killed."""

    def tend(self, workers: Iterable[Worker], *, kill_all: bool = False) -> int:
        """Leave all other children alone."""
        return 0


class TorchHere:
    """What the engine needs torch for, in this process: torchrun has imported it."""

    def __init__(self) -> None:
        self._store: Any = None

    async def ask(self) -> TorchFacts:
        # Counting GPUs takes a while, and so does the import, where torchrun has not needed all of torch yet.
        facts: TorchFacts = await asyncio.to_thread(lambda: _torch_api().facts())
        return facts

    async def serve(self, host: str, listening: socket.socket) -> None:
        # Its own client must reach the address.
        opening = asyncio.get_running_loop().run_in_executor(None, _torch_api().open_store, host, listening)
        self._store = await asyncio.wait_for(opening, STORE_S)

    async def drop(self) -> None:
        self._store = None

    async def close(self) -> None:
        self._store = None


def _torch_api() -> Any:
    return importlib.import_module("remote_agent.engine.torch_api")


class HandlerEngine(Engine):
    """The engine of a torchrun's node."""

    def __init__(self, job: str, handover: Handover) -> None:
        super().__init__(job, partial(own.start, spawn=partial(_spawn, handover)), NoOrphans(), TorchHere())
        self.torchrun_ends = asyncio.Event()
        self._job = job
        self._handover = handover
        self._stopping = False
        self._ops["end"] = self._end
        self._ops["remark"] = self._remark

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer until the agent is gone or torchrun ends, then end every worker."""
        await self._serve(Channel(reader, writer, self._handle), self.torchrun_ends)

    async def end_workers(self, grace_s: float) -> None:
        """Return when no worker is left, so that torchrun can reap them; stops them unless that is under way."""
        if self._group is None or self._group.ended.is_set():
            return
        if self._stopping:
            await self._group.ended.wait()
        else:
            await self._group.stop(grace_s, collect=False)

    async def _end(self, args: Args) -> Mapping[str, object]:
        self._handover.close(Outcome(str(args["state"]), str(args["reason"])))
        return {}

    async def _remark(self, args: Args) -> Mapping[str, object]:
        say(self._job, str(args["text"]))
        return {}

    async def _stop(self, args: Args) -> StoppedWorkers:
        self._stopping = True
        try:
            # When all have succeeded, torchrun stays with them: the job may be about to succeed.
            if self._group is not None and not self._group.has_succeeded():
                self._handover.recall()
            return await super()._stop(args)
        finally:
            self._stopping = False


class HandlerThread:
    """The thread that runs the engine of this torchrun."""

    def __init__(self, job: str, wire: socket.socket, log_file: str) -> None:
        self.handover = Handover()
        self._job = job
        self._wire = wire
        self._log_file = log_file
        self._engine: HandlerEngine | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name="supervisor", daemon=True)
        self._thread.start()

    def end_workers(self, grace_s: float) -> None:
        """Return when no worker is left, or none that can be ended; call it in torchrun's main thread."""
        if self._engine is None or not self._thread.is_alive():
            return
        ending = asyncio.run_coroutine_threadsafe(self._engine.end_workers(grace_s), self._loop)
        try:
            ending.result(grace_s + END_S)
        except Exception as error:  # noqa: BLE001  torch then does what it can
            log.warning("the workers did not end: %s", error)

    def close(self) -> None:
        """Disconnect from the agent, which then ends; remaining workers are killed."""
        if self._engine is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._engine.torchrun_ends.set)
            self._thread.join(JOIN_S)

    def _live(self) -> None:
        reason = f"the agent ended: see {self._log_file}"
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            log.exception("the handler failed")
            reason = f"{type(error).__name__}: {error}"
        finally:
            self.handover.close(Outcome("lost", reason))

    async def _serve(self) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=self._wire)
        self._engine = HandlerEngine(self._job, self.handover)
        try:
            await self._engine.serve(reader, writer)
        finally:
            writer.close()
            mine = asyncio.all_tasks() - {asyncio.current_task()}
            for task in mine:
                task.cancel()
            await asyncio.gather(*mine, return_exceptions=True)
