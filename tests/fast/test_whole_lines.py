"""The log as it is printed: whole lines of any length, every byte, and what is said of bytes that cannot be had."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Callable
from typing import Any, cast

import pytest

from remote_agent.text.rows import CLIP
from remote_agent.wire import Answer, CallFailed, ChannelClosed
from supervisor.cli import logs as printing
from supervisor.cli import whole_lines
from supervisor.cli.logs import parse_logs
from supervisor.cli.output import Writer
from supervisor.cli.whole_lines import LINE_LIMIT, LongLine, Piece, Printer, WholeLines, prefixed
from supervisor.logs.live import Chunk
from supervisor.logs.rows import LogLine
from supervisor.logs.selection import Sieve
from supervisor.session import Session


def chunk(
    data: bytes, rank: int = 0, *, offset: int = 0, generation: int = 0, stream: str = "stdout", node: str = "n1"
) -> Chunk:
    return Chunk(node, generation, rank, stream, offset, 0, data)


def printed(pieces: list[Piece]) -> bytes:
    return b"".join(prefixed(*piece) for piece in pieces if not isinstance(piece, LongLine))


def test_lines_carry_node_and_rank() -> None:
    assert printed(WholeLines().feed(chunk(b"a\n\nb\n", 3))) == b"n1:3| a\nn1:3| \nn1:3| b\n"


def test_half_lines_wait_for_their_end() -> None:
    lines = WholeLines()
    assert printed(lines.feed(chunk(b"one\ntw"))) == b"n1:0| one\n"
    assert printed(lines.feed(chunk(b"x\n", 1))) == b"n1:1| x\n"
    assert lines.feed(chunk(b"err", 0, stream="stderr")) == []
    assert printed(lines.feed(chunk(b"o\n"))) == b"n1:0| two\n"
    assert printed(lines.rest()) == b"n1:0| err\n"
    assert lines.rest() == []


def test_the_last_words_of_a_generation_come_before_the_next_one() -> None:
    lines = WholeLines()
    lines.feed(chunk(b"dying"))
    assert printed(lines.feed(chunk(b"again\n", generation=1))) == b"n1:0| dying\nn1:0| again\n"


def test_lines_of_nccl_are_left_to_their_stream_and_that_is_said_once() -> None:
    text = b"step 1\nn1:7:9 [0] NCCL INFO a\n\nstep 2\nNCCL version 2.26.2\nhal"
    said: list[str] = []

    def shown(*streams: str) -> bytes:
        lines = WholeLines(Sieve(streams, lambda: said.append("apart")))
        return b"".join(map(printed, (lines.feed(chunk(text)), lines.feed(chunk(b"f\n")), lines.rest())))

    assert shown("stdout", "stderr") == b"n1:0| step 1\nn1:0| \nn1:0| step 2\nn1:0| half\n"
    assert said == ["apart"]
    assert shown("nccl") == b"n1:0| n1:7:9 [0] NCCL INFO a\nn1:0| NCCL version 2.26.2\n"
    assert shown("stdout", "stderr", "nccl").count(b"\n") == 6
    assert said == ["apart"]


def test_of_a_line_of_any_length_only_its_place_and_its_beginning_are_held() -> None:
    lines = WholeLines(Sieve(("stdout",), lambda: None))
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
    [
        (None, b"0123456789ABCDE"),
        (ChannelClosed("lost"), "01234 … 10 bytes of this line could not be read".encode()),
    ],
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

    async def printed_by(printer: Printer) -> bytes:
        pieces = [data async for data in printer.feed(chunk(text))]
        pieces += [data async for data in printer.feed(chunk(b"\nnext\n", offset=len(text)))]
        return b"".join(pieces)

    session = cast("Session", Disk(text, failure))
    out = asyncio.run(printed_by(Printer(session)))
    said = f"n1:0| {'x' * CLIP} … {len(text) - CLIP} bytes of this line could not be read\nn1:0| next\n"
    assert out == said.encode()
