"""A log narrowed by a filter: the reader keeps his line, and following shows all that passes and nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from remote_agent.logs import merge as node_merged
from supervisor.logs.search import search
from supervisor.logs.selection import RecordFilter
from supervisor.tui.logs.folded import FoldedFeed
from supervisor.tui.logs.merged import MergedFeed
from supervisor.tui.widgets.virtual_log import LOOKING, NONE_PASSES
from tests.fast import log_files
from tests.screens.screens import press, running, settle, text_of, until
from tests.screens.test_feeds import ALL, Cluster, NodeLink, run, texts, yes
from tests.screens.test_follow import FILE, log_of, open_stdout
from tests.screens.test_log_keys import BEGIN, SECOND, answer, body, numbered


def no() -> bool:
    return False


def narrowed(cluster: Cluster, **parts: object) -> MergedFeed:
    return MergedFeed(cluster.source, dataclasses.replace(ALL, filter=RecordFilter(**parts)))  # type: ignore[arg-type]


async def all_loaded(feed: MergedFeed) -> list[bytes]:
    while (want := feed.missing(0, feed.count)) is not None:
        await feed.load(want)
    return texts(feed)


def test_a_filter_keeps_the_line_in_both_directions() -> None:
    """Also where it drops that line: its neighbour stands for it, until it comes back."""

    async def scenario() -> None:
        async with running(numbered(300)) as (app, pilot):
            log = await open_stdout(app, pilot)
            log.jump(207, (0, 0, "stdout", 207))
            await settle(app, pilot)
            await answer(app, pilot, "&", "line 0002.[05]")
            await until(app, pilot, lambda: any("line 000210" in line for line in body(app)))
            assert "+line 0002.[05]" in text_of(app)
            shown = [line for line in body(app) if "line 00" in line]
            assert all("line 0002" in line and line.split("line ")[1][5] in "05" for line in shown)
            await until(app, pilot, lambda: "(20 of 300)" in text_of(app))
            await answer(app, pilot, "!", "5 xx")
            await until(app, pilot, lambda: "(10 of 300)" in text_of(app))
            assert any("line 000210" in line for line in body(app))
            await press(app, pilot, "backslash")
            await until(app, pilot, lambda: any("line 000207" in line for line in body(app)))
            assert "+line" not in text_of(app)
            await press(app, pilot, "backslash", "backspace", "backspace")
            await until(app, pilot, lambda: any("line 000207" in line for line in body(app)))
            assert not log.follow

    asyncio.run(scenario())


@pytest.mark.parametrize("scope", ["one rank", "all ranks", "folded"])
def test_the_line_comes_back_from_a_view_that_nothing_passes(scope: str) -> None:
    async def scenario() -> None:
        async with running(numbered(300), (80, 24)) as (app, pilot):
            if scope == "one rank":
                log = await open_stdout(app, pilot)
            else:
                await press(app, pilot, "4", *("z" for _ in range(scope == "folded")))
                log = log_of(app)
            key, t_ns = (0, 0, "stdout", 107), BEGIN + 107 * SECOND
            await until(app, pilot, lambda: any("line 000299" in line for line in body(app)))
            log.jump_to_key(t_ns, key)
            await until(app, pilot, lambda: any("line 000107" in line for line in body(app)))
            for away, back in ("& zzznothing", ("backspace",)), ("& zzznothing", ("v", "backslash")), ("", ("v", "v")):
                if away:
                    await answer(app, pilot, *away.split())
                else:
                    await press(app, pilot, "v")
                await until(app, pilot, lambda: NONE_PASSES in text_of(app))
                assert not log.follow
                await press(app, pilot, "z", "z")
                await until(app, pilot, lambda: NONE_PASSES in text_of(app))
                await press(app, pilot, *back)
                await until(app, pilot, lambda: any("line 000107" in line for line in body(app)))
                assert (log.follow, log.pointer) == (False, key)

    asyncio.run(scenario())


def test_who_follows_goes_on_following_through_a_view_that_nothing_passes() -> None:
    async def scenario() -> None:
        session = numbered(300)
        async with running(session) as (app, pilot):
            log = await open_stdout(app, pilot)
            session.latency_s = 0.5
            await answer(app, pilot, "&", "zzznothing")
            await until(app, pilot, lambda: LOOKING in text_of(app))
            await until(app, pilot, lambda: NONE_PASSES in text_of(app))
            assert log.follow
            session.latency_s = 0.0
            await press(app, pilot, "backspace")
            await until(app, pilot, lambda: any("line 000299" in line for line in body(app)))
            assert log.follow

    asyncio.run(scenario())


def test_a_log_without_output_is_waited_for_also_with_a_filter() -> None:
    async def scenario() -> None:
        async with running(numbered(0)) as (app, pilot):
            await press(app, pilot, "4")
            await answer(app, pilot, "&", "zzznothing")
            log = log_of(app)
            await until(app, pilot, lambda: isinstance(log.feed, MergedFeed) and log.feed.clocks is not None)
            text = await settle(app, pilot)
            assert "waiting for output" in text
            assert NONE_PASSES not in text

    asyncio.run(scenario())


def test_what_comes_is_filtered_and_a_bad_pattern_is_refused_where_it_is_typed() -> None:
    async def scenario() -> None:
        session = numbered(50)
        async with running(session) as (app, pilot):
            log = await open_stdout(app, pilot)
            assert "not a regular expression" in await answer(app, pilot, "&", "[")
            await press(app, pilot, "escape")
            await answer(app, pilot, "&", "loss")
            session.write(FILE, b"step 1", b"loss 0.5")
            await until(app, pilot, lambda: any("loss 0.5" in line for line in body(app)))
            assert log.follow
            assert not any("step 1" in line or "line 0" in line for line in body(app))
            await press(app, pilot, "f")
            session.write(FILE, b"step 2", b"loss 0.25", b"loss 0.125")
            await until(app, pilot, lambda: any("loss 0.125" in line for line in body(app)))
            await press(app, pilot, "z")
            await until(app, pilot, lambda: any("loss 0.125" in line for line in body(app)))
            assert "folded" in text_of(app)
            await press(app, pilot, "escape")
            await until(app, pilot, lambda: any("step 2" in line for line in body(app)))

    asyncio.run(scenario())


@pytest.mark.parametrize("look_s", [0.002, 1.0])
def test_following_with_a_filter_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look_s: float) -> None:
    """Lines that are finished late, tracebacks that grow, two nodes of different clocks."""
    monkeypatch.setattr(node_merged, "_LOOK_S", look_s)

    async def scenario(cluster: Cluster, one: NodeLink, two: NodeLink) -> None:
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
        found = await all_loaded(feed)
        steps = [text for text in found if text.startswith(b"step")]
        assert steps == [b"step %d needle" % number for number in range(12)]
        errors = [text for text in found if text.startswith(b"ValueError")]
        assert errors == [b"ValueError: needle %d" % number for number in range(12)]
        assert len(found) == 1 + 12 + 12 * 3
        assert b"needle first" in found

    run(tmp_path, scenario, nodes=2)


def test_new_lines_that_pass_are_noticed_and_loaded_when_one_scrolls_to_them(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, node: NodeLink) -> None:
        await node.written(0, b"noise\nloss 0\n")
        feed = narrowed(cluster, include=("loss",))
        await feed.refresh(10, yes)
        for number in range(1, 500):
            node.write(0, b"noise\nloss %d\n" % number)
            if number % 100 == 0:
                await feed.refresh(10, no)
        await node.written(0, b"noise\n")
        for _ in range(4):
            await feed.refresh(10, no)
        assert feed.new_lines_text
        assert texts(feed) == [b"loss 0"]
        assert await all_loaded(feed) == [b"loss %d" % number for number in range(500)]
        for _ in range(2):
            await feed.refresh(10, no)
        assert (feed.passed, feed.looked_at) == (500, 1001)
        rows = [row for row in map(feed.row, range(feed.count)) if row is not None]
        feed.note_read(rows[:100])
        assert feed.new_lines_text, "until the last one has been in view"
        feed.note_read(rows[-100:])
        assert not feed.new_lines_text
        assert feed.is_whole

    run(tmp_path, scenario)


@pytest.mark.parametrize("kind", [MergedFeed, FoldedFeed])
def test_rare_lines_come_in_bounded_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[MergedFeed]
) -> None:
    """An answer that had no time to find anything says how far it has looked; the next one goes on there."""
    monkeypatch.setattr(node_merged, "_LOOK_S", 0.0)

    async def scenario(cluster: Cluster, node: NodeLink) -> None:
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

    run(tmp_path, scenario)


def test_rare_rows_are_in_order_and_none_is_left_out_between(tmp_path: Path) -> None:
    """A rank that was silent for long is asked for its last row too: it may lie before all that is here."""

    async def scenario(cluster: Cluster, one: NodeLink, two: NodeLink) -> None:
        await one.written(0, b"loss first\n")
        await two.written(1, b"".join(b"loss %d\n" % number for number in range(600)))
        await one.written(0, b"noise\n")
        around = narrowed(cluster, include=("loss",))
        [hit] = [row async for row in search(cluster.session, ALL, pattern="loss 300$")]
        await around.show_around(hit.t_ns, 30)
        assert texts(around) == [b"loss %d" % number for number in range(289, 330)]
        await around.refresh(10, no)
        assert around.passed == around.looked_at == 41
        while around.missing(0, 0) is not None:
            await around.load(0)
        assert (await all_loaded(around)) == [b"loss first", *(b"loss %d" % number for number in range(600))]

    run(tmp_path, scenario, nodes=2)


def test_another_filter_does_not_end_a_search() -> None:
    async def scenario() -> None:
        async with running(numbered(300), (100, 24)) as (app, pilot):
            await press(app, pilot, "4")
            await answer(app, pilot, "slash", "0002.0")
            assert "hit 2 of 10" in await press(app, pilot, "g", "n", "n")
            await answer(app, pilot, "&", "line 0002")
            await until(app, pilot, lambda: "nearby)" in text_of(app))
            assert "hit 2 of 10" in await settle(app, pilot)
            assert "hit 3 of 10" in await press(app, pilot, "n")
            await answer(app, pilot, "!", "000220")
            await until(app, pilot, lambda: "9 found" in text_of(app))
            assert "hit 3 of 9" in await press(app, pilot, "n"), "from the line that stands for the one that is gone"
            assert "hit 4 of 10" in await press(app, pilot, "backslash")
            text = await press(app, pilot, "escape")
            assert " of 10" not in text
            assert "0002.0" in await press(app, pilot, "slash"), "the last one is there again"

    asyncio.run(scenario())
