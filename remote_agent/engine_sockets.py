"""How much processes have sent and received over TCP: an upload does not show in /proc/PID/io, and takes little time.

In: pids. Out: bytes over the connections that they hold now, as the kernel counts them; None where it does not tell.
Whether they alone listen at a port.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
REQUEST_DUMP = 0x301
ANY_STATE = 0xFFF
INFO = 2
LISTENING = "0A"
ERROR, DONE = 2, 3
# Of the kernel's structures: the inode's place in inet_diag_msg, the length of that, and the bytes' place in tcp_info.
INODE_AT, MESSAGE_BYTES, COUNTS_AT = 68, 72, 120
BUFFER_BYTES = 1 << 16
# An answer comes at once.
WAIT_S = 0.5
_INODE = re.compile(r"socket:\[(\d+)\]")


def transferred(pids: Iterable[int]) -> dict[int, int] | None:
    """Return by pid the bytes over the connections it has open; connections that it shares count for each."""
    counts: dict[int, int] = {}
    try:
        for family in (socket.AF_INET, socket.AF_INET6):
            counts.update(_connections(family))
    except OSError:
        # A kernel or a sandbox without it.
        return None
    return {pid: sum(counts.get(inode, 0) for inode in _inodes(pid)) for pid in pids}


def listen_alone(port: int, pids: Iterable[int]) -> bool:
    """Return whether these processes listen at a port, and nobody else does; raises OSError."""
    listening = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:
            fields = [line.split() for line in file][1:]
        listening |= {int(each[9]) for each in fields if each[3] == LISTENING and each[1].endswith(f":{port:04X}")}
    return bool(listening) and listening <= {inode for pid in pids for inode in _inodes(pid)}


def _inodes(pid: int) -> Iterator[int]:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            found = _INODE.match(os.readlink(f"{folder}/{name}"))
            if found is not None:
                yield int(found[1])


def _connections(family: int) -> Iterator[tuple[int, int]]:
    """Yield inode and bytes of every TCP connection of one family; raises OSError."""
    query = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (INFO - 1), ANY_STATE)
    head = struct.pack("=IHHII", 16 + len(query), SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as link:
        link.settimeout(WAIT_S)
        link.send(head + query)
        while True:
            answer = link.recv(BUFFER_BYTES)
            at = 0
            while at + 16 <= len(answer):
                size, kind = struct.unpack_from("=IH", answer, at)
                if kind == DONE:
                    return
                if kind == ERROR or size < 16:
                    raise OSError("the kernel refuses to tell of its sockets")
                yield from _connection(answer[at + 16 : at + size])
                at += (size + 3) & ~3


def _connection(message: bytes) -> Iterator[tuple[int, int]]:
    """Yield inode and bytes of one connection, where the kernel tells both."""
    at = MESSAGE_BYTES
    while at + 4 <= len(message):
        size, kind = struct.unpack_from("=HH", message, at)
        if kind == INFO and size >= 4 + COUNTS_AT + 16:
            acked, received = struct.unpack_from("=QQ", message, at + 4 + COUNTS_AT)
            yield struct.unpack_from("=I", message, INODE_AT)[0], acked + received
        at += max(4, (size + 3) & ~3)
