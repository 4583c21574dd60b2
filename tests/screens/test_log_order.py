"""The time column never goes back: pages and folds of several nodes, whatever is late, grows, or is compared anew."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from remote_agent.logs.logfile import LogFile
from remote_agent.wire import Answer
from supervisor.logs.merge import Part, rows_from
from supervisor.logs.rows import LogLine
from supervisor.logs.selection import RecordFilter
from supervisor.tui.logs import folded, merged
from supervisor.tui.logs.folded import FoldedFeed
from supervisor.tui.logs.merged import MergedFeed
from supervisor.wording import values
from tests.screens.test_feeds import ALL, Cluster, NodeLink, lines, load_all, no, run, texts, yes
from tests.screens.test_folded import stepping

MS = 1_000_000
SECOND = 1000 * MS
BEGIN = 1_795_169_000 * SECOND
AHEAD_S = {"n1": 5, "n2": -5}
LATE_S = 0.4
TEXTS = (
    b"step 1 loss 2\n", b"  one of many\n", b"  10%|#\n" * 3, b"Traceback (most recent call last):\n  File x\n",
    b"KeyError: 1\n", b"half ", b"a line\n", b"\n", b"n1:7:9 [0] NCCL INFO Using network IB\n", b"noise\n" * 70,
)  # fmt: skip


def goes_back(feed: MergedFeed) -> list[str]:
    """The lines before which the time goes back."""
    rows = [row for row in map(feed.row, range(feed.count)) if row is not None]
    back = [(one, two) for one, two in itertools.pairwise(rows) if two.shown_ns < one.shown_ns]
    return [f"{values.clock_ns(one.shown_ns)} {one} > {values.clock_ns(two.shown_ns)} {two}" for one, two in back]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", [MergedFeed, FoldedFeed], ids=["merged", "folded"])
def test_times_of_nodes_ten_seconds_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[MergedFeed], seed: int
) -> None:
    """What was written is read 0 to 400 ms apart, by clocks that are compared anew all the time."""
    chance = random.Random(seed)
    now_ns = BEGIN
    absorb = LogFile.absorb

    def at_its_time(file: LogFile, _now_ns: int) -> bool:
        node = next(name for name in AHEAD_S if name in file.path.parts)
        return absorb(file, now_ns + AHEAD_S[node] * SECOND)

    monkeypatch.setattr(LogFile, "absorb", at_its_time)
    monkeypatch.setattr(merged, "MERGED_KEPT", 600)
    monkeypatch.setattr(folded, "MERGED_KEPT", 600)

    async def scenario(cluster: Cluster, *nodes: NodeLink) -> None:
        nonlocal now_ns
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
            row = feed.row(chance.randrange(max(1, feed.count)))
            if row is not None and not following and chance.random() < 0.2:
                await feed.show_around(row.t_ns, 20)
                assert not goes_back(feed)

    run(tmp_path, scenario, 2)


def test_records_that_are_found_to_pass_later_are_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each file the last record before the time is looked at again, and that may have begun long before."""
    now_ns = BEGIN
    absorb = LogFile.absorb
    monkeypatch.setattr(LogFile, "absorb", lambda file, _now_ns: absorb(file, now_ns))

    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        nonlocal now_ns
        for rank, text, after_ms in (
            (0, b"Traceback (most recent call last):\n", 90),
            (1, b"Traceback (most recent call last):\n", 7),
            (1, b"  File x\n", 20),
            (0, b"  File x\n", 20),
        ):
            await node.written(rank, text)
            now_ns += after_ms * MS
        after_ns = now_ns
        for rank in (0, 1):
            await node.written(rank, b"ValueError: needle\n")
            now_ns += MS
        selection = dataclasses.replace(ALL, filter=RecordFilter(include=("needle",)))
        page = await cluster.merged(selection, 100, after_ns=after_ns)
        assert [(row.rank, row.line) for row in page.rows] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
        reported = (await node.store.merged("all", include=["needle"], after_ns=after_ns)).data["rows"]
        assert [row["t_ns"] for row in reported] == sorted(row["t_ns"] for row in reported)

    run(tmp_path, scenario)


def test_out_of_order_lines_of_an_older_agent_are_sorted() -> None:
    def row(node: str, t_ns: int) -> LogLine:
        return LogLine(node, 0, 0, "stdout", t_ns, 0, t_ns, None, b"")

    parts = [Part([row("n1", 187), row("n1", 90)], False, 0, 0, 200, 0, None)]
    parts.append(Part([row("n2", 100)], False, 0, 0, 200, 0, None))
    assert [one.t_ns for one in rows_from(parts, 10, 0)[0]] == [90, 100, 187]


