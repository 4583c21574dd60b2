"""The keys of the log screen: ways to a line, wrapped lines, a whole record, and a log in a file."""

from __future__ import annotations

import asyncio
import datetime
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from textual.pilot import Pilot
from textual.widgets import Input

from supervisor.errors import Unreachable
from supervisor.logs.pages import Page
from supervisor.logs.selection import Selection
from supervisor.tui.app import SupervisorApp
from supervisor.tui.rows.spans import fold_row
from supervisor.tui.rows.spans import text_of as plain_text
from supervisor.tui.screens.logs import record, save
from supervisor.tui.screens.logs.screen import LogsScreen
from supervisor.tui.screens.logs.search import read_time
from supervisor.wording import values
from tests.screens.logs import (
    BEGIN,
    FILE,
    ONE,
    SECOND,
    answer,
    body,
    led_to,
    log_of,
    numbered,
    open_stdout,
    see,
    stepping,
)
from tests.screens.screens import playing, press, running, settle, text_of, type_key, until


@pytest.mark.parametrize("width", [1, 2, 3, 7, 80])
def test_a_row_that_is_folded_loses_nothing_and_fits(width: int) -> None:
    row = (("ab漢字c\u0301", "text"), ("", "dim"), ("x" * 200 + "👩‍🚀é", "hit"))
    rows = fold_row(row, width)
    assert "".join(map(plain_text, rows)) == plain_text(row)
    assert all(cell_len(plain_text(one)) <= max(2, width) for one in rows)
    assert fold_row((), width) == [()]


async def test_wrapped_lines_are_read_whole_and_the_reader_stays() -> None:
    session = numbered(300, wide=True)
    async with running(session) as (app, pilot):
        log = await open_stdout(app, pilot)
        await press(app, pilot, "w")
        # It still follows the end.
        await until(app, pilot, lambda: body(app)[-1].endswith("end 000299"))
        await press(app, pilot, "pageup", "pageup")
        top = body(app)[0]
        await press(app, pilot, "k")
        assert body(app)[1] == top, "a step is a row of the screen, not a line"
        before = body(app)
        session.write(FILE, *(b"new " + b"y" * 300 for _ in range(20)))
        await until(app, pilot, lambda: bool(log.new_lines_text))
        assert body(app) == before
        number = log.lines_here()[log.top].line
        await press(app, pilot, "w")
        assert f"line {number:06d}" in body(app)[0]
        await press(app, pilot, "w", "g")
        assert sum("line " in line for line in body(app)) < len(body(app)) / 2
        seen = [line[15:].strip() for line in body(app)]
        while log.top < 6:
            rows = body(app)
            await press(app, pilot, "pagedown")
            assert body(app)[0] == rows[-1]
            seen += [line[15:].strip() for line in body(app)[1:]]
        whole = "".join(seen)
        assert all(f"line {number:06d}" in whole and f"end {number:06d}" in whole for number in range(6))


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


@pytest.mark.parametrize("keys", [("4", "z"), ("3", "enter", "s")], ids=["folded", "one stream"])
async def test_a_jump_to_a_time_and_what_is_wrong_with_one(keys: tuple[str, ...]) -> None:
    # The first line came at 10:03:20 by the screen's clock.
    async with running(numbered(3000)) as (app, pilot):
        await press(app, pilot, *keys)
        log = log_of(app)
        for typed, line in (("10:33", 1780), ("-5m", 1480), ("+10s", 1490), ("2026-11-20T10:03:21Z", 1)):
            await answer(app, pilot, "@", typed)
            await led_to(app, pilot, line)
            await see(app, pilot, f"line {line:06d}")
            assert not log.follow
        before = body(app)
        text = await answer(app, pilot, "@", "teatime")
        assert "not a time; try 14:03, 14:03:20, -5m" in text
        assert body(app)[:-1] == before[:-1]
        await press(app, pilot, "escape")
        assert body(app) == before
        await answer(app, pilot, "@", "+9h")
        await see(app, pilot, "line 002999")


async def test_a_jump_to_a_line() -> None:
    async with running(numbered(3000)) as (app, pilot):
        assert "only one stream of one rank has line numbers" in await press(app, pilot, "4", "ctrl+g")
        log = await open_stdout(app, pilot)
        text = await answer(app, pilot, "ctrl+g", "1,500")
        assert "line 001499" in text
        assert "line 1,500 of 3,000" in text
        assert log.pointer == (0, 0, "stdout", 1499)
        refusals = (("3001", "the last line is 3,000"), ("0", "not a line number"), ("x", "not a line number"))
        for typed, said in refusals:
            assert said in await answer(app, pilot, "ctrl+g", typed)
            assert "line 001499" in await press(app, pilot, "escape")


