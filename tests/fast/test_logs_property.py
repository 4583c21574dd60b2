"""Logs: for any split of any bytes into writes, all readers agree with a naive reading of the whole file.

In: bytes, places to cut them. Out: index, windows, search, follow, merged rows against the naive answer.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from remote_agent.logs import LogStore, index, logfile, merge, selection
from remote_agent.logs.catalogue import Catalogue
from remote_agent.logs.logfile import LogFile
from remote_agent.logs.records import Backwards
from remote_agent.text import patterns
from remote_agent.text.levels import ESCAPES, level_of, minimum_level
from remote_agent.text.rows import RecordReader, stream_of
from remote_agent.wire.answers import LogKey
from remote_agent.wire.documents import STREAMS
from tests.examples import examples

CLIP = 64 * 1024

PIECES = st.one_of(
    st.binary(max_size=12),
    st.sampled_from(
        [
            b"\n", b"\n\n", b"\r\n", b"\r", b"\0", b"\xff\xfe", b"\x1b[31mred\x1b[0m", b" 10%|#  | 1/10 [\r 20%|##",
            b"nee\x1b[1mdle \x1b]0;title\x071\x1b[0m", b"\x1b[31mERROR\x1b[0m needle\n",
            b"step=1 needle\n", b"Traceback (most recent call last):\n  File \"x.py\", line 1, in f\nValueError: no\n",
            b"x" * 70_000, b"y" * 66_000 + b"\rneedle", b"WARNING needle\n",
        ]
    ),
    st.integers(1, 400).map(lambda n: b"needle %d\n" % n * n),
    st.integers(1, 400).map(lambda n: b"n1:7:9 [0] NCCL INFO needle %d\n" % n * n),
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=12).map(b"".join)
PATTERNS = st.sampled_from(["needle", "NEEDLE 1", "needle|Value", r"\d+7", "^n", "[xy]$", "e.*3", "[^x]9", ""])
SOME = st.sampled_from([STREAMS, ("stdout", "stderr"), ("nccl",)])
CUTS = st.lists(st.floats(0, 1), max_size=6)


def split(data: bytes, cuts: list[float]) -> list[bytes]:
    places = [0, *sorted(int(cut * len(data)) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(places)]


def naive_lines(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    return lines[:-1] if not lines[-1] else lines


def naive_text(line: bytes) -> bytes:
    shown = line.rstrip(b"\r") if len(line) <= CLIP else line[-CLIP:].rstrip(b"\r")
    if b"\r" in shown:
        return shown.rsplit(b"\r", 1)[1]
    return shown if len(line) <= CLIP else line[:CLIP]


def naive_seen(line: bytes) -> bytes:
    return ESCAPES.sub(b"", line.rstrip(b"\r").rsplit(b"\r", 1)[-1])


class Job:
    """A job directory with one log, written in pieces."""

    def __init__(self, folder: str) -> None:
        self.root = Path(folder)
        self.path = self.root / "generation_0" / "rank_0" / "stdout.log"
        self.path.parent.mkdir(parents=True)
        self.path.touch()

    def append(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)

    def indexed(self, pieces: list[bytes], gap_ns: int) -> LogFile:
        """Write piece by piece, indexing after each one."""
        catalogue = Catalogue(self.root, writable=True)
        catalogue.scan(0)
        file = catalogue.files[LogKey(0, 0, "stdout")]
        for number, piece in enumerate(pieces):
            self.append(piece)
            while file.absorb(10**18 + number * gap_ns):
                pass
        return file


@examples(150)
@given(TEXTS, CUTS, st.sampled_from([1, 10**8]), st.sampled_from([200, 256 * 1024]))
def test_index_and_rows_agree_with_the_whole_file(data: bytes, cuts: list[float], gap_ns: int, block: int) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(index, "BYTES_PER_BLOCK", block),
        mock.patch.object(logfile, "BYTES_PER_BLOCK", block),
    ):
        file = Job(folder).indexed(split(data, cuts), gap_ns)
        blocks = [file.index.block(number) for number in range(len(file.index))]
        rows = [row for each in blocks for row in file.rows_of(each)]
        lines = naive_lines(data)
        assert file.index.total_lines == len(lines)
        assert [data[row.offset : row.end] for row in rows] == lines
        assert [row.text for row in rows] == [naive_text(line) for line in lines]
        assert [row.line for row in rows] == list(range(len(lines)))
        assert all(each.lines <= index.LINES_PER_BLOCK for each in blocks)
        assert all(row.level <= each.bits for each in blocks for row in file.rows_of(each))
        times = [row.t_ns for row in rows]
        assert times == sorted(set(times)), "arrival times order the lines"
        for each in (*times[::7], *times[-1:]):
            assert file.index.lines_before(each) == times.index(each)


@examples(60)
@given(TEXTS, CUTS, st.integers(0, 300), st.integers(1, 300))
def test_rows_from_a_line_on_agree_with_the_whole_file(data: bytes, cuts: list[float], line: int, count: int) -> None:
    async def check(job: Job) -> None:
        store = LogStore(job.root, live=True)
        await store.start()
        try:
            for piece in split(data, cuts):
                job.append(piece)
                await store.read(0, 0, "stdout", 0, 1)
            lines = [naive_text(each) for each in naive_lines(data)]
            assert (await store.merged(0)).data["lines"] == len(lines)
            after = [[0, 0, "stdout", line]]
            rows = store.rows(0, streams=STREAMS, after=after, pattern="", past=True, count=count)
            found = [item async for item in rows if item.data["rows"]]
            # From a place behind its end, a file is read from its beginning.
            first = line if line <= len(lines) else 0
            wanted = lines[first : first + count]
            assert [row["line"] for item in found for row in item.data["rows"]] == [*range(first, first + len(wanted))]
            assert [text for item in found for text in item.body.split(b"\n")] == wanted
        finally:
            await store.stop()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(check(Job(folder)))


@examples(60)
@given(
    TEXTS,
    CUTS,
    st.sampled_from(["needle", "NEEDLE 1", "needle|Value", r"\d+7", "^n", "[xy]$", r"\Bx\b", "e[^xy]*3", "xn", ""]),
    st.booleans(),
    SOME,
    st.sampled_from([None, "warn", "error"]),
)
def test_search_agrees_with_the_whole_file(
    data: bytes, cuts: list[float], pattern: str, ignore_case: bool, streams: tuple[str, ...], level: str | None
) -> None:
    async def check(job: Job) -> None:
        job.indexed(split(data, cuts), 1)
        store = LogStore(job.root, live=False)
        await store.start()
        found: list[tuple[int, bytes]] = []
        apart = 0
        how: dict[str, Any] = {"pattern": pattern, "ignore_case": ignore_case, "level": level, "past": True}
        async for item in store.rows(0, streams=streams, **how):
            texts = item.body.split(b"\n") if item.data["rows"] else []
            found += [(row["line"], text) for row, text in zip(item.data["rows"], texts, strict=True)]
            apart += item.data["apart"]
        regex = re.compile(pattern.encode(), re.I if ignore_case else 0)
        matching = [
            (number, naive_text(line))
            for number, line in enumerate(naive_lines(data))
            if regex.search(naive_seen(line)) and level_of(naive_text(line)) >= minimum_level(level)
        ]
        wanted = [each for each in matching if stream_of("stdout", each[1]) in streams]
        # Compared without their texts, whose difference would be long.
        assert [number for number, _ in found] == [number for number, _ in wanted]
        assert all(mine[1] == naive[1] for mine, naive in zip(found, wanted, strict=True))
        assert "nccl" in streams or apart == len(matching) - len(found)
        await store.stop()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(check(Job(folder)))


@examples(60)
@given(TEXTS, CUTS, st.integers(0, 6))
def test_follow_gives_every_byte_once(data: bytes, cuts: list[float], late: int) -> None:
    """A reader that starts at any point gets each byte once, in pieces that follow each other."""

    async def check(job: Job) -> None:
        store = LogStore(job.root, live=True)
        await store.start()
        pieces = split(data, cuts)
        got = bytearray()

        async def read() -> None:
            async for item in store.follow("all", start="begin"):
                assert item.data["offset"] == len(got)
                assert len(item.body) <= 64 * 1024
                got.extend(item.body)

        reader: asyncio.Task[None] | None = None
        for number, piece in enumerate(pieces):
            if number == late:
                reader = asyncio.ensure_future(read())
            job.append(piece)
            await asyncio.sleep(0)
        reader = reader or asyncio.ensure_future(read())
        await store.end()
        await asyncio.wait_for(reader, 20)
        await store.stop()
        assert bytes(got) == data

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(check(Job(folder)))


INDENTED = st.sampled_from([1, 600, 1100, 1700]).map(lambda n: b"head\n" + b"  more\n" * n)


@examples(40)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.one_of(TEXTS, INDENTED)), max_size=5),
    st.integers(20, 200),
    st.booleans(),
    st.sampled_from([10**8, 10**10]),
    SOME,
)
def test_pages_of_merged_rows_hold_every_line_once(
    writes: list[tuple[int, bytes]], count: int, forwards: bool, gap_ns: int, streams: tuple[str, ...]
) -> None:
    """Going back or forth page by page gives each line of each rank once, and each rank's lines in order."""

    async def check(root: Path) -> None:
        catalogue = Catalogue(root, writable=True)
        for rank in range(3):
            folder = root / "generation_0" / f"rank_{rank}"
            folder.mkdir(parents=True)
            (folder / "stdout.log").touch()
        catalogue.scan(0)
        whole = [b"", b"", b""]
        for number, (rank, data) in enumerate(writes):
            file = catalogue.files[LogKey(0, rank, "stdout")]
            with file.path.open("ab") as out:
                out.write(data)
            whole[rank] += data
            while file.absorb(10**18 + number * gap_ns):
                pass
        for file in catalogue.files.values():
            file.persist(is_complete=True)
        store = LogStore(root, live=False)
        await store.start()
        seen: list[list[int]] = [[], [], []]
        before, after = (None, 0) if forwards else (None, None)
        more, apart = True, 0
        while more:
            answer = await store.merged(0, None, streams, before, count, after_ns=after)
            rows, more = answer.data["rows"], answer.data["more"]
            apart += answer.data["apart"]
            assert len(rows) >= count or not more
            assert [row["t_ns"] for row in rows] == sorted(row["t_ns"] for row in rows)
            for rank in range(3):
                lines = [row["line"] for row in rows if row["rank"] == rank]
                seen[rank] = seen[rank] + lines if forwards else lines + seen[rank]
            if rows:
                before, after = (None, rows[-1]["t_ns"] + 1) if forwards else (rows[0]["t_ns"], None)
        lines_of = [enumerate(map(naive_text, naive_lines(data))) for data in whole]
        assert seen == [[at for at, text in lines if stream_of("stdout", text) in streams] for lines in lines_of]
        assert "nccl" in streams or apart + sum(map(len, seen)) == sum(len(naive_lines(data)) for data in whole)
        await store.stop()

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(check(Path(name)))


