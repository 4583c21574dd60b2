"""The log as it is printed: whole lines of any length, every byte, and what is said of bytes that cannot be had."""

from __future__ import annotations

import asyncio
import io
import random
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_agent.text.rows import CLIP
from remote_agent.wire import Answer, CallFailed, ChannelClosed
from supervisor.cli import logs as printing
from supervisor.cli import whole_lines
from supervisor.cli.logs import parse_logs
from supervisor.cli.output import Writer
from supervisor.cli.whole_lines import LINE_LIMIT, LongLine, Piece, WholeLines, prefixed
from supervisor.logs.fold import Fold, Folder
from supervisor.logs.reader import Chunk
from supervisor.logs.rows import LogLine
from supervisor.logs.selection import StreamFilter
from supervisor.session import Session
from supervisor.wording.log_lines import lines_of
from tests.examples import examples


def chunk(
    data: bytes, rank: int = 0, *, offset: int = 0, generation: int = 0, stream: str = "stdout", node: str = "n1"
) -> Chunk:
    return Chunk(node, generation, rank, stream, offset, 0, data)


def printed(pieces: list[Piece]) -> bytes:
    return b"".join(prefixed(*piece) for piece in pieces if not isinstance(piece, LongLine))


def test_lines_carry_node_and_rank() -> None:
    assert printed(WholeLines().feed(chunk(b"a\n\nb\n", 3))) == b"n1:3| a\nn1:3| \nn1:3| b\n"


def test_the_last_words_of_a_generation_come_before_the_next_one() -> None:
    lines = WholeLines()
    lines.feed(chunk(b"dying"))
    assert printed(lines.feed(chunk(b"again\n", generation=1))) == b"n1:0| dying\nn1:0| again\n"


def test_lines_of_nccl_are_left_to_their_stream_and_that_is_said_once() -> None:
    text = b"step 1\nn1:7:9 [0] NCCL INFO a\n\nstep 2\nNCCL version 2.26.2\nhal"
    said: list[str] = []

    def shown(*streams: str) -> bytes:
        lines = WholeLines(StreamFilter(streams, lambda: said.append("apart")))
        return b"".join(map(printed, (lines.feed(chunk(text)), lines.feed(chunk(b"f\n")), lines.rest())))

    assert shown("stdout", "stderr") == b"n1:0| step 1\nn1:0| \nn1:0| step 2\nn1:0| half\n"
    assert said == ["apart"]
    assert shown("nccl") == b"n1:0| n1:7:9 [0] NCCL INFO a\nn1:0| NCCL version 2.26.2\n"
    assert shown("stdout", "stderr", "nccl").count(b"\n") == 6
    assert said == ["apart"]


def test_of_a_line_of_any_length_only_its_place_and_its_beginning_are_held() -> None:
    lines = WholeLines(StreamFilter(("stdout",), lambda: None))
    long = b"first " + b"x" * (3 * LINE_LIMIT) + b"\rlast"
    assert printed(lines.feed(chunk(b"one\n" + long[:9]))) == b"n1:0| one\n"
    for at in range(9, len(long), 60_000):
        assert lines.feed(chunk(long[at : at + 60_000], offset=4 + at)) == []
        assert printed(lines.feed(chunk(b"y\n", 1))) == b"n1:1| y\n"
    held = next(iter(lines._held.values()))
    assert isinstance(held, LongLine)
    assert len(held.head) < 200_000
    line, rest = lines.feed(chunk(b" words\ntwo\n", offset=4 + len(long)))
    assert isinstance(line, LongLine)
    row = line.row()
    assert (row.offset, row.text, row.cut) == (4, long[:65536], len(long) + 6 - 65536)
    assert printed([rest]) == b"n1:0| two\n"
    assert lines.rest() == []


def test_a_long_line_ends_with_its_group_and_one_whose_file_is_rewritten_is_reported() -> None:
    lines = WholeLines()
    for rank in (0, 1):
        lines.feed(chunk(b"x" * (LINE_LIMIT + 1), rank))
    anew = printed(lines.feed(chunk(b"new\n")))
    assert anew.endswith(b"x \xe2\x80\xa6 983041 bytes of this line could not be read\nn1:0| new\n")
    (line, _again) = lines.feed(chunk(b"again\n", generation=1))
    assert isinstance(line, LongLine)
    assert (line.whose, line.row().cut) == (("n1", 0, 1, "stdout"), LINE_LIMIT + 1 - CLIP)


