"""Logs: the store over a job directory that workers write to, as the agent uses it.

In: files made here, some while the store follows. Out: the answers to the log requests.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from remote_agent.logs import LogStore, window
from remote_agent.logs.catalogue import Catalogue
from remote_agent.logs.logfile import Key
from remote_agent.wire import Answer, Problem
from tests.fast.log_files import TRACEBACK, append, log, opened


def test_arrival_times_outlive_the_agent(tmp_path: Path) -> None:
    """A later reader finds the times in the sidecar; without it, the file's mtime as an upper bound, and says so."""

    async def write() -> list[int]:
        async with opened(tmp_path, live=True) as store:
            for number in range(3):
                append(log(tmp_path), b"line %d\n" % number)
                await store.window(0, 0, "stdout", 0, 1)
                await asyncio.sleep(0.03)
            answer = await store.window(0, 0, "stdout", 0, 3)
            await store.end()
        return [row["t_ns"] for row in answer.data["rows"]]

    async def read() -> list[dict[str, Any]]:
        async with opened(tmp_path, live=False) as store:
            answer = await store.window(0, 0, "stdout", 0, 3)
            listed = (await store.list()).data["files"]
            assert [each["lines"] for each in listed] == [3]
        rows: list[dict[str, Any]] = answer.data["rows"]
        return rows

    times = asyncio.run(write())
    assert [row["t_ns"] for row in asyncio.run(read())] == times
    sidecar = log(tmp_path).with_suffix(".idx")
    whole = sidecar.read_bytes()
    for damaged in (whole[:-5], whole[:40] + b"\xff" * 8 + whole[48:], b"", b"something else"):
        sidecar.write_bytes(damaged)
        rows = asyncio.run(read())
        assert [row["line"] for row in rows] == [0, 1, 2]
        assert all(row["t_ns"] == wanted or row.get("t_upper") for row, wanted in zip(rows, times, strict=True))
        assert sidecar.read_bytes() == damaged, "a reader changes nothing"
    sidecar.unlink()
    rows = asyncio.run(read())
    assert all(row["t_upper"] and row["t_ns"] >= log(tmp_path).stat().st_mtime_ns for row in rows)


def test_a_restarted_agent_goes_on_with_the_index(tmp_path: Path) -> None:
    async def run(text: bytes) -> Answer:
        async with opened(tmp_path, live=True) as store:
            append(log(tmp_path), text)
            return await store.window(0, 0, "stdout", 0, 2000)

    first = asyncio.run(run(b"a\n" * 700))
    second = asyncio.run(run(b"b\n" * 700))
    assert second.data["total_lines"] == 1400
    assert second.data["rows"][:700] == first.data["rows"]
    assert not any(row.get("t_upper") for row in second.data["rows"])


def test_a_traceback_is_never_torn(tmp_path: Path) -> None:
    """Its lines come one by one between the other rank's lines, and stay together."""

    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            for number, line in enumerate(TRACEBACK.splitlines(keepends=True)):
                append(log(tmp_path, 0, "stderr"), line)
                await store.window(0, 0, "stderr", 0, 1)
                await asyncio.sleep(0.012)
                append(log(tmp_path, 1, "stderr"), b"step %d\n" % number)
                await store.window(0, 1, "stderr", 0, 1)
                await asyncio.sleep(0.012)
            answer = await store.merged(0, streams=["stderr"], count=20)
            assert answer.body + b"\n" == TRACEBACK + b"step 0\nstep 1\nstep 2\nstep 3\n"
            times = [row["t_ns"] for row in answer.data["rows"]]
            assert len(set(times[:4])) == 1
            assert times == sorted(times)
            only = await store.merged(0, streams=["stderr"], count=20, level="error")
            assert only.body + b"\n" == TRACEBACK
            middle = await store.merged(0, streams=["stderr"], before_ns=times[0] + 20_000_000, count=20)
            assert middle.body.startswith(TRACEBACK.rstrip()), "a time inside a record gives the whole record"

    asyncio.run(run())


def test_levels_skip_what_cannot_match(tmp_path: Path) -> None:
    append(
        log(tmp_path), b"fine\n" * 5000 + b"x ERROR: broken\n" + b"fine\n" * 5000 + b"[W1120 10:00:00 a.cpp:3] late\n"
    )

    async def run() -> None:
        async with opened(tmp_path, live=False) as store:
            rows = (await store.merged(0, level="warn", count=10)).data["rows"]
            assert [(row["line"], row["level"]) for row in rows] == [(5000, "E"), (10001, "W")]
            items = [item async for item in store.search("", 0, level="error")]
            assert [row["line"] for row in items[0].data["rows"]] == [5000]
            assert items[-1].data["searched_bytes"] < 10_000

    asyncio.run(run())


def test_read_gives_the_very_bytes(tmp_path: Path) -> None:
    data = os.urandom(100_000)
    append(log(tmp_path), data)

    async def run() -> None:
        async with opened(tmp_path, live=False) as store:
            answer = await store.read(0, 0, "stdout", 10, 20)
            assert (answer.body, answer.data) == (data[10:30], {"offset": 10, "size": 100_000, "eof": False})
            answer = await store.read(0, 0, "stdout", 99_990, 2**30)
            assert (answer.body, answer.data["eof"]) == (data[99_990:], True)
            with pytest.raises(Problem, match="no stderr of rank 0"):
                await store.read(0, 0, "stderr", 0, 1)
            with pytest.raises(Problem, match="must not be negative"):
                await store.read(0, 0, "stdout", -1, 1)

    asyncio.run(run())


