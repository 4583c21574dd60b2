"""The ports on which we listen for other nodes: any, or those of the job's range, which a firewall may let through.

In: a range as in `[job] ports`. Out: a listening socket, or one clear error.
"""

from __future__ import annotations

import errno
import socket

from remote_agent.wire import read_ports

# This many connections may wait before they are accepted; the kernel has a limit of its own.
BACKLOG = 16384


class NoFreePort(OSError):
    """Every port of the range is in use."""


def listening(ports: str = "", address: str = "") -> socket.socket:
    """Return a socket that listens at the first free port of a range, without one at any; raises NoFreePort, OSError.

    `address`: the only one to listen at; empty: all.
    """
    for port in read_ports(ports):
        try:
            return bind(address, port)
        except OSError as error:
            if not ports or error.errno != errno.EADDRINUSE:
                raise
    raise NoFreePort(f"no port is free in {ports}, the range that `ports` in [job] names")


def bind(address: str, port: int) -> socket.socket:
    """Return a listening socket; without an address one for IPv4 and IPv6, as two would get two ports."""
    if address:
        return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def reached_as(host: str, port: int = 0, ports: str = "", timeout_s: float = 20.0) -> socket.socket:
    """Return a listening socket that this machine reaches at the address `host`, at a port or one of a range.

    Connections wait until somebody accepts them. Raises NoFreePort, and OSError when `host` is not this machine.
    """
    server = bind("", port) if port else listening(ports)
    try:
        with socket.create_connection((host, server.getsockname()[1]), timeout_s):
            server.settimeout(timeout_s)
            server.accept()[0].close()
        server.settimeout(None)
        server.listen(BACKLOG)
    except BaseException:
        server.close()
        raise
    return server