def naive_filter(
    records: list[list[tuple[int, bytes]]], include: list[str], exclude: list[str], level: str | None
) -> list[list[tuple[int, bytes]]]:
    """Records of which a line matches an include, none an exclude, and one has the level."""

    def found(patterns: list[str], record: list[tuple[int, bytes]]) -> bool:
        texts = [re.sub(rb"\x1b\[[\d;]*m", b"", text) for _, text in record]
        flags = [re.I if pattern == pattern.lower() else 0 for pattern in patterns]
        return any(re.search(p.encode(), text, f) for p, f in zip(patterns, flags, strict=True) for text in texts)

    lowest = minimum_level(level)
    kept = [record for record in records if max(level_of(text) for _, text in record) >= lowest]
    return [r for r in kept if (not include or found(include, r)) and not found(exclude, r)]


TRACEBACK = b'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: needle\n'
CHAINED = b"\nDuring handling of the above exception, another exception occurred:\n"
FEW = st.sampled_from(
    [
        b"needle 1\n", b"needle 17\n", b"WARNING needle\n", b"x" * 300 + b"9", b"\n", b"\x1b[31mnee\x1b[0mdle 1\n",
        b"step\n" * 30, b"head\n" + b"  more\n" * 25, b"n1:7:9 [0] NCCL INFO needle\n", b" 10%|#  | 1/10 [\r 20%|##",
        TRACEBACK, CHAINED, b"\n" * 5, b"KeyError: 1\n",
    ]
)  # fmt: skip


