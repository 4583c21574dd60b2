"""Replays a recording in place of a session, at a time that runs, pauses or jumps.

In: a recording, a clock, keys. Out: the state of the session at that time. No task runs: each access reads the clock.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, NoReturn

from remote_agent.diagnose.incidents import incidents_in
from remote_agent.wire.events import ENDED_STATES
from supervisor import history
from supervisor.errors import RequestFailed, SupervisorError
from supervisor.logs.merge import Page
from supervisor.logs.rows import Clocks, LogLine
from supervisor.nccl import to_fabric
from supervisor.recording import reading

if TYPE_CHECKING:
    from remote_agent.wire import Answer, Args
    from remote_agent.wire.documents import IncidentDocument, JournalEvent, Status
    from supervisor.history import Series, SeriesQuery
    from supervisor.link.view import Notice
    from supervisor.logs.selection import Selection
    from supervisor.nccl import Fabric
    from supervisor.recording.reading import Recording

SPEEDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class PlayedClocks(Clocks):
    """The clocks of a recording, without offsets; after a jump back, rows must be read again."""

    def __init__(self, player: Player) -> None:
        super().__init__(player)
        self._player = player
        self._turns = player.turns

    @property
    def moved(self) -> bool:
        """True after a jump back in time."""
        return self._player.turns != self._turns


class Player:
    """Replays one recording."""

    def __init__(
        self,
        recording: Recording,
        at_ns: int | None = None,
        *,
        speed: float = 1.0,
        paused: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recording = recording
        self.job = recording.job
        self.hosts = {host.name: host for host in recording.hosts}
        self.notices: list[Notice] = []
        self.forwards = ()
        self.launching = False
        self.failure: SupervisorError | None = None
        self.speed = speed
        self.turns = 0
        """The number of jumps back in time."""
        self._clock = clock
        self._paused = paused
        self._at_ns = recording.begin_ns if at_ns is None else min(max(at_ns, recording.begin_ns), recording.end_ns)
        self._since = clock()
        self._version = 0
        self._seen: tuple[int, int, int] = (-1, -1, -1)
        self._events: list[JournalEvent] = []
        self._incidents: list[IncidentDocument] = []
        self._states = reading.RecordedHistory(recording)

    async def __aenter__(self) -> Player:
        return self

    async def __aexit__(self, *_problem: object) -> None:
        self.recording.close()

    # --- the time

    @property
    def now_ns(self) -> int:
        """The time that is shown."""
        if self._paused:
            return self._at_ns
        passed_ns = int((self._clock() - self._since) * self.speed * 1e9)
        return min(self._at_ns + passed_ns, self.recording.end_ns)

    def now_s(self) -> float:
        """Return the time that is shown, in seconds since the epoch."""
        return self.now_ns / 1e9

    @property
    def standing(self) -> str:
        """`paused`, `end`, or "" while the time runs."""
        at_end = self.now_ns >= self.recording.end_ns
        return "end" if at_end else "paused" if self._paused else ""

    def seek(self, t_ns: int) -> None:
        """Jump to a time."""
        self.turns += t_ns < self.now_ns
        self._start_at(min(max(t_ns, self.recording.begin_ns), self.recording.end_ns))

    def _start_at(self, t_ns: int) -> None:
        self._at_ns, self._since = t_ns, self._clock()
        self._version += 1

    def pause(self) -> None:
        """Pause or resume; at the end, restart from the beginning."""
        if self.standing == "end":
            self._paused = False
            self.seek(self.recording.begin_ns)
        else:
            self._start_at(self.now_ns)
            self._paused = not self._paused

    def step(self, direction: int) -> None:
        """Pause at the time of the next event, or of the previous one."""
        times, now_ns = self.recording.event_times_ns, self.now_ns
        self._start_at(now_ns)
        self._paused = True
        if direction > 0:
            at = bisect_right(times, now_ns)
            self.seek(times[at] if at < len(times) else self.recording.end_ns)
        else:
            at = bisect_left(times, now_ns) - 1
            self.seek(times[at] if at >= 0 else self.recording.begin_ns)

    def faster(self, direction: int) -> None:
        """Select the next higher speed, or the next lower one."""
        self._start_at(self.now_ns)
        at = bisect_right(SPEEDS, self.speed) if direction > 0 else bisect_left(SPEEDS, self.speed) - 1
        self.speed = SPEEDS[min(max(at, 0), len(SPEEDS) - 1)]

    # --- the state of the session

    @property
    def version(self) -> int:
        """Grows with every change, and every second because ages are shown."""
        now_ns = self.now_ns
        seen = (
            bisect_right(self.recording.event_times_ns, now_ns),
            bisect_right(self.recording.status_times_ns, now_ns),
            now_ns // 1_000_000_000,
        )
        if seen != self._seen:
            self._seen = seen
            self._version += 1
        return self._version

    @property
    def events(self) -> list[JournalEvent]:
        """The journal up to now."""
        count = bisect_right(self.recording.event_times_ns, self.now_ns)
        if count != len(self._events):
            self._events = self.recording.events[:count]
            self._incidents = incidents_in(self._events)
        return self._events

    @property
    def incidents(self) -> list[IncidentDocument]:
        """The incidents up to now."""
        return self._incidents if self.events else []

    @property
    def status(self) -> Status:
        """The status at that time."""
        return self.recording.status(bisect_right(self.recording.status_times_ns, self.now_ns))

    @property
    def status_age_s(self) -> float:
        """0 once there is a status: a recorded status is never stale."""
        return 0.0 if self.status else float("inf")

    @property
    def ended(self) -> bool:
        """True when the job is over at that time."""
        return self.status.get("state") in ENDED_STATES

    async def request(self, verb: str, **_args: Any) -> NoReturn:
        """Raise RequestFailed: a recording cannot be changed."""
        raise RequestFailed(f"{verb}: this is a recording", "attach to the job itself")

    def ask_user(self) -> int:
        """Return that no host of a recording waits for an answer."""
        return 0

    async def edited(self) -> NoReturn:
        """Raise RequestFailed: nothing can be started from a recording."""
        await self.request("sync")

    async def shell(self, *_args: Any) -> None:
        """Raise RequestFailed: a recording has no nodes."""
        await self.request("shell")

    async def forward(self, _node: str, _port: int, _local: int | None) -> NoReturn:
        """Raise RequestFailed: a recording has no nodes."""
        raise RequestFailed("forward: this is a recording", "attach to the job itself")

    async def stacks(self, _ranks: list[int] | None) -> NoReturn:
        """Raise RequestFailed: no rank of a recording is alive."""
        await self.request("stacks")

    async def nccl(self) -> Fabric:
        """Return how the nodes reach each other, as NCCL reported when the recording was made."""
        return to_fabric(self.recording.meta.get("nccl_nodes", {}), self.status)

    async def series(self, wanted: SeriesQuery) -> Series:
        """Return what a session would, from the recorded states."""
        return history.of_histories(wanted, await self._states.up_to(self.now_ns))

    async def cancel_launch(self) -> None:
        """Do nothing: a recording has no launch."""

    # --- logs

    async def log(self, node: str, op: str, args: Args) -> Answer:
        """Answer log_window as an agent does."""
        if op != "log_window":
            raise RequestFailed(f"a recording cannot answer {op!r}")
        return reading.window(
            self.recording, (node, args["generation"], args["rank"], args["stream"]), self.now_ns, args
        )

    def ahead_ns(self, node: str) -> int:
        """Return 0: recorded times use the coordinator's clock."""
        return 0

    async def merged(
        self,
        selection: Selection,
        count: int,
        *,
        before_ns: int | None = None,
        after_ns: int | None = None,
        clocks: Clocks | None = None,
    ) -> Page:
        """Return rows of all nodes by time, as a session does."""
        now_ns = self.now_ns
        rows, more = await reading.merged(self.recording, selection, count, now_ns, before_ns, after_ns)
        end_ns = now_ns + 1 if before_ns is None else before_ns
        if after_ns is None:
            span = (rows[0].t_ns if more and rows else 0, end_ns)
        else:
            span = (after_ns, rows[-1].t_ns + 1 if more and rows else end_ns)
        return Page(rows, more, [], clocks or PlayedClocks(self), 0, *span)

    def search(self, selection: Selection, **query: Any) -> AsyncGenerator[LogLine, None]:
        """Yield the rows that match, as a session does; of the callbacks none is called."""
        return reading.search(self.recording, selection, self.now_ns, **query)
