"""A search on the log screen: from where one reads, also in what comes later; nobody is moved who has not asked."""

from __future__ import annotations

import asyncio

import pytest

from supervisor.tui import finder
from tests.tui.screens import press, running, text_of, until
from tests.tui.test_follow import FILE, body, log_of, open_stdout, talking


def test_search_steps_through_hits_and_back_ends_it() -> None:
    async def scenario() -> None:
        session = talking(2000)
        for at in (100, 900, 1700):
            session.files[FILE][at].text = b"a needle here"
        async with running(session) as (app, pilot):
            await open_stdout(app, pilot)
            text = await press(app, pilot, "g", "slash", *"needle", "enter")
            assert "hit 1 of 3" in text
            assert "a needle here" in text
            assert "hit 2 of 3" in await press(app, pilot, "n")
            assert log_of(app).pointer == (0, 0, "stdout", 900)
            assert "hit 1 of 3" in await press(app, pilot, "N")
            assert "hit 3 of 3" in await press(app, pilot, "N")
            text = await press(app, pilot, "escape")
            assert "hit" not in text
            assert app.current_mode == "logs"

    asyncio.run(scenario())


@pytest.mark.parametrize("keys", [("s",), ()])
def test_search_begins_where_one_reads_and_goes_on_in_what_comes(
    keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finder, "LOOK_EVERY", 0.05)

    async def scenario() -> None:
        session = talking(2000)
        for at in (100, 900, 1700):
            session.files[FILE][at].text = b"a needle here"
        async with running(session) as (app, pilot):
            await press(app, pilot, "3", "enter", *keys)
            text = await press(app, pilot, "slash", *"needle", "enter")
            assert "hit 3 of 3" in text, "who follows is nearest to the newest"
            assert "hit 2 of 3" in await press(app, pilot, "N")
            assert "hit 3 of 3" in await press(app, pilot, "f", "n")
            assert "hit 1 of 3" in await press(app, pilot, "g", "n")
            assert "hit 2 of 3" in await press(app, pilot, "down", "n"), "the hit is in view yet"
            assert "hit 3 of 3" in await press(app, pilot, "g", "N")
            before = body(app)
            session.write(FILE, b"another needle", b"and more")
            await until(app, pilot, lambda: "hit 3 of 4" in text_of(app))
            assert body(app) == before
            assert "hit 4 of 4" in await press(app, pilot, "n")

    asyncio.run(scenario())


def test_a_hit_that_comes_later_moves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "LOOK_EVERY", 0.05)

    async def scenario() -> None:
        session = talking(2000)
        async with running(session) as (app, pilot):
            assert "not found" in await press(app, pilot, "4", "g", "slash", *"needle", "enter")
            before = body(app)
            session.write(FILE, b"a needle")
            await until(app, pilot, lambda: "needle: 1 found" in text_of(app))
            assert body(app) == before
            assert "hit 1 of 1" in await press(app, pilot, "n")

    asyncio.run(scenario())


def test_search_in_the_merged_log_brings_lines_that_were_not_here() -> None:
    async def scenario() -> None:
        session = talking(5000)
        session.files[FILE][40].text = b"a needle here"
        async with running(session) as (app, pilot):
            text = await press(app, pilot, "4", "slash", *"needle", "enter")
            await until(app, pilot, lambda: "a needle here" in text_of(app))
            assert "hit 1 of 1" in text_of(app)
            assert "line 000041" in text_of(app), text

    asyncio.run(scenario())


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}"])
def test_a_pattern_that_cannot_be_run_is_refused_in_words(pattern: str) -> None:
    async def scenario() -> None:
        session = talking(5)
        session.write(FILE, b"a" * 50 + b"!")
        async with running(session) as (app, pilot):
            text = await press(app, pilot, "4", "slash", *pattern, "enter")
            assert "pattern:" in text

    asyncio.run(scenario())
