"""Damaged frames: what is no frame ends the connection, and a header of any shape harms nobody."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any, cast

import pytest

from remote_agent.wire import Answer, CallFailed, Channel, Items, ProtocolError, WireError, encode, read_frame
from tests.fuzz import damages, seeds
from tests.fuzz.driver import fuzz

HEADERS = (seeds.OWN / "headers.jsonl").read_bytes()


def fed(data: bytes) -> asyncio.StreamReader:
    """Return a stream with these bytes and its end."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


def frames_of(data: bytes) -> Iterator[bytes]:
    """Yield a frame for each line that is still a JSON object."""
    for line in data.splitlines():
        try:
            header = json.loads(line)
            frame = encode(header, b"body")
        except (ValueError, RecursionError):
            continue
        if isinstance(header, dict):
            yield frame


class Sink:
    """A writer that takes everything."""

    def write(self, data: bytes) -> None:
        """Take bytes."""

    async def drain(self) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        """Do nothing."""


def test_frames() -> None:
    async def read(data: bytes) -> None:
        reader = fed(data)
        while await read_frame(reader) is not None:
            pass

    real = [b"".join(frames_of(HEADERS)), encode(json.loads(HEADERS.splitlines()[0]), bytes(5000))]
    fuzz(lambda data: asyncio.run(read(data)), real, damages.of_bytes, (ProtocolError,))


def test_headers(caplog: pytest.LogCaptureFixture) -> None:
    """A channel reads headers of any shape: it ends, and its own call with it."""

    async def handle(op: str, args: dict[str, Any], body: bytes) -> Answer | Items:
        async def items() -> Items:
            for number in range(3):
                yield Answer({"number": number})

        return items() if op == "items" else Answer({"op": op}, body)

    async def talk(data: bytes) -> None:
        reader = asyncio.StreamReader()
        channel = Channel(reader, cast("asyncio.StreamWriter", Sink()), handle)
        owner = asyncio.ensure_future(channel.run())
        call = asyncio.ensure_future(channel.call("status", timeout=5))
        await asyncio.sleep(0)
        for frame in frames_of(data):
            reader.feed_data(frame)
        reader.feed_eof()
        await owner
        await asyncio.wait([call])
        assert call.exception() is None or isinstance(call.exception(), (CallFailed, WireError))
        assert not [one for one in caplog.records if one.exc_info], caplog.text

    def run(data: bytes) -> None:
        caplog.clear()
        asyncio.run(talk(data))

    caplog.set_level(logging.ERROR)
    fuzz(run, [HEADERS], damages.of_json_lines)