def test_the_end_of_a_large_file_is_shown_before_it_is_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "TAIL_WAIT_S", 0.0)
    append(log(tmp_path), b"line of an earlier run\n" * 200_000 + b"the end\n")

    async def run() -> None:
        async with opened(tmp_path, live=False) as store:
            first = await store.window(0, 0, "stdout", -2, 2)
            assert not first.data["complete"]
            assert [row["line"] for row in first.data["rows"]] == [-2, -1]
            assert first.body == b"line of an earlier run\nthe end"
            late = await store.window(0, 0, "stdout", 200_000, 5)
            assert [row["line"] for row in late.data["rows"]] == [200_000]
            assert late.data["total_lines"] == 200_001

    asyncio.run(run())


def test_a_line_of_100_mb_is_clipped_and_costs_little_memory(tmp_path: Path) -> None:
    path = log(tmp_path)
    with path.open("wb") as file:
        file.write(b"before\n")
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b" haystack\nneedle after\n")

    async def run() -> None:
        import tracemalloc

        async with opened(tmp_path, live=False) as store:
            tracemalloc.start()
            while not (await store.window(0, 0, "stdout", 2, 1)).data["complete"]:
                pass
            answer = await store.window(0, 0, "stdout", 0, 10)
            assert [len(text) for text in answer.body.split(b"\n")] == [6, 64 * 1024, 12]
            hits = [row["line"] async for item in store.search("needle") for row in item.data["rows"]]
            assert hits == [2]
            (row,) = [row async for item in store.search("x hay") for row in item.data["rows"]]
            assert (row["line"], row["column"], row["cut"]) == (1, 10**8 - 1, 10**8 + 9 - 64 * 1024)
            size = 0
            async for item in store.follow(start="begin"):
                size += len(item.body)
            assert size == path.stat().st_size
            assert tracemalloc.get_traced_memory()[1] < 16 * 1024 * 1024
            tracemalloc.stop()

    asyncio.run(run())


def test_nonsense_is_refused_with_a_reason(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path, live=False) as store:
            assert (await store.merged()).data["rows"] == []
            with pytest.raises(Problem, match="no such stream: stdin"):
                await store.merged(streams=["stdin"])
            with pytest.raises(Problem, match="no such level: loud"):
                await store.merged(level="loud")
            with pytest.raises(Problem, match="no such generation"):
                await store.merged("newest")
            with pytest.raises(Problem, match="no such start"):
                await store.follow(start="middle").__anext__()

    asyncio.run(run())


def arrived(root: Path, *writes: tuple[int, int, bytes]) -> LogStore:
    """A store over text that came at given times: rank, seconds, text."""
    catalogue = Catalogue(root, writable=True)
    for rank, at_s, text in writes:
        append(log(root, rank), text)
        catalogue.scan(0)
        catalogue.files[Key(0, rank, "stdout")].absorb(10**18 + at_s * 10**9)
    for file in catalogue.files.values():
        file.persist(is_complete=True)
    return LogStore(root, live=False)


def test_a_rank_that_prints_indented_lines_is_seen_among_the_others(tmp_path: Path) -> None:
    writes = [(rank, at, b"  step %d of %d\n" % (at, rank) if rank else b"step %d\n" % at) for at in range(0, 40, 2)
              for rank in (0, 1)]  # fmt: skip

    async def run() -> None:
        store = arrived(tmp_path, *writes)
        await store.start()
        answer = await store.merged(0, count=4)
        assert answer.body == b"step 36\n  step 36 of 1\nstep 38\n  step 38 of 1"
        await store.stop()

    asyncio.run(run())


def test_the_newest_rows_cost_no_reading_of_older_generations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for generation in range(20):
        append(log(tmp_path, generation=generation), b"line\n" * 300)
        os.utime(log(tmp_path, generation=generation), ns=(generation, 10**18 + generation * 10**9))

    async def run() -> None:
        async with opened(tmp_path, live=False) as store:
            assert (await store.merged("all", count=1)).data["rows"][0]["generation"] == 19
            reads: list[int] = []
            pread = os.pread

            def count(descriptor: int, length: int, offset: int) -> bytes:
                reads.append(length)
                return pread(descriptor, length, offset)

            monkeypatch.setattr(os, "pread", count)
            answer = await store.merged("all", count=100)
            assert {row["generation"] for row in answer.data["rows"]} == {19}
            assert answer.data["more"]
            assert len(reads) <= 3, f"{len(reads)} reads"

    asyncio.run(run())


def test_a_window_shows_that_the_file_was_rewritten(tmp_path: Path) -> None:
    append(log(tmp_path), b"old\n" * 300)

    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            first = await store.window(0, 0, "stdout", -1, 1)
            log(tmp_path).write_bytes(b"new\n" * 400)
            second = await store.window(0, 0, "stdout", 0, 1)
            assert (second.body, second.data["total_lines"]) == (b"new", 400)
            append(log(tmp_path), b"more\n")
            third = await store.window(0, 0, "stdout", 0, 1)
            assert first.data["version"] != second.data["version"] == third.data["version"]

    asyncio.run(run())