@examples(200)
@given(st.lists(FEW, max_size=12).map(b"".join), st.integers(0, 60))
def test_records_end_alike_wherever_reading_begins(data: bytes, begin: int) -> None:
    lines = data.split(b"\n")
    whole, part = RecordReader(), RecordReader()
    for number, line in enumerate(lines):
        continues = whole.continues(line)
        if number >= begin:
            was_sure, answer = part.is_sure, part.continues(line)
            assert answer == continues or not was_sure


@examples(40)
@example([b"needle 1\n" * 4 + TRACEBACK, b"needle 1\n" * 4 + TRACEBACK * 2, b"\n"], [], [r"^\d*$"], None, 1, 10**6, 1.0)
@given(
    st.lists(st.lists(FEW, max_size=6).map(b"".join), max_size=4),
    st.lists(PATTERNS, max_size=2),
    st.lists(st.sampled_from(["needle 1", "WARN", "head", r"^\d*$"]), max_size=2),
    st.sampled_from([None, "warn", "error"]),
    st.integers(1, 50),
    st.sampled_from([10**6, 10**8, 10**10]),
    st.sampled_from([0.0, 1.0]),
)
def test_a_filter_keeps_what_a_naive_one_keeps(
    writes: list[bytes],
    include: list[str],
    exclude: list[str],
    level: str | None,
    count: int,
    gap_ns: int,
    look_s: float,
) -> None:
    """Back, forth and by a search, page by page, also where each answer has no time for more than one step."""

    async def read(store: LogStore, *, forwards: bool) -> list[list[tuple[int, bytes]]]:
        records: dict[int, list[tuple[int, bytes]]] = {}
        before, after = (None, 0) if forwards else (None, None)
        more, edge = True, 0 if forwards else 2**62
        while more:
            answer = await store.merged(0, None, STREAMS, before, count, level, after, include, exclude)
            texts = answer.body.split(b"\n") if answer.data["rows"] else []
            page: dict[int, list[tuple[int, bytes]]] = {}
            for row, text in zip(answer.data["rows"], texts, strict=True):
                page.setdefault(row["t_ns"], []).append((row["line"], text))
            assert not {t_ns for t_ns in page if after is None or t_ns >= after} & records.keys(), "no record twice"
            records.update(page)
            more = answer.data["more"]
            since, until = answer.data["since_ns"], answer.data["until_ns"]
            assert not more or (until > edge if forwards else since < edge), "a step further"
            edge = until if forwards else since
            before, after = (None, edge) if forwards else (edge, None)
        return [records[t_ns] for t_ns in sorted(records)]

    async def check(job: Job) -> None:
        file = job.indexed(writes, gap_ns)
        file.persist(is_complete=True)
        store = LogStore(job.root, live=False)
        await store.start()
        every = Backwards(file, None, selection.Wanted())
        records: list[list[tuple[int, bytes]]] = []
        while (record := every.next()) is not None:
            records.insert(0, [(row.line, row.text) for row in record.rows])
        wanted = naive_filter(records, include, exclude, level)
        assert await read(store, forwards=True) == wanted
        assert await read(store, forwards=False) == wanted
        shown: selection.Shown = {"include": include, "exclude": exclude, "level": level}
        items = [item.data["rows"] async for item in store.rows(0, streams=STREAMS, pattern="", shown=shown, past=True)]
        assert [row["line"] for rows in items for row in rows] == [line for each in wanted for line, _ in each]
        await store.stop()

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(merge, "_LOOK_S", look_s),
        # The garbage collector runs for longer than a pattern may after many examples.
        mock.patch.object(patterns, "LINE_S", 10.0),
        mock.patch.object(index, "LINES_PER_BLOCK", 8),
    ):
        asyncio.run(check(Job(folder)))


@pytest.mark.parametrize("length", [0, 1, CLIP, CLIP + 1, 3 * CLIP])
def test_a_long_progress_bar_shows_its_last_state(length: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Job(folder).indexed([b"a" * length + b"\r" + b"99%|#########9| 99/100 [\r"], 1)
        (row,) = file.rows_of(file.index.block(0))
        assert row.text == b"99%|#########9| 99/100 ["
