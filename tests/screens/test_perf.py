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

from remote_agent.wire import Answer
from supervisor.tui.app import SupervisorApp
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

    async def log(self, node: str, op: str, args: Any) -> Answer:
        """A window, made when it is asked for."""
        first = max(0, self.total + args["line"] if args["line"] < 0 else args["line"])
        lines = range(first, min(self.total, first + args["count"]))
        rows = [{"line": at, "offset": at * 100, "t_ns": at * 1000, "level": None} for at in lines]
        body = b"\n".join(
            b"[GPU0] step=%d loss=2.3041 lr=3.0e-04 tokens/s=96021 mem=71.2G %d" % (at, at) for at in lines
        )
        return Answer({"line": first, "total_lines": self.total, "size": self.total * 100, "rows": rows}, body)


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
        jumped = await frames(app, pilot, lambda number: log.jump(number * 7_654_321 % 9_999_000), 20)
        text = await press(app, pilot, "f")
        assert f"{session.total - 1}" in text
        for times in (jumped, await frames(app, pilot, grow, 20)):
            assert sorted(times)[len(times) // 2] < STUCK_S

    await cost(session, (160, 48), work)