def test_no_byte_is_lost_however_the_chunks_are_cut() -> None:
    rng = random.Random(7)
    texts = {rank: bytes(rng.choice(b"ab\n\r\x00\xff") for _ in range(3000)) + b"\n" for rank in range(4)}
    lines = WholeLines()
    out = b""
    left = dict(texts)
    while any(left.values()):
        rank = rng.choice([rank for rank, text in left.items() if text])
        size = rng.randrange(1, 200)
        out += printed(lines.feed(chunk(left[rank][:size], rank)))
        left[rank] = left[rank][size:]
    out += printed(lines.rest())
    for rank, text in texts.items():
        mine = b"".join(
            line.partition(b"| ")[2] + b"\n" for line in out.split(b"\n") if line.startswith(b"n1:%d| " % rank)
        )
        assert mine == text


class Disk:
    """A session with one node, which answers log_read from these bytes, or fails."""

    def __init__(self, data: bytes, failure: Exception | None = None) -> None:
        self.links = {"n1": self}
        self._data = data
        self._failure = failure

    async def call(self, op: str, args: dict[str, Any], *, timeout_s: float) -> Answer:
        assert (op, timeout_s) == ("log_read", 60.0)
        if self._failure is not None:
            raise self._failure
        offset, length = args["offset"], args["length"]
        return Answer({"offset": offset}, self._data[offset : offset + length])


def written(write: Callable[[Writer], Any]) -> bytes:
    """Return what this coroutine writes."""
    out = io.BytesIO()
    writer = Writer(out)
    asyncio.run(write(writer))
    assert writer.close(10.0)
    return out.getvalue()


# A line of 15 bytes, the first 5 of which are its row's text.
CUT = LogLine("n1", 0, 0, "stdout", 0, 2, 0, "I", b"01234", 10)
SHORT = LogLine("n1", 0, 0, "stdout", 1, 18, 1, "I", b"next", 0)


@pytest.mark.parametrize(
    ("disk", "said"),
    [
        (b"a\n0123456789ABCDE\nnext", b"0123456789ABCDE"),
        (b"a\n0123456", "0123456 … 8 bytes of this line could not be read".encode()),
        (b"", "01234 … 10 bytes of this line could not be read".encode()),
    ],
)
def test_lost_parts_of_a_line_are_marked_in_their_place(disk: bytes, said: bytes) -> None:
    session = cast("Session", Disk(disk))
    out = written(lambda writer: printing._write(session, writer, [SHORT, CUT, SHORT], parse_logs(["h.toml"])))
    assert out == b"n1:0| next\nn1:0| " + said + b"\nn1:0| next\n"


@pytest.mark.parametrize(
    ("failure", "said"),
    [(None, b"0123456789ABCDE"), (ChannelClosed("lost"), "01234 … 10 bytes of this line could not be read".encode())],
)
def test_rows_are_whole_as_they_come(monkeypatch: pytest.MonkeyPatch, failure: Exception | None, said: bytes) -> None:
    monkeypatch.setattr(whole_lines, "PATIENCE", 0.0)
    session = cast("Session", Disk(b"a\n0123456789ABCDE\nnext", failure))
    options = parse_logs(["h.toml", "-f", "--level", "error"])
    out = written(lambda writer: printing._write(session, writer, [CUT, SHORT], options))
    assert out == b"n1:0| " + said + b"\nn1:0| next\n"


