"""The keys of the log screen: ways to a line, wrapped lines, bookmarks, and what is taken out of the log."""

from __future__ import annotations

import asyncio
import datetime
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from textual.pilot import Pilot
from textual.widgets import Input

from supervisor.tui.app import SupervisorApp
from supervisor.tui.logs.feeds import RankFeed
from supervisor.tui.logs.folded import FoldedFeed
from supervisor.tui.logs.merged import MergedFeed
from supervisor.tui.rows.spans import fold_row
from supervisor.tui.rows.spans import text_of as plain_text
from supervisor.tui.screens.logs.search import read_time
from supervisor.tui.shell import Target
from tests.screens import recorded
from tests.screens.screens import press, running, settle, text_of, type_key, until
from tests.screens.test_feeds import ALL, Cluster, NodeLink, lines, no, run, yes
from tests.screens.test_follow import FILE, log_of, open_stdout

SECOND = 1_000_000_000
BEGIN = 1_795_169_000 * SECOND


def body(app: SupervisorApp) -> list[str]:
    """The rows of the log, without title, bars and scroll bar."""
    return [line.rstrip("│┃ ") for line in text_of(app).splitlines()[3:-2]]


async def answer(app: SupervisorApp, pilot: Pilot[int], key: str, text: str) -> str:
    """Type what a key asks for, as fast as a paste."""
    await press(app, pilot, key, turns=2)
    # Where the machine stands still for seconds, keys that are typed ahead are handed on to what is there.
    await until(app, pilot, lambda: isinstance(app.focused, Input))
    for char in text:
        type_key(app, char)
    return await press(app, pilot, "enter")


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
            await until(app, pilot, lambda: log.new_lines_text == "+20 lines")
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


READ = int(datetime.datetime(2026, 11, 20, 10, 3, 20, tzinfo=datetime.timezone.utc).timestamp())


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("10:04", "2026-11-20 10:04:00"),
        ("9:59:30.25", "2026-11-20 09:59:30.250000"),
        # Tomorrow has not come yet, yesterday has.
        ("23:30", "2026-11-19 23:30:00"),
        ("12:30", "2026-11-20 12:30:00"),
        ("-5m", "2026-11-20 09:58:20"),
        ("+1h30m", "2026-11-20 11:33:20"),
        ("-1.5d", "2026-11-18 22:03:20"),
        (" 2026-11-20T14:03:20Z ", "2026-11-20 14:03:20"),
        ("2026-11-20 14:03", "2026-11-20 14:03:00"),
        ("2026-11-20T14:03:20+02:00", "2026-11-20 12:03:20"),
        ("-99999999d", "1970-01-01 00:00:00"),
    ],
)
def test_a_time_as_people_type_it(text: str, meant: str) -> None:
    t_ns = read_time(text, READ * SECOND, READ + 2 * 3600)
    found = datetime.datetime.fromtimestamp(t_ns / 1e9, tz=datetime.timezone.utc)
    assert str(found.replace(tzinfo=None)) == meant


