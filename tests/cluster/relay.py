"""A slow cable: passes Ethernet frames between two interfaces, each one late by a fixed time, and loses some.

In: frames on either interface of this network namespace; `python relay.py FIRST SECOND MILLISECONDS LOST_SHARE`.
Out: the others on the other one. Works on any kernel, with or without the netem queue.
"""

from __future__ import annotations

import random
import select
import socket
import struct
import sys
import time
from collections import deque

_SOL_PACKET = 263
_PACKET_ADD_MEMBERSHIP = 1
_PACKET_VNET_HDR = 15  # each frame carries its unfinished checksum and segmentation, so that the kernel finishes them
_PACKET_IGNORE_OUTGOING = 23
_PROMISCUOUS = 1
_ETH_P_ALL = 3
_BIGGEST = 1 << 17
_QUEUED_FRAMES = 20_000  # about 30 MB; a real queue drops as well


def _open(interface: str) -> socket.socket:
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    raw.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    raw.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    raw.bind((interface, 0))
    request = struct.pack("iHH8s", socket.if_nametoindex(interface), _PROMISCUOUS, 0, b"")
    raw.setsockopt(_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, request)
    raw.setblocking(False)
    return raw


def relay(first: str, second: str, delay_s: float, loss: float) -> None:
    """Pass frames both ways until the process is ended; raises OSError."""
    ends = (_open(first), _open(second))
    print("ready", flush=True)
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(ends, (), (), timeout)
        now = time.monotonic()
        for end in readable:
            frame = end.recv(_BIGGEST)
            if len(waiting) < _QUEUED_FRAMES and random.random() >= loss:
                waiting.append((now + delay_s, other[end], frame))
        while waiting and waiting[0][0] <= now:
            _, target, frame = waiting.popleft()
            try:
                target.send(frame)
            except OSError:
                continue  # the interface is down or its queue is full: a frame may be lost, as on any cable


if __name__ == "__main__":
    relay(sys.argv[1], sys.argv[2], float(sys.argv[3]) / 1000.0, float(sys.argv[4]))