@pytest.mark.parametrize("keys", [("4", "z"), ("3", "enter", "s")], ids=["folded", "one stream"])
async def test_the_scroll_bar_shows_the_position_in_the_whole_log(keys: tuple[str, ...]) -> None:
    def thumb(app: SupervisorApp) -> float:
        bar = [line[-1] for line in text_of(app).splitlines() if line[-1:] in ("│", "┃")]
        places = [at for at, glyph in enumerate(bar) if glyph == "┃"]
        return sum(places) / len(places) / (len(bar) - 1)

    async with running(numbered(3000)) as (app, pilot):
        await press(app, pilot, *keys)
        log = log_of(app)
        for share in (0.1, 0.5, 0.9, 0.3):
            log.jump_to_time(BEGIN + int(share * 3000) * SECOND)
            await until(app, pilot, lambda share=share: abs(thumb(app) - share) < 0.08)  # type: ignore[misc]
        for key, share in (("g", 0.0), ("G", 1.0)):
            await press(app, pilot, key)
            await until(app, pilot, lambda share=share: thumb(app) == share)  # type: ignore[misc]


async def test_keys_lead_from_error_to_error() -> None:
    session = numbered(2000)
    for at in (300, 900):
        session.files[FILE][at].text = b"[rank0]: Traceback (most recent call last):"
        session.files[FILE][at].level = "error"
    session.files[FILE][600].text, session.files[FILE][600].level = b"an ERROR without one", "error"
    async with running(session) as (app, pilot):
        await open_stdout(app, pilot)
        await press(app, pilot, "{")
        await led_to(app, pilot, 900)
        assert "traceback: hit 2 of 2" in text_of(app)
        for key, line in (("{", 300), ("}", 900), ("E", 600), ("E", 300), ("e", 600)):
            await press(app, pilot, key)
            await led_to(app, pilot, line)
        await press(app, pilot, "f")
        session.write(FILE, b"Traceback (most recent call last):", level="error")
        await until(app, pilot, lambda: "Traceback" in body(app)[-1])
        await press(app, pilot, "{")
        await led_to(app, pilot, 2000)


TRACE = (
    b"step 7", b"[rank0]: Traceback (most recent call last):", b'[rank0]:   File "train.py", line 88, in <module>',
    b"[rank0]:     main()", b"[rank0]: ValueError: \x1b[31mnot this time", b"step 8",
)  # fmt: skip


async def test_enter_shows_all_of_a_traceback_and_y_copies_it(tmp_path: Path) -> None:
    session = numbered(400)
    session.write(FILE, *TRACE)
    async with running(session, (100, 30)) as (app, pilot):
        await press(app, pilot, "4")
        # One of its inner lines is read.
        log_of(app).jump_to_key(session.files[FILE][403].t_ns, (0, 0, "stdout", 403))
        await settle(app, pilot)
        before = body(app)
        text = await press(app, pilot, "enter")
        assert "lines 402 to 405 of generation_0/rank_0/stdout.log on n1, from" in text
        assert "32,080" in text
        assert "arrived 2026-11-20 10:09:59.002" in text
        assert "ValueError: not this time" in text
        await press(app, pilot, "y", "escape")
        copied = (tmp_path / "state" / "supervisor" / "copied.txt").read_text()
        assert copied == b"\n".join(TRACE[1:5]).decode().replace("\x1b[31m", "") + "\n"
        assert body(app)[:10] == before[:10]


async def test_a_record_longer_than_a_page_is_shown_whole() -> None:
    session = numbered(10)
    session.write(FILE, b"Traceback (most recent call last):", *(b"  File %d" % number for number in range(200)))
    session.write(FILE, b"KeyError: 1")
    page = await session.from_line(ONE, (*FILE[1:], 150), 3)
    inner = next(row for row in page.rows if row.line == 150)
    # A hit has the time of its own line.
    for row in (inner, inner._replace(t_ns=session.files[FILE][150].t_ns)):
        found = await record.fetch_record(session, row, page.clocks)
        assert found.text.splitlines()[::201] == ["Traceback (most recent call last):", "KeyError: 1"]
        assert found.facts[0].startswith("lines 11 to 212 of generation_0/rank_0/stdout.log")
    async with running(session) as (app, pilot):
        await press(app, pilot, "4", "g")
        session.hosts["n1"].state = "lost"
        text = await press(app, pilot, "enter")
        assert "cannot load the lines around it: n1: no link" in text
        assert "line 000000" in text


async def saved(app: SupervisorApp, pilot: Pilot[int], path: Path) -> list[str]:
    """Save the log in this file, and return its lines once that is done."""
    await answer_with(app, pilot, "S", path)
    screen = app.screen
    assert isinstance(screen, LogsScreen)
    await until(app, pilot, lambda: path.exists() and not screen.save.title_parts())
    return path.read_text().splitlines()


