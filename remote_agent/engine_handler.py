"""The engine inside a torchrun that somebody else started: its workers are torchrun's, its orders the agent's.

In: the agent's requests on a socket. Out: work for torchrun's main thread, which starts and reaps; answers, notices.

torchrun's main thread takes each generation's work from the Desk, starts the workers and then only waits there. It is
our thread that watches them, stops them and reports, exactly as the engine of a node that we started ourselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_agent.engine import Engine
from remote_agent.engine_group import KILL_S, SWEEP_S, Group
from remote_agent.engine_watch import Orphans, Worker
from remote_agent.wire import Channel

if TYPE_CHECKING:
    from remote_agent.engine_boot import BootDirectory
    from remote_agent.engine_start import Order

log = logging.getLogger(__name__)

JOIN_S = 5.0
# Beyond the workers' own grace: SIGKILL, and what the kernel needs for it.
END_S = KILL_S + SWEEP_S + 5.0


def say(job: str, text: str) -> None:
    """Tell whoever reads what torchrun prints."""
    sys.stderr.write(f"supervisor: job {job}: {text}\n")
    sys.stderr.flush()


@dataclasses.dataclass(frozen=True)
class Outcome:
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
        """Say in torchrun's thread that the workers run: pids by local rank."""
        self._loop.call_soon_threadsafe(self._resolve, pids, None)

    def failed(self, error: BaseException) -> None:
        """Say in torchrun's thread that they do not start."""
        self._loop.call_soon_threadsafe(self._resolve, {}, OSError(str(error) or type(error).__name__))

    def _resolve(self, pids: dict[int, int], error: OSError | None) -> None:
        if self.pids.done():
            # Nobody waited for so long: what came too late must not run.
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        elif error is None:
            self.pids.set_result(pids)
        else:
            self.pids.set_exception(error)


class Desk:
    """Where torchrun's main thread and ours meet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._work: Work | None = None
        self._called = False
        self._outcome: Outcome | None = None

    def offer(self, work: Work) -> None:
        """Leave work for torchrun."""
        with self._changed:
            self._work = work
            self._changed.notify_all()

    def withdraw(self, work: Work) -> None:
        """Take work back that torchrun has not taken."""
        with self._changed:
            if self._work is work:
                self._work = None

    def call(self) -> None:
        """Have torchrun come here: its workers are being stopped."""
        with self._changed:
            self._called = True

    def close(self, outcome: Outcome) -> None:
        """There will be no more work; what was said first counts."""
        with self._changed:
            self._outcome = self._outcome or outcome
            self._changed.notify_all()

    def take(self) -> Work:
        """Wait for work; raises Dismissed when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._work is not None or self._outcome is not None)
            if self._outcome is not None:
                raise Dismissed(self._outcome)
            work, self._work, self._called = self._work, None, False
            assert work is not None
            return work

    def wants(self) -> bool:
        """Whether torchrun must leave its workers and come here."""
        with self._changed:
            ended = self._outcome is not None and self._outcome.state != "succeeded"
            return self._called or self._work is not None or ended

    def has_succeeded(self) -> bool:
        """Whether every rank of the whole job has exited with 0."""
        with self._changed:
            return self._outcome is not None and self._outcome.state == "succeeded"


class NoOrphans(Orphans):
    """torchrun has children of its own, our agent among them: only the workers' process groups are ours to end."""

    def tend(self, workers: Iterable[Worker], *, kill_all: bool = False) -> int:
        """Leave every other child alone."""
        return 0


class HandlerEngine(Engine):
    """An engine whose workers are started and reaped by torchrun's main thread."""

    def __init__(self, job: str, desk: Desk) -> None:
        super().__init__(job)
        self.told = asyncio.Event()
        """Set when torchrun is about to end."""
        self._desk = desk
        self._stopping = False
        self._ops["end"] = self._dismiss
        self._ops["remark"] = self._remark

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer until the agent is gone or torchrun ends, then end every worker."""
        await self._serve(Channel(reader, writer, self._handle), self.told)

    async def end_workers(self, grace_s: float) -> None:
        """Return when no worker is left: torchrun is about to reap them; one that nobody stops is stopped."""
        if self._group is None or self._group.ended.is_set():
            return
        if self._stopping:
            await self._group.ended.wait()
        else:
            await self._group.stop(grace_s, collect=False)

    async def _dismiss(self, args: dict[str, Any]) -> dict[str, Any]:
        self._desk.close(Outcome(str(args["state"]), str(args["reason"])))
        return {}

    async def _remark(self, args: dict[str, Any]) -> dict[str, Any]:
        say(self._job, str(args["text"]))
        return {}

    async def _stop(self, args: dict[str, Any]) -> dict[str, Any]:
        self._stopping = True
        try:
            # Where all have ended well, torchrun stays with them: the job may be about to end with success.
            if isinstance(self._group, Group) and not self._group.has_succeeded():
                self._desk.call()
            return await super()._stop(args)
        finally:
            self._stopping = False

    async def _spawn(
        self, torch: Any, order: Order, boot: BootDirectory, directories: dict[int, Path]
    ) -> tuple[dict[int, int], Callable[[], None]]:
        work = Work(order, boot, directories)
        self._desk.offer(work)
        try:
            return await work.pids, lambda: None
        finally:
            self._desk.withdraw(work)

    def _orphans(self) -> Orphans:
        return NoOrphans()


class HandlerThread:
    """The thread in which the engine of this torchrun lives."""

    def __init__(self, job: str, wire: socket.socket, log_file: str) -> None:
        self.desk = Desk()
        self._job = job
        self._wire = wire
        self._log_file = log_file
        self._engine: HandlerEngine | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name="supervisor", daemon=True)
        self._thread.start()

    def end_workers(self, grace_s: float) -> None:
        """Return when no worker is left, or none that can be ended; called in torchrun's main thread."""
        if self._engine is None or not self._thread.is_alive():
            return
        ending = asyncio.run_coroutine_threadsafe(self._engine.end_workers(grace_s), self._loop)
        try:
            ending.result(grace_s + END_S)
        except Exception as error:  # noqa: BLE001  torch itself then does what it can
            log.warning("the workers do not end: %s", error)

    def close(self) -> None:
        """Let go of the agent, which then ends; workers that are left die."""
        if self._engine is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._engine.told.set)
            self._thread.join(JOIN_S)

    def _live(self) -> None:
        reason = f"the agent ended: see {self._log_file}"
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            log.exception("the handler fails")
            reason = f"{type(error).__name__}: {error}"
        finally:
            self.desk.close(Outcome("lost", reason))

    async def _serve(self) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=self._wire)
        self._engine = HandlerEngine(self._job, self.desk)
        try:
            await self._engine.serve(reader, writer)
        finally:
            writer.close()
            mine = asyncio.all_tasks() - {asyncio.current_task()}
            for task in mine:
                task.cancel()
            await asyncio.gather(*mine, return_exceptions=True)