def test_a_line_stands_at_the_time_of_its_record_where_it_came_later() -> None:
    """In a recording each line has a time of its own; records stay together all the same."""

    async def scenario() -> None:
        session = stepping(2, 1)
        for number in range(3):
            session.write(("n1", 0, 0, "stdout"), b"  a table %d" % number, t_ns=BEGIN + (number * 97 + 10) * MS)
            session.write(("n2", 0, 1, "stdout"), b"other %d" % number, t_ns=BEGIN + (number * 97 + 20) * MS)
        feed = FoldedFeed(session, ALL)
        await feed.refresh(20, yes)
        assert len([row for row in map(feed.row, range(feed.count)) if row is not None]) > 4
        assert not goes_back(feed)
        table = [row for row in map(feed.row, range(feed.count)) if row is not None and b"table" in row.raw]
        assert len({row.t_ns for row in table}) == 3
        assert len({row.shown_ns for row in table}) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("t_ns", [BEGIN - 1, BEGIN - 100, BEGIN - 999 * MS])
def test_the_last_moment_of_a_second_is_of_that_second(t_ns: int) -> None:
    before = values.clock_ns(BEGIN - SECOND)[:8]
    assert values.clock_ns(t_ns)[:8] == values.date_ns(t_ns, millis=True)[11:19] == before


@pytest.mark.parametrize("text", ["", "loss"])
def test_how_many_lines_lie_beyond_those_that_are_here(tmp_path: Path, text: str) -> None:
    async def scenario(cluster: Cluster, *nodes: NodeLink) -> None:
        for rank, node in enumerate(nodes):
            await node.written(rank, b"noise\nloss 1\n" * 1000)
        selection = dataclasses.replace(ALL, filter=RecordFilter(include=(text,))) if text else ALL
        every, feed = MergedFeed(cluster.source, selection), MergedFeed(cluster.source, selection)
        await every.show_begin(10)
        await load_all(every)
        row = every.row(every.count // 3)
        assert row is not None
        await feed.show_around(row.t_ns, 60)
        for _ in range(2):
            await feed.refresh(10, no)
        first = next(each for at in range(feed.count) if (each := feed.row(at)) is not None)
        before = every.index_of(first.key)
        assert before is not None
        behind = every.count - before - feed.count + 1
        assert feed.beyond == pytest.approx((before, behind), rel=0.1)
        if not text:
            assert feed.beyond == (before, behind)

    run(tmp_path, scenario, 2)


def test_a_file_that_is_written_anew_does_not_change_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that nobody has to wait: the new lines come at once.
    monkeypatch.setattr("supervisor.tui.logs.merged.ANEW_NS", 0)

    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        path = await node.written(0, lines(100, "old"))
        merged = MergedFeed(cluster.source, ALL)
        await merged.refresh(10, yes)
        read = texts(merged)
        assert read[-1] == b"old 99"
        path.write_bytes(lines(40, "new"))
        await merged.refresh(10, no)
        assert (texts(merged), merged.detached) == (read, True)
        # Who follows sees what there is, each line once and in order.
        await merged.refresh(10, yes)
        assert texts(merged)[-40:] == [b"new %d" % number for number in range(40)]
        assert len(set(texts(merged))) == len(texts(merged)) == merged.count

    run(tmp_path, scenario)


def test_a_line_that_a_node_reads_between_its_answer_and_a_slower_node_s_is_shown_folded(tmp_path: Path) -> None:
    """A busy node may answer a second later than the others: what it sends then is newer than what they read since."""

    async def scenario(cluster: Cluster, quick: NodeLink, slow: NodeLink) -> None:
        feed = FoldedFeed(cluster.source, ALL)
        await quick.written(0, b"first\n")
        await feed.refresh(20, yes)
        answer, has_answered = slow._answer, asyncio.Event()

        async def answer_late(op: str, args: dict[str, Any]) -> Answer:
            await has_answered.wait()
            return await answer(op, args)

        slow._answer = answer_late  # type: ignore[method-assign]
        asked = asyncio.ensure_future(feed.refresh(20, yes))
        while not asked.done():
            await asyncio.sleep(LATE_S)
            if not has_answered.is_set():
                await quick.written(0, b"read in the meantime\n")
                await asyncio.sleep(LATE_S)
                await slow.written(1, b"newest\n")
                has_answered.set()
        await feed.refresh(20, yes)
        assert texts(feed) == [b"first", b"read in the meantime", b"newest"]

    run(tmp_path, scenario, 2)
