"""Logs: following files while they grow, are truncated, and while generations come and go.

In: files written while a live store follows them. Out: the pieces that readers get.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from remote_agent.logs import LogStore, follow, watch
from remote_agent.wire import Answer
from tests.fast.log_files import append, log, opened, until


class Follow:
    """A follower task and what it got, per rank."""

    def __init__(self, store: LogStore, *, rows: bool = False, **args: Any) -> None:
        self._rows = rows
        self.items: list[Answer] = []
        self.task = asyncio.ensure_future(self._run(store, args))

    async def _run(self, store: LogStore, args: dict[str, Any]) -> None:
        async for item in store.rows(**args) if self._rows else store.follow(**args):
            self.items.append(item)

    async def has_begun(self) -> bool:
        return bool(self.lines())

    def lines(self) -> list[bytes]:
        """The rows, where rows were asked for."""
        return [line for item in self.items if item.data["rows"] for line in item.body.split(b"\n")]

    def text(self, rank: int = 0, generation: int = 0) -> bytes:
        return b"".join(
            item.body for item in self.items if (item.data["rank"], item.data["generation"]) == (rank, generation)
        )


@pytest.mark.parametrize("inotify", [True, False])
def test_new_generations_ranks_and_bytes_are_found_while_following(tmp_path: Path, inotify: bool) -> None:
    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            all_of_it = Follow(store, generation="all", start="begin")
            await asyncio.sleep(0.05)
            for generation in range(2):
                for rank in range(2):
                    append(log(tmp_path, rank, generation=generation), b"hello %d\n" % generation)
            await until(lambda: _equal(len(all_of_it.items), 4))
            append(log(tmp_path, 1, generation=1), b"half")
            append(log(tmp_path, 1, "stderr", generation=1), b"step=7 loss=1\n")
            await until(lambda: _equal(store.progress(1).get(1, {}).get("step"), 7))
            await store.finish(0)
            await store.end()
            await asyncio.wait_for(all_of_it.task, 60)
        assert all_of_it.text(0, 0) == b"hello 0\n"
        bodies = [item.body for item in all_of_it.items if (item.data["rank"], item.data["generation"]) == (1, 1)]
        assert sorted(bodies) == [b"half", b"hello 1\n", b"step=7 loss=1\n"]

    async def _equal(left: object, right: object) -> bool:
        return left == right

    def no_inotify() -> None:
        raise OSError("none here")

    if inotify:
        asyncio.run(run())
    else:
        with mock.patch.object(watch, "Inotify", no_inotify):
            asyncio.run(run())


def test_an_idle_store_reads_nothing(tmp_path: Path) -> None:
    append(log(tmp_path), b"one\n")

    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            # Then it has read what was there.
            await store.window(0, 0, "stdout", 0, 1)
            await asyncio.sleep(0.3)
            with mock.patch.object(os, "stat", wraps=os.stat) as looks:
                await asyncio.sleep(0.3)
                quiet = looks.call_count
                assert quiet == 0, "looked without a reason"

                async def has_looked() -> bool:
                    return looks.call_count > 0

                append(log(tmp_path), b"two\n")
                await until(has_looked)

    asyncio.run(run())


def test_a_half_line_is_held_back_until_it_has_rested(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            got = Follow(store, start="begin")
            append(log(tmp_path), b"whole\nhal")
            started = time.monotonic()

            async def arrived() -> bool:
                return got.text() == b"whole\nhal"

            async def first_arrived() -> bool:
                return got.text() == b"whole\n"

            await until(first_arrived)
            await until(arrived)
            assert time.monotonic() - started > 0.9
            append(log(tmp_path), b"f\n")
            await store.end()
            await asyncio.wait_for(got.task, 60)
            assert got.text() == b"whole\nhalf\n"
            assert [item.data["offset"] for item in got.items] == [0, 6, 9]

    asyncio.run(run())


def test_following_from_the_end_starts_with_the_line_that_is_being_written(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            append(log(tmp_path), b"old\nne")
            await store.finish(0)
            got = Follow(store, start="end")
            await asyncio.sleep(0)
            append(log(tmp_path), b"w\n")
            append(log(tmp_path, generation=1), b"next generation\n")
            await store.end()
            await asyncio.wait_for(got.task, 60)
            assert got.text(0, 0) == b"new\n"
            assert got.text(0, 1) == b"next generation\n"

    asyncio.run(run())


def test_a_slow_reader_loses_nothing_and_stops_nobody(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            slow = store.follow(start="begin")
            fast = Follow(store, start="begin")
            wanted = b"".join(b"line %d\n" % number for number in range(50_000))
            path = log(tmp_path)
            got = b""
            for start in range(0, len(wanted), 50_000):
                append(path, wanted[start : start + 50_000])
                if start == 0:
                    got = (await slow.__anext__()).body

            async def fast_has_all() -> bool:
                return fast.text() == wanted

            await until(fast_has_all)
            await store.end()
            async for item in slow:
                got += item.body
            assert got == wanted
            await asyncio.wait_for(fast.task, 60)

    asyncio.run(run())


def test_one_generation_can_be_followed_to_its_end(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            append(log(tmp_path), b"only this\n")
            got = Follow(store, generation=0, start="begin")
            append(log(tmp_path, generation=1), b"not this\n")
            await store.finish(0)
            await asyncio.wait_for(got.task, 60)
            assert [item.body for item in got.items] == [b"only this\n"]

    asyncio.run(run())


def test_ranks_are_followed_in_the_order_of_arrival(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            for number in range(4):
                append(log(tmp_path, number % 2), b"%d\n" % number)
                await store.window(0, number % 2, "stdout", 0, 1)
                await asyncio.sleep(0.15)
            got = Follow(store, start="begin")
            await store.end()
            await asyncio.wait_for(got.task, 60)
            assert b"".join(item.body for item in got.items) == b"0\n1\n2\n3\n"

    asyncio.run(run())


@pytest.mark.parametrize("longer", [False, True])
def test_truncation_and_replacement_are_seen(tmp_path: Path, longer: bool) -> None:
    """Also when the new text is longer than the old one by the time we look."""
    new = b"brand new\n" * (100 if longer else 1)

    async def run(replace: Callable[[Path], None]) -> None:
        root = tmp_path / replace.__name__
        store = LogStore(root, live=True)
        path = log(root)
        append(path, b"old text\nmore old text\n")
        await store.start()
        got = Follow(store, generation="all", start="begin")

        async def seen(text: bytes) -> bool:
            return got.text().endswith(text)

        await until(lambda: seen(b"more old text\n"))
        replace(path)
        await until(lambda: seen(new))
        assert got.text() == b"old text\nmore old text\n" + new
        assert [item.data["offset"] for item in got.items if item.data.get("replaced")] == [0]
        answer = await store.window(0, 0, "stdout", 0, 1)
        assert (answer.body, answer.data["total_lines"]) == (b"brand new", 100 if longer else 1)
        got.task.cancel()
        await store.stop()

    def truncate(path: Path) -> None:
        path.write_bytes(new)

    def rename(path: Path) -> None:
        other = path.with_name("other")
        other.write_bytes(new)
        os.replace(other, path)

    for replace in (truncate, rename):
        (tmp_path / replace.__name__).mkdir()
        asyncio.run(run(replace))


def test_a_flood_is_followed_to_its_last_byte_though_the_disk_is_full(tmp_path: Path) -> None:
    """100,000 lines, each with a write of its own, from a thread that never waits; the index has no room."""
    path = log(tmp_path)
    path.touch()
    path.with_suffix(".idx").symlink_to("/dev/full")
    lines = [b"line %d of a rank that prints and prints\n" % number for number in range(100_000)]

    def flood() -> None:
        with path.open("ab", buffering=0) as file:
            for line in lines:
                file.write(line)

    async def run() -> None:
        async with opened(tmp_path, live=True) as store:

            async def read() -> bytes:
                return b"".join([item.body async for item in store.follow("all", start="begin")])

            reader = asyncio.ensure_future(read())
            await asyncio.to_thread(flood)
            last = await store.window(0, 0, "stdout", -1, 1)
            await store.end()
            assert await asyncio.wait_for(reader, 20) == b"".join(lines)
        assert last.data["rows"], "shown while it comes"

    asyncio.run(run())


TRACEBACK = b'Traceback (most recent call last):\n  File "a", line 1\n    boom()\nValueError: bad\n'


def test_a_filter_gives_records_as_a_whole_while_they_are_written(tmp_path: Path) -> None:
    """Also where the line that decides comes last, and lines of another rank come in the meantime."""

    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            kept = Follow(store, rows=True, shown={"include": ["ValueError"]})
            left = Follow(store, rows=True, shown={"exclude": ["ValueError"]})
            for line in TRACEBACK.splitlines(keepends=True):
                append(log(tmp_path, 0), line)
                append(log(tmp_path, 1), b"step 1\n")
                await asyncio.sleep(0.15)
            append(log(tmp_path, 0), b"on\n")
            await store.end()
            await asyncio.wait_for(asyncio.gather(kept.task, left.task), 60)
            assert kept.lines() == TRACEBACK.splitlines()
            assert sorted(left.lines()) == [b"on", *[b"step 1"] * 4]

    asyncio.run(run())


def test_lines_of_a_level_or_a_pattern_come_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "REST_S", 3600.0)

    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            errors = Follow(store, rows=True, level="error")
            found = Follow(store, rows=True, pattern="st.p", ignore_case=True)
            append(log(tmp_path), b"ERROR one\nSTEP 1\n  ERROR tw")

            async def has(got: Follow, lines: list[bytes]) -> bool:
                return got.lines() == lines

            await until(lambda: has(errors, [b"ERROR one"]))
            await until(lambda: has(found, [b"STEP 1"]))
            append(log(tmp_path), b"o\nfine\n")
            append(log(tmp_path, generation=1), b"ERROR three\n")
            await until(lambda: has(errors, [b"ERROR one", b"  ERROR two", b"ERROR three"]))
            await store.end()
            await asyncio.wait_for(asyncio.gather(errors.task, found.task), 60)
            assert found.lines() == [b"STEP 1"]

    asyncio.run(run())


@pytest.mark.parametrize("is_there", [True, False], ids=["there", "coming"])
def test_a_pattern_matches_what_a_terminal_shows_of_a_line(tmp_path: Path, is_there: bool) -> None:
    """The last state of a progress bar, without colour codes; of lines that come in parts, too."""
    bar, colour = b"10%|#  | loss 3\r20%|## | done", b"loss=\x1b[32m0.5\x1b[0m"
    patterns = {
        "10%": [],
        "30%": [],
        "^20%": [b"20%|## | done"],
        "done$": [b"20%|## | done"],
        "loss": [colour],
        "=0.5$": [colour],
        r"\[32m": [],
    }

    async def run() -> None:
        async with opened(tmp_path, live=True) as store:

            async def write() -> None:
                for part in (bar[:4], bar[4:] + b"\r", b"\n" + colour[:7], colour[7:] + b"\nlast\n"):
                    append(log(tmp_path), part)
                    await store.window(0, 0, "stdout", 0, 1)

            append(log(tmp_path), b"first\n")
            if is_there:
                await write()
            more = "|^first$|^last$"
            readers = {pattern: Follow(store, rows=True, pattern=pattern + more) for pattern in patterns}
            if not is_there:
                for reader in readers.values():
                    await until(reader.has_begun)
                await write()
            await store.end()
            await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers.values())), 60)
            got = {pattern: reader.lines() for pattern, reader in readers.items()}
            assert got == {pattern: [b"first", *lines, b"last"] for pattern, lines in patterns.items()}

    asyncio.run(run())


def test_a_long_line_that_does_not_match_is_not_given(tmp_path: Path) -> None:
    """Of one that matches, wherever in it that is, the beginning is given, once."""
    size = 3_000_000
    head, end = b"x" * size, b"The \x1b[1mend\n"

    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            append(log(tmp_path), b"first\n")
            patterns = ("xThe end$", "xtheEnd", "^The", "x{9}y")
            readers = {pattern: Follow(store, rows=True, pattern=f"{pattern}|^first$") for pattern in patterns}
            for reader in readers.values():
                await until(reader.has_begun)
            for start in range(0, size, 400_000):
                append(log(tmp_path), head[start : start + 400_000])
                await store.window(0, 0, "stdout", 0, 1)
                await asyncio.sleep(0)
            append(log(tmp_path), end)
            await store.end()
            await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers.values())), 20)
            got = {pattern: reader.lines() for pattern, reader in readers.items()}
            assert got.pop("xThe end$") == [b"first", head[: 64 * 1024]]
            assert list(got.values()) == [[b"first"]] * 3
            (_, row) = [row for item in readers["xThe end$"].items for row in item.data["rows"]]
            assert (row["line"], row["cut"], row["column"]) == (1, size + len(end) - 1 - 64 * 1024, size - 1)

    asyncio.run(run())


def test_rows_go_on_where_a_reader_was(tmp_path: Path) -> None:
    """What is there, whole lines only, then what comes; also with a record that is being written at that moment."""

    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            append(log(tmp_path), b"old\n" + TRACEBACK[:-5])
            await store.window(0, 0, "stdout", 0, 1)
            there = Follow(store, rows=True, past=True, whole=True, shown={"exclude": ["nothing"]})
            await asyncio.wait_for(there.task, 60)
            assert there.lines() == [b"old"]
            after = there.items[-1].data["after"]
            assert after == [[0, 0, "stdout", 1]]
            every = Follow(store, rows=True, past=True)
            await asyncio.wait_for(every.task, 60)
            assert every.lines() == [b"old", *TRACEBACK[:-5].splitlines()], "half lines as well"
            append(log(tmp_path), TRACEBACK[-5:])
            rest = Follow(store, rows=True, after=after, shown={"exclude": ["nothing"]})
            await store.end()
            await asyncio.wait_for(rest.task, 60)
            assert rest.lines() == TRACEBACK.splitlines()

    asyncio.run(run())


def test_rows_of_many_files_come_by_time_and_those_of_nccl_are_counted(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            for number in range(6):
                append(log(tmp_path, number % 3), b"%d\n" % number)
                append(log(tmp_path, number % 3), b"n1:7:9 [0] NCCL INFO a\n")
                await store.window(0, number % 3, "stdout", 0, 1)
                await asyncio.sleep(0.02)
            await store.end()
            got = Follow(store, rows=True, past=True)
            await asyncio.wait_for(got.task, 60)
            assert got.lines() == [b"%d" % number for number in range(6)]
            assert sum(item.data["apart"] for item in got.items) == 6

    asyncio.run(run())


def test_pieces_go_on_where_a_reader_was(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            append(log(tmp_path), b"one\ntwo\nhal")
            await store.window(0, 0, "stdout", 0, 1)
            first = store.follow(start="end", after=[])
            answer = await first.__anext__()
            assert answer.data == {"first": 0, "after": [[0, 0, "stdout", 8]]}
            await first.aclose()
            append(log(tmp_path), b"f\n")
            rest = Follow(store, start="begin", first=0, after=answer.data["after"], past=True)
            await asyncio.wait_for(rest.task, 60)
            assert b"".join(item.body for item in rest.items[1:]) == b"half\n"

    asyncio.run(run())
