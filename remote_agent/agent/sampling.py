"""What the time of this node's ranks goes to: bouts of sampling, for the coordinator and for operators.

In: orders of the coordinator, questions of operators. Out: reports with the windows of the ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from remote_agent.diagnose.slow import shares_of
from remote_agent.wire import Args, CallFailed, WireError
from remote_agent.wire.documents import WINDOW_S

if TYPE_CHECKING:
    from remote_agent.agent.engine_link import EngineLink
    from remote_agent.history.pyramid import Name
    from remote_agent.wire.answers import SampledRanks
    from remote_agent.wire.documents import RankWindow

log = logging.getLogger(__name__)

# How often the samplers' files are read during a bout, and how long after a window's end.
EVERY_S, AFTER_S = 2.0, 0.5
# A rank in a long call writes its window after that: until then it is asked for.
LATE_S = 3.0
# Windows that are kept for operators.
KEPT_WINDOWS = 12
# No bout is longer, in windows, whatever the coordinator says.
LONGEST = 60
# The shares of a rank's time that go into the history.
RECORDED = ("input", "checkpoint")
# An operator who asks gets so many whole windows.
ASKED_WINDOWS = 2


class Workers(Protocol):
    """The node's workers: `LocalWorkers`."""

    engine: EngineLink
    generation: int
    running: int | None

    def pids(self) -> Mapping[int, int]: ...


class Sampling:
    """One node's bouts: the longest that was asked for counts."""

    def __init__(self, workers: Workers, report: Callable[[str, Args], None], shift_ns: Callable[[], int]) -> None:
        """`report`: to the coordinator; `shift_ns`: returns what to add to this clock for the coordinator's."""
        self._workers = workers
        self._report = report
        self._shift_ns = shift_ns
        self._until = 0
        """The number of the first window that is not sampled."""
        self._is_routine = True
        self._wanted = asyncio.Event()
        self._read = asyncio.Event()
        """Set, and replaced, whenever the samplers' files have been read."""
        self.off: dict[str, str] = {}
        """By rank: why it cannot be sampled."""
        self._windows: deque[tuple[int, dict[str, RankWindow]]] = deque(maxlen=KEPT_WINDOWS)
        self._recorded: dict[Name, float] = {}

    def _now(self) -> float:
        """Return the coordinator's time, in windows."""
        return (time.time_ns() + self._shift_ns()) / 1e9 / WINDOW_S

    def order(self, args: Args) -> None:
        """Sample until a window, which the coordinator names; `routine`: nothing is suspected."""
        self._extend(int(args["until"]), bool(args["routine"]))

    def _extend(self, until: int, routine: bool) -> None:
        now = self._now()
        if self._until <= now:
            self._is_routine = routine
        self._is_routine = self._is_routine and routine
        self._until = max(self._until, min(until, int(now) + LONGEST))
        self._wanted.set()

    async def ask(self) -> tuple[int, Mapping[str, Mapping[str, RankWindow]]]:
        """Sample for an operator; return the generation, and by number the windows of the ranks."""
        first = int(self._now()) + 1
        last = first + ASKED_WINDOWS - 1
        self._extend(last + 1, routine=False)
        while (left_s := (last + 1 - self._now()) * WINDOW_S + LATE_S) > 0 and not self._has_all(last):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._read.wait(), left_s)
        return self._workers.generation, {str(number): ranks for number, ranks in self._windows if number >= first}

    def _has_all(self, number: int) -> bool:
        known = next((ranks for each, ranks in self._windows if each == number), {})
        return len(known) + len(self.off) >= len(self._workers.pids())

    def take_shares(self) -> Mapping[Name, float]:
        """Return what the history gets of the windows since the last call."""
        recorded, self._recorded = self._recorded, {}
        return recorded

    async def keep(self) -> None:
        """Sample whenever it is wanted, until cancelled."""
        while True:
            await self._wanted.wait()
            while self._now() < self._until + LATE_S / WINDOW_S:
                await self._sample()
                now = self._now()
                after_end = int(now + 1) + AFTER_S / WINDOW_S
                await asyncio.sleep(min(EVERY_S, (after_end - now) * WINDOW_S))
            self._wanted.clear()

    async def _sample(self) -> None:
        """Renew the samplers' order, and report what they have written since."""
        generation, shift_ns = self._workers.generation, self._shift_ns()
        read, self._read = self._read, asyncio.Event()
        try:
            if self._workers.running == generation:
                until_ns = int(self._until * WINDOW_S * 1e9) - shift_ns
                args = {"until_ns": until_ns, "shift_ns": shift_ns, "routine": self._is_routine}
                answer: SampledRanks = await self._workers.engine.call("sample", args)
                self._note(generation, answer)
        except (CallFailed, WireError, asyncio.TimeoutError) as error:
            log.info("no windows of the ranks: %s", str(error) or "no answer in time")
        finally:
            read.set()

    def _note(self, generation: int, answer: SampledRanks) -> None:
        if answer["off"] != self.off:
            self.off = dict(answer["off"])
            reason = next(iter(self.off.values()), "")
            self._report("unsampled", {"generation": generation, "reason": reason})
        for number, ranks in sorted((int(number), ranks) for number, ranks in answer["windows"].items()):
            known = next((own for each, own in self._windows if each == number), None)
            if known is None:
                self._windows.append((number, dict(ranks)))
            else:
                known.update(ranks)
            for rank, window in ranks.items():
                if (shares := shares_of(window, WINDOW_S)) is not None:
                    self._recorded.update({(kind, int(rank)): shares.of(kind) for kind in RECORDED})
            self._report("windows", {"generation": generation, "window": number, "ranks": ranks})