async def answer_with(app: SupervisorApp, pilot: Pilot[int], key: str, path: Path) -> str:
    """Give a file name to the question of a key, or to the one that is open."""
    await press(app, pilot, *key)
    app.screen.query_one(Input).value = str(path)
    return await press(app, pilot, "enter")


async def test_all_lines_of_the_log_are_saved_as_they_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(save, "ROWS", 64)
    session = numbered(300)
    session.write(("n1", 0, 0, "stderr"), *(b"warning %d" % number for number in range(30)), t_ns=BEGIN)
    own = [f"n1:0| {line.text.decode()}" for line in session.files[FILE]]
    async with running(session) as (app, pilot):
        await press(app, pilot, "4", "pageup", "#", "t")
        before = body(app)
        lines = await saved(app, pilot, tmp_path / "all")
        assert [line for line in lines if "warning" not in line] == own
        assert len(lines) == 330
        assert body(app)[:9] == before[:9]
        assert (tmp_path / "all").stat().st_mode & 0o777 == 0o600
        await answer(app, pilot, "&", "line 0001[0-9]7")
        assert await saved(app, pilot, tmp_path / "kept") == own[107:200:10]
        await press(app, pilot, "escape", "3", "enter", "s")
        assert await saved(app, pilot, tmp_path / "one") == own


async def test_a_folded_log_is_saved_folded(tmp_path: Path) -> None:
    async with running(stepping(40, 3)) as (app, pilot):
        await press(app, pilot, "4", "z")
        alike, odd = "[0-36,38-39]~| step {} loss=1.0", "n2:37| step {} loss=nan"
        wanted = [line.format(number) for number in range(3) for line in (alike, odd)]
        assert await saved(app, pilot, tmp_path / "folded") == wanted


async def test_a_file_is_new_and_whole_or_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(save, "ROWS", 64)

    async def gone(*_args: object, **_more: object) -> Page:
        raise Unreachable("n1: no link")

    session, path = numbered(1000), tmp_path / "log"
    async with running(session) as (app, pilot):
        await press(app, pilot, "4")
        merged = session.merged

        async def some(selection: Selection, count: int, **bounds: Any) -> Page:
            if (bounds.get("after_ns") or 0) > BEGIN + 300 * SECOND:
                await asyncio.Event().wait()
            return await merged(selection, count, **bounds)

        session.merged = some  # type: ignore[method-assign]
        assert re.search(r" save to \S+-all-stdout-stderr.log", await press(app, pilot, "S"))
        app.screen.query_one(Input).value = str(path)
        await press(app, pilot, "enter")
        await until(app, pilot, lambda: "320 lines saved, esc cancels" in text_of(app))
        assert "a log is being saved" in await press(app, pilot, "S")
        type_key(app, "escape")
        await until(app, pilot, lambda: not path.exists())
        assert "lines saved, esc" not in await settle(app, pilot)
        assert app.current_mode == "logs"
        session.merged = gone  # type: ignore[method-assign]
        await answer_with(app, pilot, "S", path)
        await until(app, pilot, lambda: "no link" in text_of(app) and not path.exists())
        path.write_text("mine")
        assert "exists already" in await answer_with(app, pilot, "S", path)
        assert "No such file" in await answer_with(app, pilot, "", tmp_path / "none" / "x")
        assert path.read_text() == "mine"


async def test_long_lines_and_lost_nodes_are_named(tmp_path: Path) -> None:
    session = numbered(2)
    session.hosts["n2"].state = "lost"
    session.write(FILE, b"x" * 70_000)
    merged = session.merged

    async def clipped(selection: Selection, count: int, **bounds: Any) -> Page:
        page = await merged(selection, count, **bounds)
        rows = [row._replace(text=row.text[:9], cut=len(row.text) - 9) if row.line == 2 else row for row in page.rows]
        return page._replace(rows=rows)

    session.merged = clipped  # type: ignore[method-assign]
    async with running(session) as (app, pilot):
        await press(app, pilot, "4")
        assert (await saved(app, pilot, tmp_path / "log"))[2] == "n1:0| xxxxxxxxx… +70.0 kB"
        await until(app, pilot, lambda: "missing" in text_of(app))


async def test_a_time_a_record_and_a_file_of_a_job_that_is_over(tmp_path: Path) -> None:
    async with playing("failed_4x2", (100, 30)) as (app, pilot, _):
        await press(app, pilot, "4")
        log = log_of(app)
        row = log.feed.line(log.feed.count - 1) if log.feed is not None else None
        assert row is not None
        await answer(app, pilot, "@", values.clock_ns(row.t_ns))
        await until(app, pilot, lambda: log.pointer == row.key)
        assert "arrived 20" in await press(app, pilot, "enter")
        await press(app, pilot, "escape")
        lines = await saved(app, pilot, tmp_path / "log")
        assert any(line.endswith(f"| {row.text.decode()}") for line in lines)
