"""Logs: the store over a job directory that workers write to, as the agent uses it.

In: files made here, some while the store follows. Out: the answers to the log requests.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from remote_agent.logs import index
from remote_agent.logs.index import Covered, LineIndex, Sidecar
from remote_agent.logs.nccl import read_map
from remote_agent.logs.progress import StepReader
from remote_agent.logs.search import PIECE
from remote_agent.text import levels
from remote_agent.text.levels import ERROR, INFO, NCCL, WARN, block_bits, level_of
from remote_agent.text.rows import RecordReader, stream_of
from remote_agent.wire import Problem
from tests.fast.cases import DATA
from tests.fast.log_files import TRACEBACK, append, log, opened, until


def test_arrival_times_outlive_the_agent(tmp_path: Path) -> None:
    """A later reader finds the times in the sidecar; without it, the file's mtime as an upper bound."""

    async def write() -> list[int]:
        async with opened(tmp_path, live=True) as store:
            for number in range(3):
                append(log(tmp_path), b"line %d\n" % number)
                await store.read(0, 0, "stdout", 0, 1)
                await asyncio.sleep(0.03)
            answer = await store.merged(0, count=3)
            await store.end()
        return [row["t_ns"] for row in answer.data["rows"]]

    async def read() -> list[dict[str, Any]]:
        async with opened(tmp_path, live=False) as store:
            answer = await store.merged(0, count=3)
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
        assert all(
            row["t_ns"] == wanted or row["t_ns"] >= log(tmp_path).stat().st_mtime_ns
            for row, wanted in zip(rows, times, strict=True)
        )
        assert sidecar.read_bytes() == damaged, "a reader changes nothing"
    sidecar.unlink()
    rows = asyncio.run(read())
    assert all(row["t_ns"] >= log(tmp_path).stat().st_mtime_ns for row in rows)


@pytest.mark.parametrize("live", [True, False])
async def test_all_generations_are_all_whatever_the_newest_one_is(tmp_path: Path, live: bool) -> None:
    """A reader says which generation is the newest in case that none is named."""
    for generation in range(3):
        append(log(tmp_path, generation=generation), b"of %d\n" % generation)
    async with opened(tmp_path, live=live) as store:
        rows = [item.body async for item in store.rows("all", first=2, past=True)]
        pieces = [item.body async for item in store.follow("all", start="begin", first=2, past=True)]
        newest = [item.body async for item in store.rows(first=2, past=True)]
    assert b"\n".join(filter(None, rows)).split() == b"of 0 of 1 of 2".split()
    assert sorted(filter(None, pieces)) == [b"of 0\n", b"of 1\n", b"of 2\n"]
    assert b"".join(newest).strip() == b"of 2"


async def test_however_often_a_job_restarts_no_more_files_are_open(tmp_path: Path) -> None:
    async with opened(tmp_path, live=True) as store:
        counts = []
        for generation in range(200):
            append(log(tmp_path, generation=generation), b"step 1\n")
            await store.read(generation, 0, "stdout", 0, 1)
            await store.finish(generation)
            counts.append(len(os.listdir("/proc/self/fd")))
        assert max(counts) <= counts[0] + 1
        answer = await store.merged(0, count=1)
        assert answer.body == b"step 1", "an old log can still be read"
    async with opened(tmp_path, live=True) as store:
        # So it is for an agent that finds these logs.
        await until(lambda: _few_are_open(counts[0]))


async def _few_are_open(count: int) -> bool:
    return len(os.listdir("/proc/self/fd")) <= count + 1


async def test_a_traceback_is_never_torn(tmp_path: Path) -> None:
    """Its lines come one by one between the other rank's lines, and stay together."""
    async with opened(tmp_path, live=True) as store:
        for number, line in enumerate(TRACEBACK.splitlines(keepends=True)):
            append(log(tmp_path, 0, "stderr"), line)
            await store.read(0, 0, "stderr", 0, 1)
            await asyncio.sleep(0.012)
            append(log(tmp_path, 1, "stderr"), b"step %d\n" % number)
            await store.read(0, 1, "stderr", 0, 1)
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


