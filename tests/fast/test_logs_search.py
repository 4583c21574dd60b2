"""Logs: search over the files of a node, in lines of any length, coloured or written over, at any pattern's price.

In: files made here, patterns. Out: the answers to log_search.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from remote_agent.logs import search as searching
from remote_agent.logs.search import PIECE
from remote_agent.wire import Problem
from tests.fast.log_files import append, log, opened, until


def test_search_streams_hits_stops_at_a_limit_and_minds_the_time(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            append(log(tmp_path), b"hit early\n")
            await store.window(0, 0, "stdout", 0, 1)
            await asyncio.sleep(0.02)
            between = time.time_ns()
            await asyncio.sleep(0.02)
            append(log(tmp_path), b"hit late\n" * 1000)
            append(log(tmp_path, 1), b"hit elsewhere\n")

            async def ready() -> bool:
                return len((await store.list()).data["files"]) == 2

            await until(ready)
            every = [item async for item in store.search("HIT", ignore_case=True)]
            assert sum(len(item.data["rows"]) for item in every) == 1002
            assert len(every) > 2
            early = [item async for item in store.search("hit", until_ns=between)]
            # The first hit at once, the summary when all has been searched.
            assert [(item.body, "done" in item.data) for item in early] == [(b"hit early", False), (b"", True)]
            some = [item async for item in store.search("hit", since_ns=between, limit=3)]
            assert [row["line"] for item in some for row in item.data["rows"]] == [1, 2, 3]
            assert some[-1].data["done"]
            assert some[-1].data["limited"]
            other = [item async for item in store.search("hit", ranks=[1])]
            assert [row["rank"] for row in other[0].data["rows"]] == [1]

    asyncio.run(run())


def test_a_search_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came since, and the line that was not whole; no more is read than that takes."""
    monkeypatch.setattr(searching, "_AGAIN_NS", 0)

    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            path = log(tmp_path)
            append(path, b"needle\n" * 20_000 + b"nee")
            await store.window(0, 0, "stdout", 0, 1)
            first = [item async for item in store.search("needle")]
            assert first[-1].data["hits"] == 20_000
            append(path, b"dle\nneedle\nno\n")
            await store.window(0, 0, "stdout", -1, 1)
            again = [item async for item in store.search("needle", again_ns=first[-1].data["begun_ns"])]
            assert [row["line"] for item in again for row in item.data["rows"]] == [20_000, 20_001]
            assert again[-1].data["searched_bytes"] < 10_000
            last = [item async for item in store.search("needle", again_ns=again[-1].data["begun_ns"])]
            assert last[-1].data["hits"] == 0

    asyncio.run(run())


@pytest.mark.parametrize("way", [1, -1])
def test_from_a_time_on_or_back_parts_of_a_search_meet(way: int, tmp_path: Path) -> None:
    """Of each part the answer says between which times no hit is missing; of many files, of blocks with many hits."""

    async def run() -> None:
        for rank, count in enumerate((40, 3000, 0, 7)):
            append(log(tmp_path, rank), b"hit\nhay\n" * count + b"hay\n")
        async with opened(tmp_path, live=False) as store:

            async def search(**query: Any) -> tuple[list[tuple[int, int, int]], dict[str, Any]]:
                items = [item async for item in store.search("hit", **query)]
                rows = [row for item in items for row in item.data["rows"]]
                return [(row["t_ns"], row["rank"], row["line"]) for row in rows], items[-1].data

            every, _ = await search()
            assert len(every) == 3047
            found: list[tuple[int, int, int]] = []
            edge: int | None = 0 if way > 0 else 1 << 62
            parts = 0
            while edge is not None:
                hits, reported = await search(way=way, limit=200, **{"since_ns" if way > 0 else "until_ns": edge})
                assert len(hits) <= 200
                edge = reported["until_ns" if way > 0 else "since_ns"]
                found += [hit for hit in hits if edge is None or (hit[0] < edge if way > 0 else hit[0] >= edge)]
                parts += 1
            assert sorted(found) == sorted(every)
            assert 15 < parts < 100

    asyncio.run(run())


def test_search_gives_the_event_loop_its_turns(tmp_path: Path) -> None:
    """What makes an agent miss its heartbeat is time without a turn: most turns come within some 10 ms."""
    append(log(tmp_path), b"nothing to be found in this line of text\n" * 120_000)

    async def run() -> None:
        async with opened(tmp_path, live=False) as store:
            await store.window(0, 0, "stdout", -1, 1)
            turns = 0

            async def count() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            started = time.process_time()
            task = asyncio.ensure_future(count())
            async for _ in store.search("[qz]+x"):
                pass
            task.cancel()
            spent = time.process_time() - started
            assert turns > spent / 0.05, f"{turns} turns in {spent:.2f} s"

    asyncio.run(run())


