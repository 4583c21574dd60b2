"""The log screen: what is read never moves, whatever comes, is filtered or searched for, and nothing is lost."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from supervisor.errors import Unreachable
from supervisor.logs import reader
from supervisor.logs.pages import Page
from supervisor.logs.selection import RecordFilter, Selection
from supervisor.tui.logs import feed as feeds
from supervisor.tui.logs import finder, folded
from supervisor.tui.logs.feed import LogFeed
from supervisor.tui.logs.finder import Finder
from supervisor.tui.logs.folded import FoldedFeed
from supervisor.tui.rows.incident import LogPlace
from supervisor.tui.shell import Target
from supervisor.tui.widgets.virtual_log import NONE_PASSES
from tests.screens import recorded
from tests.screens.logs import (
    ALL,
    BEGIN,
    FILE,
    SECOND,
    answer,
    body,
    cluster_of,
    led_to,
    lines,
    log_of,
    numbered,
    open_stdout,
    search,
    see,
    stepping,
    talking,
    with_needles,
)
from tests.screens.recorded import RecordedSession
from tests.screens.screens import press, running, settle, text_of, type_key, until


@pytest.mark.parametrize("keys", [("3", "enter", "s"), ("4",), ("4", "z")], ids=["one stream", "merged", "folded"])
async def test_a_reader_is_not_moved_by_new_lines_and_f_shows_them(keys: tuple[str, ...]) -> None:
    session = talking()
    async with running(session) as (app, pilot):
        await press(app, pilot, *keys, "pageup", "pageup", "right")
        log = log_of(app)
        assert not log.follow
        before = body(app)
        for number in range(10):
            session.write(FILE, *(f"new {number} {part}".encode() for part in range(50)))
            await settle(app, pilot)
            assert body(app) == before
        await until(app, pilot, lambda: bool(log.new_lines_text) and f" {log.new_lines_text} " in text_of(app))
        assert body(app) == before
        await press(app, pilot, "f", "0")
        await see(app, pilot, "new 9 49")


async def test_a_long_line_says_how_much_of_it_is_not_shown() -> None:
    session = talking(3)
    session.write(FILE, b"x" * 4096, b"\x1b[31m" + b"x" * 100_000)
    async with running(session) as (app, pilot):
        await open_stdout(app, pilot)
        assert "x… +95.9 kB" in await press(app, pilot, "dollar_sign")
        assert "x… +95.9 kB" in await press(app, pilot, "w", "G")


@pytest.mark.parametrize("keys", [(), ("z",), ("w", "v")], ids=["plain", "folded", "wrapped and filtered"])
async def test_lines_of_a_node_that_is_back_move_nothing(keys: tuple[str, ...]) -> None:
    session = talking(0)
    for number in range(400):
        session.write(FILE, b"here %d" % number, level="error")
        session.write(("n2", 0, 2, "stdout"), b"there %d" % number, level="error")
    session.hosts["n2"].state = "lost"
    session.unread = {"n2"}
    async with running(session) as (app, pilot):
        await press(app, pilot, "4", *keys, "pageup", "pageup")
        await until(app, pilot, lambda: "without n2" in text_of(app))
        log, third = log_of(app), log_of(app).body_height // 3
        before = [*log.lines_here().values()]
        assert {row.node for row in before} == {"n1"}
        session.hosts["n2"].state = "up"
        session.unread = set()
        await until(app, pilot, lambda: "without n2" not in text_of(app))
        after = [*log.lines_here().values()]
        assert after[third] == before[third], "what is read stays where it is"
        assert after[third + 1].text == b"there %d" % before[third].line
        assert not log.follow


async def test_a_stream_is_followed_over_a_lost_link_and_a_restart() -> None:
    session = talking(50)
    async with running(session) as (app, pilot):
        log = await open_stdout(app, pilot)
        await press(app, pilot, "right", "right")
        session.write(FILE, b"0123456789" * 10)
        await see(app, pilot, "2345678901")
        assert (log.follow, log.left) == (True, 32)
        assert "column 32" in text_of(app)
        before = body(app)
        session.hosts["n1"].state = "lost"
        await until(app, pilot, lambda: "n1: no link" in text_of(app))
        assert body(app) == before
        session.hosts["n1"].state = "up"
        session.write(FILE, b"x" * 32 + b"back again")
        await see(app, pilot, "back again")
        session.write(("n1", 1, 0, "stdout"), b"x" * 32 + b"hello from generation 1")
        session.touch(status={**session.status, "generation": 1})
        await see(app, pilot, "hello from generation 1")


async def test_a_rank_is_followed_to_another_node() -> None:
    session = talking()
    session.write(("n2", 0, 3, "stdout"), b"alive on n2")
    async with running(session) as (app, pilot):
        app.shell.open_log(Target("n2", 3))
        assert "rank 3 on n2, stdout+stderr" in await settle(app, pilot)
        await press(app, pilot, "s")
        first, second = session.status["nodes"]
        first["ranks"], second["ranks"], second["state"] = first["ranks"] + second["ranks"], [], "removed"
        session.hosts["n2"].state = "lost"
        session.write(("n1", 1, 3, "stdout"), b"alive on n1")
        session.touch(status={**session.status, "generation": 1})
        await see(app, pilot, "alive on n1")
        assert "rank 3 on n1, stdout" in text_of(app)
        assert "rank 3 on n1, stdout+stderr" in await press(app, pilot, "s", "s", "s")
        await see(app, pilot, "alive on n1")


async def test_keys_lead_to_the_next_rank_and_a_whole_line() -> None:
    session = talking(50)
    for node, error_ms in zip(session.status["nodes"], (0.0, 0.4), strict=True):
        node["clock_error_ms"] = error_ms
    async with running(session) as (app, pilot):
        assert "log of rank 0 on n1" in await press(app, pilot, "3", "enter")
        assert "log of rank 1 on n1" in await press(app, pilot, "greater_than_sign")
        text = await press(app, pilot, "less_than_sign")
        assert "log of rank 0 on n1" in text
        assert "clocks within" not in text, "those of one node are one"
        for opened in ("enter", "question_mark"):
            await press(app, pilot, opened)
            assert len(app.screen_stack) == 2
            await press(app, pilot, "enter")
            assert len(app.screen_stack) == 1
        text = await press(app, pilot, "1", "shift+tab", "enter")
        assert "log of all ranks" in text
        assert "clocks within 0.4 ms" in text


async def test_a_log_that_is_opened_before_a_host_answers_waits_for_it() -> None:
    class Connecting(recorded.RecordedSession):
        """Nobody can be asked before the first status."""

        async def merged(self, selection: Selection, count: int, **bounds: Any) -> Page:
            if not self.status or self.status_age_s > 1:
                raise Unreachable("cannot reach any job")
            return await super().merged(selection, count, **bounds)

    source = talking(50)
    session = Connecting()
    session.hosts, session.files, session.status_age_s = source.hosts, source.files, float("inf")
    async with running(session) as (app, pilot):
        text = await press(app, pilot, "4")
        assert "connecting to the hosts; the log opens once one answers" in text
        assert "cannot reach" not in text
        assert "asking the nodes" in await press(app, pilot, "7")
        assert "still connecting to the job" in await press(app, pilot, "4", "x")
        await press(app, pilot, "escape")
        session.touch(status=source.status, status_age_s=9.0)
        await until(app, pilot, lambda: "cannot reach any job" in text_of(app))
        session.touch(status_age_s=0.1)
        await see(app, pilot, "line 000049")


async def test_the_odd_one_of_512_ranks_is_seen_and_enter_unfolds() -> None:
    async with running(stepping(512, 3)) as (app, pilot):

        def shown() -> list[list[str]]:
            return [re.sub(r"^.{14}", "", line).split() for line in body(app) if "step" in line]

        def shows(*texts: str) -> bool:
            return all(text in text_of(app) for text in texts)

        alike = [["[0-36,38-511]~", "step", str(number), "loss=1.0"] for number in range(3)]
        odd = [["n2", "r37", "step", str(number), "loss=nan"] for number in range(3)]
        rows = [line for pair in zip(alike, odd, strict=True) for line in pair]
        await press(app, pilot, "4", "z")
        await until(app, pilot, lambda: shown() == rows and shows("folded"))
        await press(app, pilot, "f", "enter")
        await until(app, pilot, lambda: shows("511 ranks alike", "n2 r1  step 0 loss=1.1"))
        await press(app, pilot, "escape", "z")
        await until(app, pilot, lambda: shows("n2 r1 ") and not shows("[0-36"))


async def test_folding_keeps_the_time_that_is_read() -> None:
    session = stepping(8, 200)
    async with running(session) as (app, pilot):
        await press(app, pilot, "4", *["pageup"] * 20)
        top = re.search(r"step \d+ ", body(app)[0])
        assert top is not None
        for is_folded in (True, False):
            await press(app, pilot, "z")
            assert not log_of(app).follow
            assert isinstance(log_of(app).feed, FoldedFeed) is is_folded
            assert any(top[0] in line for line in body(app))


async def test_reading_back_and_forth_shows_every_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Less than there is: what is out of sight is dropped and fetched again.
    monkeypatch.setattr(feeds, "LINES_KEPT", 2_000)
    monkeypatch.setattr(folded, "LINES_KEPT", 2_000)
    monkeypatch.setattr(folded, "FOLD_PAGE", 512)
    session = stepping(32, 150)
    async with running(session) as (app, pilot):
        await press(app, pilot, "4", "z")
        seen: list[int] = []
        for _ in range(100):
            page = [int(found[1]) for line in body(app) if (found := re.search(r"\[0-31\].*step (\d+) ", line))]
            seen = [number for number in page if number not in seen] + seen
            if 0 in page:
                break
            await press(app, pilot, "pageup")
        assert seen == list(range(150))
        while "step 149" not in body(app)[-1]:
            before = body(app)
            await press(app, pilot, "pagedown")
            assert body(app) != before


def rich(count: int = 2000) -> RecordedSession:
    session = with_needles(count, *range(5, count, 40))
    session.write(("n2", 0, 2, "stdout"), *(b"other %d" % number for number in range(300)))
    return session


async def test_no_key_makes_new_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "HITS_KEPT", 20)
    session = rich()
    async with running(session) as (app, pilot):
        await press(app, pilot, "4")
        session.latency_s = 0.02
        for key in (
            *("slash", *"needle", "enter", *"gnnnNNNNGNNN", *("n" * 20), "G", "escape", *"{}eEg", "pageup", "G"),
            *("pageup", "f", "up", "at", *"-10s", "enter", "v", *("backslash",) * 2, *"gzMgM", "up"),
        ):
            type_key(app, key)
            for _ in range(6):
                app.tick()
                await pilot.pause(0.004)
                assert "new lines below" not in text_of(app), key
        assert "new lines below" not in await settle(app, pilot)


@pytest.mark.parametrize("keys", [("3", "enter", "s"), ("4",)], ids=["one stream", "merged"])
async def test_who_reads_to_the_end_has_no_new_lines(keys: tuple[str, ...]) -> None:
    session = talking(200)
    async with running(session) as (app, pilot):
        await press(app, pilot, *keys, "pageup")
        log = log_of(app)
        for _ in range(2):
            session.write(FILE, *(b"new %d" % number for number in range(50)))
            await until(app, pilot, lambda: log.new_lines_text == "new lines below")
            await press(app, pilot, *["pagedown"] * 6)
            await until(app, pilot, lambda: not log.new_lines_text)
            assert not log.follow


@pytest.mark.parametrize("keys", [("s",), ()], ids=["one stream", "merged"])
async def test_a_search_begins_where_one_reads(keys: tuple[str, ...]) -> None:
    session = with_needles(2000, 100, 900, 1700)
    async with running(session) as (app, pilot):
        await press(app, pilot, "3", "enter", *keys)
        text = await press(app, pilot, "slash", *"needle", "enter")
        assert "hit 3 of 3" in text, "who follows is nearest to the newest"
        assert "hit 2 of 3" in await press(app, pilot, "N")
        assert log_of(app).pointer == (0, 0, "stdout", 900)
        assert "hit 3 of 3" in await press(app, pilot, "f", "n")
        assert "hit 1 of 3" in await press(app, pilot, "g", "n")
        assert "hit 2 of 3" in await press(app, pilot, "down", "n"), "the hit is in view yet"
        text = await press(app, pilot, "g", "N")
        assert "hit 3 of 3" in text
        assert "a needle here" in text
        before = body(app)
        session.write(FILE, b"another needle", b"and more")
        await until(app, pilot, lambda: "hit 3 of 4" in text_of(app))
        assert body(app) == before, "a hit that comes later moves nobody"
        assert "hit 4 of 4" in await press(app, pilot, "n")
        assert "hit" not in await press(app, pilot, "escape")
        assert app.current_mode == "logs"
        assert "pattern:" in await press(app, pilot, "slash", "(", "enter")


async def test_a_search_finds_what_comes_also_over_a_lost_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "READ_DEADLINE", 0.5)
    async with cluster_of(tmp_path, 2) as (cluster, [first, second]):
        first.stuck = True
        first.write(0, b"needle\n" * 3)
        await second.written(1, b"needle\nhay\n")
        found, is_complete = Finder(cluster.source, ALL, "needle"), asyncio.Event()
        searching = asyncio.ensure_future(found.run(lambda: None, is_complete.set))

        async def finds(count: int) -> None:
            while len(found.hits) < count:
                await asyncio.sleep(0.01)

        await finds(1)
        assert found.state_text() == "1+ hits", "n1 has yet to answer"
        await is_complete.wait()
        assert found.state_text() == "1 hits", "it has had its time"
        first.stuck = False
        await finds(4)
        second.reached_at = None
        await second.written(1, b"needle\n")
        await asyncio.sleep(0.1)
        second.reached_at = 2.0
        await finds(5)
        await second.written(1, b"hay\nneedle\n")
        await finds(6)
        cluster.ended = True
        for node in (first, second):
            await node.store.end()
        await searching
        assert len(found.hits) == len({key for _, key in found.hits}) == 6


async def test_a_search_is_complete_without_nodes_that_cannot_be_asked(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, 2) as (cluster, [first, second]):
        first.reached_at = None
        await second.written(1, b"hay\n")
        found = Finder(cluster.source, ALL, "needle")
        await search(found)
        assert found.state_text() == "not found"


async def test_a_search_ends_with_as_many_hits_as_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "HITS_KEPT", 20)
    session = with_needles(2000, *range(5, 2000, 40))
    async with running(session) as (app, pilot):
        assert "hit 20 of 20+" in await press(app, pilot, "4", "slash", *"needle", "enter")
        assert log_of(app).pointer == (0, 0, "stdout", 765)
        assert "hit 1 of 20+" in await press(app, pilot, "n")
        session.write(FILE, b"another needle")
        assert "hit 2 of 20+" in await press(app, pilot, "n")


async def test_hits_of_many_files_come_by_time_and_once(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, 2) as (cluster, nodes):
        cluster.offsets_ms = {"n1": 700.0, "n2": -300.0}
        for part in range(3):
            for rank, node in enumerate((*nodes, *nodes)):
                await node.written(rank, b"needle\nhay\n" * (rank * 7 + part + 1))
        found = Finder(cluster.source, ALL, "needle")
        await search(found)
        assert len(found.hits) == len({key for _, key in found.hits}) == sum(3 * rank * 7 + 6 for rank in range(4))
        assert found.hits == sorted(found.hits)
        at, seen = found.hits[30], []
        for _ in found.hits:
            step = found.step(1, at, at[1])
            assert step is not None
            at = step
            seen.append(at)
        assert sorted(seen) == found.hits
        assert found.step(-1, None, None) == found.hits[-1]
        assert found.step(1, found.hits[60], None) == found.hits[60]
        assert found.step(-1, found.hits[12], None) == found.hits[11]


async def test_steps_that_are_typed_ahead_are_all_taken() -> None:
    session = with_needles(2000, *range(5, 2000, 40))
    async with running(session, (100, 24)) as (app, pilot):
        text = await press(app, pilot, "4", "slash", *"needle", "enter")
        assert "hit 50 of 50" in text, "who follows is nearest to the newest"
        log = log_of(app)
        session.latency_s = 0.02
        for keys, line in (("gnnn", 85), ("NNNN", 1925), ("GNNN", 1885), ("n" * 25, 885)):
            for key in keys:
                type_key(app, key)
            await led_to(app, pilot, line)
            await until(app, pilot, lambda: not log.is_jumping)
            text = await settle(app, pilot)
            await led_to(app, pilot, line)
            assert "a needle here" in text
            assert "needle: hit " in text
        for key in ("g", *("n" * 25), "G"):
            type_key(app, key)
        await until(app, pilot, lambda: log.follow)
        await settle(app, pilot)
        assert log.follow, "who has gone to the end is not brought back"


async def test_a_hit_in_a_burst_is_found(tmp_path: Path) -> None:
    """Its lines are nanoseconds apart, and the next comparison differs by microseconds."""
    async with cluster_of(tmp_path) as (cluster, [node]):
        await node.written(0, lines(250))
        cluster.offsets_ms = {"n1": 0.5}
        found = Finder(cluster.source, ALL, "line 249")
        cluster.offsets_ms = {"n1": 0.45}
        await search(found)
        t_ns, key = found.hits[0]
        feed = LogFeed(cluster.source, ALL)
        await feed.show_around(t_ns, 30, found.clocks)
        assert feed.index_of(key) is not None
        await feed.show_begin(30)
        assert feed.clocks is found.clocks, "what is read and what is found have times of one clock"


async def test_a_filter_keeps_the_line_that_is_read_or_its_neighbour() -> None:
    async with running(numbered(300)) as (app, pilot):
        log = await open_stdout(app, pilot)
        log.jump_to_key(BEGIN + 207 * SECOND, (0, 0, "stdout", 207))
        await settle(app, pilot)
        await answer(app, pilot, "&", "line 0002.[05]")
        await see(app, pilot, "line 000210")
        assert "+line 0002.[05]" in text_of(app)
        shown = [line for line in body(app) if "line 00" in line]
        assert all("line 0002" in line and line.split("line ")[1][5] in "05" for line in shown)
        await answer(app, pilot, "!", "5 xx")
        await see(app, pilot, "line 000210")
        await press(app, pilot, "backslash")
        await see(app, pilot, "line 000207")
        assert "+line" not in text_of(app)
        await press(app, pilot, "backslash", "backspace", "backspace")
        await see(app, pilot, "line 000207")
        assert not log.follow


@pytest.mark.parametrize("keys", [("3", "enter", "s"), ("4", "z")], ids=["one stream", "folded"])
async def test_the_line_comes_back_from_a_view_that_nothing_passes(keys: tuple[str, ...]) -> None:
    async with running(numbered(300)) as (app, pilot):
        await press(app, pilot, *keys)
        log, key = log_of(app), (0, 0, "stdout", 107)
        await see(app, pilot, "line 000299")
        log.jump_to_key(BEGIN + 107 * SECOND, key)
        await see(app, pilot, "line 000107")
        for away, back in ("& zzznothing", ("backspace",)), ("& zzznothing", ("v", "backslash")), ("", ("v", "v")):
            await (answer(app, pilot, *away.split()) if away else press(app, pilot, "v"))
            await until(app, pilot, lambda: NONE_PASSES in text_of(app))
            assert not log.follow
            await press(app, pilot, "z", "z")
            await until(app, pilot, lambda: NONE_PASSES in text_of(app))
            await press(app, pilot, *back)
            await see(app, pilot, "line 000107")
            assert (log.follow, log.pointer) == (False, key)


async def test_what_comes_is_filtered_and_a_bad_pattern_is_refused() -> None:
    session = numbered(50)
    async with running(session) as (app, pilot):
        log = await open_stdout(app, pilot)
        assert "not a regular expression" in await answer(app, pilot, "&", "[")
        await press(app, pilot, "escape")
        await answer(app, pilot, "&", "loss")
        session.write(FILE, b"step 1", b"loss 0.5")
        await see(app, pilot, "loss 0.5")
        assert log.follow
        assert not any("step 1" in line or "line 0" in line for line in body(app))
        await press(app, pilot, "f")
        session.write(FILE, b"step 2", b"loss 0.25", b"loss 0.125")
        await see(app, pilot, "loss 0.125")
        await press(app, pilot, "z")
        await see(app, pilot, "loss 0.125")
        assert "folded" in text_of(app)
        await press(app, pilot, "escape")
        await see(app, pilot, "step 2")


async def test_a_place_is_shown_without_the_filter_which_comes_back() -> None:
    async with running(numbered(300)) as (app, pilot):
        await press(app, pilot, "4")
        await answer(app, pilot, "&", "line 0002")
        app.shell.open_log(LogPlace("n1", 0, 0, "stdout", 101, "stdout"))
        await see(app, pilot, "line 000100")
        await until(app, pilot, lambda: "the filter is off for this log" in text_of(app))
        assert "+line 0002" not in text_of(app)
        assert app.shell.preferences.log_filter == RecordFilter(("line 0002",)), "it is the job's for all that"
        await press(app, pilot, "backslash")
        await see(app, pilot, "line 000200")
        assert "+line 0002" in text_of(app)
        app.shell.open_log(LogPlace("n1", 0, 0, "stdout", 101, "stdout"))
        await see(app, pilot, "line 000100")
        app.shell.open_log(Target())
        await until(app, pilot, lambda: "+line 0002" in text_of(app))


async def test_a_line_of_a_generation_before_is_read_on_without_the_filter() -> None:
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
