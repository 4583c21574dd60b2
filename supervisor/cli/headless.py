"""A job without a TUI: its merged log on stdout, its events on stderr, and its exit code.

In: a session, Ctrl-C. Out: whole lines `node:rank| text`, event lines, the incident last; an exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Coroutine, Sequence
from typing import IO, TYPE_CHECKING, Any

from remote_agent.wire.events import ENDED_EVENTS, ENDED_STATES, EventType
from supervisor.cli.entry import INTERRUPTED, say
from supervisor.cli.logs import write_tail
from supervisor.cli.output import Writer, write_lines
from supervisor.cli.progress import Progress
from supervisor.cli.torchrun import Console
from supervisor.cli.whole_lines import WholeLines, printed
from supervisor.errors import EXIT_STATUS, HostFailure, SupervisorError
from supervisor.inventory.pattern import fold
from supervisor.inventory.sources import SOURCES
from supervisor.link.tasks import cancel_all
from supervisor.link.view import local_rank_of
from supervisor.logs.selection import Selection
from supervisor.standard_streams import as_lines, write_err
from supervisor.wording.events import EventRows, event_line, still_there
from supervisor.wording.incidents import incident_text
from supervisor.wording.values import one_line

if TYPE_CHECKING:
    from remote_agent.wire.documents import JournalEvent
    from supervisor.cli.whole_lines import Piece
    from supervisor.logs.reader import Chunk
    from supervisor.session import Session

# After Ctrl-C, a reader of stdout that reads nothing is waited for this long, seconds.
PATIENCE = 2.0
# The last events of a job that has ended are awaited this long, seconds.
LAST_NEWS = 15.0
# The lines of a finished job that `attach` prints; `logs` has them all.
TAIL = 1000
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
        """The job has ended, and the user does not want the rest of its log."""
        self._requests: set[asyncio.Task[None]] = set()
        self._printed_events: list[JournalEvent] = []
        self._event_rows = EventRows()
        self._printed_notices = 0
        self._printed_wait = False
        self._printed_hosts: dict[str, str] = {}
        self._progress = Progress()

    async def launched(self, *, detach: bool, hosts: str | None) -> int:
        """Watch a launch and its job to the end (or, `detach`, until all ranks run); returns the exit code."""
        session = self._session
        names = [name for name, link in session.links.items() if link.active]
        say(f"job {session.job}: bringing up {fold(names)}" + (f" ({hosts})" if hosts else ""))
        async with self._watched():
            if not await self._until(session.ready(), self._interrupted):
                if session.launching:
                    say("interrupted: undoing the launch")
                    await session.cancel_launch()
                    return INTERRUPTED
                await session.ready()
            self._begin_following()
            if detach:
                return await self._detach(hosts)
            return await self._follow(Selection(generation="all"), "begin", hosts)

    async def attached(self, *, hosts: str | None) -> int:
        """Watch an existing job from now on, or print the end of the log of a finished one; returns the exit code."""
        async with self._watched():
            if not await self._until(self._session.ready(), self._interrupted) or self._interrupts:
                say("interrupted; the job keeps running")
                return INTERRUPTED
            self._begin_following()
            await self._session.until_current()
            return await self._follow(Selection(), "end", hosts, is_past=self._is_over())

    @contextlib.asynccontextmanager
    async def _watched(self) -> Any:
        loop = asyncio.get_running_loop()
        for number in self._stops_on:
            loop.add_signal_handler(number, self._interrupt, number)
        try:
            async with self._session:
                printing = asyncio.ensure_future(self._print())
                try:
                    yield
                finally:
                    await cancel_all((printing, *self._requests))
                    self._print_news()
        finally:
            for number in self._stops_on:
                loop.remove_signal_handler(number)

    async def _until(self, work: Coroutine[Any, Any, None], event: asyncio.Event) -> bool:
        """Await the work; returns False if the event was set first. Raises the errors of the work."""
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
        if self._follows and self._is_over():
            self._enough.set()
        elif self._follows:
            self._ask_to_stop()

    def _is_over(self) -> bool:
        """Return whether the job has ended: its last event arrives before the status that follows from it."""
        session = self._session
        return (
            session.made_s is not None
            or session.state in ENDED_STATES
            or any(event.get("type") in ENDED_EVENTS for event in session.events)
        )

    def _begin_following(self) -> None:
        """Make Ctrl-C stop the job from now on, also one that was pressed as the launch ended."""
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

    async def _follow(self, selection: Selection, start: str, hosts: str | None, *, is_past: bool = False) -> int:
        session = self._session
        writer = Writer(self._stdout)
        copying = write_tail(session, writer, TAIL) if is_past else self._copy(selection, start, writer)
        if not await self._until(copying, self._enough):
            say("the job has ended; the rest of its log stays on the nodes")
        patience = PATIENCE if self._interrupts else None
        await asyncio.to_thread(writer.close, patience)
        if writer.broken and not is_past:
            say(f"{writer.failure or 'stdout is closed'}; the job keeps running: {attach_command(hosts, session.job)}")
            return 1 if writer.failure else 0
        return await self._end()

    async def _copy(self, selection: Selection, start: str, writer: Writer) -> None:
        lines = WholeLines(overwrites=writer.is_terminal)
        chunks = self._session.follow(selection, start)
        try:
            async for chunk in chunks:
                if await self._shows(chunk) and not await self._put(writer, lines.feed(chunk)):
                    return
            await self._put(writer, lines.rest())
        finally:
            await chunks.aclose()

    async def _put(self, writer: Writer, pieces: list[Piece]) -> bool:
        """Write as fast as stdout is read; returns False once nobody reads it."""
        async with contextlib.aclosing(printed(self._session, pieces)) as parts:
            async for data in parts:
                writer.put(data)
                while writer.full:
                    await writer.room()
                    # After the end of the job, Ctrl-C ends the copy from outside and prints its own message.
                    if self._interrupts and not self._enough.is_set() and writer.stalled_s > PATIENCE:
                        say("stdout is not read; the rest of the log stays on the nodes")
                        return False
                if writer.broken:
                    break
        return not writer.broken

    async def _shows(self, chunk: Chunk) -> bool:
        """Return whether the console shows a chunk; the local rank depends on the generation."""
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
        """Print the last events of an ended job and the cause of a failure; returns the exit code."""
        session = self._session
        await session.wait_until(lambda: session.ended, LAST_NEWS)
        self._print_news()
        if session.state == "failed":
            self._print_incident()
        if self._interrupts and session.state == "stopped":
            return INTERRUPTED
        return EXIT_STATUS.get(session.state, 0 if session.made_s is not None else 1)

    # --- detach

    async def _detach(self, hosts: str | None) -> int:
        session = self._session
        while True:
            kinds = {event.get("type") for event in session.events}
            if session.state in ENDED_STATES or session.ended:
                status = await self._end()
                if session.state != "succeeded":
                    return status
                kinds.add(EventType.GENERATION_RUNNING)
            if EventType.GENERATION_RUNNING in kinds and not session.late:
                self._print_news()
                write_lines([session.job])
                say(f"job {session.job} is running; watch it with: {attach_command(hosts, session.job)}")
                return 0
            await session.wait_change(0.5)

    # --- events on stderr

    async def _print(self) -> None:
        version = -1
        while True:
            self._print_news()
            version = await self._session.wait_change(1.0, version)

    def _print_news(self) -> None:
        session = self._session
        lines = []
        for view in session.hosts.values():
            ready = session.launching and view.step == "ready"
            news = f"{view.state} {view.error}" if view.error else f"ready {view.text}" if ready else "up"
            if self._printed_hosts.get(view.name, "up") != news:
                self._printed_hosts[view.name] = news
                # The outcome of a launch reports the errors of all hosts together.
                if view.error and not session.launching and session.failure is None:
                    lines.append(str(HostFailure(view.name, view.step, view.error, view.hint)))
                elif ready:
                    lines.append(f"{view.name}: {one_line(view.text)}")
        if session.launching:
            lines += self._progress.lines(session.hosts.values())
        if session.status and not session.status.get("nodes") and not self._printed_wait:
            # torchrun has not found its job yet: the journal is empty.
            self._printed_wait = True
            lines.append(f"job {session.job}: waiting for nodes: {one_line(session.status.get('plan') or '')}")
        lines += [one_line(notice.text) for notice in session.notices[self._printed_notices :]]
        self._printed_notices = len(session.notices)
        if self._json_events:
            lines += map(json.dumps, session.events[still_there(self._printed_events, session.events) :])
            self._printed_events = list(session.events)
        else:
            lines += map(event_line, self._event_rows.follow(session.events))
        if lines:
            write_err(as_lines(lines))

    def _print_incident(self) -> None:
        incidents = self._session.incidents or [one for one in [self._session.status.get("incident")] if one]
        failure = self._session.status.get("failure")
        lines = [f"job {self._session.job} failed: {one_line(failure)}"] if failure else []
        if incidents:
            lines += incident_text(incidents[-1])
            earlier = len(incidents) - 1
            lines += [f"({earlier} earlier: supervisor incidents)"] if earlier > 0 else []
        write_err(as_lines(lines))


def end_of_allocation() -> str:
    """Return the message for SIGTERM in an allocation: scancel, a time limit, or preemption."""
    numbers = {source.scheduler: os.environ.get(source.number) for source in SOURCES if source.number}
    ends = [f"{scheduler} ends allocation {number}" for scheduler, number in numbers.items() if number]
    return f"{ends[0] if ends else 'the allocation ends'} (SIGTERM)"


def attach_command(hosts: str | None, job: str) -> str:
    """Return the command line that attaches to the job."""
    return " ".join(word for word in ("supervisor attach", hosts or "", job) if word)
