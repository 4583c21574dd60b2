"""Logs: a bound on what a rank's logs take on the disk; what goes is told in its place, all else stays as it was.

In: a rank that writes more than the bound. Out: what each reader makes of the hole, while it grows and later.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from pathlib import Path

import pytest

from remote_agent.logs import LogStore, logfile
from remote_agent.wire import Answer
from tests.fast.log_files import append, log, until

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
    everything = [item.data async for item in store.search("no such text", 0)]
    assert everything[-1]["hits"] == 1, "a search waits for the index, and tells of the gap"
    listed = (await store.window(0, 0, "stdout", 0, 3)).data
    first, start = listed["first_line"], listed["rows"][1]["offset"]
    assert 0 < start == text.index(b"line")
    assert not text[:start].strip(b"\0")
    kept = [line.rstrip(b"\n") for line in LINES][len(LINES) - text[start:].count(b"\n") :]
    lost = b"\xe2\x80\xa6 %.1f MB were dropped here: log_bound" % (start / 1e6)
    total = listed["total_lines"]
    assert total == first + 1 + len(kept)
    # Windows, from the front and the end.
    assert [row["line"] for row in listed["rows"]] == [first, first + 1, first + 2]
    assert (await store.window(0, 0, "stdout", 0, 3)).body.split(b"\n") == [lost, *kept[:2]]
    assert (await store.window(0, 0, "stdout", -2, 2)).body.split(b"\n") == kept[-2:]
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
    items = [item async for item in store.search(f"line {number:07}", 0, level="info")]
    assert [text for item in items if item.body for text in item.body.split(b"\n")] == [lost, kept[5]]
    assert [row["line"] for item in items for row in item.data["rows"]] == [first, first + 6]
    assert items[-1].data["searched_bytes"] == len(text) - start
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
        await store.window(0, 0, "stdout", -1, 1)
        await asyncio.sleep(0.03)

    async def is_within() -> bool:
        return on_disk(path) <= BOUND + OF_THE_FILE_SYSTEM

    await until(is_within)
    assert path.stat().st_size == sum(map(len, LINES)), "offsets stay as they were"
    assert on_disk(path) > BOUND // 2
    await check_readers(store, path)
    listed = (await store.window(0, 0, "stdout", 0, 1)).data
    assert listed["total_lines"] == len(LINES), "lines keep their numbers"
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


def test_nothing_is_dropped_where_the_file_system_cannot(
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
            await store.window(0, 0, "stdout", -1, 1)
        assert (await store.window(0, 0, "stdout", 0, 1)).body + b"\n" == LINES[0]
        await store.end()
        await store.stop()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert len(caplog.records) == 1
    assert "nothing is dropped" in caplog.text


def test_a_file_of_the_users_is_followed_and_never_cut(tmp_path: Path) -> None:
    theirs, out = tmp_path / "nccl.n1.77", log(tmp_path)
    log(tmp_path, stream="nccl").symlink_to(theirs)

    async def run() -> None:
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

    asyncio.run(run())
    assert theirs.read_bytes() == b"".join(LINES[:30_000])
