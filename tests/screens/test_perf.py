"""Budgets: what a frame costs depends on what is visible. Processor time, with the encoding for a terminal included."""

from __future__ import annotations

import copy
import gc
import sys
import time
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import pytest
from textual.pilot import Pilot

from supervisor.logs.pages import Page
from supervisor.logs.rows import Clocks, LineKey, LogLine
from supervisor.logs.selection import Selection
from supervisor.tui.app import SupervisorApp
from supervisor.tui.logs.feed import LATEST_NS
from supervisor.tui.screens.logs.screen import LogsScreen
from tests.screens import recorded
from tests.screens.screens import press, settle
from tests.screens.test_robust import Painted

Work = Callable[[SupervisorApp, Pilot[int]], Awaitable[None]]
# Calls are counted, and `python -m tests.bench` measures: a frame that takes longer than this does what it should not.
STUCK_S = 0.5


async def cost(session: recorded.RecordedSession, size: tuple[int, int], work: Work) -> None:
    """Run a scenario on an application that encodes its frames."""
    app = SupervisorApp(session)
    Painted(app)
    async with app.run_test(size=size) as pilot:
        await settle(app, pilot)
        await work(app, pilot)


async def frames(app: SupervisorApp, pilot: Pilot[int], change: Callable[[int], Any], count: int) -> list[float]:
    """Processor time of each frame, from the change to its last byte."""
    times = []
    for number in range(count):
        change(number)
        begin = time.process_time()
        app.tick()
        for _ in range(4):
            await pilot.pause(0)
        times.append(time.process_time() - begin)
    return times


def moved(session: recorded.RecordedSession, number: int) -> Any:
    """The session's status with every rank one step further."""
    status = copy.deepcopy(session.status)
    for node in status["nodes"]:
        for rank in node["ranks"]:
            rank["step"] += 1
            rank["last_output_age_s"] = (number % 40) / 10
    return status


def calls_of(work: Callable[[], object]) -> int:
    """How many calls some work makes, of Python's and of C's: the same on every machine, as a time is not."""
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("key", ["1", "4"], ids=["map", "logs"])
async def test_a_frame_leaves_nothing_for_the_garbage_collector(key: str) -> None:
    session = recorded.measured(recorded.many(64, 8))

    async def show(app: SupervisorApp, pilot: Pilot[int], first: int, count: int) -> None:
        for number in range(first, first + count):
            session.touch(status=moved(session, number))
            for rank in range(20):
                session.write(("n001", 0, rank, "stdout"), b"step %d" % number)
            # Until all of it is on the screen: lines of a log come by requests of their own.
            await settle(app, pilot)

    async def work(app: SupervisorApp, pilot: Pilot[int]) -> None:
        await press(app, pilot, key)
        await show(app, pilot, 0, 3)
        gc.collect()
        gc.disable()
        try:
            await show(app, pilot, 3, 10)
            left = gc.collect()
        finally:
            gc.enable()
        assert left < 10 * 10, "a layout at each frame is 40 objects, all strips are more: then the screen stops"

    await cost(session, (160, 48), work)


async def test_a_map_of_512_ranks_costs_few_calls_for_each() -> None:
    session = recorded.measured(recorded.many(64, 8))

    def change(number: int) -> None:
        status = moved(session, number)
        for node in status["nodes"]:
            for rank in node["ranks"]:
                rank["state"] = "silent" if (rank["rank"] + number) % 97 == 0 else "running"
        session.touch(status=status)

    async def work(app: SupervisorApp, pilot: Pilot[int]) -> None:
        for number in range(3):
            change(number)
            app.tick()
            await pilot.pause(0)
        change(3)
        assert calls_of(app.tick) / 512 < 100

    await cost(session, (160, 48), work)


class Endless(recorded.RecordedSession):
    """A stream of which `total` lines are there."""

    total = 10_000_000

    def _lines(self, first: int, count: int) -> list[LogLine]:
        return [
            LogLine("n1", 0, 0, "stdout", at, at * 100, 1 + at * 1000, None,
                    b"[GPU0] step=%d loss=2.3041 lr=3.0e-04 tokens/s=96021 mem=71.2G %d" % (at, at))
            for at in range(max(0, first), min(self.total, first + count))
        ]  # fmt: skip

    async def from_line(self, selection: Selection, key: LineKey, count: int) -> Page:
        """Lines, made when they are asked for."""
        return Page(self._lines(key[3] - count // 3, count), True, [], Clocks(self))

    async def merged(self, selection: Selection, count: int, **bounds: Any) -> Page:
        """The last ones, or those next to a time."""
        before_ns, after_ns = bounds.get("before_ns"), bounds.get("after_ns")
        end = self.total if before_ns is None else (before_ns + 998) // 1000
        rows = self._lines(end - count if after_ns is None else (after_ns + 998) // 1000, count)
        more = bool(rows) and (rows[0].line > 0 if after_ns is None else rows[-1].line + 1 < self.total)
        return Page(rows, more, [], Clocks(self), lines=self.total)


def endless() -> Endless:
    """Rank 0 has written ten million lines."""
    source = recorded.load("running_2x2")
    session = Endless()
    session.hosts, session.status = source.hosts, source.status
    return session


async def test_ten_million_lines_stop_nobody() -> None:
    session = endless()

    def grow(number: int) -> None:
        session.total += 2500

    async def work(app: SupervisorApp, pilot: Pilot[int]) -> None:
        await press(app, pilot, "3", "enter", "s")
        assert isinstance(app.screen, LogsScreen)
        log = app.screen.view

        def jump(number: int) -> None:
            log.jump_to_key(LATEST_NS, (0, 0, "stdout", number * 7_654_321 % 9_999_000))

        jumped = await frames(app, pilot, jump, 20)
        text = await press(app, pilot, "f")
        assert f"{session.total - 1}" in text
        for times in (jumped, await frames(app, pilot, grow, 20)):
            assert sorted(times)[len(times) // 2] < STUCK_S

    await cost(session, (160, 48), work)
