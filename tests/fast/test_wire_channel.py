"""The wire's calls and streams, both ways: refusals, cancel, and ends that come in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_agent.wire import (
    MAX_BODY,
    MAX_HEADER,
    Answer,
    CallFailed,
    Channel,
    ChannelClosed,
    Frame,
    Handler,
    Items,
    JobSpec,
    Problem,
    ProtocolError,
    SpecError,
    encode,
    read_frame,
)
from remote_agent.wire.channel import LEAST_COST, REQUEST_ROOM, STREAM_ROOM, bodies, refuse
from remote_agent.wire.frames import encode_sized
from tests.examples import examples

# Items that are small.
STREAM_BACKLOG = STREAM_ROOM // LEAST_COST
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _pair() -> tuple[Streams, Streams]:
    one, other = socket.socketpair()
    return await asyncio.open_connection(sock=one), await asyncio.open_connection(sock=other)


@contextlib.asynccontextmanager
async def _channels(left: Handler = refuse, right: Handler = refuse) -> AsyncIterator[tuple[Channel, Channel]]:
    ours, theirs = await _pair()
    channels = Channel(*ours, left), Channel(*theirs, right)
    owners = [asyncio.ensure_future(channel.run()) for channel in channels]
    try:
        yield channels
    finally:
        for channel in channels:
            await channel.close()
        await asyncio.wait_for(asyncio.gather(*owners), 60)


async def test_an_answer_over_the_limit_fails_its_call_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def handle(op: str, args: dict[str, Any], body: bytes) -> Answer | Items:
        return Answer({}, bytes(args["size"]))

    caplog.set_level(logging.CRITICAL)
    async with _channels(right=handle) as (left, _):
        with pytest.raises(CallFailed, match="frame too large"):
            await left.call("big", {"size": MAX_BODY + 1}, timeout=60)
        assert len((await left.call("big", {"size": MAX_BODY})).body) == MAX_BODY


async def test_both_sides_call_at_once() -> None:
    async def handle(op: str, args: dict[str, Any], body: bytes) -> Answer | Items:
        return Answer({"op": op, **args}, body[::-1])

    async with _channels(handle, handle) as (left, right):
        calls = [side.call("echo", {"n": n}, b"%d" % n) for n in range(100) for side in (left, right)]
        answers = await asyncio.gather(*calls)
        assert [answer.data["n"] for answer in answers] == [n for n in range(100) for _ in range(2)]
        assert answers[-1].body == b"99"[::-1]


async def test_a_refusal_carries_kind_message_and_hint() -> None:
    async def handle(op: str, args: dict[str, Any], body: bytes) -> Answer | Items:
        if op == "broken":
            raise KeyError("oops")
        raise Problem("stale", "too late", "look again")

    async with _channels(right=handle) as (left, right):
        with pytest.raises(CallFailed) as refused:
            await left.call("x")
        error = refused.value
        assert (error.kind, error.message, error.hint) == ("stale", "too late", "look again")
        with pytest.raises(CallFailed) as broken:
            await left.call("broken")
        assert broken.value.kind == "internal"
        with pytest.raises(CallFailed) as unknown:
            await right.call("anything")
        assert unknown.value.kind == "unknown_op"


class _Counter:
    """A handler with one endless stream and one of a given length."""

    def __init__(self) -> None:
        self.sent = 0
        self.size = 10
        self.ended = asyncio.Event()

    async def handle(self, op: str, args: dict[str, Any], body: bytes) -> Answer | Items:
        if op == "ping":
            return Answer({})
        return self._count(args.get("count"))

    async def _count(self, count: int | None) -> Items:
        try:
            while count is None or self.sent < count:
                yield Answer({"n": self.sent}, bytes(self.size))
                self.sent += 1
                if count is not None and self.sent == 3 and count == 5:
                    raise Problem("broken", "in the middle")
        finally:
            self.ended.set()


async def test_a_stream_ends_by_itself_or_with_an_error() -> None:
    counter = _Counter()
    async with _channels(right=counter.handle) as (left, _):
        assert [item.data["n"] async for item in left.stream("count", {"count": 4})] == [0, 1, 2, 3]
        counter.sent = 0
        stream = left.stream("count", {"count": 5})
        assert [(await stream.__anext__()).data["n"] for _ in range(3)] == [0, 1, 2]
        with pytest.raises(CallFailed, match="in the middle"):
            await stream.__anext__()


async def test_closing_a_stream_cancels_it_on_the_other_side() -> None:
    counter = _Counter()
    async with _channels(right=counter.handle) as (left, _):
        stream = left.stream("count")
        async for item in stream:
            if item.data["n"] == 10:
                break
        await stream.aclose()
        await asyncio.wait_for(counter.ended.wait(), 60)
        # The wire is free for others: what was under way of the stream is thrown away.
        assert (await left.call("ping", timeout=60)).data == {}


async def test_what_was_sent_before_the_wire_ended_is_read_to_its_end() -> None:
    all_sent = asyncio.Event()

    async def handle(op: str, args: dict[str, Any], body: bytes) -> Answer | Items:
        async def items() -> Items:
            for number in range(STREAM_BACKLOG - 1):
                yield Answer({"n": number})
            all_sent.set()

        return items()

    async with _channels(right=handle) as (left, right):
        stream = left.stream("count")
        assert (await stream.__anext__()).data == {"n": 0}
        await asyncio.wait_for(all_sent.wait(), 60)
        await asyncio.sleep(0)
        await right.close()
        await asyncio.wait_for(left.closed.wait(), 60)
        assert [item.data["n"] async for item in stream] == list(range(1, STREAM_BACKLOG - 1))


@pytest.mark.parametrize("size", [1, LEAST_COST, 1024 * 1024, MAX_BODY])
async def test_the_unread_bytes_of_a_stream_are_bounded(size: int) -> None:
    counter = _Counter()
    counter.size = size
    # The items that are sent until the room is used up, and one that waits.
    most = -(-STREAM_ROOM // max(size, LEAST_COST)) + 1
    async with _channels(right=counter.handle) as (left, _):
        stream = left.stream("count", {"count": 3 * most})
        assert (await stream.__anext__()).data == {"n": 0}
        # Once 100 answers have come the stream has had time to go on, too.
        for _ in range(100):
            assert (await left.call("ping", timeout=60)).data == {}
        assert counter.sent <= most
        assert [item.data["n"] async for item in stream] == list(range(1, 3 * most))


@contextlib.asynccontextmanager
async def _against(handler: Handler = refuse) -> AsyncIterator[tuple[Channel, Streams]]:
    """A channel whose other end writes what it likes."""
    ours, theirs = await _pair()
    channel = Channel(*ours, handler)
    owner = asyncio.ensure_future(channel.run())
    try:
        yield channel, theirs
    finally:
        theirs[1].close()
        await channel.close()
        await asyncio.wait_for(owner, 60)


async def _write(writer: asyncio.StreamWriter, frame: bytes, count: int) -> None:
    with contextlib.suppress(ConnectionError):
        for _ in range(count):
            writer.write(frame)
            await writer.drain()


@pytest.mark.parametrize("size", [0, 1024 * 1024])
async def test_a_sender_that_does_not_wait_for_room_loses_the_connection(size: int) -> None:
    async with _against() as (channel, (_, writer)):
        stream = channel.stream("rows")
        first = asyncio.ensure_future(stream.__anext__())
        await asyncio.sleep(0)
        await _write(writer, encode({"re": 1, "item": {}}, bytes(size)), 2 * STREAM_BACKLOG)
        await asyncio.wait_for(channel.closed.wait(), 60)
        await first
        unread = 0
        with pytest.raises(ChannelClosed, match="more items of a stream than there is room for"):
            async for item in stream:
                unread += max(len(item.body), LEAST_COST)
        assert unread <= STREAM_ROOM + 2 * LEAST_COST + 2 * size
        with pytest.raises(ChannelClosed):
            await channel.call("again")


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([encode({"id": at, "op": "x"}) for at in range(2 * REQUEST_ROOM // LEAST_COST)],
         "more requests without an answer than there is room for"),
        ([encode({"id": at, "op": "x"}, bytes(1 << 20)) for at in range(2 * REQUEST_ROOM >> 20)],
         "more requests without an answer than there is room for"),
        ([encode({"id": 7, "op": "x"})] * 2, "request 7 is still being served"),
    ],
    ids=["small ones", "large ones", "one twice"],
)  # fmt: skip
async def test_an_end_that_only_asks_loses_the_connection(frames: list[bytes], says: str) -> None:
    silent = _Silent()
    async with _against(silent.handle) as (channel, (_, writer)):
        waiting = asyncio.ensure_future(channel.call("x"))
        for frame in frames:
            await _write(writer, frame, 1)
        with pytest.raises(ChannelClosed, match=says):
            await asyncio.wait_for(waiting, 60)
        await asyncio.wait_for(channel.closed.wait(), 60)
        await asyncio.wait_for(silent.cancelled.wait(), 60)


class _Silent:
    """A handler that never answers."""

    def __init__(self) -> None:
        self.asked, self.cancelled = asyncio.Event(), asyncio.Event()

    async def handle(self, op: str, args: dict[str, Any], body: bytes) -> Answer | Items:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError("unreachable")


@pytest.mark.parametrize("timeout", [0.05, 60.0])
async def test_a_call_that_is_given_up_is_cancelled_there(timeout: float) -> None:
    silent = _Silent()
    async with _channels(right=silent.handle) as (left, _):
        call = asyncio.ensure_future(left.call("wait", timeout=timeout))
        await silent.asked.wait()
        if timeout == 60.0:
            call.cancel()
        with pytest.raises((asyncio.TimeoutError, asyncio.CancelledError)):
            await call
        await asyncio.wait_for(silent.cancelled.wait(), 60)


async def test_what_waits_fails_when_the_other_side_is_gone() -> None:
    silent = _Silent()
    async with _channels(right=silent.handle) as (left, right):
        call = asyncio.ensure_future(left.call("wait"))

        async def read() -> None:
            async for _ in left.stream("wait"):
                pass

        stream = asyncio.ensure_future(read())
        await silent.asked.wait()
        await right.close()
        for task in (call, stream):
            with pytest.raises(ChannelClosed):
                await asyncio.wait_for(task, 60)
        await asyncio.wait_for(left.closed.wait(), 60)
        with pytest.raises(ChannelClosed):
            await left.call("again")
        with pytest.raises(ChannelClosed):
            await left.notify("again")


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", encode({"neither": 1}), encode({"op": "x"})[:-1]])
async def test_junk_and_half_frames_end_the_channel(junk: bytes) -> None:
    async with _against() as (channel, (_, writer)):
        writer.write(junk)
        writer.close()
        await asyncio.wait_for(channel.closed.wait(), 60)


@pytest.mark.parametrize(
    "header",
    [
        {"re": 1}, {"re": 1, "error": "text"}, {"re": [], "ok": {}}, {"re": 1, "item": {}}, {"re": {}, "end": True},
        {"cancel": 99}, {"cancel": []}, {"op": "x", "args": []}, {"id": [], "op": "x"},
    ],
)  # fmt: skip
async def test_odd_headers_neither_hang_nor_leak(header: dict[str, Any]) -> None:
    async with _against() as (channel, (_, writer)):
        call = asyncio.ensure_future(channel.call("x", timeout=60))
        await asyncio.sleep(0)
        await _write(writer, encode(header), 1)
        writer.close()
        with pytest.raises((ChannelClosed, CallFailed)):
            await call


async def test_notices_are_handled_in_their_order() -> None:
    seen: list[int] = []

    async def handle(op: str, args: dict[str, Any], body: bytes) -> Answer | Items:
        await asyncio.sleep(0.01 if args["n"] == 0 else 0)
        seen.append(args["n"])
        return Answer({})

    async with _channels(right=handle) as (left, _):
        for n in range(5):
            await left.notify("note", {"n": n})
        while len(seen) < 5:
            await asyncio.sleep(0.001)
    assert seen == [0, 1, 2, 3, 4]


async def test_a_notice_that_arrives_with_a_request_does_not_overtake_it() -> None:
    seen: list[str] = []

    async def handle(op: str, args: dict[str, Any], body: bytes) -> Answer | Items:
        seen.append(op)
        return Answer({})

    async with _against(handle) as (_, (_reader, writer)):
        frames: list[dict[str, Any]] = [
            {"id": 1, "op": "join"}, {"op": "report"}, {"id": 2, "op": "beat"}, {"op": "gone"},
        ]  # fmt: skip
        writer.write(b"".join(encode(frame) for frame in frames))
        while len(seen) < len(frames):
            await asyncio.sleep(0.001)
    assert seen == [frame["op"] for frame in frames]


@pytest.mark.parametrize(("how", "ended"), [("end", True), ("reset", False), ("ours", False)])
async def test_only_an_end_from_the_other_side_is_one(how: str, ended: bool) -> None:
    """The kernel ends the connections of a process that dies; what a firewall sends is a reset."""
    server = socket.create_server(("127.0.0.1", 0))
    reader, writer = await asyncio.open_connection(*server.getsockname())
    other, _ = server.accept()
    server.close()
    channel = Channel(reader, writer)
    running = asyncio.ensure_future(channel.run())
    await asyncio.sleep(0)
    if how == "ours":
        await channel.close()
    if how == "reset":
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()
    await running
    assert channel.ended is ended


async def test_a_thread_reads_a_stream_of_any_length_and_learns_why_it_ends() -> None:
    """More than the other side may send unread, so it is given back while it is read."""
    pieces = [bytes([number]) * (STREAM_ROOM // 3) for number in range(10)]

    async def handle(op: str, args: dict[str, Any], body: bytes) -> Answer | Items:
        async def items() -> Items:
            for piece in pieces:
                yield Answer({}, piece)
            if args["refused"]:
                raise Problem("no_snapshot", "it is no longer kept")

        return items()

    def read(sock: socket.socket, **args: Any) -> list[bytes]:
        return [bytes(body) for body in bodies(sock, "read", args)]

    for refused in (False, True):
        one, other = socket.socketpair()
        channel = Channel(*await asyncio.open_connection(sock=one), handle)
        running = asyncio.ensure_future(channel.run())
        with other:
            reading = asyncio.to_thread(read, other, refused=refused)
            if refused:
                with pytest.raises(CallFailed, match="no longer kept"):
                    await reading
            else:
                assert await reading == pieces
                await channel.close()
                with pytest.raises(ChannelClosed):
                    await asyncio.to_thread(read, other, refused=False)
        await channel.close()
        await asyncio.wait_for(running, 60)


# The wire's frames: what is sent comes back, what is no frame is refused.


async def _read(data: bytes) -> Frame | None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await read_frame(reader)


def _sent(header: dict[str, Any], body: bytes = b"") -> Frame:
    """Return a frame as it must arrive: both ends count the same size."""
    return Frame(header, body, encode_sized(header, body)[1])


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@examples(30)
@given(st.dictionaries(st.text(), _json), st.binary(max_size=5000))
def test_a_frame_comes_back_as_it_was(header: dict[str, Any], body: bytes) -> None:
    assert asyncio.run(_read(encode(header, body))) == _sent(header, body)


def test_a_long_header_is_sent_compressed() -> None:
    rows = [{"rank": 0, "stream": "stdout", "line": line, "t_ns": line * 10**9, "level": "I"} for line in range(500)]
    data = encode({"rows": rows}, b"body")
    assert len(data) < 8_000
    assert asyncio.run(_read(data)) == _sent({"rows": rows}, b"body")
    for cut in range(1, len(data), 100):
        with pytest.raises(ProtocolError, match="ended inside a frame"):
            asyncio.run(_read(data[:cut]))


@pytest.mark.parametrize(
    "text", [b"{}", zlib.compress(b"{}")[:-1], zlib.compress(b" " * (MAX_HEADER + 1) + b"{}")], ids=["", "cut", "bomb"]
)
def test_a_damaged_compressed_header_is_refused(text: bytes) -> None:
    with pytest.raises(ProtocolError, match="damaged"):
        asyncio.run(_read((1 << 31 | len(text)).to_bytes(4, "big") + bytes(4) + text))


@pytest.mark.parametrize("part", [b"{},", b'{"":0},', b"[],", b"[[]],", b"0.5,", b'"ab",', b'{"a":[{}]},'])
def test_a_small_frame_costs_little_memory(part: bytes) -> None:
    text = b'{"x":[' + (part * (MAX_HEADER // len(part) - 10)).rstrip(b",") + b"]}"
    packed = zlib.compress(text, 9)
    assert len(packed) < 50_000
    for length, content in ((1 << 31 | len(packed), packed), (len(text), text)):
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError, match="too large"):
                asyncio.run(_read(length.to_bytes(4, "big") + bytes(4) + content))
            _size, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 60_000_000


def test_a_header_that_packs_very_well_still_arrives() -> None:
    header = {"x": ["0" * 1000] * 4000}
    data = encode(header)
    assert len(data) > 1_000_000, "a receiver would refuse it compressed"
    assert asyncio.run(_read(data)) == _sent(header, b"")
    with pytest.raises(ProtocolError, match="too many values"):
        encode({"x": [0] * (1 << 20)})


def test_the_end_between_frames_is_no_error_and_inside_one_is() -> None:
    data = encode({"op": "x"}, b"body")
    assert asyncio.run(_read(b"")) is None
    for cut in range(1, len(data)):
        with pytest.raises(ProtocolError, match="ended inside a frame"):
            asyncio.run(_read(data[:cut]))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xff\xff\xff\0\0\0\0", "frame too large"), (b"\0\0\0\2\xff\xff\xff\xff", "frame too large"),
        (b"\0\0\0\1\0\0\0\0{", "not JSON"), (b"\0\0\0\2\0\0\0\0[]", "not a JSON object"),
        (b"\0\0\0\1\0\0\0\0\xff", "not JSON"), (b"\0\0\x03\xe8\0\0\0\0" + b"[" * 1000, "not JSON"),
    ],
)  # fmt: skip
def test_what_is_no_frame_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        asyncio.run(_read(data))


def test_frames_over_the_limits_are_not_sent() -> None:
    assert len(encode({}, bytes(MAX_BODY))) == 8 + 2 + MAX_BODY
    with pytest.raises(ProtocolError):
        encode({}, bytes(MAX_BODY + 1))
    with pytest.raises(ProtocolError):
        encode({"x": "y" * MAX_HEADER})


def test_a_job_description_survives_and_a_bad_one_is_refused() -> None:
    spec = {"job": "j", "script": "s.py", "nodes": [{"name": "n1", "address": "a"}], "args": ["x"], "new_key": 1}
    parsed = JobSpec.from_json(spec)
    assert JobSpec.from_json(parsed.to_json()) == parsed
    assert parsed.node("n1") is not None
    assert parsed.node("n2") is None
    wrong: list[dict[str, Any]] = [
        {"nodes": [{"nome": 1}]}, {"nodes": 3}, {"env": {"A": 1}}, {"min_nodes": "2"}, {"hooks": [{"on": [1]}]},
    ]  # fmt: skip
    for broken in ({"job": "j"}, *({**spec, **one} for one in wrong), [spec]):
        with pytest.raises(SpecError):
            JobSpec.from_json(broken)
