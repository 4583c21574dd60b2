"""The wire's frames: what is sent comes back, what is no frame is refused."""

from __future__ import annotations

import asyncio
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_agent.wire import MAX_BODY, MAX_HEADER, Frame, JobSpec, ProtocolError, SpecError, encode, read_frame
from remote_agent.wire.frames import encode_sized
from tests.examples import examples


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
        (b"\xff\xff\xff\xff\0\0\0\0", "frame too large"),
        (b"\0\0\0\2\xff\xff\xff\xff", "frame too large"),
        (b"\0\0\0\1\0\0\0\0{", "not JSON"),
        (b"\0\0\0\2\0\0\0\0[]", "not a JSON object"),
        (b"\0\0\0\1\0\0\0\0\xff", "not JSON"),
        (b"\0\0\x03\xe8\0\0\0\0" + b"[" * 1000, "not JSON"),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        asyncio.run(_read(data))


def test_a_frame_nested_too_deeply_is_refused() -> None:
    text = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(ProtocolError, match="not JSON"):
        asyncio.run(_read(len(text).to_bytes(4, "big") + bytes(4) + text))


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
        {"nodes": [{"nome": 1}]},
        {"nodes": 3},
        {"env": {"A": 1}},
        {"min_nodes": "2"},
        {"hooks": [{"on": [1]}]},
    ]
    for broken in ({"job": "j"}, *({**spec, **one} for one in wrong), [spec]):
        with pytest.raises(SpecError):
            JobSpec.from_json(broken)
