"""A folded log: the odd rank is seen among hundreds, what is read stays where it is, and nothing is lost."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from supervisor.logs.merge import Page
from supervisor.logs.selection import Selection
from supervisor.tui.logs import folded, merged
from supervisor.tui.logs.folded import FoldedFeed
from tests.screens import recorded
from tests.screens.screens import press, running, settle, text_of, until
from tests.screens.test_follow import body, log_of

SECOND = 1_000_000_000
BEGIN = 1_795_169_000 * SECOND


def stepping(ranks: int, steps: int) -> recorded.RecordedSession:
    """Many ranks that print one line a step, and all the same but for a number."""
    session = recorded.load("running_2x2")
    session.files = {}
    step(session, ranks, range(steps))
    return session


def step(session: recorded.RecordedSession, ranks: int, steps: range) -> None:
    """Let each rank print its line of these steps."""
    for number in steps:
        for rank in range(ranks):
            loss = "nan" if rank == 37 else f"1.{rank % 7}"
            file = (f"n{rank % 2 + 1}", 0, rank, "stdout")
            session.write(file, f"step {number} loss={loss}".encode(), t_ns=BEGIN + number * SECOND + rank)


def test_the_odd_one_of_512_ranks_is_seen_and_enter_unfolds() -> None:
    async def scenario() -> None:
        session = stepping(512, 3)
        async with running(session) as (app, pilot):

            def shown() -> list[list[str]]:
                return [re.sub(r"^.{14}", "", line).split() for line in body(app) if "step" in line]

            def shows(*texts: str) -> bool:
                return all(text in text_of(app) for text in texts)

            alike = [["[0-36,38-511]~", "step", str(number), "loss=1.0"] for number in range(3)]
            odd = [["n2", "r37", "step", str(number), "loss=nan"] for number in range(3)]
            rows = [line for pair in zip(alike, odd, strict=True) for line in pair]
            await press(app, pilot, "4", "z")
            await until(app, pilot, lambda: shown() == rows and shows("folded"))
            await press(app, pilot, "f", "enter")
            await until(app, pilot, lambda: shows("511 ranks alike", "n2 r1  step 0 loss=1.1"))
            await press(app, pilot, "escape", "z")
            await until(app, pilot, lambda: shows("n2 r1 ") and not shows("[0-36"))

    asyncio.run(scenario())


def test_a_flood_is_asked_for_once_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """While more comes than one page holds, the newest page; after that, what is new."""
    monkeypatch.setattr(folded, "FOLD_PAGE", 512)

    async def scenario() -> None:
        session = stepping(64, 8)
        asked: list[int | None] = []
        merged = session.merged

        async def note(selection: Selection, count: int, **bounds: Any) -> Page:
            asked.append(bounds.get("after_ns"))
            return await merged(selection, count, **bounds)

        monkeypatch.setattr(session, "merged", note)
        feed = FoldedFeed(session, Selection())
        await feed.refresh(20, lambda: True)
        calls = []
        for steps in (range(8, 40), range(40, 80), range(80, 120), range(120, 122), range(122, 123)):
            step(session, 64, steps)
            asked.clear()
            await feed.refresh(20, lambda: True)
            calls.append([after_ns is not None for after_ns in asked])
            last = feed.row(feed.count - 1)
            assert last is not None
            assert last.raw.startswith(b"step %d " % steps[-1])
        assert calls == [[True, False], [False], [False], [False], [True]]
        rows = [feed.row(at) for at in range(1, feed.count)]
        assert [row.raw.split()[1] for row in rows if row and row.who][-6:] == [b"%d" % at for at in range(117, 123)]

    asyncio.run(scenario())


def test_a_reader_of_a_folded_log_is_not_moved_and_follows_again() -> None:
    async def scenario() -> None:
        session = stepping(8, 100)
        async with running(session) as (app, pilot):
            await press(app, pilot, "4", "z", "pageup", "pageup")
            log = log_of(app)
            assert isinstance(log.feed, FoldedFeed)
            assert not log.follow
            before = body(app)
            assert "[0-7]~" in before[0]
            for number in range(100, 110):
                step(session, 8, range(number, number + 1))
                await settle(app, pilot, 1)
                assert body(app) == before
            await until(app, pilot, lambda: bool(log.new_lines_text))
            assert body(app) == before
            await press(app, pilot, "f")
            await until(app, pilot, lambda: "step 109" in body(app)[-1])
            assert all("[0-7]~" in line for line in body(app))
            # Half of a step has come, then all of it.
            session.write(("n1", 0, 0, "stdout"), b"step 110 loss=1.0", t_ns=BEGIN + 110 * SECOND)
            await until(app, pilot, lambda: "n1 r0" in body(app)[-1])
            session.write(("n2", 0, 1, "stdout"), b"step 110 loss=1.0", t_ns=BEGIN + 110 * SECOND + 1)
            await until(app, pilot, lambda: "[0-1] " in body(app)[-1] and "step 109" in body(app)[-2])

    asyncio.run(scenario())


def test_folding_keeps_the_time_that_is_read() -> None:
    async def scenario() -> None:
        session = stepping(8, 200)
        async with running(session) as (app, pilot):
            await press(app, pilot, "4", *["pageup"] * 20)
            top = re.search(r"step \d+ ", body(app)[0])
            assert top is not None
            for is_folded in (True, False):
                await press(app, pilot, "z")
                assert not log_of(app).follow
                assert isinstance(log_of(app).feed, FoldedFeed) is is_folded
                assert any(top[0] in line for line in body(app))

    asyncio.run(scenario())


def test_reading_back_and_forth_shows_every_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Less than there is: what is out of sight is dropped and fetched again.
    monkeypatch.setattr(merged, "MERGED_KEPT", 2_000)
    monkeypatch.setattr(folded, "MERGED_KEPT", 2_000)
    monkeypatch.setattr(folded, "FOLD_PAGE", 512)

    async def scenario() -> None:
        session = stepping(32, 150)
        async with running(session) as (app, pilot):
            await press(app, pilot, "4", "z")
            seen: list[int] = []
            for _ in range(100):
                page = [int(found[1]) for line in body(app) if (found := re.search(r"\[0-31\].*step (\d+) ", line))]
                seen = [number for number in page if number not in seen] + seen
                if 0 in page:
                    break
                await press(app, pilot, "pageup")
            assert seen == list(range(150))
            while "step 149" not in body(app)[-1]:
                before = body(app)
                await press(app, pilot, "pagedown")
                assert body(app) != before

    asyncio.run(scenario())
