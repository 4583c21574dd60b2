"""One stream of a connection, read by a thread that may block: an event loop copies gigabytes several times.

In: a connected socket, a request that the other side answers with a stream. Out: the bodies of its items, in order.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

from remote_agent.wire.channel import STREAM_ROOM, CallFailed, ChannelClosed, check_header, cost_of
from remote_agent.wire.frames import LENGTHS_BYTES, MAX_BODY, ProtocolError, decode, encode, sizes


def bodies(sock: socket.socket, op: str, args: dict[str, Any]) -> Iterator[memoryview]:
    """Yield the body of each item; it counts until the next one. Raises CallFailed, WireError."""
    _send(sock, {"id": 1, "op": op, "args": args})
    space = memoryview(bytearray(MAX_BODY))
    unread = 0
    while True:
        size = sizes(bytes(_receive(sock, space, LENGTHS_BYTES)))
        frame = decode(size, bytes(_receive(sock, space, size.header)), b"")
        body, header = _receive(sock, space, size.body), frame.header
        check_header(header)
        if "error" in header:
            error = header["error"]
            raise CallFailed(str(error.get("kind")), str(error.get("message")), str(error.get("hint")))
        if header.get("end"):
            return
        if "item" not in header:
            raise ProtocolError(f"not an item of a stream: {json.dumps(header)[:80]}")
        yield body
        unread += cost_of(frame.size + size.body)
        if unread >= STREAM_ROOM // 2:
            _send(sock, {"more": 1, "bytes": unread})
            unread = 0


def _send(sock: socket.socket, header: dict[str, Any]) -> None:
    try:
        sock.sendall(encode(header))
    except OSError as error:
        raise ChannelClosed(f"the connection is closed: {error}") from error


def _receive(sock: socket.socket, space: memoryview, length: int) -> memoryview:
    """Return so many bytes, in `space`; raises ChannelClosed where the other side has closed."""
    count = 0
    while count < length:
        try:
            received = sock.recv_into(space[count:length])
        except OSError as error:
            raise ChannelClosed(f"the connection is closed: {error}") from error
        if not received:
            raise ChannelClosed("the other side closed the connection")
        count += received
    return space[:length]