SLOW = [
    r"a*a*a*a*\d",
    r"(a+)+\d",
    r"(a|aa)+\d",
    r"(a+)\1*\1*\d",
    r"a{0,63}a{0,63}a{0,63}a{0,63}\d",
    "a?" * 28 + "a" * 28 + r"\d",
]


@pytest.mark.parametrize("pattern", ["[", "*", *SLOW])
def test_a_pattern_that_cannot_be_run_ends_the_search_and_not_the_agent(tmp_path: Path, pattern: str) -> None:
    """A regular expression that takes exponential time is given up on the line that shows it."""
    append(log(tmp_path), b"step 1\n" + b"a" * 4000 + b"\n")

    async def run() -> None:
        async with opened(tmp_path, live=False) as store:
            begun = time.process_time()
            with pytest.raises(Problem) as refused:
                async for _ in store.search(pattern):
                    pass
            assert time.process_time() - begun < 10
            assert refused.value.kind == "pattern"
            assert pattern not in SLOW or "on line 2 of rank 0's stdout" in refused.value.message

    asyncio.run(run())


@pytest.mark.parametrize("pattern", [r"(\d+\.)+\d+", r"(?:\w+\.)*Error", "rank.*error.*timeout", "(foo|foobar)+"])
def test_everyday_patterns_are_run_on_all_of_a_line(tmp_path: Path, pattern: str) -> None:
    line = b"A " + b"pad " * 1200 + b"rank3 error in 1.2.3 timeout torch.cuda.Error foobar\n"
    append(log(tmp_path), line)

    async def run() -> None:
        async with opened(tmp_path, live=False) as store:
            found = [row async for item in store.search(pattern) for row in item.data["rows"]]
            assert [row["line"] for row in found] == [0]

    asyncio.run(run())


LONG = 300_000


@pytest.mark.parametrize(
    ("line", "pattern", "column"),
    [
        # Over the end of a piece; an umlaut is one character.
        (b"ae\xcc\x88".ljust(PIECE - 3) + b"needle".ljust(LONG), "needle", PIECE - 4),
        (b"x" * (PIECE - 2) + b"nee\x1b[1mdle" + b"x" * LONG, "needle", PIECE - 2),
        (b"x" * (PIECE - 2) + b"nee\x1b[1mdle" + b"x" * LONG, "NEEDLE|\\d", None),
        (b"x" * PIECE + b"y" * LONG, "x$", None),
        (b"x" * PIECE + b"y" * LONG, r"x\b", None),
        (b"x" * PIECE + b" " * LONG, r"x\b", PIECE - 1),
        (b"x" * LONG + b"yz", "yz$", LONG),
        (b"x" * LONG + b"yz", "^yz", None),
        (b"y" + b"x" * LONG, "yx*", 0),
        (b"needle" + b" " * LONG + b"\rover\r", "needle", None),
        (b"over" + b" " * LONG + b"\rneedle\r", "^needle$", -1),
    ],
)
def test_all_of_a_long_line_is_searched(tmp_path: Path, line: bytes, pattern: str, column: int | None) -> None:
    append(log(tmp_path), b"first\n" + line + b"\nlast\n")

    async def run() -> None:
        async with opened(tmp_path, live=False) as store:
            found = [row async for item in store.search(pattern) for row in item.data["rows"]]
            assert [(row["line"], row.get("column", -1)) for row in found] == ([] if column is None else [(1, column)])

    asyncio.run(run())


def test_search_and_level_go_by_what_is_seen(tmp_path: Path) -> None:
    """Escape codes are neither in the way of a pattern nor of a level; the row keeps its colours."""
    coloured = b"\x1b[31mERROR\x1b[0m loss=\x1b[32m0.5\x1b[0m end"
    append(log(tmp_path), b"plain loss=0.5 end\n\n" * 3 + coloured + b"\nloss=0.7\rloss=0.6\r\n")

    async def run() -> None:
        async with opened(tmp_path, live=False) as store:
            for pattern, lines in [
                ("loss=0.5 end", [0, 2, 4, 6]),
                ("^ERROR|0.6$", [6, 7]),
                ("0m|0.7", []),
                (r"^\w+ l", [0, 2, 4, 6]),
            ]:
                found = [row async for item in store.search(pattern) for row in item.data["rows"]]
                assert [row["line"] for row in found] == lines, pattern
            (item, _) = [item async for item in store.search("", level="error")]
            assert ([row["line"] for row in item.data["rows"]], item.body) == ([6], coloured)

    asyncio.run(run())
