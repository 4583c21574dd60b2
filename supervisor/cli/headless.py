"""A job watched without a TUI: its merged log on stdout, what happens to it on stderr, its exit status.

In: a session, Ctrl-C. Out: whole lines `node:rank| text`, event lines, the incident last; an exit status.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import IO, TYPE_CHECKING, Any

from supervisor import plain
from supervisor.cli.console import Console
from supervisor.cli.entry import INTERRUPTED, say
from supervisor.cli.output import Writer, write_lines
from supervisor.cli.whole_lines import Printer
from supervisor.errors import EXIT_STATUS, HostFailure, SupervisorError
from supervisor.plain_incident import incident_lines
from supervisor.session.logs import Selection
from supervisor.session.tasks import cancel_all
from supervisor.session.view import ENDED_STATES, local_rank_of

if TYPE_CHECKING:
    from supervisor.session.follow import Chunk
    from supervisor.session.session import Session

# After Ctrl-C: how long a reader of our stdout that takes nothing is waited for, seconds.
PATIENCE = 2.0
# How long the outcome of an ended job is waited for, seconds.
LAST_NEWS = 15.0
EVERYTHING = Console()


class Headless:
    """One run without a screen."""

    def __init__(
        self,
        session: Session,
        stdout: IO[bytes],
        console: Console = EVERYTHING,
        *,
        json_events: bool = False,
        stops_on: Sequence[signal.Signals] = (signal.SIGINT,),
    ) -> None:
        self._session = session
        self._stdout = stdout
        self._console = console
        self._json_events = json_events
        self._stops_on = stops_on
        self._interrupts = 0
        self._signal: int = signal.SIGINT
        self._follows = False
        self._interrupted = asyncio.Event()
        self._enough = asyncio.Event()
        """The job is over, and the rest of its log is not wanted."""
        self._requests: set[asyncio.Task[None]] = set()
        self._told_events = 0
        self._told_notices = 0
        self._told_wait = False
        self._told_hosts: dict[str, str] = {}

    async def launched(self, *, detach: bool, hosts: str | None) -> int:
        """Watch a launch and its job to the end (or, `detach`, until all ranks run); returns the exit status."""
        session = self._session
        say(f"job {session.job}: bringing up {len([link for link in session.links.values() if link.active])} host(s)")
        async with self._watched():
            if not await self._until(session.ready(), self._interrupted):
                if session.launching:
                    say("interrupted; the launch is undone")
                    await session.cancel_launch()
                    return INTERRUPTED
                await session.ready()
            self._begin_following()
            if detach:
                return await self._detach(hosts)
            return await self._follow(Selection(generation="all"), "begin", hosts)

    async def attached(self, *, hosts: str | None) -> int:
        """Watch an existing job from now on; returns the exit status."""
        async with self._watched():
            if not await self._until(self._session.ready(), self._interrupted) or self._interrupts:
                say("interrupted; the job goes on")
                return INTERRUPTED
            self._begin_following()
            return await self._follow(Selection(), "end", hosts)

    @contextlib.asynccontextmanager
    async def _watched(self) -> Any:
        loop = asyncio.get_running_loop()
        for number in self._stops_on:
            loop.add_signal_handler(number, self._interrupt, number)
        try:
            async with self._session:
                telling = asyncio.ensure_future(self._tell())
                try:
                    yield
                finally:
                    await cancel_all((telling, *self._requests))
                    self._tell_new()
        finally:
            for number in self._stops_on:
                loop.remove_signal_handler(number)

    async def _until(self, work: Coroutine[Any, Any, None], event: asyncio.Event) -> bool:
        """Await work; False when the event came first. Raises what the work raises."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return False
            await task
            return True
        finally:
            await cancel_all((task, stop))

    # --- Ctrl-C

    def _interrupt(self, number: int) -> None:
        self._interrupts += 1
        self._signal = number
        self._interrupted.set()
        if self._interrupts > (2 if self._follows else 1):
            raise KeyboardInterrupt
        if self._follows and self._session.state in ENDED_STATES:
            self._enough.set()
        elif self._follows:
            self._ask_to_stop()

    def _begin_following(self) -> None:
        """From here on there is a job that Ctrl-C stops; one that came as the launch ended does so too."""
        self._follows = True
        if self._interrupts:
            self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        kill = self._interrupts == 2
        preempted = end_of_allocation() if self._signal == signal.SIGTERM else ""
        say(preempted or ("killing the job" if kill else "stopping the job; Ctrl-C again kills it at once"))
        task = asyncio.get_running_loop().create_task(self._stop(kill, preempted))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _stop(self, kill: bool, preempted: str) -> None:
        try:
            await self._session.request("stop", kill=kill, preempted=preempted)
        except SupervisorError as error:
            say(str(error))

    # --- the log

    async def _follow(self, selection: Selection, start: str, hosts: str | None) -> int:
        session = self._session
        writer = Writer(self._stdout)
        if not await self._until(self._copy(selection, start, writer), self._enough):
            say("the job is over; the rest of its log stays on the nodes")
        patience = PATIENCE if self._interrupts else None
        await asyncio.to_thread(writer.close, patience)
        if writer.broken:
            say(f"{writer.failure or 'stdout is closed'}; the job goes on: {attach_command(hosts, session.job)}")
            return 1 if writer.failure else 0
        return await self._end()

    async def _copy(self, selection: Selection, start: str, writer: Writer) -> None:
        printer = Printer(self._session)
        chunks = self._session.follow(selection, start)
        try:
            async for chunk in chunks:
                if await self._shows(chunk) and not await self._put(writer, printer.feed(chunk)):
                    return
            await self._put(writer, printer.rest())
        finally:
            await chunks.aclose()

    async def _put(self, writer: Writer, pieces: AsyncGenerator[bytes, None]) -> bool:
        """Write as fast as stdout is read; False once nobody reads it any more."""
        async with contextlib.aclosing(pieces):
            async for data in pieces:
                writer.put(data)
                while writer.full:
                    await writer.room()
                    if self._interrupts and writer.stalled_s > PATIENCE:
                        say("nobody reads stdout; the rest of the log stays on the nodes")
                        return False
                if writer.broken:
                    break
        return not writer.broken

    async def _shows(self, chunk: Chunk) -> bool:
        """Tell whether a chunk belongs on the console; which local rank it is of is a fact of its generation."""
        if self._console.shows_all:
            return True
        end = asyncio.get_running_loop().time() + LAST_NEWS
        while asyncio.get_running_loop().time() < end:
            local_rank = local_rank_of(self._session.events, chunk.generation, chunk.rank)
            if local_rank is not None:
                return self._console.shows(chunk.rank, local_rank, chunk.stream)
            await self._session.wait_change(0.5)
        return True

    async def _end(self) -> int:
        """Tell the last news of a job that is over, a failure's verdict at the end; returns the exit status."""
        session = self._session
        await session.wait_until(lambda: session.ended, LAST_NEWS)
        self._tell_new()
        if session.state == "failed":
            self._tell_incident()
        if self._interrupts and session.state == "stopped":
            return INTERRUPTED
        return EXIT_STATUS.get(session.state, 1)

    # --- detach

    async def _detach(self, hosts: str | None) -> int:
        session = self._session
        while True:
            kinds = {event.get("type") for event in session.events}
            if session.state in ENDED_STATES or session.ended:
                status = await self._end()
                if session.state != "succeeded":
                    return status
                kinds.add("generation_running")
            if "generation_running" in kinds and not session.late:
                self._tell_new()
                write_lines([session.job])
                say(f"job {session.job} runs; watch it with: {attach_command(hosts, session.job)}")
                return 0
            await session.wait_change(0.5)

    # --- news on stderr

    async def _tell(self) -> None:
        version = -1
        while True:
            self._tell_new()
            version = await self._session.wait_change(1.0, version)

    def _tell_new(self) -> None:
        session = self._session
        lines = []
        for view in session.hosts.values():
            ready = session.launching and view.step == "ready"
            news = f"{view.state} {view.error}" if view.error else f"ready {view.text}" if ready else "up"
            if self._told_hosts.get(view.name, "up") != news:
                self._told_hosts[view.name] = news
                # What goes wrong in a launch is told by its outcome, all hosts together.
                if view.error and not session.launching and session.failure is None:
                    lines.append(str(HostFailure(view.name, view.step, view.error, view.hint)))
                elif ready:
                    lines.append(f"{view.name}: {plain.one_line(view.text)}")
        if session.status and not session.status.get("nodes") and not self._told_wait:
            # A torchrun that has not found its job yet: nothing is in the journal.
            self._told_wait = True
            lines.append(f"job {session.job}: waiting for nodes: {plain.one_line(session.status.get('plan') or '')}")
        lines += [plain.one_line(notice.text) for notice in session.notices[self._told_notices :]]
        self._told_notices = len(session.notices)
        line = json.dumps if self._json_events else plain.event_line
        lines += [line(event) for event in session.events[self._told_events :]]
        self._told_events = len(session.events)
        if lines:
            _write_err(lines)

    def _tell_incident(self) -> None:
        incidents = self._session.incidents or [one for one in [self._session.status.get("incident")] if one]
        failure = self._session.status.get("failure")
        lines = [f"job {self._session.job} failed: {plain.one_line(failure)}"] if failure else []
        if incidents:
            lines += incident_lines(incidents[-1])
            earlier = len(incidents) - 1
            lines += [f"({earlier} earlier: supervisor incidents)"] if earlier > 0 else []
        _write_err(lines)


def end_of_allocation() -> str:
    """Say what SIGTERM means inside an allocation: scancel, a time limit, a job of higher priority."""
    return f"Slurm ends allocation {os.environ.get('SLURM_JOB_ID', '')} (SIGTERM)".replace("  ", " ")


def attach_command(hosts: str | None, job: str) -> str:
    """Return the command line that attaches to the job."""
    return " ".join(word for word in ("supervisor attach", hosts or "", job) if word)


def _write_err(lines: list[str]) -> None:
    try:
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
    except (OSError, UnicodeError):
        pass
