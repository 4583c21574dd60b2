"""Exceptions of sockets and of asyncssh, told as reasons.

In: an exception, matched by its type. Out: HostError with step, reason and what to do next.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import TYPE_CHECKING

import asyncssh

from supervisor.ssh import hostkeys
from supervisor.ssh.errors import HostError

if TYPE_CHECKING:
    from supervisor.ssh.dial import Attempt
    from supervisor.ssh.settings import Settings

_ERRNO = {
    errno.ECONNREFUSED: ("connection refused", "is sshd running there, and is this its port?"),
    errno.EHOSTUNREACH: ("no route to host", "is the machine up, and is the address right?"),
    errno.ENETUNREACH: ("network unreachable", "check this machine's network or VPN"),
    errno.ETIMEDOUT: ("no answer", "is the machine up, and does a firewall let SSH through?"),
    errno.ECONNRESET: ("the connection was reset", "does a firewall or MaxStartups of sshd cut connections?"),
    errno.EMFILE: ("too many open files here", "raise the limit: ulimit -n 4096"),
}


def of_network(settings: Settings, error: OSError) -> HostError:
    """Return the reason for a TCP connection that did not come about."""
    if isinstance(error, socket.gaierror):
        hint = f"check ssh = {settings.alias!r} in the inventory, ~/.ssh/config and DNS"
        if error.errno == socket.EAI_AGAIN:
            hint = "the name server does not answer; try again, or write the address"
        return HostError(settings.label, "resolve", f"the name {settings.host} does not resolve", hint)
    text, hint = _ERRNO.get(error.errno or 0, (error.strerror or str(error), ""))
    return HostError(settings.label, "connect", f"{text}: {settings.where}", hint)


def of_time(label: str, step: str, seconds: float, where: str = "") -> HostError:
    """Return the reason for a step that ran past its deadline."""
    place = f": {where}" if where else ""
    hint = "is the machine up, and does a firewall let SSH through?" if step == "connect" else ""
    return HostError(label, step, f"timeout: no answer within {seconds:.0f} s{place}", hint)


def of_ssh(settings: Settings, attempt: Attempt, error: Exception) -> HostError:
    """Return the reason for an SSH connection that did not come about."""
    label, step = settings.label, attempt.step
    if isinstance(error, asyncssh.ChannelOpenError):
        return of_channel(settings, error)
    if isinstance(error, asyncssh.Error):
        return _of_protocol(settings, attempt, error)
    if isinstance(error, asyncio.IncompleteReadError):
        return HostError(label, step, f"{settings.where} closed the connection")
    if isinstance(error, OSError):
        return of_network(settings, error)
    return HostError(label, step, f"{settings.where}: {error}")


def _of_protocol(settings: Settings, attempt: Attempt, error: asyncssh.Error) -> HostError:
    label, step = settings.label, attempt.step
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return HostError(label, "connect", *hostkeys.complaint(settings, attempt.address, attempt.offered))
    if isinstance(error, asyncssh.KeyExchangeFailed):
        if hostkeys.is_known(settings, attempt.address):
            reason, hint = hostkeys.complaint(settings, attempt.address, None)
            return HostError(label, "connect", f"{reason} ({error.reason})", hint)
        hint = "sshd there is too old or too strict for this machine"
        return HostError(label, "connect", f"no common algorithm: {error.reason}", hint)
    if isinstance(error, asyncssh.PermissionDenied):
        return _auth_refused(settings)
    if isinstance(error, asyncssh.ConnectionLost):
        hint = "see sshd's log there (MaxStartups, AllowUsers, firewall)"
        return HostError(label, step, f"{settings.where} closed the connection: {error.reason}", hint)
    if isinstance(error, (asyncssh.ProtocolError, asyncssh.ProtocolNotSupported)) and step == "connect":
        return HostError(label, step, f"no SSH server at {settings.where}: {error.reason}", "check the port")
    if step == "auth":
        refused = _auth_refused(settings)
        return HostError(label, step, f"{refused.reason}; the server says: {error.reason}", refused.hint)
    return HostError(label, step, f"{settings.where}: {error.reason}")


def of_channel(settings: Settings, error: asyncssh.ChannelOpenError) -> HostError:
    """Return the reason for a channel that a server, or a jump host on the way, did not open."""
    if error.code == asyncssh.OPEN_CONNECT_FAILED:
        hint = "check the address as the jump host sees it"
        reason = f"{settings.where} is not reached from the jump host: {error.reason}"
        return HostError(settings.label, "connect", reason, hint)
    if error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
        hint = "sshd there must allow it: AllowTcpForwarding on a jump host, MaxSessions on a node"
        return HostError(settings.label, "connect", f"forbidden by the server: {error.reason}", hint)
    return HostError(settings.label, "connect", f"{settings.where}: {error.reason}")


def _auth_refused(settings: Settings) -> HostError:
    tried = [hostkeys.short(str(path)) for path in settings.keys]
    if settings.agent:
        tried.append("ssh-agent")
    hint = f"try by hand: ssh -p {settings.port} {settings.user}@{settings.host}"
    if settings.locked:
        locked = ", ".join(hostkeys.short(str(path)) for path in settings.locked)
        hint = f"{locked} needs a passphrase: ssh-add {hostkeys.short(str(settings.locked[0]))}"
    text = f"auth refused for user {settings.user}; keys tried: {', '.join(tried) or 'none, there is no key here'}"
    return HostError(settings.label, "auth", text, hint)