async def test_read_gives_the_very_bytes(tmp_path: Path) -> None:
    data = os.urandom(100_000)
    append(log(tmp_path), data)
    async with opened(tmp_path, live=False) as store:
        answer = await store.read(0, 0, "stdout", 10, 20)
        assert (answer.body, answer.data) == (data[10:30], {"offset": 10, "size": 100_000, "eof": False})
        answer = await store.read(0, 0, "stdout", 99_990, 2**30)
        assert (answer.body, answer.data["eof"]) == (data[99_990:], True)
        with pytest.raises(Problem, match="no stderr of rank 0"):
            await store.read(0, 0, "stderr", 0, 1)
        with pytest.raises(Problem, match="must not be negative"):
            await store.read(0, 0, "stdout", -1, 1)


async def test_nonsense_is_refused_with_a_reason(tmp_path: Path) -> None:
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


# Logs: search over the files of a node, in lines of any length, coloured or written over, at any pattern's price.


SLOW = [
    r"a*a*a*a*\d", r"(a+)+\d", r"(a|aa)+\d", r"(a+)\1*\1*\d", r"a{0,63}a{0,63}a{0,63}a{0,63}\d",
    "a?" * 28 + "a" * 28 + r"\d",
]  # fmt: skip


@pytest.mark.parametrize("pattern", ["[", "*", *SLOW])
async def test_a_pattern_that_cannot_be_run_ends_the_search_and_not_the_agent(tmp_path: Path, pattern: str) -> None:
    """A regular expression that takes exponential time is given up on the line that shows it."""
    append(log(tmp_path), b"step 1\n" + b"a" * 4000 + b"\n")
    async with opened(tmp_path, live=False) as store:
        begun = time.process_time()
        with pytest.raises(Problem) as refused:
            async for _ in store.rows(pattern=pattern, past=True):
                pass
        assert time.process_time() - begun < 10
        assert refused.value.kind == "pattern"
        assert pattern not in SLOW or "on line 2 of rank 0's stdout" in refused.value.message


LONG = 300_000


@pytest.mark.parametrize(
    ("line", "pattern", "is_hit"),
    [
        # Over the end of a piece.
        (b" " * (PIECE - 3) + b"needle".ljust(LONG), "needle", True),
        (b"x" * (PIECE - 2) + b"nee\x1b[1mdle" + b"x" * LONG, "needle", True),
        (b"x" * (PIECE - 2) + b"nee\x1b[1mdle" + b"x" * LONG, "NEEDLE|\\d", False),
        (b"x" * PIECE + b"y" * LONG, "x$", False),
        (b"x" * PIECE + b"y" * LONG, r"x\b", False),
        (b"x" * PIECE + b" " * LONG, r"x\b", True),
        (b"x" * LONG + b"yz", "yz$", True),
        (b"x" * LONG + b"yz", "^yz", False),
        (b"y" + b"x" * LONG, "yx*", True),
        (b"needle" + b" " * LONG + b"\rover\r", "needle", False),
        (b"over" + b" " * LONG + b"\rneedle\r", "^needle$", True),
    ],
)
async def test_all_of_a_long_line_is_searched(tmp_path: Path, line: bytes, pattern: str, is_hit: bool) -> None:
    append(log(tmp_path), b"first\n" + line + b"\nlast\n")
    async with opened(tmp_path, live=False) as store:
        found = [row async for item in store.rows(pattern=pattern, past=True) for row in item.data.get("rows", ())]
        assert [row["line"] for row in found] == [1] * is_hit