@pytest.mark.parametrize("failure", [ChannelClosed("lost"), CallFailed("no_such_file", "gone")])
def test_a_followed_log_goes_on_without_what_cannot_be_had(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    monkeypatch.setattr(whole_lines, "PATIENCE", 0.0)
    text = b"x" * (LINE_LIMIT + 1)

    session = cast("Session", Disk(text, failure))
    lines = WholeLines()

    async def followed() -> bytes:
        pieces = [*lines.feed(chunk(text)), *lines.feed(chunk(b"\nnext\n", offset=len(text)))]
        return b"".join([data async for data in whole_lines.printed(session, pieces)])

    out = asyncio.run(followed())
    said = f"n1:0| {'x' * CLIP} … {len(text) - CLIP} bytes of this line could not be read\nn1:0| next\n"
    assert out == said.encode()


# Folding: nothing is lost, whatever is alike becomes one, and how the rows are handed over makes no difference.


SECOND = 1_000_000_000
TEXTS = (
    b"step 1", b"step 2", b"loss 1.5", b"loss 2", b"  at x.py", b"Traceback (most recent call last):", b"E: no", b"",
)  # fmt: skip


def row(rank: int, text: bytes, t_s: float = 0.0, *, line: int = 0, stream: str = "stdout") -> LogLine:
    return LogLine(f"n{rank // 8}", 0, rank, stream, line, 0, int(t_s * SECOND), None, text)


def folded(rows: list[LogLine]) -> list[Fold[LogLine]]:
    folder: Folder[LogLine] = Folder()
    return [*folder.feed(rows), *folder.rest()]


def folded_lines(rows: list[LogLine]) -> list[str]:
    return lines_of(folded(rows)).decode().splitlines()


@st.composite
def _logs(draw: st.DrawFn) -> list[LogLine]:
    written = st.tuples(st.integers(0, 3), st.sampled_from(TEXTS), st.sampled_from((0.0, 0.01, 0.4, 1.0, 2.5)))
    rows, t_s = [], 0.0
    for number, (rank, text, pause_s) in enumerate(draw(st.lists(written, max_size=60))):
        t_s += pause_s
        rows.append(row(rank, text, t_s, line=number))
    return rows


@examples(300)
@given(_logs(), st.lists(st.integers(1, 20)), st.sampled_from((16 * 1024 * 1024, 1500)))
def test_batches_make_no_difference_and_nothing_is_lost(rows: list[LogLine], sizes: list[int], limit: int) -> None:
    whole, parts = Folder[LogLine](limit=limit), Folder[LogLine](limit=limit)
    at_once = [*whole.feed(rows), *whole.rest()]
    left, in_parts = list(rows), []
    for size in [*sizes, len(rows)]:
        in_parts += parts.feed(left[:size])
        left = left[size:]
    in_parts += parts.rest()
    assert [fold.records for fold in in_parts] == [fold.records for fold in at_once]
    assert sorted(each.line for fold in at_once for each in fold.rows) == [each.line for each in rows]
    firsts = [fold.first_rows[0].line for fold in at_once]
    assert firsts == sorted(firsts)
    for fold in at_once:
        assert len(fold.records) == len({record[0].rank for record in fold.records})
        for record in fold.records:
            assert [each.line for each in record] == sorted(each.line for each in record)
            assert len({each.rank for each in record}) == 1


@st.composite
def _one_odd(draw: st.DrawFn) -> tuple[list[list[bytes]], list[LogLine], int]:
    """What all ranks print, line by line in any order, within a window; one of them prints something more."""
    trace = [b"Traceback (most recent call last):", b'  File "t.py", line 3', b"ValueError: no"]
    alike = st.sampled_from([[b"case 1"], [b"case 2"], [b"case 3"], [b"saved"], [b"loss 1.5"], [b"loss 2"], trace])
    said: list[list[bytes]] = draw(st.lists(alike, min_size=1, max_size=8))
    count = draw(st.integers(2, 4))
    lines = [[text for record in said for text in record] for _ in range(count)]
    odd: list[bytes] = draw(
        st.sampled_from([[b"case 9"], [b"case 1 ODD"], [b"odd"], [b"loss nan"], [*trace[:2], b"E: odd"]])
    )
    at = draw(st.integers(0, len(said)))
    lines[draw(st.integers(0, count - 1))] = [text for record in (*said[:at], odd, *said[at:]) for text in record]
    turns = draw(st.permutations([rank for rank in range(count) for _ in lines[rank]]))
    rows = [row(rank, lines[rank].pop(0), number / 1000, line=number) for number, rank in enumerate(turns)]
    return said, rows, count


@examples(100)
@given(_one_odd())
def test_an_odd_line_stands_alone(case: tuple[list[list[bytes]], list[LogLine], int]) -> None:
    said, rows, count = case
    folds = [([each.text for each in fold.first_rows], len(fold.records)) for fold in folded(rows)]
    assert sorted(texts for texts, ranks in folds if ranks == count) == sorted(said)
    assert [ranks for _, ranks in folds if ranks < count] == [1]


def test_one_line_of_many_ranks_and_the_odd_one_out() -> None:
    rows = [row(rank, b"step 120 loss=1.8%d lr 3e-4" % (rank % 7)) for rank in range(512)]
    rows[37] = row(37, b"step 120 loss=nan lr 3e-4")
    begun = time.process_time()
    assert folded_lines(rows) == ["[0-36,38-511]~| step 120 loss=1.80 lr 3e-4", "n4:37| step 120 loss=nan lr 3e-4"]
    once_s = time.process_time() - begun
    begun = time.process_time()
    folded([row(rank, b"step %d loss=1.8" % step, step) for step in range(20) for rank in range(512)])
    # Twenty times the rows: their cost does not grow with their number.
    assert time.process_time() - begun < 20 * 5 * max(once_s, 0.02)
    begun = time.process_time()
    folded([row(at % 5000 == 4999, b"loss=1.%04d" % at, at / 10_000) for at in range(10_000)])
    assert time.process_time() - begun < 20 * 5 * max(once_s, 0.02), "nor if one rank prints far more than another"


def test_a_step_folds_with_the_same_step_only() -> None:
    assert folded_lines(
        [row(0, b"step 120"), row(0, b"step 121", 0.6), row(1, b"step 120", 0.7), row(1, b"step 121", 1.3)]
    ) == ["[0-1]| step 120", "[0-1]| step 121"]
    # One rank is a whole window ahead.
    assert folded_lines(
        [row(0, b"step 1"), row(0, b"step 2", 0.9), row(1, b"step 1", 1.1), row(1, b"step 2", 1.2)]
    ) == [
        "n0:0| step 1",
        "[0-1]| step 2",
        "n0:1| step 1",
    ]


def test_a_rank_s_second_line_begins_a_new_row_even_in_a_burst() -> None:
    rows = [row(rank, b"saved part %d" % part) for rank in (0, 1) for part in (1, 2, 3)]
    assert folded_lines(rows) == [f"[0-1]| saved part {part}" for part in (1, 2, 3)]


def test_streams_and_windows_are_kept_apart() -> None:
    assert folded_lines([row(0, b"hello"), row(1, b"hello", stream="stderr")]) == ["n0:0| hello", "n0:1| hello"]
    assert folded_lines([row(0, b"hello"), row(1, b"hello", 1.5)]) == ["n0:0| hello", "n0:1| hello"]


def test_a_traceback_folds_as_a_whole() -> None:
    def trace(rank: int, error: bytes) -> list[LogLine]:
        lines = (b"[rank%d]: Traceback (most recent call last):" % rank, b'[rank%d]:   File "t.py", line 3' % rank)
        return [row(rank, line) for line in (*lines, b"[rank%d]: %s" % (rank, error))]

    parts = [trace(0, b"ValueError: no"), trace(1, b"ValueError: no"), trace(2, b"OSError: disk")]
    shown = [each.text.decode() for each in parts[0]]
    odd = [each.text.decode() for each in parts[2]]
    expected = [*(f"[0-1]~| {text}" for text in shown), *(f"n0:2| {text}" for text in odd)]
    assert folded_lines([each for part in parts for each in part]) == expected
    # As they come live: line by line from all ranks.
    assert folded_lines([each for lines in zip(*parts, strict=True) for each in lines]) == expected


def test_what_waits_comes_once_its_time_is_over_and_when_it_is_too_much() -> None:
    folder = Folder[LogLine]()
    assert folder.feed([row(0, b"hello"), row(1, b"hello")]) == []
    assert folder.until(SECOND) == []
    assert [fold.ranks for fold in folder.until(SECOND + 1)] == [[0, 1]]
    full = Folder[LogLine](limit=10_000)
    assert sum(len(fold.rows) for fold in full.feed([row(0, b"x" * 1000)] * 100)) > 90
