"""One SSH connection, through jump hosts where there are any.

In: Settings. Out: an authenticated asyncssh connection, or HostError. A connection to a jump host is shared by all
hosts behind it, as long as any of them is connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import weakref
from typing import TYPE_CHECKING, Any

from supervisor.errors import HostError
from supervisor.inventory.sshconfig import config_files
from supervisor.ssh import reasons
from supervisor.ssh.reasons import Attempt
from supervisor.ssh.settings import Settings, for_hop, hops
from supervisor.ssh_library import asyncssh

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from supervisor.inventory import Host
    from supervisor.inventory.targets import Hop

    Progress = Callable[[str, str], None]

RESOLVE_DEADLINE_S = 10.0
CONNECT_DEADLINE_S = 20.0
# A dead connection is noticed after four intervals.
KEEPALIVE_S = 15.0
KEEPALIVE_COUNT = 3
# sshd drops connections at random when many arrive at once (MaxStartups): two more attempts, spread out.
RETRY_PAUSES_S = (0.3, 1.0)
MAX_ADDRESSES = 4
MAX_HOPS = 8


class _Client(asyncssh.SSHClient):
    """Records how far the handshake got; trusts only keys in known_hosts."""

    def __init__(self, attempt: Attempt, progress: Progress) -> None:
        self._attempt = attempt
        self._progress = progress

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        """Record the peer's address."""
        peer = conn.get_extra_info("peername")
        self._attempt.address = str(peer[0]) if peer else ""

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Record the offered key and refuse it: it is not among the trusted keys."""
        self._attempt.offered = key
        return False

    def begin_auth(self, username: str) -> None:
        """Record that the host key is trusted and authentication begins."""
        self._attempt.step = "auth"
        self._progress("auth", f"as {username}")


async def dial(host: Host, settings: Settings, progress: Progress) -> tuple[asyncssh.SSHClientConnection, Lease | None]:
    """Connect and authenticate; the caller closes the connection, then returns the lease. Raises HostError."""
    lease = await _jumps().lease(host, settings, progress) if settings.jump else None
    return await _over(lease, settings, progress), lease


async def _over(lease: Lease | None, settings: Settings, progress: Progress) -> asyncssh.SSHClientConnection:
    """Connect through the leased connection; return the lease if that fails."""
    try:
        return await _with_retries(settings, lease, progress)
    except BaseException:
        if lease is not None:
            await lease.give_back()
        raise


async def _with_retries(settings: Settings, lease: Lease | None, progress: Progress) -> asyncssh.SSHClientConnection:
    pauses = iter(RETRY_PAUSES_S)
    while True:
        attempt = Attempt()
        try:
            return await _once(settings, lease, progress, attempt)
        except (asyncssh.ConnectionLost, ConnectionResetError) as error:
            pause = next(pauses, None)
            if pause is None or attempt.step != "connect" or attempt.offered is not None:
                raise reasons.ssh_error(settings, attempt, error) from error
            await asyncio.sleep(pause)
        except asyncio.TimeoutError:
            raise reasons.timeout_error(settings.label, attempt.step, CONNECT_DEADLINE_S, settings.where) from None
        except (asyncssh.Error, OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise reasons.ssh_error(settings, attempt, error) from error


async def _once(
    settings: Settings, lease: Lease | None, progress: Progress, attempt: Attempt
) -> asyncssh.SSHClientConnection:
    options: dict[str, Any] = {"proxy_command": None}
    sock = None
    if lease is not None:
        options["tunnel"] = lease.connection
        progress("connect", f"{settings.where} through {settings.jump}")
    elif settings.proxy_command:
        options = {"proxy_command": settings.proxy_command, "tunnel": None}
        progress("connect", f"{settings.where} by ProxyCommand")
    else:
        sock = await _tcp(settings, progress)
        options.update(sock=sock, tunnel=None)
    try:
        return await asyncio.wait_for(_handshake(settings, progress, attempt, options), CONNECT_DEADLINE_S)
    except BaseException:
        if sock is not None:
            sock.close()
        raise


async def _handshake(
    settings: Settings, progress: Progress, attempt: Attempt, options: dict[str, Any]
) -> asyncssh.SSHClientConnection:
    keys = [str(path) for path in (*settings.keys, *settings.locked)]
    if settings.only_these and keys:
        public = await asyncio.to_thread(_public_halves, keys)
        # Ask the agent only for these keys: a server refuses after a few wrong ones.
        options["agent_identities"] = public or None
    return await asyncssh.connect(
        settings.alias,
        settings.port,
        username=settings.user,
        known_hosts=reasons.trusted_keys(settings),
        config=[str(path) for path in config_files()],
        client_keys=keys,
        ignore_encrypted=True,
        agent_path=settings.agent,
        client_factory=lambda: _Client(attempt, progress),
        password_auth=False,
        kbdint_auth=False,
        keepalive_interval=KEEPALIVE_S,
        keepalive_count_max=KEEPALIVE_COUNT,
        # Whatever ~/.ssh/config says: a node neither uses the operator's keys nor gets the operator's variables.
        agent_forwarding=False,
        send_env=[],
        login_timeout=CONNECT_DEADLINE_S,
        connect_timeout=None,
        **options,
    )


def _public_halves(files: list[str]) -> list[asyncssh.SSHKey]:
    public = []
    for file in files:
        with contextlib.suppress(OSError, asyncssh.KeyImportError):
            public.append(asyncssh.read_public_key(f"{file}.pub"))
    return public


async def _tcp(settings: Settings, progress: Progress) -> socket.socket:
    """Return a connected socket; try every address of the name. Raises HostError."""
    loop = asyncio.get_running_loop()
    progress("resolve", settings.host)
    try:
        addresses = await asyncio.wait_for(
            loop.getaddrinfo(settings.host, settings.port, family=settings.family, type=socket.SOCK_STREAM),
            RESOLVE_DEADLINE_S,
        )
    except asyncio.TimeoutError:
        raise reasons.timeout_error(settings.label, "resolve", RESOLVE_DEADLINE_S, settings.host) from None
    except (OSError, UnicodeError) as error:
        gai = error if isinstance(error, OSError) else socket.gaierror(socket.EAI_NONAME, str(error))
        raise reasons.network_error(settings, gai) from error
    progress("connect", settings.where)
    failure: OSError | None = None
    deadline = CONNECT_DEADLINE_S / min(len(addresses), MAX_ADDRESSES)
    for family, kind, protocol, _name, address in addresses[:MAX_ADDRESSES]:
        try:
            return await asyncio.wait_for(_connect_socket(settings, (family, kind, protocol), address), deadline)
        except asyncio.TimeoutError:
            failure = failure or OSError(110, "no answer")
        except OSError as error:
            failure = error
    if failure is None or failure.errno == 110:
        raise reasons.timeout_error(settings.label, "connect", CONNECT_DEADLINE_S, settings.where)
    raise reasons.network_error(settings, failure)


async def _connect_socket(settings: Settings, kind: tuple[int, int, int], address: Any) -> socket.socket:
    sock = socket.socket(*kind)
    try:
        sock.setblocking(False)
        if settings.bind:
            sock.bind((settings.bind, 0))
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


class Lease:
    """The use of a shared connection to a jump host."""

    def __init__(self, connection: asyncssh.SSHClientConnection, give_back: Callable[[], Awaitable[None]]) -> None:
        self.connection = connection
        self._give_back = give_back
        self._is_back = False

    async def give_back(self) -> None:
        """End this use; the last one closes the connection."""
        if not self._is_back:
            self._is_back = True
            await self._give_back()


@dataclasses.dataclass
class _Shared:
    """One connection to a jump host, and the number of its users."""

    task: asyncio.Task[tuple[asyncssh.SSHClientConnection, Lease | None]]
    users: int = 0


class _Jumps:
    """The connections to jump hosts of one event loop."""

    def __init__(self) -> None:
        self._shared: dict[object, _Shared] = {}

    async def lease(self, host: Host, settings: Settings, progress: Progress) -> Lease:
        """Return a connection to the last jump host before a target; raises HostError."""
        return await self._lease_chain(host, _chain(host, settings), progress)

    async def _lease_chain(self, host: Host, chain: list[Hop], progress: Progress) -> Lease:
        key = (tuple(chain), host.identity_file, host.known_hosts)
        shared = self._shared.get(key)
        if shared is not None and _is_dead(shared):
            shared = None
        if shared is None:
            shared = _Shared(asyncio.ensure_future(self._open(host, chain, progress)))
            self._shared[key] = shared
        shared.users += 1
        try:
            # Others wait for the same connection: cancelling one must not cancel it.
            connection, _before = await asyncio.shield(shared.task)
        except HostError as error:
            await self.release(key, shared)
            raise _of_jump_host(host, error) from error
        except BaseException:
            await self.release(key, shared)
            raise
        return Lease(connection, lambda: self.release(key, shared))

    async def _open(
        self, host: Host, chain: list[Hop], progress: Progress
    ) -> tuple[asyncssh.SSHClientConnection, Lease | None]:
        *before, last = chain
        lease = await self._lease_chain(host, before, progress) if before else None
        settings = dataclasses.replace(for_hop(host, last), jump=",".join(hop.host for hop in before) or None)

        def report(step: str, text: str) -> None:
            progress("connect", f"{settings.label}: {step} {text}")

        return await _over(lease, settings, report), lease

    async def release(self, key: object, shared: _Shared) -> None:
        """End one use; close the connection after the last one."""
        shared.users -= 1
        if shared.users:
            return
        if self._shared.get(key) is shared:
            del self._shared[key]
        shared.task.cancel()
        (result,) = await asyncio.gather(shared.task, return_exceptions=True)
        if isinstance(result, BaseException):
            return
        connection, before = result
        await hang_up(connection)
        if before is not None:
            await before.give_back()


def _chain(host: Host, settings: Settings) -> list[Hop]:
    """Return all jump hosts before a target in order, with those that ~/.ssh/config gives the first; raises HostError.

    All are resolved before the first connection: in a circle each connection would wait for the others.
    """
    chain = hops(host.name, settings.jump or "")
    while len(chain) <= MAX_HOPS:
        try:
            first = for_hop(host, chain[0])
        except HostError as error:
            raise _of_jump_host(host, error) from error
        before = hops(host.name, first.jump) if first.jump else []
        # `Host *` may name the jump host itself.
        before = [hop for hop in before if hop.host not in (chain[0].host, first.host)]
        if not before:
            return chain
        chain = [*before, *chain]
    raise HostError(host.name, "resolve", f"more than {MAX_HOPS} jump hosts: does ProxyJump lead in a circle?")


def _of_jump_host(host: Host, error: HostError) -> HostError:
    """Return the error of a jump host as that of the host behind it."""
    via = error.host if error.host.startswith("jump host") else "jump host"
    return HostError(host.name, error.step, f"{via}: {error.reason}", error.hint)


def _is_dead(shared: _Shared) -> bool:
    task = shared.task
    if not task.done():
        return False
    return task.cancelled() or task.exception() is not None or task.result()[0].is_closed()


async def hang_up(connection: asyncssh.SSHClientConnection) -> None:
    """Close an SSH connection; abort it if that takes too long."""
    connection.close()
    try:
        await asyncio.wait_for(connection.wait_closed(), 2.0)
    except asyncio.TimeoutError:
        connection.abort()
    except (asyncssh.Error, OSError):
        return


_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Jumps] = weakref.WeakKeyDictionary()


def _jumps() -> _Jumps:
    return _by_loop.setdefault(asyncio.get_running_loop(), _Jumps())
