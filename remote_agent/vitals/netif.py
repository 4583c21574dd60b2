"""The network interface that carries a job's traffic, and the one that torch's backends would choose.

In: this node's address for the others, its host name, the kernel's tables. Out: the interface's name, or None; the
variables that make the backends use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from remote_agent.base.files import read_text
from remote_agent.wire.events import HOST_NAME, INTERFACE

RESOLVE_S = 5.0
_SIOCGIFADDR = 0x8915


# NCCL takes these interfaces only where it has no others; it compares the beginning of a name.
_NCCL_LAST = ("docker", "lo", "virbr")
GLOO, TENSORPIPE, NCCL = "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


async def resolve(name: str) -> list[str]:
    """Return the addresses of a name in the resolver's order; none if it finds none in time."""
    if name:
        with contextlib.suppress(OSError, UnicodeError, asyncio.TimeoutError):
            asking = asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
            return [str(entry[4][0]) for entry in await asyncio.wait_for(asking, RESOLVE_S)]
    return []


async def interface_of(address: str) -> str | None:
    """Return the interface with this address, or else the one of the default route."""
    own = own_addresses()
    named = next((own[one] for one in await resolve(address) if one in own), None)
    rows = (line.split() for line in read_text("/proc/net/route").splitlines())
    return named or next((row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"), None)


def own_addresses() -> dict[str, str]:
    """Return interfaces by address: each one's first IPv4 address, then all IPv6 addresses, as getifaddrs does."""
    addresses: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses[socket.inet_ntoa(answer[20:24])] = name
    rows = (line.split() for line in read_text("/proc/net/if_inet6").splitlines())
    addresses.update((str(ipaddress.IPv6Address(bytes.fromhex(row[0]))), row[5]) for row in rows if len(row) > 5)
    return addresses


class Sockets(NamedTuple):
    """The interfaces that the workers' backends should use."""

    variables: dict[str, str]
    """Variables to set for the workers; empty: nothing needs to change."""
    kind: str = ""
    """The kind of the notice: INTERFACE or HOST_NAME."""
    notice: str = ""


async def own_name_address() -> str | None:
    """Return the address that gloo and TensorPipe take for this machine: the first of its host name that it has."""
    return next((one for one in await resolve(socket.gethostname()) if _is_here(one)), None)


async def sockets(address: str, leads_to: str | None, env: Mapping[str, str]) -> Sockets:
    """Return what the workers of this node need so that other nodes reach them at its address.

    `leads_to`: from own_name_address; `env`: the environment of the workers, in which nothing is changed.
    """
    own = own_addresses()
    interface = next((own[one] for one in await resolve(address) if one in own), None)
    return choose(interface, leads_to, own, env)


def choose(interface: str | None, leads_to: str | None, own: Mapping[str, str], env: Mapping[str, str]) -> Sockets:
    """Return the variables and the notice; `interface`: the one with this node's address, `own`: names by address."""
    if interface == "lo":
        # All nodes are on this machine.
        return Sockets({})
    is_loopback = leads_to is None or ipaddress.ip_address(leads_to.partition("%")[0]).is_loopback
    name = f"the host name resolves to {leads_to}" if leads_to else "the host name resolves to no address of the host"
    if interface is None:
        if not is_loopback or GLOO in env:
            return Sockets({})
        text = f"{name}, and none of its interfaces has its `address`: gloo gives other hosts a loopback address"
        return Sockets({}, HOST_NAME, f"{text}; set {GLOO} in `env` of this host")
    wanted = {}
    # An address that no interface lists is a further one of some interface: nothing shows that it is wrong.
    if is_loopback or own.get(leads_to or "", interface) != interface:
        wanted = {GLOO: interface, TENSORPIPE: interface}
    chosen = nccl_choice(own.values())
    if chosen != interface and chosen.startswith(("docker", "lo")):
        wanted[NCCL] = f"={interface}"
    variables = {variable: value for variable, value in wanted.items() if variable not in env}
    if not variables:
        return Sockets({})
    what = name if GLOO in wanted else f"NCCL would choose {chosen}"
    return Sockets(variables, INTERFACE, f"{what}: the workers use {interface} instead ({', '.join(variables)})")


def nccl_choice(names: Iterable[str]) -> str:
    """Return the interface that NCCL takes first: one for InfiniBand, any other, then docker's, then loopback."""

    def order(name: str) -> int:
        last = next((place for place, prefix in enumerate(_NCCL_LAST) if name.startswith(prefix)), -1)
        return -2 if name.startswith("ib") else last

    return min(names, key=order, default="")


def _is_here(address: str) -> bool:
    """Tell whether this machine has the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trying:
        trying.bind((address, 0))
        return True
    return False
