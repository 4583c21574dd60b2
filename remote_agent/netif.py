"""Which network interface carries a job's traffic.

In: this node's address for the others, the kernel's tables. Out: the interface's name, None where none is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

RESOLVE_S = 5.0
_SIOCGIFADDR = 0x8915


async def interface_of(address: str) -> str | None:
    """Return the interface that has this address; where none has it, the one of the default route."""
    found: list[str] = []
    with contextlib.suppress(OSError, UnicodeError, asyncio.TimeoutError):
        if address:
            asking = asyncio.get_running_loop().getaddrinfo(address, None, type=socket.SOCK_STREAM)
            found = [str(entry[4][0]) for entry in await asyncio.wait_for(asking, RESOLVE_S)]
    own = own_addresses()
    return next((own[one] for one in found if one in own), None) or _of_default_route()


def own_addresses() -> dict[str, str]:
    """Return interfaces by address: the first of each in IPv4, all of them in IPv6."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        rows = (line.split() for line in file)
        found = {str(ipaddress.IPv6Address(bytes.fromhex(row[0]))): row[5] for row in rows if len(row) > 5}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found


def _of_default_route() -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/route").read_text(encoding="ascii").splitlines():
            words = line.split()
            if len(words) > 7 and words[1] == words[7] == "00000000":
                return words[0]
    return None