async def test_search_and_level_go_by_what_is_seen(tmp_path: Path) -> None:
    """Escape codes are neither in the way of a pattern nor of a level; the row keeps its colours."""
    coloured = b"\x1b[31mERROR\x1b[0m loss=\x1b[32m0.5\x1b[0m end"
    append(log(tmp_path), b"plain loss=0.5 end\n\n" * 3 + coloured + b"\nloss=0.7\rloss=0.6\r\n")
    async with opened(tmp_path, live=False) as store:
        for pattern, lines in [
            ("loss=0.5 end", [0, 2, 4, 6]),
            ("^ERROR|0.6$", [6, 7]),
            ("0m|0.7", []),
            (r"^\w+ l", [0, 2, 4, 6]),
        ]:
            found = [row async for item in store.rows(pattern=pattern, past=True) for row in item.data["rows"]]
            assert [row["line"] for row in found] == lines, pattern
        (item, _) = [item async for item in store.rows(level="error", past=True)]
        assert ([row["line"] for row in item.data["rows"]], item.body) == ([6], coloured)


# Logs: the parts that the store is made of, each alone.


@pytest.mark.parametrize("said", (DATA / "levels.txt").read_text().splitlines()[1:])
def test_a_line_and_its_block_have_a_level(said: str) -> None:
    name, _, text = said.partition(" ")
    line, level = text.encode(), getattr(levels, name)
    bits = block_bits(b"fine\n" * 9 + line + b"\n")
    if level == NCCL:
        assert (stream_of("stdout", line), stream_of("stdout", b"said " + line)) == ("nccl", "stdout")
    else:
        assert level_of(line) == level
    assert bits & level or level not in (NCCL, levels.WARN, levels.ERROR)


def test_words_about_nccl_are_none_of_its_lines() -> None:
    assert stream_of("stderr", b"[rank0]: NCCL error in: ProcessGroupNCCL.cpp:77, NCCL version 2.26.2") == "stderr"


def test_a_quiet_block_has_no_levels() -> None:
    assert block_bits(b"step 3 loss 2.1\n" * 100) == INFO
    assert block_bits(b"INFO | error rate 0.1, fatally exceptional, no warnings: torch/data\n") == INFO | WARN | ERROR
    assert block_bits(b"error rate 0.1, fatally exceptional, no warnings: torch/data\n") == INFO


def test_records_hold_tracebacks_together() -> None:
    text = b"""\
epoch 1
Traceback (most recent call last):
  File "a.py", line 1, in f
    x
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in f
    ~~~~^^^
my.own.Failure: at last
epoch 2
[rank1]: Traceback (most recent call last):
[rank1]:   File "b.py", line 1, in g
[rank1]: ValueError: no
Step: 4"""
    reader = RecordReader()
    heads = [line for line in text.split(b"\n") if not reader.continues(line)]
    first = b"Traceback (most recent call last):"
    assert heads == [b"epoch 1", first, b"epoch 2", b"[rank1]: " + first, b"Step: 4"]


@pytest.mark.parametrize(
    "text",
    [
        "loss: information follows\nstep 118 of 200 loss 0.5\nstep 119 of 200 loss 0.4\nstep 120 of 200 loss inf\n",
        "step 9/200 loss=0.5\nstep 10/200 loss=0.4\nstep 100/200 loss=nan\n",
        "\r 50%|███  | 50/100 [00:05<00:05,  9.9it/s]\r 51%|███1 | 51/100 [00:05<00:05,  9.9it/s]\nnanobots: 3\n",
    ],
)
def test_progress_does_not_depend_on_where_a_read_ends(text: str) -> None:
    data = text.encode()

    def read(*pieces: bytes) -> tuple[object, ...]:
        reader = StepReader()
        for piece in pieces:
            reader.feed("stdout", piece, 1)
        return reader.step, reader.total, reader.warning

    whole = read(data)
    found = {cut: read(data[:cut], data[cut:]) for cut in range(len(data))}
    assert {cut: one for cut, one in found.items() if one != whole} == {}


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([b"one\ntwo\n"], "two"),
        ([b"one\n\n", b"  \n"], "one"),
        ([b"one\ntw", b"o\nthr"], "two"),
        ([b"\r 10%|#  |\r 20%|## |\r"], "20%|## |"),
        ([b"x" * 5000 + b"\n"], "x" * 200),
        ([b"half a line"], None),
    ],
)
def test_the_last_whole_line_of_a_rank_is_known(pieces: list[bytes], said: str | None) -> None:
    reader = StepReader()
    for piece in pieces:
        reader.feed("stdout", piece, 5)
        reader.feed("nccl", b"NCCL INFO of its own\n", 5)
    assert reader.said == said


