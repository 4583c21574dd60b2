"""Turn exceptions of sockets and asyncssh into HostErrors; say which host keys are trusted.

In: an exception, matched by type; known_hosts files. Out: a HostError with step, reason and what to do next; trusted
keys for asyncssh.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import shlex
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from supervisor.errors import HostError, HostFailure
from supervisor.inventory.pattern import fold
from supervisor.ssh_library import asyncssh

if TYPE_CHECKING:
    from collections.abc import Iterable

    from supervisor.ssh.settings import Settings

_ERRNO = {
    errno.ECONNREFUSED: ("connection refused", "is sshd running there, and is this its port?"),
    errno.EHOSTUNREACH: ("no route to host", "is the machine up, and is the address right?"),
    errno.ENETUNREACH: ("network unreachable", "check this machine's network or VPN"),
    errno.ETIMEDOUT: ("no answer", "is the machine up, and does a firewall let SSH through?"),
    errno.ECONNRESET: ("the connection was reset", "does a firewall or MaxStartups of sshd cut connections?"),
    errno.EMFILE: ("too many open files here", "raise the limit: ulimit -n 4096"),
}


class NeedsSsh(HostError):
    """asyncssh does not get in with what it has; ssh may, by its other methods or by asking the user."""


class NeedsAnswer(HostError):
    """ssh asks something to which there is no answer yet."""


@dataclasses.dataclass
class Attempt:
    """The state of a connection attempt."""

    step: str = "connect"
    address: str = ""
    offered: asyncssh.SSHKey | None = None


def network_error(settings: Settings, error: OSError) -> HostError:
    """Return the error for a failed TCP connection."""
    if isinstance(error, socket.gaierror):
        hint = f"check ssh = {settings.alias!r} in the inventory, ~/.ssh/config and DNS"
        if error.errno == socket.EAI_AGAIN:
            hint = "the name server does not answer; try again, or write the address"
        return HostError(settings.label, "resolve", f"the name {settings.host} does not resolve", hint)
    text, hint = _ERRNO.get(error.errno or 0, (error.strerror or str(error), ""))
    return HostError(settings.label, "connect", f"{text}: {settings.where}", hint)


def timeout_error(label: str, step: str, seconds: float, where: str = "") -> HostError:
    """Return the error for a step that took too long."""
    place = f": {where}" if where else ""
    hint = "is the machine up, and does a firewall let SSH through?" if step == "connect" else ""
    return HostError(label, step, f"timeout: no answer within {seconds:.0f} s{place}", hint)


def ssh_error(settings: Settings, attempt: Attempt, error: Exception) -> HostError:
    """Return the error for a failed SSH connection."""
    label, step = settings.label, attempt.step
    if settings.jump is not None and step == "connect" and isinstance(error, (asyncssh.ConnectionLost, OSError)):
        reason = f"{settings.where} cannot be reached from the jump host {settings.jump.alias}"
        hint = "check the address as the jump host sees it; sshd there must allow it: AllowTcpForwarding, PermitOpen"
        return HostError(label, step, reason, hint)
    if isinstance(error, asyncssh.ChannelOpenError):
        return channel_error(settings, error)
    if isinstance(error, asyncssh.Error):
        return _protocol_error(settings, attempt, error)
    if isinstance(error, asyncio.IncompleteReadError):
        return HostError(label, step, f"{settings.where} closed the connection")
    if isinstance(error, OSError):
        return network_error(settings, error)
    # A key file that asyncssh cannot read, for example.
    return NeedsSsh(label, step, f"{settings.where}: {error}")


def _protocol_error(settings: Settings, attempt: Attempt, error: asyncssh.Error) -> HostError:
    label, step = settings.label, attempt.step
    if isinstance(error, asyncssh.HostKeyNotVerifiable) and "revoked" in error.reason:
        return HostError(label, "connect", f"the host key of {settings.where} is revoked: {error.reason}")
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        # ssh may accept a new key, but never a changed one.
        kind = HostError if is_known(settings, attempt.address) else NeedsSsh
        return kind(label, "connect", *complaint(settings, attempt.address, attempt.offered))
    if isinstance(error, asyncssh.KeyExchangeFailed):
        if is_known(settings, attempt.address):
            reason, hint = complaint(settings, attempt.address, None)
            return NeedsSsh(label, "connect", f"{reason} ({error.reason})", hint)
        hint = "sshd there is too old or too strict for this machine"
        return NeedsSsh(label, "connect", f"no common algorithm: {error.reason}", hint)
    if isinstance(error, asyncssh.PermissionDenied):
        return auth_refused(settings)
    if isinstance(error, asyncssh.ConnectionLost):
        hint = "see sshd's log there (MaxStartups, AllowUsers, firewall)"
        return HostError(label, step, f"{settings.where} closed the connection: {error.reason}", hint)
    if isinstance(error, (asyncssh.ProtocolError, asyncssh.ProtocolNotSupported)) and step == "connect":
        return HostError(label, step, f"no SSH server at {settings.where}: {error.reason}", "check the port")
    if step == "auth":
        refused = auth_refused(settings)
        return NeedsSsh(label, step, f"{refused.reason}; the server says: {error.reason}", refused.hint)
    return HostError(label, step, f"{settings.where}: {error.reason}")


def channel_error(settings: Settings, error: asyncssh.ChannelOpenError) -> HostError:
    """Return the error for a session that a server did not open."""
    if error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
        hint = "sshd there must allow it: MaxSessions"
        return HostError(settings.label, "connect", f"forbidden by the server: {error.reason}", hint)
    return HostError(settings.label, "connect", f"{settings.where}: {error.reason}")


def auth_refused(settings: Settings) -> HostError:
    """Return the error for a server that lets none of the keys in."""
    tried = [short(str(path)) for path in settings.keys]
    if settings.agent:
        tried.append("ssh-agent")
    hint = f"try by hand: {shlex.join(['ssh', *settings.target.options, settings.alias])}"
    text = f"auth refused for user {settings.user}; keys tried: {', '.join(tried) or 'none, there is no key here'}"
    return NeedsSsh(settings.label, "auth", text, hint)


# --- host keys

_cache: dict[tuple[object, ...], asyncssh.SSHKnownHosts] = {}


def trusted_keys(settings: Settings) -> asyncssh.SSHKnownHosts:
    """Return the host keys of the known_hosts files; missing files and damaged lines are ignored."""
    stamps: list[object] = []
    for path in settings.known_hosts:
        try:
            info = path.stat()
            stamps.append((path, info.st_mtime_ns, info.st_size))
        except OSError:
            stamps.append(path)
    # Many hosts share one file, which may hold thousands of keys.
    key = tuple(stamps)
    if key not in _cache:
        _cache.clear()
        _cache[key] = _load(settings)
    return _cache[key]


def _load(settings: Settings) -> asyncssh.SSHKnownHosts:
    known = asyncssh.import_known_hosts("")
    for path in settings.known_hosts:
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                known.load(line)
            except ValueError:
                continue
    return known


def is_known(settings: Settings, address: str) -> bool:
    """Tell whether any key of this server is trusted."""
    port = settings.port if settings.port != 22 else None
    keys = trusted_keys(settings).match(settings.host_key_alias or settings.host, address, port)
    return bool(keys[0] or keys[1])


def complaint(settings: Settings, address: str, offered: asyncssh.SSHKey | None) -> tuple[str, str]:
    """Return reason and hint for a host key that is not trusted."""
    name = settings.host_key_alias or settings.host
    server = name if settings.port == 22 else f"[{name}]:{settings.port}"
    files = " or ".join(short(str(path)) for path in settings.known_hosts[:2]) or "any known_hosts file"
    first = short(str(settings.known_hosts[0])) if settings.known_hosts else "~/.ssh/known_hosts"
    key = f" (it offers {offered.get_algorithm()} {offered.get_fingerprint()})" if offered is not None else ""
    if is_known(settings, address):
        reason = f"the host key of {server} has changed: it is not the one in {files}{key}"
        hint = (
            "the machine was reinstalled, or somebody intercepts the connection; if you know that it was reinstalled: "
            f"ssh-keygen -f {first} -R '{server}', then add the new key"
        )
        return reason, hint
    reason = f"host key of {server} is not in {files}{key}"
    if settings.jump is not None:
        by_hand = shlex.join(["ssh", *settings.target.options, settings.alias])
        return reason, f"log in once by hand and check the fingerprint: {by_hand}"
    if first == os.devnull:
        return reason, "keys in /dev/null cannot be kept: set UserKnownHostsFile, or known_hosts in HOSTS, to a file"
    return reason, f"check the fingerprint, then add it with: ssh-keyscan -p {settings.port} {settings.host} >> {first}"


def short(path: str) -> str:
    """Return a path with ~ for the home directory."""
    home = str(Path.home())
    return "~" + path[len(home) :] if path.startswith(home + "/") else path


def together(failures: Iterable[HostFailure]) -> tuple[HostFailure, ...]:
    """Return each failure once, with the folded names of all hosts that have it: `n[1-64]`."""
    hosts: dict[tuple[str, str, str], list[str]] = {}
    for failure in failures:
        hosts.setdefault((failure.step, failure.reason, failure.hint), []).append(failure.host)
    return tuple(HostFailure(fold(names), *what) for what, names in hosts.items())
