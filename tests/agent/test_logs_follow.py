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

from remote_agent.logs import LogStore, follower
from remote_agent.wire import Answer
from tests.agent.log_files import append, log, opened, until


class Follow:
    """A follower task and what it got, per rank."""

    def __init__(self, store: LogStore, **args: Any) -> None:
        self.items: list[Answer] = []
        self.task = asyncio.ensure_future(self._run(store, args))

    async def _run(self, store: LogStore, args: dict[str, Any]) -> None:
        async for item in store.follow(**args):
            self.items.append(item)

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
            await asyncio.wait_for(all_of_it.task, 5)
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
        with mock.patch.object(follower, "Inotify", no_inotify):
            asyncio.run(run())


def test_an_idle_store_reads_nothing(tmp_path: Path) -> None:
    append(log(tmp_path), b"one\n")

    async def run() -> None:
        async with opened(tmp_path, live=True):
            await asyncio.sleep(0.1)
            with mock.patch.object(os, "stat", wraps=os.stat) as looks:
                await asyncio.sleep(0.3)
                quiet = looks.call_count
                append(log(tmp_path), b"two\n")
                await asyncio.sleep(0.1)
                assert quiet == 0, "looked without a reason"
                assert looks.call_count > 0

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
            assert time.monotonic() - started < 0.9
            await until(arrived)
            assert time.monotonic() - started > 0.9
            append(log(tmp_path), b"f\n")
            await store.end()
            await asyncio.wait_for(got.task, 5)
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
            await asyncio.wait_for(got.task, 5)
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
            await asyncio.wait_for(fast.task, 5)

    asyncio.run(run())


def test_one_generation_can_be_followed_to_its_end(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path, live=True) as store:
            append(log(tmp_path), b"only this\n")
            got = Follow(store, generation=0, start="begin")
            append(log(tmp_path, generation=1), b"not this\n")
            await store.finish(0)
            await asyncio.wait_for(got.task, 5)
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
            await asyncio.wait_for(got.task, 5)
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
