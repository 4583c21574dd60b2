"""A search on the log screen: from where one reads, also in what comes later; nobody is moved who has not asked."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from supervisor.errors import Unreachable
from supervisor.logs.merge import Page
from supervisor.logs.search import search
from supervisor.tui.logs import finder
from supervisor.tui.logs.finder import Finder, Hit
from supervisor.tui.logs.merged import MergedFeed
from supervisor.tui.logs.row import LineKey
from supervisor.tui.screens.logs.screen import LogsScreen
from tests.screens.recorded import RecordedSession
from tests.screens.screens import press, running, settle, text_of, type_key, until
from tests.screens.test_feeds import ALL, Cluster, NodeLink, lines, run, shown
from tests.screens.test_follow import FILE, body, log_of, open_stdout, talking


def with_needles(lines: int, *places: int) -> RecordedSession:
    """One rank has written a lot, and in these lines what is looked for."""
    session = talking(lines)
    for at in places:
        session.files[FILE][at].text = b"a needle here"
    return session


def test_search_steps_through_hits_and_back_ends_it() -> None:
    async def scenario() -> None:
        async with running(with_needles(2000, 100, 900, 1700)) as (app, pilot):
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
        session = with_needles(2000, 100, 900, 1700)
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
        async with running(with_needles(5000, 40)) as (app, pilot):
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


def test_the_first_hit_comes_with_what_lies_around_it(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, node: NodeLink, other: NodeLink) -> None:
        await node.written(0, (lines(1000) + b"needle\n") * 2)
        pages: list[Page] = []
        here = dataclasses.replace(ALL, nodes=["n1"])
        query: dict[str, Any] = {"pattern": "needle", "around": 40, "note_page": pages.append}
        hits = [row async for row in search(cluster.session, here, **query)]
        first, second = (row.t_ns for row in hits)
        assert len([row async for row in search(cluster.session, here, near_ns=first + 1, **query)]) == 2
        node.stuck = True
        feed = MergedFeed(cluster.source, here)
        for t_ns, line in ((first, 1000), (second, 2001)):
            await feed.show_around(t_ns, 40, (pages.pop(0), pages.pop(0)))
            assert shown(feed) == [("n1", number) for number in range(line - 14, min(line + 27, 2002))]
            assert feed.missing(0, 0) == 0
        assert not feed.detached
        node.stuck = False
        assert len([row async for row in search(cluster.session, ALL, **query)]) == 2
        assert not pages, "of several nodes none knows which hit is the first"

    run(tmp_path, scenario, 2)


def test_a_search_goes_on_without_a_node_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.logs.search.SILENCE", 0.2)

    async def scenario(cluster: Cluster, first: NodeLink, second: NodeLink) -> None:
        first.stuck = True
        await second.written(0, b"needle\n")
        rows = []
        with pytest.raises(Unreachable, match="n1: no answer in time"):
            async for row in search(cluster.session, ALL, pattern="needle"):
                rows.append(row.node)  # noqa: PERF401  what came before the error counts
        assert rows == ["n2"]

    run(tmp_path, scenario, 2)


def test_where_hits_are_too_many_those_one_gets_to_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "HITS_KEPT", 20)
    monkeypatch.setattr(finder, "HITS_MORE", 10)

    async def scenario() -> None:
        async with running(with_needles(2000, *range(5, 2000, 40)), (100, 24)) as (app, pilot):
            log = await open_stdout(app, pilot)
            text = await press(app, pilot, "slash", *"needle", "enter")
            assert "hit 10 of the last 10" in text, "who follows is nearest to the newest"
            assert log.pointer == (0, 0, "stdout", 1965)
            for _ in range(10):
                text = await press(app, pilot, "N", turns=2)
            assert "hit 10 of the last 20" in text
            assert log.pointer == (0, 0, "stdout", 1565)
            assert "a needle here" in text
            text = await press(app, pilot, "g", "n")
            assert "hit 1 of 10 nearby" in text
            assert log.pointer == (0, 0, "stdout", 5)
            assert "hit 10 of the last 10" in await press(app, pilot, "N"), "around the end"
            assert "hit 1 of the first 10" in await press(app, pilot, "n"), "and back"
            log.jump(1000, (0, 0, "stdout", 1000))
            await settle(app, pilot)
            assert "hit 1 of 10 nearby" in await press(app, pilot, "n")
            assert log.pointer == (0, 0, "stdout", 1005)

    asyncio.run(scenario())


def test_no_hit_of_many_files_is_passed_over_or_comes_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(finder, "HITS_KEPT", 40)
    monkeypatch.setattr(finder, "HITS_MORE", 12)

    async def scenario(cluster: Cluster, *nodes: NodeLink) -> None:
        cluster.offsets_ms = {"n1": 700.0, "n2": -300.0}
        for part in range(3):
            for rank, node in enumerate((*nodes, *nodes)):
                await node.written(rank, b"needle\nhay\n" * (rank * 7 + part + 1))
        every = sorted(
            [(row.t_ns, (row.generation, row.rank, row.stream, row.line))
             async for row in search(cluster.session, ALL, pattern="needle")]
        )  # fmt: skip
        found = Finder(cluster.source, ALL, "needle")
        await found.search(lambda: None, near_ns=every[30][0])

        async def step(way: int, place: Hit | None, pointer: LineKey | None) -> Hit | None:
            return found.step(way, place, pointer) or await found.go_on(way, place, pointer)

        at = await step(1, every[30], None)
        for way, count in ((1, len(every)), (-1, len(every) + 30)):
            for _ in range(count):
                assert at is not None, found.problem
                following = every[(every.index(at) + way) % len(every)]
                at = await step(way, at, at[1])
                assert at == following
        assert await step(-1, None, None) == every[-1]
        assert await step(1, every[60], None) == every[60]
        assert await step(-1, every[12], None) == every[11]

    run(tmp_path, scenario, 2)


def test_steps_that_are_typed_ahead_are_all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "HITS_KEPT", 20)
    monkeypatch.setattr(finder, "HITS_MORE", 10)

    async def scenario() -> None:
        session = with_needles(2000, *range(5, 2000, 40))
        async with running(session, (100, 24)) as (app, pilot):
            await press(app, pilot, "4", "slash", *"needle", "enter")
            screen, log = app.screen, log_of(app)
            assert isinstance(screen, LogsScreen)
            session.latency_s = 0.02
            typed = (("g", "n", "n", "n"), 85), (("N",) * 4, 1925), (("G", "N", "N", "N"), 1885), (("n",) * 25, 885)
            for keys, line in typed:
                for key in keys:
                    type_key(app, key)
                await until(app, pilot, lambda line=line: log.pointer == (0, 0, "stdout", line))  # type: ignore[misc]
                await until(app, pilot, lambda: not log.is_jumping)
                text = await settle(app, pilot)
                assert log.pointer == (0, 0, "stdout", line)
                assert "a needle here" in text
                assert "needle: hit " in text
            assert isinstance(log.feed, MergedFeed)
            assert screen.search.finder is not None
            assert log.feed.clocks is screen.search.finder.clocks
            for key in ("g", *("n" * 25), "G"):
                type_key(app, key)
            await until(app, pilot, lambda: log.follow)
            await settle(app, pilot)
            assert log.follow, "who has gone to the end is not brought back"

    asyncio.run(scenario())


def test_a_hit_in_a_burst_is_found_though_the_clocks_were_compared_anew(tmp_path: Path) -> None:
    """Its lines are nanoseconds apart, and the next comparison differs by microseconds."""

    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        await node.written(0, lines(250))
        cluster.offsets_ms = {"n1": 0.5}
        found = Finder(cluster.source, ALL, "line 249")
        cluster.offsets_ms = {"n1": 0.45}
        await found.search(lambda: None)
        t_ns, key = found.hits[0]
        feed = MergedFeed(cluster.source, ALL)
        await feed.show_around(t_ns, 30, None, found.clocks)
        assert feed.index_of(key) is not None
        await feed.show_begin(30)
        assert feed.clocks is found.clocks, "what is read and what is found have times of one clock"

    run(tmp_path, scenario)