@pytest.mark.parametrize("text", ["24:00", "14", "-5", "soon", "2026-13-01", "14:03:61"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="not a time; try 14:03, "):
        read_time(text, READ * SECOND, READ)


def test_times_across_a_change_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    # Noon on the day after summer time ended.
    noon = int(datetime.datetime(2026, 10, 26, 11, tzinfo=datetime.timezone.utc).timestamp())
    assert read_time("13:00", noon * SECOND, noon + 7200) == (noon + 3600) * SECOND
    assert read_time("2026-10-24T12:00", noon * SECOND, noon) == (noon - 49 * 3600) * SECOND


@pytest.mark.parametrize("keys", [("4",), ("4", "z"), ("3", "enter", "s")], ids=["merged", "folded", "one stream"])
def test_a_jump_to_a_time_and_what_is_wrong_with_one(keys: tuple[str, ...]) -> None:
    async def scenario() -> None:
        # The first line came at 10:03:20 by the screen's clock.
        session = numbered(3000)
        async with running(session) as (app, pilot):
            await press(app, pilot, *keys)
            log = log_of(app)
            for typed, line in (("10:33", 1780), ("-5m", 1480), ("+10s", 1490), ("2026-11-20T10:03:21Z", 1)):
                await answer(app, pilot, "@", typed)
                await until(app, pilot, lambda line=line: log.pointer == (0, 0, "stdout", line))  # type: ignore[misc]
                await settle(app, pilot)
                assert any(f"line {line:06d}" in row for row in body(app)), text_of(app)
                assert not log.follow
            before = body(app)
            text = await answer(app, pilot, "@", "teatime")
            assert "not a time; try 14:03, 14:03:20, -5m" in text
            assert body(app)[:-1] == before[:-1]
            await press(app, pilot, "escape")
            assert body(app) == before
            await answer(app, pilot, "@", "+9h")
            await until(app, pilot, lambda: any("line 002999" in row for row in body(app)))

    asyncio.run(scenario())


def test_a_jump_to_a_line() -> None:
    async def scenario() -> None:
        async with running(numbered(3000)) as (app, pilot):
            assert "only one stream of one rank has line numbers" in await press(app, pilot, "4", "ctrl+g")
            log = await open_stdout(app, pilot)
            await answer(app, pilot, "ctrl+g", "1,500")
            assert any("line 001499" in row for row in body(app))
            assert log.pointer == (0, 0, "stdout", 1499)
            assert "line 1,500 of 3,000" in text_of(app)
            for typed, said in (
                ("3001", "the last line is 3,000"),
                ("0", "not a line number"),
                ("x", "not a line number"),
            ):
                assert said in await answer(app, pilot, "ctrl+g", typed)
                assert "line 001499" in await press(app, pilot, "escape")

    asyncio.run(scenario())


@pytest.mark.parametrize("keys", [(), ("z",), ("&", *"[05] x", "enter")], ids=["merged", "folded", "filtered"])
def test_the_scroll_bar_shows_the_position_in_the_whole_log(keys: tuple[str, ...]) -> None:
    def thumb(app: SupervisorApp) -> float:
        bar = [line[-1] for line in text_of(app).splitlines() if line[-1:] in ("│", "┃")]
        places = [at for at, glyph in enumerate(bar) if glyph == "┃"]
        return sum(places) / len(places) / (len(bar) - 1)

    async def scenario() -> None:
        async with running(numbered(3000)) as (app, pilot):
            await press(app, pilot, "4", *keys)
            log = log_of(app)
            for share in (0.1, 0.5, 0.9, 0.3):
                log.jump_to_time(BEGIN + int(share * 3000) * SECOND)
                await until(app, pilot, lambda share=share: abs(thumb(app) - share) < 0.08)  # type: ignore[misc]
            for key, share in (("g", 0.0), ("G", 1.0)):
                await press(app, pilot, key)
                await until(app, pilot, lambda share=share: thumb(app) == share)  # type: ignore[misc]

    asyncio.run(scenario())


def test_bookmarks_are_gone_to_in_order_and_are_there_at_the_next_look() -> None:
    async def scenario() -> None:
        session = numbered(3000)
        session.write(("n2", 0, 2, "stdout"), *(b"other %d" % number for number in range(3)), t_ns=BEGIN + 500 * SECOND)
        async with running(session) as (app, pilot):
            log = await open_stdout(app, pilot)
            assert "no bookmark" in await press(app, pilot, "'")
            for line in (2000, 1000):
                await answer(app, pilot, "ctrl+g", str(line))
                before = body(app)
                await press(app, pilot, "m")
                assert [row.replace("◆", " ") for row in body(app)] == before, "nothing has moved"
            assert any("◆line 000999" in row for row in body(app))
            assert log.pointer is not None
            for key, line in (("'", 1999), ("'", 999), ('"', 1999), ('"', 999)):
                await press(app, pilot, key)
                assert log.pointer == (0, 0, "stdout", line)
                assert [row for row in body(app) if row.startswith("▸") and f"◆line {line:06d}" in row]
        async with running(session) as (app, pilot):
            await press(app, pilot, "4", "'")
            log = log_of(app)
            for line in (999, 1999):
                await until(app, pilot, lambda line=line: log.pointer == (0, 0, "stdout", line))  # type: ignore[misc]
                assert f"line {line:06d}" in await settle(app, pilot)
                await press(app, pilot, "'")
            await settle(app, pilot)
            await press(app, pilot, "m")
            assert [mark.line for mark in app.preferences.bookmarks] == [1999]
            app.open_log(Target("n2", 2))
            assert "no bookmark" in await press(app, pilot, "'")

    asyncio.run(scenario())


def test_tracebacks_and_errors_one_after_the_other_also_those_that_came_later() -> None:
    async def scenario() -> None:
        session = numbered(2000)
        for at in (300, 900):
            session.files[FILE][at].text = b"[rank0]: Traceback (most recent call last):"
            session.files[FILE][at].level = "error"
        session.files[FILE][600].text, session.files[FILE][600].level = b"an ERROR without one", "error"
        async with running(session) as (app, pilot):
            log = await open_stdout(app, pilot)

            async def leads(key: str, line: int) -> None:
                def is_there() -> bool:
                    return log.pointer == (0, 0, "stdout", line) and any(row.startswith("▸") for row in body(app))

                await press(app, pilot, key)
                await until(app, pilot, is_there)

            await leads("{", 900)
            assert "traceback: hit 2 of 2" in text_of(app)
            await leads("{", 300)
            await leads("}", 900)
            await leads("e", 600 if log.follow else 900)
            await leads("E", 600)
            await leads("E", 300)
            await leads("e", 600)
            await press(app, pilot, "f")
            session.write(FILE, b"Traceback (most recent call last):", level="error")
            await until(app, pilot, lambda: "Traceback" in body(app)[-1])
            await leads("{", 2000)

    asyncio.run(scenario())


def test_new_lines_are_noticed_wherever_one_reads(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, first: NodeLink, second: NodeLink) -> None:
        for feed in (MergedFeed(cluster.source, ALL), FoldedFeed(cluster.source, ALL)):
            trace = b"Traceback (most recent call last):\n  File\nKeyError: 1\nhalf a"
            await first.written(0, lines(500) + trace)
            for _ in range(2):
                await feed.refresh(10, yes)
            await feed.refresh(10, no)
            assert feed.new_lines_text == ""
            await first.written(0, b" line\n" + lines(70))
            await second.written(1, lines(1000))
            await feed.refresh(10, no)
            assert (feed.new_lines_text, feed.detached) == ("new lines below", True)
            await second.written(2, lines(200))
            await feed.refresh(10, no)
            await feed.show_begin(10)
            await feed.refresh(10, no)
            assert feed.new_lines_text
            second.stuck = True
            await feed.refresh(10, no)
            assert feed.new_lines_text, "also while a node does not answer"
            second.stuck = False
            await feed.refresh(10, yes)
            assert (feed.new_lines_text, feed.detached) == ("", False)

    run(tmp_path, scenario, 2)
