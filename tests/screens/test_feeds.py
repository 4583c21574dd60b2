"""Feeds over real files: every line once and whole, whatever is written, cut short, replaced or stuck meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remote_agent.logs import LogStore, logfile
from remote_agent.logs import merge as node_merged
from remote_agent.logs.logfile import LogFile
from remote_agent.wire import Answer
from supervisor.errors import RequestFailed, Unreachable
from supervisor.logs import pages
from supervisor.logs.pages import Page
from supervisor.logs.selection import RecordFilter, Selection
from supervisor.session import Session
from supervisor.tui.logs import feed as feeds
from supervisor.tui.logs import folded
from supervisor.tui.logs.feed import LATEST_NS, Jump, LogFeed
from supervisor.tui.logs.folded import FoldedFeed
from supervisor.wording import values
from tests.fast import log_files
from tests.screens.logs import (
    ALL,
    BEGIN,
    FILE,
    ONE,
    SECOND,
    cluster_of,
    lines,
    load_all,
    narrowed,
    no,
    shown,
    step,
    stepping,
    texts,
    yes,
)


async def test_a_half_line_becomes_whole(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as (cluster, [node]):
        feed = LogFeed(cluster.source, ALL)
        await node.written(0, b"loading...")
        await feed.refresh(10, yes)
        assert texts(feed) == [b"loading..."]
        await node.written(0, b" done\nnext\n")
        await feed.refresh(10, no)
        assert texts(feed) == [b"loading... done"]
        await feed.refresh(10, yes)
        assert texts(feed) == [b"loading... done", b"next"]


@pytest.mark.parametrize("change_ms", [-0.02, 50.0])
async def test_offsets_that_change_between_two_pages_lose_nothing(tmp_path: Path, change_ms: float) -> None:
    async with cluster_of(tmp_path, 2) as (cluster, nodes):
        for rank, node in enumerate(nodes):
            await node.written(rank, lines(2000))
        cluster.offsets_ms = {"n1": 0.1, "n2": -3.0}
        feed = LogFeed(cluster.source, ALL)
        await feed.refresh(40, yes)
        cluster.offsets_ms["n1"] += change_ms
        await load_all(feed)
        for name in ("n1", "n2"):
            assert [line for node, line in shown(feed) if node == name] == list(range(2000))
        await feed.refresh(40, yes)
        assert len(shown(feed)) == (256 if change_ms > 10 else 4000), "a large change begins anew with the new times"


async def test_a_line_of_one_file_is_found_by_its_number(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as (cluster, [node]):
        await node.written(0, lines(1000))
        cluster.offsets_ms = {"n1": 5000.0}
        merged, one = LogFeed(cluster.source, ALL), LogFeed(cluster.source, ONE)
        await merged.show_begin(300)
        meant = merged.line(200)
        assert meant is not None
        at = await one.seek(Jump(LATEST_NS, meant.key), 40)
        assert one.line(at) == meant, "it has the time of the merged log"
        assert [number for _, number in shown(one)] == list(range(187, 227)), "what is around it comes along"
        await one.refresh(40, no)
        assert (one.last_line, one.detached) == (1000, True)
        assert [number for _, number in shown(one)] == list(range(187, 227))
        assert await load_all(one) == await load_all(merged)
        for number, found in ((5, 5), (999, 999), (5000, 999)):
            fresh = LogFeed(cluster.source, ONE)
            line = fresh.line(await fresh.seek(Jump(LATEST_NS, (*FILE[1:], number)), 40))
            assert line is not None
            assert line.line == found
        assert [await one.seek(Jump(t_ns), 40) for t_ns in (1, meant.t_ns)] == [0, 15]


async def test_a_line_within_a_long_record_is_found_by_its_number(tmp_path: Path) -> None:
    nccl = b"n1:7:9 [0] NCCL INFO Using network IB\n"
    async with cluster_of(tmp_path) as (cluster, [node]):
        await node.written(0, lines(100) + b"Traceback (most recent call last):\n" + b"  File x\n" * 300 + nccl)
        for selection, number in ((ONE, 390), (dataclasses.replace(ONE, streams=("nccl",)), 401)):
            feed = LogFeed(cluster.source, selection)
            line = feed.line(await feed.seek(Jump(LATEST_NS, (*FILE[1:], number)), 30))
            assert line is not None
            assert line.line == number


async def test_from_the_begin_and_from_a_hit_every_line_follows(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as (cluster, [node]):
        await node.written(0, lines(5000))
        feed = LogFeed(cluster.source, ALL)
        await feed.show_begin(40)
        assert shown(feed)[0] == ("n1", 0)
        await load_all(feed)
        assert shown(feed) == [("n1", number) for number in range(5000)]
        row = feed.line(2500)
        assert row is not None
        await feed.show_around(row.t_ns, 40)
        assert feed.index_of(row.key) is not None
        assert len(shown(feed)) < 60, "a slow link brings a screen, not pages"
        await load_all(feed)
        assert shown(feed) == [("n1", number) for number in range(5000)]
        await feed.refresh(40, no)
        await node.written(0, lines(3))
        await feed.refresh(40, no)
        assert (feed.new_lines_text, feed.detached) == ("new lines below", True)
        await load_all(feed)
        assert len(shown(feed)) == 5003


async def test_pages_that_an_answer_does_not_hold(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as (cluster, [node]):
        await node.written(0, b"".join(b"%03d " % number + b"x" * 65_000 + b"\n" for number in range(100)))
        merged = LogFeed(cluster.source, ALL)
        await merged.refresh(10, yes)
        assert 10 <= len(shown(merged)) < 100
        await load_all(merged)
        assert shown(merged) == [("n1", number) for number in range(100)]


@pytest.mark.parametrize("selection", [ALL, ONE], ids=["merged", "one file"])
async def test_a_file_that_is_written_anew_changes_nothing_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selection: Selection
) -> None:
    # So that nobody has to wait: the new lines come at once.
    monkeypatch.setattr("supervisor.tui.logs.feed.ANEW_NS", 0)
    async with cluster_of(tmp_path) as (cluster, [node]):
        path = await node.written(0, lines(300, "old"))
        merged = LogFeed(cluster.source, selection)
        await merged.refresh(10, yes)
        read = texts(merged)
        assert read[-1] == b"old 299"
        await node.seen(0, path.write_bytes(lines(40, "new")))
        await merged.refresh(10, no)
        assert (texts(merged), merged.detached) == (read, True)
        # Who follows sees what there is, each line once and in order.
        await merged.refresh(10, yes)
        assert texts(merged)[-40:] == [b"new %d" % number for number in range(40)]
        assert len(set(texts(merged))) == len(texts(merged)) == merged.count


async def test_memory_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "BYTES_KEPT", 200_000)
    async with cluster_of(tmp_path) as (cluster, [node]):
        await node.written(0, b"".join(b"%04d " % number + b"x" * 500 + b"\n" for number in range(3000)))
        merged = LogFeed(cluster.source, ALL)
        await merged.refresh(10, yes)
        numbers: list[int] = []
        for _ in range(6):
            await merged.load(0)
            numbers = [number for _, number in shown(merged)]
            assert len(numbers) <= 2 * feeds.PAGE + 1
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert (numbers[0], merged.missing(0, 0), merged.detached) == (0, None, True)
        for _ in range(3):
            await merged.load(1)
        numbers = [number for _, number in shown(merged)]
        assert (len(numbers), numbers[-1] - numbers[0]) == (512, 511)


async def test_a_stuck_node_holds_nobody_up_and_its_rows_come_later(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, 2) as (cluster, [first, second]):
        feed = LogFeed(cluster.source, ALL)
        await first.written(0, lines(10))
        await second.written(1, lines(10))
        await feed.refresh(10, yes)
        second.stuck = True
        second.write(1, lines(200))
        await first.written(0, lines(10))
        await feed.refresh(10, yes)
        assert len(shown(feed)) == 30
        assert list(feed.absent) == ["n2"]
        with pytest.raises(Unreachable):
            await pages.merged(cluster.session, dataclasses.replace(ALL, nodes=["n2"]), 10, patience_s=0.1)
        second.stuck = False
        await second.written(1, b"the end\n")
        await feed.refresh(10, yes)
        assert list(feed.absent) == []
        await load_all(feed)
        for name, count in (("n1", 20), ("n2", 211)):
            assert [line for node, line in shown(feed) if node == name] == list(range(count))
        times = [row.t_ns for index in range(feed.count) if (row := feed.line(index)) is not None]
        assert all(before <= after for before, after in itertools.pairwise(times))


async def test_dropped_lines_are_one_and_the_others_stay(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, bound=2000000) as (cluster, [node]):
        feed = LogFeed(cluster.source, ONE)
        await node.written(0, b"%060d\n" % 7 * 30_000)
        await feed.seek(Jump(LATEST_NS, (*FILE[1:], 20_000)), 20)
        read = shown(feed)
        path = await node.written(0, b"%060d\n" % 8 * 30_000)
        while path.stat().st_blocks * 512 > 3_000_000:
            await asyncio.sleep(0.01)
        await feed.refresh(20, no)
        assert (shown(feed), feed.last_line) == (read, 60_000), "what is read stays"
        for jump in (Jump(0), Jump(LATEST_NS, (*FILE[1:], 5))):
            await feed.seek(jump, 20)
            while (want := feed.missing(0, 0)) is not None:
                await feed.load(want)
            assert b"were dropped here" in texts(feed)[0]
            assert shown(feed)[0][1] > 10_000
            assert sum(b"dropped" in text for text in texts(feed)) == 1


async def test_a_view_without_nccls_lines_knows_that_it_is(tmp_path: Path) -> None:
    nccl = b"n1:7:9 [0] NCCL INFO Using network IB"
    async with cluster_of(tmp_path) as (cluster, [node]):
        await node.written(0, b"step 1\n" + nccl + b"\nstep 2\n")
        for streams, wanted, apart in (
            (("stdout", "stderr"), [b"step 1", b"step 2"], True),
            (("nccl",), [nccl], False),
            (("stdout", "nccl"), [b"step 1", nccl, b"step 2"], False),
        ):
            feed = LogFeed(cluster.source, Selection(generation="all", streams=streams))
            await feed.refresh(20, yes)
            assert (texts(feed), feed.hides_nccl) == (wanted, apart)


async def test_an_agent_of_another_version_is_named(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as (cluster, [node]):
        whole = node.store.merged

        async def merged(*args: Any, **more: Any) -> Answer:
            answer = await whole(*args, **more)
            return answer._replace(data={key: value for key, value in answer.data.items() if key != "since_ns"})

        node.store.merged = merged  # type: ignore[method-assign]
        await node.written(0, b"one\n")
        with pytest.raises(RequestFailed, match="n1: .* another supervisor: its agent does not send 'since_ns'"):
            await cluster.merged(ALL, 10)


MS = 1_000_000


AHEAD_S = {"n1": 5, "n2": -5}


TEXTS = (
    b"step 1 loss 2\n", b"  one of many\n", b"  10%|#\n" * 3, b"Traceback (most recent call last):\n  File x\n",
    b"KeyError: 1\n", b"half ", b"a line\n", b"\n", b"n1:7:9 [0] NCCL INFO Using network IB\n", b"noise\n" * 70,
)  # fmt: skip


def goes_back(feed: LogFeed) -> list[str]:
    """The lines before which the time goes back."""
    shown_ns = [(feed.stands_ns(at), line) for at in range(feed.count) if (line := feed.line(at)) is not None]
    back = [(one, two) for one, two in itertools.pairwise(shown_ns) if two[0] < one[0]]
    return [f"{values.clock_ns(one[0])} {one[1]} > {values.clock_ns(two[0])} {two[1]}" for one, two in back]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", [LogFeed, FoldedFeed], ids=["merged", "folded"])
async def test_times_of_nodes_ten_seconds_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[LogFeed], seed: int
) -> None:
    """What was written is read 0 to 400 ms apart, by clocks that are compared anew all the time."""
    chance = random.Random(seed)
    now_ns = BEGIN
    absorb = LogFile.absorb

    def at_its_time(file: LogFile, _now_ns: int) -> bool:
        node = next(name for name in AHEAD_S if name in file.path.parts)
        return absorb(file, now_ns + AHEAD_S[node] * SECOND)

    monkeypatch.setattr(LogFile, "absorb", at_its_time)
    monkeypatch.setattr(feeds, "LINES_KEPT", 600)
    monkeypatch.setattr(folded, "LINES_KEPT", 600)
    async with cluster_of(tmp_path, 2) as (cluster, nodes):
        feed = kind(cluster.source, ALL)
        following = True
        for _ in range(80):
            error_ms = chance.choice((0.1, 3.0, 60.0))
            cluster.offsets_ms = {name: s * 1e3 + chance.uniform(-error_ms, error_ms) for name, s in AHEAD_S.items()}
            for _ in range(chance.randrange(4)):
                rank = chance.randrange(4)
                await nodes[rank % 2].written(rank, chance.choice(TEXTS))
                now_ns += chance.choice((0, 2, 40, 400)) * MS
            following = chance.random() < 0.6
            await feed.refresh(20, yes if following else no)
            assert not goes_back(feed)
            for place in (0, feed.count - 1):
                want = feed.missing(place, place)
                if want is not None and not following:
                    await feed.load(want)
                    assert not goes_back(feed)
            row = feed.line(chance.randrange(max(1, feed.count)))
            if row is not None and not following and chance.random() < 0.2:
                await feed.show_around(row.t_ns, 20)
                assert not goes_back(feed)


@pytest.mark.parametrize("t_ns", [BEGIN - 1, BEGIN - 100, BEGIN - 999 * MS])
def test_the_last_moment_of_a_second_is_of_that_second(t_ns: int) -> None:
    before = values.clock_ns(BEGIN - SECOND)[:8]
    assert values.clock_ns(t_ns)[:8] == values.date_ns(t_ns, millis=True)[11:19] == before


@pytest.mark.parametrize("look_s", [0.002, 1.0])
async def test_following_with_a_filter_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look_s: float
) -> None:
    """Lines that are finished late, tracebacks that grow, two nodes of different clocks."""
    monkeypatch.setattr(node_merged, "_LOOK_S", look_s)
    async with cluster_of(tmp_path, nodes=2) as (cluster, [one, two]):
        cluster.offsets_ms = {"n1": 0.0, "n2": 300.0}
        await one.written(0, b"noise\n" * 300 + b"needle first\n" + b"noise\n" * 300)
        await two.written(1, b"noise\n")
        feed = narrowed(cluster, include=("needle",), exclude=("secret",))
        await feed.refresh(10, yes)
        for number in range(12):
            await one.written(0, b"noise\nstep %d " % number)
            await two.written(1, b"Traceback (most recent call last):\n  File x\n")
            await feed.refresh(10, yes)
            await two.written(1, b"ValueError: needle %d\nneedle secret\nsecret\n" % number)
            await feed.refresh(10, yes)
            await one.written(0, b"needle\n" + b"noise\n" * number)
            await feed.refresh(10, yes)

        async def is_here() -> bool:
            # Each answer is a step further, however short its time.
            await feed.refresh(10, yes)
            return len(texts(feed)) >= 1 + 12 + 12 * 3

        await log_files.until(is_here)
        found = await load_all(feed)
        steps = [text for text in found if text.startswith(b"step")]
        assert steps == [b"step %d needle" % number for number in range(12)]
        errors = [text for text in found if text.startswith(b"ValueError")]
        assert errors == [b"ValueError: needle %d" % number for number in range(12)]
        assert len(found) == 1 + 12 + 12 * 3
        assert b"needle first" in found


@pytest.mark.parametrize("kind", [LogFeed, FoldedFeed])
async def test_rare_lines_come_in_bounded_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[LogFeed]
) -> None:
    """An answer that had no time to find anything says how far it has looked; the next one goes on there."""
    monkeypatch.setattr(node_merged, "_LOOK_S", 0.0)
    async with cluster_of(tmp_path) as (cluster, [node]):
        await node.written(0, b"needle\n" + b"noise 7\n" * 5000)
        feed = kind(cluster.source, dataclasses.replace(ALL, filter=RecordFilter(include=("ne+dle",))))
        await feed.refresh(10, yes)
        steps = 0
        while (want := feed.missing(0, 9)) is not None:
            assert feed.count >= 1, "its place is shown while it is looked for"
            await feed.load(want)
            steps += 1
        assert steps > 1
        assert texts(feed) == [b"needle"]


async def test_a_flood_is_asked_for_once_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """While more comes than one page holds, the newest page; after that, what is new."""
    monkeypatch.setattr(folded, "FOLD_PAGE", 512)
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
        last = feed.line(feed.count - 1)
        assert last is not None
        assert last.text.startswith(b"step %d " % steps[-1])
    assert calls == [[True, False], [False], [False], [False], [True]]
    rows = [feed.line(at) for at in range(1, feed.count) if feed.fold(at) is not None]
    assert [row.text.split()[1] for row in rows if row][-6:] == [b"%d" % at for at in range(117, 123)]


Made = Callable[[Session, Selection], LogFeed]


def filtered(source: Session, selection: Selection) -> LogFeed:
    return LogFeed(source, dataclasses.replace(selection, filter=RecordFilter(include=("line|later",))))


MERGED: list[Made] = [LogFeed, FoldedFeed, filtered]


NAMES = ["merged", "folded", "filtered"]


def read_to_end(feed: LogFeed) -> None:
    """Let the last rows be in view."""
    rows = [feed.line(at) for at in range(max(0, feed.count - 40), feed.count)]
    feed.note_read([row for row in rows if row is not None])


async def is_new(feed: LogFeed) -> bool:
    """Whether there are new lines, after enough looks to read all that came."""
    for _ in range(3):
        await feed.refresh(20, no)
    return bool(feed.new_lines_text)


@pytest.mark.parametrize("make", MERGED, ids=NAMES)
async def test_no_jump_makes_new_lines(tmp_path: Path, make: Made) -> None:
    async with cluster_of(tmp_path, 2) as (cluster, [one, two]):
        cluster.offsets_ms = {"n1": 0.5, "n2": -0.5}
        await one.written(0, lines(2000) + b"half a line")
        await two.written(1, lines(2000))
        for is_followed in (True, False):
            feed = make(cluster.source, ALL)
            times = LogFeed(cluster.source, ALL)
            await times.show_begin(1500)
            row = times.line(1000)
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


@pytest.mark.parametrize("make", MERGED, ids=NAMES)
async def test_lines_are_new_until_the_last_one_has_been_in_view(tmp_path: Path, make: Made) -> None:
    async with cluster_of(tmp_path, 2) as (cluster, [one, two]):
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


async def test_a_file_that_has_yet_to_be_indexed_has_no_new_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logfile, "SLICE", 1000)
    monkeypatch.setattr("remote_agent.logs.merge._INDEX_WAIT_S", 0.0)
    async with cluster_of(tmp_path) as (cluster, [node]):
        await node.written(0, lines(5000))
        for path in node.root.rglob("*.idx"):
            path.unlink()
        node.store = LogStore(node.root, live=False)
        await node.store.start()
        for feed in (LogFeed(cluster.source, ONE), LogFeed(cluster.source, ALL)):
            for _ in range(30):
                await feed.refresh(20, no)
                assert not feed.new_lines_text
