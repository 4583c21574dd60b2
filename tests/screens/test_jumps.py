"""Ways to a line: where a jump leads to is where the reader is, also if nothing is shown there, or not yet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from supervisor.errors import Unreachable
from supervisor.logs.merge import Page
from supervisor.logs.selection import RecordFilter
from supervisor.tui.logs.merged import MergedFeed
from supervisor.tui.rows.incident import LogPlace
from supervisor.tui.shell import Target
from supervisor.tui.widgets import feed_view
from supervisor.tui.widgets.virtual_log import NONE_PASSES
from tests.screens.screens import press, running, text_of, until
from tests.screens.test_feeds import ALL
from tests.screens.test_follow import log_of, open_stdout
from tests.screens.test_log_keys import BEGIN, SECOND, answer, body, numbered


@pytest.mark.parametrize("scope", ["one rank", "folded"])
def test_a_jump_in_a_view_that_nothing_passes_leads_there_in_the_next_one(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_view, "LOOK_EVERY", 0.0)

    async def scenario() -> None:
        async with running(numbered(300), (80, 24)) as (app, pilot):
            if scope == "one rank":
                log = await open_stdout(app, pilot)
            else:
                await press(app, pilot, "4", "z")
                log = log_of(app)
            log.jump_to_key(BEGIN + 207 * SECOND, (0, 0, "stdout", 207))
            await until(app, pilot, lambda: any("line 000207" in line for line in body(app)))
            await press(app, pilot, "m", "G")
            for key, text, line in (
                ("@", "10:05", 100),
                ("@", "-30s", 70),
                ("g", "", 0),
                ("'", "", 207),
            ):
                await answer(app, pilot, "&", "zzznothing")
                await until(app, pilot, lambda: NONE_PASSES in text_of(app))
                await (answer(app, pilot, key, text) if text else press(app, pilot, key))
                await until(app, pilot, lambda: NONE_PASSES in text_of(app))
                await press(app, pilot, "backspace")
                await until(app, pilot, lambda line=line: any(f"line {line:06d}" in row for row in body(app)))  # type: ignore[misc]
                assert not log.follow
            await press(app, pilot, "G")
            await answer(app, pilot, "&", "zzznothing")
            await press(app, pilot, "f", "backspace")
            await until(app, pilot, lambda: any("line 000299" in row for row in body(app)))
            assert not log.follow

    asyncio.run(scenario())


def test_a_line_comes_back_also_where_a_far_one_stood_for_it() -> None:
    async def scenario() -> None:
        async with running(numbered(300)) as (app, pilot):
            log = await open_stdout(app, pilot)
            log.jump(107, (0, 0, "stdout", 107))
            await until(app, pilot, lambda: any("line 000107" in row for row in body(app)))
            for text, line in (("line 00025", 250), ("line 00029", 290)):
                await answer(app, pilot, "&", text)
                await until(app, pilot, lambda line=line: log.pointer == (0, 0, "stdout", line))  # type: ignore[misc]
                await press(app, pilot, "backspace")
                await until(app, pilot, lambda: any("line 000107" in row for row in body(app)))
                assert log.pointer == (0, 0, "stdout", 107)

    asyncio.run(scenario())


def test_a_line_of_a_generation_before_is_read_on_without_the_filter() -> None:
    async def scenario() -> None:
        session = numbered(100)
        session.write(("n1", 1, 0, "stdout"), *(b"anew %d" % number for number in range(100)))
        session.touch(status={**session.status, "generation": 1})
        async with running(session) as (app, pilot):
            log = await open_stdout(app, pilot)
            await answer(app, pilot, "&", "7")
            log.jump_to_key(BEGIN + 37 * SECOND, (0, 0, "stdout", 37))
            await until(app, pilot, lambda: any("line 000037" in row for row in body(app)))
            await press(app, pilot, "backspace")
            await until(app, pilot, lambda: any("line 000037" in row for row in body(app)))
            assert "generation 0" in text_of(app)

    asyncio.run(scenario())


def test_a_place_is_shown_without_the_filter_which_comes_back() -> None:
    async def scenario() -> None:
        async with running(numbered(300)) as (app, pilot):
            await press(app, pilot, "4")
            await answer(app, pilot, "&", "line 0002")
            app.open_place(LogPlace("n1", 0, 0, "stdout", 101))
            await until(app, pilot, lambda: any("line 000100" in row for row in body(app)))
            await until(app, pilot, lambda: "the filter is off for this log" in text_of(app))
            assert "+line 0002" not in text_of(app)
            assert app.preferences.log_filter == RecordFilter(("line 0002",)), "it is the job's for all that"
            await press(app, pilot, "backslash")
            await until(app, pilot, lambda: any("line 000200" in row for row in body(app)))
            assert "+line 0002" in text_of(app)
            app.open_place(LogPlace("n1", 0, 0, "stdout", 101))
            await until(app, pilot, lambda: any("line 000100" in row for row in body(app)))
            app.open_log(Target())
            await until(app, pilot, lambda: "+line 0002" in text_of(app))

    asyncio.run(scenario())


def test_a_jump_is_of_the_feed_that_was_opened_with_it_and_goes_on_until_it_has_led_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_view, "RETRY_AFTER", 0.01)

    async def scenario() -> None:
        session = numbered(1000)
        async with running(session) as (app, pilot):
            await press(app, pilot, "4")
            log, merged = log_of(app), session.merged
            before, failures = log.feed, [Unreachable("n1: no link")] * 3
            assert before is not None

            async def fail(*args: Any, **bounds: Any) -> Page:
                if failures:
                    raise failures.pop()
                return await merged(*args, **bounds)

            monkeypatch.setattr(session, "merged", fail)
            log.open(MergedFeed(session, ALL))
            log.jump_to_time(BEGIN + 107 * SECOND)
            # As the loader does that was woken for the feed before.
            await log._load(before)
            assert log.is_jumping
            await until(app, pilot, lambda: any("line 000107" in row for row in body(app)))
            assert not failures

    asyncio.run(scenario())


def test_what_is_loaded_ahead_moves_no_line_between_two_steps() -> None:
    async def scenario() -> None:
        async with running(numbered(600)) as (app, pilot):
            await press(app, pilot, "4")
            log = log_of(app)
            assert log.feed is not None
            log.scroll_lines(75 - log.top)
            before = [row.key for row in log.rows_here()]
            await log._load(log.feed)
            assert log.feed.count > 300, "it was loaded"
            assert [row.key for row in log.rows_here()] == before

    asyncio.run(scenario())
