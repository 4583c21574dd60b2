"""The network interface that carries a job's traffic.

In: this node's address for the others, the kernel's tables. Out: the interface's name, or None.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import socket
import struct

from remote_agent.base.files import read_text

RESOLVE_S = 5.0
_SIOCGIFADDR = 0x8915


async def interface_of(address: str) -> str | None:
    """Return the interface with this address, or else the one of the default route."""
    resolved: list[str] = []
    with contextlib.suppress(OSError, UnicodeError, asyncio.TimeoutError):
        if address:
            asking = asyncio.get_running_loop().getaddrinfo(address, None, type=socket.SOCK_STREAM)
            resolved = [str(entry[4][0]) for entry in await asyncio.wait_for(asking, RESOLVE_S)]
    own = own_addresses()
    named = next((own[one] for one in resolved if one in own), None)
    rows = (line.split() for line in read_text("/proc/net/route").splitlines())
    return named or next((row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"), None)


def own_addresses() -> dict[str, str]:
    """Return interfaces by address: each one's first IPv4 address and all of its IPv6 addresses."""
    rows = (line.split() for line in read_text("/proc/net/if_inet6").splitlines())
    found = {str(ipaddress.IPv6Address(bytes.fromhex(row[0]))): row[5] for row in rows if len(row) > 5}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found
