"""TCP connections of processes: the bytes over them, which /proc/PID/io does not count, their speed and remote ends.

In: pids. Out: what the kernel counts of the open connections, None when it does not say; remote ends that answer and
those that do not; whether no other process listens at a port.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
REQUEST_DUMP = 0x301
ANY_STATE = 0xFFF
INFO = 2
CONNECTED, CONNECTING, LISTENING = "01", "02", "0A"
ERROR, DONE = 2, 3
# Offsets in the kernel's inet_diag_msg of both addresses, the bytes not yet acknowledged, and the inode; its length.
FROM_AT, TO_AT, QUEUE_AT, INODE_AT, MESSAGE_BYTES = 8, 24, 60, 68, 72
# Offsets in its tcp_info of the bytes that were acknowledged and received, and of the speed in bytes a second; kernels
# before 4.9 do not have that.
COUNTS_AT, SPEED_AT = 120, 160
BUFFER_BYTES = 1 << 16
# The number is limited for each process: in a large group, a rank has a connection to each of the others.
MAX_ENDS = 64
# The kernel answers at once.
WAIT_S = 0.5
_INODE = re.compile(r"socket:\[(\d+)\]")


class Connection(NamedTuple):
    """What the kernel counts of one connection."""

    local: bytes
    remote: bytes
    """Addresses as the kernel has them, without the port."""
    sent: int
    received: int
    """Bytes since it was opened, as far as the other end has acknowledged them."""
    queued: int
    """Bytes on their way, or waiting for it."""
    speed: int
    """Bytes a second at which it delivered last; 0: unknown."""


def transferred(families: Mapping[int, Iterable[int]]) -> dict[int, int] | None:
    """Return the bytes over the open connections of each family of pids; a shared connection counts once."""
    found = connections(families)
    if found is None:
        return None
    return {name: sum(one.sent + one.received for one in own.values()) for name, own in found.items()}


def connections(families: Mapping[int, Iterable[int]]) -> dict[int, dict[int, Connection]] | None:
    """Return the open connections of each family of pids, by inode; None if this kernel or sandbox does not say."""
    known: dict[int, Connection] = {}
    try:
        for family in (socket.AF_INET, socket.AF_INET6):
            known.update(_connections(family))
    except OSError:
        return None
    held = {name: {inode for pid in pids for inode in _inodes(pid)} for name, pids in families.items()}
    return {name: {inode: known[inode] for inode in inodes & known.keys()} for name, inodes in held.items()}


def listen_alone(port: int, pids: Iterable[int]) -> bool:
    """Return whether these processes, and no others, listen at a port; raises OSError."""
    listening = {int(each[9]) for each in _rows() if each[3] == LISTENING and each[1].endswith(f":{port:04X}")}
    return bool(listening) and listening <= {inode for pid in pids for inode in _inodes(pid)}


def remote_ends(pids: Iterable[int]) -> dict[int, tuple[list[str], list[str]]]:
    """Return by pid the remote ends without an answer so far, and the connected ones.

    The oldest come first; above MAX_ENDS the newest are left out.
    """
    try:
        known = {int(each[9]): (each[3], each[2]) for each in _rows() if each[3] in (CONNECTED, CONNECTING)}
    except OSError:
        return {}
    ends: dict[int, tuple[list[str], list[str]]] = {}
    for pid in pids:
        # Newer sockets have higher inodes.
        mine = [known[inode] for inode in sorted(known.keys() & set(_inodes(pid)))]
        silent, reached = ([_end(end) for each, end in mine if each == state] for state in (CONNECTING, CONNECTED))
        ends[pid] = silent[:MAX_ENDS], reached[:MAX_ENDS]
    return ends


def _rows() -> Iterator[list[str]]:
    """Yield the fields of every TCP socket: 1 and 2 the ends, 3 the state, 9 the inode; raises OSError."""
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:
            yield from [line.split() for line in file][1:]


def _end(text: str) -> str:
    """Return for example 10.0.0.1:4711 for the kernel's hexadecimal words in host byte order."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    plain = address(struct.pack(f"={len(words)}I", *words))
    return f"{f'[{plain}]' if plain.version == 6 else plain}:{int(port, 16)}"


def address(packed: bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address in these 4 or 16 bytes."""
    plain = ipaddress.ip_address(packed)
    mapped = plain.ipv4_mapped if isinstance(plain, ipaddress.IPv6Address) else None
    return mapped or plain


def _inodes(pid: int) -> Iterator[int]:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            match = _INODE.match(os.readlink(f"{folder}/{name}"))
            if match is not None:
                yield int(match[1])


def _connections(family: int) -> Iterator[tuple[int, Connection]]:
    """Yield inode and counts of every TCP connection of one family; raises OSError."""
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
                    raise OSError("the kernel refuses the request")
                yield from _connection(answer[at + 16 : at + size], 4 if family == socket.AF_INET else 16)
                at += (size + 3) & ~3


def _connection(message: bytes, length: int) -> Iterator[tuple[int, Connection]]:
    """Yield inode and counts of one connection, with addresses of this length, when the message has both."""
    at = MESSAGE_BYTES
    while at + 4 <= len(message):
        size, kind = struct.unpack_from("=HH", message, at)
        if kind == INFO and size >= 4 + COUNTS_AT + 16:
            sent, received = struct.unpack_from("=QQ", message, at + 4 + COUNTS_AT)
            has_speed = size >= 4 + SPEED_AT + 8
            speed = struct.unpack_from("=Q", message, at + 4 + SPEED_AT)[0] if has_speed else 0
            queued, _, inode = struct.unpack_from("=III", message, QUEUE_AT)
            local, remote = (message[start : start + length] for start in (FROM_AT, TO_AT))
            yield inode, Connection(local, remote, sent, received, queued, speed)
        at += max(4, (size + 3) & ~3)
