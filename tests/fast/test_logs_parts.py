"""Logs: the parts that the store is made of, each alone.

In: lines, bytes, patterns. Out: levels, records, steps, index entries, sidecars.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
import zlib
from pathlib import Path
from unittest import mock

import pytest

from remote_agent.logs import index
from remote_agent.logs.index import Covered, IndexEntry, LineIndex, Sidecar
from remote_agent.logs.nccl import read_map
from remote_agent.logs.progress import StepReader
from remote_agent.logs.watch import Inotify
from remote_agent.text.levels import DEBUG, ERROR, INFO, NCCL, WARN, block_bits, level_of
from remote_agent.text.patterns import compile_pattern
from remote_agent.text.rows import RecordReader, stream_of

LEVELS = [
    (b"step 3 loss 2.1", INFO),
    (b"2026-11-20 10:00:00 | INFO | error rate 0.1", INFO),
    (b"DEBUG:root:x", DEBUG),
    (b"WARNING:root:careful", WARN),
    (b"/x/y.py:3: UserWarning: careful", WARN),
    (b"[rank0]:[W1120 10:00:00.123 ProcessGroupNCCL.cpp:1250] Warning: x", WARN),
    (b"W1120 10:00:00.123000 77 torch/distributed/run.py:774] x", WARN),
    (b"[E ProcessGroupNCCL.cpp:474] x", ERROR),
    (b"ValueError: bad", ERROR),
    (b"Traceback (most recent call last):", ERROR),
    (b"CRITICAL - out of luck", ERROR),
    (b"gcc: error: no such file", ERROR),
    (b"n1:77:99 [0] NCCL WARN socket", WARN),
    (b"n1:77:99 [0] NCCL INFO Connected", INFO),
    (b"", INFO),
]


@pytest.mark.parametrize(("line", "level"), LEVELS)
def test_levels_of_lines_and_their_blocks(line: bytes, level: int) -> None:
    assert level_of(line) == level
    if level in (WARN, ERROR):
        assert block_bits(b"fine\n" * 9 + line + b"\n") & level


@pytest.mark.parametrize(
    "line",
    [
        b"gpu-01.lan:4021:4077 [3] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
        b"[2026-11-20 10:00:00] gpu01:4021:4077 [-1] net_ib.cc:214 NCCL WARN NET/IB : got completion with error 12",
        b"gpu01:4021:4077 [0] /build/rccl/src/init.cpp:120 NCCL WARN Missing a setting",
        b"gpu01:4021:4077 [0] 12.034567 enqueue.cc:77 NCCL TRACE ncclLaunch",
        b"gpu01:4021:4077 NCCL CALL ncclGroupEnd()",
        b"NCCL version 2.26.2+cuda12.8",
        b"RCCL version : 2.20.5-HEAD:1a2b3c",
    ],
)
def test_a_line_of_nccl_is_known_by_its_shape(line: bytes) -> None:
    assert stream_of("stdout", line) == "nccl"
    assert block_bits(b"step 3\n" * 9 + line + b"\n") & NCCL
    assert stream_of("stdout", b"said " + line) == "stdout"
    assert stream_of("stderr", b"[rank0]: NCCL error in: ProcessGroupNCCL.cpp:77, NCCL version 2.26.2") == "stderr"


def test_an_index_of_an_older_agent_does_not_hide_lines_of_nccl(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path / "stdout.idx", writable=True)
    entry = IndexEntry(1, 9, 6, INFO, False)
    sidecar.append([entry])
    assert list(sidecar.load()) == [entry]
    whole = sidecar.path.read_bytes()
    # The flags are the last byte but two before the checksum.
    record = whole[-32:-7] + b"\0" + whole[-6:-4]
    sidecar.path.write_bytes(whole[:-32] + record + zlib.crc32(record).to_bytes(4, "little"))
    assert list(sidecar.load()) == [entry._replace(bits_before=INFO | NCCL)]


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
    ("text", "step"),
    [
        (b"step=120 loss=3\n", 120),
        (b"[rank 3] step 120: loss 3\n", 120),
        (b"Step: 120/500\n", 120),
        (b"global_step 7, lr 3\n", 7),
        (b"{'loss': 1.2, 'step': 44, 'epoch': 2}\n", 44),
        (b"iter 12\n", 12),
        (b"iteration 12/ 100 | loss\n", 12),
        (b"Iter [12/100]\n", 12),
        (b" 12%|#2        | 120/1000 [00:10<01:00, 9.9it/s]\r", 120),
        (b"Epoch 3 | batch 10\n", 3),
        (b"step 1\nstep 2\nnoise " + b"x" * 9000 + b"\nnoise\n", 2),
        (b"epoch 3 step 9\nepoch 4\n", 9),
        (b"steps per second 33\nmax_step 9 timestep 4\n", None),
        (b"step time 0.3\n", None),
    ],
)
def test_steps_are_read_from_the_lines_in_use(text: bytes, step: int | None) -> None:
    whole = StepReader()
    whole.feed("stdout", text, 5)
    assert (whole.step, whole.last_output_ns) == (step, 5)
    bytewise = StepReader()
    for number in range(len(text)):
        bytewise.feed("stdout", text[number : number + 1], number)
    assert bytewise.step == step


@pytest.mark.parametrize(
    ("text", "saved"),
    [
        (b"step=120 loss=3\nsaved snapshot.pt: epochs_run=4 step=120\nstep=130\n", 120),
        (b"step=120\nEpoch 3 | Training snapshot saved at snapshot.pt\nstep=121\n", 120),
        (b"step=7\nstep=8\nsaving checkpoint to out\n", 8),
        (b" 50%|### | 500/1000 [00:10<00:10]\nSaving model checkpoint to out/checkpoint-500\nstep_time 3\n", 500),
        (b"resumed from snapshot.pt: epochs_run=2 step=40\nstep=41\n", 40),
        (b"Resuming training from snapshot at Epoch 3\nstep 31\n", None),
        (b"step 9\nresumed from snapshot.pt\n", None),
        (b"step 9\nsaved snapshot.pt step=9\nstep 12\ncheckpoint was not saved: disk full\n", 9),
        (b"step 9\nsaved 3 files\nit resumed\n", None),
        (b"step 9\nsaved snapshot.pt", None),
        (b"saved snapshot.pt\n", None),
    ],
)
def test_the_step_of_the_last_snapshot_is_the_printed_one(text: bytes, saved: int | None) -> None:
    whole, bytewise = StepReader(), StepReader()
    whole.feed("stdout", text, 5)
    for number in range(len(text)):
        bytewise.feed("stdout", text[number : number + 1], number)
    assert (whole.saved, bytewise.saved) == (saved, saved)


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (b"step 120 loss=nan\n", "loss is nan, about step 120"),
        (b"{'loss': nan, 'grad_norm': nan}\n", "loss is nan"),
        (b"lm loss: NaN |\n", "loss is nan"),
        (b"val/loss_ce: -inf\nstep 3\n", "val/loss_ce is -inf, about step 3"),
        (b"Loss is tensor(nan, device='cuda:0')\n", "Loss is nan"),
        (b"loss nan\n" + b"[info] x\n" * 200, "loss is nan"),
        (b"best_loss=inf min_val_loss: inf loss_scale inf glossinfo\n", None),
        (b"Validation loss decreased (inf --> 0.69)\n", None),
        (b"loss 0.3 info nancy\nloss: info\ngrad_norm inf\nno loss\nnan values: 0\n", None),
    ],
)
def test_a_loss_that_is_no_number_is_reported(text: bytes, warning: str | None) -> None:
    steps = StepReader()
    for at in range(0, len(text), 7):
        steps.feed("stdout", text[at : at + 7], 1)
    whole = StepReader()
    whole.feed("stderr", text, 1)
    assert whole.warning == warning
    assert (steps.warning or "").partition(",")[0] == (warning or "").partition(",")[0]
    whole = StepReader()
    whole.feed("nccl", text, 1)
    assert whole.warning is None


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


@pytest.mark.parametrize(
    ("text", "loss", "rate"),
    [
        (b"step=120 loss=1.8831 lr=3.0e-04 tok/s=96,021 mem=71\n", 1.8831, (96021, "tok/s")),
        (b"\x1b[31mstep: 10  \x1b[32mloss:  7.0187  \x1b[34mtps: 7,203  \x1b[36mmfu: 14.4%\n", 7.0187, (7203, "tok/s")),
        (b"{'loss': 0.4512, 'grad_norm': 1.2}\n{'eval_loss': 9.0}\n", 0.4512, None),
        (b" 12%|#2  | 120/1000 [00:10<01:00, 9.9it/s, loss=0.33]\r", 0.33, (9.9, "it/s")),
        (b" iteration 12/ 100 | lm loss: 6.123E+00 | loss scale: 65536.0 |\n", 6.123, None),
        (b"step 250: train loss 2.31, val loss 2.44\n", 2.31, None),
        (b"loss: 2.3 aux_loss: 0.01 | 312.5 samples/sec | 2 steps/s\n", 2.3, (312.5, "samples/s")),
        (b"{'train_samples_per_second': 12.3, 'train_loss': 0.9}\n", 0.9, (12.3, "samples/s")),
        (b"loss: nan\n", "nan", None),
        (b"loss: 1.5", None, None),
        (b"classes 3 loss scale 4 1.9 ms/step\n", None, None),
    ],
)
def test_loss_and_throughput_as_scripts_print_them(text: bytes, loss: object, rate: object) -> None:
    whole, bytewise = StepReader(), StepReader()
    whole.feed("stdout", text, 5)
    for number in range(len(text)):
        bytewise.feed("stdout", text[number : number + 1], number)
        bytewise.figures.values()
    for values in (whole.figures.values(), bytewise.figures.values()):
        assert values["loss"] == loss
        assert (values["rate"], values["unit"]) == (rate or (None, None))


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


def test_a_flood_makes_one_event_a_look(tmp_path: Path) -> None:
    """Each costs the rank that writes, and us; none is missed between two looks."""
    watcher = Inotify()
    watcher.watch(tmp_path)

    async def look(number: int) -> None:
        # In turn, as ranks do: only equal neighbours would be one event anyway.
        for each in range(1000):
            with (tmp_path / f"{number}.{each % 2}.log").open("ab", buffering=0) as file:
                file.write(b"line\n")
        waiting = bytearray(4)
        fcntl.ioctl(watcher._fd, termios.FIONREAD, waiting)
        assert int.from_bytes(waiting, sys.byteorder) < 100
        assert await watcher.wait(10.0) == {tmp_path}

    async def run() -> None:
        for number in range(3):
            await look(number)
        assert await watcher.wait(0.0) == set()

    try:
        asyncio.run(run())
    finally:
        watcher.close()


def test_a_full_disk_costs_the_sidecar_only(tmp_path: Path) -> None:
    made = LineIndex()
    made.feed(b"x\n" * 2000, 5)
    writer = Sidecar(tmp_path / "gone" / "stdout.idx", writable=True)
    writer.reset()
    writer.append(made.fresh)
    writer.append(made.fresh)
    assert not list(Sidecar(tmp_path / "gone" / "stdout.idx", writable=False).load())


@pytest.mark.parametrize(
    ("pattern", "ignore_case", "choices"),
    [
        ("needle", False, {(b"needle",)}),
        ("NEEdle", True, {(b"needle",)}),
        (r"step=\d+ loss", False, {(b"step=",), (b" loss",)}),
        ("(?:cat|dog) food", False, {(b" food",), (b"cat", b"dog")}),
        ("a?b*", False, set()),
        ("(?i)needle", False, set()),
        ("größe", True, set()),
        (r"(?:x\d{2})+", False, {(b"x",)}),
    ],
)
def test_literals_that_a_match_must_hold(pattern: str, ignore_case: bool, choices: set[tuple[bytes, ...]]) -> None:
    assert set(compile_pattern(pattern, ignore_case).choices) == choices


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
