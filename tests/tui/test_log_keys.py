"""The keys of the log screen: ways to a line, wrapped lines, bookmarks, and what is taken out of the log."""

from __future__ import annotations

import asyncio

import pytest
from rich.cells import cell_len

from supervisor.tui.app import SupervisorApp
from supervisor.tui.cells import text_of as plain_text
from supervisor.tui.feeds import RankFeed
from supervisor.tui.textflow import fold_row
from tests.tui import recorded
from tests.tui.screens import press, running, settle, text_of, until
from tests.tui.test_follow import FILE, log_of, open_stdout

SECOND = 1_000_000_000
BEGIN = 1_795_169_000 * SECOND


def body(app: SupervisorApp) -> list[str]:
    """The rows of the log, without title, bars and scroll bar."""
    return [line.rstrip("│┃ ") for line in text_of(app).splitlines()[3:-2]]


def numbered(lines: int, *, wide: bool = False) -> recorded.RecordedSession:
    """One rank that writes a line a second, each longer than the screen is wide."""
    session = recorded.load("running_2x2")
    session.files = {}
    for number in range(lines):
        text = f"line {number:06d} " + ("漢字" * 40 if wide else "x" * 150) + f" end {number:06d}"
        session.write(FILE, text.encode(), t_ns=BEGIN + number * SECOND)
    return session


@pytest.mark.parametrize("width", [1, 2, 3, 7, 80])
def test_a_row_that_is_folded_loses_nothing_and_fits(width: int) -> None:
    row = (("ab漢字c\u0301", "text"), ("", "dim"), ("x" * 200 + "👩‍🚀é", "hit"))
    rows = fold_row(row, width)
    assert "".join(map(plain_text, rows)) == plain_text(row)
    assert all(cell_len(plain_text(one)) <= max(2, width) for one in rows)
    assert fold_row((), width) == [()]


@pytest.mark.parametrize("wide", [False, True])
def test_wrapped_lines_are_read_whole_and_the_reader_stays(wide: bool) -> None:
    async def scenario() -> None:
        session = numbered(300, wide=wide)
        async with running(session) as (app, pilot):
            log = await open_stdout(app, pilot)
            assert isinstance(log.feed, RankFeed)
            await press(app, pilot, "w")
            assert body(app)[-1].endswith("end 000299"), "it still follows the end"
            await press(app, pilot, "pageup", "pageup")
            top = body(app)[0]
            await press(app, pilot, "k")
            assert body(app)[1] == top, "a step is a row of the screen, not a line"
            before = body(app)
            session.write(FILE, *(b"new " + b"y" * 300 for _ in range(20)))
            await until(app, pilot, lambda: log.unseen == 20)
            assert body(app) == before
            number = log.top
            await press(app, pilot, "w")
            assert f"line {number:06d}" in body(app)[0]
            await press(app, pilot, "w", "g")
            assert sum("line " in line for line in body(app)) < len(body(app)) / 2
            seen = [line[15:].strip() for line in body(app)]
            while log.top < 6:
                rows = body(app)
                await press(app, pilot, "pagedown", turns=2)
                assert body(app)[0] == rows[-1]
                seen += [line[15:].strip() for line in body(app)[1:]]
            whole = "".join(seen)
            assert all(f"line {number:06d}" in whole and f"end {number:06d}" in whole for number in range(6))

    asyncio.run(scenario())


def test_a_jump_among_wrapped_lines_and_a_resize_keep_the_line_in_view() -> None:
    async def scenario() -> None:
        async with running(numbered(300)) as (app, pilot):
            log = await open_stdout(app, pilot)
            await press(app, pilot, "w", "g")
            log.jump(200, (0, 0, "stdout", 200))
            await settle(app, pilot)
            assert any("line 000200" in line for line in body(app))
            await pilot.resize_terminal(60, 16)
            await settle(app, pilot)
            await pilot.resize_terminal(120, 30)
            assert "line 000200" in await settle(app, pilot)

    asyncio.run(scenario())


def test_wrapping_is_kept_per_job_and_works_in_every_view() -> None:
    async def scenario() -> None:
        session = numbered(50)
        session.write(("n2", 0, 2, "stdout"), b"z" * 300)
        async with running(session) as (app, pilot):
            await press(app, pilot, "4", "w")
            for more in ("z", "M", "s"):
                await press(app, pilot, more)
                assert log_of(app).wrap
                assert any("x" * 20 in line and "line" not in line for line in body(app)), text_of(app)
        async with running(session) as (app, pilot):
            await press(app, pilot, "4")
            assert log_of(app).wrap

    asyncio.run(scenario())
