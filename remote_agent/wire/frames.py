"""Frames: two lengths, a JSON header, raw bytes.

In: an asyncio stream. Out: frames. Every wire of ours (SSH, TLS between agents, the engine's pipes) carries them.

A long header is compressed: what a link that has rested takes at once is some 14 kB, and a page of rows is more.

    WireError
     ├ ProtocolError      the other side does not speak this protocol, or a frame is over its limit
     └ ChannelClosed      the other side is gone (channel.py)
"""

from __future__ import annotations

import asyncio
import json
import struct
import zlib
from typing import Any, NamedTuple

PROTOCOL = 1
# The node prints this before the first frame, so that a login banner is never taken for data.
MAGIC = b"SUPERVISOR-AGENT %d\n" % PROTOCOL
MAX_HEADER = 8 * 1024 * 1024
MAX_BODY = 8 * 1024 * 1024
# Of the values in a header, by their marks: an empty object takes three bytes here and some hundred in memory.
MAX_OBJECTS = 1 << 17
MAX_VALUES = 1 << 19
# A compressed header may unpack to this, or to that many times its length.
MAX_UNPACKED = 256 * 1024
MAX_RATIO = 100
_LENGTHS = struct.Struct(">II")
# This bit of a header's length marks a compressed header; headers from this many bytes on are compressed.
_PACKED = 1 << 31
_PACKED_FROM = 1024


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


def encode(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return the bytes of one frame; raises ProtocolError over the limits."""
    return encode_sized(header, body)[0]


def encode_sized(header: dict[str, Any], body: bytes = b"") -> tuple[bytes, int]:
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


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """Return the next frame, None if the stream ends between two frames; raises ProtocolError."""
    try:
        lengths = await reader.readexactly(_LENGTHS.size)
    except asyncio.IncompleteReadError as short:
        if short.partial:
            raise ProtocolError("the stream ended inside a frame") from short
        return None
    header_length, body_length = _LENGTHS.unpack(lengths)
    is_packed, header_length = bool(header_length & _PACKED), header_length & ~_PACKED
    if header_length > MAX_HEADER or body_length > MAX_BODY:
        raise ProtocolError(f"frame too large: header {header_length} bytes, body {body_length} bytes")
    try:
        text = await reader.readexactly(header_length)
        body = await reader.readexactly(body_length)
    except asyncio.IncompleteReadError as short:
        raise ProtocolError("the stream ended inside a frame") from short
    if is_packed:
        text = _unpack(text)
    _check_values(text)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as bad:
        raise ProtocolError("a frame's header is not JSON") from bad
    if not isinstance(header, dict):
        raise ProtocolError("a frame's header is not a JSON object")
    return Frame(header, body, len(text) + len(body))
