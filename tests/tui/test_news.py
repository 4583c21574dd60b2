"""The number of lines that came since the reader left the end: those that came, wherever he is led, and no others."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from remote_agent.logs import LogStore, logfile
from supervisor.session.filters import Filter
from supervisor.session.logs import Selection
from supervisor.tui.app import SupervisorApp
from supervisor.tui.logs import finder, news
from supervisor.tui.logs.feeds import RankFeed
from supervisor.tui.logs.folded import FoldedFeed
from supervisor.tui.logs.log_row import LogRow
from supervisor.tui.logs.merged import MergedFeed
from supervisor.tui.source import Source
from tests.tui.recorded import RecordedSession
from tests.tui.screens import press, running, settle, text_of, type_key, until
from tests.tui.test_feeds import ALL, Cluster, NodeLink, lines, load_all, no, run, yes
from tests.tui.test_follow import FILE, log_of, talking
from tests.tui.test_log_keys import answer

PILL = re.compile(r"\+[\d,]+ line")
NCCL = b"n1:7:9 [0] NCCL INFO Using network IB\n"
OTHER = ("n2", 0, 2, "stdout")
Made = Callable[[Source, Selection], MergedFeed]


def narrowed(selection: Selection) -> Selection:
    return dataclasses.replace(selection, filter=Filter(include=("line|later",)))


def filtered(source: Source, selection: Selection) -> MergedFeed:
    return MergedFeed(source, narrowed(selection))


MERGED: list[Made] = [MergedFeed, FoldedFeed, filtered]
NAMES = ["merged", "folded", "filtered"]


def seen(feed: MergedFeed, count: int, *, at_end: bool = False) -> None:
    """Let the last so many rows be in view."""
    rows = [feed.row(at) for at in range(feed.count - count, feed.count)]
    feed.news.read([row for row in rows if row is not None], at_end=at_end)


async def counted(feed: MergedFeed) -> int:
    """The number, once all has been looked at."""
    await feed.refresh(20, no)
    while feed.news.or_more:
        await feed.refresh(20, no)
    return feed.news.lines


@pytest.mark.parametrize("make", MERGED, ids=NAMES)
def test_what_was_there_is_no_news_wherever_one_is_led(tmp_path: Path, make: Made) -> None:
    async def scenario(cluster: Cluster, one: NodeLink, two: NodeLink) -> None:
        cluster.offsets_ms = {"n1": 0.5, "n2": -0.5}
        await one.written(0, lines(2000) + b"half a line")
        await two.written(1, lines(2000))
        for is_followed in (True, False):
            feed = make(cluster.source, ALL)
            times = MergedFeed(cluster.source, ALL)
            await times.show_begin(1500)
            row = times.row(1000)
            assert row is not None
            if is_followed:
                await feed.refresh(20, yes)
            for lead in (feed.show_begin(20), feed.show_around(row.t_ns, 20), feed.show_around(1, 20)):
                await lead
                # The clocks are compared anew.
                cluster.offsets_ms["n1"] += 1.5
                for _ in range(2):
                    await feed.refresh(20, no)
                    assert feed.news.lines == 0
            await load_all(feed)
            assert await counted(feed) == 0
            await two.written(1, b"later\n" * 3)
            assert await counted(feed) == 3
            assert await counted(feed) == 3
            feed.forget_news()
            await feed.refresh(20, no)
            assert feed.news.lines == 0, "who goes to the end and leaves it before it is here has left it now"

    run(tmp_path, scenario, 2)


@pytest.mark.parametrize("make", MERGED, ids=NAMES)
def test_what_comes_is_counted_until_it_has_been_in_view(tmp_path: Path, make: Made) -> None:
    async def scenario(cluster: Cluster, one: NodeLink, two: NodeLink) -> None:
        await one.written(0, lines(300))
        await two.written(1, lines(300))
        feed = make(cluster.source, ALL)
        for _ in range(2):
            await feed.refresh(20, yes)
        for _ in range(5):
            await one.written(0, b"later\n" * 100)
            await two.written(2, b"later\n" * 60)
            await feed.refresh(20, no)
        assert await counted(feed) == 800
        while feed.detached:
            await feed.load(1)
        assert await counted(feed) == 800
        if not isinstance(feed, FoldedFeed):
            row = feed.row(feed.count - 1)
            assert row is not None
            feed.news.read([row], at_end=False)
            assert feed.news.lines == (500 if row.rank == 2 else 300), "what stands above it of its file was passed"
        seen(feed, 1, at_end=True)
        assert feed.news.lines == 0
        await one.written(0, b"later\n")
        assert await counted(feed) == 1

    run(tmp_path, scenario, 2)


def test_lines_of_another_stream_or_a_node_that_comes_later_are_no_news(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, one: NodeLink, two: NodeLink) -> None:
        two.stuck = True
        await one.written(0, lines(300) + NCCL)
        await two.written(1, lines(300))
        script = MergedFeed(cluster.source, ALL)
        nccl = MergedFeed(cluster.source, Selection(generation="all", streams=("nccl",)))
        for feed in (script, nccl):
            await feed.refresh(20, yes)
        await one.written(0, (NCCL * 4 + b"later\n" * 200) * 30)
        two.stuck = False
        await script.refresh(20, no)
        assert (script.news.lines, script.news.or_more, script.news.or_fewer) == (6000, False, False), "at one look"
        assert await counted(nccl) == 120
        script.news.read([LogRow("n1", 0, 0, "stdout", 300 + 204 * 10, 0, "", b"")], at_end=False)
        assert script.news.lines == 4000
        two.stuck = True
        await script.refresh(20, no)
        assert (script.news.lines, script.news.or_more) == (4000, True)
        two.stuck = False
        await one.written(0, NCCL * 3000)
        await script.refresh(20, no)
        assert script.news.lines > 4000
        while script.news.or_fewer:
            await script.refresh(20, no)
        assert (script.news.lines, script.news.or_more) == (4000, False)

    run(tmp_path, scenario, 2)


@pytest.mark.parametrize("make", MERGED, ids=NAMES)
def test_what_a_file_has_that_was_written_anew_is_news_while_the_old_lines_stand_there(
    tmp_path: Path, make: Made
) -> None:
    async def scenario(cluster: Cluster, one: NodeLink, two: NodeLink) -> None:
        path = await one.written(0, lines(300))
        await two.written(1, lines(300))
        feed = make(cluster.source, ALL)
        for _ in range(2):
            await feed.refresh(20, yes)
        seen(feed, 40, at_end=True)
        await one.written(0, b"later\n" * 80)
        assert await counted(feed) == 80
        path.write_bytes(b"")
        while feed.news.lines:
            await counted(feed)
        for count in (30, 100):
            await one.written(0, b"later\n" * (count - feed.news.lines))
            for _ in range(2):
                assert await counted(feed) == count
                seen(feed, 40)
        while feed.detached:
            await feed.load(1)
        seen(feed, 200, at_end=True)
        assert await counted(feed) == 0

    run(tmp_path, scenario, 2)


def test_the_next_generation_is_news_from_its_first_line(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        await node.written(0, lines(300))
        feed = MergedFeed(cluster.source, Selection())
        await feed.refresh(20, yes)
        await node.written(0, lines(5))
        await feed.refresh(20, no)
        path = node.root / "generation_1" / "rank_0" / "stdout.log"
        path.parent.mkdir(parents=True)
        path.write_bytes(lines(200))
        while feed.news.lines < 205:
            await feed.refresh(20, no)
        assert feed.news.lines == 205

    run(tmp_path, scenario)


def test_a_flood_under_a_filter_is_counted_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news, "MOST", 500)

    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        await node.written(0, lines(10))
        feed = MergedFeed(cluster.source, narrowed(ALL))
        for _ in range(2):
            await feed.refresh(20, yes)
        await node.written(0, b"later\nnoise\n" * 2000)
        for _ in range(6):
            await feed.refresh(20, no)
            assert feed.news.or_more
        assert 500 <= feed.news.lines < 1000
        while feed.detached:
            await feed.load(1)
        for _ in range(12):
            seen(feed, 600)
            await feed.refresh(20, no)
        assert (feed.news.lines, feed.news.or_more) == (0, False)

    run(tmp_path, scenario)


def test_a_file_that_has_yet_to_be_read_brings_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "SLICE", 1000)
    monkeypatch.setattr("remote_agent.logs.window.TAIL_WAIT_S", 0.0)
    monkeypatch.setattr("remote_agent.logs.merged._INDEX_WAIT_S", 0.0)

    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        await node.written(0, lines(5000))
        for path in node.root.rglob("*.idx"):
            path.unlink()
        node.store = LogStore(node.root, live=False)
        await node.store.start()
        for feed in (RankFeed(cluster.source, "n1", 0, 0, "stdout"), MergedFeed(cluster.source, ALL)):
            for _ in range(30):
                await feed.refresh(20, no)
                assert feed.news.lines == 0
        rank = RankFeed(cluster.source, "n1", 0, 0, "stdout")
        while rank.count < 5000:
            await rank.refresh(20, no)
            assert rank.news.lines == 0
        node.write(0, lines(7))
        await rank.refresh(20, no)
        assert rank.news.lines == 7

    run(tmp_path, scenario)


async def led(app: SupervisorApp, pilot: Pilot[int], *keys: str, count: int = 0) -> None:
    """Type keys; there is never another number."""
    log = log_of(app)
    for key in keys:
        type_key(app, key)
        for _ in range(6):
            app.tick()
            await pilot.pause(0.004)
            assert log.unseen in (0, count), (key, text_of(app))
            assert count or not PILL.search(text_of(app))


def rich(count: int = 2000) -> RecordedSession:
    session = talking(count)
    session.write(OTHER, *(b"other %d" % number for number in range(300)))
    for at in range(5, count, 40):
        session.files[FILE][at].text, session.files[FILE][at].level = b"a needle here", "error"
    return session


@pytest.mark.parametrize(
    ("ended", "opened"),
    [(False, ("4",)), (False, ("3", "enter", "s")), (False, ("4", "v")), (True, ("4", "z"))],
    ids=["merged", "one rank", "filtered", "ended and folded"],
)
def test_no_key_makes_news(monkeypatch: pytest.MonkeyPatch, ended: bool, opened: tuple[str, ...]) -> None:
    monkeypatch.setattr(finder, "HITS_KEPT", 20)
    monkeypatch.setattr(finder, "HITS_MORE", 10)

    async def scenario() -> None:
        session = rich()
        session.ended = ended
        async with running(session) as (app, pilot):
            await press(app, pilot, *opened)
            session.latency_s = 0.02
            await led(app, pilot, "slash", *"needle", "enter", "g", *"nnn", *"NNNN", "G", *"NNN", *("n" * 20), "G")
            await led(app, pilot, "escape", "{", "}", "e", "E", "g", "pageup", "G", "pageup", "f", "up")
            await led(app, pilot, "at", *"-10s", "enter", "v", "backslash", "backslash", "g", "z", "M", "g", "M", "up")
            assert not PILL.search(await settle(app, pilot))

    asyncio.run(scenario())


def test_the_name_of_the_hit_stands_beside_the_number_at_80_columns() -> None:
    async def scenario() -> None:
        session = rich()
        async with running(session) as (app, pilot):
            await press(app, pilot, "4")
            await answer(app, pilot, "slash", "needle")
            await press(app, pilot, "N")
            session.write(FILE, *(b"new %d" % number for number in range(1270)))
            await until(app, pilot, lambda: " +1,270 lines " in text_of(app))
            assert "needle: hit 49 of 50" in text_of(app)
            log = log_of(app)
            await led(app, pilot, "g", *"nnn", "pagedown", "N", count=1270)
            assert log.unseen == 1270
            await answer(app, pilot, "slash", "a needle that is nowhere to be found")
            await until(app, pilot, lambda: "a needle that is now…: not found   " in text_of(app))
            assert " +1,270 lines " in text_of(app)
            await press(app, pilot, "G")
            assert " following " in text_of(app)
            await press(app, pilot, "up")
            assert log.unseen == 0

    asyncio.run(scenario())


def test_who_reads_on_sees_the_number_fall_to_none() -> None:
    async def scenario() -> None:
        for opened in (("4",), ("3", "enter", "s")):
            session = talking(200)
            async with running(session) as (app, pilot):
                await press(app, pilot, *opened, "pageup")
                log = log_of(app)
                session.write(FILE, *(b"new %d" % number for number in range(50)))
                await until(app, pilot, lambda log=log: log.unseen == 50)  # type: ignore[misc]
                numbers = []
                for _ in range(6):
                    await press(app, pilot, "pagedown")
                    numbers.append(log.unseen)
                assert numbers == sorted(numbers, reverse=True)
                assert (numbers[-1], log.follow) == (0, False)
                assert 0 < numbers[1] < 50
                session.write(FILE, b"one more", b"and another")
                await until(app, pilot, lambda log=log: log.unseen == 2)  # type: ignore[misc]

    asyncio.run(scenario())