def seen(pieces: Iterable[bytes], stream: str = "stdout") -> dict[str, Any]:
    """What is read of a text that comes in these pieces."""
    reader = StepReader()
    for piece in pieces:
        reader.feed(stream, piece, 5)
        reader.figures.values()
    own = {"step": reader.step, "saved": reader.saved, "total": reader.total, "warning": reader.warning}
    return {**reader.figures.values(), **own}


PRINTED = [line.split(" <- ") for line in (DATA / "printed.txt").read_text().splitlines()]
PRINTED += [
    ['{"step": 2}', repr(b"step 1\nstep 2\nnoise " + b"x" * 9000 + b"\nnoise\n")],
    ['{"warning": "loss is nan"}', repr(b"loss nan\n" + b"[info] x\n" * 200)],
]


@pytest.mark.parametrize(("wanted", "text"), PRINTED)
def test_progress_is_read_from_what_scripts_print_however_it_comes(wanted: str, text: str) -> None:
    expected, printed = json.loads(wanted), ast.literal_eval(text)
    lines = printed.splitlines(keepends=True)
    whole = seen(lines if "total" in expected else [printed])
    assert {key: whole[key] for key in expected} == expected
    size = 7 if "warning" in expected else 1
    pieces = seen(lines if "total" in expected else [printed[at : at + size] for at in range(0, len(printed), size)])
    # Of which step may be known only later.
    warned = [(found.pop("warning", None) or "").partition(",")[0] for found in (pieces, expected)]
    assert "warning" not in wanted or warned[0] == warned[1]
    assert {key: pieces[key] for key in expected} == expected


def test_output_of_nccl_is_no_loss() -> None:
    assert seen([b"step 120 loss=nan\n"], "nccl")["warning"] is None


def test_a_number_that_has_not_wholly_come_is_not_read() -> None:
    steps = StepReader()
    steps.feed("stdout", b"step 119\nstep 12", 1)
    assert steps.step == 119
    steps.feed("stdout", b"0\n", 2)
    assert steps.step == 120


def test_a_better_source_of_progress_is_kept() -> None:
    steps = StepReader()
    steps.feed("stdout", b"epoch 1\n", 1)
    steps.feed("stderr", b"  5%|#  | 50/1000 [00:01<\r", 2)
    assert steps.step == 50
    steps.feed("stdout", b"step 51\n", 3)
    steps.feed("stderr", b"  6%|#  | 60/1000 [00:01<\r", 4)
    steps.feed("stdout", b"epoch 2\n", 5)
    assert steps.step == 51


def test_a_flood_does_not_hide_its_end_and_a_coloured_step_counts() -> None:
    reader = StepReader()
    reader.feed("stdout", b"loss=9 \n" + b"x" * 100_000 + b"\n\x1b[31mstep: 10  \x1b[32mloss: 7.5\n", 1)
    assert (reader.step, reader.figures.values()["loss"]) == (10, 7.5)


def test_losses_are_reported_with_their_steps_once_and_of_many_the_roundest() -> None:
    reader = StepReader()
    lines = [b"step %d loss %d.5\n" % (step, step) for step in range(90, 121)]
    reader.feed("stdout", b"".join(lines) + b"step 120 loss 7.0\nstep 121 loss nan\nstep 122 loss 1,2", 1)
    # Who looks at the status takes nothing away.
    reader.figures.values()
    assert sorted(reader.figures.take_losses()) == [(96, "96.5"), (104, "104.5"), (112, "112.5"), (120, "120.5")]
    reader.feed("stdout", b"00.25 val loss 3\n\x1b[31mstep: 123\x1b[0m 5 s\n loss 4\r", 2)
    assert reader.figures.take_losses() == [(122, "1200.25")]
    # Of a step whose beginning is not here nobody knows the first loss.
    reader.feed("stdout", b"x" * 4000 + b"\nstep 200 loss 1.0\nstep 201 loss 2.0\n", 3)
    assert reader.figures.take_losses() == [(201, "2.0")]
    assert reader.figures.take_losses() == []


