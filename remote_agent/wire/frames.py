"""Frames: two lengths, a JSON header, raw bytes.

In: bytes. Out: frames. Every wire of ours (SSH, TLS between agents, the engine's pipes) carries them.

A long header is compressed: what a link that has rested takes at once is some 14 kB, and a page of rows is more.

    WireError
     ├ ProtocolError      the other side does not speak this protocol, or a frame is over its limit
     └ ChannelClosed      the other side is gone (channel.py)
    Problem              a request is refused: the error of an answer
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

PROTOCOL = 1
# The node prints this before the first frame, so that a login banner is never taken for data.
MAGIC = b"SUPERVISOR-AGENT %d\n" % PROTOCOL
MAX_HEADER = 8 * 1024 * 1024
MAX_BODY = 8 * 1024 * 1024
# The values in a header are limited by their marks: an empty object takes three bytes there and some hundred in memory.
MAX_OBJECTS = 1 << 17
MAX_VALUES = 1 << 19
# A compressed header may unpack to this, or to that many times its length.
MAX_UNPACKED = 256 * 1024
MAX_RATIO = 100
_LENGTHS = struct.Struct(">II")
LENGTHS_BYTES = _LENGTHS.size
CUT = "the stream ended inside a frame"
# This bit of a header's length marks a compressed header; headers from this many bytes on are compressed.
_PACKED = 1 << 31
_PACKED_FROM = 1024


class Problem(Exception):
    """A handler's refusal: kind for programs, message and hint for people."""

    def __init__(self, kind: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.hint = hint


class WireError(Exception):
    """Base class of the errors of a connection."""


class ProtocolError(WireError):
    """The other side does not speak this protocol, or a frame exceeds its limit."""


class Frame(NamedTuple):
    """One unit on the wire: a JSON object and raw bytes."""

    header: dict[str, Any]
    body: bytes
    size: int
    """Bytes of header and body, unpacked."""


def encode(header: Mapping[str, object], body: bytes = b"") -> bytes:
    """Return the bytes of one frame; raises ProtocolError over the limits."""
    return encode_sized(header, body)[0]


def encode_sized(header: Mapping[str, object], body: bytes = b"") -> tuple[bytes, int]:
    """Return the bytes of one frame and its size at the reader (Frame.size); raises ProtocolError over the limits."""
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER or len(body) > MAX_BODY:
        raise ProtocolError(f"frame too large: header {len(text)} bytes, body {len(body)} bytes")
    _check_values(text)
    size = len(text) + len(body)
    packed = zlib.compress(text, 1) if len(text) >= _PACKED_FROM else text
    if packed is text or len(text) > _most_unpacked(packed):
        return _LENGTHS.pack(len(text), len(body)) + text + body, size
    return _LENGTHS.pack(len(packed) | _PACKED, len(body)) + packed + body, size


def _check_values(text: bytes) -> None:
    if text.count(b"{") + text.count(b"[") > MAX_OBJECTS or text.count(b",") > MAX_VALUES:
        raise ProtocolError("frame too large: its header has too many values")


def _most_unpacked(packed: bytes) -> int:
    return min(MAX_HEADER, max(MAX_UNPACKED, MAX_RATIO * len(packed)))


def _unpack(packed: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(packed, _most_unpacked(packed))
    except zlib.error as bad:
        raise ProtocolError("a frame's header is damaged") from bad
    if not unpacking.eof:
        raise ProtocolError("a frame's header is damaged or too large")
    return text


class Sizes(NamedTuple):
    """The bytes of header and body after the lengths of a frame, and whether the header is compressed."""

    header: int
    body: int
    is_packed: bool


def sizes(lengths: bytes) -> Sizes:
    """Return what the first LENGTHS_BYTES of a frame announce; raises ProtocolError over the limits."""
    header, body = _LENGTHS.unpack(lengths)
    size = Sizes(header & ~_PACKED, body, bool(header & _PACKED))
    if size.header > MAX_HEADER or size.body > MAX_BODY:
        raise ProtocolError(f"frame too large: header {size.header} bytes, body {size.body} bytes")
    return size


def decode(size: Sizes, text: bytes, body: bytes) -> Frame:
    """Return the frame of a header's bytes and a body; raises ProtocolError."""
    if size.is_packed:
        text = _unpack(text)
    _check_values(text)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as bad:
        raise ProtocolError("a frame's header is not JSON") from bad
    if not isinstance(header, dict):
        raise ProtocolError("a frame's header is not a JSON object")
    return Frame(header, body, len(text) + len(body))


def receive(fd: int) -> Frame | None:
    """Wait for the next frame on a descriptor and not for a byte more; None if it ends between two frames.

    Raises ProtocolError, OSError.
    """
    lengths = _read(fd, LENGTHS_BYTES)
    if not lengths:
        return None
    size = sizes(_whole(lengths, LENGTHS_BYTES))
    text = _whole(_read(fd, size.header), size.header)
    return decode(size, text, _whole(_read(fd, size.body), size.body))


def _read(fd: int, count: int) -> bytes:
    """Return this many bytes, or fewer at the end."""
    data = bytearray()
    while len(data) < count and (chunk := os.read(fd, count - len(data))):
        data += chunk
    return bytes(data)


def _whole(data: bytes, count: int) -> bytes:
    if len(data) < count:
        raise ProtocolError(CUT)
    return data
