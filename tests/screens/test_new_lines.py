"""New lines below what is read: noticed wherever the reader is, counted in one plain file, never without cause."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from remote_agent.logs import LogStore, logfile
from supervisor.logs.selection import RecordFilter, Selection
from supervisor.tui.app import SupervisorApp
from supervisor.tui.logs import finder
from supervisor.tui.logs.feeds import RankFeed
from supervisor.tui.logs.folded import FoldedFeed
from supervisor.tui.logs.merged import MergedFeed
from supervisor.tui.source import Source
from tests.screens.recorded import RecordedSession
from tests.screens.screens import press, running, settle, text_of, type_key, until
from tests.screens.test_feeds import ALL, Cluster, NodeLink, lines, load_all, no, run, yes
from tests.screens.test_follow import FILE, log_of, talking
from tests.screens.test_log_keys import answer

PILL = re.compile(r"\+[\d,]+ line|new lines below")
NCCL = b"n1:7:9 [0] NCCL INFO Using network IB\n"
OTHER = ("n2", 0, 2, "stdout")
Made = Callable[[Source, Selection], MergedFeed]


def narrowed(selection: Selection) -> Selection:
    return dataclasses.replace(selection, filter=RecordFilter(include=("line|later",)))


def filtered(source: Source, selection: Selection) -> MergedFeed:
    return MergedFeed(source, narrowed(selection))


MERGED: list[Made] = [MergedFeed, FoldedFeed, filtered]
NAMES = ["merged", "folded", "filtered"]


def read_to_end(feed: MergedFeed) -> None:
    """Let the last rows be in view."""
    rows = [feed.row(at) for at in range(max(0, feed.count - 40), feed.count)]
    feed.note_read([row for row in rows if row is not None])


async def is_new(feed: MergedFeed) -> bool:
    """Whether there are new lines, after enough looks to read all that came."""
    for _ in range(3):
        await feed.refresh(20, no)
    return bool(feed.new_lines_text)


@pytest.mark.parametrize("make", MERGED, ids=NAMES)
def test_no_jump_makes_new_lines(tmp_path: Path, make: Made) -> None:
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
                    assert not feed.new_lines_text
            await load_all(feed)
            assert not await is_new(feed)
            await two.written(1, b"later\n" * 3)
            assert await is_new(feed)
            feed.forget_new_lines()
            await feed.refresh(20, no)
            assert not feed.new_lines_text, "who goes to the end and leaves it before it is loaded has left it now"

    run(tmp_path, scenario, 2)


@pytest.mark.parametrize("make", MERGED, ids=NAMES)
def test_lines_are_new_until_the_last_one_has_been_in_view(tmp_path: Path, make: Made) -> None:
    async def scenario(cluster: Cluster, one: NodeLink, two: NodeLink) -> None:
        await one.written(0, lines(300))
        await two.written(1, lines(300))
        feed = make(cluster.source, ALL)
        for _ in range(2):
            await feed.refresh(20, yes)
        for _ in range(5):
            await one.written(0, b"later\n" * 100)
            await two.written(2, b"later\n" * 60)
            assert await is_new(feed)
        read_to_end(feed)
        assert await is_new(feed), "the last line that is loaded is not the last one"
        while feed.detached:
            await feed.load(1)
        assert await is_new(feed)
        read_to_end(feed)
        assert not await is_new(feed)
        await one.written(0, b"later\n")
        assert await is_new(feed)

    run(tmp_path, scenario, 2)


def test_lines_of_another_stream_or_of_a_node_that_answers_later_are_not_new(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, one: NodeLink, two: NodeLink) -> None:
        two.stuck = True
        await one.written(0, lines(300) + NCCL)
        await two.written(1, lines(300))
        script = MergedFeed(cluster.source, ALL)
        nccl = MergedFeed(cluster.source, Selection(generation="all", streams=("nccl",)))
        for feed in (script, nccl):
            await feed.refresh(20, yes)
        await one.written(0, NCCL * 4)
        two.stuck = False
        assert not await is_new(script)
        assert await is_new(nccl)
        await one.written(0, b"later\n")
        assert await is_new(script)

    run(tmp_path, scenario, 2)


@pytest.mark.parametrize("make", MERGED, ids=NAMES)
def test_lines_of_a_file_that_was_written_anew_are_new(tmp_path: Path, make: Made) -> None:
    async def scenario(cluster: Cluster, one: NodeLink, two: NodeLink) -> None:
        path = await one.written(0, lines(300))
        await two.written(1, lines(300))
        feed = make(cluster.source, ALL)
        for _ in range(2):
            await feed.refresh(20, yes)
        read_to_end(feed)
        path.write_bytes(b"")
        assert not await is_new(feed)
        await one.written(0, b"later\n" * 30)
        assert await is_new(feed)

    run(tmp_path, scenario, 2)


def test_the_next_generation_is_new_from_its_first_line(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        await node.written(0, lines(300))
        feed = MergedFeed(cluster.source, Selection())
        await feed.refresh(20, yes)
        assert not await is_new(feed)
        path = node.root / "generation_1" / "rank_0" / "stdout.log"
        path.parent.mkdir(parents=True)
        path.write_bytes(lines(200))
        while not await is_new(feed):
            pass

    run(tmp_path, scenario)


def test_a_file_that_has_yet_to_be_indexed_has_no_new_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "SLICE", 1000)
    monkeypatch.setattr("remote_agent.logs.window.TAIL_WAIT_S", 0.0)
    monkeypatch.setattr("remote_agent.logs.merge._INDEX_WAIT_S", 0.0)

    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        await node.written(0, lines(5000))
        for path in node.root.rglob("*.idx"):
            path.unlink()
        node.store = LogStore(node.root, live=False)
        await node.store.start()
        for feed in (RankFeed(cluster.source, "n1", 0, 0, "stdout"), MergedFeed(cluster.source, ALL)):
            for _ in range(30):
                await feed.refresh(20, no)
                assert not feed.new_lines_text
        rank = RankFeed(cluster.source, "n1", 0, 0, "stdout")
        while rank.count < 5000:
            await rank.refresh(20, no)
            assert not rank.new_lines_text
        node.write(0, lines(7))
        await rank.refresh(20, no)
        assert rank.new_lines_text == "+7 lines"

    run(tmp_path, scenario)


async def led(app: SupervisorApp, pilot: Pilot[int], *keys: str, text: str = "") -> None:
    """Type keys; the view never says anything else of new lines than this, or nothing."""
    log = log_of(app)
    for key in keys:
        type_key(app, key)
        for _ in range(6):
            app.tick()
            await pilot.pause(0.004)
            assert log.new_lines_text in ("", text), (key, text_of(app))
            assert text or not PILL.search(text_of(app))


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
def test_no_key_makes_new_lines(monkeypatch: pytest.MonkeyPatch, ended: bool, opened: tuple[str, ...]) -> None:
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
            await until(app, pilot, lambda: " new lines below " in text_of(app))
            assert "needle: hit 49 of 50" in text_of(app)
            log = log_of(app)
            await led(app, pilot, "g", *"nnn", "pagedown", "N", text="new lines below")
            assert log.new_lines_text
            await answer(app, pilot, "slash", "a needle that is nowhere to be found")
            await until(app, pilot, lambda: "…: not found   " in text_of(app))
            assert " new lines below " in text_of(app)
            await press(app, pilot, "G")
            assert " following " in text_of(app)
            await press(app, pilot, "up")
            assert not log.new_lines_text

    asyncio.run(scenario())


def test_who_reads_on_sees_the_number_fall_to_none() -> None:
    async def scenario() -> None:
        session = talking(200)
        async with running(session) as (app, pilot):
            await press(app, pilot, "3", "enter", "s", "pageup")
            log = log_of(app)
            feed = log.feed
            assert isinstance(feed, RankFeed)
            session.write(FILE, *(b"new %d" % number for number in range(50)))
            await until(app, pilot, lambda: feed.new_lines == 50)
            numbers = []
            for _ in range(6):
                await press(app, pilot, "pagedown")
                numbers.append(feed.new_lines)
            assert numbers == sorted(numbers, reverse=True)
            assert (numbers[-1], log.follow) == (0, False)
            assert 0 < numbers[1] < 50
            session.write(FILE, b"one more", b"and another")
            await until(app, pilot, lambda: log.new_lines_text == "+2 lines")

    asyncio.run(scenario())


def test_who_reads_a_merged_log_to_its_end_has_no_new_lines() -> None:
    async def scenario() -> None:
        session = talking(200)
        async with running(session) as (app, pilot):
            await press(app, pilot, "4", "pageup")
            log = log_of(app)
            for _ in range(2):
                session.write(FILE, *(b"new %d" % number for number in range(50)))
                await until(app, pilot, lambda: log.new_lines_text == "new lines below")
                await press(app, pilot, *["pagedown"] * 6)
                await until(app, pilot, lambda: not log.new_lines_text)
                assert not log.follow

    asyncio.run(scenario())