@pytest.mark.parametrize(
    "line",
    ["[eval] step 5 loss 0.5", "Validation: step=5, loss=0.5", "evaluating step 5: loss 0.5", "step 5 val loss 1"],
)
def test_losses_of_an_evaluation_are_each_ranks_own_and_not_compared(line: str) -> None:
    reader = StepReader()
    reader.feed("stdout", f"step 4 loss 2.5 eval_s 3 val_loss 2.0\n{line}\nstep 6 loss 2.25\n".encode(), 1)
    assert sorted(reader.figures.take_losses()) == [(4, "2.5"), (6, "2.25")]


def test_steps_a_second_are_those_of_late() -> None:
    reader = StepReader()
    assert reader.figures.values()["steps_s"] is None
    for number in range(100):
        reader.feed("stdout", b"step %d\n" % number, number * 10**9)
    assert reader.figures.values()["steps_s"] == 1.0
    for number in range(100, 140):
        reader.feed("stdout", b"step %d\n" % number, number * 2 * 10**9)
    assert reader.figures.values()["steps_s"] == 0.5
    reader.feed("stdout", b"step 7\n", 400 * 10**9)
    assert reader.figures.values()["steps_s"] is None


def test_thinning_keeps_lines_and_bounds() -> None:
    """A file that is written a line at a time for long keeps a bounded index, and every line is still found."""
    count = 4000
    with mock.patch.object(index, "ENTRIES_LIMIT", 256):
        made = LineIndex()
        for number in range(count):
            made.feed(b"line %d\n" % number, number * 10**9)
    assert len(made) <= 256
    blocks = [made.block(number) for number in range(len(made))]
    assert sum(block.lines for block in blocks) == count
    assert all(block.lines <= index.LINES_PER_BLOCK for block in blocks)
    assert blocks[-1].t_ns == (count - 1) * 10**9
    for line in (0, 1, 999, 3999):
        block = made.block(made.blocks_of(line))
        assert block.line <= line < block.line + block.lines


def test_a_sidecar_gives_back_what_was_written_up_to_the_first_damage(tmp_path: Path) -> None:
    made = LineIndex()
    made.feed(b"x\n" * 2000, 5)
    entries = made.fresh
    path = tmp_path / "stdout.idx"
    writer = Sidecar(path, writable=True)
    writer.reset()
    writer.append(entries[:3])
    writer.append(entries[3:], Covered(4000, 9))
    assert list(Sidecar(path, writable=False).load()) == [*entries, Covered(4000, 9)]
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        good = list(Sidecar(path, writable=False).load())
        assert good == [*entries, Covered(4000, 9)][: max(0, place // 32 - 1)]
    path.write_bytes(whole[:-1])
    again = Sidecar(path, writable=True)
    assert list(again.load()) == entries
    again.append([], Covered(4000, 9))
    assert path.read_bytes() == whole


def test_nccl_output_is_read_again_only_when_there_is_more(tmp_path: Path) -> None:
    assert read_map(tmp_path) == {"generation": -1, "stamp": ""}
    folder = tmp_path / "generation_10" / "rank_3"
    for generation in (9, 10):
        folder = tmp_path / f"generation_{generation}" / "rank_3"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_bytes(b"h:1:2 [0] NCCL INFO Using network G%d\n" % generation)
    reported = read_map(tmp_path)
    assert (reported["generation"], reported["groups"]) == (
        10,
        [{"ranks": [3], "facts": {"network": "G10", "env": {}}}],
    )
    assert read_map(tmp_path, reported["stamp"]) == {"generation": 10, "stamp": reported["stamp"]}
    (folder / "nccl.log").write_bytes(b"h:1:2 [0] NCCL WARN no \xff way\n")
    assert read_map(tmp_path, reported["stamp"])["warnings"] == [[3, "no \ufffd way", 1]]
