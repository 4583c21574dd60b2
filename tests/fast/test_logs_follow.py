"""Logs: following files while they grow, are truncated, and while generations come and go.

In: files written while a live store follows them. Out: the pieces that readers get.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from remote_agent.logs import LogStore, logfile, watch
from remote_agent.text.rows import CLIP
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


async def test_a_half_line_is_held_back_until_it_is_whole_or_its_rank_has_ended(tmp_path: Path) -> None:
    async with opened(tmp_path, live=True) as store:
        got = Follow(store, generation="all", start="begin")
        append(log(tmp_path), b"whole\nhal")

        async def is_there(text: bytes) -> bool:
            return got.text() == text

        await until(lambda: is_there(b"whole\n"))
        append(log(tmp_path), b"f\nno en")
        await until(lambda: is_there(b"whole\nhalf\n"))
        await store.finish(0)
        await until(lambda: is_there(b"whole\nhalf\nno en"))
        await store.end()
        await asyncio.wait_for(got.task, 60)
        assert [item.data["offset"] for item in got.items] == [0, 6, 11]


async def test_following_from_the_end_starts_with_the_line_that_is_being_written(tmp_path: Path) -> None:
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


async def test_following_from_the_end_of_a_file_that_is_not_indexed_yet_sends_no_old_line(tmp_path: Path) -> None:
    append(log(tmp_path), b"old line\n" * 1_000_000)
    async with opened(tmp_path, live=True) as store:
        got = Follow(store, start="end", after=[])

        async def has_begun() -> bool:
            return bool(got.items)

        await until(has_begun)
        append(log(tmp_path), b"new\n")
        await store.finish(0)
        await store.end()
        await asyncio.wait_for(got.task, 60)
        assert b"".join(item.body for item in got.items[1:]) == b"new\n"


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
        answer = await store.merged(0, after_ns=0, count=1)
        assert (answer.body, answer.data["lines"]) == (b"brand new", 100 if longer else 1)
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


async def test_a_flood_is_followed_to_its_last_byte_though_the_disk_is_full(tmp_path: Path) -> None:
    """100,000 lines, each with a write of its own, from a thread that never waits; the index has no room."""
    path = log(tmp_path)
    path.touch()
    path.with_suffix(".idx").symlink_to("/dev/full")
    lines = [b"line %d of a rank that prints and prints\n" % number for number in range(100_000)]

    def flood() -> None:
        with path.open("ab", buffering=0) as file:
            for line in lines:
                file.write(line)

    async with opened(tmp_path, live=True) as store:

        async def read() -> bytes:
            return b"".join([item.body async for item in store.follow("all", start="begin")])

        reader = asyncio.ensure_future(read())
        await asyncio.to_thread(flood)
        last = await store.merged(0, count=1)
        await store.end()
        assert await asyncio.wait_for(reader, 20) == b"".join(lines)
    assert last.data["rows"], "shown while it comes"


TRACEBACK = b'Traceback (most recent call last):\n  File "a", line 1\n    boom()\nValueError: bad\n'


async def test_a_filter_gives_records_as_a_whole_while_they_are_written(tmp_path: Path) -> None:
    """Also where the line that decides comes last, and lines of another rank come in the meantime."""
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


async def test_lines_of_a_level_or_a_pattern_come_at_once(tmp_path: Path) -> None:
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


async def test_a_long_line_that_does_not_match_is_not_given(tmp_path: Path) -> None:
    """Of one that matches, wherever in it that is, the beginning is given, once."""
    size = 3_000_000
    head, end = b"x" * size, b"The \x1b[1mend\n"
    async with opened(tmp_path, live=True) as store:
        append(log(tmp_path), b"first\n")
        patterns = ("xThe end$", "xtheEnd", "^The", "x{9}y")
        readers = {pattern: Follow(store, rows=True, pattern=f"{pattern}|^first$") for pattern in patterns}
        for reader in readers.values():
            await until(reader.has_begun)
        for start in range(0, size, 400_000):
            append(log(tmp_path), head[start : start + 400_000])
            await store.read(0, 0, "stdout", 0, 1)
            await asyncio.sleep(0)
        append(log(tmp_path), end)
        await store.end()
        await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers.values())), 20)
        got = {pattern: reader.lines() for pattern, reader in readers.items()}
        assert got.pop("xThe end$") == [b"first", head[: 64 * 1024]]
        assert list(got.values()) == [[b"first"]] * 3
        (_, row) = [row for item in readers["xThe end$"].items for row in item.data["rows"]]
        assert (row["line"], row["cut"]) == (1, size + len(end) - 1 - 64 * 1024)


async def test_exact_rows_have_the_states_that_a_terminal_overwrites(tmp_path: Path) -> None:
    bar, long = b"\r 5%\r10%", b"\rbar" * 20_000
    append(log(tmp_path), b"one\r\n" + bar + b"\n" + long + b"\n")
    async with opened(tmp_path, live=False) as store:
        seen, exact = (Follow(store, rows=True, past=True, exact=exact) for exact in (False, True))
        await asyncio.wait_for(asyncio.gather(seen.task, exact.task), 60)
    assert seen.lines() == [b"one", b"10%", b"bar"]
    assert exact.lines() == [b"one\r", bar, long[:CLIP]]
    assert [row.get("cut") for item in exact.items for row in item.data["rows"]] == [None, None, len(long) - CLIP]


async def test_rows_go_on_where_a_reader_was(tmp_path: Path) -> None:
    """What is there, whole lines only, then what comes; also with a record that is being written at that moment."""
    async with opened(tmp_path, live=True) as store:
        append(log(tmp_path), b"old\n" + TRACEBACK[:-5])
        await store.read(0, 0, "stdout", 0, 1)
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


async def test_pieces_go_on_where_a_reader_was(tmp_path: Path) -> None:
    async with opened(tmp_path, live=True) as store:
        append(log(tmp_path), b"one\ntwo\nhal")
        await store.read(0, 0, "stdout", 0, 1)
        first = store.follow(start="end", after=[])
        answer = await first.__anext__()
        assert answer.data == {"first": 0, "after": [[0, 0, "stdout", 8]]}
        await first.aclose()
        append(log(tmp_path), b"f\n")
        rest = Follow(store, start="begin", first=0, after=answer.data["after"], past=True)
        await asyncio.wait_for(rest.task, 60)
        assert b"".join(item.body for item in rest.items[1:]) == b"half\n"


# Logs: a bound on what a rank's logs take on the disk; what goes is told in its place, all else stays as it was.


MIB = 1024 * 1024
BOUND = 4 * MIB
# The bound counts bytes of the log. The disk also has the rest of the first and the last block, and the file's extents.
OF_THE_FILE_SYSTEM = 64 * 1024
LINES = [b"line %07d %s\n" % (number, b"x" * 80) for number in range(100_000)]


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


async def check_readers(store: LogStore, path: Path) -> None:
    """Every reader gives one line for what is gone, then the rest under its own number, offset and text."""
    text = path.read_bytes()
    found = [row async for item in store.rows(0, pattern="no such text", past=True) for row in item.data["rows"]]
    assert len(found) == 1, "a search waits for the index, and tells of the gap"
    listed = (await store.merged(0, after_ns=0, count=3)).data
    first, start = listed["rows"][0]["line"], listed["rows"][1]["offset"]
    assert 0 < start == text.index(b"line")
    assert not text[:start].strip(b"\0")
    kept = [line.rstrip(b"\n") for line in LINES][len(LINES) - text[start:].count(b"\n") :]
    lost = b"\xe2\x80\xa6 %.1f MB were dropped here: log_bound, or --logs of a bundle" % (start / 1e6)
    assert listed["lines"] == first + 1 + len(kept)
    assert [row["line"] for row in listed["rows"]][:3] == [first, first + 1, first + 2]
    # Merged rows, forth and back.
    forth = await store.merged(0, after_ns=0, count=700)
    assert forth.body.split(b"\n")[:700] == [lost, *kept[:699]]
    back: list[bytes] = []
    before = None
    while True:
        page = await store.merged(0, before_ns=before, count=4000)
        back = page.body.split(b"\n") + back
        if not page.data["more"]:
            break
        before = page.data["rows"][0]["t_ns"]
    assert back == [lost, *kept]
    # A search says what it could not look at, and finds the rest.
    number = int(kept[5].split()[1])
    items = [item async for item in store.rows(0, pattern=f"line {number:07}", level="info", past=True)]
    assert [text for item in items if item.body for text in item.body.split(b"\n")] == [lost, kept[5]]
    assert [row["line"] for item in items for row in item.data["rows"]] == [first, first + 6]
    read = await store.read(0, 0, "stdout", 0, 100)
    assert (read.data["offset"], read.body) == (start, text[start : start + 100])


def test_a_bound_keeps_the_newest_and_reports_the_rest(tmp_path: Path) -> None:
    path = log(tmp_path)
    if not _can_punch(path):
        pytest.skip("this file system cannot punch holes")
    asyncio.run(_write_and_follow(tmp_path, path))
    asyncio.run(_read_later(tmp_path, path))
    sidecar = path.with_suffix(".idx")
    whole = sidecar.read_bytes()
    for damaged in (whole[: len(whole) // 4 // 32 * 32], b""):
        sidecar.write_bytes(damaged)
        asyncio.run(_read_later(tmp_path, path))


async def _write_and_follow(root: Path, path: Path) -> None:
    store = LogStore(root, live=True, bound=BOUND)
    await store.start()
    early: list[Answer] = []

    async def follow() -> None:
        async for item in store.follow("all", start="begin"):
            early.append(item)
            if len(early) == 1:
                await gone.wait()

    gone = asyncio.Event()
    reader = asyncio.ensure_future(follow())
    for begin in range(0, len(LINES), 10_000):
        append(path, b"".join(LINES[begin : begin + 10_000]))
        await store.merged(0, count=1)
        await asyncio.sleep(0.03)

    async def is_within() -> bool:
        return on_disk(path) <= BOUND + OF_THE_FILE_SYSTEM

    await until(is_within)
    assert path.stat().st_size == sum(map(len, LINES)), "offsets stay as they were"
    assert on_disk(path) > BOUND // 2
    await check_readers(store, path)
    listed = (await store.merged(0, count=1)).data
    assert listed["lines"] == len(LINES), "lines keep their numbers"
    gone.set()
    await store.end()
    await asyncio.wait_for(reader, 20)
    await store.stop()
    # Who was behind hears where the gap is; his bytes go on without another one.
    assert [item.data["offset"] for item in early if "dropped" in item.data] == [len(early[0].body)]
    at = 0
    for item in early:
        assert item.data["offset"] == at
        at = item.data.get("dropped") or at + len(item.body)
    assert at == path.stat().st_size


async def _read_later(root: Path, path: Path) -> None:
    store = LogStore(root, live=False)
    await store.start()
    await check_readers(store, path)
    await store.stop()


def _can_punch(path: Path) -> bool:
    path.write_bytes(b"x" * MIB)
    try:
        with path.open("r+b") as file:
            logfile.punch(file.fileno(), MIB)
    except OSError:
        return False
    finally:
        path.unlink()
    return True


def test_nothing_is_dropped_where_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, end: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(logfile, "punch", refuse)
    path = log(tmp_path)

    async def run() -> None:
        store = LogStore(tmp_path, live=True, bound=MIB)
        await store.start()

        async def is_told() -> bool:
            return bool(caplog.records)

        for _ in range(3):
            append(path, b"".join(LINES[:30_000]))
            await until(is_told)
            await store.merged(0, count=1)
        assert (await store.merged(0, after_ns=0, count=1)).body + b"\n" == LINES[0]
        await store.end()
        await store.stop()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert len(caplog.records) == 1
    assert "nothing is dropped" in caplog.text


async def test_a_file_of_the_users_is_followed_and_never_cut(tmp_path: Path) -> None:
    theirs, out = tmp_path / "nccl.n1.77", log(tmp_path)
    log(tmp_path, stream="nccl").symlink_to(theirs)
    store = LogStore(tmp_path, live=True, bound=MIB)
    await store.start()
    theirs.write_bytes(b"".join(LINES[:30_000]))

    async def is_seen() -> bool:
        files = (await store.list()).data["files"]
        return {file["stream"]: file["lines"] for file in files} == {"nccl": 30_000, "stdout": len(looks)}

    looks: list[int] = []
    for look in range(3):
        append(out, b"alive\n")
        looks.append(look)
        await until(is_seen)
    await store.stop()
    assert theirs.read_bytes() == b"".join(LINES[:30_000])
